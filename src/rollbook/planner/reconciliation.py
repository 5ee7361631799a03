"""What a reconciliation says: each stage as planned and as measured, the measured waterfall, and what deserves work."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.planner.expected import Expectation, Expected

NO_RANGE = "no range"
"""Verdict of a stage whose expectation does not say how far it may be off: the ratio is all there is."""
BUSY = "waited for a core"
"""Verdict of a stage that would have been as planned without that."""
NONE_PLANNED = "none planned"
"""Verdict of a stage that the plan knows and gave no seconds, such as a wait: there is no ratio to judge it by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage: planned before the run, expected of the work that it got, and measured."""

    stage: str
    measured_s: float
    planned: Expected | None
    expected: Expected | None
    """The plan, where the run does not say what it expected of the work."""
    least_s: float = 0.0
    """Fewer seconds more or less than expected are too short to judge, whatever the ratio."""
    waited_s: float = 0.0
    """Of the measured seconds: a thread could have run and got no core."""

    @property
    def work_ratio(self) -> float | None:
        """Expected of the work over planned: how much other the work was."""
        if self.planned is None or self.expected is None or self.planned.is_none:
            return None
        return self.expected.seconds / self.planned.seconds

    @property
    def ratio(self) -> float | None:
        """Measured over expected of the work: how much slower the machine was than the ledger says."""
        if self.expected is None or self.expected.is_none:
            return None
        return self.measured_s / self.expected.seconds

    @property
    def beyond_s(self) -> float:
        """Seconds beyond what was expected: none within its range, all of them where nothing was planned."""
        if self.verdict not in ("slower", BUSY, NO_RANGE, NONE_PLANNED, "not planned"):
            return 0.0
        return max(self.measured_s - (self.expected.seconds if self.expected else 0.0), 0.0)

    @property
    def own_beyond_s(self) -> float:
        """Of them, those in which it did not wait for a core: work on the stage can win these alone."""
        return 0.0 if self.verdict == BUSY else max(self.beyond_s - self.waited_s, 0.0)

    @property
    def verdict(self) -> str:
        if self.expected is None:
            return "not planned"
        if not self.expected.is_none and not self.expected.has_range:
            return NO_RANGE
        if self.expected.low <= self.measured_s <= self.expected.high:
            return "as planned"
        if abs(self.measured_s - self.expected.seconds) < self.least_s:
            return "too short to judge"
        if self.measured_s < self.expected.low:
            return "faster"
        if self.measured_s - self.waited_s <= self.expected.high:
            return BUSY
        return NONE_PLANNED if self.expected.is_none else "slower"

    def as_json(self) -> dict[str, object]:
        planned, expected = self.planned, self.expected
        return {
            "stage": self.stage,
            "planned_s": planned.seconds if planned else None,
            "expected_s": expected.seconds if expected else None,
            "low_s": expected.low if expected else None,
            "high_s": expected.high if expected else None,
            "measured_s": self.measured_s,
            "work_ratio": self.work_ratio,
            "ratio": self.ratio,
            "core_wait_s": self.waited_s,
            "verdict": self.verdict,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLoss:
    """One step down the measured waterfall."""

    loss: str
    frac: float
    """Of the peak over the step; of the step's time when the peak is unknown."""
    beyond_frac: float
    """The part of `frac` that the plan did not expect."""

    def as_json(self) -> dict[str, object]:
        return {"loss": self.loss, "frac": self.frac, "beyond_plan_frac": self.beyond_frac}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deserving:
    """A stage worth work, with what could be won."""

    stage: str
    seconds: float
    why: str

    def as_json(self) -> dict[str, object]:
        return {"stage": self.stage, "seconds": self.seconds, "why": self.why}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciliation:
    """The result."""

    source: str
    expectation: Expectation
    first_step: int
    last_step: int
    num_steps: int
    left_out: tuple[int, ...]
    """Steps between them that no figure holds; the notes say why."""
    step: StageResult
    stages: tuple[StageResult, ...]
    mfu_frac: float | None
    waterfall: tuple[MeasuredLoss, ...]
    deserving: tuple[Deserving, ...]
    notes: tuple[str, ...] = field(default=())

    def as_json(self) -> dict[str, object]:
        """For `reconcile --json`."""
        return {
            "source": self.source,
            "plan": self.expectation.source,
            "steps": {
                "first": self.first_step,
                "last": self.last_step,
                "count": self.num_steps,
                "left_out": list(self.left_out),
            },
            "step": self.step.as_json(),
            "stages": [s.as_json() for s in self.stages],
            "mfu_frac": self.mfu_frac,
            "waterfall": [loss.as_json() for loss in self.waterfall],
            "deserve_work": [d.as_json() for d in self.deserving],
            "notes": list(self.notes),
        }
