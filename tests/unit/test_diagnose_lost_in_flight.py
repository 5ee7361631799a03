"""Groups that are lost on their way: counted as under way, and nobody works on them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
LOST = np.clip((T - 30) / 90, 0, 1)
WAITS = {
    "timing_s/gen": noisy(40.0 / (1.0 - 0.85 * LOST), 10),
    "timing_s/step": noisy(95 + 40.0 / (1.0 - 0.85 * LOST), 14),
}


def _found(
    running: Array, changed: dict[str, Array], *, counted: Array | None = None
) -> tuple[str, int | None]:
    values = {"buffer/running_groups": np.round(running)} | changed
    if counted is not None:
        values["buffer/submitted_minus_finished"] = np.round(counted)
    found = diagnose(run_of(values))
    return found.verdict, found.findings[0].step if found.findings else None


@pytest.mark.parametrize("counted", [np.full(N, 200.0), None])
def test_ever_fewer_that_run_while_the_trainer_waits_are_lost(counted: Array | None) -> None:
    verdict, step = _found(200 * (1 - 0.85 * LOST), WAITS, counted=counted)
    assert verdict == "buffer_never_fills"
    assert step is not None
    assert abs(step - 31) <= 8


@pytest.mark.parametrize(
    ("running", "counted"),
    [
        (np.asarray(noisy(200.0, 20)), np.full(N, 200.0)),
        (200 - 150 * LOST, 200 - 150 * LOST),  # the bound was lowered, and nobody waits
        (np.where(T < 60, 200.0, 180.0), np.full(N, 200.0)),
    ],
    ids=["as ever", "fewer admitted", "a few"],
)
def test_fewer_that_nobody_misses_are_well(running: Array, counted: Array) -> None:
    assert _found(running, {}, counted=counted)[0] == "well"


def test_those_that_are_lost_are_told_before_anybody_waits() -> None:
    assert _found(200 * (1 - 0.85 * LOST), {}, counted=np.full(N, 200.0))[0] == "buffer_never_fills"


def test_a_wait_that_climbs_from_the_first_steps_on_needs_no_break() -> None:
    climb = {m: v * np.exp(3 * (T / N) ** 2) if m == "timing_s/gen" else v for m, v in WAITS.items()}
    values = climb | {"training/off_policy/trajectory_staleness/mean": noisy(1.0, 21)}
    values["timing_s/step"] = values["timing_s/gen"] + 55
    assert diagnose(run_of(values)).verdict == "buffer_never_fills"


@pytest.mark.parametrize(
    ("missing", "left", "verdict"),
    [(5.0, 0.0, "buffer_never_fills"), (5.0, 150.0, "well"), (0.0, 0.0, "well")],
    ids=["lost", "late", "full"],
)
def test_batches_that_stay_short_with_none_under_way_lost_their_groups(
    missing: float, left: float, verdict: str
) -> None:
    """Of those that are still under way a deadline may leave some for the next step."""
    since = T >= 40
    values = {
        "buffer/groups_collected": np.where(since, 512.0 - missing, 512.0),
        "buffer/groups_required": np.full(N, 512.0),
        "buffer/in_flight_at_deadline": np.where(since, left, 200.0),
    }
    found = diagnose(run_of(values))
    assert found.verdict == verdict
    assert not found.findings or found.findings[0].step == 41
