"""Weights quantized on the trainer's side, in the scheme the engine computes with.

`QuantizedSource` stands between the trainer's export and the publisher. Every matrix it is told to quantize becomes
two tensors of the manifest, the codes under the matrix's own name and the scales beside it, so that both are
announced, carried, digested and proven like any other tensor.

    int8        one float32 scale per output channel       w ≈ codes · weight_scale           |error| ≤ scale / 2
    fp8_block   float8_e4m3fn, one float32 scale per        w ≈ codes · weight_scale_inv       |error| ≤ |w| / 16,
                128 x 128 block                                                                 above 2^-6 of the scale

Names and shapes of the scales are those of Hugging Face checkpoints in these schemes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollbook.errors import SyncError
from rollbook.weights import TensorSpec, WeightSource

Scheme = Literal["int8", "fp8_block"]

BLOCK = 128
INT8_MAX = 127.0
FP8_MAX = 448.0
SCALE_SUFFIX = {"int8": "_scale", "fp8_block": "_scale_inv"}
CODE_DTYPE = {"int8": torch.int8, "fp8_block": torch.float8_e4m3fn}


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """The usual choice: linear layers, not norms, embeddings, heads or routers."""
    is_special = any(part in name for part in ("embed", "lm_head", "norm", "mlp.gate."))
    return len(shape) == 2 and name.endswith(".weight") and not is_special


class QuantizedSource:
    """A `WeightSource` whose matrices are codes and scales.

    Args:
        source: the trainer's export.
        scheme: of the engine.
        chosen: (name, shape) -> True for the tensors to quantize.
    """

    def __init__(
        self,
        source: WeightSource,
        scheme: Scheme,
        chosen: Callable[[str, tuple[int, ...]], bool] = is_matrix,
    ) -> None:
        self._source = source
        self._scheme: Scheme = scheme
        self._chosen = chosen

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        specs = []
        for spec in self._source.weight_specs():
            if not self._chosen(spec.name, spec.shape):
                specs.append(spec)
                continue
            code_dtype = CODE_DTYPE[self._scheme]
            rows, columns = spec.shape
            scale = (rows, 1) if self._scheme == "int8" else (-(-rows // BLOCK), -(-columns // BLOCK))
            dtype = str(code_dtype).removeprefix("torch.")
            specs.append(TensorSpec(name=spec.name, shape=spec.shape, dtype=dtype, num_bytes=rows * columns))
            specs.append(
                TensorSpec(
                    name=spec.name + SCALE_SUFFIX[self._scheme],
                    shape=scale,
                    dtype="float32",
                    num_bytes=4 * scale[0] * scale[1],
                )
            )
        return tuple(specs)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._source.export_weights():
            if not self._chosen(name, tuple(tensor.shape)):
                yield name, tensor
                continue
            if not bool(torch.isfinite(tensor).all()):
                raise SyncError(
                    f"{name} holds values that are not finite and cannot be quantized",
                    "the trainer has diverged: look at its gradients before publishing",
                )
            codes, scales = quantize(tensor, self._scheme)
            yield name, codes
            yield name + SCALE_SUFFIX[self._scheme], scales


def quantize(weight: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """[m, n] finite -> codes [m, n] and float32 scales ([m, 1], or [ceil(m/128), ceil(n/128)])."""
    exact = weight.detach().float()
    if scheme == "int8":
        scales = _scale(exact.abs().amax(1, keepdim=True), INT8_MAX)
        return (exact / scales).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales
    m, n = exact.shape
    rows, columns = -(-m // BLOCK), -(-n // BLOCK)
    blocks = pad(exact, (0, -n % BLOCK, 0, -m % BLOCK)).view(rows, BLOCK, columns, BLOCK)
    scales = _scale(blocks.abs().amax((1, 3)), FP8_MAX)
    codes = (blocks / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes.flatten(2, 3).flatten(0, 1)[:m, :n].contiguous(), scales


def dequantize(codes: Tensor, scales: Tensor, scheme: Scheme) -> Tensor:
    """[m, n] float32: what an engine computes with."""
    if scheme == "int8":
        return codes.float() * scales
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return codes.float() * spread[: codes.shape[0], : codes.shape[1]]


def _scale(largest: Tensor, code_max: float) -> Tensor:
    """Zero rows keep a scale of 1, so that nothing divides by zero."""
    return torch.where(largest > 0, largest / code_max, torch.ones_like(largest))
