"""Sandboxes that die slowly (`dead_sandbox_pool`): ever more refuse, or ever more calls end at their time-out. No step
parts before and after; rewards go with the turns or the calls, and neither the policy nor the host changes."""

from __future__ import annotations

from functools import partial

import numpy as np

from rollbook.diagnose.changes import running_median, spearman
from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.environments import TURNS
from rollbook.diagnose.signs.gap import GAP, gap_of, parts_at
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import Moved, reward_decline, reward_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, of_moved

RULE = "dead_sandbox_pool"
ACTION = "restart the sandbox pool and take failed trajectories out of the batch instead of scoring them 0"
CHECK = "run one sandbox by hand; then look at failures by class and source for what the rest is"
finding = partial(Finding, rule=RULE, area="data", action=ACTION, next_check=CHECK)
LOST = 0.12
"""Share of the reward that must be gone."""


def dying_sandboxes(view: View) -> Finding | None:
    return _one_by_one(view) or _ever_fewer(view)


DEADLINE = 0.02
"""Spread of the longest calls, over their median, below which a time-out ends them all: it is nobody's own length."""


def _one_by_one(view: View) -> Finding | None:
    """Calls grow to many times their seconds while the longest of them, which had lengths of their own, all end at one
    time-out; rewards are lost, and the host is no fuller: nothing leaks, what is called is gone."""
    mean, longest, held = "env/turn_s/mean", "env/turn_s/max", "perf/cpu_memory_used_gb"
    rise, top = view.rise(mean), view.rise(longest)
    if rise is None or top is None or rise.end_idx is not None or rise.ratio < 2.5 or rise.score < 6:
        return None
    values = view.values[longest]
    before, after = finite(values[: top.idx]), finite(values[top.idx + 3 :])
    if len(before) < 8 or len(after) < 12 or _spread(before) < 2 * DEADLINE or _spread(after) > DEADLINE:
        return None
    usual, deadline = float(np.median(before)), float(np.median(after))
    if deadline < 1.2 * usual or view.trend(held)[0] >= 1.1:
        return None
    lost = _lost_since(view, rise.idx)
    if lost is None or parts_at(view, rise.idx):
        return None
    says = f"the longest call had a length of its own; now all end at {num(deadline)} s, a time-out"
    scores_nothing = f"{num(lost.before)} before, {num(lost.after)} now: what times out scores nothing"
    return finding(
        title="sandboxes die one by one: ever more calls run into their time-out",
        confidence=0.8,
        step=min(rise.step, top.step),
        evidence=(
            of_break(rise, "ever more calls wait for time-outs"),
            Evidence(metric=longest, step=top.step, before=usual, after=deadline, says=says),
            of_moved(lost, scores_nothing),
        ),
        cost_reward=max(0.0, lost.before - lost.after),
    )


FEWER_TURNS = 0.7
"""Turns of the end over those at first from which on episodes end early."""


def _ever_fewer(view: View) -> Finding | None:
    """Episodes end ever earlier, their calls return ever sooner, and rewards are lost with them, while the policy stays
    what it was: ever more of the sandboxes refuse."""
    seconds = "env/turn_s/mean"
    metric = reward_of(view).metric
    if metric is None or view.count(seconds) < 24 or view.count(TURNS) < 24 or view.level(TURNS) <= 2.2:
        return None
    part = max(5, view.n // 8)
    turns, calls = ((view.level(m, 0, part), view.last(m, part)) for m in (TURNS, seconds))
    lost = reward_decline(view)
    if turns[1] > FEWER_TURNS * turns[0] or calls[1] > FEWER_TURNS * calls[0] or lost is None:
        return None
    smooth = [running_median(np.nan_to_num(view.values[m], nan=view.level(m)), 7) for m in (TURNS, metric)]
    if spearman(*smooth) < 0.6 or policy_of(view).blow_up_idx is not None:
        return None
    entropy, _ = view.trend("actor/entropy")
    if not 0.8 <= entropy <= 1.25 or (gap_of(view) is not None and view.trend(GAP)[0] >= 1.5):
        return None
    begin = view.fall(TURNS)
    step = begin.step if begin is not None else lost.step
    fewer, sooner = (f"{num(turns[0])} to {num(turns[1])}", f"{num(calls[0])} s to {num(calls[1])} s")
    with_turns = f"{num(lost.before)} at its best, {num(lost.after)} now, and goes with the turns"
    return finding(
        title="sandboxes die in part: ever more episodes end early and score nothing",
        confidence=0.78,
        step=step,
        evidence=(
            Evidence(metric=TURNS, step=step, before=turns[0], after=turns[1], says=fewer),
            Evidence(metric=seconds, step=step, before=calls[0], after=calls[1], says=sooner),
            of_moved(lost, with_turns),
        ),
        cost_reward=max(0.0, lost.before - lost.after),
    )


def _lost_since(view: View, idx: int) -> Moved | None:
    """The reward of the last steps against that just before a position, where it is lower beyond its noise."""
    metric = reward_of(view).metric
    if metric is None:
        return None
    width = max(10, view.n // 10)
    before, after = view.level(metric, idx - width, idx), view.last(metric, width)
    error = 1.25 * view.noise_before(metric, view.n) * float(np.sqrt(2 / width))
    if not before - after >= max(LOST * before, 4.0 * error):
        return None
    return Moved(metric, view.step_at(idx), before, after)


def _spread(values: Series) -> float:
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
    return float((high - low) / max(float(middle), 1e-12))
