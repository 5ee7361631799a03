"""A replica that is dead for many publications is one event, with the cause that its death had."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollbook.controller.loop import Controller
from rollbook.errors import SyncError
from rollbook.rollout.router import Router
from rollbook.sync.publisher import PublicationReport
from tiny_run import run_tiny


def test_a_replica_that_fails_every_publication_is_told_once_for_each_reason(tmp_path: Path) -> None:
    reasons = iter(["one", "one", "one", "another", "another"])

    def break_replica(controller: Controller) -> None:
        async def fail(manifest: Any) -> None:
            raise SyncError(next(reasons), "none")

        controller.publisher.ports[1].open = fail  # type: ignore[method-assign]

    run = run_tiny(tmp_path, num_steps=4, faults=[break_replica], **{"rollout.num_replicas": 2})
    assert [event["why"] for event in run.events_of("quarantined")] == ["one", "another"]
    assert [event["committed"] for event in run.events_of("publication")] == [[0]] * 5


async def test_nobody_at_a_dead_replicas_address_is_no_reason_of_its_own() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    from rollbook.cluster.meeting import ReplicaAddress
    from rollbook.cluster.replicas import RayPool, RemotePublisher

    refused = {1: "ConnectionRefusedError: nobody listens"}
    report = PublicationReport(
        weight_version=1,
        base_version=None,
        num_tensors=0,
        num_adapter_tensors=0,
        num_bytes=0,
        sent_bytes=0,
        num_buckets=0,
        changed_frac=0.0,
        export_s=0.0,
        open_s=0.0,
        stream_s=0.0,
        prove_s=0.0,
        commit_s=0.0,
        total_s=0.0,
        replicas=(),
        quarantined=refused,
        digest="",
        superseded={},
    )
    trainer: Any = SimpleNamespace(actors=[None], each=lambda calls: (report, refused))
    publisher = RemotePublisher(trainer)
    events: list[str] = []
    recorder: Any = SimpleNamespace(event=lambda kind, **values: events.append(values["why"]))
    pool = RayPool(config=SimpleNamespace(max_restarts=0), recorder=recorder, publisher=publisher)  # type: ignore[arg-type]
    engine: Any = SimpleNamespace(replica_id=1, down="killed")
    pool.lost(engine, "its process is gone")
    for version in range(1, 17):
        answer = await publisher.publish(version)
        assert answer.quarantined == {1: "its process is gone"} == publisher.quarantined
    assert events == ["its process is gone"]
    await publisher.set_port(ReplicaAddress(replica_id=1, host="", port=1, token="", pid=1))
    assert (await publisher.publish(17)).quarantined == refused  # of the one that was started again
    await asyncio.gather(*pool._restarts.values(), return_exceptions=True)


async def test_a_death_that_the_pool_and_the_publication_both_see_is_told_once() -> None:
    router = Router([SimpleNamespace(replica_id=0), SimpleNamespace(replica_id=1)])  # type: ignore[list-item]
    told: list[str] = []
    router.on_quarantine = lambda replica_id, why: told.append(f"{replica_id}: {why}")
    for why in ("gone", "gone", "another"):
        router.take_out(1, why)
        router.announce(1, why)
    router.put_back(1)
    router.announce(1, "another")
    assert told == ["1: gone", "1: another", "1: another"]
