"""The hand-over's own peak of device memory, under any name, beside what the training takes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
CLIMB = np.clip((T - 30) / 80, 0, 1)
SLOWER = {"timing_s/update_weights": noisy(4.0 * (1 + 0.5 * CLIMB**2), 13)}


def _verdict(
    peak_gib: Array, changed: dict[str, Array], *, name: str = "memory/update_weights/peak_gb"
) -> str:
    scale = 2**30 if name.endswith("bytes") else 1.0
    return diagnose(run_of({name: peak_gib * scale} | changed)).verdict


@pytest.mark.parametrize(
    "name",
    ["memory/update_weights/peak_gb", "gpu_mem_peak_during_sync_gib", "sync/max_memory_allocated_bytes"],
)
@pytest.mark.parametrize(
    "felt", [SLOWER, {"memory/update_weights/alloc_retries": np.floor(8 * CLIMB)}], ids=["slower", "retries"]
)
def test_a_hand_over_that_climbs_to_the_brim_and_is_felt_runs_out(name: str, felt: dict[str, Array]) -> None:
    assert _verdict(63 + 15.5 * CLIMB, felt, name=name) == "oom_in_sync"


@pytest.mark.parametrize(
    ("peak_gib", "changed"),
    [
        (77 + noisy(0.1, 20), SLOWER),  # as full from the first step on
        (60 + 10 * CLIMB, SLOWER),  # there is room
        (63 + 15.5 * CLIMB, {}),  # nobody waits for the allocator
    ],
    ids=["flat", "room", "unfelt"],
)
def test_a_peak_that_is_high_or_climbs_alone_is_well(peak_gib: Array, changed: dict[str, Array]) -> None:
    assert _verdict(peak_gib, changed) == "well"


def test_a_peak_that_the_training_has_too_is_not_the_hand_overs() -> None:
    peak = np.maximum.accumulate(63 + 15.5 * CLIMB)
    trained = {"perf/max_memory_allocated_gb": peak - 1, "perf/max_memory_reserved_gb": peak + 0.5}
    grown = {
        f"response_length/{how}": noisy(size * (1 + CLIMB), 8)
        for how, size in (("mean", 800.0), ("max", 3e3))
    }
    assert _verdict(peak, trained | grown | SLOWER) == "late_oom_with_length"


@pytest.mark.parametrize("name", ["sync/oom_retries", "weight_sync/num_alloc_retries"])
def test_what_is_near_the_brim_for_long_runs_out_when_an_allocation_must_be_tried_again(name: str) -> None:
    near_since_60 = 63 + 12.5 * np.clip((T - 20) / 40, 0, 1) + 2.5 * np.clip((T - 60) / 50, 0, 1)
    felt = SLOWER | {name: np.where(T >= 95, 1.0 + (T >= 105) * 2.0, 0.0)}
    found = diagnose(run_of({"memory/update_weights/peak_gb": near_since_60} | felt)).findings
    assert [(f.rule, f.step) for f in found] == [("oom_in_sync", 96)]


@pytest.mark.parametrize(
    ("last", "top", "rule"),
    [
        ({"timing_s/update_actor": 20.0}, 78.5, "oom_in_sync"),
        ({"timing_s/update_actor": 20.0, "timing_s/update_weights": 4.0}, 78.5, "well"),
        ({"timing_s/gen": 30.0}, 78.5, "well"),
        ({"timing_s/update_actor": 20.0}, 73.0, "well"),
        (None, 78.5, "well"),
    ],
    ids=["in the hand-over", "after it", "before it", "with room", "after a whole step"],
)
@pytest.mark.parametrize("has_step", [True, False])
def test_a_log_that_ends_in_a_hand_over_at_the_brim_ran_out_of_memory(
    last: dict[str, float] | None, top: float, rule: str, has_step: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(11)
    rows: list[dict[str, float]] = [
        {"_step": i, "training/global_step": i, "critic/rewards/mean": 0.3 + 0.002 * i}
        | {"timing_s/gen": rng.normal(30, 1), "timing_s/update_actor": rng.normal(20, 0.3)}
        | {"timing_s/update_weights": rng.normal(4, 0.1), "timing_s/step": rng.normal(56, 1)}
        | {
            "mem/peak_gb/update_weights": 60 + (top - 60) * i / 100,
            "response_length/mean": rng.normal(800, 9),
        }
        | {"perf/max_memory_allocated_gb": 45.0, "perf/max_memory_reserved_gb": 52.0}
        for i in range(1, 101)
    ]
    if last is not None:
        rows.append({"_step": 101} | ({"training/global_step": 101} if has_step else {}) | last)
    log = tmp_path / "history.jsonl"
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = diagnose(load(str(log)))
    assert found.verdict in (rule, "not_judged" if rule == "well" else rule)
    if rule != "well":
        assert found.findings[0].step >= 100
