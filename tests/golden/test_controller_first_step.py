"""What the first step reports of its engines is its own: not what the start, the probe and the preflight did before."""

from __future__ import annotations

from pathlib import Path

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
