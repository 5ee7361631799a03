"""Sandboxes that only the scorer of one source needs: their time-outs show in its seconds and in that source."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import Array, noisy, run_of
from rollbook.diagnose.tree import diagnose

N, SINCE = 120, 60
T = np.arange(N)
RNG = np.random.default_rng(8)


def _run(code: float, seconds: float, **extra: Array) -> list[str]:
    since = T >= SINCE
    values = {
        "reward/kodcode/mean": RNG.binomial(180, np.where(since, code, 0.1), N) / 180,
        "reward/math/mean": RNG.binomial(160, 0.25 + 0.1 * T / N, N) / 160,
        "reward/ifeval/mean": RNG.binomial(160, 0.3 + 0.1 * T / N, N) / 160,
        "timing_s/reward": noisy(np.where(since, seconds, 1.0), 4),
        "timing_s/step": noisy(np.where(since, 104.0 + seconds, 105.0), 5),
    }
    return [f.rule for f in diagnose(run_of(values | extra)).findings]


def test_a_scorer_that_waits_and_the_half_of_one_source_are_a_dead_pool() -> None:
    """The mean reward of four sources goes on to rise."""
    assert _run(0.015, 90.0) == ["dead_sandbox_pool"]


@pytest.mark.parametrize("name", ["reward/sandbox_timeout_rate", "scorer/container_failure_frac"])
def test_time_outs_of_the_scorers_sandboxes_are_read_by_their_words(name: str) -> None:
    rate = np.where(T >= SINCE, RNG.binomial(180, 0.85, N), 0) / 180
    assert _run(0.03, 90.0, **{name: rate}) == ["dead_sandbox_pool"]


@pytest.mark.parametrize(
    ("code", "seconds", "extra"),
    [
        (0.1, 1.4, {}),
        (0.1, 90.0, {}),
        (0.1, 1.0, {"reward/format_failure_rate": np.where(T >= SINCE, 0.3, 0.0)}),
        (0.1, 1.0, {"reward/sandbox_timeout_rate": np.where(T % 20 == 0, 0.01, 0.0)}),
    ],
    ids=["a little slower", "slower, and as right", "answers of another form", "a time-out now and then"],
)
def test_a_slow_scorer_and_other_failures_are_no_dead_pool(
    code: float, seconds: float, extra: dict[str, Array]
) -> None:
    assert "dead_sandbox_pool" not in _run(code, seconds, **extra)


@pytest.mark.parametrize(
    ("lost", "wait_s", "rules"),
    [(0.5, 40.0, ["dead_sandbox_pool"]), (1.0, 2.0, []), (0.5, 0.0, [])],
    ids=["both", "neither", "the reward alone"],
)
def test_time_in_which_nothing_is_generated_and_half_of_the_reward_are_a_dead_pool(
    lost: float, wait_s: float, rules: list[str]
) -> None:
    """The one signal that slime has of tools, environments and scorers."""
    since = T >= SINCE
    values = {
        "critic/score/mean": noisy(np.where(since, 0.4 * lost, 0.4), 1, 0.05),
        "perf/non_generation_time/mean": noisy(np.where(since, 34.0 + wait_s, 34.0), 2, 0.1),
        "timing_s/gen": noisy(np.where(since, 150.0 + wait_s, 150.0), 3),
        "timing_s/step": noisy(np.where(since, 210.0 + wait_s, 210.0), 5),
    }
    found = [f.rule for f in diagnose(run_of(values, format="slime")).findings]
    assert found == rules
