"""A port that alters what it takes in is caught wherever it stands: `receive` is the only way to a replica."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, live_digests, tiny_tensors
from sync_transports import CONFIG, Pair, broadcast, disk, inline, linked, shm

from rollbook.errors import SyncError
from rollbook.sync.bucket import SlotBuffers
from rollbook.sync.digest import digest
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.remote import RemotePort
from rollbook.sync.transport import arrived
from rollbook.weights import Bucket, Receiving

pytestmark = pytest.mark.timeout(60)


def damaged(bucket: Bucket) -> Bucket:
    """The same bucket with the lowest bit of one byte changed."""
    if bucket.data is not None:
        data = bucket.data.clone()
        entry = next(entry for entry in bucket.entries if entry.num_bytes)
        data[entry.offset_bytes + entry.num_bytes - 1] ^= 1
        return replace(bucket, data=data)
    assert bucket.shared is not None
    name = next(iter(bucket.shared))
    tensor = bucket.shared[name].clone()
    tensor.view(torch.uint8).view(-1)[0] ^= 1
    return replace(bucket, shared={**bucket.shared, name: tensor})


class Damage:
    """Switched on for one publication."""

    def __init__(self) -> None:
        self.is_on = False
        self.num_seen = 0

    def __call__(self, bucket: Bucket) -> Bucket:
        self.num_seen += 1
        return damaged(bucket) if self.is_on and bucket.bucket_idx == 0 else bucket

    def in_place(self, bucket: Bucket) -> Bucket:
        """In the buffer that the transport sends."""
        changed = self(bucket).data
        assert bucket.data is not None and changed is not None
        bucket.data.copy_(changed)
        return bucket


class AtOnce(InprocPort):
    """Overrides `receive` as a plain method."""

    damage: Damage

    def receive(self, bucket: Bucket) -> Receiving:
        return super().receive(self.damage(bucket))


class OnTheLoop(InprocPort):
    """Overrides `receive` as a coroutine."""

    damage: Damage

    async def receive(self, bucket: Bucket) -> None:
        await arrived(super().receive(self.damage(bucket)))


class SendsAtOnce(RemotePort):
    damage: Damage

    def receive(self, bucket: Bucket) -> Receiving:
        return super().receive(self.damage.in_place(bucket))


class SendsOnTheLoop(RemotePort):
    damage: Damage

    async def receive(self, bucket: Bucket) -> None:
        await arrived(super().receive(self.damage.in_place(bucket)))


async def refused_then_taken(
    publisher: Publisher, source: FakeSource, engine: StepEngine, damage: Damage
) -> None:
    report = await publisher.publish(1)
    assert report.committed == (0,)
    assert damage.num_seen == report.num_buckets >= 3, "every bucket goes through the override"
    before = live_digests(engine.live)
    source.step()
    damage.is_on = True
    with pytest.raises(SyncError, match="version 2 was not published"):
        await publisher.publish(2)
    assert engine.version == 1
    damage.is_on = False
    report = await publisher.publish(2)
    assert report.committed == (0,)
    assert live_digests(engine.live) != before
    assert live_digests(engine.live) == {n: digest(tensor) for n, tensor in source.tensors.items()}


@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize("by_reference", [True, False])
@pytest.mark.parametrize("kind", [AtOnce, OnTheLoop])
async def test_a_port_that_damages_a_bucket_is_caught_within_one_process(
    kind: type[AtOnce | OnTheLoop], by_reference: bool, staging: Any
) -> None:
    source, engine, damage = FakeSource(tiny_tensors()), StepEngine(fused_engine(is_tied=False)), Damage()
    port = kind(engine, staging=staging)
    port.damage = damage
    config = CONFIG.model_copy(update={"delta": False})
    buffers = None if by_reference else SlotBuffers()
    publisher = Publisher(source, [port], config, buffers=buffers)
    try:
        await refused_then_taken(publisher, source, engine, damage)
    finally:
        publisher.close()
        engine.close()


@pytest.mark.parametrize("is_delta", [True, False], ids=["delta", "full"])
@pytest.mark.parametrize("kind", [AtOnce, OnTheLoop, SendsAtOnce, SendsOnTheLoop])
@pytest.mark.parametrize("transport", [inline, shm, disk, broadcast])
async def test_a_port_that_damages_a_bucket_is_caught_over_every_transport(
    transport: Callable[..., Awaitable[Pair]], kind: type[Any], is_delta: bool, tmp_path: Path
) -> None:
    """On the trainer's side as on the engine's, for buckets that need no event loop and those that do."""
    sends = issubclass(kind, RemotePort)
    config = CONFIG.model_copy(update={"delta": is_delta})
    async with linked(transport, tmp_path, config, **{"remote" if sends else "port": kind}) as link:
        damage = (link.remote if sends else link.port).damage = Damage()
        await refused_then_taken(link.publisher, link.source, link.engine, damage)


async def test_a_bucket_behind_one_that_waits_for_the_engine_waits_too() -> None:
    """A delta's whole tensors would overtake its changes, and be refused as out of order."""
    source, engine, damage = FakeSource(tiny_tensors()), StepEngine(fused_engine(is_tied=False)), Damage()
    port = AtOnce(engine)
    port.damage = damage
    publisher = Publisher(source, [port], CONFIG, buffers=SlotBuffers())
    try:
        assert (await publisher.publish(1)).committed == (0,)
        for version in range(2, 8):
            name = list(source.tensors)[version % len(source.tensors)]
            source.tensors[name].view(torch.uint8).view(-1)[0] ^= 1  # one in full, the others not at all
            assert (await publisher.publish(version)).committed == (0,)
            assert live_digests(engine.live) == {n: digest(t) for n, t in source.tensors.items()}
    finally:
        publisher.close()
        engine.close()
