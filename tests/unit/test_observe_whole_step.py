"""The peak of a step is shared out whole: what was useful, and what each stage lost of it."""

from __future__ import annotations

import pytest

from rollbook.observe.values import Values
from rollbook.observe.whole_step import Work, whole_step
from tiny_run import TinyRun


def _shares(values: Values) -> dict[str, float]:
    return {name: value.result() for name, value in values.items()}


def test_a_stage_loses_the_seconds_that_its_flops_do_not_need() -> None:
    """Peak 100 FLOP/s over 10 s: 300 useful of 1000. Rollout needs 2 s of 6, training 1 of 3, and 1 s has no stage."""
    work = Work(flops={"rollout": 200.0, "train": 100.0}, peak_flops_per_s=100.0)
    shares = _shares(whole_step(work, {"rollout": 6.0, "train": 3.0}, 10.0))
    wanted = {"perf/mfu/step": 0.3, "waterfall/rollout": 0.4, "waterfall/train": 0.2, "waterfall/other": 0.1}
    assert shares == pytest.approx(wanted)


def test_generation_beside_the_other_stages_computes_in_their_seconds() -> None:
    """Generation needs 3 s and was waited for 1 s: the 2 s beyond are taken off the 8 s that training lost."""
    work = Work(flops={"rollout": 300.0, "train": 100.0}, peak_flops_per_s=100.0)
    shares = _shares(whole_step(work, {"rollout": 1.0, "train": 9.0}, 10.0))
    assert shares == pytest.approx({"perf/mfu/step": 0.4, "waterfall/train": 0.6})


def test_nothing_is_said_without_a_peak_or_without_flops() -> None:
    assert whole_step(Work(flops={"train": 1.0}, peak_flops_per_s=0.0), {"train": 1.0}, 1.0) == {}
    assert whole_step(Work(flops={}, peak_flops_per_s=1.0), {"train": 1.0}, 1.0) == {}


def test_every_step_of_a_planned_run_on_a_processor_says_its_whole_step_mfu(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=2, **{"plan.is_on": True, "run.schedule": "separate_async"})
    for data in run.metrics:
        shares = {n: v for n, v in data.items() if n == "perf/mfu/step" or n.startswith("waterfall/")}
        assert 0 < shares["perf/mfu/step"] < 1
        assert "waterfall/train" in shares
        assert sum(shares.values()) == pytest.approx(1.0, abs=0.02)
