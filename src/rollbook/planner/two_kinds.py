"""Steps of two kinds in one log, whose mean is that of neither: every fifth holds an evaluation, or lengths are of two
sorts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from rollbook.observe.numbers import counted
from rollbook.planner.words import seconds

_LEAST_STEPS = 3
"""Fewer are single steps, not a kind."""
_LEAST_RATIO = 1.25
"""Between the medians of both kinds."""


def two_kinds(steps: NDArray[np.int64], values: Mapping[str, NDArray[np.float64]]) -> tuple[str, ...]:
    """A note with the medians of both kinds of `steps`, where there clearly are two: without checkpoints that are timed
    apart."""
    step_s = values["timing_s/step"]
    # What a log times apart is told in the table of stages.
    step_s = step_s - np.nan_to_num(values.get("timing_s/save_checkpoint", np.zeros(1)))
    keep = np.isfinite(step_s) & (step_s > 0)
    steps, step_s = steps[keep], step_s[keep]
    most_short_s = _valley(step_s)
    if most_short_s is None:
        return ()
    is_long = step_s > most_short_s
    short, long = step_s[~is_long], step_s[is_long]
    return (
        f"the steps are of two kinds, whose mean is that of neither: {counted(len(short), 'step')} of about "
        f"{seconds(float(np.median(short)))}, {len(long)} of about {seconds(float(np.median(long)))}"
        f"{_where(steps[is_long])}",
    )


def _valley(step_s: NDArray[np.float64]) -> float | None:
    """Seconds of the longest step of the shorter kind; None where there is one kind.

    In logarithms, as seconds scatter by factors. The cut between the kinds is where their means explain most of the
    variance; what lies between must be wide against the distance of their medians, and wider still in short logs:
    of one wide kind, even or with a long tail, fewer than one log in twenty looks like two.
    """
    logs = np.sort(np.log(step_s))
    count = len(logs)
    sizes = np.arange(_LEAST_STEPS, count - _LEAST_STEPS + 1)
    if not len(sizes):
        return None
    sums = np.cumsum(logs)[sizes - 1]
    apart = (logs.sum() - sums) / (count - sizes) - sums / sizes
    cut = int(sizes[np.argmax(sizes * (count - sizes) * apart**2)])
    short, long = logs[:cut], logs[cut:]
    between = np.quantile(long, 0.05) - np.quantile(short, 0.95)
    distance = np.median(long) - np.median(short)
    if distance < np.log(_LEAST_RATIO) or between < (0.4 + 4 / count) * distance:
        return None
    return float(np.exp((short[-1] + long[0]) / 2))


def _where(steps: NDArray[np.int64]) -> str:
    """Of steps that lie evenly, or one after the other."""
    gaps = np.unique(np.diff(steps))
    if len(gaps) != 1:
        return ""
    if gaps[0] == 1:
        return f" ({steps[0]} to {steps[-1]})"
    return f" (every {gaps[0]} steps, {steps[0]} to {steps[-1]})"
