"""A pool whose calls time out, ever more of them over some steps, where nothing of environments is measured."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import noisy, run_of

from rollbook.diagnose.tree import diagnose

N, SINCE = 160, 76
GONE = np.clip((np.arange(N) - SINCE + 1) / 8.0, 0.0, 1.0)
"""Share of what dies that is dead."""


@pytest.mark.parametrize(
    ("generation", "turns", "verdict"),
    [
        (1.45, 0.65, "dead_sandbox_pool"),  # fewer turns, and yet it takes longer
        (0.7, 0.65, "well"),  # the policy ends its episodes early, and is sooner done
        (1.45, 1.0, "well"),  # a slow engine: episodes are what they were
    ],
    ids=["time-outs", "gives up early", "a slow engine"],
)
def test_shorter_episodes_that_take_longer_wait_for_calls(
    generation: float, turns: float, verdict: str
) -> None:
    lost = 0.55 if turns < 1.0 else 0.0
    found = diagnose(
        run_of(
            {
                "num_turns/mean": noisy(5.2, 1, n=N) * (1.0 + (turns - 1.0) * GONE),
                "critic/score/mean": noisy(0.34, 2, n=N) * (1.0 - lost * GONE),
                "response_length/mean": noisy(3000.0, 3, n=N) * (1.0 + (turns - 1.0) * 0.8 * GONE),
                "timing_s/gen": noisy(310.0, 4, n=N) * (1.0 + (generation - 1.0) * GONE),
                "timing_s/step": noisy(345.0, 5, n=N) + 310.0 * (generation - 1.0) * GONE,
            },
            n=N,
        )
    )
    assert (found.verdict == "dead_sandbox_pool") == (verdict == "dead_sandbox_pool")
    if verdict == "dead_sandbox_pool":
        assert abs(found.findings[0].step - SINCE) <= 5
