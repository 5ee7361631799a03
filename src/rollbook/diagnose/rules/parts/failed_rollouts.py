"""Rollouts of an agentic job that fail at once and for good (`dead_sandbox_pool`): they are made anew, so that what is
trained is as good as ever, and only their count, and the wait for them, tell."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.rules.parts.dying_sandboxes import finding
from rollbook.diagnose.signs.dropped import batch_of
from rollbook.diagnose.signs.environments import ROLLOUTS_FAILED, likeliest_change
from rollbook.diagnose.signs.gap import parts_at
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast

LEAST_FAILED = 5.0
LEAST_FRAC = 0.01
"""Of the sequences of a batch, a step: some logs count groups, of which one has many."""
HARDLY = 0.1
"""Of those that fail since, up to which hardly one failed before."""
LEVEL = 1.6
"""Those of the last third over those of the first, from which on they grow: what leaks does."""
STEPS_THAT_FAIL = 0.9


def failed_rollouts(view: View) -> Finding | None:
    """Rollouts fail since a step where hardly one did before: at once, in step after step, to the end and no more than
    at first. A policy that falls apart, or an engine that died, would show elsewhere."""
    if view.count(ROLLOUTS_FAILED) < 5 or view.n < 24 or view.events("engine_died"):
        return None
    counts = np.nan_to_num(view.values[ROLLOUTS_FAILED])  # logged in the steps that have some
    idx = likeliest_change(counts)
    before, since = counts[:idx], counts[idx:]
    third = max(2, len(since) // 3)
    usual, failed = float(before.mean()), float(np.median(since))
    if failed < max(LEAST_FAILED, LEAST_FRAC * batch_of(view, ROLLOUTS_FAILED)) or usual > HARDLY * failed:
        return None
    first, last = (float(part.mean()) for part in (since[:third], since[-third:]))
    fails_on = float((since >= 0.3 * failed).mean()) >= STEPS_THAT_FAIL
    if len(since) < 5 or not fails_on or not 1 / LEVEL <= last / first <= LEVEL:
        return None
    if policy_of(view).blow_up_idx is not None or parts_at(view, idx):
        return None
    step = view.step_at(idx)
    says = f"{num(usual)} a step before, {num(failed)} since: they fail, and are made anew"
    evidence = [Evidence(metric=ROLLOUTS_FAILED, step=step, before=usual, after=failed, says=says)]
    waits = view.contrast("timing_s/gen", idx)
    if waits is not None and waits.ratio >= 1.25 and waits.score >= 4:
        evidence.append(of_contrast(view, waits, idx, "the wait grows with them"))
    return finding(
        title="sandboxes are dead: rollouts that need them fail and are made anew",
        confidence=0.75 if len(evidence) == 1 else 0.82,
        step=step,
        evidence=tuple(evidence),
        action="look at what one of the failed rollouts says; restart the sandbox pool where it is what refuses",
    )
