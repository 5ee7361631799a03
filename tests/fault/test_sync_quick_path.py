"""Buckets that go from the export thread to a replica's reader thread, without an event loop: what faults do."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, live_digests, tiny_tensors
from sync_transports import CONFIG, Remote, frame, shm

from rollbook.errors import SyncError
from rollbook.sync.broadcast import BroadcastReceiver, BroadcastSender
from rollbook.sync.digest import digest
from rollbook.sync.disk import DiskSender
from rollbook.sync.inproc import Copied, InprocPort
from rollbook.sync.remote import RemotePort, ReplicaServer, _Connection
from rollbook.sync.shm import ShmReceiver, ShmSender
from rollbook.sync.transaction import ReplicaTransaction
from rollbook.sync.transport import InlineReceiver, InlineSender, Once, arrived
from rollbook.weights import Bucket, BucketEntry, Manifest, Receiving

SOON = CONFIG.model_copy(update={"receive_deadline_s": 2.0, "abort_deadline_s": 0.5, "delta": False})


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    made = Remote()
    yield made
    await made.close()


def holds_the_trainers_bits(remote: Remote) -> bool:
    trainer = {name: digest(tensor) for name, tensor in remote.source.tensors.items()}
    return all(live_digests(engine.live) == trainer for engine in remote.engines)


async def test_a_replica_that_takes_no_bucket_misses_its_deadline_and_comes_back_with_the_next_publication(
    remote: Remote,
    tmp_path: Path,
) -> None:
    publisher = await remote.connect(await shm(remote.source, tmp_path))
    assert (await publisher.publish(1)).committed == (0, 1)
    publisher.config = SOON
    port: Any = remote.servers[1].port
    receive, released = port.receive, threading.Event()

    def hang(bucket: Bucket) -> Any:
        released.wait()
        return receive(bucket)

    port.receive = hang
    remote.source.step()
    report = await publisher.publish(2)
    assert report.committed == (0,)
    assert "replica 1 did not answer to receive of version 2 within 2 s" in report.quarantined[1]
    port.receive = receive
    released.set()
    assert remote.engines[1].version == 1, "it serves what it held"
    remote.source.step()
    publisher.config = CONFIG
    assert (await publisher.publish(3)).committed == (0, 1)
    assert holds_the_trainers_bits(remote)


@pytest.mark.parametrize("bucket_idx", [0, 2])
async def test_a_connection_that_ends_between_two_buckets_costs_one_replica_one_publication(
    remote: Remote,
    tmp_path: Path,
    bucket_idx: int,
) -> None:
    publisher = await remote.connect(await shm(remote.source, tmp_path))
    await publisher.publish(1)
    port, server = remote.servers[1].port, remote.servers[1]
    receive = port.receive

    def cut(bucket: Bucket) -> Any:
        if bucket.weight_version == 2 and bucket.bucket_idx == bucket_idx:
            for channel in list(server._channels):
                channel.close()
        return receive(bucket)

    port.receive = cut  # type: ignore[method-assign]
    remote.source.step()
    report = await publisher.publish(2)
    assert report.committed == (0,)
    assert "the connection to replica 1" in report.quarantined[1]
    remote.source.step()
    assert (await publisher.publish(3)).committed == (0, 1)
    assert holds_the_trainers_bits(remote)


async def test_a_publication_that_is_cancelled_while_buckets_travel_leaves_the_old_version_everywhere(
    remote: Remote,
    tmp_path: Path,
) -> None:
    publisher = await remote.connect(await shm(remote.source, tmp_path))
    await publisher.publish(1)
    before = [live_digests(engine.live) for engine in remote.engines]
    port: Any = remote.servers[1].port
    receive, reached, released = port.receive, threading.Event(), threading.Event()

    def wait(bucket: Bucket) -> Any:
        reached.set()
        released.wait()
        return receive(bucket)

    port.receive = wait
    remote.source.step()
    publishing = asyncio.ensure_future(publisher.publish(2))
    await asyncio.to_thread(reached.wait)
    publishing.cancel()
    await asyncio.sleep(0)
    port.receive = receive
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    assert [live_digests(engine.live) for engine in remote.engines] == before
    assert [engine.version for engine in remote.engines] == [1, 1]
    assert (await publisher.publish(2)).committed == (0, 1)
    assert holds_the_trainers_bits(remote)


async def test_an_abort_that_is_read_late_does_not_end_the_next_publication(
    remote: Remote,
    tmp_path: Path,
) -> None:
    """Its trainer has given up waiting for it, and opened another one meanwhile."""
    await remote.connect(await shm(remote.source, tmp_path))
    server, port = remote.servers[0], remote.ports[0]
    specs = remote.source.weight_specs()
    await port.open(Manifest(weight_version=1, base_version=None, tensors=specs))
    held = set(server._channels)
    with socket.create_connection(("127.0.0.1", remote.addresses[0])) as late:
        server._in_turn.acquire()  # the replica is at work
        late.sendall(frame({"protocol": 1}) + frame({"do": "abort"}))
        late.shutdown(socket.SHUT_WR)
        server._in_turn.release()
        answers = b""
        while b"{}" not in answers:  # nothing was to be done
            answers += await asyncio.to_thread(late.recv, 1 << 16)
    while set(server._channels) != held:
        await asyncio.sleep(0)
    with pytest.raises(SyncError, match="did not arrive whole"):  # it is open still
        await port.prove({})


class Gone:
    """A channel whose other side has left; a message into it is still accepted, as by a socket's buffer."""

    def receive(self) -> Any:
        raise EOFError

    def send(self, header: Any, payload: Any = None) -> None: ...

    def close(self) -> None: ...


async def test_what_is_asked_after_the_reader_has_ended_is_answered_with_an_error() -> None:
    gone: Any = Gone()
    connection = _Connection(gone, "replica 0")
    while not connection.has_ended:
        await asyncio.sleep(0)
    with pytest.raises(SyncError, match="the connection to replica 0 ended"):
        connection.ask({"do": "version"}).result(5)


async def test_no_collective_is_begun_for_a_bucket_whose_announcement_was_lost() -> None:
    """Its replicas would not come, and a device waits in the collective until its deadline."""
    begun: list[Bucket] = []

    class Sender(InlineSender):
        def transfer(self, bucket: Bucket) -> None:
            begun.append(bucket)

    class Lost(Gone):
        closed = threading.Event()

        def send(self, header: Any, payload: Any = None) -> None:
            raise BrokenPipeError

        def receive(self) -> Any:
            self.closed.wait()
            raise EOFError

        def close(self) -> None:
            self.closed.set()

    lost: Any = Lost()
    port, connection = RemotePort(0, Sender(), port=1), _Connection(lost, "replica 0")
    entry = BucketEntry(name="w", offset_bytes=0, num_bytes=8)
    bucket = Bucket(weight_version=1, bucket_idx=0, entries=(entry,), data=torch.zeros(8, dtype=torch.uint8))
    with pytest.raises(SyncError, match="the connection to replica 0 ended"):
        port._begin(bucket, connection).result(5)
    assert not begun


# ---- a bucket that is announced before its copies end


class Late:
    """Stands for a CUDA event: the bytes are written when somebody waits for it."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def synchronize(self) -> None:
        self.data.fill_(7)


def late_bucket(data: torch.Tensor) -> Bucket:
    entry = BucketEntry(name="w", offset_bytes=0, num_bytes=data.numel())
    return Bucket(weight_version=1, bucket_idx=0, entries=(entry,), data=data, ready=Late(data))  # type: ignore[arg-type]


def test_whoever_reads_a_bucket_from_the_host_waits_for_its_copies(tmp_path: Path) -> None:
    source = FakeSource({"w": torch.zeros(16, dtype=torch.uint8)})
    group: Any = type(
        "Group", (), {"device": torch.device("cpu"), "group": type("G", (), {"size": lambda s: 9})()}
    )()
    senders: list[Any] = [
        InlineSender(),
        ShmSender(str(tmp_path)),
        DiskSender(str(tmp_path), source.weight_specs()),
        BroadcastSender(group),  # to some of its replicas: in messages
    ]
    for sender in senders:
        data = sender.buffer(0, 16, torch.device("cpu"))
        data.zero_()
        bucket = replace(late_bucket(data), replica_ids=(0,))
        sender.announce(bucket)
        assert data.eq(7).all(), type(sender).__name__
        sender.close()


def test_a_replica_on_the_host_waits_for_the_copies_of_a_bucket_before_it_reads(tmp_path: Path) -> None:
    source, held = (
        FakeSource({"w": torch.zeros(16, dtype=torch.uint8)}),
        {"w": torch.zeros(16, dtype=torch.uint8)},
    )

    class Live:
        def specs(self) -> Any:
            return {spec.name: spec for spec in source.weight_specs()}

        def read(self, name: str) -> torch.Tensor:
            return held[name]

        def write(self, name: str, tensor: torch.Tensor) -> None:
            held[name].copy_(tensor)

    transaction = ReplicaTransaction(Live(), replica_id=0, weight_version=0)
    transaction.open(Manifest(weight_version=1, base_version=None, tensors=source.weight_specs()))
    transaction.receive(late_bucket(torch.zeros(16, dtype=torch.uint8)))
    transaction.prove({"w": digest(torch.full((16,), 7, dtype=torch.uint8))})
    transaction.commit()
    assert held["w"].eq(7).all()


def test_a_broadcast_is_not_queued_before_one_that_still_waits_for_its_turn() -> None:
    """NCCL's first broadcasts wait for the replicas on a thread; later ones are queued at once, but behind them."""
    order: list[int] = []
    released = [threading.Event(), threading.Event()]

    class Group:
        device, has_met = torch.device("cpu"), False
        group = type("Ranks", (), {"size": lambda self: 2})()

        def broadcast(self, data: torch.Tensor) -> float:
            released[int(data[0])].wait()
            self.has_met = True
            order.append(int(data[0]))
            return 0.0

        def begin(self, data: torch.Tensor, ready: Any) -> None:
            order.append(int(data[0]))

    group: Any = Group()
    sender = BroadcastSender(group)
    buckets = [
        Bucket(weight_version=1, bucket_idx=i, entries=(), data=torch.full((4,), i), replica_ids=(0,))
        for i in range(4)
    ]
    first, second = sender.transfer(buckets[0]), sender.transfer(buckets[1])
    assert first is not None and second is not None
    released[0].set()
    first.result(10)
    assert group.has_met
    released.append(released[1])
    third = sender.transfer(buckets[2])  # the second one has not begun
    released[1].set()
    assert third is not None
    third.result(10)
    fourth = sender.transfer(buckets[3])
    assert fourth is not None and fourth.done()
    assert order == [0, 1, 2, 3]
    sender.close()


@pytest.mark.parametrize("is_dissolved", [False, True])
def test_a_broken_group_is_met_until_its_publication_ends_and_a_dissolved_one_not_at_all(
    is_dissolved: bool,
) -> None:
    """The replicas that are left wait in its collectives; those of a dissolved one know that they are in none."""
    group: Any = SimpleNamespace(device=torch.device("cpu"), group=SimpleNamespace(size=lambda: 3))
    sender = BroadcastSender(group)
    data = sender.buffer(0, 16, group.device)
    bucket = Bucket(weight_version=1, bucket_idx=0, entries=(), data=data, attempt=1, replica_ids=(0, 1))
    if is_dissolved:
        sender.dissolve()
    else:
        sender.missed(bucket)
    assert ("is_inline" in sender.announce(bucket)) == is_dissolved
    assert sender.announce(replace(bucket, attempt=2)) == {"is_inline": True}
    sender.close()


def test_a_broadcast_that_failed_is_not_begun_again_for_the_next_replica() -> None:
    """Its ranks would meet in it twice; the next publication is another matter."""
    once, begun = Once(), list[int]()

    def begin() -> Future[dict[str, Any]]:
        begun.append(1)
        failed: Future[dict[str, Any]] = Future()
        failed.set_exception(RuntimeError("a rank is gone"))
        return failed

    bucket = Bucket(weight_version=1, bucket_idx=0, entries=(), data=None, attempt=1)
    assert once.run(bucket, begin) is once.run(bucket, begin) and len(begun) == 1
    once.run(replace(bucket, attempt=2), begin)
    assert len(begun) == 2


def test_a_replica_that_came_later_refuses_a_broadcast_that_it_cannot_meet() -> None:
    receiver = BroadcastReceiver(None, max_bucket_bytes=512)
    with pytest.raises(SyncError, match="this replica is in no group"):
        receiver.take(late_bucket(torch.zeros(16, dtype=torch.uint8)), {"num_bytes": 16, "slot_idx": 0})
    assert not receiver.is_quick


# ---- buckets that have to go the other way


class SlowPort:
    """Takes even buckets on its event loop, slowly, and odd ones at once."""

    replica_id = 0

    def __init__(self) -> None:
        self.under_way = 0
        self.overtaken: list[str] = []

    async def open(self, manifest: Manifest) -> None: ...

    async def abort(self) -> None: ...

    def receive(self, bucket: Bucket) -> Receiving:
        if bucket.bucket_idx % 2 == 0:
            self.under_way += 1
            return self._slowly()
        if self.under_way:
            self.overtaken.append(f"bucket {bucket.bucket_idx}")
        return Copied(None)

    async def _slowly(self) -> None:
        for _ in range(500):
            await asyncio.sleep(0)
        self.under_way -= 1

    async def prove(self, digests: Any) -> None:
        if self.under_way:
            self.overtaken.append("prove")


async def test_nothing_overtakes_a_bucket_that_is_taken_in_on_the_event_loop(tmp_path: Path) -> None:
    port: Any = SlowPort()
    server = ReplicaServer(port, ShmReceiver(str(tmp_path)))
    sender = ShmSender(str(tmp_path))
    remote_port = RemotePort(0, sender, port=await server.start())
    await remote_port.open(Manifest(weight_version=1, base_version=None, tensors=()))
    data = sender.buffer(0, 16, torch.device("cpu"))
    arrivals = []
    for bucket_idx in range(3):
        bucket = Bucket(weight_version=1, bucket_idx=bucket_idx, entries=(), data=data)
        arrivals.append(await asyncio.to_thread(remote_port.receive, bucket))
    await remote_port.prove({})
    assert port.overtaken == []
    for arrival in arrivals:
        assert not isinstance(arrival, Coroutine)
        arrival.result(10)
    await remote_port.close()
    await server.close()
    sender.close()


class SlowSender(InlineSender):
    """The first bucket of the first publication is written only when a later one is open, as on a slow disk."""

    def __init__(self) -> None:
        super().__init__()
        self.is_begun, self.goes_on = threading.Event(), threading.Event()
        self.written: list[int] = []

    def announce(self, bucket: Bucket) -> Any:
        if bucket.attempt == 1:
            self.is_begun.set()
            assert self.goes_on.wait(20)
        self.written.append(bucket.attempt)
        return super().announce(bucket)


async def test_a_bucket_whose_publication_was_given_up_is_no_part_of_the_next_one() -> None:
    """It is still being written then; it would take the place of the next one's own, or of its file."""
    taken: list[int] = []

    class Port(SlowPort):
        async def weight_version(self) -> int:
            return 0

        async def receive(self, bucket: Bucket) -> None:
            taken.append(bucket.bucket_idx)

    port: Any = Port()
    server, sender = ReplicaServer(port, InlineReceiver(), max_payload_bytes=64), SlowSender()
    remote_port = RemotePort(0, sender, port=await server.start())
    manifest = Manifest(weight_version=1, base_version=None, tensors=())
    data = sender.buffer(0, 16, torch.device("cpu"))
    first, second = (Bucket(weight_version=1, bucket_idx=0, entries=(), data=data, attempt=n) for n in (1, 2))
    await remote_port.open(manifest)
    given_up = asyncio.ensure_future(arrived(remote_port.receive(first)))
    await asyncio.to_thread(sender.is_begun.wait, 20)
    given_up.cancel()
    with pytest.raises(asyncio.CancelledError):
        await given_up
    await remote_port.open(manifest)
    arriving = asyncio.ensure_future(arrived(remote_port.receive(second)))
    await remote_port.weight_version()  # time enough for it to overtake, if it could
    sender.goes_on.set()
    await arriving
    assert sender.written == [1, 2], "one after the other"
    assert len(taken) == 1
    await remote_port.close()
    await server.close()


async def test_what_touches_live_weights_is_left_to_the_engines_thread() -> None:
    engine = StepEngine(fused_engine(is_tied=False))
    source = FakeSource(tiny_tensors())
    whole = BucketEntry(name="w", offset_bytes=0, num_bytes=16)
    for staging, entry in (("direct", whole), ("staged", replace(whole, encoding="delta_positions"))):
        port = InprocPort(engine, staging=staging)  # type: ignore[arg-type]
        await port.open(Manifest(weight_version=1, base_version=None, tensors=source.weight_specs()))
        bucket = Bucket(
            weight_version=1, bucket_idx=0, entries=(entry,), data=torch.zeros(16, dtype=torch.uint8)
        )
        receiving = port.receive(bucket)
        assert isinstance(receiving, Coroutine)
        receiving.close()
    engine.close()
