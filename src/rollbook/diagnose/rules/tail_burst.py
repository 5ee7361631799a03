"""A few responses run on to the limit, in bursts, and each step that has one waits for it with idle GPUs.

The longest response and the seconds of generation jump together; the mean length hardly moves. Three ways to see it: a
stretch in which such steps are frequent (`parts/bursts.py`), spells in which more answers are cut off, and few steps
far apart (`parts/rare_tails.py`). Longer answers, a slow host and deadlines make steps wait as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.bursts import (
    LEAST_GROWTH,
    PACE,
    TOKENS,
    Bursts,
    bursts_of,
    has_a_beginning,
    long_ones_cost,
)
from rollbook.diagnose.rules.parts.rare_tails import CALLS, rare_tails
from rollbook.diagnose.rules.parts.stretches import own_reach
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.seconds import beyond_lengths, is_of_the_schedule, waiting_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "tail_burst"
ACTION = (
    "cap the response length or penalise overlong answers, continue unfinished responses in the next step, or "
    "train on what has finished (asynchronous schedule)"
)
CHECK = "read the longest responses of one such step: repetition, or honest reasoning cut short?"
finding = partial(
    Finding,
    rule=RULE,
    title="a few very long responses hold up the steps that have them",
    area="implementation",
    action=ACTION,
    next_check=CHECK,
)
TAIL = "rollout/tail_s"
TURNS = "num_turns/max"
"""Turns of the longest trajectory: one that is stuck goes round until the limit."""
CLIP = "response_length/clip_ratio"
LASTING = 0.9
"""Share of the steps that are hit from which a stretch is a new level and no row of bursts."""


def judge(view: View) -> Finding | NotJudged | None:
    longest = view.first("generated/response_length/max", "response_length/max", "response_length/p99")
    waiting = waiting_of(view)
    pace = beyond_lengths(view, waiting, PACE) if waiting is not None else None
    if waiting is None or pace is None or longest is None:
        return NotJudged(
            rule=RULE,
            missing=("timing_s/gen", "response_length/max", "response_length/p99"),
            lacks="seconds of generation",
            collect="log the seconds of generation and the longest responses of each step",
        )
    best: Finding | None = None
    for tail in _tails(view, longest):
        found = _judge_tail(view, waiting, *tail)
        if found is not None and (best is None or found.confidence > best.confidence):
            best = found
    return best or _in_spells(view, waiting) or _far_apart(view, waiting)


def _far_apart(view: View, waiting: str) -> Finding | None:
    """Steps that are too few and too far apart for a stretch."""
    found = rare_tails(view, waiting)
    if found is None:
        return None
    evidence, cost_s = found
    told = finding(confidence=0.8, step=evidence[0].step, evidence=evidence, cost_s=cost_s)
    if evidence[0].metric == waiting:
        return replace(
            told,
            title="a few trajectories hold up single steps, whose responses are no longer",
            confidence=0.7,
            action="put a deadline on every call and every trajectory, and go on with those that have finished",
            next_check="log the seconds of the longest call of a step: which tool, on which host?",
        )
    if evidence[0].metric not in CALLS:
        return told
    return replace(
        told,
        title="a few very long calls hold up the steps that have them",
        action="put a deadline on every call, below the seconds of a step, and score what runs into it as it is",
        next_check="which tool, with which arguments, took so long, and on which host?",
    )


LEAST_STRETCH = 3
"""Steps that a stretch must last: of few samples one now and then runs to the limit by chance."""
CUT_OFF = 0.003
"""Share of responses that run on to the limit in a stretch, over the steps beside it, from which on it is one."""


def _in_spells(view: View, gen: str) -> Finding | None:
    """Stretches in which a few responses run to the limit and all wait for them, beside steps in which none does. One
    wait swings so much that no single step tells; the stretches together do."""
    spells = view.spells(CLIP, log=False, least=CUT_OFF)
    if spells is None or spells.median_length < LEAST_STRETCH or is_of_the_schedule(view, spells):
        return None
    waits, longest = view.beside(gen, spells), view.beside("response_length/max", spells)
    if waits is None or waits.ratio < 1.25 or waits.score < 6:
        return None
    if longest is not None and (longest.ratio < 1.2 or longest.score < 4):
        return None  # the longest were as long beside them
    mean, train = view.beside("response_length/mean", spells), view.beside("timing_s/update_actor", spells)
    if mean is not None and mean.ratio >= 1.2:
        return None
    if train is not None and train.score >= 4 and waits.ratio < 1.2 * train.ratio:
        return None  # everything is slow in those steps
    hit = np.flatnonzero(spells.hit & np.isfinite(view.values[gen]))
    quiet = view.values[CLIP][~spells.hit]
    before, step = float(np.nanmedian(quiet)), view.step_at(spells.first)
    says = f"{num(spells.inside)} in {len(spells.stretches)} stretches, {num(before)} beside them"
    longer = f"{num(waits.before)} s in steps without them, {num(waits.after)} s in those steps"
    return finding(
        confidence=0.78,
        step=step,
        evidence=(
            Evidence(metric=CLIP, step=step, before=before, after=spells.inside, says=says),
            Evidence(metric=gen, step=step, before=waits.before, after=waits.after, says=longer),
        ),
        cost_s=float(np.clip(view.values[gen][hit] - waits.before, 0, None).sum()) * view.stride,
    )


def _tails(view: View, longest: str) -> Iterator[tuple[str, Series, float]]:
    """(metric, length of the tail relative to the mean, least growth) for every series that shows the tail."""
    mean = view.values.get("response_length/mean")
    shows = (longest, "response_length/p99", "generated/response_length/p99", TAIL)
    for metric in dict.fromkeys(m for m in shows if view.count(m) >= LEAST_VALUES):
        values = view.values[metric]
        relative = values / mean if mean is not None and metric != TAIL else values
        if len(finite(relative)) < LEAST_VALUES:
            continue  # lengths and their mean stand in different steps
        yield metric, relative, LEAST_GROWTH
        if metric in TOKENS and (reach := own_reach(relative)) > LEAST_GROWTH:
            yield metric, relative, reach
    if view.count(TURNS) >= LEAST_VALUES and view.level(TURNS) > 2:
        yield TURNS, view.values[TURNS], 2.0
    if view.count(CLIP) >= LEAST_VALUES:
        yield CLIP, view.values[CLIP] + FEW, 2.0


LEAST_VALUES = 12
FEW = 0.004
"""Share of the responses that one or two are."""


def _judge_tail(view: View, waiting: str, metric: str, tail: Series, least: float) -> Finding | None:
    bursts = bursts_of(view, metric, tail, least)
    if bursts is None or not has_a_beginning(bursts) or not long_ones_cost(bursts):
        return None
    if _is_explained(view, waiting, bursts):
        return None
    return _found(view, waiting, bursts)


def _is_explained(view: View, waiting: str, bursts: Bursts) -> bool:
    """Whether longer answers, a new level, a slow host or deadlines are what there is instead."""
    metric, hit, start = bursts.metric, bursts.hit, int(bursts.at[bursts.begin])
    is_clip = metric == CLIP
    if bursts.rate >= LASTING and not _step_together(view, waiting, metric, start, bursts.least):
        return True  # no burst but a level: then both must have come to it at once
    grown = view.contrast("response_length/mean", start, width=20)
    if grown is not None and is_clip and grown.ratio >= 1.3:
        return True
    # The tail is measured by the mean: it may grow, but not at once.
    if grown is not None and not is_clip and grown.ratio >= 1.5 and grown.jump >= 0.5 * grown.diff:
        return True
    if is_clip and not _grew(view, start, hit):
        # More of them end at the limit, where the longest have always ended: no step waits longer.
        return True
    seconds = view.values[waiting]
    if _host_is_slow(view, seconds, hit):
        return True
    is_small = metric == TAIL and float(np.median(view.values[metric][hit] / seconds[hit])) < 0.2
    # The seconds of a tail may also be those of what never ends, and no response is long.
    return is_small or (metric == TAIL and _ends_at_deadlines(view, start, hit))


def _found(view: View, waiting: str, bursts: Bursts) -> Finding | None:
    metric, hit, start = bursts.metric, bursts.hit, int(bursts.at[bursts.begin])
    seconds = view.values[waiting]
    before, after = view.level(metric, 0, start), float(np.median(view.values[metric][hit]))
    usual = view.level(waiting, 0, start)
    beside = bursts.at[bursts.inside][~bursts.long[bursts.inside]]
    if bursts.by_tokens and len(beside) >= 4:
        usual = float(np.median(seconds[beside]))
    slow_gen = float(np.median(seconds[hit]))
    if after < 1.2 * before or slow_gen < 1.1 * usual:
        return None  # the mean became shorter: the tail is only longer than that
    step, steps = view.step_at(start), bursts.end - bursts.begin
    says = f"{num(before)} before, {num(after)} in {len(hit)} of {steps} steps since"
    waits = f"{num(usual)} s in steps without them, {num(slow_gen)} s in those steps"
    return finding(
        confidence=share(0.65 + 0.25 * min(1.0, bursts.rate) + 0.1 * (bursts.rate_outside == 0)),
        step=step,
        evidence=(
            Evidence(metric=metric, step=step, before=before, after=after, says=says),
            Evidence(metric=waiting, step=step, before=usual, after=slow_gen, says=waits),
        ),
        cost_s=float(np.clip(seconds[hit] - usual, 0, None).sum()) * view.stride,
    )


def _ends_at_deadlines(view: View, start: int, hit: NDArray[np.intp]) -> bool:
    """Whether trajectories run into their deadline in the steps that are hit, and hardly before."""
    timeouts = view.values.get("failures/timeout/num")
    if timeouts is None:
        return False
    counted = np.nan_to_num(timeouts)
    inside = float((counted[hit] > 0).mean())
    return inside >= 0.8 and float(np.median(counted[:start])) <= 0.3 * float(np.median(counted[hit]))


def _grew(view: View, start: int, hit: NDArray[np.intp]) -> bool:
    """Whether the longest responses of the steps that are hit are longer against the mean than before, if told."""
    longest, mean = view.values.get("response_length/max"), view.values.get("response_length/mean")
    if longest is None or mean is None:
        return True
    relative = longest / mean
    before, after = relative[max(0, start - 40) : start], relative[hit]
    if not np.isfinite(before).any() or not np.isfinite(after).any():
        return True
    return float(np.nanmedian(after)) >= 1.2 * float(np.nanmedian(before))


def _step_together(view: View, waiting: str, metric: str, start: int, least: float) -> bool:
    """Whether tail and seconds rise within a few steps of a position, the tail by as much as a burst."""
    slack = max(4, view.n // 40)
    near = range(max(3, start - slack), start + slack)
    tail, slow = (max((_ratio_at(view, m, i) for i in near), default=1.0) for m in (metric, waiting))
    return tail >= 0.8 * least and slow >= 1.25


def _ratio_at(view: View, metric: str, idx: int) -> float:
    c = view.contrast(metric, idx, width=6)
    few = FEW if metric == CLIP else 0.0
    return 1.0 if c is None else (c.after + few) / max(c.before + few, 1e-12)


def _host_is_slow(view: View, seconds: Series, hit: NDArray[np.intp]) -> bool:
    """Whether the trainer's own stages take longer in those steps too."""
    train = view.values.get("timing_s/update_actor")
    if train is None:
        return False
    others = np.setdiff1d(np.flatnonzero(np.isfinite(train)), hit)
    inside = train[hit][np.isfinite(train[hit])]
    if len(inside) < 3 or len(others) < 3:
        return False
    slower = float(np.median(inside)) / float(np.median(train[others]))
    longer = float(np.median(seconds[hit])) / float(np.nanmedian(seconds[others]))
    return slower >= 1.2 and longer < 1.3 * slower
