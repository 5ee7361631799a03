"""A run over broadcasts with everything a default config does: it calibrates, which sends one version several times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_run import run_tiny


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_run_with_a_plan_calibrates_and_publishes_by_broadcast(num_replicas: int, tmp_path: Path) -> None:
    run = run_tiny(
        tmp_path,
        num_steps=1,
        **{
            "sync.transport": "broadcast",
            "sync.receive_deadline_s": 30.0,
            "rollout.num_replicas": num_replicas,
            "plan.is_on": True,
        },
    )
    assert [event["committed"] for event in run.events_of("publication")] == [list(range(num_replicas))] * 2
    assert not run.events_of("quarantined") and not run.events_of("publication_failed")
