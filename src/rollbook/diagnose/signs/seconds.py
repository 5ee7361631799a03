"""Where seconds go: what lengths explain of generation, what no stage accounts for, what was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.breaks import BASELINE, Break
from rollbook.diagnose.series import finite, runs_of
from rollbook.diagnose.signs.periods import of_a_period
from rollbook.diagnose.spells import Spells, follow
from rollbook.diagnose.view import View, once

TRAINER_STAGES = ("update_actor", "old_log_prob", "ref", "values", "update_critic", "update_weights", "adv")
EXCESS = "gen beyond length"
"""Derived: generation seconds over what the lengths explain, as a multiple of its own median."""


@once("excess")
def excess_of(view: View) -> str | None:
    """Name of the derived series of generation seconds beyond what mean lengths explain.

    Responses of less than half the usual length make a step no cheaper: what is left then are prompts and calls.
    """
    return beyond_lengths(view, "timing_s/gen", EXCESS)


def beyond_lengths(view: View, metric: str, name: str) -> str | None:
    """Name of the derived series of seconds over what the mean lengths explain, as a multiple of its own median."""
    seconds = view.values.get(metric)
    if seconds is None or np.isfinite(seconds).sum() < 8:
        return None
    out = np.log(np.maximum(seconds, 1e-6))
    length = view.values.get("response_length/mean")
    if length is not None:
        size = np.log(np.maximum(length, 1.0))
        known = np.isfinite(size)
        if known.any():
            size = np.where(known, size, np.median(size[known]))
            usual = np.median(size)
            out = out - 1.1 * (np.maximum(size, usual - np.log(2.0)) - usual)
    known = np.isfinite(out)
    return view.derive(name, np.exp(out - np.median(out[known])))


def waiting_of(view: View) -> str | None:
    """Seconds in which a wait for responses shows: of generation, else of the whole step where no stage is timed."""
    if view.has("timing_s/gen"):
        return "timing_s/gen"
    stages = any(view.has(f"timing_s/{stage}") for stage in _STAGES)
    return "timing_s/step" if view.has("timing_s/step") and not stages else None


def host_slowdown(view: View, idx: int) -> float:
    """How many times slower what waits for nobody became at the same lengths: a slow host; 1 where it is none."""
    length = view.contrast("response_length/mean", idx)
    if length is not None and length.ratio >= 1.25:
        return 1.0
    least_s = 0.01 * step_seconds(view)  # less is the noise of a call
    known = [m for s in _ALONE if view.has(m := f"timing_s/{s}") and view.level(m) >= least_s]
    known += [_DECODE] if view.has(_DECODE) else []
    # The seconds of a busy host wobble in proportion to what they are.
    changes = [view.contrast(metric, idx, log=True) for metric in known]
    slower = [c.ratio for c in changes if c is not None and c.ratio >= 1.4 and c.score >= 4]
    return float(np.median(slower)) if len(slower) >= 2 or (len(slower) == len(known) == 1) else 1.0


_ALONE = ("update_actor", "old_log_prob", "ref", "adv", "values", "update_critic")
"""Stages that wait for nobody."""
_DECODE = "rollout/decode_step_s"
"""Neither does a decode step."""


def validations(view: View) -> NDArray[np.intp]:
    """Positions of the steps that validated."""
    marks = ["timing_s/testing", *view.family("val-core/"), *view.family("val/")]
    metric = next((m for m in marks if 3 <= view.count(m) < 0.7 * view.n), None)
    return np.flatnonzero(np.isfinite(view.values[metric])) if metric else np.zeros(0, np.intp)


def is_of_the_schedule(view: View, found: Spells) -> bool:
    """Whether spells of seconds are the steps that validate or save, or those just after: their work, not a fault."""
    saves = view.values.get("timing_s/save_checkpoint")
    saved = np.flatnonzero(np.isfinite(saves)) if saves is not None else np.zeros(0, np.intp)
    is_a_save = len(saved) < 0.7 * view.n and follow(found, saved)
    if follow(found, validations(view)) or is_a_save or _is_periodic(view, found):
        return True
    kept = found.hit & ~of_a_period(found.hit, view.steps)
    return int(kept.sum()) <= BESIDE_PERIOD * found.num_hits


BESIDE_PERIOD = 0.25
"""Share of the steps of spells that may be hiccups beside a period."""


def beside_the_schedule(view: View, metric: str, found: Spells) -> Spells | None:
    """The spells without the steps that come by a period of their own; None where all are of the schedule."""
    if is_of_the_schedule(view, found):
        return None
    hit = found.hit & ~of_a_period(found.hit, view.steps)
    if hit.sum() == found.num_hits:
        return found
    values = view.values[metric]
    return replace(
        found,
        hit=hit,
        stretches=tuple(runs_of(hit)),
        before=float(np.median(found.quiet[hit])),
        inside=float(np.median(values[hit])),
    )


LEAST_PERIOD = 10
"""Logged steps between two of what comes by the schedule, at least: fewer, and any spells fit."""
LEAST_IN_TIME = 6
"""Spells that are all equally far apart, from the first step of the log to its last, from which on that is a schedule
at any number of steps: a hand-over every third step."""


def _is_periodic(view: View, found: Spells) -> bool:
    """Whether most spells begin at multiples of one number of steps, from about the first of the log on, and at half
    of the multiples or more: a checkpoint or a validation that the log does not mention, beside a hiccup."""
    starts = np.array([view.step_at(start) for start, _ in found.stretches])
    first, last = view.step_at(0), view.step_at(view.n - 1)
    spacing = max(1.0, float(np.median(np.diff(view.steps))))
    periods = np.unique(np.diff(starts))
    if len(periods) == 1 and spacing < periods[0]:
        enough = LEAST_IN_TIME if periods[0] < LEAST_PERIOD * spacing else LEAST_FAR_APART
        if len(starts) >= enough and last - starts[-1] < periods[0]:
            return bool(starts[0] - first <= periods[0] * (1.0 if enough == LEAST_IN_TIME else 1.5))
    for period in periods.tolist():
        phase = starts % period
        by_schedule = starts[np.minimum(phase, period - phase) <= spacing]
        if (
            period >= LEAST_PERIOD * spacing
            and len(by_schedule) >= max(4, 0.75 * len(starts), 0.5 * (last - first) / period)
            and by_schedule[0] - first <= period + spacing
        ):
            return True
    return False


LEAST_FAR_APART = 3
"""The same of spells that are `LEAST_PERIOD` steps apart and more: by chance few are as evenly."""
RESIDUAL = "seconds of no stage"
_STAGES = (
    "gen",
    "reward",
    "pack",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
    "switch_to_rollout",
    "switch_to_trainer",
)


@once("residual")
def residual_of(view: View) -> str | None:
    """Name of the series of step seconds that no stage accounts for (logged, or derived)."""
    if view.has("timing_s/other"):
        return "timing_s/other"
    step = view.values.get("timing_s/step")
    stages = [f"timing_s/{s}" for s in _STAGES if f"timing_s/{s}" in view.values]
    if step is None or "timing_s/gen" not in stages or len(stages) < 3:
        return None
    total = np.sum([np.nan_to_num(view.values[s]) for s in stages], axis=0)
    return view.derive(RESIDUAL, np.maximum(step - total, 0.0))


def step_seconds(view: View, start: int = 0, end: int | None = None) -> float:
    """Median seconds of a step, from its stages where the step itself was not logged."""
    logged = view.level("timing_s/step", start, end)
    if np.isfinite(logged):
        return logged
    return float(sum(v for s in _STAGES if np.isfinite(v := view.level(f"timing_s/{s}", start, end))))


def lost_seconds(view: View, metric: str, found: Break) -> float:
    """Seconds lost since a break of a metric of seconds: the excess over the baseline, summed over the steps after."""
    values = view.values[metric][found.idx : found.end_idx]
    over = np.clip(finite(values) - found.before, 0, None)
    return float(over.sum()) * view.stride


def lost_in_steps(view: View, idx: int, end: int | None = None) -> float | None:
    """Seconds by which whole steps from position `idx` on (up to `end`) took longer than those before, beyond what
    longer responses explain; None where too few steps were timed on either side."""
    step = view.values.get("timing_s/step")
    if step is None:
        stages = [view.values[name] for s in _STAGES if (name := f"timing_s/{s}") in view.values]
        step = np.sum(np.nan_to_num(stages), axis=0) if stages else np.full(view.n, np.nan)
    start = max(idx, 3)  # a growth that is there from the first step has only those as its past
    past = slice(max(0, start - BASELINE), start)
    known = np.isfinite(step[past])
    if known.sum() < 3 or np.isfinite(step[idx:end]).sum() < 3:
        return None
    usual = np.median(step[past][known])
    work = np.ones(view.n)
    length = view.values.get("response_length/mean")
    if length is not None and np.isfinite(length[past]).any():
        grown = length / np.nanmedian(length[past])
        work = np.where(np.isfinite(grown), np.maximum(grown, 1.0), 1.0)
    return max(float(np.nansum((step - usual * work)[idx:end])) * view.stride, 0.0)


def stalls_at_end(view: View, stage: str) -> tuple[int, float, float] | None:
    """(position, usual seconds, seconds) of a stage that takes many times its usual time in the last three steps."""
    values = view.values[stage]
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 6:
        return None
    past = values[known[:-3]]
    usual, largest = float(np.median(past)), float(np.max(past))
    for idx in known[-3:]:
        if values[idx] >= max(6 * usual, 3 * largest, usual + 90.0):
            return int(idx), usual, float(values[idx])
    later = known[1:]  # the first step of a log warms up
    timed_out = later[values[later] >= max(15 * usual, usual + 500.0)]  # and the run was started again
    if len(timed_out):
        return int(timed_out[0]), usual, float(values[timed_out[0]])
    return None


def over_the_others(view: View, metric: str, family: Sequence[str]) -> str:
    """A derived series: one replica's values over the median of the others' in the same step."""
    others = np.stack([view.values[m] for m in family if m != metric])
    known = np.isfinite(others).any(axis=0)
    usual = np.full(view.n, np.nan)
    usual[known] = np.nanmedian(others[:, known], axis=0)
    relative = np.divide(view.values[metric], usual, out=np.full(view.n, np.nan), where=usual > 0)
    return view.derive(f"{metric} over the others'", relative)
