"""A replica that is dead for many publications is one event, with the cause that its death had; started again, it goes
on where it was."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rollbook.controller.loop import Controller
from rollbook.controller.step_metrics import engine_values
from rollbook.errors import EngineDownError, EngineError, SyncError
from rollbook.rollout.engine import COUNTERS, EngineStats
from rollbook.rollout.router import Router
from rollbook.sync.report import PublicationReport
from tiny_run import run_tiny, tiny_config


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


def pool_of(engine: Any, *others: Any, max_restarts: int) -> tuple[Any, list[tuple[str, str]]]:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    from rollbook.cluster.replicas import RayPool

    findings: list[tuple[str, str]] = []

    async def set_port(address: Any) -> None: ...

    async def resync(replica_id: int) -> Any:
        raise SyncError("the trainer has moved on", "none")

    recorder: Any = SimpleNamespace(
        event=lambda kind, **values: None,
        finding=lambda rule, summary, *, remedy: findings.append((rule, summary)),
    )
    publisher: Any = SimpleNamespace(lost={}, quarantined={}, set_port=set_port, resync=resync)
    config: Any = SimpleNamespace(max_restarts=max_restarts)
    pool = RayPool(config=config, recorder=recorder, publisher=publisher, engines=[engine, *others])
    return pool, findings


def dying(num_deaths: int) -> Any:
    """A replica that dies so many times before it is ready."""
    left = iter(range(num_deaths))

    async def close() -> None: ...

    async def start() -> None:
        for _ in left:
            raise EngineDownError("replica 1 is down: its process is gone", "it is started again")
        engine.down = ""

    engine = SimpleNamespace(replica_id=1, down="killed", address=None, close=close, start=start)
    return engine


async def test_a_replica_that_dies_while_it_is_started_again_is_started_once_more() -> None:
    engine = dying(2)
    pool, findings = pool_of(engine, max_restarts=3)
    pool.lost(engine, "its process is gone")
    await pool.is_back(engine)
    assert engine.down == "" and not findings


async def test_a_replica_that_is_not_started_any_more_is_said() -> None:
    engine, other = dying(9), SimpleNamespace(replica_id=0, down="")
    pool, findings = pool_of(engine, other, max_restarts=3)
    pool.lost(engine, "its process is gone")
    with pytest.raises(EngineError, match="replica 1 died 4 times"):
        await pool.is_back(engine)
    assert findings == [
        (
            "replica_given_up",
            "replica 1 serves no more in this run: replica 1 died 4 times: killed",
        )
    ]


def reading(decode_tokens: int, *, weight_version: int = 1) -> EngineStats:
    return EngineStats(
        weight_version=weight_version,
        num_running=2,
        num_waiting=0,
        num_slots=4,
        kv_pool_tokens=64,
        kv_used_tokens=8,
        prefill_tokens=3 * decode_tokens,
        cached_prompt_tokens=0,
        decode_tokens=decode_tokens,
        decode_steps=decode_tokens,
        num_preemptions=0,
        busy_s=decode_tokens / 8,
    )


async def test_counters_of_a_replica_go_on_when_it_is_started_again() -> None:
    pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")
    from rollbook.cluster.replicas import RemoteEngine

    class Engine(RemoteEngine):
        readings: ClassVar[list[EngineStats]] = []

        async def _ask(self, name: str, args: tuple[Any, ...], deadline_s: float) -> Any:
            return None if name == "start" else self.readings.pop(0)

    nothing: Any = SimpleNamespace()
    engine = Engine(0, tiny_config(), lambda: None, nothing, nothing)
    seen = []
    for readings in ([100, 160], [5, 20], [0, 40]):  # of three processes, one after the other
        await engine.start()
        engine.readings[:] = map(reading, readings)
        seen += [await engine.stats() for _ in readings]
    assert [s.decode_tokens for s in seen] == [100, 160, 165, 180, 180, 220]
    values = engine_values({0: seen[1]}, {0: seen[2]}, elapsed_s=1.0)
    assert values["generated/num_tokens"].result() == 5
    assert values["rollout/prefill_tokens"].result() == 15
    assert {s.num_running for s in seen} == {2}, "a gauge is of the process there is"


def test_every_number_of_an_engine_that_only_grows_is_a_counter() -> None:
    gauges = {"weight_version", "num_running", "num_waiting", "num_slots", "kv_pool_tokens", "kv_used_tokens"}
    gauges |= {"mismatch", "mismatch_error_frac", "waiting_requests"}
    assert {f.name for f in fields(EngineStats)} == {*COUNTERS, *gauges}


def test_a_replica_out_of_service_serves_no_version() -> None:
    """It keeps its last readings: the versions that are served are those of the others."""
    stats = {replica_id: reading(1, weight_version=version) for replica_id, version in enumerate((9, 3, 8))}
    values = engine_values({}, stats, elapsed_s=1.0, out_of_service={1: "its process is gone"})
    assert values["sync/version_spread"].result() == 1
    assert values["replica/num_serving"].result() == 2
