"""From token losses to one number, with the denominator of the whole mini batch.

A mode is a numerator, computed from one packed micro batch, and a denominator, computed from counts of the
*mini batch over all ranks*. Contributions of micro batches and ranks are added, never averaged, so the result
does not depend on how the batch was split. Counts are of loss tokens (and of sequences that have one): what a
mask takes from the numerator leaves the denominator too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.algos.packed import sequence_counts, sequence_sums
from rollbook.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """What the denominators are made of, over the mini batch and all ranks (or over one micro batch)."""

    num_loss_tokens: int
    """Tokens with `loss_mask`."""
    num_loss_sequences: int
    """Sequences with at least one loss token."""
    max_response_tokens: int
    """The token limit of a response: a constant of the run."""


@dataclass(frozen=True, slots=True)
class Aggregation:
    """One mode: loss = numerator(token losses) / denominator(counts)."""

    numerator: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(losses [T], loss_mask [T], cu_seqlens [B+1]) -> []."""
    denominator: Callable[[LossCounts], float]


def _token_sum(losses: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return losses.where(loss_mask, 0.0).sum()


def _sum_of_token_means(losses: Tensor, loss_mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    sums = sequence_sums(losses.where(loss_mask, 0.0), cu_seqlens)
    counts = sequence_counts(loss_mask, cu_seqlens).to(losses.dtype)
    return (sums / counts.clamp(min=1)).sum()


AGGREGATIONS: Mapping[str, Aggregation] = {
    "token_mean": Aggregation(_token_sum, lambda n: n.num_loss_tokens),
    "sequence_mean_token_mean": Aggregation(_sum_of_token_means, lambda n: n.num_loss_sequences),
    "sequence_mean_token_sum": Aggregation(_token_sum, lambda n: n.num_loss_sequences),
    "sequence_mean_token_sum_norm": Aggregation(
        _token_sum, lambda n: n.num_loss_sequences * n.max_response_tokens
    ),
}
"""DAPO; GRPO; RLOO and sequence-level REINFORCE; Dr.GRPO."""


def aggregate(
    losses: Tensor, loss_mask: Tensor, cu_seqlens: Tensor, *, mode: str, counts: LossCounts
) -> Tensor:
    """This micro batch's share of the mini batch's loss.

    Args:
        losses: [T]. Not read where `loss_mask` is False.
        loss_mask: [T] bool.
        cu_seqlens: [B+1] int32. A sequence is never split over micro batches.
        mode: a key of AGGREGATIONS.
        counts: of the whole mini batch, over all ranks.
    Returns:
        [] of the losses' dtype. Sum it over micro batches and ranks. Exactly 0, with a gradient of zeros, when
        nothing is left to train.

    >>> import torch
    >>> cu, whole = torch.tensor([0, 6]), LossCounts(num_loss_tokens=8, num_loss_sequences=2, max_response_tokens=9)
    >>> six = aggregate(torch.ones(6), torch.ones(6, dtype=torch.bool), cu, mode="token_mean", counts=whole)
    >>> two = aggregate(3 * torch.ones(2), torch.ones(2, dtype=torch.bool), torch.tensor([0, 2]),
    ...                 mode="token_mean", counts=whole)
    >>> (six + two).item()  # (6 x 1 + 2 x 3) / 8, not the mean of 1 and 3
    1.5
    """
    aggregation = AGGREGATIONS[mode]
    numerator = aggregation.numerator(losses, loss_mask, cu_seqlens)
    denominator = aggregation.denominator(counts)
    if denominator <= 0:
        if bool(loss_mask.any()):
            raise DataError(
                f"{int(loss_mask.sum())} loss tokens in a micro batch and a {mode} denominator of {denominator:g}",
                "count loss tokens of the mini batch after every mask was applied",
            )
        return numerator * 0.0
    return numerator / denominator


def loss_counts(loss_mask: Tensor, cu_seqlens: Tensor, *, max_response_tokens: int) -> LossCounts:
    """Counts of one packed [T] batch; add them over micro batches and ranks for the whole."""
    per_sequence = sequence_counts(loss_mask, cu_seqlens)
    num_tokens, num_sequences = torch.stack([per_sequence.sum(), (per_sequence > 0).sum().double()]).tolist()
    return LossCounts(
        num_loss_tokens=int(num_tokens),
        num_loss_sequences=int(num_sequences),
        max_response_tokens=max_response_tokens,
    )
