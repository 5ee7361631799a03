"""Deliberate mismatch: the engine computes with rounded weights, so that one sees what corrections are for.

    publication ──► live weights (proven by digest) ──► rounded copy ──► decode steps
                    what was sent, untouched            made when the version is adopted

Codes are decoded at once ("fake quantization"): the arithmetic stays that of the engine's dtype and only the
weights differ, as they would in a quantized engine. The versions stay proven, because the proof is about what
was sent; what the rounding does shows in the logprob gap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rollbook.modeling.load import LoadedModel
from rollbook.rollout.config import Mismatch
from rollbook.rollout.native.model_runner import engine_model

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""


def _integers(weight: Tensor, num_bits: int) -> Tensor:
    """Symmetric codes with one scale a row: the output channel of a linear layer."""
    largest = 2 ** (num_bits - 1) - 1
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / largest
    rounded: Tensor = (weight / scale).round() * scale
    return rounded


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    codes: Tensor = (weight / scale).to(torch.float8_e4m3fn)
    return codes.to(weight.dtype) * scale


ROUNDINGS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "int8": lambda weight: _integers(weight, 8),
    "int4": lambda weight: _integers(weight, 4),
    "fp8": _fp8,
    "bf16": lambda weight: weight.to(torch.bfloat16).to(weight.dtype),
}


def is_rounded(name: str, tensor: Tensor) -> bool:
    """The layers' matrices, as quantized engines choose them: norms (vectors), embeddings and the head keep their
    precision."""
    return tensor.ndim == 2 and ".layers." in f".{name}"


class RoundedCopy:
    """The model that a mismatched engine computes with, beside the live one that publications write."""

    def __init__(self, live: LoadedModel, mismatch: Mismatch) -> None:
        self._live = live
        self._round = ROUNDINGS[mismatch]
        own = engine_model(live, dtype=live.dtype, device=live.device, share_weights=False)
        self.model = replace(own, source=f"{live.source}, rounded to {mismatch}")
        self.error_frac = 0.0
        """|rounded - live| / |live|, norms over the rounded matrices, of the newest version."""
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the live weights anew: the version that was just adopted."""
        live, error, size = self._live.named_tensors(), 0.0, 0.0
        for name, target in self.model.named_tensors().items():
            source = live[name]
            if not is_rounded(name, source):
                target.copy_(source)
                continue
            weight = source.float()
            rounded = self._round(weight)
            error += float((rounded - weight).square().sum())
            size += float(weight.square().sum())
            target.copy_(rounded)
        self.error_frac = (error / size) ** 0.5 if size else 0.0
