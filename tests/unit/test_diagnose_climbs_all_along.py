"""Samples that grow older from the first steps on, and tools that are used more."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import DIFF, KL, Array, noisy, run_of

from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
AGE = "training/off_policy/trajectory_staleness"


def _verdict(older: float, *, apart: float = 2.0, since: int = 6) -> str:
    climb = np.clip((T - since) / (N - since), 0, 1)
    mean = 0.5 + older * climb + np.random.default_rng(7).normal(0, 0.02, N)
    changed = {
        f"{AGE}/mean": mean,
        f"{AGE}/max": np.round(2 + 1.4 * older * climb),
        f"{AGE}/min": np.floor(0.5 * older * climb),
        DIFF: noisy(0.006 * (1 + (apart - 1) * climb), 2, 0.02),
        KL: noisy(0.001 * (1 + (apart - 1) * climb), 3, 0.05),
        "actor/pg_clipfrac": noisy(2e-3 * (1 + (apart - 1) * climb), 7, 0.05),
    }
    return diagnose(run_of(changed)).verdict


@pytest.mark.parametrize("since", [2, 6, 20])
def test_samples_that_grow_older_evenly_over_all_of_the_log_are_stale(since: int) -> None:
    assert _verdict(6.0, since=since) == "stale_samples"


@pytest.mark.parametrize(("older", "apart"), [(0.6, 1.0), (0.6, 1.3), (0.0, 1.0)])
def test_samples_a_little_older_are_well(older: float, apart: float) -> None:
    assert _verdict(older, apart=apart) == "well"


def _tools(turns: Array, calls: Array) -> str:
    work = turns / turns[0]
    wait = 200 * work**1.1 * (1 + 0.4 * (calls / calls[0] / work - 1))
    changed = {
        "num_turns/mean": turns,
        "env/turn_s/mean": noisy(calls, 20, 0.03),
        "response_length/mean": noisy(800 * work**0.6, 8, 0.02),
        "timing_s/gen": noisy(wait, 10, 0.02),
        "timing_s/step": noisy(wait + 55, 14, 0.02),
        "critic/score/mean": 0.2 + 0.3 * T / N + np.random.default_rng(5).normal(0, 0.01, N),
    }
    return diagnose(run_of(changed)).verdict


def test_calls_that_take_longer_for_more_turns_are_no_leak() -> None:
    """Where a log has the seconds of all calls of a trajectory, they grow with its turns."""
    climb = T / N
    turns = np.asarray(7.0 * (1 + 0.5 * climb))
    assert _tools(turns, np.asarray(18.0 * (1 + 1.3 * climb))) == "well"
    assert _tools(np.full(N, 7.0), np.asarray(18.0 * (1 + 1.3 * climb))) == "sandbox_leak"
