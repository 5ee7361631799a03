"""What comes every so many steps from the first of a log to its last: checkpoints and evaluations that it has no name
for. They are told from what comes by chance, and from what begins later, and may stand among both."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.series import Series

LONGEST, TIMES = 1000, 4
"""Steps of the longest period that is looked for, and times that it fits into the log at the least."""
KEPT = 0.5
"""Share of a period's steps, in either half of the log, that are hit: a short one is lost in the noise."""
NO_CHANCE = 5.0
"""Logarithm of the odds against as many hits at one phase by chance, whichever period was looked at."""


def of_a_period(hit: NDArray[np.bool_], steps: Series) -> NDArray[np.bool_]:
    """[n] the steps of the log at which something comes by a period, none where nothing does.

    Args:
        hit: [n] where it is seen; by chance some are missing, and others are hit beside it.
        steps: [n] the steps of the log.

    >>> by_schedule = of_a_period(np.isin(np.arange(100), (4, 14, 24, 34, 44, 54, 61, 74, 84, 94)), np.arange(100.0))
    >>> np.flatnonzero(by_schedule).tolist()
    [4, 14, 24, 34, 44, 54, 64, 74, 84, 94]
    """
    best, found = NO_CHANCE, np.zeros(len(steps), np.bool_)
    at, num = steps.astype(np.int64), int(hit.sum())
    if num < TIMES:
        return found
    half, untold = len(at) // 2, int(at[min(3, len(at) - 1)])  # the first steps have no past to stand out of
    for period in range(2, min(LONGEST, int(at[-1] - at[0]) // TIMES) + 1):
        phases = at % period
        hits = np.bincount(phases[hit], minlength=period)
        phase = int(np.argmax(hits))
        slots = phases == phase
        odds = _against_chance(int(hits[phase]), num, float(slots.mean())) - 2.0 * float(np.log(period))
        begins = int(at[hit & slots][0]) <= untold + period
        keeps = all(
            hit[part][slots[part]].mean() >= KEPT
            for part in (slice(half), slice(half, None))
            if slots[part].any()
        )
        if odds > best and begins and keeps:
            best, found = odds, slots
    return found


def _against_chance(hits: int, of: int, share: float) -> float:
    """Chernoff's bound on the logarithm of the odds against `hits` of `of` at steps that are a `share` of all."""
    seen = hits / of
    if seen <= share:
        return 0.0
    missed = (1.0 - seen) * np.log((1.0 - seen) / (1.0 - share)) if seen < 1.0 else 0.0
    return float(of * (seen * np.log(seen / share) + missed))
