"""The longest of many responses scatter by themselves; a burst is what that does not bring."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.finding import Finding
from rollbook.diagnose.rules.tail_burst import judge
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N, LIMIT = 400, 8192.0


def _lengths(
    seed: int, *, growth: float, runaway: float
) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """128 responses a step, of 900 tokens at first, whose logarithms scatter by 0.45; from a half on some run to the
    limit. A step decodes until its longest response has ended."""
    rng = np.random.default_rng(seed)
    typical = 900.0 * growth ** (np.arange(N) / N)
    drawn = typical[:, None] * np.exp(rng.normal(0.0, 0.45, (N, 128)))
    drawn[rng.random((N, 128)) < runaway * (np.arange(N) >= N // 2)[:, None]] = LIMIT
    drawn = np.minimum(drawn, LIMIT)
    gen = 5.0 + 0.02 * drawn.max(axis=1) * np.exp(rng.normal(0.0, 0.05, N))
    return {
        "response_length/mean": drawn.mean(axis=1),
        "response_length/max": drawn.max(axis=1),
        "response_length/clip_ratio": (drawn >= LIMIT).mean(axis=1),
        "timing_s/gen": gen,
        "timing_s/step": gen + 40.0,
    }


@pytest.mark.parametrize("seed", [3, 8, 17])
@pytest.mark.parametrize("growth", [1.0, 2.2])
def test_the_longest_that_come_in_clusters_by_chance_are_no_burst(seed: int, growth: float) -> None:
    assert judge(View.of(run_of(_lengths(seed, growth=growth, runaway=0.0), n=N))) is None


@pytest.mark.parametrize("seed", range(3))
def test_answers_that_run_away_beside_such_scatter_are_one(seed: int) -> None:
    found = judge(View.of(run_of(_lengths(seed, growth=1.2, runaway=0.004), n=N)))
    assert found is not None and found.rule == "tail_burst"


def test_rare_answers_many_times_as_long_as_any_before_are_one_and_dated_by_the_first() -> None:
    """One step of sixteen since step 200, where the longest scatter by a half: chance makes neither such lengths nor
    that there was none before."""
    values = _lengths(5, growth=1.0, runaway=0.0)
    hit = np.zeros(N, np.bool_)
    hit[200::16] = True
    values["response_length/max"] = np.where(hit, LIMIT, np.minimum(values["response_length/max"], 3000.0))
    values["timing_s/gen"] = 5.0 + 0.02 * values["response_length/max"]
    found = judge(View.of(run_of(values, n=N)))
    assert isinstance(found, Finding) and found.step == 201


def test_a_cluster_of_the_longest_that_ends_again_is_chance_where_as_many_that_go_on_are_not() -> None:
    """Seven of thirty steps, and two long after them; eleven of the last fifty."""
    n = 197
    for hits, verdict in (
        ((48, 50, 52, 56, 73, 75, 77, 142, 162), "well"),
        ((147, 150, 155, 158, 163, 168, 171, 176, 181, 187, 193), "tail_burst"),
    ):
        long = np.isin(np.arange(n), hits)
        tail = {
            "response_length/max": noisy(4200.0, 9, 0.12, n=n) * np.where(long, 2.0, 1.0),
            "timing_s/gen": noisy(45.0, 10, 0.1, n=n) * np.where(long, 1.95, 1.0),
        }
        assert diagnose(run_of(tail, n=n)).verdict == verdict


def test_eight_bursts_of_a_hundred_steps_are_enough_where_answers_are_many_times_as_long() -> None:
    n = 100
    hit = np.isin(np.arange(n), (40, 46, 53, 60, 68, 79, 86, 95))
    for times, is_one in (
        (6.0, True),
        (1.7, False),
    ):  # the longest of so many are 1.7 times as long by themselves
        longest = noisy(3000.0, 9, 0.12, n=n) * np.where(hit, times, 1.0)
        tail = {"response_length/max": longest, "timing_s/gen": 0.02 * longest}
        assert (judge(View.of(run_of(tail, n=n))) is not None) == is_one
