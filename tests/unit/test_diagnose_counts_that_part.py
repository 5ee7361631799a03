"""Counts of groups on both sides of a queue: what was sent off against what came, failed and is under way."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.signs.books import missing_groups
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 160
T = np.arange(N)
USED = np.full(N, 64.0)
AT_ONCE, BY_AND_BY, NONE = 0.3 * (T >= 90), 0.3 * np.clip((T - 80) / 40, 0, 1), np.zeros(N)
WAITING = np.round(noisy(20.0, 40, 0.3, n=N))
RUNNING = np.round(noisy(70.0, 41, 0.1, n=N))
LOST = ("buffer_never_fills",)
WELL = ("well", "not_judged")


def _books(lost: Array) -> dict[str, Array]:
    """Every group that was admitted is somewhere, but for those that are lost."""
    failed, evicted = np.random.default_rng(3).poisson(0.4, (2, N)).cumsum(axis=1).astype(np.float64)
    counted = {"running": RUNNING, "finished": WAITING, "failed": failed, "evicted": evicted}
    counted["trained"] = USED.cumsum()
    counted["admitted"] = np.sum(list(counted.values()), axis=0) + np.round(USED * lost / (1 - lost)).cumsum()
    return {f"buffer/num_{name}": np.asarray(values, np.float64) for name, values in counted.items()}


def _queue(lost: Array) -> dict[str, Array]:
    put = USED.cumsum() + WAITING + np.round(USED * lost / (1 - lost)).cumsum()
    return {"queue/num_put": put, "queue/num_got": USED.cumsum(), "queue/size": WAITING}


def _both_sides(lost: Array) -> dict[str, Array]:
    sent = np.round(noisy(USED / (1 - lost), 42, 0.02, n=N))
    came = np.round(sent * (1 - lost)) - np.diff(WAITING // 8, prepend=WAITING[0] // 8)
    return {"rollout/groups_sent": sent, "trainer/groups_received": came}


def _totals(lost: Array) -> dict[str, Array]:
    sent, came = _both_sides(lost).values()
    return {"rollout/num_finished_total": sent.cumsum(), "buffer/num_added_total": came.cumsum()}


@pytest.mark.parametrize("tell", [_books, _queue, _both_sides, _totals])
@pytest.mark.parametrize("lost", [AT_ONCE, BY_AND_BY], ids=["at once", "by and by"])
def test_counts_that_begin_to_part_lose_groups(tell, lost: Array) -> None:  # type: ignore[no-untyped-def]
    assert diagnose(run_of(tell(NONE), n=N)).verdict in WELL
    found = diagnose(run_of(tell(lost), n=N))
    assert found.verdict in LOST
    assert abs(found.findings[0].step - (90 if lost is AT_ONCE else 84)) <= 6


@pytest.mark.parametrize("tell", [_books, _queue, _both_sides, _totals])
def test_what_parts_from_the_first_step_in_proportion_counts_something_else(tell) -> None:  # type: ignore[no-untyped-def]
    assert diagnose(run_of(tell(np.full(N, 0.3)), n=N)).verdict in WELL


def test_what_is_given_up_or_waits_is_not_lost() -> None:
    """Half of the groups are evicted, or stay in a queue that grows: both are counted."""
    more = np.round(64.0 * (T >= 90)).cumsum()
    for held in ("buffer/num_evicted", "buffer/num_finished"):
        counts = _books(NONE)
        grown = {held: counts[held] + more, "buffer/num_admitted": counts["buffer/num_admitted"] + more}
        assert missing_groups(View.of(run_of(counts | grown, n=N))) is None


def test_a_filter_that_drops_more_parts_counts_of_both_of_its_sides() -> None:
    """Until then nearly every group was kept."""
    half = np.where(T >= 90, 2.0, 1.0)
    counts = {
        "generator/groups_generated": np.round(noisy(65.0, 43, 0.01, n=N) * half),
        "trainer/groups_used": USED,
    }
    drops = {"training/filter_groups/evicted_samples": np.round(1.0 + 65.0 * (half - 1.0))}
    assert missing_groups(View.of(run_of(counts | drops, n=N))) is None
    assert missing_groups(View.of(run_of(counts, n=N))) is not None


def test_a_counter_that_begins_anew_with_the_run_loses_nothing() -> None:
    anew = {
        m: np.where(T >= 90, v - v[89], v) if not m.endswith("size") else v for m, v in _queue(NONE).items()
    }
    assert missing_groups(View.of(run_of(anew, n=N))) is None
