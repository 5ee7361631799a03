"""A stage is judged by the work it got, not by the work the plan foresaw."""

from __future__ import annotations

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
