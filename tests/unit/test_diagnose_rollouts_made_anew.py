"""Rollouts of an agentic job that fail and are made anew: what is trained stays as good, and only their count tells."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.series import Event
from rollbook.diagnose.tree import diagnose

N, SINCE = 100, 60
T = np.arange(N)
FAILED = "training/rollout_failure/evicted_samples"
TURNS = {"num_turns/mean": noisy(9.0, 40, n=N), "batch/num_sequences": np.full(N, 128.0)}


def _failed(since: Array, before: float = 0.0) -> Array:
    """Logged in the steps that have some."""
    counts = np.random.default_rng(41).poisson(np.where(T < SINCE, before, since)).astype(np.float64)
    counts[7] = 1.0
    return np.where(counts > 0, counts, np.nan)


def _found(changed: dict[str, Array], *events: Event) -> list[tuple[str, int]]:
    return [(f.rule, f.step) for f in diagnose(run_of(TURNS | changed, n=N, events=events)).findings]


@pytest.mark.parametrize("waits", [1.0, 1.6])
def test_rollouts_that_fail_at_once_and_for_good_are_of_dead_sandboxes(waits: float) -> None:
    longer = {"timing_s/gen": noisy(np.where(T < SINCE, 50.0, 50.0 * waits), 42, n=N)}
    assert _found(longer | {FAILED: _failed(np.full(N, 14.0))}) == [("dead_sandbox_pool", SINCE + 1)]


@pytest.mark.parametrize(("sequences", "is_found"), [(1024.0, True), (4096.0, False)])
def test_they_may_be_counted_in_groups_of_many(sequences: float, is_found: bool) -> None:
    failed = {FAILED: _failed(np.full(N, 18.0)), "batch/num_sequences": np.full(N, sequences)}
    assert bool(_found(failed)) is is_found


@pytest.mark.parametrize(
    ("failed", "turns"),
    [
        (_failed(np.full(N, 2.0)), 9.0),
        (_failed(np.full(N, 14.0), before=9.0), 9.0),
        (_failed(np.where(T < SINCE + 8, 14.0, 0.0)), 9.0),
        (_failed(np.where(T % 6 == 0, 14.0, 0.0)), 9.0),
        (_failed(np.full(N, 14.0)), 1.0),
    ],
    ids=["few", "as before", "for a while", "now and then", "no environment"],
)
def test_some_that_fail_are_made_anew_and_no_more(failed: Array, turns: float) -> None:
    assert _found({"num_turns/mean": noisy(turns, 43, n=N), FAILED: failed}) == []


def test_an_engine_that_died_explains_them() -> None:
    died = Event(kind="engine_died", step=SINCE, text="engine rank-3 died")
    rules = [rule for rule, _ in _found({FAILED: _failed(np.full(N, 14.0))}, died)]
    assert "dead_sandbox_pool" not in rules
