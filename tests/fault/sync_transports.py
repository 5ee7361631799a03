"""Both halves of every transport, and replicas behind their servers, for the publication tests."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, live_digests, tiny_tensors
from sync_faults import Fault

from rollbook.errors import SyncError
from rollbook.sync.broadcast import BroadcastGroup, BroadcastReceiver, BroadcastSender
from rollbook.sync.config import SyncConfig
from rollbook.sync.digest import digest
from rollbook.sync.disk import DiskReceiver, DiskSender
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.remote import RemotePort, ReplicaServer
from rollbook.sync.shm import ShmReceiver, ShmSender
from rollbook.sync.transport import InlineReceiver, InlineSender, Receiver, Sender
from rollbook.weights import Bucket, Manifest

CONFIG = SyncConfig.model_construct(**{**SyncConfig().model_dump(), "bucket_bytes": 300, "delta": True})
FULL = CONFIG.model_copy(update={"delta": False})

Pair = tuple[Sender, list[Receiver]]


async def inline(source: FakeSource, folder: Path, num_replicas: int = 2) -> Pair:
    return InlineSender(), [InlineReceiver() for _ in range(num_replicas)]


async def shm(source: FakeSource, folder: Path, num_replicas: int = 2) -> Pair:
    return ShmSender(str(folder)), [ShmReceiver(str(folder)) for _ in range(num_replicas)]


async def disk(source: FakeSource, folder: Path, num_replicas: int = 2) -> Pair:
    sender = DiskSender(str(folder), source.weight_specs())
    return sender, [DiskReceiver(str(folder)) for _ in range(num_replicas)]


async def broadcast(
    source: FakeSource, folder: Path, num_replicas: int = 2, backend: Literal["gloo", "nccl"] = "gloo"
) -> Pair:
    size = num_replicas + 1

    def join(rank: int) -> BroadcastGroup:
        return BroadcastGroup.create(
            backend,
            rank=rank,
            size=size,
            device=torch.device("cpu") if backend == "gloo" else torch.device("cuda", rank),
            deadline_s=20,
            file=str(folder / "store"),
        )

    groups = await asyncio.gather(*(asyncio.to_thread(join, rank) for rank in range(size)))
    receivers: list[Receiver] = [BroadcastReceiver(group, max_bucket_bytes=512) for group in groups[1:]]
    return BroadcastSender(groups[0]), receivers


class Remote:
    """A trainer and two replicas that speak over sockets."""

    def __init__(self) -> None:
        self.source = FakeSource(tiny_tensors())
        self.engines = [StepEngine(fused_engine(is_tied=False), replica_id=i) for i in range(2)]
        self.servers: list[ReplicaServer] = []
        self.ports: list[RemotePort] = []
        self.addresses: list[int] = []

    async def connect(self, pair: Pair, token: str = "", config: SyncConfig = CONFIG) -> Publisher:
        sender, receivers = pair
        for engine, receiver in zip(self.engines, receivers, strict=True):
            server = ReplicaServer(InprocPort(engine), receiver, token=token, max_payload_bytes=1024)
            self.servers.append(server)
            self.addresses.append(await server.start())
            self.ports.append(RemotePort(engine.replica_id, sender, port=self.addresses[-1], token=token))
        self.publisher = Publisher(self.source, self.ports, config, buffers=sender.buffer)
        return self.publisher

    async def close(self) -> None:
        for port in self.ports:
            await port.close()
        for server in self.servers:
            await server.close()
        for engine in self.engines:
            engine.close()
        if self.ports:
            self.ports[0].sender.close()


@dataclass
class Link:
    """A trainer and one replica behind a server."""

    source: FakeSource
    engine: StepEngine
    port: Any
    """The engine's side."""
    remote: Any
    """The trainer's side."""
    publisher: Publisher


@asynccontextmanager
async def linked(
    transport: Callable[..., Awaitable[Pair]],
    folder: Path,
    config: SyncConfig,
    *,
    port: type[InprocPort] = InprocPort,
    remote: type[RemotePort] = RemotePort,
    devices: tuple[str, str] = ("cpu", "cpu"),
) -> AsyncIterator[Link]:
    """`devices`: of the trainer and of the engine."""
    source = FakeSource({name: tensor.to(devices[0]) for name, tensor in tiny_tensors().items()})
    engine = StepEngine(fused_engine(is_tied=False, device=devices[1]))
    sender, receivers = await transport(source, folder, 1)
    theirs = port(engine)
    server = ReplicaServer(theirs, receivers[0], max_payload_bytes=1024)
    ours = remote(0, sender, port=await server.start())
    publisher = Publisher(source, [ours], config, buffers=sender.buffer)
    try:
        yield Link(source, engine, theirs, ours, publisher)
    finally:
        publisher.close()
        await ours.close()
        await server.close()
        engine.close()
        sender.close()


def frame(header: object, payload: bytes = b"", *, text: bytes | None = None) -> bytes:
    body = json.dumps(header).encode() if text is None else text
    return struct.pack("<4sIQ", b"RBW1", len(body), len(payload)) + body + payload


class Faulty:
    """Of a port: does a fault to what passes through it."""

    fault: Fault

    async def open(self, manifest: Manifest) -> None:
        passed = self.fault.manifest(manifest) if self.fault.is_on else manifest
        await super().open(passed)  # type: ignore[misc]  # the port beside this class

    async def receive(self, bucket: Bucket) -> None:
        await self.fault.passed(bucket, super().receive)  # type: ignore[misc]


class BehindTransport(Faulty, InprocPort):
    """The engine's side, where the transport has brought it."""


class BeforeTransport(Faulty, RemotePort):
    """The trainer's side, before the transport."""


async def refused_then_taken(
    publisher: Publisher, source: FakeSource, engine: StepEngine, fault: Fault
) -> None:
    """Version 1 is taken, 2 is refused while the fault is on and 1 goes on serving, then 2 is proven, sent whole."""
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
