"""A gap in a log that has no versions of samples: what it tells by its shape, and what the finding leaves open."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, Array, noisy, run_of
from rollbook.diagnose.tree import diagnose

T = np.arange(120, dtype=np.float64)
SINCE = np.clip(T - 40, 0, None)
AGES = "training/off_policy/trajectory_staleness/mean"


def _apart(times: Array) -> dict[str, Array]:
    return {
        DIFF: noisy(0.006 * times, 2),
        KL: noisy(0.001 * times**2, 3, 0.08),
        PEARSON: 1 - 0.002 * times**2,
    }


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_gap_that_grows_on_was_not_published_and_the_check_names_what_looks_alike(power: float) -> None:
    finding = diagnose(run_of(_apart(1 + 0.25 * SINCE**power))).findings[0]
    assert finding.rule == "missed_weight_sync"
    assert "no versions of samples" in finding.next_check
    aged = {AGES: np.full(120, 0.5) + noisy(0.1, 5)}
    finding = diagnose(run_of(_apart(1 + 0.25 * SINCE**power) | aged)).findings[0]
    assert "no versions of samples" not in finding.next_check


@pytest.mark.parametrize("over", [12.0, 25.0])
def test_a_gap_that_ramps_up_and_levels_off_is_that_of_samples_up_to_a_bound(over: float) -> None:
    """To twice what it was; where ages are logged and did not move, it is not theirs."""
    levelled = _apart(1 + np.clip(SINCE / over, 0, 1))
    finding = diagnose(run_of(levelled)).findings[0]
    assert (finding.rule, finding.confidence) == ("stale_samples", 0.7)
    assert "no longer published" in finding.next_check
    assert 36 <= finding.step <= 48
    fresh = {AGES: noisy(0.5, 5)}
    assert diagnose(run_of(levelled | fresh)).verdict != "stale_samples"


def test_a_gap_that_stops_growing_as_the_learning_rate_falls_tells_nothing_of_ages() -> None:
    rate = {"actor/lr": 1e-6 * np.where(T < 70, 1.0, 0.05)}
    assert diagnose(run_of(_apart(1 + np.clip(SINCE / 25, 0, 1)) | rate)).verdict == "missed_weight_sync"


def test_a_jump_that_stays_is_numerics_and_the_check_names_older_samples() -> None:
    finding = diagnose(run_of(_apart(np.where(T >= 40, 3.0, 1.0)))).findings[0]
    assert finding.rule == "engine_mismatch"
    assert "some versions older" in finding.next_check


SHORT = np.arange(98, dtype=np.float64)


def _only_kl(times: Array) -> str:
    without = {DIFF: np.full(98, np.nan), PEARSON: np.full(98, np.nan)}
    return diagnose(run_of({KL: noisy(0.0025 * times**2, 3, 0.16, n=98)} | without, n=98)).verdict


@pytest.mark.parametrize("rate", [0.1, 0.3])
@pytest.mark.parametrize("left", [3, 4, 8])
def test_engines_that_are_restarted_just_before_the_log_ends_had_old_weights_for_half_of_it(
    left: int, rate: float
) -> None:
    """No level of before lasts, and no level of after."""
    away = np.hypot(1.0, rate * np.clip(SHORT - 39, 0, None))
    assert _only_kl(np.where(98 - left > SHORT, away, 1.0)) == "missed_weight_sync"


@pytest.mark.parametrize("size", [0.05, 0.3])
def test_a_gap_that_wanders_and_is_back_at_the_end_is_well(size: float) -> None:
    assert _only_kl(1 + size * np.sin(np.clip((SHORT - 39) / 55, 0, 1) * np.pi)) == "well"
