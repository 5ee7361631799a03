"""How surely steps that are hit come in a stretch (`tail_burst`), or are what the longest of many responses bring by
themselves."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.series import Series, finite

LEAST_HITS = 4
"""Steps of a stretch that must have one."""
BEYOND_CHANCE_NATS, FAR_LONGER_NATS = 5.5, 3.0
"""Evidence for a stretch of more hits, beyond what chance makes, from which on it is one (by chance in one of a
hundred logs); and where the responses are many times as long, which they seldom are at all."""


OWN_SCATTER_NATS = 1.5
"""The same against the rate at which the steps before say that the longest are as long."""
LEAST_PAST = 12
"""Steps before a stretch that tell how much the longest responses scatter."""


def is_own_scatter(tail: Series, least: float, begin: int, end: int) -> bool:
    """Whether as many long ones as a stretch has are what the longest of many responses bring by themselves: the
    largest of many scatter as Gumbel's distribution does, whose quartiles the steps before tell. Lengths that grow move
    a tail towards the limit, which is then touched more often without anything having broken."""
    past = np.log(np.maximum(tail[:begin], 1e-12))
    if len(past) < LEAST_PAST:
        return False
    low, middle, high = np.quantile(past, (0.25, 0.5, 0.75))
    scale = float(high - low) / 1.573
    if scale <= 0.0:
        return False
    usual = float(-np.expm1(-np.exp(-(np.log(least) - middle) / scale) * np.log(2.0)))
    steps, hits = end - begin, float((tail[begin:end] >= least).sum())
    rate = hits / steps
    if not 0.0 < usual < rate < 1.0:
        return 0.0 < rate <= usual
    nats = hits * np.log(rate / usual) + (steps - hits) * np.log((1.0 - rate) / (1.0 - usual))
    chance = np.log(len(tail)) * (1 if end == len(tail) else 2)
    return bool(nats < chance + OWN_SCATTER_NATS)


def own_reach(tail: Series) -> float:
    """Multiple of its median that the longest of many responses reaches by itself in one of ten such logs: they scatter
    as Gumbel's distribution does, whose quartiles the log tells."""
    known = np.log(np.maximum(finite(tail), 1e-12))
    low, high = np.quantile(known, (0.25, 0.75))
    return float(np.exp((high - low) / 1.573 * np.log(10.0 * len(known) * np.log(2.0))))


MOST_BOUNDS = 600
"""Beginnings and ends of stretches that are looked at."""


def stretch(hit: NDArray[np.bool_]) -> tuple[int, int, float]:
    """[begin, end) of the stretch whose rate of hits is most surely another one than that of the other steps, and how
    sure that is: the log likelihood of two rates over that of one, less what the best of as many stretches has by
    chance. Between two ends that grows as the logarithm of the steps, from a beginning on it hardly does.

    >>> hit = np.zeros(100, np.bool_)
    >>> hit[[40, 43, 44, 47]] = True
    >>> begin, end, nats = stretch(hit)
    >>> begin, end, round(nats, 1)
    (40, 48, 6.6)
    """
    n, at = len(hit), np.flatnonzero(hit)
    at = at[:: -(-len(at) // MOST_BOUNDS)]
    total = np.concatenate([[0.0], np.cumsum(hit)])
    begin, end = (grid.ravel() for grid in np.meshgrid(at, np.append(at + 1, n), indexing="ij"))
    begin, end = begin[begin < end], end[begin < end]
    inside, steps = total[end] - total[begin], end - begin
    nats = _nats(inside, steps) + _nats(total[n] - inside, n - steps) - _nats(total[n:], np.array([float(n)]))
    nats = np.where((inside >= LEAST_HITS) & (inside * n >= total[n] * steps), nats, -np.inf) - np.where(
        end == n, 0.0, np.log(n)
    )
    best = int(np.argmax(nats))
    return int(begin[best]), int(end[best]), float(nats[best])


def _nats(hits: Series, steps: Series) -> Series:
    """Log likelihood of hits at their own rate."""
    rate = np.clip(hits / np.maximum(steps, 1), 1e-12, 1 - 1e-12)
    return np.asarray(hits * np.log(rate) + (steps - hits) * np.log1p(-rate))
