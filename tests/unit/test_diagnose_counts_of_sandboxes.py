"""Sandboxes that are counted under any name date a leak better than the seconds of their calls do."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.tree import diagnose

N = 80
T = np.arange(N)
RNG = np.random.default_rng(6)


@pytest.mark.parametrize(
    "name", ["sandbox/alive", "env/open_containers", "sandbox/num_running", "live_sandboxes"]
)
@pytest.mark.parametrize("is_leak", [True, False])
def test_a_leak_is_dated_by_the_count_and_a_pool_that_warms_up_is_none(name: str, is_leak: bool) -> None:
    climb = np.clip((T - 40) / 40, 0, 1)
    alive = 100 + 100 * climb if is_leak else 30 + 60 * (1 - np.exp(-T / 10))
    # The calls wander a little long before.
    calls = 14.0 * (1 + 0.9 * climb * is_leak) * (1 - 0.12 * (np.abs(T - 12) < 4))
    run = run_of(
        {
            name: np.round(alive + RNG.normal(0, 2, N)),
            "env/turn_s/mean": noisy(calls, 7, 0.08, n=N),
            "num_turns/mean": noisy(6.0, 8, 0.02, n=N),
            "perf/cpu_memory_used_gb": 120 + 0.4 * (alive - alive[0]) + RNG.normal(0, 0.5, N),
        },
        n=N,
    )
    found = diagnose(run).findings
    assert [f.rule for f in found] == (["sandbox_leak"] if is_leak else [])
    if is_leak:
        assert abs(found[0].step - 41) <= 3
