"""Plan against measurement: which stage lost which seconds, and where the peak of the step really went.

    plan.json, or a workload    ─►  Expectation ─┐
    expected_s/... of the run   ─►  its work ────┼─►  Reconciliation: stages, waterfall, what deserves work
    timing_s/... of a log       ─►  means a step ┘

Two causes are told apart. A step may have had other work than was planned (responses longer, groups filtered): the
run says what the ledger expects of the work each step got; of another system's log that is the account with the
lengths that it measured. And the machine may have been slower than the ledger says
for that work: this alone is a loss.

A stage's loss is its share of the step's GPU time beyond what its FLOPs need at peak. It splits into what the plan
expected to lose and what was lost beyond the plan; the shares of all stages, of uncovered time and the MFU add up
to one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import DataError
from rollbook.observe.catalogue import STAGES, STAGES_OUTSIDE_STEP
from rollbook.planner.expected import INSIDE_ROLLOUT, Expectation, Expected, is_in_step
from rollbook.planner.words import percent, seconds

Means = Mapping[str, float]
"""Metric name -> mean over the steps looked at."""

_NUM_WARMUP_STEPS = 2
_NUM_DESERVING = 3


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
            "steps": {"first": self.first_step, "last": self.last_step, "count": self.num_steps},
            "step": self.step.as_json(),
            "stages": [s.as_json() for s in self.stages],
            "mfu_frac": self.mfu_frac,
            "waterfall": [loss.as_json() for loss in self.waterfall],
            "deserve_work": [d.as_json() for d in self.deserving],
            "notes": list(self.notes),
        }


# -- plan against measurement


def means_of(
    steps: NDArray[np.int64],
    values: Mapping[str, NDArray[np.float64]],
    *,
    first: int | None,
    last: int | None,
) -> tuple[dict[str, float], int, int, int]:
    """Mean seconds of each timed stage over the steps looked at, with the first, the last and their number.

    The first two steps of a longer run are left out, and the first of a short one: they compile, load, warm up, and
    wait for engines that started with them. A stage that some steps do
    not have (a checkpoint) counts as zero there.

    Raises:
        DataError: no step is left, or the log times nothing.
    """
    if first is None and len(steps) > 3 * _NUM_WARMUP_STEPS:
        first = int(steps[_NUM_WARMUP_STEPS])
    elif first is None and len(steps) > 1:
        first = int(steps[1])
    keep = np.ones(len(steps), bool)
    keep &= steps >= (first if first is not None else steps.min(initial=0))
    keep &= steps <= (last if last is not None else steps.max(initial=0))
    if "timing_s/step" in values:
        keep &= np.isfinite(values["timing_s/step"]) & (values["timing_s/step"] > 0)
    if not keep.any():
        asked = [f"from {first}"] if first is not None else []
        asked += [f"up to {last}"] if last is not None else []
        held = f"holds steps {steps.min()} to {steps.max()}" if len(steps) else "holds no step"
        raise DataError(
            f"no timed step {' '.join(asked)}".rstrip(),
            f"the log {held}; give a range of it, or a log, with seconds of a step above 0",
        )
    means = {}
    for name, series in values.items():
        if name.startswith(("timing_s/", "expected_s/", "core_wait_s/")):
            means[name] = float(np.nan_to_num(series[keep]).mean())
        elif np.isfinite(series[keep]).any():
            means[name] = float(np.nanmean(series[keep]))
    if "timing_s/step" not in means:
        raise DataError(
            "the log times no step (timing_s/step)",
            "give one that holds the seconds of each step (TRL's: step_time)",
        )
    kept = steps[keep]
    return means, int(kept[0]), int(kept[-1]), int(keep.sum())


def reconcile(
    expectation: Expectation,
    means: Means,
    *,
    source: str,
    for_work: Expectation | None = None,
    first_step: int = 0,
    last_step: int = 0,
    num_steps: int = 1,
) -> Reconciliation:
    """Compare an expectation with mean measured seconds.

    Args:
        for_work: the same for the work that the steps really got, where `means` hold no `expected_s/...`.
    """
    before = _as_timed(expectation, means)
    if for_work is None:
        expectation = _for_the_work(before, means)
    else:
        expectation = replace(_as_timed(for_work, means), notes=before.notes)
    stages = _stage_results(before, expectation, means)
    step_s = means["timing_s/step"]
    in_step = [s for s in stages if s.stage not in STAGES_OUTSIDE_STEP]
    step = StageResult(
        stage="step",
        measured_s=step_s,
        planned=_whole_step(before),
        expected=_whole_step(expectation),
        waited_s=sum(s.waited_s for s in in_step),
    )
    mfu_frac, losses = _waterfall(expectation, in_step, step_s)
    return Reconciliation(
        source=source,
        expectation=expectation,
        first_step=first_step,
        last_step=last_step,
        num_steps=num_steps,
        step=step,
        stages=tuple(stages),
        mfu_frac=mfu_frac,
        waterfall=tuple(losses),
        deserving=tuple(_deserving(expectation, in_step, step)),
        notes=_of_the_machine(in_step, means)
        + _impossible(mfu_frac)
        + expectation.notes
        + tuple(_notes(expectation, stages)),
    )


def _as_timed(expectation: Expectation, means: Means) -> Expectation:
    """`expectation` by the stages that these steps had and the log times."""
    return _with_hand_overs_inside(_with_peak(_that_came(expectation, means), means), means)


_MOST_MFU_FRAC = 0.75
"""No job computes more of the peak: what was expected is not what was run."""


def _impossible(mfu_frac: float | None) -> tuple[str, ...]:
    if mfu_frac is None or mfu_frac <= _MOST_MFU_FRAC:
        return ()
    return (
        f"the expected work in the measured seconds would be {100 * mfu_frac:.0f} % of the peak, more than any job "
        "reaches: it is not the work, or not the GPUs, of this log",
    )


_VISIBLE_WAIT_FRAC = 0.05
"""Share of a step from which waiting for cores is worth a word."""
_OWN_CORE_FRAC = 0.8
"""Share of the cores' seconds from which a run that waits for them waits for itself."""


def _of_the_machine(stages: list[StageResult], means: Means) -> tuple[str, ...]:
    """That stages waited for a core: what they lost so no work on them wins back."""
    waited = sorted((s for s in stages if s.waited_s > 0), key=lambda s: -s.waited_s)
    if sum(s.waited_s for s in waited) < _VISIBLE_WAIT_FRAC * means["timing_s/step"]:
        return ()
    told = ", ".join(
        f"{s.stage} {percent(s.waited_s / s.measured_s)}"
        for s in waited[:_NUM_DESERVING]
        if s.waited_s > _VISIBLE_WAIT_FRAC * s.measured_s
    )
    own_frac = means.get("host/own_core_frac", 0.0)
    if own_frac >= _OWN_CORE_FRAC:
        why = f"the run's own threads had {percent(own_frac)} of the cores' seconds: give it more, or fewer threads"
    else:
        why = f"the run itself used {percent(own_frac)} of them, others had the rest: measure again on a quiet machine"
    return (f"the machine was busy: stages waited for a core, of their seconds {told}; {why}",)


def _whole_step(expectation: Expectation) -> Expected:
    return Expected(
        seconds=expectation.step_s,
        low=expectation.step_s * _share(expectation, "low"),
        high=expectation.step_s * _share(expectation, "high"),
    )


def _with_peak(expectation: Expectation, means: Means) -> Expectation:
    """The peak that the log's own whole-step MFU implies, where the plan does not say it."""
    mfu_frac = means.get("perf/mfu/step", 0.0)
    if expectation.peak_flops_per_s or mfu_frac <= 0:
        return expectation
    flops = sum(stage.flops for stage in expectation.stages.values())
    return replace(expectation, peak_flops_per_s=flops / (means["timing_s/step"] * mfu_frac), notes=())


def _that_came(expectation: Expectation, means: Means) -> Expectation:
    """Without the stages of some steps that none of these steps had, in a run of ours, which times all it does."""
    absent = {
        name: stage.seconds
        for name, stage in expectation.stages.items()
        if name in _OCCASIONAL and "expected_s/step" in means and f"timing_s/{STAGES[name]}" not in means
    }
    if not absent:
        return expectation
    return replace(
        expectation,
        stages={name: stage for name, stage in expectation.stages.items() if name not in absent},
        step_s=expectation.step_s - sum(value for name, value in absent.items() if is_in_step(name)),
        notes=(*expectation.notes, f"none of these steps had: {', '.join(absent)}"),
    )


def _with_hand_overs_inside(expectation: Expectation, means: Means) -> Expectation:
    """Hand-overs belong to the stages that hold them where the log times those and not the hand-overs themselves."""
    apart = [stage for stage in ("to_trainer", "to_rollout") if stage in expectation.stages]
    held: dict[str, float] = {}
    for stage, seconds_in in expectation.hand_over_s.items():
        name = stage if stage in expectation.stages else "train"
        held[name] = held.get(name, 0.0) + seconds_in
    is_timed = {stage: f"timing_s/{STAGES[stage]}" in means for stage in (*apart, *held)}
    if (
        not apart
        or not held
        or any(is_timed[stage] for stage in apart)
        or not all(is_timed[stage] for stage in held)
    ):
        return expectation
    stages = {name: stage for name, stage in expectation.stages.items() if name not in apart}
    error = expectation.stages[apart[0]]
    up, down = (end / error.seconds if error.seconds else 1.0 for end in (error.high, error.low))
    for name, seconds_in in held.items():
        old = stages[name]
        stages[name] = replace(
            old,
            seconds=old.seconds + seconds_in,
            low=old.low + down * seconds_in,
            high=old.high + up * seconds_in,
        )
    inside = ", ".join(f"{seconds(value)} in {name}" for name, value in held.items() if value > 0)
    note = f"the log does not time hand-overs apart: expected inside its stages, {inside}"
    return replace(expectation, stages=stages, notes=(*expectation.notes, note))


_OCCASIONAL = frozenset({"checkpoint", "eval"})
"""Stages that only some steps have: how many of the steps looked at is no drift."""
_DRIFT_FRAC = 0.05
"""Work that differs from the plan's by more than this is worth a note."""


def _for_the_work(expectation: Expectation, means: Means) -> Expectation:
    """Each stage's expectation for the work that it really got, where the run reported one (`expected_s/...`).

    A filter that drops flat groups leaves the trainer less than the plan foresaw: that is no gain in speed.
    """
    stages, drifted = dict(expectation.stages), []
    reported = {
        stage: means[name]
        for stage in expectation.stages
        if (name := f"expected_s/{STAGES.get(stage, '')}") in means
    }
    if "expected_s/step" in means:  # what is between the stages has no span of its own
        of_stages = sum(s for stage, s in reported.items() if stage not in STAGES_OUTSIDE_STEP)
        reported["other"] = means["expected_s/step"] - of_stages
    for stage, planned in expectation.stages.items():
        reported_s = reported.get(stage)
        if reported_s is None or not reported_s >= 0:
            continue
        if (
            planned.is_none
        ):  # its range says nothing of the seconds that some steps gave it: the whole step's does
            stages[stage] = replace(
                planned,
                seconds=reported_s,
                low=reported_s * _share(expectation, "low"),
                high=reported_s * _share(expectation, "high"),
            )
            continue
        factor = reported_s / planned.seconds
        stages[stage] = replace(
            planned,
            seconds=reported_s,
            low=planned.low * factor,
            high=planned.high * factor,
            flops=planned.flops * factor,
        )
        if abs(factor - 1) > _DRIFT_FRAC and stage not in _OCCASIONAL:
            drifted.append(f"{stage} {factor:.2f} x")
    changed_s = sum(
        stages[name].seconds - old.seconds
        for name, old in expectation.stages.items()
        if name not in STAGES_OUTSIDE_STEP
    )
    notes = expectation.notes
    if drifted:
        notes += (f"the steps got other work than was planned before the run: {', '.join(drifted)}",)
    return replace(expectation, stages=stages, step_s=expectation.step_s + changed_s, notes=notes)


def _share(expectation: Expectation, end: str) -> float:
    """How far the ends of the stages' ranges lie from their middles, over the whole step."""
    in_step = [e for name, e in expectation.stages.items() if is_in_step(name)]
    middle = sum(e.seconds for e in in_step)
    return sum(getattr(e, end) for e in in_step) / middle if middle > 0 else 1.0


_NO_DIFFERENCE = 1e-3
"""Share of a step below which seconds are not worth a word."""


def _stage_results(before: Expectation, expectation: Expectation, means: Means) -> list[StageResult]:
    step_s = means["timing_s/step"]

    def result(stage: str, measured_s: float) -> StageResult:
        return StageResult(
            stage=stage,
            measured_s=measured_s,
            planned=before.stages.get(stage),
            expected=expectation.stages.get(stage),
            least_s=_NO_DIFFERENCE * step_s,
            waited_s=min(means.get(f"core_wait_s/{STAGES.get(stage, '')}", 0.0), measured_s),
        )

    found = []
    for stage, suffix in STAGES.items():
        measured = means.get(f"timing_s/{suffix}")
        if measured is None or (measured == 0 and stage not in expectation.stages):
            continue
        found.append(result(stage, measured))
    covered = sum(s.measured_s for s in found if s.stage not in STAGES_OUTSIDE_STEP)
    other = step_s - covered
    if other > _NO_DIFFERENCE * step_s:
        timed = {s.stage for s in found}
        found.append(
            replace(
                result("other", other),
                planned=_untimed(before, timed),
                expected=_untimed(expectation, timed),
            )
        )
    return found


def _untimed(expectation: Expectation, timed: set[str]) -> Expected | None:
    """What the rest of a step was expected to hold: what is between the stages, and stages the log does not time."""
    rest = [e for name, e in expectation.stages.items() if name not in timed and is_in_step(name)]
    if not rest:
        return None
    return Expected(
        seconds=sum(e.seconds for e in rest),
        low=sum(e.low for e in rest),
        high=sum(e.high for e in rest),
        flops=sum(e.flops for e in rest),
        num_gpus=max(e.num_gpus for e in rest),
    )


def _waterfall(
    expectation: Expectation, stages: list[StageResult], step_s: float
) -> tuple[float | None, list[MeasuredLoss]]:
    """Losses in shares of the peak (or of the time, when the peak is not known), largest first."""
    peak, gpus = expectation.peak_flops_per_s, expectation.num_gpus
    losses = []
    useful = expectation.hidden_rollout_flops
    for result in stages:
        planned = result.expected
        held = (planned.num_gpus if planned else _loop_gpus(expectation)) / gpus
        flops = planned.flops if planned else 0.0
        useful += flops
        ideal = flops / (peak * step_s) if peak else 0.0
        share = result.measured_s * held / step_s
        # What the plan expected to lose, and no more than what was lost.
        beyond = min(result.beyond_s * held / step_s, max(share - ideal, 0.0))
        losses.append(MeasuredLoss(loss=result.stage, frac=share - ideal, beyond_frac=beyond))
    if expectation.hidden_rollout_gpus:
        share = expectation.hidden_rollout_gpus / gpus
        ideal = expectation.hidden_rollout_flops / (peak * step_s)
        losses.append(MeasuredLoss(loss="rollout GPUs", frac=share - ideal, beyond_frac=0.0))
    mfu_frac = useful / (peak * step_s) if peak else None
    # Stages may hold a part of the GPUs: what nobody holds was idle.
    idle = 1 - (mfu_frac or 0.0) - sum(loss.frac for loss in losses)
    if idle > 1e-3:
        losses.append(MeasuredLoss(loss="idle", frac=idle, beyond_frac=0.0))
    return mfu_frac, sorted(losses, key=lambda loss: -loss.frac)


def _loop_gpus(expectation: Expectation) -> int:
    """GPUs that an unplanned stage of the step loop holds: all that are not a separate rollout side."""
    return expectation.num_gpus - expectation.hidden_rollout_gpus


def _deserving(expectation: Expectation, stages: list[StageResult], step: StageResult) -> list[Deserving]:
    """Stages that took longer than planned by seconds lost; then those that take most of the step.

    Table, waterfall and this list judge by one thing, `StageResult.verdict`. What a stage waited for a core is nothing
    that work on it would win.
    """
    step_s = step.measured_s
    late = sorted((s for s in stages if s.own_beyond_s > 0.02 * step_s), key=lambda s: -s.own_beyond_s)
    chosen = [
        Deserving(stage=s.stage, seconds=s.own_beyond_s, why=_why_late(s, step))
        for s in late[:_NUM_DESERVING]
    ]
    taken = {d.stage for d in chosen}
    rest = sorted((s for s in stages if s.stage not in taken), key=lambda s: s.waited_s - s.measured_s)
    for s in rest[: _NUM_DESERVING - len(chosen)]:
        chosen.append(Deserving(stage=s.stage, seconds=s.measured_s, why=_why_long(s, step)))
    return chosen


def _why_long(result: StageResult, step: StageResult) -> str:
    """Of a stage that lost little or nothing against the plan."""
    if result.own_beyond_s > 0:
        return _why_late(result, step)
    share = percent(result.measured_s / step.measured_s)
    if result.verdict == BUSY:
        return (
            f"{share} of the step, of which it waited {seconds(result.waited_s)} for a core: as planned without that "
            "(free the cores before you change it)"
        )
    return (
        f"{result.verdict}, and {share} of the step: to shorten it, change the plan "
        f"({_LEVERS.get(result.stage, 'its size')})"
    )


def _why_late(result: StageResult, step: StageResult) -> str:
    lever = _LOOK_AT.get(result.stage, "what it does")
    lost_s = result.beyond_s
    share = percent(lost_s / step.measured_s)
    if result.verdict == NONE_PLANNED and result.stage == "rollout":
        return (
            f"the trainer waits {seconds(result.measured_s)} for trajectories, none was planned, {share} of the step: "
            f"{_why_it_waits(step)}"
        )
    if result.expected is None or result.expected.is_none:
        return f"{seconds(result.measured_s)} that nobody planned, {share} of the step: look at {lever}"
    waited = (
        f", {seconds(result.waited_s)} of it waiting for a core" if result.waited_s > 0.1 * lost_s else ""
    )
    return (
        f"{seconds(result.measured_s)} where {seconds(result.expected.seconds)} were expected: "
        f"{seconds(lost_s)} lost, {share} of the step{waited}; look at {lever}"
    )


def _why_it_waits(step: StageResult) -> str:
    """Of a trainer that was planned to find its trajectories ready: the step takes as long as the slower side."""
    assert step.expected is not None
    if step.measured_s > step.expected.seconds:
        return (
            "the step is longer than planned, so the engines are likely slower, or their responses longer, than "
            f"planned; look at {_LOOK_AT['rollout']}"
        )
    return (
        "the step is no longer than planned, so the trainer is likely faster than planned and the engines set the "
        "pace; more of the GPUs could generate"
    )


_LOOK_AT = {
    "rollout": "response lengths against the plan's, slots in use, preemptions, environment seconds",
    "reward": "scorer time-outs and the number of workers",
    "proximal": "micro batch sizes and padding; it should take a third of training",
    "reference": "micro batch sizes, and whether the reference is offloaded",
    "values": "the critic's micro batches",
    "train": "micro batches that are not full, recomputation, gather of sharded weights",
    "critic": "the critic's micro batches",
    "sync": "bucket size, transport, and a replica that answers late",
    "checkpoint": "asynchronous saving, or a longer interval",
    "to_rollout": "pinned memory, and graphs captured again",
    "to_trainer": "pinned memory for the training state",
    "other": "what runs between the spans: logging, data loading, the interpreter",
}
_LEVERS = {
    "rollout": "asynchrony fills the tail, more replicas or float8 engines speed up decoding",
    "train": "fewer forwards, packing, more training GPUs",
    "proximal": "logprobs of the engine as the proximal ones need no forward",
    "reference": "no KL term needs no reference",
    "sync": "a delta, or publishing less often",
    "other": "after a log that times its stages",
}


def _notes(expectation: Expectation, stages: list[StageResult]) -> list[str]:
    measured = {s.stage for s in stages}
    silent = [n for n in expectation.stages if n not in measured | INSIDE_ROLLOUT | {"other"}]
    if not measured - {"other"}:
        return ["stages are not timed by the log: where a step's seconds went is not known"]
    return [f"planned but not timed by the log, and counted as other: {', '.join(silent)}"] if silent else []
