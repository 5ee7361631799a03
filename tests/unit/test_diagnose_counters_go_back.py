"""A run that was taken up again is told by a counter or a schedule that goes back, though its steps go on."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from diagnose_runs import noisy, run_of
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.readers.trouble import TroubleWatcher
from rollbook.diagnose.series import Event
from rollbook.diagnose.tree import diagnose

N, SINCE = 120, 70
T = np.arange(N, dtype=np.float64)
ON = T >= SINCE


def _history(tmp_path: Path, counter: NDArray[np.int64], *, shaken: float) -> list[str]:
    """A tracker's history as a table, with two columns that count steps; the optimizer is shaken for a while."""
    calms_down = np.where(ON, np.exp(-np.clip(T - SINCE, 0, None) / 15), 0.0) * shaken
    columns = {
        "Step": counter,
        "training/global_step": np.arange(1, N + 1),
        "critic/rewards/mean": 0.5 - 0.1 * calms_down + np.random.default_rng(1).normal(0, 0.02, N),
        "actor/entropy": noisy(0.35, 2, 0.02) * (1 + 0.35 * calms_down),
        "actor/grad_norm": noisy(0.16, 3, 0.1) * (1 + calms_down),
        "actor/ppo_kl": noisy(2e-4, 4, 0.2) * (1 + 8 * calms_down),
        "timing_s/step": noisy(100.0, 5),
    }
    log = tmp_path / "history.csv"
    with log.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return [f"{f.rule} {f.step}" for f in diagnose(load(str(log))).findings]


@pytest.mark.parametrize(
    ("counter", "shaken", "found"),
    [
        (np.arange(1, N + 1) - 30 * ON.astype(np.int64), 0.4, ["discontinuity_after_resume 71"]),
        (np.arange(1, N + 1) - 30 * ON.astype(np.int64), 0.0, []),
        (np.arange(N) % 10, 0.0, []),
        (np.arange(N) % SINCE, 0.4, []),
    ],
    ids=["taken up without moments", "taken up whole", "counted within an epoch", "in one of two epochs"],
)
def test_one_of_two_counters_goes_back_where_a_run_was_taken_up_again(
    counter: NDArray[np.int64], shaken: float, found: list[str], tmp_path: Path
) -> None:
    assert _history(tmp_path, counter, shaken=shaken) == found


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("Recover INFO: Found recover checkpoint of step 130, run id 1. Weights loaded.", True),
        ("Recover INFO: saved recover checkpoint of step 130.", False),
    ],
)
def test_what_is_found_to_recover_from_is_a_restart_and_what_is_saved_for_it_none(
    line: str, is_one: bool
) -> None:
    event = TroubleWatcher().watch(line, 130)
    assert (event is not None and event.kind == "resumed") is is_one


def _cosine(t: NDArray[np.float64], of: int) -> NDArray[np.float64]:
    return 1e-6 * np.minimum((t + 1) / 10, 0.05 + 0.95 * 0.5 * (1 + np.cos(np.pi * np.minimum(t / of, 1))))


@pytest.mark.parametrize("at", [60, 82, 85])
def test_a_rate_that_had_decayed_and_warms_up_again_from_half_of_it_began_anew(at: int) -> None:
    lr = np.where(at > T, _cosine(T, N), _cosine(np.clip(T - at, 0, None), N))
    found = diagnose(run_of({"actor/lr": lr})).findings
    assert [(f.rule, f.step) for f in found] == [("discontinuity_after_resume", at + 1)]
    cycles = 1e-6 * (0.55 + 0.45 * np.cos(2 * np.pi * T / 40))
    for whole in (_cosine(T, N), cycles):
        assert diagnose(run_of({"actor/lr": whole})).findings == ()


@pytest.mark.parametrize(
    ("times", "is_resumed", "found"),
    [(8.0, True, ["discontinuity_after_resume"]), (8.0, False, []), (0.2, True, [])],
    ids=["at a restart", "at a bad batch", "a little"],
)
def test_ratios_that_are_clipped_at_once_after_a_restart_are_those_of_lost_moments(
    times: float, is_resumed: bool, found: list[str]
) -> None:
    calms_down = np.where(ON, np.exp(-np.clip(T - SINCE, 0, None) / 8), 0.0)
    run = run_of({"actor/pg_clipfrac": noisy(2e-3, 7, 0.1) * (1 + times * calms_down)})
    if is_resumed:
        run.events.append(Event(kind="resumed", step=SINCE, text=f"Resuming from global_step_{SINCE}"))
    assert [f.rule for f in diagnose(run).findings] == found
