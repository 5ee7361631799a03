"""Spells: steps in which a series is far off its quiet level and from which it comes back, in stretches or one by one.

A scan for changes looks for what lasts. A scorer that is down now and then, a collective that stalls, an engine that
is wrong in the one step after each validation do not last, and no level of a longer stretch shows them. Here the quiet
steps tell the level and its noise, the others are counted, and each stretch must have gone back: a level that stays is
a change, not a spell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.changes import Direction, running_median
from rollbook.diagnose.series import Series, runs_of

LEAST_VALUES = 24
"""Values of a series below which nothing is said of spells."""
NOISES = 6.0
"""Noises off the quiet level from which a step is hit."""
QUIET_SHARE = 0.3
"""Quantile of the values around a step that is surely a quiet one: spells may take half of all steps."""
WENT_BACK = 0.4
"""Share of a stretch's height within which the values after it are back at those before it."""


@dataclass(frozen=True, slots=True)
class Spells:
    """Where a series left its quiet level and came back, at least twice."""

    hit: NDArray[np.bool_]
    """[n] the steps that are beyond it."""
    stretches: tuple[tuple[int, int], ...]
    """[start, end) of each spell, positions; a step that was not logged, or is in between, belongs to it."""
    quiet: Series
    """[n] the quiet level at every step, in the unit of the series."""
    before: float
    """Median quiet level at the steps that are hit."""
    inside: float
    """Median value of those steps."""
    score: float
    """Median distance of those steps over the noise of the quiet ones."""

    @property
    def first(self) -> int:
        return self.stretches[0][0]

    @property
    def num_hits(self) -> int:
        return int(self.hit.sum())

    @property
    def ratio(self) -> float:
        return self.inside / self.before if self.before else np.inf

    @property
    def median_length(self) -> float:
        return float(np.median([end - start for start, end in self.stretches]))

    def over_quiet(self, values: Series) -> float:
        """Sum of what the steps that are hit have over the quiet level."""
        return float(np.nansum(np.clip((values - self.quiet)[self.hit], 0.0, None)))


def find_spells(
    values: Series, direction: Direction = 1, *, log: bool = True, least: float = 0.0
) -> Spells | None:
    """The spells of a series, None where there are not at least two that came back.

    Args:
        values: [n] float64; NaN where missing.
        direction: 1 looks for steps above the quiet level, -1 for those below it.
        log: measure as multiples (seconds, disagreement), else as differences (counts, shares).
        least: smallest distance that counts, on that scale: a natural logarithm of a ratio, or a difference.

    >>> waits = np.full(60, 50.0)
    >>> waits[[20, 21, 33, 34, 47, 48]] = 900.0
    >>> found = find_spells(waits)
    >>> found.stretches, round(found.ratio)
    (((20, 22), (33, 35), (47, 49)), 18)
    """
    known = np.flatnonzero(np.isfinite(values))
    n = len(known)
    if n < LEAST_VALUES:
        return None
    raw = values[known]
    floor = 1e-3 * float(np.median(np.abs(raw))) + 1e-12
    scaled = direction * (np.log(np.maximum(raw, floor)) if log else raw)
    level, noise = _quiet(scaled)
    away = scaled - level
    hit = away > max(NOISES * noise, least, 1e-9)
    stretches = [s for s in _stretches(hit) if _came_and_went(scaled, s)]
    if len(stretches) < 2 or sum(b - a for a, b in stretches if b < n) < 3:
        return None
    inside = np.zeros(n, np.bool_)
    for start, end in stretches:
        inside[start:end] = hit[start:end]
    linear = np.exp(direction * level) if log else direction * level
    every = np.zeros(len(values), np.bool_)
    every[known[inside]] = True
    return Spells(
        hit=every,
        stretches=tuple((int(known[a]), int(known[b - 1]) + 1) for a, b in stretches),
        quiet=np.interp(np.arange(len(values)), known, linear),
        before=float(np.median(linear[inside])),
        inside=float(np.median(raw[inside])),
        score=float(np.median(away[inside])) / max(noise, 1e-12),
    )


def _quiet(scaled: Series) -> tuple[Series, float]:
    """(level, noise) of the quiet steps: a low quantile around each step tells them, then their own running median."""
    n = len(scaled)
    half = min(max(20, n // 6), (n - 1) // 2)
    padded = np.pad(scaled, half, mode="reflect")
    centers = np.unique(np.append(np.arange(0, n, max(1, half // 3)), n - 1))
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1)[centers]
    low, middle = np.quantile(windows, (0.5 * QUIET_SHARE, QUIET_SHARE), axis=1)
    at = np.arange(n)
    level = np.interp(at, centers, middle)
    spread = max(float(np.median(middle - low)) / 0.51, 1e-9)  # of a normal distribution
    noise = spread
    for _ in range(3):
        quiet = np.flatnonzero(np.abs(scaled - level) <= 4.0 * max(noise, 0.3 * spread))
        if len(quiet) < 8:
            break
        level = np.interp(at, quiet, running_median(scaled[quiet], 9))
        left = np.abs(scaled[quiet] - level[quiet])
        noise = max(1.4826 * float(np.median(left)), float(np.quantile(left, 0.9)) / 1.645)
    return level, noise


def _stretches(hit: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of the runs of hits; a single quiet step inside one does not part it."""
    merged: list[tuple[int, int]] = []
    for start, end in runs_of(hit):
        if merged and start - merged[-1][1] <= 1 and end - start > 1 and merged[-1][1] - merged[-1][0] > 1:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def _came_and_went(scaled: Series, stretch: tuple[int, int]) -> bool:
    """Whether a stretch has a past, and the values after it are back at it; one that ends with the log may be cut."""
    start, end = stretch
    if start < 3:
        return False
    past = float(np.median(scaled[max(0, start - 6) : start]))
    height = float(np.median(scaled[start:end])) - past
    if height <= 0.0:
        return False
    after = scaled[end : end + 6]
    return (
        not len(after)
        or float(np.median(after[:2])) - past <= WENT_BACK * height
        or (float(np.median(after)) - past <= WENT_BACK * height)
    )


@dataclass(frozen=True, slots=True)
class Tooth:
    """The usual shape of the spells of a series."""

    rise_steps: float
    """Median steps from a third of the height to the top."""
    fall_steps: float
    """Median steps from the top back to a third of it."""
    heights: tuple[float, ...]
    """Of each top over the quiet level, in the unit of the series."""
    at_once: float
    """Median share of the top that the first step of a spell has: near 1 for a plateau, wherever its top is."""

    @property
    def is_saw(self) -> bool:
        """Whether it grows step by step and is gone at once."""
        return self.rise_steps >= 3 and self.fall_steps <= 2 and self.at_once < 0.75


def tooth_of(values: Series, found: Spells) -> Tooth:
    """How the spells of a series rise and end; spells that the end of the log cuts do not count."""
    rises, falls, heights, begins = [], [], [], []
    known = np.flatnonzero(np.isfinite(values))
    away = np.abs(values[known] - found.quiet[known])
    limits = [0, *(int(np.searchsorted(known, end)) for _, end in found.stretches), len(known)]
    for i, (start, end) in enumerate(found.stretches):
        a, b = int(np.searchsorted(known, start)), int(np.searchsorted(known, end))
        if b <= a:
            continue
        top = a + int(np.argmax(away[a:b]))
        heights.append(float(away[top]))
        begins.append(float(away[a] / away[top]))
        low_before = np.flatnonzero(away[limits[i] : top] <= away[top] / 3)
        low_after = np.flatnonzero(away[top + 1 : limits[min(i + 2, len(limits) - 1)]] <= away[top] / 3)
        rises.append(top - limits[i] - int(low_before[-1]) if len(low_before) else top - limits[i])
        if len(low_after):
            falls.append(int(low_after[0]) + 1)
    if not falls:
        return Tooth(0.0, np.inf, tuple(heights), 1.0)
    return Tooth(
        float(np.median(rises)), float(np.median(falls)), tuple(heights), at_once=float(np.median(begins))
    )


def climbs(values: Series, least: float) -> list[tuple[int, int, float]]:
    """(position of the foot, of the top, height) of each gradual climb of at least `least` that is lost again at one
    step: a saw that never rests has no quiet steps to be told by.

    >>> saw = np.tile(np.arange(10.0), 4)
    >>> climbs(saw, 5.0)
    [(0, 9, 9.0), (10, 19, 9.0), (20, 29, 9.0)]
    """
    known = np.flatnonzero(np.isfinite(values))
    raw = values[known]
    found = []
    begin = 0
    for top in np.flatnonzero(raw[:-1] - raw[1:] >= least).tolist():
        foot = begin + int(np.argmin(raw[begin : top + 1]))
        way = raw[foot : top + 1]
        height = float(way[-1] - way[0])
        if top - foot >= 4 and height >= least and float(np.max(np.diff(way))) <= 0.5 * height:
            found.append((int(known[foot]), int(known[top]), height))
        begin = top + 1
    return found


def follow(found: Spells, marks: NDArray[np.intp]) -> bool:
    """Whether nearly every spell is the step of a mark or one of the two after it, and nearly every mark since the
    first spell has one: something that happens at the marks brings it about."""
    marks = marks[(marks >= found.first - 2) & (marks < len(found.hit) - 1)]
    if len(marks) < 3:
        return False
    starts = np.array([start for start, _ in found.stretches])
    last = marks[np.maximum(np.searchsorted(marks, starts, side="right") - 1, 0)]
    near = (starts - last >= 0) & (starts - last <= 2)
    followed = [bool(found.hit[mark : mark + 3].any()) for mark in marks]
    return float(near.mean()) >= 0.8 and float(np.mean(followed)) >= 0.7
