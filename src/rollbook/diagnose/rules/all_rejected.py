"""The correction rejects nearly everything: its bound leaves out the tokens or sequences that the step was sampled for,
and the update has little or nothing to learn from. Where engine and trainer have parted, that is only what follows."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.changes import running_median
from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.signs.gap import metrics_of_gap
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast, share

RULE = "all_rejected"
MASKED = ("rollout_corr/rollout_rs_masked_fraction", "rollout_corr/rollout_rs_seq_masked_fraction")
"""Shares of the tokens and of the sequences that rejection leaves out; without it neither is logged."""
MOST = 0.8
"""Share left out from which on a step is no longer the step that was asked for."""


def judge(view: View) -> Finding | None:
    known = [metric for metric in MASKED if view.has(metric)]
    if not known:
        return None  # without a rejection there is nothing to log
    metric = max(known, key=lambda m: view.last(m))
    late = view.last(metric)
    if late < MOST:
        return None
    idx = _since(view, metric)
    left = view.level(metric, idx)
    before = view.level(metric, max(0, idx - 40), idx) if idx else None
    when = (
        f"{num(before)} before step {view.step_at(idx)}" if before is not None else "from the first steps on"
    )
    what = "sequences" if "seq" in metric else "tokens"
    evidence = [
        Evidence(
            metric=metric,
            step=view.step_at(idx),
            before=before,
            after=left,
            says=f"{num(left)} of the {what} are left out, {when}",
        )
    ]
    for name in (
        "actor/grad_norm",
        "response_length/mean",
        *metrics_of_gap(view)[:1],
    ):
        c = view.contrast(name, idx, width=20) if idx else None
        if c is not None and abs(c.score) >= 3:
            evidence.append(of_contrast(view, c, idx))
    return Finding(
        rule=RULE,
        title=f"the correction rejects {num(left)} of the {what}: the updates learn from what is left",
        area="implementation",
        confidence=share(0.85 + 0.1 * bool(left >= 0.95)),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        action="widen the bounds of the rejection (algorithm.correction.reject; verl: rollout_rs and its threshold): "
        "sums over a sequence grow with its length, so bound means or single tokens instead; or lower the staleness",
        next_check="the distribution of the statistic that is bounded, at staleness 0: does a usual one exceed it?",
    )


def _since(view: View, metric: str) -> int:
    """First position from which on most steps lose that much."""
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    low = np.flatnonzero(running_median(values[known], 5) < MOST)
    return int(known[min(int(low[-1]) + 1, len(known) - 1)]) if len(low) else 0
