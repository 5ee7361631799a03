"""The algorithm's loss as the trainer calls it, micro batch by micro batch.

Where a step makes one optimizer update and nothing reads proximal logprobs before it, nobody computed them: the
current policy's own numbers, before the update, are the proximal ones, also of stale tokens. The objective then notes
them, so that gap and mismatch are reported all the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from rollbook.algos.aggregate import LossCounts
from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.policy import PolicyTensors, ValueTensors, policy_objective, value_objective
from rollbook.observe.values import Values
from rollbook.trainer.objective import MicroBatch
from rollbook.types import Floats


@dataclass(slots=True)
class PolicyObjective:
    """Implements `trainer.objective.Objective` with the losses of `algos`."""

    config: AlgorithmConfig
    proximal_is_current: bool
    """That shortcut is in force."""
    noted: dict[int, Floats] = field(default_factory=dict)
    """sequence_idx -> [n] logprobs before the update, on the shortcut."""

    def loss(
        self, micro: MicroBatch, logprobs: Tensor, entropy: Tensor | None, counts: LossCounts
    ) -> tuple[Tensor, Values]:
        proximal = micro.proximal_logprobs
        if self.proximal_is_current:
            proximal = logprobs.detach()
            on_host, bounds = proximal.float().cpu().numpy(), micro.cu_seqlens.tolist()
            for idx, start, end in zip(micro.sequence_idx.tolist(), bounds, bounds[1:]):
                self.noted.setdefault(idx, on_host[start:end])
        tensors = PolicyTensors(
            logprobs=logprobs,
            loss_mask=micro.loss_mask,
            action_mask=micro.action_mask,
            cu_seqlens=micro.cu_seqlens,
            advantages=micro.advantages,
            behavior_logprobs=micro.behavior_logprobs,
            proximal_logprobs=proximal,
            importance_weights=micro.importance_weights,
            reference_logprobs=micro.reference_logprobs,
            teacher_logprobs=micro.teacher_logprobs,
            entropy_nats=entropy,
        )
        return policy_objective(tensors, self.config, counts)


@dataclass(slots=True)
class ValueObjective:
    """The critic's loss, likewise."""

    config: AlgorithmConfig

    def loss(self, micro: MicroBatch, values: Tensor, counts: LossCounts) -> tuple[Tensor, Values]:
        assert micro.values is not None and micro.returns is not None
        tensors = ValueTensors(
            values=values,
            old_values=micro.values,
            returns=micro.returns,
            loss_mask=micro.loss_mask,
            cu_seqlens=micro.cu_seqlens,
        )
        return value_objective(tensors, self.config, counts)
