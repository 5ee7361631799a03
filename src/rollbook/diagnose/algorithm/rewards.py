"""A reward that falls, stands still, or is near its top while nothing of the system explains it."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.signs.rewards import REWARD, of_all_answers, reward_decline
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, until_now


def reward_falls(view: View) -> State | None:
    falls = reward_decline(view)
    if falls is None:
        return None
    return State(
        name="reward_falls",
        title=f"the reward falls, from {num(falls.before)} to {num(falls.after)}",
        step=falls.step,
        evidence=(until_now(falls),),
        advice=f"go back before step {falls.step}; lower the learning rate or add a KL term, and compare answers of "
        "then and now: has the mix of prompts become harder, or has the policy unlearned?",
    )


def reward_saturates(view: View) -> State | None:
    trained, metric = view.first(*REWARD), of_all_answers(view)
    if trained is None or metric is None or view.n < 12:
        return None
    top = _best_of(view, trained.replace("/mean", "/max"))
    last = view.last(metric, max(5, view.n // 10))
    if not np.isfinite(top):
        top = _best_of(view, "critic/rewards/max")  # of a score it lacks the KL term, and may lie below it
        top = top if top >= last else np.nan
    if not np.isfinite(top) and float(np.nanmax(view.values[metric])) > 1.02:
        return None  # a sum of parts: nobody knows its top
    top = top if np.isfinite(top) and top > 0 else 1.0
    if last < 0.9 * top:
        return None
    at = int(np.flatnonzero(np.nan_to_num(view.values[metric], nan=-np.inf) >= 0.9 * top)[0])
    return State(
        name="reward_saturates",
        title="the reward is near its top: little is left to learn from these prompts",
        step=view.step_at(at),
        evidence=(
            Evidence(
                metric=metric, step=view.step_at(at), after=last, says=f"{num(last)} of at most {num(top)}"
            ),
        ),
        advice="take harder prompts, or stop",
    )


def _best_of(view: View, metric: str) -> float:
    """The most that an answer ever got: a step without a right one has a lower best."""
    return float(np.nanmax(view.values[metric])) if view.count(metric) else np.nan


def plateau(view: View) -> State | None:
    metric = view.first(*REWARD)
    if metric is None or view.n < 40:
        return None
    half = view.n // 2
    early, late = view.level(metric, half, half + view.n // 8), view.last(metric, view.n // 8)
    c = view.contrast(metric, half, width=view.n // 4)
    if c is None or abs(late - early) > max(0.02 * max(abs(early), 0.1), 0.7 * c.noise):
        return None
    says = f"{num(early)} half-way, {num(late)} now"
    return State(
        name="plateau",
        title="the reward stands still",
        step=view.step_at(half),
        evidence=(Evidence(metric=metric, step=view.step_at(half), before=early, after=late, says=says),),
        advice="a question of data and algorithm: difficulty of the prompts, group size, learning rate, exploration",
    )
