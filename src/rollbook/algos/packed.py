"""Reductions over packed tokens: [T] token values and [B] sequence values, joined by `cu_seqlens` [B+1]."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rollbook.errors import DataError

LOG_RATIO_LIMIT = 20.0
"""Differences of logprobs are clamped to +-this before exp(), so that one broken token cannot overflow a sum.
exp(20) is 5e8, far outside any bound that a clip or a correction leaves standing."""


def require_finite(mask: Tensor, **named: Tensor | None) -> None:
    """Raise DataError when one of the named [T] tensors is not finite under `mask` [T]. None is skipped."""
    given = {name: values for name, values in named.items() if values is not None}
    bad = torch.stack([(~torch.isfinite(values.detach()) & mask).sum() for values in given.values()]).tolist()
    for name, num_bad in zip(given, bad):
        if num_bad:
            raise DataError(
                f"{num_bad} of {int(mask.sum())} {name} values under the loss mask are not finite",
                "the step is not applied; look at the engine and the weights of this version (rollbook diagnose)",
            )


def log_ratios(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """[T] ln(numerator / denominator) from two logprobs, 0 where `mask` is False, within +-LOG_RATIO_LIMIT.

    Masked tokens may hold -inf: they are zeroed first so that no NaN reaches a gradient.
    """
    difference = numerator.where(mask, 0.0) - denominator.where(mask, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def sequence_sums(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] sums of the [T] values of each sequence; 0 for an empty one. Deterministic, unlike a scatter."""
    lengths = cu_seqlens.diff().to(torch.int64)
    return torch.segment_reduce(values, "sum", lengths=lengths, initial=0.0, unsafe=True)


def sequence_maxima(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] maxima of the [T] values of each sequence, at least 0."""
    lengths = cu_seqlens.diff().to(torch.int64)
    return torch.segment_reduce(values, "max", lengths=lengths, initial=0.0, unsafe=True)


def sequence_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[B] float64 counts of True in `mask` [T]."""
    return sequence_sums(mask.to(torch.float64), cu_seqlens)


class _PerToken(torch.autograd.Function):
    """Its gradient is a segment sum. That of `repeat_interleave` adds atomically: other bits at every call on CUDA."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cu_seqlens: Tensor) -> Tensor:
        ctx.save_for_backward(cu_seqlens)
        return values.repeat_interleave(cu_seqlens.diff().to(torch.int64))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (cu_seqlens,) = ctx.saved_tensors
        return sequence_sums(gradients[0].contiguous(), cu_seqlens), None


def per_token(values: Tensor, cu_seqlens: Tensor) -> Tensor:
    """[T] values of the sequence that each token belongs to, from [B]. Deterministic, its gradient too."""
    spread: Tensor = _PerToken.apply(values, cu_seqlens)  # type: ignore[no-untyped-call]
    return spread
