"""Most groups are flat (all members right, or all wrong), the filter drops them, and generation runs again and again to
fill a batch. The seconds go where the dropped samples go.

For good from a step on, or in some steps among others. A filter of a sound mix drops a part and costs little; a task
that is solved leaves little to train and makes nothing again.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import running_median
from rollbook.diagnose.filter_words import BATCHES, DROPPED
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import Series
from rollbook.diagnose.signs.dropped import FLAT_GROUPS, batch_of
from rollbook.diagnose.signs.rewards import reward_of
from rollbook.diagnose.signs.seconds import excess_of
from rollbook.diagnose.stops import Stop, stopped_by
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, share

RULE = "filter_starvation"

KEPT = ("filter/kept_frac", "batch/effective_frac")

MOSTLY_RIGHT = 0.6
"""Mean reward from which on most flat groups are solved ones."""
MOSTLY_WRONG = 0.3
"""That up to which most are failed ones."""
SLOWER = 1.4
"""Seconds of generation over what the lengths explain, from which on what is dropped is made again."""


def judge(view: View) -> Finding | NotJudged | None:
    dropped, kept = view.first(*DROPPED) or _evicted(view), view.first(*KEPT)
    starved = stopped_by(view, RULE)
    if dropped is None and kept is None and starved is None:
        return NotJudged(
            rule=RULE,
            missing=(DROPPED[0], KEPT[0]),
            lacks="filter of flat groups",
            collect="only with a filter of flat groups (DAPO): log how many samples it drops",
        )
    lasting = _for_good(view, dropped, kept, starved)
    return lasting if lasting is not None or starved is not None else _in_some_steps(view, dropped)


def _for_good(view: View, dropped: str | None, kept: str | None, starved: Stop | None) -> Finding | None:
    """From a step on the filter drops most of what is generated, or that ended the run."""
    evidence: list[Evidence] = [] if starved is None else [starved.evidence()]
    idx: int | None = None
    ramps: list[Break] = []
    if (rise := _rise(view, dropped, 2.0)) is not None and rise.late >= 2:
        evidence.append(of_break(rise, "samples dropped a step"))
        idx = rise.idx
        ramps.append(rise)
    fall = view.fall(kept)
    if fall is not None and fall.late <= 0.4 and fall.ratio <= 0.6 and fall.score >= 5:
        evidence.append(of_break(fall, "share of groups that is left"))
        idx = fall.idx if idx is None else min(idx, fall.idx)
        ramps.append(fall)
    if idx is None and starved is not None:
        some = np.flatnonzero(np.nan_to_num(view.values[dropped]) > 0).tolist() if dropped is not None else []
        idx = some[0] if some else view.n - 1  # from the first steps on, or in the last one alone
    if idx is None:
        return None
    least = SLOWER if starved is not None else _least_slowdown(view, dropped, idx)
    if least is None:
        return None
    excess = excess_of(view)
    slower = _rise(view, excess, least)
    costs = slower is not None and slower.idx >= idx - max(8, view.n // 10)
    grown, steadiness = view.trend(excess)
    costs |= grown >= least and steadiness >= 0.6  # with the drops, so slowly that no step stands out
    makes_no_more = _asks_for_no_more(view, idx)
    costs &= not makes_no_more
    reward = view.last(reward_of(view).metric or "", 10)
    smaller = view.fall(view.first("batch/num_groups", "batch/num_sequences"))
    shrinks = smaller is not None and smaller.ratio <= 0.6 and smaller.score >= 5
    shrinks &= not (makes_no_more and reward > MOSTLY_RIGHT)  # a task that is solved leaves little to train
    if not (costs or shrinks or starved is not None):
        return None
    cost_s = None
    if slower is not None and costs:
        now = view.level("timing_s/gen", slower.idx)
        cost_s = float(now * (1 - 1 / slower.peak_ratio) * (view.n - slower.idx) * view.stride)
        says = f"generation takes {num(slower.peak_ratio)} times what the lengths explain"
        evidence.append(Evidence(metric="timing_s/gen", step=slower.step, after=now, says=says))
    if smaller is not None and shrinks:
        evidence.append(of_break(smaller))
    side = " (most answers are right)" if reward > MOSTLY_RIGHT else ""
    side = " (most answers are wrong)" if reward < MOSTLY_WRONG else side
    return Finding(
        rule=RULE,
        title=f"the filter of flat groups drops most of what is generated{side}",
        area="data",
        confidence=share(0.96 if starved is not None else 0.9 if costs else 0.75),
        step=view.step_at(min([idx, *map(view.foot, ramps)])),
        evidence=tuple(evidence),
        cost_s=cost_s,
        action="sample prompts by difficulty (leave out those solved always or never), mix in others, or "
        "cap the refills",
        next_check="share of right answers per prompt over the last steps: how many prompts are neither 0 nor 1?",
    )


def _least_slowdown(view: View, dropped: str | None, idx: int) -> float | None:
    """How much slower generation must be where so much is dropped; None where most of what is generated is trained, or
    the seconds that alone tell are those of a tail."""
    part = _dropped_share(view, dropped) if dropped is not None else None
    if dropped is None or part is None or part >= MOSTLY:
        return SLOWER
    if not _counts_groups(view, dropped) or _takes_two_batches(view):
        return None
    if view.has(BATCHES):
        return SLOWER
    return None if _longest_grew(view, idx) else TWICE_AS_MUCH  # of how many groups, only the seconds tell


MOST_DROPPED = 0.72
"""Share of what a step generates that is dropped from which on it starves: a filter of a sound mix makes one batch more
and drops half."""
LEAST_STARVED = 6
"""Steps that starve before it is called one."""


def _in_some_steps(view: View, dropped: str | None) -> Finding | None:
    """Steps in which most of what is generated is dropped and generation takes longer at the same lengths, among others
    in which it is not: by the shard, or more and more often."""
    excess = excess_of(view)
    if dropped is None or excess is None:
        return None
    values, pace = view.values[dropped], view.values[excess]
    known = np.isfinite(values) & np.isfinite(pace)
    starved = known & (_share_of_made(view, dropped) >= MOST_DROPPED)
    if starved.sum() < max(LEAST_STARVED, 0.04 * view.n):
        return None
    then = float(np.median(values[starved]))
    calm = known & ~starved & (values <= 0.6 * then)
    if calm.sum() < 0.25 * view.n:
        return None
    usual = float(np.median(values[calm]))
    slower = float(np.median(pace[starved])) / float(np.median(pace[calm]))
    idx = int(np.flatnonzero(starved)[0])
    if then < 2.0 * usual or slower < 1.35 or _asks_for_no_more(view, idx):
        return None
    gen = view.values["timing_s/gen"]
    usual_s, then_s = float(np.nanmedian(gen[calm])), float(np.nanmedian(gen[starved]))
    cost = float(np.nansum(np.clip(gen[starved] * (1 - 1 / slower), 0, None))) * view.stride
    step, count = view.step_at(idx), int(starved.sum())
    return Finding(
        rule=RULE,
        title="the filter of flat groups drops most of what is generated in a part of the steps",
        area="data",
        confidence=0.85,
        step=step,
        evidence=(
            Evidence(
                metric=dropped,
                step=step,
                before=usual,
                after=then,
                says=f"{num(then)} dropped in {count} steps, {num(usual)} in the others",
            ),
            Evidence(
                metric="timing_s/gen",
                step=step,
                before=usual_s,
                after=then_s,
                says=f"{num(then_s)} s in those steps, {num(usual_s)} s in the others, at such lengths",
            ),
        ),
        cost_s=cost,
        action="sample prompts by difficulty across shards: leave out those that are solved always or never, or cap "
        "the refills",
        next_check="share of right answers by shard or source in one of those steps",
    )


def _share_of_made(view: View, dropped: str) -> Series:
    """[n] share of a step's generated samples that the filter drops; NaN where it cannot be told."""
    values = view.values[dropped]
    if dropped == BATCHES:  # of a usual step half is kept at the least
        usual = max(float(np.nanquantile(values, 0.25)), 1.0)
        return np.asarray(1.0 - 0.65 / np.maximum(values / usual, 0.65))
    batch = batch_of(view, dropped)
    return np.asarray(values / (values + batch)) if np.isfinite(batch) else np.full(view.n, np.nan)


def _asks_for_no_more(view: View, idx: int) -> bool:
    """Whether a step generates as many responses as before: flat groups are then left out and nothing is made again,
    which is what a solved task looks like."""
    metric = "generated/num_trajectories"
    made = view.contrast(metric, idx, width=20)
    if made is None:
        return False
    return max(made.ratio, view.last(metric, 20) / max(made.before, 1.0)) < 1.15  # drops may grow from little


def _evicted(view: View) -> str | None:
    """Name of the groups dropped a step, 0 in the steps that say nothing of it; None where none was ever dropped."""
    values = view.values.get(FLAT_GROUPS)
    if values is None or view.n < 3:
        return None
    return view.derive(f"{FLAT_GROUPS}, all steps", np.nan_to_num(values))


MOSTLY = 0.55
"""Share of the generated samples that is dropped from which on it is most of them."""
TWICE_AS_MUCH = 1.65
"""Seconds of generation over what the lengths explain, from which on most of what is made is dropped: a filter of a
sound mix drops a quarter, and (1 - 1/4) / (1 - MOSTLY) is this."""
OUTRANKS = 0.9
"""Share of the pairs of an earlier and a later step of which the later one has more, from which on a series that swings
by its own size all the same rose."""


def _rise(view: View, metric: str | None, least: float) -> Break | None:
    """A rise to `least` times as much or more that stays. Drops come by whole groups, and of few groups: where single
    steps swing so much that none stands out, nearly every step after must have more than nearly every one before."""
    if metric is None or metric not in view.values:
        return None
    rise = view.rise(metric)
    if rise is not None and rise.peak_ratio >= least and rise.score >= 5:
        return rise
    known = np.flatnonzero(np.isfinite(view.values[metric]))
    if len(known) < 24:
        return None
    values = view.values[metric]
    smooth = np.full(view.n, np.nan)
    smooth[known] = running_median(values[known], max(9, len(known) // 20) | 1)
    rise = view.rise(view.derive(f"{metric}, smoothed", smooth, of=(metric,)))
    if rise is None or rise.peak_ratio < least or rise.end_idx is not None:
        return None
    before, after = np.sort(values[known[known < rise.idx]]), values[known[known >= rise.idx]]
    if len(before) < 8 or len(after) < 8:
        return None
    beaten = 0.5 * (np.searchsorted(before, after) + np.searchsorted(before, after, side="right"))
    return replace(rise, metric=metric) if beaten.mean() >= OUTRANKS * len(before) else None


def _dropped_share(view: View, dropped: str) -> float | None:
    """Late share of the generated samples that the filter drops, if that counts samples; None when the batch size
    cannot be told."""
    late, batch = view.last(dropped), batch_of(view, dropped)
    known = dropped != BATCHES and np.isfinite(batch) and np.isfinite(late) and late + batch > 0
    return float(late / (late + batch)) if known else None


def _longest_grew(view: View, idx: int) -> bool:
    """Whether the longest responses are longer than before a position, by so much that a step waits for them."""
    for metric in ("response_length/max", "response_length/p99"):
        before, late = (
            view.level(metric, max(0, idx - 40), idx),
            view.level(metric, idx + (view.n - idx) // 2),
        )
        if late >= LONGER * before:
            return True
    return False


LONGER = 1.4
"""Times as long."""


def _takes_two_batches(view: View) -> bool:
    """Whether a step is known to take so few batches that no more than half is dropped."""
    return view.last(BATCHES) < 1.0 / (1.0 - MOSTLY)


def _counts_groups(view: View, dropped: str) -> bool:
    """Whether a count is one of groups, whatever its name says: groups are dropped whole, so counts of their members
    are multiples of a group's size."""
    values = view.values[dropped]
    some = values[np.isfinite(values) & (values > 0)]
    whole = np.unique(np.round(some).astype(np.int64))
    return (
        len(whole) >= 3
        and bool(np.all(np.abs(some - np.round(some)) < 1e-6))
        and int(np.gcd.reduce(whole)) == 1
    )
