"""A run that was taken up again (`discontinuity_after_resume`) and stands where it stood in its first steps: the
weights are those that it began with.

Against what it had just reached, or against the very steps that it runs a second time: noise hides a small loss from
one step to the next, and not from five pairs of the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollbook.diagnose.changes import noise_scale
from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.rewards import reward_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

LEAST, MOST = 4, 8
"""Steps after the restart that are compared."""
APART = 4.0
"""Standard errors by which what was reached must differ from what the run began with."""
BACK = 0.4
"""Share of that distance which may be left: it is back."""
LEAST_BACK = 2
"""Measures that must be, the reward among them."""


def back_at_the_start(view: View, idx: int, replaced: dict[str, list[float]]) -> tuple[Evidence, ...]:
    """Measures that went back to those of the first steps at a restart; nothing where too few did.

    Args:
        replaced: values of the steps that are run again, oldest first; of a metric without any, the last steps
            before the restart stand for them.
    """
    reward = reward_of(view).metric
    found = [
        told
        for metric in (reward, "actor/entropy", "actor/kl_loss", "response_length/mean")
        if metric is not None and (told := _is_back(view, metric, idx, replaced.get(metric, ()))) is not None
    ]
    return tuple(found) if len(found) >= LEAST_BACK and found[0].metric == reward else ()


def _is_back(view: View, metric: str, idx: int, again: Sequence[float]) -> Evidence | None:
    values = view.values.get(metric)
    if values is None or idx < 2 * LEAST:
        return None
    once = np.asarray(again, np.float64)
    once = finite(once)[-MOST:] if len(again) >= LEAST else finite(values[:idx])[-MOST:]
    first, now = finite(values[: idx // 2])[:LEAST], finite(values[idx:])[: len(once)]
    if min(len(first), len(once), len(now)) < LEAST:
        return None
    at_first, reached, after = (float(np.median(x)) for x in (first, once, now))
    noise = max(noise_scale(finite(values)), 0.5 * view.resolution(metric))
    error = 1.25 * noise * float(np.sqrt(1 / len(first) + 1 / len(once)))
    if abs(reached - at_first) < APART * error or abs(after - at_first) > BACK * abs(reached - at_first):
        return None
    step = view.step_at(idx)
    says = f"{num(at_first)} in the first steps, {num(reached)} when it was reached, {num(after)} since the restart"
    return Evidence(metric=metric, step=step, before=reached, after=after, says=says)
