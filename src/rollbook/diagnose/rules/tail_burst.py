"""A few responses run on to the limit, in bursts, and each step that has one waits for it with idle GPUs.

The longest response and the seconds of generation jump together; the mean length hardly moves.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.rare_tails import CALLS, rare_tails
from rollbook.diagnose.rules.parts.stretches import (
    BEYOND_CHANCE_NATS,
    FAR_LONGER_NATS,
    LEAST_HITS,
    is_own_scatter,
    own_reach,
    stretch,
)
from rollbook.diagnose.series import Series
from rollbook.diagnose.signs.seconds import beyond_lengths, is_of_the_schedule, waiting_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "tail_burst"
TITLE = "a few very long responses hold up the steps that have them"
ACTION = (
    "cap the response length or penalise overlong answers, continue unfinished responses in the next step, or "
    "train on what has finished (asynchronous schedule)"
)
CHECK = "read the longest responses of one such step: repetition, or honest reasoning cut short?"
TAIL = "rollout/tail_s"
PACE = "seconds of the tail beyond length"
"""Derived: seconds in which a tail shows, over what mean lengths explain, as a multiple of its own median."""
TURNS = "num_turns/max"
"""Turns of the longest trajectory: one that is stuck goes round until the limit."""
CLEARLY_APART = 1.6
"""Seconds of the steps with long responses over those of the steps without, from which on it does not matter that
something else made all of them slower."""
TOKENS = (
    "response_length/max",
    "response_length/p99",
    "generated/response_length/max",
    "generated/response_length/p99",
)
CLEARLY_LONGER = 4.0
"""Growth of the longest responses from which on their tokens say more than the seconds of a host that swings."""
LEAST_GROWTH = 1.5
"""Growth of the longest responses from which on they are long."""
LEAST_RATE = 0.12
"""Share of the steps of a stretch that must have one, where the longest of so many may be as long by themselves."""
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
    is_call = evidence[0].metric in CALLS
    return Finding(
        rule=RULE,
        title="a few very long calls hold up the steps that have them" if is_call else TITLE,
        area="implementation",
        confidence=0.8,
        step=evidence[0].step,
        evidence=evidence,
        cost_s=cost_s,
        action="put a deadline on every call, below the seconds of a step, and score what runs into it as it is"
        if is_call
        else ACTION,
        next_check="which tool, with which arguments, took so long, and on which host?" if is_call else CHECK,
    )


LEAST_STRETCH = 3
"""Steps that a stretch must last: of few samples one now and then runs to the limit by chance."""
CUT_OFF = 0.003
"""Share of responses that run on to the limit in a stretch, over the steps beside it, from which on it is one."""


def _in_spells(view: View, gen: str) -> Finding | None:
    """Stretches in which a few responses run to the limit and all wait for them, beside steps in which none does. One
    wait swings so much that no single step tells; the stretches together do."""
    clip = "response_length/clip_ratio"
    spells = view.spells(clip, log=False, least=CUT_OFF)
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
    quiet = view.values[clip][~spells.hit]
    before, step = float(np.nanmedian(quiet)), view.step_at(spells.first)
    evidence = (
        Evidence(
            metric=clip,
            step=step,
            before=before,
            after=spells.inside,
            says=f"{num(spells.inside)} in {len(spells.stretches)} stretches, {num(before)} beside them",
        ),
        Evidence(
            metric=gen,
            step=step,
            before=waits.before,
            after=waits.after,
            says=f"{num(waits.before)} s in steps without them, {num(waits.after)} s in those steps",
        ),
    )
    return Finding(
        rule=RULE,
        title=TITLE,
        area="implementation",
        confidence=0.78,
        step=step,
        evidence=evidence,
        cost_s=float(np.clip(view.values[gen][hit] - waits.before, 0, None).sum()) * view.stride,
        action=ACTION,
        next_check=CHECK,
    )


def _tails(view: View, longest: str) -> list[tuple[str, Series, float]]:
    """(metric, length of the tail relative to the mean, least growth) for every series that shows the tail."""
    out = []
    mean = view.values.get("response_length/mean")
    for metric in dict.fromkeys(
        (longest, "response_length/p99", "generated/response_length/p99", "rollout/tail_s")
    ):
        values = view.values.get(metric)
        if values is not None and np.isfinite(values).sum() >= 12:
            relative = values / mean if mean is not None and metric != TAIL else values
            out.append((metric, relative, LEAST_GROWTH))
            if metric in TOKENS and (reach := own_reach(relative)) > LEAST_GROWTH:
                out.append((metric, relative, reach))
    turns = view.values.get(TURNS)
    if turns is not None and np.isfinite(turns).sum() >= 12 and view.level(TURNS) > 2:
        out.append((TURNS, turns, 2.0))
    clip = view.values.get("response_length/clip_ratio")
    if clip is not None and np.isfinite(clip).sum() >= 12:
        out.append(("response_length/clip_ratio", clip + 0.004, 2.0))
    return out


@dataclass(frozen=True, slots=True)
class _Bursts:
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


def _judge_tail(view: View, waiting: str, metric: str, tail: Series, least: float) -> Finding | None:
    bursts = _bursts(view, metric, tail, least)
    if bursts is None or not _has_a_beginning(bursts) or not _long_ones_cost(bursts):
        return None
    if _is_explained(view, waiting, bursts):
        return None
    return _found(view, waiting, bursts)


def _bursts(view: View, metric: str, tail: Series, least: float) -> _Bursts | None:
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
    return _Bursts(metric, least, at, tail, pace, least_long, long, slow, by_tokens, *stretch(counted))


def _has_a_beginning(bursts: _Bursts) -> bool:
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


def _long_ones_cost(bursts: _Bursts) -> bool:
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


def _is_explained(view: View, waiting: str, bursts: _Bursts) -> bool:
    """Whether longer answers, a new level, a slow host or deadlines are what there is instead."""
    metric, hit, start = bursts.metric, bursts.hit, int(bursts.at[bursts.begin])
    is_clip = metric == "response_length/clip_ratio"
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


def _found(view: View, waiting: str, bursts: _Bursts) -> Finding | None:
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
    return Finding(
        rule=RULE,
        title=TITLE,
        area="implementation",
        confidence=share(0.65 + 0.25 * min(1.0, bursts.rate) + 0.1 * (bursts.rate_outside == 0)),
        step=step,
        evidence=(
            Evidence(metric=metric, step=step, before=before, after=after, says=says),
            Evidence(metric=waiting, step=step, before=usual, after=slow_gen, says=waits),
        ),
        cost_s=float(np.clip(seconds[hit] - usual, 0, None).sum()) * view.stride,
        action=ACTION,
        next_check=CHECK,
    )


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
    tail = max((_ratio_at(view, metric, i) for i in range(max(3, start - slack), start + slack)), default=1.0)
    slow = max(
        (_ratio_at(view, waiting, i) for i in range(max(3, start - slack), start + slack)), default=1.0
    )
    return tail >= 0.8 * least and slow >= 1.25


def _ratio_at(view: View, metric: str, idx: int) -> float:
    c = view.contrast(metric, idx, width=6)
    few = 0.004 if metric.endswith("clip_ratio") else 0.0  # a response or two
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


def _beyond_noise(values: Series, quiet: float) -> float:
    """Factor over the quiet level that noise alone seldom reaches; told from below it, where bursts have no part."""
    low = quiet - values[values <= quiet]
    return 1.0 + 3.5 * 1.4826 * float(np.median(low)) / max(quiet, 1e-12) if len(low) else 1.0


def _quiet(values: Series) -> float:
    """Level without bursts: median of the first quarter, or of the lower half where that is lower."""
    first = float(np.median(values[: max(5, len(values) // 4)]))
    return min(first, float(np.median(np.sort(values)[: max(5, len(values) // 2)])) * 1.15)
