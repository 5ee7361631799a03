"""The same seconds more in whatever takes the batch, a stage of a tenth of a second as one of minutes
(`object_store_spill`): that is the batch's way. A slow host or a busy processor slows stages in proportion."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from rollbook.diagnose.breaks import BASELINE, Break
from rollbook.diagnose.signs.seconds import step_seconds
from rollbook.diagnose.view import View

MOVE = ("adv", "reward", "pack")
"""Stages that hardly compute where they take little."""
COMPUTE = ("old_log_prob", "ref", "values", "update_critic", "update_actor")
LIGHT_FRAC = 0.02
"""Share of a step up to which a stage of the first sort takes little."""
SHARPLY, VERY_SHARPLY = 3.0, 10.0
"""Times as long, per token, from which on one of them has more than its work; at the second, one stage that computes
bears it out."""
ALIKE = 3.0
"""Times by which the same seconds may differ between stages: not all take as much of the batch."""
PARTED = np.log(2.0)
"""By which what two stages took before must differ, as a logarithm, for them to tell sums from proportions."""
LOST_S = 0.05
"""Of a step, below which nothing went over a disk: stages of a millisecond take ten on any busy host."""
LEAST_FRAC = 0.02
"""Share of a step that all stages lose together."""
NOISE, BY_WORK = 0.03, 0.25
"""Shares of a stage's seconds by which they wander, and by which they go otherwise than the tokens do."""


@dataclass(frozen=True, slots=True)
class Same:
    """Stages that lost about as many seconds each."""

    light: tuple[Break, ...]
    computing: dict[str, tuple[float, float]]
    """Those that compute, of which that is sure: seconds before and in the end."""
    each_s: float
    cost_s: float

    @property
    def idx(self) -> int:
        return min(rise.idx for rise in self.light)


def same_seconds(view: View) -> Same | None:
    """The stages; None where only one has more, or they have more in proportion."""
    step_s = step_seconds(view)
    light = [rise for stage in MOVE if (rise := _slower(view, f"timing_s/{stage}", step_s)) is not None]
    if not light:
        return None
    sharpest = max(light, key=lambda rise: rise.ratio)
    light = [rise for rise in light if view.near(rise.idx, sharpest.idx, share=0.15, least=10)]
    each_s = float(np.median([rise.late - rise.before for rise in light]))
    sure: dict[str, tuple[float, float]] = {}
    num_stages = len(light)
    for stage in COMPUTE:
        metric = f"timing_s/{stage}"
        before, late, work = _around(view, metric, sharpest.idx)
        if not before > 0.0 or not late > 0.0:
            continue
        num_stages += 1
        more, unsure = late - before * work, (NOISE + BY_WORK * abs(work - 1)) * before
        if more > ALIKE * each_s + unsure:
            return None  # in proportion
        if more >= max(each_s / ALIKE, unsure):
            sure[metric] = (before, late)
    parted = [
        pair for pair in combinations(light, 2) if abs(np.log(pair[0].before / pair[1].before)) >= PARTED
    ]
    bears_out = len(sure) >= (1 if sharpest.ratio >= VERY_SHARPLY else 2)
    is_sum = any(_add(*pair) for pair in parted) if parted else bears_out
    if not is_sum or each_s * num_stages < max(LOST_S, LEAST_FRAC * step_s):
        return None
    lost = np.nan_to_num(view.values[sharpest.metric][sharpest.idx :] - sharpest.before)
    return Same(tuple(light), sure, each_s, float(lost.clip(0).sum()) * num_stages * view.stride)


def _slower(view: View, metric: str, step_s: float) -> Break | None:
    """The rise of a stage that took little and for good takes far more than its work."""
    rise = view.rise(metric)
    if rise is None or rise.end_idx is not None or rise.score < 6 or rise.before > LIGHT_FRAC * step_s:
        return None
    work = max(_around(view, metric, rise.idx)[2], 1.0)
    return rise if rise.ratio >= SHARPLY * work else None


def _add(one: Break, other: Break) -> bool:
    """Whether two stages gained seconds alike rather than in proportion to what they took."""
    gained = np.log((one.late - one.before) / (other.late - other.before))
    in_proportion = abs(gained - np.log(one.before / other.before))
    return bool(abs(gained) <= np.log(ALIKE) and abs(gained) < in_proportion)


def _around(view: View, metric: str, idx: int) -> tuple[float, float, float]:
    """(seconds before a position, those in the end, tokens in the end over those before: 1 where none are logged)."""
    past, since = max(0, idx - BASELINE), idx + 2 * (view.n - idx) // 3
    before, late = view.level(metric, past, idx), view.level(metric, since)
    for size in ("perf/total_num_tokens", "response_length/mean"):
        if np.isfinite(work := view.level(size, since) / view.level(size, past, idx)):
            return before, late, float(work)
    return before, late, 1.0
