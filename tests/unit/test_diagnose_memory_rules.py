"""Memory near the brim: what grows into it, what leaps into it, and what has long fitted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from diagnose_runs import ALLOCATED, RESERVED, noisy, run_of
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.series import Event
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)


def _grown(start: float, end: float, over: tuple[int, int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return start + (end - start) * np.clip((T - over[0]) / (over[1] - over[0]), 0, 1)


def test_memory_that_grew_long_ago_and_fits_since_is_no_fault() -> None:
    """Both reach 75 of 80 GiB with lengths twice as long; one at its end, the other for two thirds of it."""
    for over, verdict in (((60, 119), "late_oom_with_length"), ((5, 40), "well")):
        lengths = {
            f"response_length/{k}": noisy(_grown(v, 2 * v, over), 8)
            for k, v in (("mean", 800.0), ("max", 3000.0))
        }
        peak = np.maximum.accumulate(_grown(50, 75, over) + np.random.default_rng(0).normal(0, 0.05, N))
        assert diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: peak + 4})).verdict == verdict


def test_the_last_peak_tells_whether_growing_memory_is_full() -> None:
    """It passes 92 % of 80 GiB in the last of 120 steps only; lengths scatter as they grow."""
    lengths = {
        f"response_length/{k}": noisy(_grown(v, 2.4 * v, (40, 119)), 8, 0.1)
        for k, v in (("mean", 300.0), ("max", 800.0))
    }
    peak = np.maximum.accumulate(_grown(30, 74, (40, 119)))
    assert (
        diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: peak + 1})).verdict == "late_oom_with_length"
    )


@pytest.mark.parametrize("power", [1.0, 2.0])
@pytest.mark.parametrize("is_memory_logged", [True, False])
def test_running_out_of_memory_is_dated_by_the_foot_of_the_climb_and_not_by_the_crash(
    is_memory_logged: bool, power: float
) -> None:
    """Answers grow from step 41 on, steadily or imperceptibly at first; the error stands at the end of 120 steps."""
    climb = np.clip((T - 40) / 79, 0, 1) ** power
    values = {
        f"response_length/{k}": noisy(v * (1 + 2 * climb), 8, 0.03)
        for k, v in (("mean", 800.0), ("max", 3e3))
    }
    if is_memory_logged:
        values |= {ALLOCATED: np.maximum.accumulate(50 + 27 * climb), RESERVED: 55 + 24 * climb}
    said = Event(kind="out_of_memory", step=120, text="CUDA out of memory. Tried to allocate 2 GiB")
    finding = diagnose(run_of(values, events=(said,))).findings[0]
    assert finding.rule == "late_oom_with_length"
    assert abs(finding.step - 41) <= 12
    assert finding.evidence[0].step == 120  # where it crashed


def test_memory_and_lengths_that_both_stand_until_they_step_go_together() -> None:
    """A curriculum twenty steps before the end: in ranks most of both are ties."""
    step = np.clip((T - 100) / 8, 0, 1)
    lengths = {
        "response_length/mean": noisy(800 * (1 + 1.8 * step), 8, 0.02),
        "response_length/max": np.where((T % 40 == 7) | (T > 104), 6144.0, 3300.0),
    }
    peak = np.maximum.accumulate(44 + 34 * step)
    assert (
        diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: np.maximum(peak + 1, 60)})).verdict
        == "late_oom_with_length"
    )


def test_a_leap_of_memory_and_of_the_hand_over_is_not_explained_by_lengths_that_climb() -> None:
    """70 to 134 of 141 GiB at one step, with the publication twice as long; lengths climb by a third all along."""
    climbs = noisy(3500 * (1 + 0.5 * T / N), 8, 0.02)
    leaps = {
        ALLOCATED: np.where(T >= 95, 134.0, 70.0),
        RESERVED: np.where(T >= 95, 140.7, 92.0),
        "timing_s/update_weights": noisy(np.where(T >= 95, 10.0, 5.0), 13),
        "response_length/mean": climbs,
        "response_length/max": 4 * climbs,
    }
    assert diagnose(run_of(leaps)).verdict == "oom_in_sync"


def test_words_of_the_end_do_not_hide_when_memory_began_to_be_held() -> None:
    grows = np.clip((np.arange(120) - 50) / 60, 0, 1)
    text = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 0.84 GiB. 35.10 GiB is reserved by PyTorch but "
        "unallocated"
    )
    said = Event(kind="out_of_memory", step=120, text=text, fields={"stage": "sync"})
    run = run_of({ALLOCATED: np.full(120, 38.0), RESERVED: 42.0 + 33.0 * grows}, events=(said,))
    diagnosis = diagnose(run)
    assert diagnosis.verdict == "fragmentation"
    assert 40 <= diagnosis.findings[0].step <= 75
    assert "35.1 GiB were reserved and not used" in diagnosis.findings[0].evidence[-1].says


def test_an_error_alone_is_told_by_its_numbers_and_claims_no_growth(tmp_path: Path) -> None:
    """Ray passes the error on before the error itself stands there; no memory and no length was logged."""
    text = (
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.actor_rollout_update_actor() (pid=4411)\n"
        '  File "/opt/verl/workers/fsdp_workers.py", line 640, in update_actor\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 14.84 GiB. GPU 0 has a total capacity of 79.10 "
        "GiB of which 8.02 GiB is free.\n"
    )
    (tmp_path / "error.txt").write_text(f"Traceback (most recent call last):\n{text}")
    finding = diagnose(load(str(tmp_path / "error.txt"))).findings[0]
    assert finding.rule == "late_oom_with_length"
    assert "Tried to allocate 14.84 GiB" in finding.evidence[0].says
    assert "grows" not in finding.title
    assert "does not say" in finding.next_check


def test_an_error_of_memory_that_steps_follow_without_a_restart_ended_nothing() -> None:
    """A model's own program ran out of memory, or the trainer caught it; where the run goes back, it was the run's."""
    words = "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB"
    caught = Event(kind="out_of_memory", step=30, text=words)
    assert diagnose(run_of({}, events=(caught,))).findings == ()
    resumed = Event(kind="resumed", step=30, text="Resuming from global_step_20")
    assert diagnose(run_of({}, events=(caught, resumed))).verdict == "late_oom_with_length"


def test_one_crash_that_is_told_from_two_places_is_that_of_the_hand_over() -> None:
    text = "CUDA out of memory. Tried to allocate 2 GiB"
    places = ({"stage": "sync"}, {})
    events = tuple(Event(kind="out_of_memory", step=120, text=text, fields=fields) for fields in places)
    diagnosis = diagnose(run_of({}, events=events))
    assert [f.rule for f in (*diagnosis.findings, *diagnosis.consequences)] == ["oom_in_sync"]


def test_memory_that_long_responses_never_filled_is_not_theirs_at_the_end() -> None:
    """Every seventh step has a response at the limit of 8,192 tokens, at 50 GiB; the last one leaps to 78."""
    longest = np.where(T % 7 == 0, 8192.0, 4500.0)
    peak = 49 + longest / 8192 + np.where(T >= 119, 28.0, 0.0)
    lengths = {"response_length/max": longest, "response_length/mean": noisy(900 + 3 * T, 8, 0.02)}
    verdict = diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: peak + 1})).verdict
    assert verdict != "late_oom_with_length"


def test_a_run_that_has_stood_at_the_brim_of_a_card_that_is_only_guessed_is_well() -> None:
    """A policy that writes more takes 9 GiB more over 70 steps, up to 45.5 of what may be 48, and stays there."""
    for since, verdict in ((75, "well"), (115, "late_oom_with_length")):
        climb = np.clip((T - 5) / (since - 5), 0, 1)
        peak = 36 + 9.5 * climb + np.random.default_rng(3).normal(0, 0.4, N)
        lengths = {
            f"response_length/{k}": noisy(v * (1 + 1.5 * climb), 8)
            for k, v in (("mean", 450.0), ("max", 1600.0))
        }
        assert diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: peak + 2})).verdict == verdict


def test_memory_that_ran_out_while_the_engine_generated_is_not_the_micro_batchs(tmp_path: Path) -> None:
    steps = "".join(f"step:{i} - critic/rewards/mean:0.{i % 7}\n" for i in range(1, 19))
    died = (
        "Traceback (most recent call last):\n"
        '  File "/opt/verl/ray_trainer.py", line 1203, in fit\n'
        "    gen_batch_output = self.async_rollout_manager.generate_sequences(gen_batch)\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.32 GiB.\n"
    )
    for text, word in (
        (died, "gpu_memory_utilization"),
        (died.replace("generate_sequences", "update_actor"), "pack"),
    ):
        (tmp_path / "run.log").write_text(steps + text)
        finding = diagnose(load(str(tmp_path / "run.log"))).findings[0]
        assert finding.rule == "late_oom_with_length"
        assert word in finding.action


def test_responses_that_have_been_at_their_limit_again_and_again_fit() -> None:
    """Memory grew with them to 36 of what may be 40 GiB, and has stood for twelve steps in which they were as long as
    they may be; where it still grows at that length, more of them come together."""
    climb = np.clip(T / 108, 0, 1)
    lengths = {
        "response_length/max": np.minimum(15_000 + 18_000 * climb, 32_768.0),
        "response_length/mean": 3700 + 4000 * climb,
    }
    for peak, verdict in ((29.5 + 6.4 * climb, "well"), (29.5 + 6.4 * T / 119, "late_oom_with_length")):
        held = {ALLOCATED: peak, RESERVED: np.minimum(peak + 3.8, 39.7)}
        assert diagnose(run_of(lengths | held)).verdict == verdict


@pytest.mark.parametrize("size", [24.0, 32.0, 40.0, 48.0, 64.0, 96.0])
def test_memory_that_ends_below_the_size_of_some_device_by_chance_is_not_full(size: float) -> None:
    """It grows with the lengths to 93 % of a size that the log does not tell. What the allocator has taken grows along
    with it; or it stops at the end of the device, and the room in it closes."""
    lengths = {
        f"response_length/{k}": noisy(_grown(v, 2.4 * v, (10, 119)), 8, 0.03)
        for k, v in (("mean", 600.0), ("max", 2400.0))
    }
    peak = size * np.maximum.accumulate(_grown(0.55, 0.93, (10, 119)))
    room = {"well": 1.04 * peak, "late_oom_with_length": np.minimum(1.15 * peak, 0.97 * size)}
    for verdict, reserved in room.items():
        assert diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: reserved})).verdict == verdict
    of_size = {"perf/device_memory_gb": np.full(N, size)}
    told = run_of({**lengths, **of_size, ALLOCATED: peak, RESERVED: 1.04 * peak})
    assert diagnose(told).verdict == "late_oom_with_length"


def test_memory_that_stands_at_the_last_of_the_device_is_a_guess_at_what_ended_the_log() -> None:
    """It followed the lengths to its place by step 70, and has fitted for fifty steps since."""
    climb = _grown(0, 1, (30, 70))
    lengths = {f"response_length/{k}": noisy(v * (1 + climb), 8) for k, v in (("mean", 800.0), ("max", 3e3))}
    for top, findings in ((79.3, [("late_oom_with_length", 0.55)]), (76.0, [])):
        peak = 50 + (top - 50) * climb
        found = diagnose(run_of({**lengths, ALLOCATED: peak, RESERVED: np.minimum(peak + 1, 79.6)})).findings
        assert [(f.rule, f.confidence) for f in found] == findings


@pytest.mark.parametrize(
    ("size", "top", "taken", "verdict"),
    [
        (None, 71.0, 76.9, "late_oom_with_length"),
        (None, 71.0, 74.0, "well"),
        (None, 66.0, 76.9, "well"),
        (80.0, 71.0, 76.9, "well"),
    ],
    ids=["taken", "room to take", "room in what is taken", "a device that is told to be larger"],
)
def test_a_device_of_which_the_driver_keeps_its_part_is_full_below_its_nominal_size(
    size: float | None, top: float, taken: float, verdict: str
) -> None:
    """An 80 GB device has 79 GiB of which a process gets 78: with 76.9 taken, no longer batch finds any more."""
    climb = _grown(0, 1, (30, 119))
    lengths = {
        f"response_length/{k}": noisy(v * (1 + 2 * climb), 8) for k, v in (("mean", 800.0), ("max", 3e3))
    }
    held = {ALLOCATED: 40 + (top - 40) * climb, RESERVED: 45 + (taken - 45) * climb}
    told = {} if size is None else {"perf/device_memory_gb": np.full(N, size)}
    assert diagnose(run_of(lengths | held | told)).verdict == verdict
