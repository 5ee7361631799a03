"""Environments: their load, and what of them fails."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.series import Series
from rollbook.diagnose.view import View, once

ENV_LOAD = ("env/turn_s/mean", "env/turn_s/p99", "env/turn_s/max", "env/queue_depth")
ROLLOUTS_FAILED = "training/rollout_failure/evicted_samples"
ENV_FAILURES = (
    "failures/frac",
    "failures/num",
    "failures/sandbox_lost/num",
    "failures/timeout/num",
    "failures/environment/num",
    ROLLOUTS_FAILED,
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


LEAST_LINES = 10
MANY_LINES = 5.0
"""Lines a step since a position over those before it, from which on they are no occasional complaints."""
EVER_MORE = 1.5
"""Lines a step of the last third of them over those of the first, from which on they grow."""
_USED_UP = re.compile(
    r"quota|limit(?:s)? (?:exceeded|reached)|rate.?limit|\b429\b|exhausted|too many|maximum|non-overlapping IPv4"
    r"|fully subnetted|[Ii]nsufficient|no (?:free|available) (?:slots?|capacity)|[Rr]esource temporarily unavailable",
    re.IGNORECASE,
)
"""What is said where there are too many sandboxes already, rather than where there are none."""


@dataclass(frozen=True, slots=True)
class FailingLines:
    """Lines of a log that complain of sandboxes, and since when they come in numbers."""

    idx: int
    before: float
    """Lines a step."""
    after: float
    example: str
    is_used_up: bool
    """Whether most of them say that a limit is reached."""
    grows: bool
    """Whether they become ever more."""


@once("failing lines")
def failing_lines(view: View) -> FailingLines | None:
    """Where lines on sandboxes that fail begin to come in numbers, to the end of the log; None where they never do."""
    said = view.events("sandbox_failure")
    if len(said) < LEAST_LINES or view.n < 12:
        return None
    at = [view.idx_of(event.step + 1) if event.step is not None else 0 for event in said]
    counts = np.bincount(np.minimum(at, view.n - 1), minlength=view.n).astype(np.float64)
    idx = likeliest_change(counts)
    since = counts[idx:]
    rates = float(counts[:idx].sum() + 1) / idx, float(since.mean())
    is_to_the_end = since[-max(3, len(since) // 4) :].any() and (since > 0).sum() >= 5
    if since.sum() < LEAST_LINES or rates[1] < MANY_LINES * rates[0] or not is_to_the_end:
        return None
    told = [event.text for event, position in zip(said, at, strict=True) if position >= idx]
    is_used_up = sum(_USED_UP.search(text) is not None for text in told) > 0.5 * len(told)
    third = max(2, (view.n - int(np.flatnonzero(counts)[0])) // 3)
    grows = bool(counts[-third:].mean() >= EVER_MORE * counts[idx : idx + third].mean())
    return FailingLines(idx, float(counts[:idx].mean()), rates[1], told[0], is_used_up, grows)


def likeliest_change(counts: Series) -> int:
    """Position at which the rate of a count most likely changed, three steps and more from either end."""
    before, passed = np.cumsum(counts)[:-1], np.arange(1, len(counts))
    after, left = counts.sum() - before, len(counts) - passed
    likelier = before * np.log((before + 0.5) / passed) + after * np.log((after + 0.5) / left)
    return int(passed[3:-3][np.argmax(likelier[3:-3])])


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
