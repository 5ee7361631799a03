"""A stage is judged by the work it got, not by the work the plan foresaw."""

from __future__ import annotations

import pytest

from rollbook.planner.reconcile import Expectation, Expected, reconcile


def test_a_filter_that_leaves_half_the_batch_is_no_gain_in_speed() -> None:
    """Planned 2 s of training; half the sequences were flat, so 1 s was expected of what was left, and took 1 s."""
    stages = {
        "rollout": Expected(seconds=4.0, low=3.0, high=5.0),
        "train": Expected(seconds=2.0, low=1.6, high=2.4),
    }
    means = {
        "timing_s/step": 5.0,
        "timing_s/gen": 4.0,
        "timing_s/update_actor": 1.0,
        "expected_s/gen": 4.0,
        "expected_s/update_actor": 1.0,
    }
    result = reconcile(Expectation(source="plan.json", stages=stages, step_s=6.0), means, source="run")
    train = next(stage for stage in result.stages if stage.stage == "train")
    assert train.planned is not None
    assert (train.planned.seconds, train.planned.low, train.planned.high) == (1.0, 0.8, 1.2)
    assert result.step.planned is not None
    assert result.step.planned.seconds == 5.0
    assert any("train 0.50 x" in note for note in result.notes)


def test_what_runs_between_the_spans_stands_against_its_own_plan() -> None:
    """A step of 10 s with 9 s in its stages: 1 s between them, of which 0.8 s were planned."""
    stages = {
        "train": Expected(seconds=9.0, low=8.0, high=10.0),
        "other": Expected(seconds=0.8, low=0.5, high=1.2),
    }
    expectation = Expectation(source="a plan", stages=stages, step_s=9.8)
    result = reconcile(expectation, {"timing_s/update_actor": 9.0, "timing_s/step": 10.0}, source="a log")
    other = next(s for s in result.stages if s.stage == "other")
    assert other.ratio == pytest.approx(1.25) and other.verdict == "as planned"
    assert not result.notes
