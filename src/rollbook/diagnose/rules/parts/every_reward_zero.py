"""Every reward is that of a wrong answer at once (`one_source_all_zero`, `dead_scorer`) while the answers did not
change: a scorer that is broken for the one source, or dead. Which it is, the sources tell that a log has."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.series import runs_of
from rollbook.diagnose.signs.environments import TURNS, failures_rise
from rollbook.diagnose.signs.gap import GAP, gap_of
from rollbook.diagnose.signs.policy import is_broken_update
from rollbook.diagnose.signs.rewards import REWARD, lowest_reward, other_prompts
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num


def every_reward_zero(view: View, rule: str) -> Finding | None:
    """From one step to the next every answer has the reward of a wrong one, for a while or to the end, while the
    answers themselves did not change."""
    metric = view.first(*REWARD)
    if metric is None:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    floor = lowest_reward(view)
    at_floor = np.abs(values[known] - floor) <= 1e-9
    for start, end in runs_of(at_floor):
        past = values[known[max(0, start - 20) : start]] - floor
        if end - start < 4 or len(past) < 6 or np.median(past) < 0.05 or past[-1] < 0.3 * np.median(past):
            continue
        idx = int(known[start])
        if not policy_stands(view, idx) or failures_rise(view, idx):
            continue
        lost = float(np.median(past))
        until = view.step_at(int(known[end])) if end < len(known) else None
        says = f"{num(lost + floor)} before, exactly {num(floor)} in all of the {end - start} steps since"
        return Finding(
            rule=rule,
            title="every reward is zero at once while the answers did not change: the scorer broke",
            area="data",
            confidence=0.9,
            step=view.step_at(idx),
            evidence=(
                Evidence(metric=metric, step=view.step_at(idx), before=lost + floor, after=floor, says=says),
            ),
            cost_reward=lost,
            action=f"take the run up from before step {view.step_at(idx)} once the scorer gives full marks to its own "
            "reference answers again: the updates since then learned from nothing",
            next_check="score ten reference answers in the worker that scores during training",
            until_step=until,
        )
    return None


def policy_stands(view: View, idx: int) -> bool:
    """Whether the update was sound, and entropy, lengths, turns and the gap did not move, at a step."""
    if is_broken_update(view, idx) or other_prompts(view, idx):
        return False
    for metric in ("actor/entropy", "response_length/mean", TURNS, GAP if gap_of(view) else None):
        c = view.contrast(metric, idx, width=8)
        # Thirty values on either side tell more than eight where there is much noise, if it was at this step.
        wide = view.contrast(metric, idx, width=30)
        at_once = wide is not None and abs(wide.jump) >= 0.6 * abs(wide.diff)
        for moved in (c, wide if at_once else None):
            if moved is not None and abs(moved.score) >= 6 and not 0.8 <= moved.ratio <= 1.25:
                return False
    return True
