"""The policy runs away under its optimizer, or its answers no longer differ. A gap that rose first, and further, is the
engine's."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.signs.gap import gap_led, gap_of
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import reward_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break


def learning_rate_too_high(view: View) -> State | None:
    policy = policy_of(view)
    if policy.blow_up_idx is None:
        return None
    gap = gap_of(view)
    rise = gap.rise if gap is not None else None
    if rise is not None and rise.peak_ratio >= 1.6 and rise.score >= 6:
        leads = rise.idx <= policy.blow_up_idx + max(3, view.n // 40)
        if leads and policy.update_ratio < 0.8 * rise.peak_ratio:
            return None  # the engine went its own way first, and further
        if gap_led(view, policy.blow_up_idx):
            return None  # it was far off before the policy moved at all
    moved = {b.metric for b in policy.blow_up}
    reward = view.fall(reward_of(view).metric)
    fell = (
        reward is not None
        and reward.drop >= 0.2
        and reward.score >= 4
        and reward.idx >= policy.blow_up_idx - 3
    )
    if len(moved) < 3 and not fell and policy.nan_step is None:
        return None
    evidence = [of_break(b) for b in policy.blow_up]
    if reward is not None and fell:
        evidence.append(of_break(reward))
    lr = view.last("actor/lr")
    return State(
        name="learning_rate_too_high",
        title="the policy moves too fast: learning rate too high, or the trust region too wide",
        step=view.step_at(policy.blow_up_idx),
        evidence=tuple(evidence),
        advice=f"go back before step {view.step_at(policy.blow_up_idx)} and lower the learning rate (now {num(lr)}) by "
        "3 to 10 times, or tighten the clip and the gradient norm",
    )


def entropy_collapse(view: View) -> State | None:
    if not view.has("actor/entropy") or view.count("actor/entropy") < 12:
        return None
    first, last = view.level("actor/entropy", 0, max(3, view.n // 20)), view.last("actor/entropy")
    if not (first > 0 and last <= 0.12 * first and last < 0.08):
        return None
    values = view.values["actor/entropy"]
    at = int(np.flatnonzero(np.nan_to_num(values, nan=np.inf) <= 0.25 * first)[0])
    says = f"{num(first)} at first, {num(last)} nats now"
    return State(
        name="entropy_collapse",
        title="the entropy has collapsed: answers hardly differ any more",
        step=view.step_at(at),
        evidence=(
            Evidence(metric="actor/entropy", step=view.step_at(at), before=first, after=last, says=says),
        ),
        advice="raise the upper clip (clip-higher), add a KL or entropy term, or go back and lower the learning rate",
    )
