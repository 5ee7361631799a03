"""Gradients of a size that no healthy update has: in single steps, or all along. Clipped to norm 1 they look harmless
in every other metric, but such an update points wherever one broken term does."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

RULE = "absurd_gradient"
GRADIENT = "actor/grad_norm"
ABSURD = 1e5
"""Norm over which a gradient of a mean over tokens never lies; even one of a sum over a batch hardly does."""
TIMES_USUAL = 1e4
"""A single step's norm over the run's median: a rare batch brings ten or a hundred times."""


def judge(view: View) -> Finding | None:
    if view.count(GRADIENT) < 3 or policy_of(view).nan_step is not None:
        return None
    values = view.values[GRADIENT]
    usual = view.level(GRADIENT)
    hit = np.nan_to_num(values) >= max(ABSURD, TIMES_USUAL * usual if usual < ABSURD else 0.0)
    if not hit.any():
        return None
    at = np.flatnonzero(hit)
    step, largest = view.step_at(int(at[0])), float(np.nanmax(values))
    is_all_along = usual >= ABSURD
    where = "in most steps" if is_all_along else f"in {len(at)} of {view.count(GRADIENT)} steps"
    evidence = [
        Evidence(
            metric=GRADIENT,
            step=step,
            before=None if is_all_along else usual,
            after=largest,
            says=f"up to {num(largest)} {where}" + ("" if is_all_along else f", {num(usual)} is usual"),
        )
    ]
    for metric in ("rollout_corr/rollout_is_max", "actor/ppo_kl", "actor/kl_loss"):
        c = view.values.get(metric)
        if c is not None and np.isfinite(c[hit]).any():
            then, else_ = float(np.nanmax(c[hit])), view.level(metric)
            if then >= 20 * max(else_, 1e-9):
                says = f"{num(then)} there, {num(else_)} is usual"
                evidence.append(Evidence(metric=metric, step=step, before=else_, after=then, says=says))
    return Finding(
        rule=RULE,
        title="gradients are absurdly large"
        + (" all along" if is_all_along else ": a term of the loss explodes"),
        area="implementation",
        confidence=0.8,
        step=step,
        evidence=tuple(evidence),
        action="divide the loss by its tokens if it is a sum; bound what is exponentiated (ratios, low-variance KL); "
        "leave out sequences without a token"
        if is_all_along
        else "keep the batch of that step and skip updates over a limit; bound what is exponentiated (policy ratio, "
        "importance weight, low-variance KL), and look for tokens whose logprob is minus infinity on one side",
        next_check="largest log-ratio of a token in that batch, and the gradient's norm by term of the loss",
    )
