"""A log whose last step leaps to the size of the device, and then nothing: the hand-over did not fit, unless a batch,
the end of the run or another error is why."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import ALLOCATED, RESERVED, Array, noisy, run_of
from rollbook.diagnose.series import Event
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
NONE = np.full(N, np.nan)
SWITCH = "memory/switch/allocated_bytes"


def _leap(to_gib: float, *, steps: int = 1, of_gib: float = 48.0) -> Array:
    return np.where(N - steps <= T, to_gib, of_gib + noisy(0.05, 31))


def _verdict(used: Array, name: str = ALLOCATED, *, end: str = "", **more: Array) -> str:
    scale = 2**30 if name.endswith("bytes") else 1.0
    events = (Event(kind="run_failed", step=N, text=end),) if end else ()
    logged = {ALLOCATED: NONE, RESERVED: NONE, name: scale * used} | {
        k.replace("__", "/"): v for k, v in more.items()
    }
    return diagnose(run_of(logged, events=events)).verdict


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("name", [ALLOCATED, SWITCH])
def test_a_last_step_that_leaps_to_the_brim_ran_out_of_memory(name: str, steps: int) -> None:
    assert _verdict(_leap(77.3, steps=steps), name) == "oom_in_sync"


@pytest.mark.parametrize(("of_gib", "verdict"), [(21.0, "oom_in_sync"), (36.0, "well")])
def test_a_size_that_is_guessed_needs_a_far_leap(of_gib: float, verdict: str) -> None:
    assert _verdict(_leap(46.6, of_gib=of_gib), SWITCH) == verdict


@pytest.mark.parametrize(
    ("used", "more"),
    [
        (_leap(68.0), {}),
        (_leap(77.3, of_gib=75.0), {}),
        (np.where(T == 70, 77.3, 48.0), {}),
        (_leap(77.3), {"timing_s__save_checkpoint": np.where(T == N - 1, 90.0, np.nan)}),
        (_leap(77.3), {"timing_s__testing": np.where(T >= N - 2, 90.0, np.nan)}),
    ],
    ids=["room", "always full", "long ago", "saves at last", "validates at last"],
)
def test_memory_that_fits_or_is_taken_when_the_run_is_done_is_well(
    used: Array, more: dict[str, Array]
) -> None:
    assert _verdict(used, **more) == "well"


def test_a_run_that_saves_all_along_has_no_such_excuse() -> None:
    saves = {"timing_s__save_checkpoint": np.where(T % 20 == 19, 90.0, np.nan)}
    assert _verdict(_leap(77.3), **saves) == "oom_in_sync"


def test_the_longest_batch_and_another_error_are_their_own_causes() -> None:
    longest = {
        f"response_length__{how}": noisy(s, 8) * np.where(T == N - 1, 2.4, 1.0)
        for how, s in (("mean", 8e2), ("max", 3e3))
    }
    assert _verdict(_leap(77.3), **longest) != "oom_in_sync"
    assert _verdict(_leap(77.3), end="KeyError: 'answer'") == "run_stopped"
