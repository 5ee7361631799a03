"""The rewards of one data source are all zero, at once, in spells, or ever since it is there, while the others go on:
its scorer or its data broke.

Told apart from a policy that unlearned (the others fall as well, or it faded before), from harder tasks (a curriculum's
next level) and from bad luck: so few answers that none being right is chance.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.changes import noise_scale, running_median
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.every_reward_zero import every_reward_zero
from rollbook.diagnose.rules.parts.others_go_on import (
    floor_of,
    nearly_zero_while_others_go_on,
    zero_while_others_go_on,
)
from rollbook.diagnose.rules.parts.unnamed_source import HARD, OTHERS_SOLVE, RULE, part_of_the_reward_gone
from rollbook.diagnose.series import Series, finite, runs_of
from rollbook.diagnose.signs.rewards import lowest_reward, new_curriculum, reward_of, sources_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast, share

CHECK = "score the reference answers of ten of its rows, in the worker that scores during training"


def judge(view: View) -> Finding | NotJudged | None:
    train, held_out = (
        {s: m for s, m in group.items() if not _PENALTY.search(s)} for group in sources_of(view)
    )
    if not train and not held_out:
        return part_of_the_reward_gone(view) or NotJudged(
            rule=RULE,
            missing=("reward/<source>/mean", "reward/<source>/zero_frac"),
            lacks="rewards by source",
            collect="log the mean reward by data source (verl: data_source of the reward manager; "
            "validation by source)",
        )
    if (every := every_reward_zero(view, RULE)) is not None:
        return every
    found = [*_at_zero(view, train, is_held_out=False), *_at_zero(view, held_out, is_held_out=True)]
    if not found:
        return _never_right(view, train) or _never_right(view, held_out)
    surest = max(found, key=lambda zero: zero.confidence)
    others = [m for s, m in (*train.items(), *held_out.items()) if s != surest.source]
    return _finding(view, surest, others[:3])


@dataclass(frozen=True, slots=True)
class Zero:
    """A source whose rewards are all that of a wrong answer since a position."""

    confidence: float
    idx: int
    source: str
    metric: str
    is_exact: bool
    """Whether none is right, rather than hardly one."""


def _at_zero(view: View, group: dict[str, str], *, is_held_out: bool) -> Iterator[Zero]:
    """The sources of a group that came to zero while others go on, under a policy and tasks that did not change."""
    living = [s for s, m in group.items() if view.last(m, 3) > lowest_reward(view) + 1e-6]
    for source, metric in group.items():
        others = [m for s, m in group.items() if s != source]
        since, is_exact = (
            _held_out_since(view, metric, others) if is_held_out else (_trained_since(view, metric), True)
        )
        if since is None or not (living or is_held_out) or _is_unlearned(view, metric, since):
            continue
        if _others_fall(view, since, others):
            continue  # the policy changed: this one is only the first to reach zero
        past = np.flatnonzero(np.isfinite(view.values[metric][:since]))
        if len(past) and new_curriculum(view, int(past[-1]), since):
            continue  # the tasks became harder
        several = len(living) < (len(group) - 1) / 2  # at once: more likely what they share
        confidence = 0.85 if is_held_out else 0.95
        yield Zero(confidence - 0.2 * several - 0.05 * (not is_exact), since, source, metric, is_exact)


def _trained_since(view: View, metric: str) -> int | None:
    since = _zero_since(view, metric, 4)
    return _outage(view, metric) if since is None else since


def _held_out_since(view: View, metric: str, others: list[str]) -> tuple[int | None, bool]:
    """The position, and whether no answer is right there."""
    since = _zero_since(view, metric, 1)
    since = zero_while_others_go_on(view, metric, others) if since is None else since
    if since is None and (since := nearly_zero_while_others_go_on(view, metric, others)) is not None:
        return since, False
    return (_zero_now_and_then(view, metric) if since is None else since), True


def _finding(view: View, zero: Zero, others: list[str]) -> Finding:
    idx, source, metric = zero.idx, zero.source, zero.metric
    step, before, rest = view.step_at(idx), view.level(metric, 0, idx), finite(view.values[metric][idx:])
    floor = float(rest[0])  # held-out scores come every few steps
    ended = _until(view, metric, idx) if zero.is_exact else None
    num_zero = int((np.abs(rest - floor) <= 1e-9).sum())
    until = f", until step {ended}, {num_zero} times in all" if ended is not None else ""
    after = f"exactly {num(floor)}" if zero.is_exact else f"{num(float(np.median(rest)))}"
    says = f"{num(before)} before, {after} since step {step}{until}"
    evidence = [Evidence(metric=metric, step=step, before=before, after=floor, says=says)]
    beside = (view.contrast(other, idx) for other in others)
    evidence += [of_contrast(view, c, idx, "goes on") for c in beside if c is not None]
    c = view.contrast(reward_of(view).metric, idx)
    if c is not None and c.score < -3:
        evidence.append(of_contrast(view, c, idx))
    is_out = (
        f"take {source!r} out of the mix until its scorer gives full marks to its own reference answers again"
    )
    was_out = (
        f"its scorer was down: take the run up from before step {step}, or know that the updates until step {ended} "
        "learned from zeros; let a scorer that fails fail its trajectory instead of scoring it 0"
    )
    some = "" if zero.is_exact else "nearly "
    return Finding(
        rule=RULE,
        title=f"{some}all rewards of source {source!r} "
        + ("are zero" if ended is None else f"were zero until step {ended}"),
        area="data",
        confidence=share(zero.confidence),
        step=step,
        evidence=tuple(evidence),
        cost_reward=max(0.0, -c.diff) if c is not None else None,
        action=is_out if ended is None else was_out,
        next_check=CHECK,
        until_step=ended,
    )


def _zero_since(view: View, metric: str, least: int) -> int | None:
    """Position from which a reward that used to be higher is exactly that of wrong answers, to the end."""
    floors = {0.0, lowest_reward(view)}
    found = [since for floor in floors if (since := _at_floor_since(view, metric, floor, least)) is not None]
    return min(found, default=None)


OUTAGE_STEPS = 6
"""Steps in a row at the floor from which on a source that came back was out, and not unlucky."""


def _outage(view: View, metric: str) -> int | None:
    """Position of the longest stretch in which a reward that was well above the floor stood exactly at it, and which
    ended: a scorer that was down for a while."""
    values = view.values[metric] - min(0.0, lowest_reward(view))
    known = np.flatnonzero(np.isfinite(values))
    if not len(known):
        return None
    at_floor = np.abs(values[known]) <= 1e-9
    best: tuple[int, int] | None = None
    for start, end in runs_of(at_floor):
        past = at_floor[max(0, start - 40) : start]
        usual = values[known[max(0, start - 20) : start]]
        if end - start < OUTAGE_STEPS or len(usual) < 6 or np.median(usual) < 0.02:
            continue
        if ((past.sum() + 1) / (len(past) + 2)) ** (end - start) <= 1e-3 and (
            best is None or end - start > best[0]
        ):
            best = (end - start, int(known[start]))
    return None if best is None else best[1]


LUCK_NATS = 9.0
"""Right answers to be expected in a score from which on none at all is no bad luck: its odds are exp of minus that."""


def _num_answers(values: Series, top: float = 1.0) -> float:
    """Answers that one score counts, at least: scores are multiples of one over their number, and scatter with it.

    Args:
        values: [n] scores above that of wrong answers, from 0 to `top`; zeros do not count, they may be a fault's.
    """
    some = values[np.isfinite(values) & (np.abs(values) > 1e-9)] / top
    steps = np.diff(np.unique(np.round(some, 9)))
    if len(some) < 4 or not len(steps):
        return 0.0
    level = min(max(float(np.median(some)), 1e-6), 1 - 1e-6)
    by_scatter = level * (1 - level) / max(noise_scale(some), 1e-6) ** 2
    return min(1.0 / float(steps.min()), by_scatter)


def _answers_of(view: View, metric: str) -> float:
    floor = floor_of(view, metric)
    return _num_answers(view.values[metric] - floor, 1.0 - floor)


def _zero_now_and_then(view: View, metric: str) -> int | None:
    """Position of the first of several held-out scores that are exactly those of wrong answers while those between
    count so many right ones that chance is out."""
    floor = floor_of(view, metric)
    values = view.values[metric] - floor
    known = np.flatnonzero(np.isfinite(values))
    zeros = known[np.abs(values[known]) <= 1e-9]
    some = values[known][np.abs(values[known]) > 1e-9]
    if len(zeros) < 2 or len(some) < 4 or zeros[0] == known[0]:
        return None
    expected = float(np.quantile(some, 0.2)) / (1.0 - floor) * _answers_of(view, metric)
    return int(zeros[0]) if expected >= LUCK_NATS and float(np.median(some)) >= 0.02 else None


LEAST_ANSWERS = 1000
"""Answers of one source, all of them wrong, from which on it is no luck, whatever its difficulty."""
_PENALTY = re.compile(r"penalt|overlong|too_?long|repetit|malus|deduct", re.IGNORECASE)
"""What only takes away: it is zero where there is nothing to take away for."""
_FORM = re.compile(r"format|xml|tag|strict|soft|length|style|count|boxed", re.IGNORECASE)
"""Reward functions of TRL that ask for a form, which a model may never meet: no data of their own."""
_FORMAT = re.compile(r"^format", re.IGNORECASE)
"""The same in any log."""


def _never_right(view: View, group: dict[str, str]) -> Finding | None:
    """A source without one right answer in all of the run, or since it was added, beside others that are solved."""
    form = _FORM if view.run.format == "trl" else _FORMAT
    group = {s: m for s, m in group.items() if not form.search(s)}
    levels = {s: view.level(m) - floor_of(view, m) for s, m in group.items()}
    top = {s: float(np.nanmax(view.values[m])) - floor_of(view, m) for s, m in group.items()}
    dead = [s for s in group if top[s] <= 1e-9 and not HARD.search(s)]
    others = [s for s in group if top[s] > 1e-9]
    if len(dead) != 1 or not others or min(levels[s] for s in others) < OTHERS_SOLVE:
        return None
    source, metric = dead[0], group[dead[0]]
    known = np.flatnonzero(np.isfinite(view.values[metric]))
    num_answers = max(_answers_of(view, group[s]) for s in others)
    if len(known) < 3 or num_answers * len(known) < LEAST_ANSWERS:
        return None
    begin = int(known[0])
    earliest = min(int(np.flatnonzero(np.isfinite(view.values[group[s]]))[0]) for s in others)
    is_new = begin >= earliest + 5
    says = f"not one right answer in {len(known)} scores" + (", ever since it is there" if is_new else "")
    evidence = [Evidence(metric=metric, step=view.step_at(begin), after=0.0, says=says)]
    for other in others[:3]:
        says = f"{num(view.level(group[other]))}, in the same scores"
        evidence.append(
            Evidence(metric=group[other], step=view.step_at(begin), after=levels[other], says=says)
        )
    cost = None
    fall = reward_of(view).fall
    if is_new and fall is not None and abs(fall.idx - begin) <= max(12, view.n // 12):
        c = view.contrast(reward_of(view).metric, fall.idx)
        if c is not None:
            evidence.append(of_contrast(view, c, fall.idx, "the rewards of training fell with it"))
            begin, cost = min(begin, fall.idx), max(0.0, -c.diff)
    return Finding(
        rule=RULE,
        title=f"source {source!r} never had a right answer" + (" since it was added" if is_new else ""),
        area="data",
        confidence=0.85 if cost is not None else 0.75,
        step=view.step_at(begin),
        evidence=tuple(evidence),
        cost_reward=cost,
        action=f"take {source!r} out of the mix until its scorer gives full marks to its own reference answers: its "
        "parser may expect another format, or its reference answers may be of other rows",
        next_check=CHECK,
    )


def _until(view: View, metric: str, idx: int) -> int | None:
    """The step at which a reward that stood at its floor left it again."""
    values = view.values[metric][idx:] - min(0.0, lowest_reward(view))
    back = np.flatnonzero(np.isfinite(values) & (np.abs(values) > 1e-9))
    return view.step_at(idx + int(back[0])) if len(back) else None


FADED = 0.25
"""Share of its best level below which the last scores before the zeros have faded: a scorer dies at once."""


def _is_unlearned(view: View, metric: str, since: int) -> bool:
    """Whether a score had faded out before its zeros, under a policy whose entropy grows and grows."""
    ratio, steadiness = view.trend("actor/entropy")
    if not (ratio >= 1.4 and steadiness >= 0.8):
        return False
    past = view.values[metric][:since] - floor_of(view, metric)
    past = finite(past)
    some = past[np.abs(past) > 1e-9]
    width = 7 if len(past) >= 20 else 3
    return len(some) >= 4 and float(np.median(some[-3:])) < FADED * float(np.max(running_median(past, width)))


def _at_floor_since(view: View, metric: str, floor: float, least: int) -> int | None:
    values = view.values[metric] - floor
    known = np.flatnonzero(np.isfinite(values))
    top = float(np.nanmax(np.abs(values)))
    positive = known[np.abs(values[known]) > max(1e-9, 0.01 * top)]
    if not len(positive) or len(known) < least + 2:
        return None
    zeros = known[known > positive[-1]]
    if len(zeros) < least:
        return None
    past = known[known <= positive[-1]]
    usual = np.abs(values[past[-20:]])
    if np.median(usual) < 0.02 or values[positive[-1]] < 0.25 * np.median(usual):
        return None  # it was near zero before, or faded out
    begin, last_positive = int(zeros[0]), int(positive[-1])
    fall = reward_of(view).fall
    fell_too = fall is not None and last_positive <= fall.idx <= begin + 1
    # How likely are so many zeros in a row by chance, given how common they were?
    chance = ((np.sum(usual <= 0.01 * top) + 1) / (len(usual) + 2)) ** len(zeros)
    if chance > (0.3 if fell_too else 1e-3):
        return None
    if fall is not None and fell_too and begin - last_positive > 3:
        return fall.idx  # logged now and then: the reward of every step tells when
    return begin


BEYOND_SCATTER = 2.5
"""Standard errors of two medians by which a source that scatters must have fallen."""


def _others_fall(view: View, since: int, others: list[str]) -> bool:
    """Whether every other source lost a fifth as well, at that step or over time."""
    bottom = lowest_reward(view)
    lost = []
    for metric in others:
        values = view.values[metric] - bottom
        before, after = values[:since], values[since:]
        before, after = finite(before)[-6:], finite(after)
        if not len(before) or not len(after):
            continue
        best = float(np.quantile(finite(values), 0.9))
        scatter = 1.25 * noise_scale(finite(values)) * np.sqrt(1 / len(before) + 1 / len(after))
        gone = float(np.median(before)) - float(np.median(after))
        fell = gone > max(0.2 * float(np.median(before)), BEYOND_SCATTER * scatter)
        lost.append(fell or float(np.median(after[-max(3, min(10, len(after) // 3)) :])) < 0.5 * best)
    return bool(lost) and all(lost)
