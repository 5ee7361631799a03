"""Few steps, far apart (`tail_burst`), that wait for one response or one call many times as long as the longest of all
other steps.

Too rare for a stretch in which they are frequent, they need none: nothing lies between them and the others, each waits
for as long as what it waits for takes, and together they cost a share of the run.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.cost import is_asynchronous, run_seconds
from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.series import Series
from rollbook.diagnose.signs.environments import TURNS
from rollbook.diagnose.signs.seconds import validations
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

RESPONSES = ("generated/response_length/max", "response_length/max")
CALLS = ("env/turn_s/max", "perf/non_generation_time/max")
"""Seconds of the longest call of a step, or of the sample that waited longest for its calls."""
FAR = 2.5
"""Times the longest of the other steps, at their median, that such a response or call takes."""
APART = 1.6
"""Times the longest that any other step had."""
LEAST_STEPS, MOST_FRAC = 3, 0.25
LONGER = 1.5
"""Seconds of waiting over those of the steps beside it from which on a step waited for it."""
WAITED = 0.6
"""Share of the seconds of a call that the step must have waited longer."""
MEAN_STANDS = 1.3
"""Mean length over that of the steps beside it, up to which one response is what was longer."""
LEAST_COST_FRAC = 0.01
"""Share of the run's seconds that must be lost."""


def rare_tails(view: View, waiting: str) -> tuple[tuple[Evidence, ...], float] | None:
    """What shows the steps, and the seconds that they cost; None where there are none."""
    for metric in (*RESPONSES, *CALLS):
        values = view.values.get(metric)
        if values is None or view.count(metric) < 20:
            continue
        is_call = metric in CALLS
        mean = view.values.get("response_length/mean")
        tail = values / mean if mean is not None and not is_call else values
        hit = _far_apart(tail)
        if hit is None and not is_call:
            hit = _at_the_limit(values, tail)
        if hit is not None and (found := _waits(view, waiting, metric, hit, is_call=is_call)) is not None:
            return found
    return _for_some_at_the_limit(view, waiting) or _for_what_nobody_measures(view, waiting)


FREQUENT, SLOWER, APART_BY_TOKENS = 0.45, 1.6, 1.35
"""Most steps that wait; times as long for their lengths as at the median, and as any that does not."""
CLOSE = 1.4
"""Limit over the longest response of the other steps."""


def _for_some_at_the_limit(view: View, waiting: str) -> tuple[tuple[Evidence, ...], float] | None:
    """Steps that wait much longer for their lengths than all others, and each has a response that ends at the limit:
    lengths come near to it, so that none can be far longer than others, and some of these end there too."""
    longest = view.first(*RESPONSES)
    mean = view.values.get("response_length/mean")
    if longest is None or mean is None or view.count(waiting) < 20:
        return None
    pace = view.values[waiting] / np.where(mean > 0.0, mean, np.nan)
    hit = _far_apart(pace, most=FREQUENT, apart=APART_BY_TOKENS, far=SLOWER)
    if hit is None:
        return None
    limit, others = float(np.nanmax(view.values[longest])), view.values[longest][~hit]
    is_near = float(np.nanmedian(others)) * CLOSE >= limit
    at_limit = [float((lengths >= 0.999 * limit).mean()) for lengths in (view.values[longest][hit], others)]
    if not is_near or at_limit[0] < 0.95 or at_limit[1] > 0.5:
        return None
    if is_asynchronous(view) and not _is_felt(view, waiting, hit):
        return None
    return _waits(view, waiting, longest, hit, is_call=False, gap=", where it is the limit")


def _is_felt(view: View, waiting: str, hit: NDArray[np.bool_]) -> bool:
    """Whether whole steps are longer by what they wait."""
    steps, seconds = view.values.get("timing_s/step"), view.values[waiting]
    if steps is None:
        return False
    at = np.flatnonzero(hit & np.isfinite(seconds) & np.isfinite(steps))
    over, waits = (float(np.median(s[at] - _beside(s, hit, at))) for s in (steps, seconds))
    return over >= WAITED * waits


def _for_what_nobody_measures(view: View, waiting: str) -> tuple[tuple[Evidence, ...], float] | None:
    """Steps of a synchronous agentic job that wait many times as long as all others for what looks as always: some
    trajectory waited for a call whose seconds the log does not have."""
    if is_asynchronous(view) or not view.level(TURNS) > 2.2 or any(view.has(metric) for metric in CALLS):
        return None
    hit = _far_apart(view.values[waiting]) if view.count(waiting) >= 20 else None
    found = _waits(view, waiting, waiting, hit, is_call=False) if hit is not None else None
    return None if found is None else (found[0][1:], found[1])


def _far_apart(
    tail: Series, *, most: float = MOST_FRAC, apart: float = APART, far: float = FAR
) -> NDArray[np.bool_] | None:
    """[n] the steps, at most so many of all, whose tail is `apart` times that of all others, nothing in between, and
    `far` times the median."""
    known = np.flatnonzero(np.isfinite(tail))
    order = np.sort(tail[known])
    first = len(order) - int(most * len(order))
    leaps = order[first:] / np.maximum(order[first - 1 : -1], 1e-12)
    wide = np.flatnonzero(leaps >= apart)
    if not len(wide):
        return None
    least = float(order[first + int(wide[0])])
    hit = np.nan_to_num(tail) >= least
    at = np.flatnonzero(hit)
    if len(at) < LEAST_STEPS or at[0] < known[4] or least < far * float(np.median(order)):
        return None
    return hit


AT_LEAST_AT_THE_LIMIT, RARE, FAR_AT_THE_LIMIT = 4, 0.1, 1.8
"""Responses that end at the limit are all of one length, and would have run on: they need not be as far from others.
More than a tenth of the steps that have one are no rare ones: how often they come must then have changed."""
NEAR_IT, FEW_NEAR = 1.15, 0.2
"""Limit over a response that comes near it, and such steps for each at the limit up to which they are not one tail: of
one, as many lie just below it as above."""


def _at_the_limit(longest: Series, tail: Series) -> NDArray[np.bool_] | None:
    """[n] the steps whose longest response ends at the limit, which hardly any other comes near to."""
    known = np.flatnonzero(np.isfinite(tail))
    limit = float(np.nanmax(longest))
    hit = np.nan_to_num(longest) >= 0.9999 * limit
    at, others = np.flatnonzero(hit[known]), longest[known][~hit[known]]
    if not AT_LEAST_AT_THE_LIMIT <= len(at) <= RARE * len(known) or at[0] < 4:
        return None
    if (others >= limit / NEAR_IT).sum() > FEW_NEAR * len(at):
        return None
    if float(np.median(tail[hit])) < FAR_AT_THE_LIMIT * float(np.median(tail[known])):
        return None
    return hit


def _waits(
    view: View,
    waiting: str,
    metric: str,
    hit: NDArray[np.bool_],
    *,
    is_call: bool,
    gap: str = ", and nothing in between",
) -> tuple[tuple[Evidence, ...], float] | None:
    seconds, at = view.values[waiting], np.flatnonzero(hit & np.isfinite(view.values[waiting]))
    if len(at) < LEAST_STEPS or len(np.intersect1d(at, validations(view))) > 0.5 * len(at):
        return None
    usual = _beside(seconds, hit, at)
    over = seconds[at] - usual
    longer = seconds[at] >= LONGER * usual
    if is_call:
        calls = view.values[metric]
        longer |= over >= WAITED * (calls[at] - _beside(calls, hit, at))
    if longer.mean() < 0.75 or not float(over.sum()) * view.stride >= LEAST_COST_FRAC * run_seconds(view):
        return None
    for other, most in (("response_length/mean", MEAN_STANDS), ("timing_s/update_actor", 1.3)):
        values = view.values.get(other)
        if values is not None and float(np.nanmedian(values[at] / _beside(values, hit, at))) >= most:
            return None
    step = view.step_at(int(at[0]))
    before = float(np.nanmedian(view.values[metric][~hit]))
    after = float(np.nanmedian(view.values[metric][at]))
    says = f"{num(before)} in other steps, {num(after)} in {len(at)} of {view.n}{gap}"
    quiet_s, slow_s = float(np.median(usual)), float(np.median(seconds[at]))
    waits = f"{num(quiet_s)} s in the steps beside them, {num(slow_s)} s in those"
    evidence = (
        Evidence(metric=metric, step=step, before=before, after=after, says=says),
        Evidence(metric=waiting, step=step, before=quiet_s, after=slow_s, says=waits),
    )
    return evidence, float(np.clip(over, 0.0, None).sum()) * view.stride


def _beside(values: Series, hit: NDArray[np.bool_], at: NDArray[np.intp]) -> Series:
    """Median of the nearest nine other steps, for each of some positions."""
    others = np.flatnonzero(~hit & np.isfinite(values))
    nearest = [others[np.argsort(np.abs(others - i), kind="stable")[:9]] for i in at]
    return np.array([np.median(values[near]) if len(near) else np.nan for near in nearest])
