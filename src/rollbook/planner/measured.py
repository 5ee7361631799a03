"""What the steps of a log took on average: the measured side of a reconciliation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import DataError
from rollbook.planner.odd_steps import OVERLAP, TIMED, Series, covered, odd_steps, timed
from rollbook.planner.two_kinds import two_kinds
from rollbook.planner.words import seconds

Means = Mapping[str, float]
"""Metric name -> mean over the steps looked at."""

_NUM_WARMUP_STEPS = 2
_OF_SECONDS = ("timing_s/", "expected_s/", "core_wait_s/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the steps looked at, and what is to be known of these."""

    means: dict[str, float]
    first_step: int
    last_step: int
    num_steps: int
    left_out: tuple[int, ...] = ()
    """Steps between them that no figure holds."""
    notes: tuple[str, ...] = ()


def means_of(
    steps: NDArray[np.int64],
    values: Mapping[str, NDArray[np.float64]],
    *,
    first: int | None,
    last: int | None,
) -> Measured:
    """Mean seconds of each timed stage over the steps looked at, without those that stand out.

    The first two steps of a longer run are left out, and the first of a short one: they compile, load, warm up, and
    wait for engines that started with them. A stage that some steps do not have (a checkpoint) counts as zero there.

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
    step_s = values.get("timing_s/step", np.ones(len(steps)))
    is_timed = np.isfinite(step_s) & (step_s > 0)
    if not (keep & is_timed).any():
        asked = [f"from {first}"] if first is not None else []
        asked += [f"up to {last}"] if last is not None else []
        held = f"holds steps {steps.min()} to {steps.max()}" if len(steps) else "holds no step"
        raise DataError(
            f"no timed step {' '.join(asked)}".rstrip(),
            f"the log {held}; give a range of it, or a log, with seconds of a step above 0",
        )
    if "timing_s/step" not in values:
        raise DataError(
            "the log times no step (timing_s/step)",
            "give one that holds the seconds of each step (TRL's: step_time)",
        )
    without = steps[keep & ~is_timed & ~np.isnan(step_s)]
    steps, values = steps[keep & is_timed], {name: s[keep & is_timed] for name, s in values.items()}
    odd = odd_steps(steps, values)
    left_out = (*map(int, without), *map(int, steps[odd.places]))
    steps, values = np.delete(steps, odd.places), {n: np.delete(s, odd.places) for n, s in values.items()}
    return Measured(
        means=_means(values),
        first_step=int(steps[0]),
        last_step=int(steps[-1]),
        num_steps=len(steps),
        left_out=tuple(sorted(left_out)),
        notes=(
            *two_kinds(steps, values),
            *_untimed(without),
            *odd.notes,
            *_not_counted(values),
            *_overlap(values),
        ),
    )


def _means(values: Mapping[str, Series]) -> dict[str, float]:
    means = {}
    for name, series in values.items():
        finite = series[np.isfinite(series)]
        if name.startswith(_OF_SECONDS):
            means[name] = float(timed(series).mean())
        elif len(finite):
            means[name] = float(finite.mean())
    return means


def _untimed(without: NDArray[np.int64]) -> list[str]:
    if not len(without):
        return []
    named = ", ".join(str(step) for step in without[:3]) + (" and others" if len(without) > 3 else "")
    return [f"the log gives steps no seconds above 0 and below infinity, which are left out: {named}"]


def _not_counted(values: Mapping[str, Series]) -> list[str]:
    """Stages with seconds that cannot be, in more steps than could be left out."""
    told = []
    for name, stage in TIMED.items():
        series = values.get(name, np.zeros(0))
        if number := int(((series < 0) | np.isinf(series)).sum()):
            told.append(f"{stage} in {number} of {len(series)}")
    if not told:
        return []
    return [f"seconds below zero or without end count as none, of steps: {', '.join(told)}"]


def _overlap(values: Mapping[str, Series]) -> list[str]:
    """That stages cannot follow one another, in a log whose steps are all like that."""
    step_s, parts_s = float(values["timing_s/step"].mean()), float(covered(values).mean())
    if parts_s <= OVERLAP * step_s:
        return []
    return [
        f"the stages together take {seconds(parts_s)} of a step of {seconds(step_s)}: some are timed inside others, or "
        "run beside them, so their shares below are of the sum"
    ]
