"""Pipelines that fill up, curricula that become harder, and rates of trajectories that fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.diagnose_runs import DIFF, KL, Array, noisy, run_of

from rollbook.diagnose.env_words import named_by_words
from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 120
T: Array = np.arange(N, dtype=np.float64)
AGE = "training/off_policy/trajectory_staleness"


def _aged(age: Array) -> Diagnosis:
    """The gap goes with the age of the samples."""
    apart = 1 + 0.08 * age
    changed = {
        f"{AGE}/mean": age + np.random.default_rng(7).normal(0, 0.08, N) * (T > 0),
        f"{AGE}/max": np.round(2.1 * age),
        DIFF: noisy(0.006 * apart, 2, 0.03),
        KL: noisy(0.001 * apart**2, 3, 0.06),
    }
    return diagnose(run_of(changed))


@pytest.mark.parametrize("steps", [1.5, 3.0, 6.0])
def test_samples_that_age_up_to_a_setting_in_the_first_steps_are_well(steps: float) -> None:
    assert _aged(2.9 * (1 - np.exp(-T / steps))).verdict == "well"


@pytest.mark.parametrize("since", [40, 70])
def test_samples_that_age_beyond_what_they_had_come_to_are_stale(since: int) -> None:
    fills = 2.9 * (1 - np.exp(-T / 3.0))
    found = _aged(fills + 5.0 * np.clip((T - since) / 30, 0, 1))
    assert found.verdict == "stale_samples"
    assert abs(found.findings[0].step - since) <= 10


def test_a_ramp_of_ages_is_dated_where_it_left_its_level() -> None:
    """Not half-way up, though most steps before that were fresh; one that leaps is dated by its leap."""
    ramp = _aged(0.5 + 6.5 * np.clip((T - 60) / 30, 0, 1))
    leap = _aged(0.5 + 6.5 * (T >= 60))
    assert [abs(found.findings[0].step - 61) <= 6 for found in (ramp, leap)] == [True, True]


def test_samples_that_age_on_over_the_whole_log_never_fill_anything() -> None:
    assert _aged(9.0 * np.sqrt(T / N)).verdict == "stale_samples"


def _harder(levels: Array | None) -> Diagnosis:
    """Reward and answers move at once at step 60, to a reward that the run had before, and go on from there."""
    learned = np.where(T < 60, T, T - 60) / 60
    noise = np.random.default_rng(3).normal(0, 0.008, N)
    changed = {
        "critic/score/mean": 0.15 + 0.12 * learned + noise,
        "actor/entropy": noisy(0.33 - 0.1 * learned, 5, 0.01),
        "response_length/mean": noisy(np.where(T < 60, 800.0, 960.0), 8, 0.01),
        "val-core/hard/reward/mean@1": np.where(
            T % 3 == 0, np.round(np.clip(0.3 * (learned - 0.1), 0, 1), 3) + 0.05 * (T < 60), np.nan
        ),
        "val-core/easy/reward/mean@1": np.where(T % 3 == 0, 0.4 + 0.1 * learned, np.nan),
    }
    if levels is not None:
        changed["data/curriculum_level"] = levels
    return diagnose(run_of(changed))


def test_a_curriculum_that_becomes_harder_is_no_restart_and_no_dead_source() -> None:
    assert _harder(np.where(T < 60, 1.0, 2.0)).verdict == "well"


@pytest.mark.parametrize(
    "levels", [None, np.ones(N), 1.0 + (T >= 30), T], ids=["none", "same", "else", "all"]
)
def test_what_no_new_level_marks_is_none_of_the_curriculums(levels: Array | None) -> None:
    assert _harder(levels).verdict == "discontinuity_after_resume"


@pytest.mark.parametrize("name", ["rollout/error_rate", "trajectory_failure_ratio", "rollout/failed_frac"])
def test_a_share_of_trajectories_that_fail_is_read_where_hardly_one_fails_at_first(name: str) -> None:
    rare = np.where(T >= 60, 0.45, 0.001)
    assert named_by_words({name: rare}) == {"failures/frac": name}
    assert named_by_words({name: 1 - rare}) == {}  # as many as wrong answers
    assert named_by_words({"rollout/format_error_rate": rare, "rollout/error_rate/max": rare}) == {}


@pytest.mark.parametrize(("failing", "verdict"), [(0.45, "dead_sandbox_pool"), (0.0, "well")])
def test_trajectories_that_fail_at_once_are_those_of_dead_sandboxes(failing: float, verdict: str) -> None:
    lost = np.where(T < 60, 0.0, failing)
    changed = {
        "critic/score/mean": 0.5 * (1 - lost) + np.random.default_rng(1).normal(0, 0.01, N),
        "rollout/error_rate": noisy(0.001 + lost, 9, 0.05),
        "response_length/mean": noisy(800 * (1 - 0.6 * lost), 8, 0.02),
    }
    assert diagnose(run_of(changed)).verdict == verdict


def _apart(apart: Array) -> Diagnosis:
    return diagnose(run_of({DIFF: noisy(0.006 * apart, 2, 0.03), KL: noisy(0.001 * apart**2, 3, 0.06)}))


def test_a_gap_that_grows_by_the_same_share_with_every_step_is_of_the_numerics() -> None:
    """Weights that stand are left by the same distance with every step."""
    since = np.clip(T - 40, 0, None) / 80
    assert _apart(np.power(3.0, since)).verdict == "engine_mismatch"
    assert _apart(1 + 2.0 * since).verdict == "missed_weight_sync"
    assert _apart(1 + 2.0 * np.sqrt(since)).verdict == "missed_weight_sync"


def test_areals_gap_and_ages_are_read(tmp_path: Path) -> None:
    age = "ppo_actor/version_stats/sample_staleness"
    cells = f"│ ppo_actor/update/behave_kl/avg │ 4.0e-04 │ {age}_avg │ 1.5 │\n│ {age}_max │ 3.0 │ {age}_min │ 0.5 │\n"
    path = tmp_path / "run.log"
    path.write_text(
        "".join(f"Epoch 1/1 Step {i}/3 Train step {i}/3 done.\n{cells}" for i in (1, 2, 3)), encoding="utf-8"
    )
    values = {name: series[0] for name, series in load(str(path)).values.items()}
    assert values == {"rollout_corr/kl": 4e-4, f"{AGE}/mean": 1.5, f"{AGE}/max": 3.0, f"{AGE}/min": 0.5}
