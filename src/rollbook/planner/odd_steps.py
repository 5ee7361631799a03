"""Steps of a log that no mean should hold: seconds that no step can have, and a few that stand out from all others.

A clock that was set and a stall look alike, and neither is what a step of the job takes: both are left out of every
figure, and told with what they took and where. What comes back is no oddity: a checkpoint or an evaluation that the log
does not time apart belongs to the mean, and `two_kinds` tells of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.observe.catalogue import STAGES, STAGES_OUTSIDE_STEP
from rollbook.observe.numbers import counted
from rollbook.planner.words import percent, seconds

Series = NDArray[np.float64]

TIMED = {f"timing_s/{suffix}": stage for stage, suffix in STAGES.items()}
"""Stage by its metric."""
IN_STEP = [name for name, stage in TIMED.items() if stage not in STAGES_OUTSIDE_STEP]
"""Metrics of the stages whose seconds are part of the step's."""
_CHECKPOINT = "timing_s/save_checkpoint"
OVERLAP = 1.05
"""Seconds of all stages over the step's, from which they cannot follow each other in it."""
_LEAST_STEPS = 3
"""Of fewer none can stand out."""
_RARE_FRAC = 0.02
_LEAST_RATIO = 3.0
"""Between what stands out and the median, in a long log."""
_LEAST_DEVIATIONS = 6.0
_VISIBLE_FRAC = 0.1
"""Share of a step from which the seconds of a stage that stands out matter."""
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Odd:
    """Steps to leave out, by their place in the series, and the notes that tell them."""

    places: NDArray[np.int64]
    notes: tuple[str, ...]


def odd_steps(steps: NDArray[np.int64], values: Mapping[str, Series]) -> Odd:
    """What to leave out of `steps`, all of which have seconds above 0."""
    impossible = _impossible(values, len(steps))
    left = np.setdiff1d(np.arange(len(steps)), list(impossible))
    standing = _standing_out(steps[left], {name: series[left] for name, series in values.items()})
    notes = []
    if impossible:
        named = _named(steps, impossible)
        notes.append(
            f"left out of all figures, as no step can have such seconds (a clock was set, or a line is broken): {named}"
        )
    if standing:
        step_s = values["timing_s/step"][left]
        told = _named(steps[left], standing) + _stall(steps[left], step_s, standing)
        notes.append(f"left out of all figures, as no other step is like it: {told}")
    return Odd(np.sort(np.r_[np.array([*impossible], np.int64), left[[*standing]]]), tuple(notes))


def _stall(steps: NDArray[np.int64], step_s: Series, standing: Mapping[int, str]) -> str:
    """What those of them cost that were longer than others."""
    long = [place for place in standing if step_s[place] > np.median(step_s)]
    if not long:
        return ""
    share = percent(float(step_s[long].sum() / step_s.sum()))
    longest = steps[max(long, key=lambda place: float(step_s[place]))]
    return (
        f". Unless a clock was set it is a stall, {share} of the time looked at: --first {longest} --last {longest} "
        "shows it alone"
    )


def _named(steps: NDArray[np.int64], told: Mapping[int, str]) -> str:
    named = [f"step {steps[place]}, {why}" for place, why in list(told.items())[:_MOST_NAMED]]
    more = len(told) - len(named)
    return "; ".join(named) + (f"; and {counted(more, 'more step')}" if more else "")


def _most(count: int) -> int:
    """Steps of so many that are exceptions; more of them are a kind of step."""
    return max(1, min(2, count // 10), int(_RARE_FRAC * count)) if count >= _LEAST_STEPS else 0


def _rare(is_so: NDArray[np.bool_]) -> list[int]:
    """Places where it is so, if those are exceptions."""
    places = np.flatnonzero(is_so)
    return places.tolist() if len(places) <= _most(len(is_so)) else []


def _impossible(values: Mapping[str, Series], count: int) -> dict[int, str]:
    found: dict[int, str] = {}
    step_s, covered_s = values["timing_s/step"], covered(values)
    for name, stage in TIMED.items():
        series = values.get(name, np.full(count, np.nan))
        for place in _rare((series < 0) | np.isinf(series)):
            found.setdefault(place, f"{float(series[place]):.3g} s of {stage}")
        for place in _rare(np.isnan(series)) if name in IN_STEP and name != _CHECKPOINT else ():
            found.setdefault(place, f"no seconds of {stage}")
    for place in _rare(covered_s > OVERLAP * step_s):
        whole, parts = float(step_s[place]), float(covered_s[place])
        found.setdefault(place, f"{seconds(parts)} of stages in a step of {seconds(whole)}")
    return found


def covered(values: Mapping[str, Series]) -> Series:
    """[steps] seconds of all stages of a step."""
    parts = [timed(values[name]) for name in IN_STEP if name in values]
    return np.sum(parts, axis=0) if parts else np.zeros_like(values["timing_s/step"])


def timed(series: Series) -> Series:
    """Seconds of a stage in each step: zero where the step did not have it."""
    return np.where(np.isfinite(series) & (series > 0), series, 0.0)


def _standing_out(steps: NDArray[np.int64], values: Mapping[str, Series]) -> dict[int, str]:
    """Steps that are far longer or shorter than the others, or have such a stage, by their place."""
    stages = {stage: timed(values[name]) for name, stage in TIMED.items() if name in values}
    # Few steps have a checkpoint: it is compared with other checkpoints.
    step_s = values["timing_s/step"] - stages.get("checkpoint", 0.0)
    usual_s = float(np.median(step_s))
    between_s = values["timing_s/step"] - covered(values)
    in_step = {TIMED[name]: stages[TIMED[name]] for name in IN_STEP if name in values} | {"other": between_s}
    found = {}
    for place in _exceptions(steps, step_s, 0.0):
        longest = max(in_step, key=lambda stage: float(_beyond(in_step[stage])[place]))
        is_most = 2 * _beyond(in_step[longest])[place] > step_s[place] - usual_s > 0
        where = f", most of it {_in(longest)}" if is_most and len(in_step) > 1 else ""
        found[place] = f"{_times(float(step_s[place]), usual_s)}{where}"
    for stage, series in {**stages, "other": between_s}.items():
        for place in _exceptions(steps, series, _VISIBLE_FRAC * usual_s):
            usual_here_s = float(np.median(series[series > 0]))
            found.setdefault(place, f"{_times(float(series[place]), usual_here_s)} {_in(stage)}")
    return found


def _exceptions(steps: NDArray[np.int64], series: Series, least_s: float) -> list[int]:
    """Places of the few that are far from the median of all that have any, and by more than `least_s`; none where they
    come back in even distances: a rhythm is no exception."""
    held = np.flatnonzero(series > 0)
    if not len(held):
        return []
    odd = held[_rare(_far_apart(series[held]) & (np.abs(_beyond(series[held])) > least_s))]
    is_rhythm = len(odd) > 2 and len(np.unique(np.diff(steps[odd]))) == 1
    return [] if is_rhythm else odd.tolist()


def _far_apart(series: Series) -> NDArray[np.bool_]:
    """Far from the median, in logarithms: by a factor, and by many of the usual deviations."""
    logs = np.log(series)
    apart = np.abs(logs - np.median(logs))
    # Few steps say little of how far they scatter.
    least = np.log(_LEAST_RATIO) * (1 + _LEAST_STEPS / len(series))
    far: NDArray[np.bool_] = apart > max(least, _LEAST_DEVIATIONS * 1.4826 * float(np.median(apart)))
    return far


def _beyond(series: Series) -> Series:
    return series - np.median(series)


def _times(value: float, usual: float) -> str:
    ratio = value / usual
    return f"{seconds(value)} where {seconds(usual)} is usual ({ratio:,.{0 if ratio >= 10 else 2}f} x)"


def _in(stage: str) -> str:
    return "between the stages" if stage == "other" else f"in {stage}"
