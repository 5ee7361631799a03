"""What lost seconds are worth: below a share of the run they are no finding, whichever rule has counted them."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose import signs
from rollbook.diagnose.view import View

LEAST_COST_FRAC = 0.003
"""Share of a run's seconds below which what costs nothing but seconds is not worth a finding."""


def run_seconds(view: View) -> float:
    """Seconds of all steps; NaN where they were not timed."""
    step_s = signs.step_seconds(view)
    return step_s * view.n * view.stride if step_s > 0 else np.nan


def is_worth(view: View, cost_s: float) -> bool:
    """Whether seconds that were lost are more than a trifle of the run; True where the run was not timed."""
    return not cost_s < LEAST_COST_FRAC * run_seconds(view)


def is_asynchronous(view: View) -> bool:
    """Whether samples wait for the trainer, or it for them: only such runs log how old samples are, or a buffer."""
    ages = (f"{signs.STALENESS}/mean", f"{signs.STALENESS}_worst/mean")
    return any(view.has(age) for age in ages) or bool(view.family("buffer/"))
