"""Weight versions of samples become their ages, where a log has no ages of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rollbook.diagnose.readers.table import load

MEAN = "training/off_policy/trajectory_staleness/mean"
NEWEST, OLDEST = (
    "training/off_policy/trajectory_staleness/min",
    "training/off_policy/trajectory_staleness_worst/max",
)
AGES = np.repeat([0, 1, 4], 10)
"""Of the mean sample; the newest is half as old, the oldest two steps older."""


def _log(path: Path, version: np.ndarray[tuple[int], np.dtype[np.float64]], more: str = "") -> str:
    lines = [
        f"rollout {i}: {{'rollout/raw_reward': 0.5, 'rollout/weight_version/mean': {v - age}, "
        f"'rollout/weight_version/min': {v - age - 2}, 'rollout/weight_version/max': {v - age // 2}{more}}}\n"
        for i, (v, age) in enumerate(zip(version.tolist(), AGES.tolist(), strict=True))
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return str(path)


def test_versions_behind_the_rollout_are_ages(tmp_path: Path) -> None:
    run = load(_log(tmp_path / "run.log", np.arange(30) + 1.0))
    np.testing.assert_allclose(run.values[MEAN], AGES)
    np.testing.assert_allclose(run.values[NEWEST], AGES // 2)
    np.testing.assert_allclose(run.values[OLDEST], AGES + 2)
    assert run.in_log[MEAN] == "age by rollout/weight_version/mean"


def test_a_job_that_is_taken_up_again_counts_versions_anew(tmp_path: Path) -> None:
    """Rollout 20 of the second job is trained at version 1; its samples are four steps old all the same, but for the
    first ones, of which nothing older is left to know."""
    run = load(_log(tmp_path / "run.log", np.concatenate([np.arange(10) + 1.0, np.arange(20) + 1.0])))
    np.testing.assert_allclose(run.values[MEAN][:10], 0)
    assert run.values[MEAN].max() <= 5.0


def test_publications_every_other_rollout_make_nobody_older(tmp_path: Path) -> None:
    run = load(_log(tmp_path / "run.log", np.arange(30) // 2 + 1.0))
    ages = run.values[MEAN]
    assert ages[:10].max() <= 1.0  # the rollouts between two publications
    assert abs(ages[25:].mean() - 8.0) <= 1.0  # four versions of two steps


def test_ages_that_the_log_has_itself_stand(tmp_path: Path) -> None:
    run = load(_log(tmp_path / "run.log", np.arange(30) + 1.0, ", 'rollout/sample_staleness': 0.25"))
    assert run.values[MEAN].tolist() == [0.25] * 30
    np.testing.assert_allclose(run.values[OLDEST], AGES + 2)


def test_samples_that_are_all_labelled_alike_have_no_ages(tmp_path: Path) -> None:
    lines = [
        f"rollout {i}: {{'rollout/raw_reward': 0.5, 'rollout/weight_version/max': 1}}\n" for i in range(30)
    ]
    (tmp_path / "run.log").write_text("".join(lines), encoding="utf-8")
    assert NEWEST not in load(str(tmp_path / "run.log")).values
