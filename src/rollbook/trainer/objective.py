"""What the trainer asks of a loss: one packed micro batch in, its share of the mini batch's loss out.

Shares are added over micro batches and ranks, never averaged: an objective divides by `LossCounts` of the whole mini
batch, and never by what it counts in the micro batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from rollbook.algos.aggregate import LossCounts
from rollbook.observe.values import Ratio, Values
from rollbook.types import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The tokens of B sequences laid end to end, prompts included. Everything is on the trainer's device.

    Position i describes token i: `logprobs[i]` is ln p(token i | tokens before i of the same sequence).
    """

    cu_seqlens: Tensor
    """[B+1] int32."""
    sequence_idx: Tensor
    """[B] int64, on the CPU. Index into the batch's sequences."""
    action_mask: Tensor
    """[T] bool. Logprobs, entropies and values are computed here and 0 elsewhere."""
    loss_mask: Tensor
    """[T] bool. The part of the action mask that trains."""
    advantages: Tensor
    """[T] float32; 0 where the batch has none."""
    behavior_logprobs: Tensor
    """[T] float32."""
    proximal_logprobs: Tensor | None = None
    """[T] float32."""
    importance_weights: Tensor | None = None
    """[T] float32."""
    reference_logprobs: Tensor | None = None
    """[T] float32."""
    teacher_logprobs: Tensor | None = None
    """[T] float32."""
    values: Tensor | None = None
    """[T] float32. The critic's, before the update."""
    returns: Tensor | None = None
    """[T] float32."""


class Objective(Protocol):
    """The policy's loss."""

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        """This micro batch's share of the mini batch's loss, [], and metrics that merge by `+`.

        Args:
            micro: the packed tokens.
            logprobs: [T] float32 of the current policy, with a gradient.
            entropy: [T] float32, nats, with a gradient; None unless `trainer.measure_entropy`.
            counts: of the mini batch, all its micro batches and all ranks, after every mask was applied.
        """


@runtime_checkable
class NotingObjective(Protocol):
    """An objective that also keeps numbers of each token for its caller; ranks give each other theirs."""

    noted: dict[int, Floats]
    """Index into the batch's sequences -> [n] float32."""


class CriticObjective(Protocol):
    """The critic's loss."""

    def loss(self, micro: MicroBatch, values: Tensor, counts: LossCounts) -> tuple[Tensor, Values]:
        """As `Objective.loss`; `values` [T] float32 has the gradient."""


class SupervisedObjective:
    """Mean cross-entropy of the loss tokens: the warm-up on reference answers."""

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        """See Objective.

        >>> import torch
        >>> micro = MicroBatch(
        ...     cu_seqlens=torch.tensor([0, 3]), sequence_idx=torch.tensor([0]),
        ...     action_mask=torch.tensor([False, True, True]), loss_mask=torch.tensor([False, True, True]),
        ...     advantages=torch.zeros(3), behavior_logprobs=torch.zeros(3))
        >>> four = LossCounts(num_loss_tokens=4, num_loss_sequences=2, max_response_tokens=9)
        >>> loss, _ = SupervisedObjective().loss(micro, torch.tensor([0.0, -1.0, -3.0]), None, four)
        >>> loss.item()  # two of the mini batch's four tokens
        1.0
        """
        total = -logprobs.where(micro.loss_mask, 0.0).sum()
        num_tokens = int(micro.loss_mask.sum())
        values: Values = {"warmup/loss": Ratio(total.item(), num_tokens)}
        return total / max(counts.num_loss_tokens, 1), values
