"""How the ranks of a run meet for publications."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from rollbook.cluster import meeting
from rollbook.sync.broadcast import WATCHDOG, BroadcastGroup
from tiny_run import tiny_config


def test_the_group_of_publications_is_made_to_outlive_a_replica(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By torch's own settings a collective that a dead replica never joins ends the trainer's process."""
    for name in WATCHDOG:
        monkeypatch.delenv(name, raising=False)
    seen: list[dict[str, str | None]] = []

    def create(*args: Any, **options: Any) -> None:
        seen.append({name: os.environ.get(name) for name in WATCHDOG})

    monkeypatch.setattr(BroadcastGroup, "create", create)
    meeting.join_broadcast(tiny_config(), str(tmp_path / "store"), rank=0)
    assert seen == [WATCHDOG]
    assert not any(name in os.environ for name in WATCHDOG), "the trainer's own groups keep torch's"
