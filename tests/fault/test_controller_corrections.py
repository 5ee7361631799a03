"""Each option of a correction reaches the weights: change it, and the same samples train other parameters."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor

from tiny_run import RunResult, TinyRun

BASE = {
    "rollout.mismatch": "int4",
    "rollout.group_size": 4,
    "rollout.max_response_tokens": 12,
    "rollout.batch_invariant": True,
    "trainer.num_mini_batches": 2,
}
"""The behavior policy is the rounded one: weights above and below 1. One step samples the same everywhere."""
LEVEL, MODE, LOWER, UPPER = (f"algorithm.correction.{n}" for n in ("level", "mode", "lower", "upper"))
STATISTIC, ESTIMATOR, UPPER_NATS, LOWER_NATS = (
    f"algorithm.correction.reject.{n}" for n in ("statistic", "estimator", "upper_nats", "lower_nats")
)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "token": {LEVEL: "token"},
    "sequence": {LEVEL: "sequence"},
    "geometric": {LEVEL: "geometric"},
    "upper": {LEVEL: "token", UPPER: 1.01},
    "lower": {LEVEL: "token", LOWER: 0.99},
    "mask": {LEVEL: "token", MODE: "mask", UPPER: 1.01},
    "mask below": {LEVEL: "token", MODE: "mask", LOWER: 0.99},
    "mask sequences": {LEVEL: "sequence", MODE: "mask", UPPER: 1.01},
    "reject k1": {STATISTIC: "token", ESTIMATOR: "k1", UPPER_NATS: 0.02},
    "reject k1 below": {STATISTIC: "token", ESTIMATOR: "k1", LOWER_NATS: -0.02},
    "reject k2": {STATISTIC: "token", ESTIMATOR: "k2", UPPER_NATS: 1e-4},
    "reject k3": {STATISTIC: "token", ESTIMATOR: "k3", UPPER_NATS: 1e-3},
    "reject sums": {STATISTIC: "sequence_sum", ESTIMATOR: "k1", UPPER_NATS: 0.1},
    "reject means": {STATISTIC: "sequence_mean", ESTIMATOR: "k1", UPPER_NATS: 0.001},
    "reject maxima": {STATISTIC: "sequence_max", ESTIMATOR: "k1", UPPER_NATS: 0.3},
    "bypass": {"algorithm.proximal": "behavior"},
    "reinforce": {"algorithm.loss": "reinforce"},
    "bypass reinforce": {"algorithm.loss": "reinforce", "algorithm.proximal": "behavior"},
    "bypass weights": {"algorithm.loss": "reinforce", "algorithm.proximal": "behavior", LEVEL: "token"},
}
SAME = {("reinforce", "bypass reinforce")}
"""Reinforce has no ratio, so no anchor either: only weights tell the two apart."""


def test_every_option_of_a_correction_trains_other_parameters(tiny_run: TinyRun) -> None:
    runs = {name: tiny_run(name=name, num_steps=1, **BASE, **more) for name, more in OPTIONS.items()}
    sampled = {name: [row["token_ids"] for row in run.trajectories(0)] for name, run in runs.items()}
    assert all(tokens == sampled["none"] for tokens in sampled.values())
    held = {name: run.parameters for name, run in runs.items()}
    alike = {
        (one, other) for one, other in itertools.combinations(OPTIONS, 2) if are_equal(held[one], held[other])
    }
    assert alike == SAME
    for name, run in runs.items():
        assert_the_mask_shows(name, run)


def test_a_correction_that_rejects_everything_is_said_once_with_what_to_do(tiny_run: TinyRun) -> None:
    """Every weight of int4 is off by more than 1e-9: three steps without an update, and the run says so by itself."""
    run = tiny_run(num_steps=3, **BASE, **{STATISTIC: "sequence_max", UPPER_NATS: 1e-9})
    (finding,) = [f for f in run.events_of("finding") if f["rule"] == "all_rejected"]
    assert "algorithm.correction left out every token of step 0" in finding["summary"]
    assert "widen its bounds" in finding["remedy"]
    assert [m["batch/num_loss_tokens"] for m in run.metrics] == [0, 0, 0]
    assert [m["rollout_corr/rollout_rs_masked_fraction"] for m in run.metrics] == [1, 1, 1]


def assert_the_mask_shows(name: str, run: RunResult) -> None:
    """What left the loss left its denominator, and the run says how much that was."""
    metrics = run.metrics[0]
    masked = metrics.get("rollout_corr/rollout_rs_masked_fraction", 0.0)
    num_actions = sum(sum(row["action_mask"]) for row in run.trajectories(0))
    assert metrics["batch/num_loss_tokens"] == round(num_actions * (1 - masked))
    assert (masked > 0) is name.startswith(("mask", "reject")), name
    assert masked < 1, name


def are_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(tensor.equal(other[name]) for name, tensor in one.items())
