"""What `bench/oncall_runs.py` puts in is possible: seconds add up, counters follow from each other, formats hold it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import oncall_runs
import quiet_runs
import reported_runs

STORIES = sorted({*oncall_runs.FAULTS, *quiet_runs.WELL})


@pytest.mark.parametrize("name", STORIES)
def test_a_step_holds_the_seconds_of_its_stages(name: str) -> None:
    log = oncall_runs.make(name, 2)
    assert 30 <= log.n <= 2000 and 0 < log.end <= log.n
    table = reported_runs.table(log)
    inside = sum(np.nan_to_num(table.get(f"timing_s/{stage}", np.zeros(log.n))) for stage in quiet_runs.MOVED)
    assert np.all(table["timing_s/step"] >= inside)
    assert all(
        np.nanmin(v) >= 0 for k, v in table.items() if k.startswith("timing_s/") and np.isfinite(v).any()
    )


@pytest.mark.parametrize("name", sorted({*oncall_runs.FAULTS} - {"brim_before_the_end"}))
def test_a_fault_is_told_by_three_systems(name: str, tmp_path: Path) -> None:
    """Only verl logs the memory of its devices."""
    told = [f for f in oncall_runs.TELLS if oncall_runs.write(f, name, 1, tmp_path) is not None]
    assert len({f.split()[0] for f in told}) >= 3


def test_books_of_the_buffer_miss_exactly_what_was_lost() -> None:
    """Admitted = running + finished + failed + trained + evicted, up to what is on its way, until the loss begins."""
    logs = (oncall_runs.make("lost_in_flight", seed) for seed in range(20))
    log = next(log for log in logs if "buffer/num_admitted" in log.m)
    count = {k: log.m[f"buffer/num_{k}"] for k in ("running", "finished", "failed", "trained", "evicted")}
    missing = log.m["buffer/num_admitted"] - np.sum(list(count.values()), axis=0)
    prompts = log.m["_prompts"][0]
    assert np.abs(missing[: log.at]).max() <= 0.2 * prompts
    assert missing[-1] >= 0.1 * prompts * (log.n - log.at) * 0.5


def test_the_median_of_two_humps_stands_and_the_tail_moves() -> None:
    one = np.ones(1)
    assert oncall_runs._quantile(0.0, one, one, 0.5) == pytest.approx(np.log(2))
    assert oncall_runs._quantile(1.0, one, 7 * one, 0.5) == pytest.approx(7 * np.log(2))
    far = oncall_runs._quantile(0.25, one, 10 * one, 0.95)  # a quarter's 80th percentile, the rest is below
    assert far == pytest.approx(10 * np.log(5), rel=0.02)
