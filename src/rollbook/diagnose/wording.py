"""How rules write numbers and evidence, so that every finding reads alike."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.signs.gap import metrics_of_gap
from rollbook.diagnose.signs.rewards import Moved
from rollbook.diagnose.spells import Spells
from rollbook.diagnose.view import Contrast, View
from rollbook.observe.catalogue import lookup


def num(value: float | None) -> str:
    """Three significant digits, no trailing noise.

    >>> [num(v) for v in (0.00312, 41.26, 999.7, 1800.0, 0.0, 12345.6)]
    ['0.00312', '41.3', '1000', '1800', '0', '12,346']
    """
    if value is None or math.isnan(value):
        return "?"
    if math.isinf(value):
        return "inf"
    if abs(value) >= 9999.5:
        return f"{value:,.0f}"
    if abs(value) >= 999.5 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.3g}"


def of_break(found: Break, says: str = "") -> Evidence:
    """Evidence of a lasting change of one series."""
    how = "ramps" if found.is_ramp else "steps"
    text = f"{how} from {num(found.before)} to {num(found.late)} at step {found.step}"
    return Evidence(
        metric=found.metric,
        step=found.step,
        before=found.before,
        after=found.late,
        says=f"{text}{_and(says)}",
    )


def of_contrast(view: View, contrast: Contrast, idx: int, says: str = "") -> Evidence:
    """Evidence of what one series did at a step found elsewhere."""
    step = view.step_at(idx)
    text = f"{num(contrast.before)} before step {step}, {num(contrast.after)} after"
    return Evidence(
        metric=contrast.metric,
        step=step,
        before=contrast.before,
        after=contrast.after,
        says=f"{text}{_and(says)}",
    )


def of_moved(moved: Moved, says: str) -> Evidence:
    """Evidence of a level that went over the run from one value to another."""
    return Evidence(metric=moved.metric, step=moved.step, before=moved.before, after=moved.after, says=says)


def until_now(moved: Moved) -> Evidence:
    return of_moved(moved, f"{num(moved.before)} until step {moved.step}, {num(moved.after)} now")


def gap_in_spells(view: View, spells: Spells, most: int, says: Callable[[Contrast], str]) -> list[Evidence]:
    """Evidence of at most so many measures of the gap, in the steps of its spells against those beside them."""
    step = view.step_at(spells.first)
    measures = (view.beside(metric, spells) for metric in metrics_of_gap(view)[:most])
    return [
        Evidence(metric=c.metric, step=step, before=c.before, after=c.after, says=says(c))
        for c in measures
        if c is not None
    ]


def _and(says: str) -> str:
    return f": {says}" if says else ""


def in_full(item: Evidence) -> tuple[str, str]:
    """A line of evidence, (label, words): its metric with the unit, what it did, and how much and at which step where
    its words do not say so.

    >>> in_full(Evidence(metric="timing_s/gen", step=41, before=30.0, after=90.0, says="30 before, 90 after"))
    ('timing_s/gen (s)', '30 before, 90 after · 3 times as much · step 41')
    """
    found = lookup(item.metric)
    unit = f" ({found.unit})" if found is not None and found.unit not in ("1", "bool") else ""
    parts = [item.says]
    if item.before is not None and item.after is not None and item.before > 0 and item.after >= 0:
        ratio = item.after / item.before
        if not 0.85 <= ratio <= 1.15 and "times" not in item.says:
            parts.append(
                f"{num(ratio)} times as much" if ratio > 1 else f"down by {num(100 * (1 - ratio))} %"
            )
    if not re.search(rf"step {item.step}\b", item.says):
        parts.append(f"step {item.step}")
    return f"{item.in_log or item.metric}{unit}", " · ".join(parts)


def share(confidence: float) -> float:
    """A confidence within its bounds."""
    return round(min(max(confidence, 0.05), 0.99), 2)


_GAP_IS_LOGGED_BY = {
    "rollbook": "it is logged by itself wherever engines return logprobs; five steps are needed",
    "prometheus": "it is exported by itself wherever engines return logprobs; five steps are needed",
    "verl": "verl: actor_rollout_ref.rollout.calculate_log_probs=True",
    "trl": "TRL: use_vllm with vllm_importance_sampling_correction logs sampling/sampling_logp_difference",
    "slime": "slime: train/train_rollout_logprob_abs_diff is there once rollouts return logprobs (--use-tis); "
    "--get-mismatch-metrics needs --custom-tis-function-path",
    "areal": "AReaL: actor.use_decoupled_loss=true with actor.recompute_logprob=true logs behave_approx_kl",
}


def collect_gap(view: View) -> str:
    """How the framework that wrote the log is made to log the gap."""
    framework = view.run.format.split("-")[0]
    how = _GAP_IS_LOGGED_BY.get(framework, _GAP_IS_LOGGED_BY["verl"])
    return f"return logprobs from the engine and log their difference to the trainer's ({how})"
