"""Each fault of a publication by name, over each transport: refused, the old version serves, the next one is proven.

A fault is injected on the engine's side, behind the transport, or on the trainer's, before it. A broadcast's
collectives leave nothing to inject on the trainer's side but the bytes (`test_sync_ports.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, live_digests, tiny_tensors
from sync_transports import CONFIG, Pair, broadcast, disk, inline, linked, shm

from rollbook.errors import SyncError
from rollbook.sync.digest import digest
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.remote import RemotePort
from rollbook.sync.transport import arrived
from rollbook.weights import Bucket, Manifest, Receiving, TensorSpec

pytestmark = pytest.mark.timeout(60)
Q = "model.layers.0.self_attn.q_proj.weight"
HIT = 1
"""The bucket that a fault is done to."""


class Fault:
    """What becomes of the buckets and the manifest on their way; switched on for one publication."""

    told = ""
    """What the publication says of it."""
    is_on = False

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        yield bucket

    def manifest(self, manifest: Manifest) -> Manifest:
        return manifest

    async def passed(self, bucket: Bucket, deliver: Callable[[Bucket], Receiving]) -> None:
        for each in self.buckets(bucket) if self.is_on and bucket.bucket_idx == HIT else [bucket]:
            await arrived(deliver(each))


class Missing(Fault):
    told = "too early"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        yield from ()


class Truncated(Fault):
    told = "ends at byte|bytes"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        assert bucket.data is not None
        yield replace(bucket, data=bucket.data[: bucket.entries[-1].offset_bytes + 1])


class Duplicated(Fault):
    told = "twice"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        yield from (bucket, bucket)


class Flipped(Fault):
    told = "altered"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        assert bucket.data is not None
        data = bucket.data.clone()
        data[bucket.entries[0].offset_bytes] ^= 1
        yield replace(bucket, data=data)


class Reordered(Fault):
    """The bucket comes behind the next one."""

    told = "too early"
    held: Bucket | None = None

    async def passed(self, bucket: Bucket, deliver: Callable[[Bucket], Receiving]) -> None:
        if self.is_on and bucket.bucket_idx == HIT:
            self.held = bucket
            return
        try:
            await arrived(deliver(bucket))
        finally:
            if self.held is not None and bucket.bucket_idx == HIT + 1:
                late, self.held = self.held, None
                with contextlib.suppress(SyncError):
                    await arrived(deliver(late))


class WrongBase(Fault):
    told = "holds version 1 and was sent a delta against 0"

    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, base_version=0, base_digest="0" * 32)


class UnknownName(Fault):
    told = "model.layers.7.weight"

    def manifest(self, manifest: Manifest) -> Manifest:
        spec = TensorSpec(name="model.layers.7.weight", shape=(2,), dtype="bfloat16", num_bytes=4)
        return replace(manifest, tensors=(*manifest.tensors, spec))


class MissingName(Fault):
    told = Q

    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, tensors=tuple(spec for spec in manifest.tensors if spec.name != Q))


class BehindTransport(InprocPort):
    fault: Fault

    async def open(self, manifest: Manifest) -> None:
        await super().open(self.fault.manifest(manifest) if self.fault.is_on else manifest)

    async def receive(self, bucket: Bucket) -> None:
        await self.fault.passed(bucket, super().receive)


class BeforeTransport(RemotePort):
    fault: Fault

    async def open(self, manifest: Manifest) -> None:
        await super().open(self.fault.manifest(manifest) if self.fault.is_on else manifest)

    async def receive(self, bucket: Bucket) -> None:
        await self.fault.passed(bucket, super().receive)


async def refused_then_taken(
    publisher: Publisher, source: FakeSource, engine: StepEngine, fault: Fault
) -> None:
    assert (await publisher.publish(1)).committed == (0,)
    before = live_digests(engine.live)
    source.step()
    fault.is_on = True
    with pytest.raises(SyncError, match=f"version 2 was not published.*({fault.told})"):
        await publisher.publish(2)
    assert (engine.version, live_digests(engine.live)) == (1, before)
    await engine.step_once()
    fault.is_on = False
    report = await publisher.publish(2)
    assert report.committed == (0,) and report.base_version is None, "after any doubt everything is sent"
    assert live_digests(engine.live) == {n: digest(tensor) for n, tensor in source.tensors.items()}
    assert engine.version == 2


OF_BUCKETS = [Missing, Truncated, Duplicated, Reordered, Flipped]
OF_MANIFESTS = [WrongBase, UnknownName, MissingName]
FULL = CONFIG.model_copy(update={"delta": False})


@pytest.mark.parametrize("transport", [inline, shm, disk, broadcast])
@pytest.mark.parametrize("kind", [*OF_BUCKETS, *OF_MANIFESTS])
async def test_a_fault_behind_the_transport(
    kind: type[Fault], transport: Callable[..., Awaitable[Pair]], tmp_path: Path
) -> None:
    async with linked(transport, tmp_path, FULL, port=BehindTransport) as link:
        link.port.fault = kind()
        await refused_then_taken(link.publisher, link.source, link.engine, link.port.fault)


@pytest.mark.parametrize("transport", [inline, shm, disk])
@pytest.mark.parametrize("kind", [Missing, Duplicated, Reordered, *OF_MANIFESTS])
async def test_a_fault_before_the_transport(
    kind: type[Fault], transport: Callable[..., Awaitable[Pair]], tmp_path: Path
) -> None:
    async with linked(transport, tmp_path, FULL, remote=BeforeTransport) as link:
        link.remote.fault = kind()
        await refused_then_taken(link.publisher, link.source, link.engine, link.remote.fault)


@pytest.mark.parametrize("kind", [Missing, Duplicated, Reordered, *OF_MANIFESTS])
async def test_a_fault_within_one_process(kind: type[Fault]) -> None:
    """Tensors by reference: there are no bytes to cut or to flip (`test_sync_ports.py` replaces a tensor)."""
    source, engine, fault = FakeSource(tiny_tensors()), StepEngine(fused_engine(is_tied=False)), kind()
    port = BehindTransport(engine)
    port.fault = fault
    publisher = Publisher(source, [port], FULL)
    try:
        await refused_then_taken(publisher, source, engine, fault)
    finally:
        publisher.close()
        engine.close()
