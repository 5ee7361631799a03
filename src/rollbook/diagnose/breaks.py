"""Breaks: where a series leaves its own past for good, or for one stretch that no noise explains.

A split of the whole series, a step between neighboring stretches and an excursion that came back are looked for; what
is found is described by its levels, its shape (a step or a ramp) and where it ends.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose import changes
from rollbook.diagnose.changes import Direction
from rollbook.diagnose.series import Series, runs_of

EXCURSION_NOISES = 6.0
"""How far off its usual level a stretch of a series must be to count as an excursion."""
BASELINE = 40
"""Values before a break that tell its baseline."""

SLOW_STEPS, SLOW_SHARE = 200, 0.55
"""Values of a departure that is so slow that its first forty look like a step, and what its first quarter has of it."""


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
    num_after: int = 0
    """Values that it has lasted."""

    @property
    def ratio(self) -> float:
        """Late level over baseline; inf from a baseline of 0."""
        return ratio_of(self.late, self.before)

    @property
    def peak_ratio(self) -> float:
        return max(self.ratio, ratio_of(self.after, self.before))

    @property
    def drop(self) -> float:
        """Share of the baseline that was lost (for a fall), 0 to 1."""
        return 1.0 - self.late / self.before if self.before > 0 else 0.0

    @property
    def is_ramp(self) -> bool:
        is_slow = self.num_after >= SLOW_STEPS and self.early_share <= SLOW_SHARE
        return is_slow or (self.growth >= 1.6 and self.rise_steps >= 3)


def ratio_of(after: float, before: float) -> float:
    """One level over another; inf from a level of 0."""
    if before == 0.0:
        return np.inf if after > 0 else 1.0
    return after / before


def find_break(
    metric: str, steps: Series, values: Series, direction: Direction, *, log: bool, resolution: float = 0.0
) -> Break | None:
    """The largest lasting departure of a series from its own past, or one that came and went.

    Args:
        metric: its name, for the break.
        steps: [n] float64, the step of each value.
        values: [n] float64; NaN where missing.
        direction: 1 looks for a rise, -1 for a fall.
        log: measure as multiples (seconds, disagreement), else as differences.
        resolution: step of the decimals that the values were printed with; 0 where there is none.
    """
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 8:
        return None
    scaled = values[known]
    if log:
        # Printed with three decimals, 0.001 and 0.003 may be the same number: below four steps nothing is told.
        floor = max(1e-3 * float(np.median(np.abs(scaled))), 4.0 * resolution) + 1e-12
        scaled = np.log(np.maximum(scaled, floor))
    clean = changes.without_spikes(scaled)
    noise = max(changes.noise_scale(clean), 1e-9 + 1e-6 * float(np.median(np.abs(clean))))

    def describe(idx: int) -> Break | None:
        return _describe(metric, steps[known], values[known], known, clean, idx, direction, log, noise)

    split = changes.worthy_split(clean, noise, direction=direction)
    found = None
    if split is not None:
        found = describe(split.idx)
    step = _step(clean, direction, noise)
    if step is not None and (found is None or _is_hidden(step, found, known, noise)):
        found = describe(step[0]) or found
    if found is not None and found.score >= EXCURSION_NOISES:
        return found
    # No lasting change, or hardly: did it come and go, once or again and again?
    start = _excursion(clean, direction, noise)
    start = _spells(clean, direction) if start is None else start
    gone = None if start is None else describe(start)
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
    best: tuple[float, int] | None = None
    for start, stop in runs_of(away > EXCURSION_NOISES):
        if stop - start >= 5 and start >= changes.MIN_POINTS:
            size = float(np.median(away[start:stop]) * np.sqrt(stop - start))
            if best is None or size > best[0]:
                best = (size, start)
    return None if best is None else best[1]


SPELL_STEPS = 5
"""Values that a spell lasts, and that it is away."""


def _spells(clean: Series, direction: Direction) -> int | None:
    """Start of the first spell far off the level of the run's first third, to which the series comes back before the
    next one or the end. Where they make half of the run, no single stretch stands out of it."""
    third = len(clean) // 3
    if third < 12:
        return None
    quiet = clean[:third]
    base, noise = float(np.median(quiet)), max(changes.noise_scale(quiet), 1e-9)
    usual = max(noise, 1.4826 * float(np.median(np.abs(quiet - base))))
    away = direction * (changes.running_median(clean, 5) - base) / usual
    spells = [(a, b) for a, b in runs_of(away > EXCURSION_NOISES) if b - a >= SPELL_STEPS and a >= third // 2]
    for (_, end), (start, _) in itertools.pairwise(spells):
        if start - end >= SPELL_STEPS and float(np.median(np.abs(away[end:start]))) <= 2.0:
            return spells[0][0]
    at_last = np.abs(away[spells[-1][1] :]) if spells else away[:0]
    is_back = len(at_last) >= changes.MIN_POINTS and float(np.median(at_last)) <= 2.0
    return spells[0][0] if is_back and spells[-1][1] - spells[-1][0] >= third else None


def _describe(
    metric: str,
    steps: Series,
    raw: Series,
    known: NDArray[np.intp],
    clean: Series,
    idx: int,
    direction: Direction,
    log: bool,
    noise: float,
) -> Break | None:
    """The break that begins near position `idx` of the known values."""
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
        step=int(steps[at]),
        before=float(np.median(raw[max(0, at - BASELINE) : at])),
        after=float(np.median(raw[at : at + 12][: len(after)])),
        late=float(np.median(raw[at:end][-third:])),
        score=size / noise,
        growth=growth,
        rise_steps=rise,
        end_idx=int(known[end]) if end < len(clean) else None,
        ends_at_once=end < len(clean) and _falls_within(clean, at, end, base, direction, 4),
        early_share=_early_share(after, base),
        num_after=len(after),
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
    if len(back) >= width:
        runs = np.flatnonzero(np.convolve(back.astype(np.int64), np.ones(width, np.int64), "valid") == width)
        if len(runs):
            return at + first + int(runs[0])
    last = len(back) - len(back[::-1].cumprod().nonzero()[0])  # all from here on are back, when the log ends
    return at + first + last if len(back) - last >= changes.MIN_POINTS else len(clean)


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
