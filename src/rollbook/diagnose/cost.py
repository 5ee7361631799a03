"""What lost seconds are worth: below a share of the run they are a note and no finding, whichever rule counted them."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Finding
from rollbook.diagnose.signs.seconds import step_seconds
from rollbook.diagnose.signs.versions import STALENESS
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

LEAST_COST_FRAC = 0.003
"""Share of a run's seconds below which what costs nothing but seconds is not worth a finding."""


def run_seconds(view: View) -> float:
    """Seconds of all steps; NaN where they were not timed."""
    step_s = step_seconds(view)
    return step_s * view.n * view.stride if step_s > 0 else np.nan


def is_worth(view: View, cost_s: float) -> bool:
    """Whether seconds that were lost are more than a trifle of the run; True where the run was not timed."""
    return not cost_s < LEAST_COST_FRAC * run_seconds(view)


ONLY_SECONDS = frozenset(
    {"tail_burst", "buffer_never_fills", "filter_starvation", "object_store_spill", "slow_environment"}
)
"""Rules whose findings cost nothing but seconds."""


def is_trifle(view: View, finding: Finding) -> bool:
    """Whether a finding costs seconds only, and too few of them. What the log says in words is none, nor are
    trajectories that failed."""
    if finding.rule not in ONLY_SECONDS or finding.cost_s is None:
        return False
    loses_more = any(item.metric == "log" or item.metric.startswith("failures/") for item in finding.evidence)
    return not loses_more and not is_worth(view, finding.cost_s)


def note(view: View, finding: Finding) -> str:
    """What is said of a trifle."""
    seconds = f"{num(finding.cost_s)} s of the {num(run_seconds(view))} s of all steps"
    return f"{finding.title}, since step {finding.step}: {seconds}, too little for a finding"


LONGEST_CALL = "timing_s/agent_loop/generate_sequences/max"
"""Seconds of the longest trajectory of a step: a synchronous step waits for all of it."""


def is_asynchronous(view: View) -> bool:
    """Whether samples wait for the trainer, or it for them: only such runs have samples of older versions, a buffer or
    a queue between the two, or wait less for a step's samples than the longest of them took."""
    ages = [
        age for age in (f"{STALENESS}/mean", f"{STALENESS}/max", f"{STALENESS}_worst/mean") if view.has(age)
    ]
    if ages and all(np.nanmax(view.values[age]) == 0.0 for age in ages):
        return False
    if ages or view.run.format == "prime-rl":
        return True
    if any(view.family(parts) for parts in ("buffer/", "queue/", "fully_async/")):
        return True
    if not view.has("timing_s/gen", LONGEST_CALL):
        return False
    waited = view.values["timing_s/gen"] / np.maximum(view.values[LONGEST_CALL], 1e-9)
    return bool(np.nanquantile(waited, 0.25) < 0.5) if np.isfinite(waited).any() else False
