"""A run as the rules look at it: breaks of a series against its own past, and what others did at the same step.

Rules rest on relations: a series against its own level before, two series at one step, the growth of one
against the growth of another. Everything is computed on first use and kept, so that rules stay pure
functions of a view and ask freely.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose import changes
from rollbook.diagnose.series import Event, RunSeries, Series
from rollbook.diagnose.spells import Spells, find_spells

MAX_POINTS = 20_000
"""A longer run is looked at in blocks of steps, each by its median."""
EXCURSION_NOISES = 6.0
"""How far off its usual level a stretch of a series must be to count as an excursion."""
BASELINE = 40
"""Values before a break that tell its baseline."""

Direction = Literal[-1, 1]


@dataclass(frozen=True, slots=True)
class Break:
    """A lasting departure of one series from its own past."""

    metric: str
    idx: int
    step: int
    before: float
    """Median of the baseline, in the metric's unit."""
    after: float
    """Median of the first values after."""
    late: float
    """Median of the last third of what came after, up to `end_idx`."""
    score: float
    """Size over the noise of the series."""
    growth: float
    """Departure late in the first 40 steps over departure early in them: about 1 for a step, 2 and more for a ramp."""
    rise_steps: int
    """Steps until 70 % of the local departure was reached."""
    end_idx: int | None
    """Where it went back to the baseline, if it did."""
    ends_at_once: bool = False
    """Whether it went back within a few values."""
    early_share: float = 1.0
    """Share of the late departure that the first quarter of what came after had reached: about 1 for a step."""

    @property
    def ratio(self) -> float:
        """Late level over baseline; inf from a baseline of 0."""
        return _ratio(self.late, self.before)

    @property
    def peak_ratio(self) -> float:
        return max(self.ratio, _ratio(self.after, self.before))

    @property
    def drop(self) -> float:
        """Share of the baseline that was lost (for a fall), 0 to 1."""
        return 1.0 - self.late / self.before if self.before > 0 else 0.0

    @property
    def is_ramp(self) -> bool:
        return self.growth >= 1.6 and self.rise_steps >= 3


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
        return _ratio(self.after, self.before)

    @property
    def score(self) -> float:
        """Difference of the medians in their own standard errors, signed."""
        error = 1.25 * self.noise * np.sqrt(1 / self.num_before + 1 / self.num_after)
        return float(self.distance / max(error, 1e-12 + 1e-6 * abs(self.before)))

    @property
    def is_at_once(self) -> bool:
        """Whether half of it came at the step itself."""
        return abs(self.jump) >= 0.5 * abs(self.distance)


def _ratio(after: float, before: float) -> float:
    if before == 0.0:
        return np.inf if after > 0 else 1.0
    return after / before


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
    """What `signs.py` has worked out, by name."""

    @classmethod
    def of(cls, run: RunSeries) -> View:
        block = -(-run.num_steps // MAX_POINTS)
        steps = run.steps[::block].astype(np.float64)
        values = run.values if block == 1 else {k: _blocks(v, block) for k, v in run.values.items()}
        return cls(run, steps, dict(values), block)

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
        piece = piece[np.isfinite(piece)]
        return float(np.median(piece)) if len(piece) else np.nan

    def last(self, metric: str, count: int = 10) -> float:
        """Median of the last values."""
        values = self.values.get(metric)
        if values is None:
            return np.nan
        piece = values[np.isfinite(values)][-count:]
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
        return _ratio(late, early), spearman(smooth, known.astype(np.float64))

    def resolution(self, metric: str) -> float:
        """Step of the decimals that a metric was printed with (0.001 for "0.003"); 0 when there is no such step."""
        if metric not in self._resolutions:
            values = self.values[metric]
            sample = values[np.isfinite(values)][:400]
            found = 0.0
            for decimals in (2, 3, 4):
                scaled = sample * 10.0**decimals
                if (
                    len(sample) >= 8
                    and np.all(np.abs(scaled - np.round(scaled)) < 1e-6)
                    and np.any(sample % 1)
                ):
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

    def _break(self, metric: str | None, direction: Direction, log: bool) -> Break | None:
        if metric is None or metric not in self.values:
            return None
        key = (metric, direction, log)
        if key not in self._breaks:
            self._breaks[key] = _find_break(self, metric, direction, log)
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
        noise = max(_spread(left, a), _spread(right, b) if len(b) >= 4 else 0.0)
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
        return changes.noise_scale(past[np.isfinite(past)][-BASELINE:])

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


def _spread(at: Series, values: Series) -> float:
    """Robust standard deviation around the robust line."""
    left = values - _slope(at, values) * (at - np.median(at))
    return 1.4826 * float(np.median(np.abs(left - np.median(left))))


def _find_break(view: View, metric: str, direction: Direction, log: bool) -> Break | None:
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 8:
        return None
    scaled = values[known]
    if log:
        # Printed with three decimals, 0.001 and 0.003 may be the same number: below four steps nothing is told.
        floor = max(1e-3 * float(np.median(np.abs(scaled))), 4.0 * view.resolution(metric)) + 1e-12
        scaled = np.log(np.maximum(scaled, floor))
    clean = changes.without_spikes(scaled)
    noise = max(changes.noise_scale(clean), 1e-9 + 1e-6 * float(np.median(np.abs(clean))))
    split = changes.worthy_split(clean, noise, direction=direction)
    found = None
    if split is not None:
        found = _describe(view, metric, known, clean, split.idx, direction, log, noise)
    step = _step(clean, direction, noise)
    if step is not None and (found is None or _is_hidden(step, found, known, noise)):
        found = _describe(view, metric, known, clean, step[0], direction, log, noise) or found
    if found is not None and found.score >= EXCURSION_NOISES:
        return found
    # No lasting change, or hardly: did it come and go, once or again and again?
    start = _excursion(clean, direction, noise)
    start = _spells(clean, direction) if start is None else start
    gone = None if start is None else _describe(view, metric, known, clean, start, direction, log, noise)
    return gone if found is None or (gone is not None and gone.score > 2 * found.score) else found


STEP_WIDTH = 8
"""Values on either side that tell a step."""
STEP_NOISES = 6.0
"""Standard errors of two medians that a step must have."""
STEP_OVER_OTHERS = 3.0
"""Its size over nearly the largest movement that way of the rest of the series."""


def _step(clean: Series, direction: Direction, noise: float) -> tuple[int, float] | None:
    """(position, size) of the largest step between neighboring stretches. A single split of the whole series may
    miss one that a larger movement the other way hides: a reward that was learned fast and then falls."""
    n, width = len(clean), STEP_WIDTH
    if n < 4 * width:
        return None
    medians = np.median(np.lib.stride_tricks.sliding_window_view(clean, width), axis=1)
    jumps = direction * (medians[width:] - medians[:-width])  # of position i + width
    best = int(np.argmax(jumps))
    size = float(jumps[best])
    elsewhere = np.concatenate([jumps[: max(0, best - width)], jumps[best + width + 1 :]])
    if not len(elsewhere) or size < STEP_OVER_OTHERS * float(np.quantile(elsewhere, 0.95)):
        return None
    if size < STEP_NOISES * 1.25 * noise * float(np.sqrt(2 / width)):
        return None
    at = best + width
    later = clean[at + width : at + 3 * width]
    if len(later) >= width and direction * (float(np.median(later)) - float(medians[best])) < 0.5 * size:
        return None  # it came and went
    return at, size


def _is_hidden(step: tuple[int, float], found: Break, known: NDArray[np.intp], noise: float) -> bool:
    """Whether a step is not the break that the split found, and is most of it or more."""
    at, size = step
    is_elsewhere = abs(int(known[at]) - found.idx) > STEP_WIDTH
    return is_elsewhere and size >= 0.7 * found.score * noise


def _excursion(clean: Series, direction: Direction, noise: float) -> int | None:
    """Start of the strongest stretch far off the level of the run, which came and went again."""
    smooth = changes.running_median(clean, 5)
    middle = changes.running_median(smooth, max(31, len(clean) // 2) | 1)  # a slow drift is no excursion
    usual = max(1.5 * noise, 1.4826 * float(np.median(np.abs(smooth - middle))))
    away = direction * (smooth - middle) / usual
    edges = np.flatnonzero(
        np.diff(np.concatenate([[False], away > EXCURSION_NOISES, [False]]).astype(np.int8))
    )
    best: tuple[float, int] | None = None
    for start, stop in edges.reshape(-1, 2):
        if stop - start >= 5 and start >= changes.MIN_POINTS:
            size = float(np.median(away[start:stop]) * np.sqrt(stop - start))
            if best is None or size > best[0]:
                best = (size, int(start))
    return None if best is None else best[1]


SPELL_STEPS = 5
"""Values that a spell lasts, and that it is away."""


def _spells(clean: Series, direction: Direction) -> int | None:
    """Start of the first of at least two spells far off the level of the run's first third, to which the series comes
    back between them. So frequent that they make half of the run, no single stretch stands out of it."""
    third = len(clean) // 3
    if third < 12:
        return None
    quiet = clean[:third]
    base, noise = float(np.median(quiet)), max(changes.noise_scale(quiet), 1e-9)
    usual = max(noise, 1.4826 * float(np.median(np.abs(quiet - base))))
    away = direction * (changes.running_median(clean, 5) - base) / usual
    edges = np.diff(np.concatenate([[False], away > EXCURSION_NOISES, [False]]).astype(np.int8))
    spells = [
        (a, b) for a, b in np.flatnonzero(edges).reshape(-1, 2) if b - a >= SPELL_STEPS and a >= third // 2
    ]
    for (_, end), (start, _) in itertools.pairwise(spells):
        if start - end >= SPELL_STEPS and float(np.median(np.abs(away[end:start]))) <= 2.0:
            return int(spells[0][0])
    return None


def _describe(
    view: View,
    metric: str,
    known: NDArray[np.intp],
    clean: Series,
    idx: int,
    direction: Direction,
    log: bool,
    noise: float,
) -> Break | None:
    """The break that begins near position `idx` of the known values."""
    raw = view.values[metric][known]
    at = _walk_back(clean, idx, direction, noise)
    base = float(np.median(clean[max(0, at - BASELINE) : at]))
    at += _lingers(clean[at:], base, direction, noise)
    end = _end_of(clean, at, base, direction)
    after = clean[at:end]
    if len(after) < 2:
        return None
    third = max(1, len(after) // 3)
    early, late = float(np.median(after[:12])), float(np.median(after[-third:]))
    size = max(direction * (early - base), direction * (late - base))
    if size <= 0:
        return None
    linear = np.exp if log else (lambda x: x)
    local = np.asarray(linear(after[:40]), np.float64)
    growth, rise = _shape(local, float(linear(base)))
    return Break(
        metric=metric,
        idx=int(known[at]),
        step=view.step_at(int(known[at])),
        before=float(np.median(raw[max(0, at - BASELINE) : at])),
        after=float(np.median(raw[at : at + 12][: len(after)])),
        late=float(np.median(raw[at:end][-third:])),
        score=size / noise,
        growth=growth,
        rise_steps=rise,
        end_idx=int(known[end]) if end < len(clean) else None,
        ends_at_once=end < len(clean) and _falls_within(clean, at, end, base, direction, 4),
        early_share=_early_share(after, base),
    )


def _walk_back(clean: Series, idx: int, direction: Direction, noise: float) -> int:
    """The first value of the departure: a split of a ramp comes late, one of a step may be off by a value."""
    smooth = changes.running_median(clean, 3)
    past = clean[max(0, idx - 25) : max(3, idx - 4)]
    base = float(np.median(past))
    rest = clean[idx:]
    size = max(direction * (float(np.median(rest[-max(1, len(rest) // 3) :])) - base), 0.0)
    reach = max(2.5 * noise, 2.5 * 1.4826 * float(np.median(np.abs(past - base))), 0.06 * size)
    at = idx
    while at > changes.MIN_POINTS and direction * (smooth[at - 1] - base) > reach:
        at -= 1
    while at < len(clean) - 3 and at < idx + 4 and direction * (clean[at] - base) < min(reach, 0.3 * size):
        at += 1
    return at


def _lingers(after: Series, base: float, direction: Direction, noise: float) -> int:
    """Values for which a departure still lies at its baseline: the bend of a ramp is found early in a noisy series."""
    smooth = direction * (changes.running_median(after, 5) - base)
    size = float(np.max(changes.running_median(smooth, 9)))
    there = np.flatnonzero(smooth >= 0.3 * size)
    if size <= 0 or not len(there):
        return 0
    near = np.flatnonzero(smooth[: there[0]] <= max(0.06 * size, min(noise, 0.15 * size)))
    return int(near[-1]) + 1 if len(near) and len(after) - int(near[-1]) > changes.MIN_POINTS else 0


def _end_of(clean: Series, at: int, base: float, direction: Direction) -> int:
    """Where the departure ends: having been there, the series stays within 30 % of its size for five values, or for
    more of a long series, whose noise alone comes back for five."""
    width = max(5, len(clean[at:]) // 50) | 1
    smooth = direction * (changes.running_median(clean[at:], width) - base)
    size = float(np.max(changes.running_median(smooth, 9)))
    there = np.flatnonzero(smooth >= 0.5 * size)
    if size <= 0 or not len(there):
        return len(clean)
    first = int(there[0])
    back = smooth[first:] < 0.3 * size
    if len(back) < width:
        return len(clean)
    runs = np.flatnonzero(np.convolve(back.astype(np.int64), np.ones(width, np.int64), "valid") == width)
    return at + first + int(runs[0]) if len(runs) else len(clean)


def _early_share(after: Series, base: float) -> float:
    quarter = max(1, len(after) // 4)
    late = float(np.median(after[-quarter:])) - base
    return (float(np.median(after[:quarter])) - base) / late if late else 1.0


def _falls_within(clean: Series, at: int, end: int, base: float, direction: Direction, values: int) -> bool:
    """Whether most of the departure was still there `values` values before its end."""
    smooth = direction * (changes.running_median(clean, 3) - base)
    inside = smooth[max(at, end - 12) : end]
    size = float(np.max(changes.running_median(smooth[at:end], 9)))
    return len(inside) > values and float(np.min(inside[:-values][-3:])) > 0.65 * size


def _shape(local: Series, base: float) -> tuple[float, int]:
    """(growth, rise_steps) of the first values after a break, in linear units."""
    away = np.abs(local - base)
    smooth = changes.running_median(away, 3)
    growth = 0.0
    for size in (12, 24, 40):  # a ramp may level off after a few steps
        part = away[:size]
        third = max(1, len(part) // 3)
        first, last = float(np.median(part[:third])), float(np.median(part[-third:]))
        growth = max(growth, last / first if first > 0 else np.inf)
        if len(part) < size:
            break
    third = max(1, len(away) // 3)
    reached = np.flatnonzero(
        smooth >= 0.7 * max(float(np.median(away[-third:])), float(np.median(away[:third])))
    )
    return growth, int(reached[0]) if len(reached) else len(local)


def spearman(a: Series, b: Series) -> float:
    """Rank correlation of two series where both have values; 0 with fewer than 8 of them."""
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 8:
        return 0.0
    ranks = [np.argsort(np.argsort(x[both])).astype(np.float64) for x in (a, b)]
    if any(np.ptp(x[both]) == 0 for x in (a, b)):
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
