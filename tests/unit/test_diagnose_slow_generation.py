"""A generation that takes many times what its lengths explain is no run that is well."""

from __future__ import annotations

import re

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.tree import diagnose

N = 120
LATE = np.arange(N) >= 80


def _since(
    factor: float, level: float, seed: int, size: float = 0.04
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return noisy(np.where(LATE, level * factor, level), seed, size, n=N)


def _steps(times: float) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    gen = _since(times, 50.0, 10)
    return {"timing_s/gen": gen, "timing_s/step": gen + 55.0}


def test_an_excess_that_nothing_explains_is_named_with_what_to_log() -> None:
    diagnosis = diagnose(run_of(_steps(2.4), n=N))
    found = diagnosis.findings[0]
    assert (diagnosis.verdict, found.step) == ("slow_generation", 81)
    assert re.match(r"generation takes 2\.[34]\d? times what the lengths explain", found.title)
    assert "log what would tell" in found.action
    assert found.cost_s == pytest.approx(40 * 70.0, rel=0.1)


@pytest.mark.parametrize(
    "why",
    [
        {"response_length/mean": _since(2.4, 800.0, 8), "response_length/max": _since(2.0, 3000.0, 9)},
        {"num_turns/mean": _since(2.4, 3.0, 20)},
        {"timing_s/update_actor": _since(2.4, 40.0, 11), "timing_s/old_log_prob": _since(2.4, 10.0, 12)},
        {"perf/total_num_tokens": _since(2.4, 4e5, 21)},
    ],
    ids=["longer responses", "more turns", "a slow host", "a bigger batch"],
)
def test_what_explains_it_is_no_finding(why: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]) -> None:
    assert "slow_generation" not in [f.rule for f in diagnose(run_of(_steps(2.4) | why, n=N)).findings]


def test_it_stands_back_where_another_rule_tells_the_cause() -> None:
    """The filter drops most of what is made: that is why."""
    drops = np.random.default_rng(2).poisson(np.where(LATE, 140.0, 16.0)).astype(np.float64)
    diagnosis = diagnose(run_of(_steps(2.4) | {"training/filter_groups/evicted_samples": drops}, n=N))
    assert [f.rule for f in (*diagnosis.findings, *diagnosis.consequences)] == ["filter_starvation"]


def test_a_wait_that_the_step_hardly_feels_is_none() -> None:
    gen = _since(2.4, 4.0, 10)
    assert diagnose(run_of({"timing_s/gen": gen, "timing_s/step": gen + 55.0}, n=N)).verdict == "well"


@pytest.mark.parametrize(
    "lost", ["training/rollout_failure/evicted_samples", "training/off_policy/evicted_samples", ""]
)
def test_a_third_of_a_step_is_waited_for_what_is_lost_since_then(lost: str) -> None:
    """A trainer that hardly waited waits ten seconds of thirty. What it waits for is told if many more samples are
    lost from the same step on."""
    gen = _since(20.0, 0.5, 10)
    waits = {
        "training/off_policy/trajectory_staleness/mean": noisy(0.9, 30, n=N),
        "timing_s/gen": gen,
        "timing_s/update_actor": noisy(15.0, 11, n=N),
        "timing_s/old_log_prob": noisy(4.0, 12, n=N),
        "timing_s/step": gen + noisy(20.0, 14, n=N),
    }
    if lost:
        waits[lost] = np.round(np.where(LATE, noisy(60.0, 31, 0.1, n=N), 1.0))
    assert diagnose(run_of(waits, n=N)).verdict == ("buffer_never_fills" if lost else "slow_generation")
