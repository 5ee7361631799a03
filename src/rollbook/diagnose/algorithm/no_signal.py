"""Steps that teach nothing, as the answers of each group are scored alike. A gradient of nothing at different rewards
is a fault (`no_update`)."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

NO_SIGNAL = 0.4
"""Share of the steps without a gradient from which on the job hardly trains."""
NOTHING = 1e-3
"""Gradient over its median where there is one, below which a step taught nothing."""


def no_signal(view: View) -> State | None:
    """Many steps teach nothing: all answers of each of their groups were scored alike, so that no advantage is left."""
    metric, few = "actor/grad_norm", "batch/effective_frac"
    if (told := _told_without_signal(view, few)) is not None:
        return told
    if view.count(metric) < 10:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    some = values[known][values[known] > 0]
    alike = view.level(few)
    if not len(some) and not alike <= 1 - 2 * NO_SIGNAL:
        return None  # a gradient of nothing at different rewards is no matter of the prompts (`no_update`)
    usual = float(np.median(some[some >= 0.1 * np.max(some)])) if len(some) else 0.0
    empty = values[known] <= max(NOTHING * usual, 0.0)
    part = float(empty.mean())
    if part < NO_SIGNAL and not (alike <= 1 - 2 * NO_SIGNAL and part >= 0.1):
        return None
    step = view.step_at(int(known[empty][0])) if empty.any() else view.step_at(0)
    evidence = [Evidence(metric=metric, step=step, after=part, says=f"nothing in {num(part)} of the steps")]
    if np.isfinite(alike):
        says = f"{num(alike)} of the groups have two different rewards"
        evidence.append(Evidence(metric=few, step=step, after=alike, says=says))
    return _without_signal(step, tuple(evidence))


def _without_signal(step: int, evidence: tuple[Evidence, ...]) -> State:
    return State(
        name="no_signal",
        title="many steps teach nothing: the answers of a group are all scored alike",
        step=step,
        evidence=evidence,
        advice="more prompts a step and more answers a prompt, prompts of middling difficulty, a reward that tells "
        "more than right or wrong; drop flat groups and sample others in their place",
    )


def _told_without_signal(view: View, metric: str) -> State | None:
    """Steps in which not one group has two different rewards; a KL term may have a gradient all the same."""
    values = view.values.get(metric)
    if values is None or view.count(metric) < 10:
        return None
    known = np.isfinite(values)
    flat = known & (values <= 1e-9)
    part = float(flat.sum() / known.sum())
    if part < NO_SIGNAL:
        return None
    step = view.step_at(int(np.flatnonzero(flat)[0]))
    says = f"in {num(part)} of the steps no group has two different rewards"
    return _without_signal(step, (Evidence(metric=metric, step=step, after=part, says=says),))
