"""A run as the rules look at it: breaks of a series against its own past, and what others did at the same step.

Rules rest on relations: a series against its own level before, two series at one step, the growth of one
against the growth of another. Everything is computed on first use and kept, so that rules stay pure
functions of a view and ask freely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import numpy as np

from rollbook.diagnose import changes
from rollbook.diagnose.breaks import BASELINE, Break, find_break, ratio_of
from rollbook.diagnose.changes import Direction
from rollbook.diagnose.env_words import named_by_words
from rollbook.diagnose.filter_words import dropped_by_words
from rollbook.diagnose.series import Event, RunSeries, Series, finite
from rollbook.diagnose.spells import Spells, find_spells
from rollbook.diagnose.spill_words import SPILLED, spilled_by_words
from rollbook.diagnose.version_words import versions_by_words

T = TypeVar("T")

LEAP_SCORE = 8.0
"""Standard errors by which the first values of a ramp are off those before, from which on it began at one step."""
MAX_POINTS = 20_000
"""A longer run is looked at in blocks of steps, each by its median."""


@dataclass(frozen=True, slots=True)
class Contrast:
    """One series just before and just after a step."""

    metric: str
    before: float
    after: float
    distance: float
    """From before to after, on the scale that was asked for (logarithmic or not), as `jump` and `noise` are."""
    jump: float
    """What changed at the step itself, beyond the slopes on both sides."""
    noise: float
    num_before: int
    num_after: int

    @property
    def diff(self) -> float:
        return self.after - self.before

    @property
    def ratio(self) -> float:
        return ratio_of(self.after, self.before)

    @property
    def score(self) -> float:
        """Difference of the medians in their own standard errors, signed."""
        error = 1.25 * self.noise * np.sqrt(1 / self.num_before + 1 / self.num_after)
        return float(self.distance / max(error, 1e-12 + 1e-6 * abs(self.before)))

    @property
    def is_at_once(self) -> bool:
        """Whether half of it came at the step itself."""
        return abs(self.jump) >= 0.5 * abs(self.distance)


@dataclass(slots=True)
class View:
    """A run and what has been computed of it."""

    run: RunSeries
    steps: Series
    values: dict[str, Series]
    stride: int = 1
    """Steps a value stands for."""
    derived_from: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Series computed from others -> those, where its own name does not say it."""
    _breaks: dict[tuple[str, int, bool], Break | None] = field(default_factory=dict)
    _resolutions: dict[str, float] = field(default_factory=dict)
    _spells: dict[tuple[str, int, bool, float], Spells | None] = field(default_factory=dict)
    signs: dict[str, object] = field(default_factory=dict)
    """What `signs/` has worked out, by name."""

    @classmethod
    def of(cls, run: RunSeries) -> View:
        block = -(-run.num_steps // MAX_POINTS)
        steps = run.steps[::block].astype(np.float64)
        values = run.values if block == 1 else {k: _blocks(v, block) for k, v in run.values.items()}
        view = cls(run, steps, dict(values), block)
        by_words = named_by_words(values) | versions_by_words(values) | dropped_by_words(values)
        for metric, name in by_words.items():
            view.derive(metric, values[name], of=(name,))
        if SPILLED not in values and (told := spilled_by_words(values)) is not None:
            view.derive(SPILLED, told[1], of=told[:1])
        return view

    @property
    def n(self) -> int:
        return len(self.steps)

    # -- reading

    def has(self, *metrics: str) -> bool:
        return all(self.count(metric) >= 3 for metric in metrics)

    def count(self, metric: str) -> int:
        values = self.values.get(metric)
        return 0 if values is None else int(np.isfinite(values).sum())

    def first(self, *metrics: str) -> str | None:
        """The first of the metrics that has at least three values."""
        return next((metric for metric in metrics if self.count(metric) >= 3), None)

    def family(self, prefix: str, suffix: str = "") -> list[str]:
        return [m for m in self.run.matching(prefix, suffix) if self.count(m) >= 3] + [
            m
            for m in sorted(self.values)
            if m not in self.run.values and m.startswith(prefix) and m.endswith(suffix)
        ]

    def level(self, metric: str, start: int = 0, end: int | None = None) -> float:
        """Median between two positions, NaN when nothing is there."""
        values = self.values.get(metric)
        if values is None:
            return np.nan
        piece = values[max(0, start) : self.n if end is None else max(0, end)]
        piece = finite(piece)
        return float(np.median(piece)) if len(piece) else np.nan

    def last(self, metric: str, count: int = 10) -> float:
        """Median of the last values."""
        values = self.values.get(metric)
        if values is None:
            return np.nan
        piece = finite(values)[-count:]
        return float(np.median(piece)) if len(piece) else np.nan

    def step_at(self, idx: int) -> int:
        return int(self.steps[min(max(idx, 0), self.n - 1)])

    def idx_of(self, step: float) -> int:
        """Position of the first step that is not before `step`."""
        return int(np.searchsorted(self.steps, step))

    def events(self, *kinds: str) -> list[Event]:
        return [event for event in self.run.events if event.kind in kinds]

    def derive(self, name: str, values: Series, *, of: tuple[str, ...] = ()) -> str:
        """Add a series computed from others under a name of its own (its owner says what it means)."""
        self.values[name] = values
        if of:
            self.derived_from[name] = of
        return name

    def trend(self, metric: str | None) -> tuple[float, float]:
        """(late over early level, rank correlation with the step): (1, 0) when there is too little to tell."""
        if metric is None or self.count(metric) < 12:
            return 1.0, 0.0
        values = self.values[metric]
        known = np.flatnonzero(np.isfinite(values))
        part = max(3, len(known) // 8)
        early, late = float(np.median(values[known[:part]])), float(np.median(values[known[-part:]]))
        smooth = changes.running_median(values[known], 7)
        return ratio_of(late, early), changes.spearman(smooth, known.astype(np.float64))

    def resolution(self, metric: str) -> float:
        """Step of the decimals that a metric was printed with (0.001 for "0.003"); 0 when there is no such step."""
        if metric not in self._resolutions:
            values = self.values[metric]
            known = finite(values)
            sample = known[known % 1 != 0][:400]  # a series may be 0.000 for long
            found = 0.0
            for decimals in (2, 3, 4):
                scaled = sample * 10.0**decimals
                if len(known) >= 8 and len(sample) and np.all(np.abs(scaled - np.round(scaled)) < 1e-6):
                    found = 10.0**-decimals
                    break
            self._resolutions[metric] = found
        return self._resolutions[metric]

    # -- breaks

    def rise(self, metric: str | None, *, log: bool = True) -> Break | None:
        """The largest lasting rise over the metric's own past."""
        return self._break(metric, 1, log)

    def fall(self, metric: str | None, *, log: bool = False) -> Break | None:
        return self._break(metric, -1, log)

    def foot(self, found: Break) -> int:
        """Position from which a ramp climbs or falls, before it stands out of the noise; that of the break where it is
        none, or begins with a leap."""
        leap = self.contrast(found.metric, found.idx, width=4, log=True)
        if not found.is_ramp or (leap is not None and abs(leap.score) >= LEAP_SCORE):
            return found.idx
        values = self.values[found.metric][: found.end_idx]
        if np.nanmin(values) > 0.0:  # of counts some are zero, and have no multiples
            values = np.log(values)
        return min(changes.foot_of_climb(values if found.late > found.before else -values), found.idx)

    def begins(self, metric: str | None, least: float) -> int | None:
        """Position from which most steps have at least `least` of what none before them had: what never happened needs
        no noise to stand out of, however much the steps differ since."""
        if metric is None or metric not in self.values:
            return None
        over = np.nan_to_num(self.values[metric]) >= least
        at = np.flatnonzero(over)
        if len(at) < 4 or at[0] < 4 or over[at[0] :].mean() < 0.6:
            return None
        return int(at[0]) if not np.nan_to_num(self.values[metric])[: at[0]].any() else None

    def _break(self, metric: str | None, direction: Direction, log: bool) -> Break | None:
        if metric is None or metric not in self.values:
            return None
        key = (metric, direction, log)
        if key not in self._breaks:
            self._breaks[key] = find_break(
                metric,
                self.steps,
                self.values[metric],
                direction,
                log=log,
                resolution=self.resolution(metric) if log else 0.0,
            )
        return self._breaks[key]

    def contrast(
        self, metric: str | None, idx: int, *, width: int = 12, skip: int = 0, log: bool = False
    ) -> Contrast | None:
        """Medians of up to `width` values before position `idx` and after it (leaving out `skip` values after). `log`
        measures as multiples: a fall to a tenth is as far as a rise to ten times."""
        if metric is None or metric not in self.values:
            return None
        values = self.values[metric]
        if log:
            values = np.log(np.maximum(values, 1e-12))
        left = np.flatnonzero(np.isfinite(values[:idx]))[-width:].astype(np.float64)
        right = np.flatnonzero(np.isfinite(values[idx + skip :]))[:width].astype(np.float64) + idx + skip
        if len(left) < 3 or len(right) < 2:
            return None
        a, b = values[left.astype(np.intp)], values[right.astype(np.intp)]
        centers = np.median(right) - np.median(left)
        slope = 0.5 * (_slope(left, a) + _slope(right, b))
        before, after = float(np.median(a)), float(np.median(b))
        noise = max(spread_around(left, a), spread_around(right, b) if len(b) >= 4 else 0.0)
        jump = after - before - slope * centers
        levels = (float(np.exp(before)), float(np.exp(after))) if log else (before, after)
        return Contrast(metric, *levels, after - before, jump, noise, len(a), len(b))

    def spells(
        self, metric: str | None, direction: Direction = 1, *, log: bool = True, least: float = 0.0
    ) -> Spells | None:
        """The steps in which a metric is far off its quiet level and from which it comes back."""
        if metric is None or metric not in self.values:
            return None
        key = (metric, direction, log, least)
        if key not in self._spells:
            least = max(least, 2.5 * self.resolution(metric)) if not log else least
            self._spells[key] = find_spells(self.values[metric], direction, log=log, least=least)
        return self._spells[key]

    def beside(self, metric: str | None, found: Spells) -> Contrast | None:
        """One series in the steps of another's spells, against the quiet steps around them."""
        if metric is None or metric not in self.values:
            return None
        values = self.values[metric]
        known = np.isfinite(values)
        quiet, hit = np.flatnonzero(known & ~found.hit), np.flatnonzero(known & found.hit)
        if len(quiet) < 8 or len(hit) < 2:
            return None
        smooth = changes.running_median(values[quiet], 9)
        level = np.interp(hit, quiet, smooth)
        noise = 1.4826 * float(np.median(np.abs(values[quiet] - smooth)))
        apart = float(np.median(values[hit] - level))
        before = float(np.median(level))
        return Contrast(metric, before, before + apart, apart, apart, noise, len(quiet), len(hit))

    def rises_beside(
        self, limits: Iterable[tuple[str | None, float]], found: Spells, *, score: float
    ) -> bool:
        """Whether one of these series is, in the steps of spells, at least so many times what it is beside them."""
        beside = ((self.beside(metric, found), ratio) for metric, ratio in limits)
        return any(c is not None and c.ratio >= ratio and c.score >= score for c, ratio in beside)

    def noise_before(self, metric: str, idx: int) -> float:
        """Short-term noise of the last 40 values before a position."""
        past = self.values[metric][:idx]
        return changes.noise_scale(finite(past)[-BASELINE:])

    def moved(
        self, metric: str | None, idx: int, direction: Direction, *, factor: float, score: float = 4.0
    ) -> bool:
        """Whether the metric is higher (lower) after `idx` by `factor` and well above its noise."""
        c = self.contrast(metric, idx)
        if c is None:
            return False
        if direction > 0:
            return c.score >= score and c.ratio >= factor
        return c.score <= -score and (c.ratio <= 1 / factor)

    def near(self, a: int, b: int, *, share: float = 0.06, least: int = 4) -> bool:
        """Whether two positions are the same moment, as well as noisy series can tell."""
        return abs(a - b) <= max(least, int(share * self.n))


def once(name: str) -> Callable[[Callable[[View], T]], Callable[[View], T]]:
    """Remember a sign in the view under `name`."""

    def wrap(work_out: Callable[[View], T]) -> Callable[[View], T]:
        def sign(view: View) -> T:
            if name not in view.signs:
                view.signs[name] = work_out(view)
            return cast(T, view.signs[name])

        sign.__doc__ = work_out.__doc__
        return sign

    return wrap


def _blocks(values: Series, size: int) -> Series:
    padded = np.concatenate([values, np.full(-len(values) % size, np.nan)]).reshape(-1, size)
    known = np.isfinite(padded).any(axis=1)
    out = np.full(len(padded), np.nan)
    if known.any():
        out[known] = np.nanmedian(padded[known], axis=1)
    return out


def _slope(at: Series, values: Series) -> float:
    """Robust slope: between the medians of the first and the last third."""
    third = max(1, len(values) // 3)
    if len(values) < 4:
        return 0.0
    run = float(np.median(at[-third:]) - np.median(at[:third]))
    return float(np.median(values[-third:]) - np.median(values[:third])) / run if run else 0.0


def spread_around(at: Series, values: Series) -> float:
    """Robust standard deviation around the robust line."""
    left = values - _slope(at, values) * (at - np.median(at))
    return 1.4826 * float(np.median(np.abs(left - np.median(left))))
