"""Counts of groups on their way that no longer agree: what was sent off against what came, was given up and is still
under way. Counters of different things part from the first step on, in proportion: what is lost parts those that
agreed."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.filter_words import DROPPED
from rollbook.diagnose.readers.words import pieces_of, word_set
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.view import View, once

_OF = word_set(
    "group groups sample samples trajectory trajectories rollout rollouts rollouter episode episodes prompts responses"
    " buffer queue replay trainer generator"
)
_SENT = (
    word_set("admitted submitted started dispatched"),
    word_set("sent put enqueued pushed produced generated emitted finished completed published"),
)
_CAME = (
    word_set("got received dequeued popped taken pulled added stored inserted collected accepted delivered"),
    word_set("trained consumed used"),
)
_ENDED = word_set(
    "failed evicted dropped expired cancelled canceled aborted rejected filtered discarded overwritten skipped stale"
    " retried"
)
_HELD = word_set(
    "running inflight flight active size depth waiting queued pending ready outstanding finished"
)
_NOT = word_set(
    "max min mean std limit capacity target required s sec seconds time ratio frac fraction rate pct token tokens"
    " bytes mb gb length len version step steps turns tool tools env sandbox minus lag age staleness reward memory"
)
LEAST_VALUES = 20
AGREE = 0.03
"""Share of what was sent off that may be missing where two counters are said to agree."""
LOST = 0.05
"""Share of it, beyond what was missing before, from which on groups are lost."""
SURELY = 0.1
"""Share of what is lost in the end by which the counts have begun to part."""
LEAST_SCORE = 6.0
LEAST_OF_ALL, LEAST_BATCHES = 0.5, 3.0
"""Batches that must be missing, and where what is under way is not counted: so many may have been admitted ahead."""


@dataclass(frozen=True, slots=True)
class Counter:
    """What a metric adds up in every step, from a total or as it was logged."""

    metric: str
    rank: int
    """Place on the way from the first admission to the training."""
    each: Series
    is_total: bool


@dataclass(frozen=True, slots=True)
class Missing:
    """Groups that were sent off and are nowhere."""

    sent: str
    came: str
    others: tuple[str, ...]
    """Metrics of what was given up and of what is under way; empty where nobody counts them."""
    since: Break
    """Of the share that is missing."""
    num: float


@once("missing groups")
def missing_groups(view: View) -> Missing | None:
    """Where the counts of what is sent off and of what comes begin to part; the surest of several."""
    counters, ended, held = _counted(view)
    pairs = ((a, b) for a in counters for b in counters if a.rank < b.rank and a.is_total == b.is_total)
    found = [m for sent, came in pairs if (m := _parts(view, sent, came, ended, held)) is not None]
    return max(found, key=lambda m: (bool(m.others), m.since.score), default=None)


def _counted(view: View) -> tuple[list[Counter], list[Counter], list[Counter]]:
    """(along the way, given up, changes of those under way)."""
    counters, ended, held = [], [], []
    for metric in view.run.values:
        pieces = pieces_of(metric)
        if not pieces & _OF or pieces & _NOT or view.count(metric) < LEAST_VALUES:
            continue
        values = view.values[metric]
        if np.any(finite(values) % 1) or np.any(finite(values) < 0):
            continue
        is_total = _is_total(values)
        change = _change(values)
        each = np.where(change < 0, np.nan, change) if is_total else values  # counted anew after a restart
        rank = next((i for i, words in enumerate((*_SENT, *_CAME)) if pieces & words), None)
        if pieces & _HELD and not is_total:
            held.append(Counter(metric, 0, change, is_total))
        elif pieces & _ENDED:
            ended.append(Counter(metric, 0, each, is_total))
        elif rank is not None:
            counters.append(Counter(metric, rank, each, is_total))
    return counters, ended, held


def _change(values: Series) -> Series:
    """[n] what a count has gained since it was last logged."""
    known = np.flatnonzero(np.isfinite(values))
    out = np.full(len(values), np.nan)
    out[known[1:]] = np.diff(values[known])
    return out


def _is_total(values: Series) -> bool:
    """Whether a count adds up over the run."""
    known = finite(values)
    grown = np.diff(known)
    return bool(
        np.mean(grown >= 0) >= 0.98
        and known[-1] >= 3.0 * max(float(np.median(grown)), 1e-9)
        and known[-1] > known[0]
    )


def _parts(
    view: View, sent: Counter, came: Counter, ended: list[Counter], held: list[Counter]
) -> Missing | None:
    """Where more and more of what is sent off does not come, with and without what else is counted."""
    plain = _share_missing(view, sent, came.each)
    beside = [*ended, *held]
    all_told = _share_missing(view, sent, came.each + sum(np.nan_to_num(c.each) for c in beside))
    rise = view.rise(view.derive(f"missing of {sent.metric} at {came.metric}", all_told), log=False)
    if rise is None or rise.score < LEAST_SCORE or rise.end_idx is not None:
        return None
    before = view.level(rise.metric, 0, max(rise.idx // 2, 8))  # beyond the foot of a ramp
    lost = rise.late - before
    others_lost = np.nanmedian(plain[rise.idx :]) - np.nanmedian(plain[: max(rise.idx // 2, 8)])
    if abs(before) > AGREE or lost < LOST or not others_lost >= 0.5 * LOST:
        return None  # they count different things, or what is under way is counted in another unit
    if any(view.moved(m, rise.idx, 1, factor=1.3) for m in DROPPED):
        return None  # a filter between the two drops more
    low = np.flatnonzero(all_told[: rise.idx] <= before + SURELY * lost)
    idx = min(int(low[-1]) + 1 + _width(view.n) // 2, rise.idx) if len(low) else rise.idx
    num = float(np.nansum(((all_told - before) * sent.each)[idx:])) * view.stride
    others = tuple(c.metric for c in beside)
    if num < (LEAST_OF_ALL if others else LEAST_BATCHES) * float(np.nanmedian(came.each)):
        return None
    since = replace(rise, idx=idx, step=view.step_at(idx), before=before)
    return Missing(sent.metric, came.metric, others, since, num)


def _width(n: int) -> int:
    """Steps over which counts are added up: what was under way at their ends then weighs little."""
    return 5 if n < 100 else 9


def _share_missing(view: View, sent: Counter, found: Series) -> Series:
    """[n] share of what was sent off in the steps around each that did not come."""
    known = np.flatnonzero(np.isfinite(sent.each) & np.isfinite(found))
    out = np.full(view.n, np.nan)
    width = _width(len(known))
    if len(known) < max(LEAST_VALUES, width):
        return out
    window = np.ones(width)
    ends = np.convolve(window, np.ones(len(known)), "same")
    a, b = (np.convolve(x[known], window, "same") / ends for x in (sent.each, found))
    out[known] = 1.0 - b / np.maximum(a, 1e-9)
    return out
