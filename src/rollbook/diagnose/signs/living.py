"""Sandboxes that live against those in use, or that were made against those that are gone: what is not given back is
the difference, and it only grows; where a part of them died, there is none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.changes import foot_of_climb, running_median, spearman
from rollbook.diagnose.readers.words import pieces_of, word_set
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.view import View, once

LIVING, IN_USE, LEASED = "env/num_alive", "env/num_active", "env/num_leased"
LEAST_COUNTS = 8
TIMES = 1.5
"""Growth of those that live, at the same use, from which on they are not given back."""
BEYOND = 1.5
"""Those that live over those in use, in the end: a pool keeps some warm."""
STEADY = 0.9
LEAST_CLIMB = 0.25
"""Share of the log over which they must grow: a pool that is filled, or scaled up once, is at its level soon."""

CAPACITY = "env/capacity"
FULL = 0.97
"""Those in use over those that live, from which on none is free."""
SHORT = 0.95
"""Those that are left over those in use before, up to which they are too few."""
WAITS = 1.05
"""Growth of the seconds of a call from which on it waits for a free one."""


def too_few(view: View, idx: int) -> str | None:
    """Metric of those in use, where fewer live from a position on than were in use until then, and
    every one of them is in use: where there was less to do, calls would not wait."""
    for living in (LIVING, CAPACITY, IN_USE):
        used = next((m for m in (IN_USE, LEASED) if m != living and view.has(m, living)), None)
        left, needed = view.contrast(living, idx, width=8), view.contrast(used, idx, width=8)
        if used is None or left is None or needed is None or left.after > SHORT * needed.before:
            continue
        share = view.values[used] / np.maximum(view.values[living], 1.0)
        before, after = (float(np.mean(finite(part) >= FULL)) for part in (share[:idx], share[idx:]))
        calls = view.contrast("env/turn_s/mean", idx)
        if before <= 0.2 and after >= 0.8 and (calls is None or calls.ratio >= WAITS):
            return used
    return None


_TOLD = (
    re.compile(
        r"(?P<living>\d+) (?:sandboxes|containers) (?:running|alive|live|living|open)\b.{0,40}?"
        r"\b(?P<used>\d+) (?:leased|in use|busy|assigned)\b"
    ),
    re.compile(
        r"\b(?:running|alive|live|living|open) ?[=:] ?(?P<living>\d+)\b.{0,40}?"
        r"\b(?:leased|in[ _]use|busy|assigned) ?[=:] ?(?P<used>\d+)"
    ),
)


@dataclass(frozen=True, slots=True)
class Unreturned:
    """Sandboxes that became ever more while as many were in use."""

    metric: str
    idx: int
    early: float
    late: float
    in_use: float | None
    """None where it is not counted."""


@once("unreturned")
def unreturned(view: View) -> Unreturned | None:
    """Where sandboxes began to live on unused; None where they did not."""
    told = _told(view)
    for living, used in ((LIVING, IN_USE), (LIVING, LEASED), (IN_USE, LEASED)):
        values, uses = (told.get(m, view.values.get(m)) for m in (living, used))
        if values is not None and uses is not None and (found := _grows_apart(living, values, uses)):
            return found
    return _totals_part(view)


MADE = word_set("created started spawned launched acquired leased opened allocated")
GONE = word_set("released destroyed stopped deleted removed returned closed terminated reaped freed")
_OF_SANDBOXES = word_set("sandbox sandboxes container containers pod pods vm vms leases")
LEAST_TOTALS = 24
LEFT_TIMES = 3.0
"""Growth of those that were made and are not gone, over that of the work, from which on they are not given back."""
LEFT_OF_A_STEP = 0.25
"""Share of those that one step makes, that they must grow by: what is counted between two hand-backs wavers."""


def _totals_part(view: View) -> Unreturned | None:
    """Where ever more of those that were made are not gone, while a step makes as many as before."""
    totals = {
        m: view.values[m] for m in view.run.values if pieces_of(m) & _OF_SANDBOXES and _is_total(view, m)
    }
    pairs = [
        (made, gone)
        for made in totals
        for gone in totals
        if (pieces_of(made) & MADE and pieces_of(gone) & GONE)
        and pieces_of(made) - MADE == pieces_of(gone) - GONE
    ]
    if len(pairs) != 1:
        return None
    made, gone = pairs[0]
    left = totals[made] - totals[gone]
    known = np.flatnonzero(np.isfinite(left))
    if len(known) < LEAST_TOTALS:
        return None
    part = max(4, len(known) // 8)
    each = np.diff(totals[made][known])
    early, late = float(np.median(left[known[:part]])), float(np.median(left[known[-part:]]))
    before, after = float(np.median(each[:part])), float(np.median(each[-part:]))
    if before <= 0.0:
        return None
    work = max(1.0, after / before, *(view.trend(m)[0] for m in ("num_turns/mean", "response_length/mean")))
    if early < 0.0 or late < LEFT_TIMES * work * max(early, 1.0) or late - early < LEFT_OF_A_STEP * after:
        return None
    return _climbs(made, left, known, early, late, in_use=None)


def _is_total(view: View, metric: str) -> bool:
    """Whether a metric goes up in every step: counts that begin anew after a restart are none."""
    grown = np.diff(finite(view.values[metric]))
    return len(grown) >= LEAST_TOTALS and bool(np.all(grown >= 0.0) and np.mean(grown > 0.0) >= 0.9)


def _grows_apart(living: str, values: Series, uses: Series) -> Unreturned | None:
    known = np.flatnonzero(np.isfinite(values) & np.isfinite(uses))
    if len(known) < LEAST_COUNTS:
        return None
    part = max(2, len(known) // 8)
    (early, late), (used_early, used_late) = (
        (float(np.median(series[known[:part]])), float(np.median(series[known[-part:]])))
        for series in (values, uses)
    )
    if late <= 0.0 or late < TIMES * early or late < BEYOND * used_late:
        return None
    if used_late * early > 0.5 * (early + late) * used_early:
        return None  # there is more to do
    return _climbs(living, values, known, early, late, in_use=used_late)


def _climbs(
    metric: str, values: Series, known: NDArray[np.intp], early: float, late: float, *, in_use: float | None
) -> Unreturned | None:
    """What grew from an early to a late level, if it did so steadily and over many steps."""
    smooth = running_median(values[known], 3)
    if spearman(smooth, known.astype(np.float64)) < STEADY:
        return None
    above, below = smooth >= early + 0.9 * (late - early), smooth <= early + 0.1 * (late - early)
    top = int(np.argmax(above)) if above.any() else len(known) - 1
    foot = int(np.flatnonzero(below)[-1]) if below.any() else 0  # it climbs from the first value on
    if known[top] - known[foot] < LEAST_CLIMB * (known[-1] - known[0]):
        return None
    idx = foot_of_climb(values) if len(known) >= 12 else int(known[0])
    return Unreturned(metric, idx, early, late, in_use)


def _told(view: View) -> Mapping[str, Series]:
    """What lines of the log count, by metric."""
    out = {metric: np.full(view.n, np.nan) for metric in (LIVING, IN_USE)}
    for event in view.events("sandboxes_counted"):
        match = next((m for pattern in _TOLD if (m := pattern.search(event.text)) is not None), None)
        if match is None or event.step is None:
            continue
        at = min(view.idx_of(event.step), view.n - 1)
        out[LIVING][at], out[IN_USE][at] = float(match["living"]), float(match["used"])
    return out if np.isfinite(out[LIVING]).any() else {}
