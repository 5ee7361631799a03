"""Rows that tell of no step, but of what waits or what the devices do, are read as such: the steps beside them stand,
and a log that ends in the same one again and again stands still."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

STEP_S = 100.0


def _step(i: int) -> dict[str, float]:
    return {
        "critic/rewards/mean": 0.4 + 0.001 * i,
        "actor/entropy": 0.3,
        "response_length/mean": 800.0,
        "timing_s/step": STEP_S,
    }


def _of_lines(tmp_path: Path, lines: list[dict[str, object]]) -> Diagnosis:
    log = tmp_path / "run.jsonl"
    log.write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
    return diagnose(load(str(log)))


def _waits(step: int, *, ready: int = 61, wait_s: float) -> dict[str, object]:
    return {
        "step": step,
        "data": {
            "queue/ready": ready,
            "queue/wanted": 64,
            "queue/groups_running": 0,
            "queue/waited_seconds": wait_s,
        },
    }


STEPS: list[dict[str, object]] = [{"step": i, "data": _step(i)} for i in range(1, 31)]


def test_a_queue_that_waits_in_the_same_row_to_the_end_never_fills(tmp_path: Path) -> None:
    found = _of_lines(tmp_path, [*STEPS, *(_waits(31, wait_s=120.0 * i) for i in range(1, 21))])
    assert (found.verdict, found.findings[0].step) == ("buffer_never_fills", 31)
    assert "queue/ready 61, queue/wanted 64" in found.findings[0].evidence[0].says
    assert not any("taken up again" in note for note in found.notes)


@pytest.mark.parametrize(
    "waits",
    [
        [_waits(31, ready=2 * i, wait_s=120.0 * i) for i in range(1, 21)],
        [_waits(31, wait_s=20.0 * i) for i in range(1, 21)],
        [_waits(31, wait_s=1000.0 * i) for i in range(1, 4)],
        [*(_waits(31, wait_s=120.0 * i) for i in range(1, 21)), {"step": 31, "data": _step(31)}],
    ],
    ids=["it fills", "not long", "said three times", "the step came"],
)
def test_a_queue_that_fills_or_is_young_raises_no_alarm(
    waits: list[dict[str, object]], tmp_path: Path
) -> None:
    found = _of_lines(tmp_path, [*STEPS, *waits])
    assert found.findings == ()
    assert not any("taken up again" in note for note in found.notes)


def _heartbeat(i: int, *, last: float = 901.0, every_s: float = 120.0) -> dict[str, object]:
    """What a watch writes beside the newest step: which collective the first and the last rank are in."""
    return {
        "step": 30,
        "data": {
            "watch/seconds_since_last_step": every_s * i,
            "watch/gpu_power_w_mean": 130.0 + i % 3,
            "watch/nccl_seq_first": 902.0,
            "watch/nccl_seq_last": last,
        },
    }


@pytest.mark.parametrize(
    ("beats", "rule"),
    [
        ([_heartbeat(i) for i in range(1, 21)], "collective_hang"),
        ([_heartbeat(i, last=902.0) for i in range(1, 21)], "run_stopped"),
        ([_heartbeat(i, last=880.0 + i) for i in range(1, 21)], "well"),
        ([_heartbeat(i, every_s=20.0) for i in range(1, 21)], "well"),
        ([*(_heartbeat(i) for i in range(1, 21)), {"step": 31, "data": _step(31)}], "well"),
    ],
    ids=["one is behind", "none is behind", "it moves", "not long", "the step came"],
)
def test_a_rank_that_is_a_collective_behind_and_stays_there_hangs_the_run(
    beats: list[dict[str, object]], rule: str, tmp_path: Path
) -> None:
    found = _of_lines(tmp_path, [*STEPS, *beats])
    assert found.verdict in (rule, "not_judged" if rule == "well" else rule)
    assert not any("taken up again" in note for note in found.notes)


def _devices(busy: float, watts: float) -> dict[str, object]:
    return {
        f"system.gpu.{i}.{name}": v
        for i in range(4)
        for name, v in (("gpu", busy), ("powerWatts", watts + i))
    }


@pytest.mark.parametrize(
    ("busy", "watts", "minutes", "rule"),
    [
        (100.0, 130.0, 60, "collective_hang"),
        (100.0, 520.0, 60, "well"),
        (0.0, 90.0, 60, "well"),
        (100.0, 130.0, 6, "well"),
    ],
    ids=["spin", "compute", "idle", "not long"],
)
def test_devices_that_are_busy_at_idle_power_spin_in_a_collective(
    busy: float, watts: float, minutes: int, rule: str, tmp_path: Path
) -> None:
    """A tracker's rows of the system, which have no step: every minute, and beside the steps."""
    lines: list[dict[str, object]] = []
    for i in range(1, 41):
        lines.append({"_step": i, "_timestamp": STEP_S * i, **_step(i), **_devices(85.0, 540.0)})
        lines.append({"_timestamp": STEP_S * i + 50.0, **_devices(80.0, 500.0)})
    lines += [{"_timestamp": STEP_S * 40 + 60.0 * i, **_devices(busy, watts)} for i in range(1, minutes)]
    found = _of_lines(tmp_path, lines)
    assert found.verdict in (rule, "not_judged" if rule == "well" else rule)
    assert (found.last_step, found.num_steps) == (40, 40)
    assert not any("taken up again" in note for note in found.notes)


@pytest.mark.parametrize(("watts", "rule"), [(130.0, "collective_hang"), (500.0, "well")])
def test_the_mean_of_all_devices_tells_as_much(watts: float, rule: str, tmp_path: Path) -> None:
    def mean(busy: float, power: float) -> dict[str, object]:
        return {"system.gpu.mean.gpu": busy, "system.gpu.mean.powerWatts": power, "system.network.sent": 0.2}

    lines: list[dict[str, object]] = [
        {"_step": i, "_timestamp": STEP_S * i, **_step(i), **mean(85.0, 540.0)} for i in range(1, 41)
    ]
    lines += [{"_timestamp": STEP_S * 40 + 60.0 * i, **mean(99.5, watts)} for i in range(1, 61)]
    assert _of_lines(tmp_path, lines).verdict in (rule, "not_judged" if rule == "well" else rule)
