"""Logs whose steps are of two kinds are told with the medians of both; wide, drifting and quiet ones are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollbook.cli.main import main
from rollbook.planner.measured import means_of
from rollbook.planner.two_kinds import two_kinds

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]


def notes(step_s: NDArray[np.float64], **others: NDArray[np.float64]) -> tuple[str, ...]:
    values = {"timing_s/step": step_s} | {f"timing_s/{name}": series for name, series in others.items()}
    return two_kinds(np.arange(len(step_s)), values)


def scattered(generator: np.random.Generator, count: int, frac: float = 0.03) -> NDArray[np.float64]:
    return 100.0 * np.exp(frac * generator.standard_normal(count))


@pytest.mark.parametrize("count", [15, 50, 400])
def test_every_fifth_step_with_an_evaluation_inside_is_told_with_both_medians(count: int) -> None:
    step_s = scattered(np.random.default_rng(3), count)
    step_s[4::5] *= 1.6
    short, long = np.delete(step_s, np.s_[4::5]), step_s[4::5]
    (note,) = notes(step_s)
    assert f"{len(short)} steps of about {np.median(short):.1f} s"[:-4] in note
    assert f", {len(long)} of about {np.median(long):,.0f} s (every 5 steps, 4 to {count - 1})" in note


def test_lengths_of_two_sorts_are_told_wherever_they_lie() -> None:
    generator = np.random.default_rng(5)
    step_s = scattered(generator, 60) * np.where(generator.random(60) < 0.5, 1.0, 2.0)
    (note,) = notes(step_s)
    assert "of two kinds" in note and "every" not in note
    (note,) = notes(np.r_[np.full(20, 50.0), np.full(10, 80.0)])
    assert note.endswith("20 steps of about 50.0 s, 10 of about 80.0 s (20 to 29)")


ONE_KIND: dict[str, Draw] = {
    "scatters": lambda g, n: scattered(g, n, 0.2),
    "scatters widely": lambda g, n: scattered(g, n, 0.5),
    "even": lambda g, n: g.uniform(50, 150, n),
    "long tail": lambda g, n: 20 + g.exponential(100, n),
    "grows": lambda g, n: np.linspace(50, 150, n) * np.exp(0.05 * g.standard_normal(n)),
}


@pytest.mark.parametrize("name", ONE_KIND)
@pytest.mark.parametrize("count", [8, 15, 30, 200])
def test_fewer_than_one_log_in_twenty_of_one_wide_kind_looks_like_two(name: str, count: int) -> None:
    generator = np.random.default_rng(7)
    told = sum(bool(notes(ONE_KIND[name](generator, count))) for _ in range(300))
    assert told < 300 / 20


def test_two_outliers_and_equal_steps_are_no_kind() -> None:
    assert notes(np.r_[np.full(30, 100.0), 500.0, 400.0]) == ()
    assert notes(np.full(30, 100.0)) == notes(np.array([1.0, 2.0])) == ()


def test_a_checkpoint_that_is_timed_apart_makes_no_second_kind() -> None:
    step_s = scattered(np.random.default_rng(1), 30)
    saved_s = np.full(30, np.nan)
    saved_s[::5] = 80.0
    step_s = step_s + np.nan_to_num(saved_s)
    assert notes(step_s) and notes(step_s, save_checkpoint=saved_s) == ()


def test_steps_that_are_left_out_make_no_kind() -> None:
    step_s = np.r_[np.full(5, 300.0), np.full(20, 100.0)]
    assert means_of(np.arange(25), {"timing_s/step": step_s}, first=5, last=24).notes == ()
    assert means_of(np.arange(25), {"timing_s/step": step_s}, first=0, last=24).notes != ()


def test_reconcile_says_so_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    lines = [
        json.dumps(
            {"step": step, "data": {"training/global_step": step, "timing_s/step": 300.0 + 90.0 * (step % 5 == 0),
             "timing_s/gen": 180.0, "timing_s/update_actor": 80.0, "response_length/mean": 4000.0}}
        )
        for step in range(1, 31)
    ]  # fmt: skip
    log, workload = tmp_path / "verl.jsonl", tmp_path / "w.toml"
    log.write_text("\n".join(lines) + "\n")
    workload.write_text('model = "Qwen3-8B"\ngpu = "H100"\nnum_gpus = 16\nprompts = 512\ngroup_size = 16\n')
    with pytest.raises(SystemExit):
        main(["reconcile", str(log), "--workload", str(workload), "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["notes"][0].endswith("22 steps of about 300 s, 6 of about 390 s (every 5 steps, 5 to 30)")
