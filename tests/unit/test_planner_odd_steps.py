"""Steps that no mean should hold: a clock that was set, a stall, seconds that cannot be. All of them are told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollbook.cli.main import main
from rollbook.planner.expected import Expectation, Expected
from rollbook.planner.measured import Measured, means_of
from rollbook.planner.reconcile import reconcile

Log = dict[str, NDArray[np.float64]]
STAGES = {"gen": 60.0, "update_actor": 30.0, "update_weights": 2.0}
"""And 3 s between them: steps of about 95 s."""


def log(count: int = 100, seed: int = 0) -> Log:
    generator = np.random.default_rng(seed)
    stages = {
        f"timing_s/{name}": value * np.exp(0.05 * generator.standard_normal(count))
        for name, value in STAGES.items()
    }
    return {**stages, "timing_s/step": np.asarray(sum(stages.values())) + 3.0}


def measured(values: Log) -> Measured:
    return means_of(np.arange(len(values["timing_s/step"])), values, first=None, last=None)


def without(place: int, values: Log) -> Measured:
    kept = np.delete(np.arange(len(values["timing_s/step"])), place)
    return means_of(kept, {name: series[kept] for name, series in values.items()}, first=2, last=None)


def changed(place: int, **seconds: float) -> Log:
    """The log, in which one step has these seconds more (`add_gen`), or instead."""
    values = log()
    for name, value in seconds.items():
        series = values[f"timing_s/{name.removeprefix('add_')}"]
        series[place] = series[place] + value if name.startswith("add_") else value
    return values


ODD = {
    "a clock set between the stages": ({"step": 1e9}, "11,574 days where 95.", "most of it between the stages"),
    "a clock set inside a stage": ({"add_gen": 1e9, "add_step": 1e9}, "11,574 days", "most of it in rollout"),
    "a stall": ({"add_gen": 1700.0, "add_step": 1700.0}, "1,7", "in rollout. Unless a clock was set it is a stall"),
    "a stage's stall": ({"add_update_weights": 50.0, "add_step": 50.0}, "where 2.0 s is usual (26 x)", "in sync"),
    "negative seconds": ({"gen": -3.0}, "no step can have such seconds", "-3 s of rollout"),
    "endless seconds": ({"update_actor": np.inf}, "no step can have such seconds", "inf s of train"),
    "no seconds": ({"gen": np.nan}, "no step can have such seconds", "no seconds of rollout"),
    "more than the step": ({"gen": 500.0}, "no step can have such seconds", "532 s of stages in a step of 9"),
    "a tenth": ({"gen": 6.0, "update_actor": 3.0, "update_weights": 0.2, "step": 9.5}, "9.5 s where", "(0.10 x)"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_one_odd_step_of_many_is_left_out_of_every_mean_and_told(name: str) -> None:
    seconds, what, where = ODD[name]
    values = changed(50, **seconds)
    found = measured(values)
    assert found.means == without(50, values).means
    assert (found.left_out, found.num_steps) == ((50,), 97)  # of 98 after the warm-up
    (note,) = found.notes
    assert "left out of all figures" in note and "step 50, " in note
    assert what in note and where in note
    assert ("stall" in note) == ("is usual" in note and name != "a tenth")


def test_a_stall_is_told_with_its_share_of_the_time() -> None:
    values = changed(50, add_gen=1700.0, add_step=1700.0)
    share = values["timing_s/step"][50] / values["timing_s/step"][2:].sum()
    (note,) = measured(values).notes
    assert (
        f"it is a stall, {100 * share:.1f} % of the time looked at: --first 50 --last 50 shows it alone"
        in note
    )
    alone = means_of(np.arange(100), values, first=50, last=50)
    assert alone.means["timing_s/gen"] == values["timing_s/gen"][50] and (alone.left_out, alone.notes) == (
        (),
        (),
    )


def test_seconds_that_are_no_number_at_all_in_a_step_leave_no_trace_in_it() -> None:
    """Of the step itself: no clock counts backwards. A line without a step is none of the log's steps."""
    values = log()
    values["timing_s/step"][[20, 50]] = -5.0, np.nan
    found = measured(values)
    assert found.num_steps == 96 and found.left_out == (20,)
    (note,) = found.notes
    assert note.endswith("which are left out: 20")


COME_BACK: dict[str, Callable[[Log], object]] = {
    "every tenth step": lambda v: np.add.at(v["timing_s/step"], np.arange(9, 400, 10), 400.0),
    "every fiftieth of a long log": lambda v: np.add.at(v["timing_s/step"], np.arange(49, 400, 50), 400.0),
    "one in six, by chance": lambda v: np.add.at(
        v["timing_s/step"], np.random.default_rng(1).choice(400, 66, replace=False), 400.0
    ),
}


@pytest.mark.parametrize("name", COME_BACK)
def test_what_comes_back_belongs_to_the_mean(name: str) -> None:
    values = log(400)
    COME_BACK[name](values)
    assert measured(values).left_out == ()


def test_checkpoints_are_compared_with_checkpoints() -> None:
    values, saved_s = log(), np.full(100, np.nan)
    saved_s[[49, 99]] = 500.0
    values["timing_s/step"] += np.nan_to_num(saved_s)
    assert measured(values | {"timing_s/save_checkpoint": saved_s}).left_out == ()
    saved_s = np.full(100, np.nan)
    saved_s[19::20] = 50.0
    saved_s[59] = 2500.0
    values = log()
    values["timing_s/step"] += np.nan_to_num(saved_s)
    found = measured(values | {"timing_s/save_checkpoint": saved_s})
    assert found.left_out == (59,) and "2,500 s where 50.0 s is usual (50 x) in checkpoint" in found.notes[0]


def test_stages_that_overlap_in_every_step_are_told_and_share_the_step() -> None:
    """130 s of stages in steps of 100 s: the waterfall adds up to the step all the same."""
    values = {
        "timing_s/step": np.full(10, 100.0),
        "timing_s/gen": np.full(10, 100.0),
        "timing_s/update_actor": np.full(10, 30.0),
    }
    found = measured(values)
    assert found.left_out == ()
    assert "the stages together take 130 s of a step of 100 s" in found.notes[0]
    stages = {"rollout": Expected(seconds=60.0, low=50.0, high=70.0, flops=2e12)}
    for peak in (0.0, 1e12):
        plan = Expectation(source="a plan", stages=stages, step_s=60.0, peak_flops_per_s=peak)
        result = reconcile(plan, found.means, source="a log")
        losses = {loss.loss: loss.frac for loss in result.waterfall}
        assert sum(losses.values()) + (result.mfu_frac or 0.0) == pytest.approx(1.0)
        assert losses["train"] == pytest.approx(30 / 130)


def test_seconds_below_zero_in_many_steps_count_as_none() -> None:
    values = log(10)
    values["timing_s/gen"][4:] *= -1
    found = measured(values)
    assert found.means["timing_s/gen"] == pytest.approx(values["timing_s/gen"][2:4].sum() / 8)
    assert "count as none, of steps: rollout in 6 of 8" in found.notes[0]


SCATTER: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "scatters": lambda g, n: 100.0 * np.exp(0.2 * g.standard_normal(n)),
    "scatters widely": lambda g, n: 100.0 * np.exp(0.5 * g.standard_normal(n)),
    "even": lambda g, n: g.uniform(50, 150, n),
    "long tail": lambda g, n: 20 + g.exponential(100, n),
    "grows": lambda g, n: np.linspace(20, 400, n),
}


@pytest.mark.parametrize("name", SCATTER)
@pytest.mark.parametrize("count", [3, 8, 15, 200])
def test_fewer_than_one_log_in_fifty_of_one_wide_kind_has_an_odd_step(name: str, count: int) -> None:
    generator = np.random.default_rng(7)
    logs = ({"timing_s/step": SCATTER[name](generator, count)} for _ in range(300))
    assert sum(bool(means_of(np.arange(count), v, first=0, last=None).left_out) for v in logs) < 300 / 50


def test_reconcile_judges_without_the_step_whose_clock_was_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = changed(50, step=1e9)
    lines = [
        json.dumps({"step": i, "data": {"training/global_step": i, **{n: s[i] for n, s in values.items()}}})
        for i in range(100)
    ]
    path, workload = tmp_path / "verl.jsonl", tmp_path / "w.toml"
    path.write_text("\n".join(lines) + "\n")
    workload.write_text(
        'model = "Qwen3-8B"\ngpu = "H100"\nnum_gpus = 16\nprompts = 512\nresponse_tokens = 2048\n'
    )
    for asked in (["--json"], []):
        with pytest.raises(SystemExit):
            main(["reconcile", str(path), "--workload", str(workload), *asked])
        out = " ".join(capsys.readouterr().out.split())
        assert "step 50, 11,574 days where 95." in out
        if asked:
            told = json.loads(out)
            assert told["steps"] == {"first": 2, "last": 99, "count": 97, "left_out": [50]}
            assert told["step"]["measured_s"] == pytest.approx(95.0, rel=0.01)
        else:
            assert "A step takes 95." in out and "97 steps, 2 to 99 (1 left out)" in out
