"""What a simulation gives back: its steps as the trainer saw them, bars of a timeline, and the averages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.ledger.account import Range
from rollbook.planner.sim_scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class SimStep:
    """One step as the trainer saw it."""

    step: int
    start_s: float
    end_s: float
    wait_s: float
    """The trainer waited for groups."""
    work_s: float
    """Forward and training."""
    overhead_s: float
    """Switches, gathering, and the pause of the publication."""
    lent_s: float
    """Part of `wait_s` in which the training GPUs generated."""
    tail_s: float
    """From 90 % of the step's trajectories finished to the last one."""
    bubble_s: float
    """Seconds that GPUs wait for a dependency: the trainer's, or where they are shared those of the mean replica."""
    rollout_idle_frac: float
    """Share of the step in which a rollout GPU neither decodes nor prefills nor, where it is shared, trains."""
    train_idle_frac: float
    """Share of the step in which a training GPU computes nothing and generates nothing."""
    occupancy_frac: float
    """Live sequences over slots, mean over the replicas' time with work."""
    num_tokens: int
    """Response tokens trained on."""
    num_trajectories: int

    @property
    def step_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Interval:
    """One bar of the timeline."""

    lane: str
    """`trainer` or `replica N`."""
    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimResult:
    """What happened. Averages leave out the warm-up steps."""

    scenario: Scenario
    steps: tuple[SimStep, ...]
    staleness: dict[int, int]
    """Trained trajectories by staleness in steps."""
    intervals: tuple[Interval, ...]
    curve_at_s: NDArray[np.float64]
    curve_live: NDArray[np.float64]
    """Live sequences over all replicas, at `curve_at_s`."""
    num_admitted: int
    num_trained: int
    num_failed: int
    num_evicted: int
    num_running: int
    """Trajectories admitted and not yet trained, failed or evicted when the simulation ended."""
    num_preemptions: int
    """Running sequences that gave up their KV because the pool was full."""
    num_events: int
    lost_tokens: int
    """Sampled tokens thrown away: aborted at a publication or lost with a replica."""
    trained_mean_tokens: float
    evicted_mean_tokens: float
    """Mean response tokens of the evicted, NaN when none was: against that of the trained, the bias."""

    def _kept(self) -> tuple[SimStep, ...]:
        return self.steps[self.scenario.num_warmup_steps :]

    def _mean(self, name: str) -> float:
        kept = self._kept()
        total_s = sum(s.step_s for s in kept)
        return sum(getattr(s, name) * s.step_s for s in kept) / total_s if total_s else 0.0

    @property
    def step_s(self) -> float:
        kept = self._kept()
        return sum(s.step_s for s in kept) / len(kept)

    @property
    def rollout_idle_frac(self) -> float:
        """As the closed forms count it: `StepAccount.idle_frac`."""
        return self._mean("rollout_idle_frac")

    @property
    def occupancy_frac(self) -> float:
        return self._mean("occupancy_frac")

    @property
    def train_idle_frac(self) -> float:
        """As the closed forms count it; shared GPUs are idle together."""
        return self._mean("train_idle_frac")

    @property
    def tail_s(self) -> float:
        return sum(s.tail_s for s in self._kept()) / len(self._kept())

    @property
    def bubble_s(self) -> float:
        """Seconds of a step in which GPUs wait for a dependency."""
        kept = self._kept()
        return sum(s.bubble_s for s in kept) / len(kept)

    @property
    def tokens_per_s(self) -> float:
        kept = self._kept()
        return sum(s.num_tokens for s in kept) / sum(s.step_s for s in kept)

    def step_range(self, closed_form: Range) -> Range:
        """The step with the relative range of the closed form, whose seconds the events are made of."""
        value = self.step_s
        return Range(
            value=value,
            low=value * closed_form.low / closed_form.value,
            high=value * closed_form.high / closed_form.value,
        )
