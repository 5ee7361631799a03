"""What the first step reports is its own: not what the start, the warm-up, the probe and the preflight did before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_run import run_tiny


def test_the_first_step_counts_from_its_own_beginning(tmp_path: Path) -> None:
    """Each step's publication is probed, so that the engines decode the same few tokens beyond its responses; before
    the first step they were asked for more."""
    beyond = [
        data["generated/num_tokens"]
        - data["generated/num_trajectories"] * data["generated/response_length/mean"]
        for data in run_tiny(tmp_path, num_steps=3).metrics
    ]
    assert beyond == [beyond[1]] * 3


def test_the_reference_and_the_schedule_begin_after_the_warm_up(tmp_path: Path) -> None:
    """The first step is on policy: its divergence from the policy that the warm-up left is 0, and its learning rate is
    the first of five."""
    run = run_tiny(
        tmp_path,
        num_steps=1,
        **{
            "warmup.num_updates": 3,
            "warmup.batch_sequences": 8,
            "algorithm.kl": {"placement": "loss", "coef": 0.1},
            "trainer.warmup_updates": 5,
        },
    )
    first = run.metrics[0]
    assert abs(first["actor/kl_loss"]) < 1e-6
    assert first["actor/lr"] == pytest.approx(1e-2 / 5)
