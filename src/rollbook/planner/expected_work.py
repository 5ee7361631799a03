"""What was expected of the work that steps got: a plan, seen through what a log times and reports."""

from __future__ import annotations

from dataclasses import replace

from rollbook.observe.catalogue import STAGES, STAGES_OUTSIDE_STEP
from rollbook.planner.expected import Expectation, Expected, is_in_step
from rollbook.planner.measured import Means
from rollbook.planner.words import seconds


def as_timed(expectation: Expectation, means: Means) -> Expectation:
    """`expectation` by the stages that these steps had and the log times."""
    return _with_hand_overs_inside(_with_peak(_that_came(expectation, means), means), means)


def whole_step(expectation: Expectation) -> Expected:
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


def for_the_work(expectation: Expectation, means: Means) -> Expectation:
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


def untimed(expectation: Expectation, timed: set[str]) -> Expected | None:
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
