"""Answers that grow until they are cut off, or were cut off from early on: an algorithm's or a limit's matter, as long
as what makes them is the policy itself."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.signs.lengths import length_growth
from rollbook.diagnose.signs.rewards import reward_decline
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, until_now


def lengths_explode(view: View) -> State | None:
    grown = length_growth(view)
    if grown is None:
        return None
    evidence = [until_now(grown)]
    tenth = max(3, view.n // 10)
    clip = "response_length/clip_ratio"
    if view.count(clip) >= 3:
        first, last = view.level(clip, 0, tenth), view.level(clip, view.n - tenth)
        says = f"{num(first)} of the answers cut off at first, {num(last)} now"
        evidence.append(Evidence(metric=clip, step=grown.step, before=first, after=last, says=says))
    falls = reward_decline(view)
    if falls is not None:
        evidence.append(until_now(falls))
    lost = ", and the reward falls" if falls is not None else ""
    return State(
        name="lengths_explode",
        title=f"the answers grow until they are cut off{lost}",
        step=grown.step,
        evidence=tuple(evidence),
        advice=f"read long answers of step {view.step_at(view.n - 1)} first: if they repeat themselves, go back before "
        f"step {grown.step}; penalise overlong answers, leave cut-off ones out of the loss, and average the loss "
        "over tokens instead of sequences; if they reason, raise the limit",
    )


CUT_OFF = 0.5
"""Share of the answers that end at the limit from which on most of what is scored is unfinished."""


def cut_off(view: View) -> State | None:
    """Most answers are cut off at the limit, and were from early on: growing ones are another state."""
    clip = "response_length/clip_ratio"
    if view.count(clip) < 5:
        return None
    third = max(2, view.n // 3)
    early, late = view.level(clip, 0, third), view.level(clip, view.n - third)
    if not min(early, late) >= CUT_OFF:
        return None
    limit = view.last("response_length/max")
    of = f" of {num(limit)} tokens" if np.isfinite(limit) else ""
    says = f"{num(early)} of the answers at first, {num(late)} now"
    return State(
        name="answers_cut_off",
        title=f"most answers are cut off at the limit{of}",
        step=view.step_at(0),
        evidence=(Evidence(metric=clip, step=view.step_at(0), before=early, after=late, says=says),),
        advice="raise the limit, or train shorter answers first: what is cut off is scored unfinished; leave it out "
        "of the loss; if no answer ever ends, look whether the template has its end-of-sequence token",
    )
