"""From the start every answer gets the same reward (`all_wrong`, `all_right`): no group differs in itself, so nothing
is learned. The level tells the two apart; a run that first learned and then stands still is neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.rewards import REWARD
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

LEAST_STEPS = 3
FLAT_FRAC = 0.9
"""Share of the steps that must be flat, the first ones among them."""


@dataclass(frozen=True, slots=True)
class Flat:
    """A reward that never differed."""

    level: float
    is_high: bool
    evidence: tuple[Evidence, ...]


def flat(view: View) -> Flat | None:
    """Whether the rewards of nearly every step, from the first one on, are all the same."""
    metric = view.first(*REWARD)
    if metric is None or view.count(metric) < LEAST_STEPS:
        return None
    mean = view.values[metric]
    base = metric.removesuffix("/mean")
    high, low = view.values.get(f"{base}/max"), view.values.get(f"{base}/min")
    known = np.isfinite(mean)
    if high is not None and low is not None:
        known &= np.isfinite(high) & np.isfinite(low)
        same = known & (high - low <= 1e-9)
        how = "the best and the worst answer of a step have the same reward"
    else:
        same = known & (np.abs(mean - np.nanmedian(mean)) <= 1e-9)
        how = "the mean reward is the same number in every step"
    norm = view.values.get("actor/grad_norm")
    advantages = view.values.get("critic/advantages/max")
    if norm is not None and np.isfinite(norm).any() and advantages is None:
        moved = np.isfinite(norm) & (norm > 1e-6)
        if high is None and moved[known].mean() > 1 - FLAT_FRAC and not _is_told_flat(view, base):
            return None  # the mean alone says little where the gradient is not zero; a KL term has one, too
    if known.sum() < LEAST_STEPS or same[known].mean() < FLAT_FRAC or not same[known][:LEAST_STEPS].all():
        return None
    level = float(np.median(mean[same]))
    evidence = [
        Evidence(metric=metric, step=view.step_at(0), after=level, says=f"{num(level)} all along: {how}")
    ]
    if norm is not None and np.isfinite(norm).any():
        usual = float(np.nanmedian(norm))
        evidence.append(
            Evidence(metric="actor/grad_norm", step=view.step_at(0), after=usual, says=num(usual))
        )
    top = max(1.0, float(np.nanmax(mean)))
    return Flat(level, level >= 0.9 * top, tuple(evidence))


def _is_told_flat(view: View, base: str) -> bool:
    """Whether the log says itself, in every step, that no answer of a group differs from another."""
    spreads = (f"{base}/std", "reward_std", "batch/effective_frac")
    told = [finite(values) for m in spreads if (values := view.values.get(m)) is not None]
    return any(len(values) >= LEAST_STEPS and bool((values <= 1e-9).all()) for values in told)


def finding(view: View, rule: Literal["all_wrong", "all_right"]) -> Finding | None:
    """The finding of one of the two."""
    found = flat(view)
    if found is None or found.is_high != (rule == "all_right"):
        return None
    if rule == "all_right":
        title, action = (
            "every answer is right from the start: no group carries a signal",
            "take harder prompts: leave out those that the policy always solves",
        )
    else:
        title, action = (
            "every answer is wrong from the start: no group carries a signal",
            "score a few reference answers by hand first; if the scorer is right, take easier prompts, warm the "
            "policy up on reference answers, or give partial rewards",
        )
    return Finding(
        rule=rule,
        title=title,
        area="data",
        confidence=0.93,
        step=view.step_at(0),
        evidence=found.evidence,
        action=action,
        next_check="read five trajectories beside their reference answers: format, truncation, or the task itself?",
    )
