"""An engine whose weights are broken in part, and memory that grows while the longest answers are at their limit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import ALLOCATED, DIFF, KL, PEARSON, RESERVED, Array, noisy, run_of

from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
SINCE = T >= 60


def _broken(*, lost: float = 0.3, longer: float = 1.22, at_once: bool = True, apart: float = 20.0) -> str:
    """The gap is many times as large at one step, and a part of the reward is lost then or later."""
    part = np.clip((T - 60) / 50, 0, 1) if not at_once else np.where(SINCE, 1.0, 0.0)
    return diagnose(
        run_of(
            {
                DIFF: noisy(0.003, 2) * np.where(SINCE, apart, 1.0),
                KL: noisy(4e-4, 3, 0.1) * np.where(SINCE, 5 * apart, 1.0),
                PEARSON: np.where(SINCE, 0.84, 0.999) + np.random.default_rng(9).normal(0, 2e-4, N),
                "critic/score/mean": (0.4 + T / 1200) * (1 - lost * part) + noisy(0.005, 20, 0.5),
                "response_length/mean": noisy(np.asarray(800 * (1 + (longer - 1) * part)), 8, 0.02),
            }
        )
    ).verdict


def test_a_part_of_the_reward_that_goes_with_the_gap_in_one_step_is_no_matter_of_numerics() -> None:
    assert _broken() == "silent_error_after_wake"
    assert _broken(apart=7.0) == "silent_error_after_wake"


@pytest.mark.parametrize(
    "changed",
    [{"at_once": False}, {"lost": 0.05}, {"longer": 1.0}],
    ids=["reward later", "reward stands", "answers stand"],
)
def test_numerics_change_no_answers_and_lose_rewards_over_many_updates(changed: dict[str, float]) -> None:
    assert _broken(**changed) == "engine_mismatch"  # type: ignore[arg-type]


def _full(mean: Array, end_gib: float) -> str:
    """Some response is at its limit in every step, and memory goes with the mean."""
    grown = np.clip((mean - mean[0]) / (mean[-1] - mean[0]), 0, 1) if mean[-1] > 1.2 * mean[0] else 1.0
    peak = np.maximum.accumulate(40 + (end_gib - 40) * grown + np.zeros(N))
    return diagnose(
        run_of(
            {
                "response_length/mean": noisy(mean, 8, 0.02),
                "response_length/max": np.full(N, 32768.0),
                "timing_s/gen": noisy(mean / 10, 10),
                ALLOCATED: peak,
                RESERVED: np.minimum(peak + 6.8, 78.4),
            }
        )
    ).verdict


def test_memory_that_grows_while_the_longest_stand_at_the_limit_is_not_shown_to_fit() -> None:
    rises = 6500.0 * (1 + 2 * np.clip((T - 20) / 99, 0, 1))
    assert _full(rises, 71.6) == "late_oom_with_length"
    assert _full(rises, 60.0) == "well"


def test_memory_that_stands_while_the_longest_are_at_the_limit_fits() -> None:
    soon = 6500.0 * (1 + 2 * np.clip((T - 5) / 15, 0, 1))
    assert _full(soon, 71.6) == "well"
    assert _full(np.full(N, 6500.0), 71.6) == "well"
