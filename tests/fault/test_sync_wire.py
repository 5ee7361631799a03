"""Publications to another process: every transport ends in the trainer's bits, and only typed messages get in."""

from __future__ import annotations

import asyncio
import errno
import json
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, live_digests, manifest_of, packed
from sync_transports import CONFIG, Pair, Remote, broadcast, disk, frame, inline, shm

from rollbook.errors import ConfigError, SyncError
from rollbook.sync import remote as remote_module
from rollbook.sync import wire
from rollbook.sync.broadcast import BroadcastGroup, BroadcastReceiver, BroadcastSender
from rollbook.sync.digest import digest
from rollbook.sync.disk import DiskReceiver, read_safetensors
from rollbook.sync.inproc import InprocPort
from rollbook.sync.remote import RemotePort, ReplicaServer
from rollbook.sync.shm import ShmReceiver, ShmSender
from rollbook.sync.transaction import State
from rollbook.sync.transport import InlineReceiver, InlineSender, arrived
from rollbook.weights import Bucket, BucketEntry, CommitReport, Manifest, TensorSpec

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
async def remote() -> AsyncIterator[Remote]:
    made = Remote()
    yield made
    await made.close()


@pytest.mark.parametrize("transport", [inline, shm, disk, broadcast])
async def test_every_transport_ends_in_the_trainers_bits_full_and_delta(
    transport: Callable[[FakeSource, Path], Awaitable[Pair]], remote: Remote, tmp_path: Path
) -> None:
    publisher = await remote.connect(await transport(remote.source, tmp_path))
    for version in (1, 2, 3):
        report = await publisher.publish(version)
        assert report.committed == (0, 1), report.quarantined
        assert report.base_version == (None if version == 1 else version - 1)
        assert all(r.coverage["fused"] == 12 for r in report.replicas)
        trainer = {name: digest(tensor) for name, tensor in remote.source.tensors.items()}
        for engine in remote.engines:
            assert live_digests(engine.live) == trainer
            assert engine.version == version
            await engine.step_once()
        if version == 1:
            remote.source.step()
        else:
            remote.source.tensors["model.norm.weight"][3] = float("nan")


@pytest.mark.parametrize("transport", [disk, broadcast])
async def test_the_next_bucket_is_fetched_while_the_last_one_is_taken_in(
    transport: Callable[[FakeSource, Path], Awaitable[Pair]], remote: Remote, tmp_path: Path
) -> None:
    config = CONFIG.model_copy(update={"delta": False, "max_buckets": 3})
    publisher = await remote.connect(await transport(remote.source, tmp_path), config=config)
    server = remote.servers[0]
    take, receive = server.receiver.take, server.port.receive
    fetched: list[int] = []
    overlaps: list[bool] = []

    def noted(bucket: Bucket, place: dict[str, Any]) -> Bucket:
        fetched.append(bucket.bucket_idx)
        return take(bucket, place)

    async def after_the_next_one_is_fetched(bucket: Bucket) -> None:
        while fetched[-1] == bucket.bucket_idx and bucket.entries[-1].name != "lm_head.weight":
            await asyncio.sleep(0)  # if the two excluded each other this would wait for ever
        overlaps.append(fetched[-1] > bucket.bucket_idx)
        await arrived(receive(bucket))

    server.receiver.take = noted  # type: ignore[method-assign]
    server.port.receive = after_the_next_one_is_fetched  # type: ignore[method-assign]
    for version in (1, 2):
        report = await publisher.publish(version)
        assert report.committed == (0, 1), report.quarantined
        assert sum(overlaps) >= report.num_buckets - 1 >= 3
        trainer = {name: digest(tensor) for name, tensor in remote.source.tensors.items()}
        assert [live_digests(engine.live) for engine in remote.engines] == [trainer, trainer]
        remote.source.step()


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("transport", [inline, shm, disk, broadcast])
async def test_the_same_version_is_sent_again_to_one_replica_and_all_follow_the_next(
    transport: Callable[..., Awaitable[Pair]], num_replicas: int, remote: Remote, tmp_path: Path
) -> None:
    """A re-sync, as calibration makes several: the version repeats, and with two replicas a group of three ranks cannot
    meet."""
    for engine in remote.engines[num_replicas:]:
        engine.close()
    del remote.engines[num_replicas:]
    publisher = await remote.connect(await transport(remote.source, tmp_path, num_replicas))
    everyone = tuple(range(num_replicas))
    assert (await publisher.publish(1)).committed == everyone
    for replica_id in (*everyone, *everyone):
        report = await publisher.resync(replica_id)
        assert report.committed == (replica_id,) and report.weight_version == 1
    remote.source.step()
    assert (await publisher.publish(2)).committed == everyone
    trainer = {name: digest(tensor) for name, tensor in remote.source.tensors.items()}
    assert [live_digests(engine.live) for engine in remote.engines] == [trainer] * num_replicas


async def test_disk_writes_a_version_anew_when_it_is_published_again(remote: Remote, tmp_path: Path) -> None:
    """A file that was damaged is not announced once more."""
    publisher = await remote.connect(await disk(remote.source, tmp_path))
    await publisher.publish(1)
    for path in tmp_path.glob("rollbook-*/v1/*"):
        path.write_bytes(b"")
    assert (await publisher.resync(1)).committed == (1,)


async def test_disk_touches_nothing_but_what_it_wrote(tmp_path: Path) -> None:
    """The shared folder may be a user's, or another run's; only folders of trainers that are gone are removed."""
    mine = [tmp_path / f"v{version}" / "precious" for version in range(4)]
    for path in mine:
        path.parent.mkdir()
        path.touch()
    one, other, later = remotes = Remote(), Remote(), Remote()
    try:
        beside = [await each.connect(await disk(each.source, tmp_path)) for each in (one, other)]
        for version in (1, 2, 3):
            for remote, publisher in zip((one, other), beside, strict=True):
                assert (await publisher.publish(version)).committed == (0, 1)
                remote.source.step()
        assert sorted(p.name for p in tmp_path.glob("rollbook-*/v*")) == ["v2", "v2", "v3", "v3"]
        await one.close()
        await (await later.connect(await disk(later.source, tmp_path))).publish(4)
        left = sorted(p.name for p in tmp_path.glob("rollbook-*/v*"))
        assert left == ["v2", "v3", "v4"], "those of the one that is gone were removed"
    finally:
        for remote in remotes:
            await remote.close()
    assert all(path.exists() for path in mine)


async def test_a_replica_that_fails_amid_broadcasts_ends_them_and_not_the_publications(
    remote: Remote, tmp_path: Path
) -> None:
    sender, receivers = await broadcast(remote.source, tmp_path)
    publisher = await remote.connect((sender, receivers))
    assert (await publisher.publish(1)).committed == (0, 1)
    port = remote.servers[1].port
    receive = port.receive

    async def fail(bucket: Bucket) -> None:
        port.receive = receive  # type: ignore[method-assign]
        raise SyncError("it failed", "once")

    port.receive = fail  # type: ignore[method-assign]
    remote.source.step()
    report = await publisher.publish(2)
    assert report.committed == (0,) and "it failed" in report.quarantined[1]
    remote.source.step()
    assert isinstance(sender, BroadcastSender)
    sender._group.broadcast = None  # type: ignore[method-assign,assignment]
    assert (await publisher.publish(3)).committed == (0, 1)
    trainer = {name: digest(tensor) for name, tensor in remote.source.tensors.items()}
    assert [live_digests(engine.live) for engine in remote.engines] == [trainer, trainer]


def test_a_message_cannot_make_a_receiver_hold_more_buffers_than_there_are_slots() -> None:
    receiver = BroadcastReceiver(BroadcastGroup(None, torch.device("cpu"), 1), max_bucket_bytes=512)
    bucket = Bucket(weight_version=1, bucket_idx=0, entries=(), data=None)
    with pytest.raises(SyncError, match="slot 8 of at most 8"):
        receiver.take(bucket, {"num_bytes": 16, "slot_idx": 8})


async def test_a_trainer_that_dies_leaves_the_replica_serving(remote: Remote, tmp_path: Path) -> None:
    publisher = await remote.connect(await inline(remote.source, tmp_path))
    await publisher.publish(1)
    port = remote.ports[0]
    await port.open(Manifest(weight_version=2, base_version=None, tensors=remote.source.weight_specs()))
    await port.close()  # the process is gone
    remote.source.step()
    report = await publisher.publish(2)
    assert report.committed == (0, 1)


async def test_an_open_that_was_given_up_ends_with_its_connection(remote: Remote, tmp_path: Path) -> None:
    """It comes through after all: nobody would ever commit or abort it."""
    await remote.connect(await inline(remote.source, tmp_path))
    server, port = remote.servers[0], remote.servers[0].port
    assert isinstance(port, InprocPort)
    plain, reached, released = port.open, asyncio.Event(), asyncio.Event()

    async def slow(manifest: Manifest) -> None:
        reached.set()
        await released.wait()
        await plain(manifest)

    port.open = slow  # type: ignore[method-assign]
    opening = asyncio.ensure_future(remote.ports[0].open(manifest_of(remote.source, 1)))
    await reached.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    released.set()
    while server._channels:
        await asyncio.sleep(0)
    assert port.transaction is not None and port.transaction.state is State.IDLE


async def test_a_replica_that_dies_is_quarantined_and_its_successor_re_synced(
    remote: Remote, tmp_path: Path
) -> None:
    publisher = await remote.connect(await inline(remote.source, tmp_path))
    await publisher.publish(1)
    await remote.servers[1].close()
    remote.source.step()
    report = await publisher.publish(2)
    assert report.committed == (0,)
    assert "replica 1 at 127.0.0.1" in report.quarantined[1]
    successor = StepEngine(fused_engine(is_tied=False), replica_id=1)
    remote.engines.append(successor)
    remote.servers[1] = ReplicaServer(InprocPort(successor), InlineReceiver(), max_payload_bytes=1024)
    await remote.servers[1].start(port=remote.addresses[1])
    remote.source.step()
    assert (await publisher.publish(3)).committed == (0, 1)
    assert (successor.version, live_digests(successor.live)) == (3, live_digests(remote.engines[0].live))


async def test_another_replica_at_the_address_is_sent_nothing(remote: Remote, tmp_path: Path) -> None:
    await remote.connect(await inline(remote.source, tmp_path))
    wrong = RemotePort(1, InlineSender(), port=remote.addresses[0])
    with pytest.raises(SyncError, match=f"127.0.0.1:{remote.addresses[0]} is not replica 1: 0"):
        await wrong.open(manifest_of(remote.source, 1))


async def test_errors_cross_with_their_remedy(remote: Remote, tmp_path: Path) -> None:
    await remote.connect(await inline(remote.source, tmp_path))
    with pytest.raises(SyncError, match="is missing") as caught:
        await remote.ports[0].open(Manifest(weight_version=1, base_version=None, tensors=()))
    assert "table of places" in caught.value.remedy
    assert await remote.ports[0].weight_version() == 0  # the connection goes on


# ---- what must not get in


async def test_nobody_but_the_connection_that_opened_a_publication_adds_to_it_or_commits_it(
    remote: Remote, tmp_path: Path
) -> None:
    """Another trainer, or what an earlier connection still had to say: right bytes, and refused all the same."""
    await remote.connect(await inline(remote.source, tmp_path))
    ours = remote.ports[0]
    theirs = RemotePort(0, InlineSender(), port=remote.addresses[0])
    remote.ports.append(theirs)
    buckets, digests = packed(remote.source, 1, 300)
    await theirs.weight_version()  # it is connected
    await ours.open(manifest_of(remote.source, 1))
    refused = "no publication open on this connection"
    with pytest.raises(SyncError, match=refused):
        await arrived(theirs.receive(buckets[0]))
    with pytest.raises(SyncError, match="has version 1 open"):  # nor does trying to open one make it theirs
        await theirs.open(manifest_of(remote.source, 1))
    for bucket in buckets:
        await arrived(ours.receive(bucket))
    with pytest.raises(SyncError, match=refused):
        await theirs.prove(digests)
    await ours.prove(digests)
    with pytest.raises(SyncError, match=refused):
        await theirs.commit()
    assert remote.engines[0].version == 0
    assert (await ours.commit()).weight_version == 1


async def test_an_abort_on_a_new_connection_ends_what_an_earlier_one_opened(
    remote: Remote, tmp_path: Path
) -> None:
    """The trainer dropped its connection with a call that it gave up, and asks for the abort on the next one."""
    await remote.connect(await inline(remote.source, tmp_path))
    ours, again = remote.ports[0], RemotePort(0, InlineSender(), port=remote.addresses[0])
    remote.ports.append(again)
    await ours.open(manifest_of(remote.source, 1))
    await again.abort()
    with pytest.raises(SyncError, match="no publication open on this connection"):
        await ours.prove({})
    await again.open(manifest_of(remote.source, 1))


class Evil:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


async def exchange(port: int, *messages: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"".join(messages))
    writer.write_eof()
    answer = await reader.read()
    writer.close()
    return answer


HELLO = frame({"protocol": 1, "token": "s3cret"})


async def test_pickles_are_answered_with_an_error_and_never_loaded(remote: Remote, tmp_path: Path) -> None:
    await remote.connect(await inline(remote.source, tmp_path), token="s3cret")
    target = tmp_path / "created"
    evil = pickle.dumps(Evil(target))
    for messages in [
        (evil,),
        (frame(None, text=evil),),
        (HELLO, frame(None, text=evil)),
        (
            HELLO,
            frame({"do": "receive", "place": {}, "weight_version": 1, "bucket_idx": 0, "entries": []}, evil),
        ),
        (HELLO, frame({"do": evil.hex(), "digests": evil.hex()})),
        (HELLO, frame({"do": "prove", "digests": {"model.norm.weight": evil.hex()}})),
    ]:
        answer = await exchange(remote.addresses[0], *messages)
        assert b'"error"' in answer
    assert not target.exists()
    assert remote.engines[0].version == 0


@pytest.mark.parametrize(
    "messages",
    [
        (frame({"protocol": 1}), frame({"do": "version"})),
        (frame({"protocol": 1, "token": "wrong"}), frame({"do": "version"})),
        (frame({"protocol": 1, "token": None}), frame({"do": "version"})),
        (frame({"protocol": 1, "token": "half a pair: \ud800"}), frame({"do": "version"})),
        (frame({"do": "version"}),),
    ],
)
async def test_nothing_is_answered_without_the_token(
    messages: tuple[bytes, ...], remote: Remote, tmp_path: Path
) -> None:
    await remote.connect(await inline(remote.source, tmp_path), token="s3cret")
    answer = await exchange(remote.addresses[0], *messages)
    assert b"token" in answer
    assert b"weight_version" not in answer


async def test_a_stranger_makes_the_server_hold_neither_bytes_nor_threads(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has not shown the token gets a greeting's room, and a greeting's time."""
    await remote.connect(await inline(remote.source, tmp_path), token="s3cret")
    for message in (struct.pack("<4sIQ", b"RBW1", 2, 1000), struct.pack("<4sIQ", b"RBW1", 1 << 20, 0)):
        assert b"the limits are 65536 and 0" in await exchange(remote.addresses[0], message)
    monkeypatch.setattr(remote_module, "CONNECT_S", 0.05)
    reader, writer = await asyncio.open_connection("127.0.0.1", remote.addresses[0])
    assert await reader.read() == b"", "it was hung up"
    writer.close()
    assert (await remote.publisher.publish(1)).committed == (0, 1)


async def test_a_connection_that_cannot_be_accepted_is_not_the_last_one(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [OSError(errno.EMFILE, "Too many open files")] * 2

    def scarce(self: socket.socket) -> tuple[socket.socket, Any]:
        if failures:
            raise failures.pop()
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", scarce)
    monkeypatch.setattr(remote_module, "ACCEPT_AGAIN_S", 0.0)
    publisher = await remote.connect(await inline(remote.source, tmp_path), token="s3cret")
    assert (await publisher.publish(1)).committed == (0, 1)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (struct.pack("<4sIQ", b"RBW1", 2, 1 << 40) + b"{}", b"1099511627776 of payload"),
        (struct.pack("<4sIQ", b"RBW1", 0xFFFFFFFF, 0), b"4294967295 bytes of header"),
        (frame([1, 2]), b"not a JSON object"),
        (frame({"do": "open", "weight_version": "1"}), b"'tensors' of a message is NoneType"),
        (frame({"do": "open", "tensors": [["w", [2], "bfloat16"]]}), b"'shape' of a message is NoneType"),
        (
            frame({"do": "open", "tensors": [["w", [True], "bfloat16", 4]]}),
            b"'n' of a message is bool, not int",
        ),
        (frame({"do": "receive", "place": {"file": "../../etc/passwd"}, "entries": []}), b"weight_version"),
        (frame({"do": "reboot"}), b"asks for 'reboot'"),
        (frame({}), b"'do' of a message is NoneType"),
    ],
)
async def test_malformed_messages_are_refused_before_anything_is_allocated(
    message: bytes, complaint: bytes, remote: Remote, tmp_path: Path
) -> None:
    await remote.connect(await inline(remote.source, tmp_path))
    answer = await exchange(remote.addresses[0], frame({"protocol": 1}), message)
    assert complaint in answer.replace(b"\\u2019", b"'")


def test_an_endpoint_beyond_loopback_needs_a_token() -> None:
    for host in ("127.0.0.1", "::1", "localhost", "127.3.4.5"):
        wire.require_token(host, "")
    for host in ("0.0.0.0", "::", "10.0.0.2", "trainer-0"):
        with pytest.raises(ConfigError, match=f"listen on {host} without a token"):
            wire.require_token(host, "")
        wire.require_token(host, "s3cret")


def test_paths_outside_the_shared_folders_are_refused(tmp_path: Path) -> None:
    bucket = Bucket(weight_version=1, bucket_idx=0, entries=(), data=None)
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(b"x" * 64)
    inner = tmp_path / "inner"
    inner.mkdir()
    own = "rollbook-0123456789abcdef"
    for name in (
        "../outside.safetensors",
        str(outside),
        f"{own}/v1/../../../outside.safetensors",
        f"{own}/v1/bucket_0.safetensors/../../../../outside.safetensors",
        f"{own}-0/../../outside.safetensors",
        f"x/{own}-0",
        "v1/bucket_0.safetensors",
        "",
    ):
        with pytest.raises(SyncError, match="is not a bucket's file"):
            DiskReceiver(str(inner)).take(bucket, {"file": name})
        with pytest.raises(SyncError, match="is not a slot of shared memory"):
            ShmReceiver(str(inner)).take(bucket, {"file": name, "num_bytes": 1})
    link = inner / "rollbook-0123456789abcdef-0"
    link.symlink_to(outside)
    with pytest.raises(SyncError, match="cannot be opened"):
        ShmReceiver(str(inner)).take(bucket, {"file": link.name, "num_bytes": 1})


async def test_a_slot_smaller_than_announced_is_refused(tmp_path: Path) -> None:
    sender, receiver = ShmSender(str(tmp_path)), ShmReceiver(str(tmp_path))
    data = sender.buffer(0, 100, torch.device("cpu"))
    bucket = Bucket(weight_version=1, bucket_idx=0, entries=(), data=data)
    place = sender.announce(bucket)
    with pytest.raises(SyncError, match="announced with 101 bytes in a slot of 100"):
        receiver.take(bucket, {**place, "num_bytes": 101})
    assert receiver.take(bucket, place).data is not None
    sender.close()
    assert not list(tmp_path.iterdir())


def test_shared_memory_is_for_this_user_alone(tmp_path: Path) -> None:
    sender = ShmSender(str(tmp_path))
    sender.buffer(0, 100, torch.device("cpu"))
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600]
    sender.close()


SLOT_OWNER = """
import sys, torch
from rollbook.sync.shm import ShmSender
sender = ShmSender(sys.argv[1])
sender.buffer(0, 100, torch.device("cpu"))
print("ready", flush=True)
sys.stdin.read()
"""


def test_slots_of_a_killed_trainer_are_freed_by_the_next_one(tmp_path: Path) -> None:
    """Whatever process has the dead one's number now; a trainer that lives keeps its own, this process's too."""
    own = ShmSender(str(tmp_path))
    own.buffer(0, 100, torch.device("cpu"))
    (kept,) = tmp_path.iterdir()
    command = [sys.executable, "-c", SLOT_OWNER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"ready\n"
        ShmSender(str(tmp_path)).close()
        assert len(list(tmp_path.iterdir())) == 2
        other.kill()
    ShmSender(str(tmp_path)).close()
    assert list(tmp_path.iterdir()) == [kept]
    own.close()
    assert not list(tmp_path.iterdir())


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "x.safetensors"
    save_file({"w": torch.arange(100)}, path)
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:7], b"", b"\xff" * 100, whole[:8] + b"[" + whole[9:]):
        path.write_bytes(damaged)
        with pytest.raises(SyncError):
            read_safetensors(path)


def test_a_file_that_holds_other_tensors_than_the_message_says_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    name_below = "rollbook-0123456789abcdef/v1/bucket_0.safetensors"
    (tmp_path / name_below).parent.mkdir(parents=True)
    save_file({"w": torch.arange(4)}, tmp_path / name_below)
    for name, num_bytes, told in (
        ("w", 8, "holds 32 bytes of w, the message says 8"),
        ("v", 32, "not hold v"),
    ):
        entry = BucketEntry(name=name, offset_bytes=0, num_bytes=num_bytes)
        bucket = Bucket(weight_version=1, bucket_idx=0, entries=(entry,), data=None)
        with pytest.raises(SyncError, match=told):
            DiskReceiver(str(tmp_path)).take(bucket, {"file": name_below})


def test_messages_round_trip() -> None:
    spec = TensorSpec(name="w", shape=(2, 3), dtype="bfloat16", num_bytes=12)
    manifest = Manifest(weight_version=4, base_version=3, base_digest="ab", is_resync=False, tensors=(spec,))
    entry = BucketEntry(
        name="w",
        offset_bytes=256,
        num_bytes=6,
        encoding="delta_positions",
        tensor_offset_bytes=0,
        tensor_num_bytes=12,
    )
    data = torch.zeros(300, dtype=torch.uint8)
    bucket = Bucket(weight_version=4, bucket_idx=2, entries=(entry,), data=data)
    report = CommitReport(
        replica_id=1,
        weight_version=4,
        num_tensors=1,
        num_bytes=12,
        write_s=0.5,
        digest_s=1,
        coverage={"fused": 1},
    )
    through = lambda message: json.loads(json.dumps(message))
    assert wire.manifest_from_json(through(wire.manifest_to_json(manifest))) == manifest
    back = wire.bucket_from_json(through(wire.bucket_to_json(bucket)), data)
    assert (back.entries, back.bucket_idx, back.weight_version) == (bucket.entries, 2, 4)
    assert wire.report_from_json(through(wire.report_to_json(report))) == report
