"""The job that drills run on in tests and in the bench: two sources, groups of four, a few seconds for forty steps."""

from __future__ import annotations

from pathlib import Path

from tiny_run import TINY, write_tiny

NUM_STEPS = 40
AT_STEP = 13


def write_job(folder: Path, *, seed: int = 0) -> Path:
    """A config file whose runs go into `folder`."""
    new = TINY["model"]["new"]
    return write_tiny(
        folder,
        name="job",
        num_steps=NUM_STEPS,
        config={
            "run": {"groups_per_step": 6, "seed": seed},
            "model": {"new": {**new, "max_position": 64}, "seed": seed},
            "data": {
                "sources": [
                    {"task": "addition", "num_prompts": 400, "name": "sums"},
                    {"task": "addition", "num_prompts": 400, "name": "more", "seed": 1},
                ]
            },
            "rollout": {
                **TINY["rollout"],
                "group_size": 4,
                "max_response_tokens": 24,
                "num_slots": 64,
                "kv_pool_tokens": 4096,
            },
            "trainer": {"lr": 4e-4, "num_threads": 1},
        },
    )
