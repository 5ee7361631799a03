"""One source whose scorer broke in a log that has no rewards by source (`one_source_all_zero`): a part of the mean
reward is gone at one step while answers, prompts and policy stand. A validation by source may still tell whose."""

from __future__ import annotations

import re

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.rules.parts.every_reward_zero import policy_stands
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.environments import failures_rise
from rollbook.diagnose.signs.rewards import held_out_of, reward_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast
from rollbook.observe.numbers import counted

RULE = "one_source_all_zero"
OTHERS_SOLVE = 0.2
"""Share of right answers of every other source from which on a source without one stands out."""
HARD = re.compile(r"aime|hmmt|olymp|imo\b|usamo|putnam|frontier|humanity|hle\b|arc.?agi", re.IGNORECASE)
"""Benchmarks of which a small model may solve nothing at all."""
STEEP = 8.0
"""Standard errors by which the mean reward falls at once, where nothing else tells whose scorer broke."""


def part_of_the_reward_gone(view: View) -> Finding | None:
    """The mean reward falls at one step and stays there, while the answers, the prompts and the policy do not move: a
    part of it is no longer given. The log names no source, so it cannot say whose."""
    reward = reward_of(view)
    fall = reward.fall
    if fall is None or reward.metric is None or fall.end_idx is not None or view.run.seams:
        return None
    c = view.contrast(reward.metric, fall.idx, width=10)
    dead = _dead_in_a_validation(view, fall.idx)
    logged = view.has("response_length/mean", "actor/entropy", "prompt_length/mean") or dead is not None
    if c is None or c.score > -STEEP or not c.is_at_once or not logged:
        return None
    if not policy_stands(view, fall.idx) or failures_rise(view, fall.idx):
        return None
    says = f"{num(reward.drop_frac)} of it lost at one step, to the end; what the policy writes stands"
    evidence = (of_contrast(view, c, fall.idx, says), *(dead[1:] if dead else ()))
    title = "a part of the rewards is gone at once while the answers did not change"
    return Finding(
        rule=RULE,
        title=f"{title}: source {dead[0]!r} has no right answer since" if dead else title,
        area="data",
        confidence=0.8 if dead else 0.6,
        step=fall.step,
        evidence=evidence,
        cost_reward=-c.diff,
        action=f"log the mean reward by source, and look at rewards of zero from step {fall.step} on: the scorer of "
        "one source broke, or the mix of prompts changed there",
        next_check="score ten reference answers of every source, in the worker that scores during training",
    )


def _dead_in_a_validation(view: View, since: int) -> tuple[str, Evidence] | None:
    """The one source that has no right answer in any validation since a step, be it a single one, and had some before;
    all others have."""
    late = {
        s: (m, values) for s, m in held_out_of(view).items() if len(values := finite(view.values[m][since:]))
    }
    dead = [s for s, (_, values) in late.items() if not np.any(np.abs(values) > 1e-9) and not HARD.search(s)]
    if len(dead) != 1 or len(late) < 2:
        return None
    metric, zeros = late[dead[0]]
    lives = all(float(np.median(values)) >= OTHERS_SOLVE for s, (_, values) in late.items() if s != dead[0])
    if not lives or np.any(np.abs(finite(view.values[metric][:since])) <= 1e-9):
        return None
    says = (
        f"exactly 0 in {counted(len(zeros), 'validation')} since, where every other source has right answers"
    )
    return dead[0], Evidence(metric=metric, step=view.step_at(since), after=0.0, says=says)
