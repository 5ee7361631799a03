"""An engine that samples noise in some answers, or from the second step on, is told from one that rounds otherwise."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, Array, noisy, run_of
from rollbook.diagnose.signs.versions import STALENESS
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)
CUT = "response_length/clip_ratio"


def _since(idx: int, before: float, after: float, seed: int, size: float = 0.05) -> Array:
    return noisy(np.where(idx <= T, after, before), seed, size)


@pytest.mark.parametrize("good", [1, 2, 4])
def test_sides_that_come_apart_after_the_first_hand_over_are_no_numerics(good: int) -> None:
    """The reward is hardly lower than in the first step, and grows on with the answers that are none."""
    apart = {
        DIFF: _since(good, 0.002, 0.48, 2),
        KL: _since(good, 5e-5, 13.0, 3),
        PEARSON: np.where(good <= T, 0.05, 0.9998),
    }
    found = diagnose(run_of(apart)).findings[0]
    assert (found.rule, found.step) == ("silent_error_after_wake", good + 1)


def test_some_answers_that_run_to_their_limit_from_the_second_step_on_are_noise() -> None:
    in_part = {
        DIFF: _since(1, 0.002, 0.012, 2),
        KL: _since(1, 1e-4, 4e-3, 3),
        CUT: _since(1, 0.002, 0.065, 4),
    }
    assert diagnose(run_of(in_part)).verdict == "silent_error_after_wake"


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [(0.0, 0.04, "silent_error_after_wake"), (0.02, 0.03, "engine_mismatch"), (0.0, 0.0, "engine_mismatch")],
)
def test_a_far_gap_with_answers_cut_off_at_once_is_noise_in_some(
    before: float, after: float, verdict: str
) -> None:
    moved = {
        DIFF: _since(60, 0.006, 0.04, 2),
        KL: _since(60, 1e-3, 4e-2, 3, 0.1),
        CUT: _since(60, before, after, 4, 0.25),
    }
    found = diagnose(run_of(moved)).findings[0]
    assert (found.rule, found.step) == (verdict, 61)


@pytest.mark.parametrize(
    "moved",
    [
        {DIFF: _since(1, 0.004, 0.006, 2), CUT: _since(1, 0.002, 0.065, 4)},
        {DIFF: _since(1, 0.0015, 0.006, 2)},
        {CUT: _since(60, 0.0, 0.04, 4, 0.25)},
        {
            DIFF: _since(1, 0.002, 0.009, 2),
            CUT: _since(1, 0.002, 0.065, 4),
            f"{STALENESS}/mean": np.minimum(T, 1.0),
        },
    ],
    ids=[
        "answers that grow",
        "a first step that agrees better",
        "cut off, at the same gap",
        "samples come to an age",
    ],
)
def test_longer_answers_and_first_steps_are_healthy(moved: dict[str, Array]) -> None:
    assert diagnose(run_of(moved)).findings == ()
