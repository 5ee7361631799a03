"""The expectation of one step, as data: every stage's seconds, bytes and formula, and what was measured to get them.

`expectation.py` makes it before the first step; `step_plan.py` puts it to the work that a step really got.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rollbook.ledger.entry import Entry
from rollbook.ledger.hardware import Contention, MachineSpec
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.predict import (
    StepWork,
    refilled_ratio,
    rollout_of,
    rollout_wait_s,
    stages_after_rollout,
    update_s,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The held-out prompts as work, and how much longer some of them took than the coefficients of a step say."""

    work: StepWork
    ratio: float

    def seconds(self, model: ModelSpec, machine: MachineSpec, lengths: Sequence[int]) -> float:
        """For responses of these lengths in the order of their admission."""
        return self.ratio * sum(rollout_of(model, machine, self.work, lengths))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The expectation of one step, with everything it was made from."""

    model: ModelSpec
    machine: MachineSpec
    work: StepWork
    stages: dict[str, Entry]
    """Of every step."""
    occasional: dict[str, Entry]
    """Of a step that has them: an evaluation, a checkpoint."""
    shares: dict[str, float]
    """Share of the run's steps that has each of those."""
    evaluation: Evaluation | None = None
    """None where there are no held-out prompts."""
    generation_s: float = 0.0
    """Of engines alone, for one step's responses: what a step waits for less whatever it does besides."""

    def wait_after(self, beside_s: float, lengths: Sequence[int] = ()) -> Entry:
        """The step loop's wait for responses of these `lengths`, or else as long as planned, that were generated while
        it did something else for `beside_s`."""
        planned = self.stages["rollout"]
        if not self.work.generates_beside:
            return planned
        generation_s = self.generation_s * self._refilled_ratio(lengths)
        return planned.at(rollout_wait_s(generation_s, beside_s, self.contention))

    def _refilled_ratio(self, lengths: Sequence[int]) -> float:
        """Of engines whose slots are full: by the responses that the step got, as many as it generates in the mean."""
        if not len(lengths) or self.machine.decode is None or not self.work.most_running:
            return 1.0
        return refilled_ratio(self.machine.decode, self.work, lengths)

    @property
    def publication(self) -> Entry:
        """Stage "sync" without its probe."""
        machine = replace(self.machine, sync_base_s=0.0)
        alone = stages_after_rollout(self.model, machine, self.work)["sync"]
        return alone.scaled(self.contention.of("sync"))

    @property
    def probe_s(self) -> float:
        """Of one probe of every replica."""
        return self.machine.sync_base_s * self.contention.of("sync")

    def evaluation_for(self, lengths: Sequence[int]) -> Entry:
        """An evaluation, for the lengths that its responses really had, in the order of its prompts."""
        planned = self.occasional["eval"]
        if not len(lengths) or self.evaluation is None:
            return planned
        return planned.at(self.evaluation.seconds(self.model, self.machine, lengths))

    def rollout_for(self, lengths: Sequence[int]) -> Entry:
        """The rollout, for the lengths that its responses really had, in the order of their admission.

        Where unfinished ones are kept for the next step, as many tokens are generated as these have in the mean.
        """
        planned = self.stages["rollout"]
        if not len(lengths):
            return planned
        if self.work.most_running:
            return planned.at(planned.seconds * self._refilled_ratio(lengths))
        return planned.at(sum(rollout_of(self.model, self.machine, self.work, lengths)))

    def stages_for(self, num_sequences: int, mean_tokens: float) -> dict[str, Entry]:
        """The stages after the rollout, for what the filters really left: `num_sequences` of that mean length.

        The plan's own stages stay what was expected before the run; these say what the work of one step should
        take once it is known.
        """
        responses = max(mean_tokens - self.work.prompt_tokens, 1.0)
        limit = self.work.lengths.max_tokens
        work = replace(
            self.work,
            trained_frac=min(num_sequences / self.work.num_sequences, 1.0),
            lengths=LengthDistribution(limit, min(responses, float(limit))),
        )
        stages = stages_after_rollout(self.model, self.machine, work)
        return {name: entry.scaled(self.contention.of(name)) for name, entry in stages.items()}

    def update_for(
        self,
        *,
        num_micro_batches: float,
        num_tokens: float,
        num_updates: float,
        num_fresh_tokens: float = 0.0,
    ) -> Entry:
        """The policy's updates, for the micro batches that they really had, and for `num_fresh_tokens` of responses
        beside the batch that were scored in between."""
        seconds = update_s(
            self.model,
            self.machine,
            self.work,
            num_micro_batches=num_micro_batches,
            num_tokens=num_tokens,
            num_updates=num_updates,
        )
        assert self.machine.train is not None
        seconds += num_fresh_tokens / self.machine.train.forward_tokens_per_s
        return self.stages["train"].at(seconds * self.contention.of("train"))

    @property
    def contention(self) -> Contention:
        """What sides that work at the same time cost each other; nothing where they take turns."""
        measured = self.machine.contention if self.work.generates_beside else None
        return measured or Contention()

    def mean_seconds(self) -> dict[str, float]:
        """Seconds of every stage in the mean of all steps."""
        seconds = {name: entry.seconds for name, entry in self.stages.items()}
        return seconds | {name: entry.seconds * self.shares[name] for name, entry in self.occasional.items()}

    def as_json(self) -> dict[str, Any]:
        """For `plan.json`."""
        work, lengths = self.work, self.work.lengths
        return {
            "workload": {
                "num_groups": work.num_groups,
                "group_size": work.group_size,
                "prompt_tokens": work.prompt_tokens,
                "response_tokens": lengths.mean_tokens,
                "max_response_tokens": lengths.max_tokens,
                "num_slots": work.num_slots,
                "num_replicas": work.num_replicas,
                "micro_batch_tokens": work.micro_batch_tokens,
                "num_mini_batches": work.num_mini_batches,
                "num_epochs": work.num_epochs,
                "trained_frac": work.trained_frac,
            },
            "machine": {
                "name": self.machine.name,
                "device": self.machine.device,
                "model": self.machine.model,
                "dtype": self.machine.dtype,
                "peak_flops_per_s": self.machine.gemm_flops_per_s.get(self.machine.dtype, 0.0),
                "coefficients": asdict(self.machine),
            },
            "stages": {name: _entry_json(entry, 1.0) for name, entry in self.stages.items()}
            | {name: _entry_json(entry, self.shares[name]) for name, entry in self.occasional.items()},
        }


def _entry_json(entry: Entry, share: float) -> dict[str, Any]:
    """One stage in the mean of all steps, `share` of which have it."""
    return {
        "seconds": entry.seconds * share,
        "low": entry.seconds_low * share,
        "high": entry.seconds_high * share,
        "bytes": entry.bytes * share,
        "flops": entry.flops * share,
        "formula": entry.formula if share == 1 else f"({entry.formula}) x {share:.3g} of the steps",
        "source": entry.source,
    }
