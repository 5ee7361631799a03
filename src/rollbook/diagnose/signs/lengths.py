"""Answers that grow over the run."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.changes import foot_of_climb
from rollbook.diagnose.signs.rewards import Moved, reward_decline
from rollbook.diagnose.view import View, once


@once("length growth")
def length_growth(view: View) -> Moved | None:
    """The answers become several times as long, and more of them are cut off (or the reward goes with it)."""
    metric = "response_length/mean"
    if view.count(metric) < 30:
        return None
    tenth = max(3, view.n // 10)
    first, last = view.level(metric, 0, tenth), view.level(metric, view.n - tenth)
    if not first > 0 or last < 2.5 * first:
        return None
    clip = "response_length/clip_ratio"
    cut = view.level(clip, view.n - tenth) - view.level(clip, 0, tenth)
    if not (np.isfinite(cut) and cut >= 0.15) and reward_decline(view) is None:
        return None
    foot = foot_of_climb(np.log(np.maximum(view.values[metric], 1.0)))
    return Moved(metric, view.step_at(foot), first, last)
