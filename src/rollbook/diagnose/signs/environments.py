"""Environments: their load, and what of them fails."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.view import View, once

ENV_LOAD = ("env/turn_s/mean", "env/turn_s/p99", "env/turn_s/max", "env/queue_depth")
ENV_FAILURES = (
    "failures/frac",
    "failures/num",
    "failures/sandbox_lost/num",
    "failures/timeout/num",
    "failures/environment/num",
    "training/rollout_failure/evicted_samples",
    "response/aborted_ratio",
    "env/num_timeouts",
    "env/num_errors",
    "rollout/sandbox_error_ratio",
    "rollout/timeout_sample_ratio",
)
TURNS = "num_turns/mean"
SANDBOX_S = 1e-3
"""Seconds a turn below which the environment answers from its own process, and only the host's noise shows."""


def failures_rise(view: View, idx: int) -> list[str]:
    """Failure counts and shares that rise at a position."""
    risen = []
    extra = [m for m in view.family("failures/", "/num") if m not in ENV_FAILURES]
    for metric in (*ENV_FAILURES, *extra):
        c = view.contrast(metric, idx)
        if c is None:
            continue
        least = 0.03 if metric.endswith(("frac", "ratio")) else 3.0
        if c.after >= 2.0 * c.before + least and c.score >= 4:
            risen.append(metric)
    return risen


@dataclass(frozen=True, slots=True)
class FailureKinds:
    """Failed trajectories by class, where the log tells classes."""

    counts: dict[str, float]
    """Class -> failures over the whole log."""
    main: str | None
    """The class of most of them."""


@once("failure kinds")
def failure_kinds_of(view: View) -> FailureKinds:
    """What the failures were."""
    counts = {
        metric.split("/")[1]: float(np.nansum(view.values[metric]))
        for metric in view.values
        if metric.startswith("failures/") and metric.endswith("/num") and metric.count("/") == 2
    }
    counts = {kind: count for kind, count in counts.items() if count > 0}
    return FailureKinds(counts, max(counts, key=lambda kind: counts[kind], default=None))
