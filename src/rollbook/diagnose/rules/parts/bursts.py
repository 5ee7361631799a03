"""The stretch of a log in which its bursts are most frequent (`tail_burst`): steps whose tail is long and which are
slow as well, against the steps beside and before them. How surely it is a stretch, `stretches.py` tells."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.rules.parts.stretches import (
    BEYOND_CHANCE_NATS,
    FAR_LONGER_NATS,
    LEAST_HITS,
    is_own_scatter,
    stretch,
)
from rollbook.diagnose.series import Series
from rollbook.diagnose.view import View

PACE = "seconds of the tail beyond length"
"""Derived: seconds in which a tail shows, over what mean lengths explain, as a multiple of its own median."""
TOKENS = (
    "response_length/max",
    "response_length/p99",
    "generated/response_length/max",
    "generated/response_length/p99",
)
CLEARLY_LONGER = 4.0
"""Growth of the longest responses from which on their tokens say more than the seconds of a host that swings."""
CLEARLY_APART = 1.6
"""Seconds of the steps with long responses over those of the steps without, from which on it does not matter that
something else made all of them slower."""
LEAST_GROWTH = 1.5
"""Growth of the longest responses from which on they are long."""
LEAST_RATE = 0.12
"""Share of the steps of a stretch that must have one, where the longest of so many may be as long by themselves."""


@dataclass(frozen=True, slots=True)
class Bursts:
    """The stretch of a series in which its bursts are most frequent, over the steps that have all that it takes."""

    metric: str
    least: float
    """Growth of a tail over its quiet level from which on it is long."""
    at: NDArray[np.intp]
    """Positions of those steps; the arrays below are over them."""
    tail: Series
    pace: Series
    """Seconds over what the lengths explain, as multiples of the quiet ones."""
    least_long: float
    long: NDArray[np.bool_]
    slow: NDArray[np.bool_]
    by_tokens: bool
    """Whether the responses are so much longer that they must take time, whatever the host does."""
    begin: int
    end: int
    nats: float
    """How sure it is that they are more frequent there, beyond chance."""

    @property
    def is_foreign(self) -> bool:
        """Whether the responses are longer than the longest of so many ever are by themselves."""
        return self.metric in TOKENS and self.least > LEAST_GROWTH

    @property
    def both(self) -> NDArray[np.bool_]:
        return self.long & self.slow

    @property
    def inside(self) -> slice:
        return slice(self.begin, self.end)

    @property
    def hit(self) -> NDArray[np.intp]:
        """Positions of the steps of the stretch that have one."""
        return self.at[self.inside][self.both[self.inside]]

    @property
    def rate(self) -> float:
        return float(self.both[self.inside].mean())

    @property
    def rate_outside(self) -> float:
        outside = np.concatenate([self.both[: self.begin], self.both[self.end :]])
        return float(outside.mean()) if len(outside) else 0.0


def bursts_of(view: View, metric: str, tail: Series, least: float) -> Bursts | None:
    """Where steps with a long tail that are slow as well are most frequent; None where there are hardly any."""
    gen = view.values[PACE]
    known = np.isfinite(tail) & np.isfinite(gen)
    if known.sum() < 20:
        return None
    at = np.flatnonzero(known)
    tail, gen = tail[at], gen[at]
    quiet_tail, quiet_gen = _quiet(tail), _quiet(gen)
    least_long = quiet_tail * max(least, _beyond_noise(tail, quiet_tail))
    long = tail >= least_long
    pace = gen / quiet_gen
    slow = pace >= max(1.25, _beyond_noise(gen, quiet_gen))
    by_tokens = bool(metric in TOKENS and long.any() and np.median(tail[long]) >= CLEARLY_LONGER * quiet_tail)
    if by_tokens:  # where the host swings, the steps beside them tell how much time they took
        pace = _beside_others(pace, long)
        slow = pace >= 1.25
    if (long & slow).sum() < LEAST_HITS:
        return None
    counted = long if by_tokens else long & slow  # the tokens begin, whatever the host's seconds do
    return Bursts(metric, least, at, tail, pace, least_long, long, slow, by_tokens, *stretch(counted))


def has_a_beginning(bursts: Bursts) -> bool:
    """Whether they are frequent in the stretch, were not before it, and chance makes no such stretch."""
    if bursts.begin < 4 or len(bursts.hit) < LEAST_HITS:
        return False
    if not bursts.is_foreign and bursts.rate < max(LEAST_RATE, 3 * bursts.rate_outside + 0.05):
        return False
    if bursts.nats < (FAR_LONGER_NATS if bursts.by_tokens else BEYOND_CHANCE_NATS):
        return False  # the longest of a heavy tail come in clusters now and then
    # The longest of so many are that long now and then, and were before.
    return not (
        bursts.metric in TOKENS and is_own_scatter(bursts.tail, bursts.least_long, bursts.begin, bursts.end)
    )


def long_ones_cost(bursts: Bursts) -> bool:
    """Whether the steps of the stretch that have a long tail are slow, by more than those beside them, and both came
    within few steps."""
    long, slow, pace = bursts.long[bursts.inside], bursts.slow[bursts.inside], bursts.pace[bursts.inside]
    slow_share = float(slow[long].mean())
    if slow_share < 0.6:
        return False  # long tails do not cost seconds here
    others = pace[~long]
    apart = float(np.median(pace[long])) / float(np.median(others)) if len(others) >= 4 else np.inf
    by_chance = float(slow[~long].mean()) if len(others) >= 4 else 0.0
    if apart < 1.2 or (apart < CLEARLY_APART and slow_share < 2.0 * by_chance):
        return False  # steps without long responses are as slow, or slow as often
    hit, begin = bursts.both[bursts.inside], bursts.begin
    just_before = float(np.median(bursts.tail[max(0, begin - 20) : begin]))
    if float(np.median(bursts.tail[bursts.inside][hit])) < bursts.least * just_before:
        return False  # it grew there slowly: longer responses, not a burst
    slow_before = float(np.median(bursts.pace[max(0, begin - 12) : begin]))
    return float(np.median(pace[hit])) >= 1.2 * slow_before  # else as slow before there was a tail


def _beside_others(pace: Series, long: NDArray[np.bool_]) -> Series:
    """Seconds over the median of up to four steps without long responses on either side; as they are where there are
    not three of them."""
    out = pace.copy()
    for i in range(len(pace)):
        near = np.arange(max(0, i - 4), min(len(pace), i + 5))
        near = near[~long[near] & (near != i)]
        if len(near) >= 3:
            out[i] = pace[i] / max(float(np.median(pace[near])), 1e-12)
    return out


def _beyond_noise(values: Series, quiet: float) -> float:
    """Factor over the quiet level that noise alone seldom reaches; told from below it, where bursts have no part."""
    low = quiet - values[values <= quiet]
    return 1.0 + 3.5 * 1.4826 * float(np.median(low)) / max(quiet, 1e-12) if len(low) else 1.0


def _quiet(values: Series) -> float:
    """Level without bursts: median of the first quarter, or of the lower half where that is lower."""
    first = float(np.median(values[: max(5, len(values) // 4)]))
    return min(first, float(np.median(np.sort(values)[: max(5, len(values) // 2)])) * 1.15)
