"""What the ledger expects of the step in progress: the plan's figures, then those of the work that the step really got.

A filter drops groups, responses grow, micro batches fill differently: each of the `..._of` methods takes what became
known and puts the same coefficients to it. Nothing is measured here, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol, TypedDict

from rollbook.controller.evaluate import response_lengths
from rollbook.controller.plan import Plan
from rollbook.ledger.entry import Entry
from rollbook.observe.values import Values
from rollbook.observe.whole_step import Work
from rollbook.types import Group, TrainSequence, Trajectory

OF_A_BATCH = frozenset({"proximal", "reference", "teacher", "values", "adv", "train", "critic"})
"""Stages that a step without a batch has not."""


class Expected(TypedDict):
    """Keywords of a span."""

    expected_s: float | None
    expected_bytes: int | None
    """None where the ledger counts none."""


class Priced(Protocol):
    """A stage or a hand-over that the books know."""

    @property
    def seconds(self) -> float: ...
    @property
    def bytes(self) -> float: ...


def as_expected(priced: Priced | None) -> Expected:
    """What a span carries of it; nothing where the books do not know it."""
    if priced is None:
        return Expected(expected_s=None, expected_bytes=None)
    return Expected(expected_s=priced.seconds, expected_bytes=round(priced.bytes) or None)


def _lengths_of(groups: Sequence[Group]) -> list[int]:
    """Response tokens in the order of admission."""
    in_order = sorted(groups, key=lambda group: group.group_id)
    return [max(t.num_response_tokens, 1) for group in in_order for t in group.scored]


@dataclass(kw_only=True)
class StepPlan:
    """Expected seconds and FLOPs of each stage; of none, where a run has no plan."""

    plan: Plan | None = None
    """What was expected of each stage before the run."""
    stages: Mapping[str, Entry] = field(default_factory=dict)
    """Of this step: the plan's, and from the moment the work is known, what that should take."""

    def begin_step(self) -> None:
        """Expect what the plan says."""
        self.stages = {} if self.plan is None else self.plan.stages

    def rollout_of(self, groups: Sequence[Group]) -> None:
        """Expect the rollout of the responses which the step got."""
        if self.plan is not None:
            self.stages = {**self.stages, "rollout": self.plan.rollout_for(_lengths_of(groups))}

    def wait_after(self, beside_s: float, groups: Sequence[Group] = ()) -> None:
        """Expect the wait for these groups of engines that run ahead, after so many seconds of other stages."""
        if self.plan is not None:
            wait = self.plan.wait_after(beside_s, _lengths_of(groups))
            self.stages = {**self.stages, "rollout": wait}

    def publication(self) -> Expected:
        """What the span of a publication carries, whose probe has one of its own."""
        if self.plan is None or "sync" not in self.stages:
            return self.of("sync")
        self.stages = {**self.stages, "sync": self.plan.publication}
        return self.of("sync")

    def probe_of(self, asked_frac: float) -> Expected:
        """What the span of a probe carries that this share of the replicas had a slot for."""
        if self.plan is None:
            return as_expected(None)
        probe_s = self.plan.probe_s * asked_frac
        sync = self.stages.get("sync", self.plan.publication.scaled(0.0))
        self.stages = {**self.stages, "sync": replace(sync, seconds=sync.seconds + probe_s)}
        return Expected(expected_s=probe_s, expected_bytes=None)

    def batch_of(self, num_sequences: int, num_tokens: int) -> None:
        """Expect the stages after the rollout of so many sequences with so many tokens in all."""
        if self.plan is not None:
            self.stages = {**self.stages, **self.plan.stages_for(num_sequences, num_tokens / num_sequences)}

    def updates_of(self, values: Values, fresh: Sequence[TrainSequence]) -> None:
        """Expect the updates of the micro batches that they had, and of what was scored beside them.

        Args:
            values: metrics of the updates.
            fresh: sequences that were scored between them.
        """
        if self.plan is None:
            return
        counts = {
            name: values[metric].result() if metric in values else 0.0
            for name, metric in (
                ("num_micro_batches", "trainer/actor_micro_batches"),
                ("num_tokens", "trainer/actor_tokens"),
                ("num_updates", "trainer/actor_updates"),
            )
        }
        num_fresh_tokens = sum(sequence.num_tokens for sequence in fresh)
        train = self.plan.update_for(**counts, num_fresh_tokens=num_fresh_tokens)
        self.stages = {**self.stages, "train": train}

    def evaluation_of(self, answers: Sequence[Trajectory]) -> Expected:
        """What an evaluation with these answers should have taken."""
        if self.plan is None:
            return as_expected(None)
        return as_expected(self.plan.evaluation_for(response_lengths(answers)))

    def leave_out(self, stages: Set[str]) -> None:
        """Expect a step that does not have these stages."""
        self.stages = {name: entry for name, entry in self.stages.items() if name not in stages}

    def of(self, stage: str) -> Expected:
        """What the span of a stage carries."""
        entry = self.stages.get(stage)
        if entry is None and self.plan is not None:
            entry = self.plan.occasional.get(stage)
        return as_expected(entry)

    def step_s(self, *, saves: bool = False) -> float | None:
        """Of the stages one after the other. Of a rollout beside the training, only the wait for it is a stage.

        Args:
            saves: the step writes a checkpoint.
        """
        if not self.stages:
            return None
        checkpoint_s = (self.of("checkpoint")["expected_s"] or 0.0) if saves else 0.0
        return sum(entry.seconds for entry in self.stages.values()) + checkpoint_s

    def work(self, num_generated: float, *, num_gpus: int) -> Work | None:
        """FLOPs of the step: what was expected of its batch, and of the tokens that were sampled. None without a plan.

        Args:
            num_generated: response tokens of everything that ended in the step.
            num_gpus: that the run has; 0 on a host without.
        """
        if self.plan is None:
            return None
        machine, work = self.plan.machine, self.plan.work
        flops = {stage: entry.flops for stage, entry in self.stages.items() if entry.flops}
        planned = work.num_sequences * work.lengths.mean_tokens
        if "rollout" in flops and planned:
            flops["rollout"] *= num_generated / planned
        peak = machine.gemm_flops_per_s.get(machine.dtype, 0.0)
        return Work(flops=flops, peak_flops_per_s=peak * max(num_gpus, 1))
