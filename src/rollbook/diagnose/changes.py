"""Change points, robustly: where the level or the slope of a series changes, and what is noise of it.

Logged series have spikes, autocorrelated noise, missing values and slow drift, so nothing here is a mean or a
standard deviation of raw values. Noise is read off second differences (a level shift touches two of them, a
trend none); spikes are cut to the running median; and a split must buy more than the Bayesian information
criterion asks for at the number of independent values that the autocorrelation leaves.

One scan fits, for every split at once, a constant or a line before it and a step or a bend at it (two
cumulative sums); `breaks.py` and `view.py` turn the best one into what rules ask for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.series import Series

Direction = Literal[-1, 1]
"""Up or down."""
MIN_POINTS = 3
"""Values that a level needs on either side of a change."""
EXTRA_PENALTY = 3.0
"""The criterion's penalty is multiplied by this: logs are long, and a change must be worth a reader's time."""
SPIKE_NOISES = 4.0
"""Values further than this many noises from the running median are cut to it."""


def noise_scale(values: Series) -> float:
    """Robust standard deviation of the short-term noise of a series without gaps; 0 for a constant one.

    >>> round(noise_scale(np.repeat([1.0, 5.0], 20)), 3)  # a step is not noise
    0.0
    """
    if len(values) < 4:
        return 0.0
    second = np.abs(np.diff(values, 2)) / np.sqrt(6.0)
    by_median = 1.4826 * float(np.median(second))
    # Rounded values (0.003, 0.003, 0.004) have a median difference of zero: then the trimmed mean speaks.
    trimmed = np.sort(second)[: max(1, int(len(second) * 0.9))]
    return max(by_median, float(trimmed.mean()))


def running_median(values: Series, width: int) -> Series:
    """Centered running median of odd `width` of a series without gaps; the ends see their mirror image.

    Wide ones are taken at every half width and joined by lines: they stand for slow parts only.
    """
    n = len(values)
    width = min(width, 2 * ((n - 1) // 2) + 1)
    if width <= 1:
        return values
    half = width // 2
    padded = np.pad(values, half, mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width)
    if width <= 9:
        sorted_windows: Series = np.partition(windows, half, axis=1)[:, half]
        return sorted_windows
    centers = np.unique(np.append(np.arange(0, n, max(1, half // 2)), n - 1))
    slow: Series = np.interp(np.arange(n), centers, np.median(windows[centers], axis=1))
    return slow


def without_spikes(values: Series) -> Series:
    """The series with values far from their neighbours' median cut to the border of what is usual."""
    if len(values) < 5:
        return values
    middle = running_median(values, 5)
    reach = SPIKE_NOISES * max(noise_scale(values), 1.4826 * float(np.median(np.abs(values - middle))), 1e-12)
    return np.clip(values, middle - reach, middle + reach)


def independent_share(residuals: Series) -> float:
    """Share of the values that count as independent, from the autocorrelation at lag 1; 0.05 to 1."""
    if len(residuals) < 8:
        return 1.0
    centered = residuals - np.median(residuals)
    reach = 3.0 * 1.4826 * float(np.median(np.abs(centered)))
    centered = np.clip(centered, -reach, reach)  # the change itself is not noise
    variance = float((centered**2).mean())
    if variance <= 0.0:
        return 1.0
    rho = float((centered[1:] * centered[:-1]).mean()) / variance
    rho = min(max(rho, 0.0), 0.9)
    return max((1 - rho) / (1 + rho), 0.05)


@dataclass(frozen=True, slots=True)
class Split:
    """The best split of a segment: where, how, and what is left unexplained with and without it."""

    idx: int
    kind: Literal["level", "slope"]
    has_trend: bool
    """Whether a line runs through both sides; else what was before is a constant."""
    error_with: float
    error_without: float
    """Of the constant, or of the line."""
    error_line: float
    """Of one line through everything: a split that explains less than that is only a trend."""
    cost: float


def best_splits(
    values: Series, min_points: int = MIN_POINTS, direction: Literal[-1, 0, 1] = 0
) -> list[Split]:
    """The best split of a gapless series over a constant and over a line, the better one first.

    Args:
        min_points: values that either side keeps; none is returned when they cannot.
        direction: 1 looks only for what goes up at the split, -1 only for what goes down.
    """
    n = len(values)
    if n < 2 * min_points:
        return []
    t = np.arange(n, dtype=np.float64)
    inside = (t >= min_points) & (t <= n - min_points)
    bases = (np.ones((n, 1)), np.stack([np.ones(n), t - t.mean()], axis=1))
    bases = tuple(basis / np.sqrt((basis**2).sum(axis=0)) for basis in bases)
    lefts = tuple(values - basis @ (basis.T @ values) for basis in bases)
    errors = tuple(float((left**2).sum()) for left in lefts)
    found: list[Split] = []
    for degree, (basis, left, error_without) in enumerate(zip(bases, lefts, errors, strict=True)):
        best: Split | None = None
        for kind in _KINDS:
            along, norm = _regressor(left, basis, kind)
            with np.errstate(divide="ignore", invalid="ignore"):
                gain = np.where(inside & (norm > 1e-9 * n) & (along * direction >= 0), along**2 / norm, 0.0)
            idx = int(np.argmax(gain))
            if gain[idx] <= 0.0:
                continue
            error = max(error_without - float(gain[idx]), 0.0)
            cost = n * float(np.log(error / n + 1e-300)) + (degree + 2) * float(np.log(n))
            if best is None or cost < best.cost:
                best = Split(idx, kind, degree == 1, error, error_without, errors[1], cost)
        if best is not None:
            found.append(best)
    return sorted(found, key=lambda split: split.cost)


_KINDS: tuple[Literal["level", "slope"], ...] = ("level", "slope")


def worthy_split(piece: Series, noise: float, *, direction: Literal[-1, 0, 1] = 0) -> Split | None:
    """The best split of a gapless series, if one explains more than chance would in so many values."""
    for split in best_splits(piece, direction=direction):
        if is_worth_it(piece, split, noise):
            return split
    return None


def _regressor(left: Series, basis: NDArray[np.float64], kind: str) -> tuple[Series, Series]:
    """For every split at once: projection of the residual on the step or bend, and that regressor's norm²."""

    def suffix(x: NDArray[np.float64]) -> NDArray[np.float64]:
        total: NDArray[np.float64] = np.cumsum(x[::-1], axis=0)[::-1]
        return total

    n = len(left)
    count = np.arange(n, 0, -1, dtype=np.float64)  # values from the split on
    if kind == "level":
        along, on_basis, square = suffix(left), suffix(basis), count
    else:  # bend: 0, 1, 2, ... from the split on, as a sum of steps that begin one later each
        along = np.concatenate([suffix(suffix(left))[1:], [0.0]])
        on_basis = np.concatenate([suffix(suffix(basis))[1:], np.zeros((1, basis.shape[1]))])
        m = count - 1
        square = m * (m + 1) * (2 * m + 1) / 6
    return along, square - (on_basis**2).sum(axis=1)


BEYOND_A_TREND = 0.7
"""A step or bend after a constant must leave at most this share of what one line through everything leaves."""


def is_worth_it(piece: Series, split: Split, noise: float) -> bool:
    """Whether a split explains more than chance would in this many values with this autocorrelation."""
    n = len(piece)
    floor = n * noise**2 * 0.25
    if not split.has_trend and split.error_with + floor > BEYOND_A_TREND * (split.error_line + floor):
        return False
    share = independent_share(detail(piece))
    gain = max(n * share - 4, 1) * np.log((split.error_without + floor) / (split.error_with + floor))
    return bool(gain > EXTRA_PENALTY * 2 * np.log(max(n, 10)))


def detail(piece: Series) -> Series:
    """What is left of a piece after its slow part: for the autocorrelation of the noise, not of the trend."""
    width = max(5, len(piece) // 8) | 1
    return piece - running_median(piece, width)


CLIMBED = 0.8
"""Share of a climb that tells its foot: how it ends, levelling off or not, says nothing of where it began."""
_BENDS = (0.7, 1.0, 1.5, 2.0)
"""Powers of the steps since the foot: a climb is steady from its first step on, or begins imperceptibly."""


def foot_of_climb(values: Series) -> int:
    """Position from which a series that ends high has climbed: the foot of the best fit of a constant and a power of
    the steps since then. A split finds where a climb stands out of the noise, which is later.

    Args:
        values: [n] float64, at least 12 of them finite; on a logarithmic scale where the noise grows with the level.

    >>> foot_of_climb(np.maximum(np.arange(100.0) - 40, 0) ** 2)
    40
    """
    known = np.flatnonzero(np.isfinite(values))
    clean = without_spikes(values[known])
    smooth = running_median(clean, 7)
    low, high = np.quantile(smooth, (0.02, 0.98))
    n = max(12, int(np.flatnonzero(smooth >= low + CLIMBED * (high - low))[0]) + 1)
    clean, t = clean[:n] - clean[:n].mean(), np.arange(n, dtype=np.float64)
    best, foot = -np.inf, 0
    for at in np.unique(np.linspace(0, n - 3, 60).astype(np.intp)).tolist():
        since = np.maximum(t - at, 0.0) / (n - 1 - at)
        for power in _BENDS:
            climb = since**power
            climb -= climb.mean()
            along = float(climb @ clean)
            explains = along**2 / float(climb @ climb)
            if along > 0.0 and explains > best:
                best, foot = explains, at
    return int(known[foot])


def spearman(a: Series, b: Series) -> float:
    """Rank correlation of two series where both have values; 0 with fewer than 8 of them, or where one stands still.

    >>> round(spearman(np.arange(8.0), np.array([0.0, 0, 0, 0, 0, 0, 0, 1])), 2)  # equal values share a rank
    0.58
    """
    both = np.isfinite(a) & np.isfinite(b)
    if both.sum() < 8 or any(np.ptp(x[both]) == 0 for x in (a, b)):
        return 0.0
    return float(np.corrcoef(_ranks(a[both]), _ranks(b[both]))[0, 1])


def _ranks(values: Series) -> Series:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - 0.5 * (counts + 1)
    ranks: Series = middle[place]
    return ranks
