"""Publications to several replicas that go on decoding, under faults of replicas, transports and the trainer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from sync_engine import StepEngine
from sync_fakes import FakeSource, fused_engine, live_digests, tiny_tensors
from torch import Tensor

from rollbook.errors import DeadlineError, EngineDownError, SyncError
from rollbook.sync.bucket import SlotBuffers
from rollbook.sync.config import SyncConfig
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.quantized import QuantizedSource, Scheme
from rollbook.sync.transaction import State
from rollbook.sync.transport import arrived
from rollbook.weights import Bucket, CommitReport, Digests, Manifest

pytestmark = pytest.mark.timeout(60)
CONFIG = SyncConfig.model_construct(**{**SyncConfig().model_dump(), "bucket_bytes": 300})


class FaultyPort:
    """A port with a fault in one phase: `faults[phase]` runs before the call and may raise, wait or alter."""

    def __init__(self, inner: InprocPort) -> None:
        self.inner = inner
        self.replica_id = inner.replica_id
        self.faults: dict[str, Callable[[Any], Awaitable[Any]]] = {}
        self.calls: list[str] = []
        self._in_order = asyncio.Lock()

    async def _before(self, phase: str, argument: Any = None) -> Any:
        self.calls.append(phase)
        fault = self.faults.get(phase)
        return argument if fault is None else await fault(argument)

    async def weight_version(self) -> int:
        await self._before("version")
        return await self.inner.weight_version()

    async def open(self, manifest: Manifest) -> None:
        await self.inner.open(await self._before("open", manifest))

    async def receive(self, bucket: Bucket) -> None:
        async with self._in_order:
            await arrived(self.inner.receive(await self._before("receive", bucket)))

    async def prove(self, digests: Digests) -> None:
        await self.inner.prove(await self._before("prove", digests))

    async def commit(self) -> CommitReport:
        await self._before("commit")
        return await self.inner.commit()

    async def abort(self) -> None:
        await self._before("abort")
        await self.inner.abort()


class Cluster:
    """A trainer and its replicas, with what each decode step saw."""

    def __init__(self, num_replicas: int = 2, staging: Any = "staged", config: SyncConfig = CONFIG) -> None:
        self.source = FakeSource(tiny_tensors())
        self.engines = [StepEngine(fused_engine(is_tied=False), replica_id=i) for i in range(num_replicas)]
        self.ports = [FaultyPort(InprocPort(engine, staging=staging)) for engine in self.engines]
        self.slots: set[tuple[int, int]] = set()
        self.config = config
        self.publisher = self.new_publisher(0)

    def new_publisher(self, weight_version: int, config: SyncConfig | None = None) -> Publisher:
        buffers = SlotBuffers()

        def recorded(slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
            buffer = buffers(slot_idx, num_bytes, device)
            self.slots.add((slot_idx, buffer.data_ptr()))
            return buffer

        return Publisher(
            self.source, self.ports, config or self.config, buffers=recorded, weight_version=weight_version
        )

    def source_digests(self) -> dict[str, str]:
        from rollbook.sync.digest import digest

        return {name: digest(tensor) for name, tensor in self.source.tensors.items()}

    def check(self, *versions: int, trainer_moved: bool = False) -> None:
        """Each replica is at its version, each label stands for one set of weights, the newest are the trainer's."""
        for engine, version in zip(self.engines, versions, strict=True):
            assert engine.version == version
            assert all(len(weights) == 1 for weights in engine.steps.values()), engine.steps
            if version == max(versions) and not trainer_moved:
                assert live_digests(engine.live) == self.source_digests()


@pytest.fixture
async def cluster() -> AsyncIterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def make(*args: Any, **kwargs: Any) -> Cluster:
        made.append(Cluster(*args, **kwargs))
        return made[-1]

    yield make
    for each in made:
        for engine in each.engines:
            engine.close()


Make = Callable[..., Cluster]


async def raising(_: Any) -> Any:
    raise ConnectionResetError("peer closed the connection")


async def hanging(_: Any) -> Any:
    await asyncio.Event().wait()


async def flipping(bucket: Bucket) -> Bucket:
    assert bucket.data is not None
    data = bucket.data.clone()
    data[5] ^= 1
    return replace(bucket, data=data)


@pytest.mark.parametrize("staging", ["staged", "direct"])
async def test_every_replica_ends_at_the_trainers_weights_while_it_decodes(
    cluster: Make, staging: str
) -> None:
    c = cluster(staging=staging)
    for version in (1, 2, 3):
        report = await c.publisher.publish(version)
        c.check(version, version)
        assert report.committed == (0, 1)
        assert report.num_bytes == sum(spec.num_bytes for spec in c.source.weight_specs())
        assert (report.num_tensors, report.changed_frac) == (17, 1.0)
        for engine in c.engines:
            await engine.step_once()
            assert engine.is_serving
        c.source.step()
    assert sorted(c.engines[0].steps) == [0, 1, 2, 3]
    c.source.step(1 / 1.5)


@pytest.mark.parametrize("max_buckets", [2, 3])
async def test_so_many_buffers_exist_and_one_fills_while_another_travels(
    cluster: Make, max_buckets: int
) -> None:
    c = cluster(1, config=CONFIG.model_copy(update={"max_buckets": max_buckets}))
    exported: list[str] = []
    export = c.source.export_weights

    def noted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in export():
            exported.append(name)
            yield name, tensor

    c.source.export_weights = noted  # type: ignore[method-assign]
    overlaps = []

    async def wait_for_next_bucket(bucket: Bucket) -> Bucket:
        last = bucket.entries[-1].name
        while exported[-1] == last and exported[-1] != "lm_head.weight":
            await asyncio.sleep(0)  # without overlap this would wait for ever
        overlaps.append(exported[-1] != last)
        return bucket

    c.ports[0].faults["receive"] = wait_for_next_bucket
    report = await c.publisher.publish(1)
    assert sum(overlaps) >= report.num_buckets - 2 >= 3
    assert {slot for slot, _ in c.slots} == set(range(max_buckets))
    assert len(c.slots) == max_buckets


@pytest.mark.parametrize("phase", ["open", "receive", "prove", "commit"])
@pytest.mark.parametrize("fault", [raising, hanging])
async def test_a_replica_lost_in_any_phase_is_quarantined_and_comes_back_in_full(
    cluster: Make, phase: str, fault: Callable[[Any], Awaitable[Any]]
) -> None:
    c = cluster()
    await c.publisher.publish(1)
    if fault is hanging:
        c.publisher.config = CONFIG.model_copy(update={f"{phase}_deadline_s": 0.5})
    c.source.step()
    c.ports[1].faults[phase] = fault
    report = await c.publisher.publish(2)
    assert report.committed == (0,)
    assert set(c.publisher.quarantined) == {1}
    why = c.publisher.quarantined[1]
    if fault is hanging:
        assert f"replica 1 did not answer to {phase} of version 2 within 0.5 s" in why
        assert "the trainer offered version 2, the replica last proved 1" in why
    else:
        assert "peer closed the connection" in why
    c.check(2, 1)
    c.ports[1].faults.clear()
    c.publisher.config = CONFIG
    c.source.step()
    report = await c.publisher.publish(3)
    assert report.committed == (0, 1)
    assert report.superseded == {1: (2,)}
    assert not c.publisher.quarantined
    c.check(3, 3)
    await c.engines[1].step_once()


async def test_a_flipped_bit_keeps_the_old_version_serving_and_names_the_tensor(cluster: Make) -> None:
    c = cluster(1)
    await c.publisher.publish(1)
    c.source.step()
    c.ports[0].faults["receive"] = flipping
    with pytest.raises(
        SyncError, match="version 2 was not published: prove failed on replica 0: .*altered: model"
    ):
        await c.publisher.publish(2)
    assert (c.publisher.weight_version, c.engines[0].version) == (1, 1)
    assert 0 in c.publisher.quarantined
    await c.engines[0].step_once()
    c.ports[0].faults.clear()
    await c.publisher.publish(2)  # the step's retry
    assert not c.publisher.quarantined
    c.check(2)


async def test_in_direct_mode_a_fault_stops_the_replica_whoever_resumes_it(cluster: Make) -> None:
    c = cluster(1, staging="direct")
    await c.publisher.publish(1)
    c.source.step()
    c.ports[0].faults["receive"] = flipping
    with pytest.raises(SyncError):
        await c.publisher.publish(2)
    engine = c.engines[0]
    await engine.resume()
    await engine.wake()
    assert not engine.is_serving
    transaction = c.ports[0].inner.transaction
    assert transaction is not None
    assert transaction.state is State.BROKEN
    with pytest.raises(SyncError, match="holds no proven version"):
        await c.ports[0].weight_version()
    c.ports[0].faults.clear()
    await c.publisher.publish(2)
    c.check(2)
    await engine.step_once()


async def test_one_bad_replica_can_hold_back_all(cluster: Make) -> None:
    c = cluster(config=CONFIG.model_copy(update={"on_replica_failure": "abort"}))
    await c.publisher.publish(1)
    c.source.step()
    c.ports[1].faults["prove"] = raising
    with pytest.raises(SyncError, match="prove failed on replica 1: ConnectionResetError"):
        await c.publisher.publish(2)
    c.check(1, 1, trainer_moved=True)
    assert "commit" not in c.ports[0].calls[c.ports[0].calls.index("commit") + 1 :]
    c.ports[1].faults.clear()
    await c.publisher.publish(2)
    c.check(2, 2)


async def test_no_replica_commits_before_every_replica_has_proven(cluster: Make) -> None:
    c = cluster()
    order: list[tuple[int, str]] = []
    for port in c.ports:
        for phase in ("prove", "commit"):

            async def note(argument: Any, who: int = port.replica_id, phase: str = phase) -> Any:
                order.append((who, phase))
                return argument

            port.faults[phase] = note
    await c.publisher.publish(1)
    assert [phase for _, phase in order] == ["prove", "prove", "commit", "commit"]


async def test_two_publications_at_once_are_refused(cluster: Make) -> None:
    c = cluster()
    first = asyncio.create_task(c.publisher.publish(1))
    await asyncio.sleep(0)
    with pytest.raises(SyncError, match="version 2 was to be published while version 1 is under way"):
        await c.publisher.publish(2)
    await first
    c.check(1, 1)
    with pytest.raises(SyncError, match="version 1 was to be published after version 1"):
        await c.publisher.publish(1)


async def test_two_trainers_cannot_publish_into_one_replica(cluster: Make) -> None:
    c = cluster()
    await c.publisher.publish(1)
    other = c.new_publisher(1)
    c.source.step()
    waiting = asyncio.Event()

    async def meanwhile(bucket: Bucket) -> Bucket:
        if not waiting.is_set():
            waiting.set()
            with pytest.raises(SyncError, match="has version 2 open and was asked to open 2"):
                await c.ports[0].inner.open(
                    Manifest(weight_version=2, base_version=None, tensors=c.source.weight_specs())
                )
        return bucket

    c.ports[0].faults["receive"] = meanwhile
    await c.publisher.publish(2)
    assert waiting.is_set()
    c.check(2, 2)
    other.close()


# ---- the trainer fails


def missing(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors.items())[:-1]


def doubled(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from [*tensors.items(), next(iter(tensors.items()))]


def unannounced(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from [*tensors.items(), ("model.extra", torch.zeros(1))]


def other_dtype(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, tensor.float()) for name, tensor in tensors.items())


def breaking(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    yield from list(tensors.items())[:9]
    raise RuntimeError("NCCL communicator was aborted")


@pytest.mark.parametrize(
    ("export", "message"),
    [
        (missing, "export ended without 1 tensors: lm_head.weight"),
        (doubled, "exported model.embed_tokens.weight twice"),
        (unannounced, "exported model.extra without announcing it"),
        (other_dtype, "exported model.embed_tokens.weight as float32"),
        (breaking, "failed at bucket .*NCCL communicator was aborted"),
    ],
)
@pytest.mark.parametrize("by_reference", [False, True])
async def test_a_fault_of_the_export_leaves_every_replica_serving_the_old_version(
    cluster: Make, export: Callable[..., Any], message: str, by_reference: bool
) -> None:
    c = cluster()
    if by_reference:
        c.publisher = Publisher(c.source, c.ports, CONFIG)
    await c.publisher.publish(1)
    if by_reference:
        c.source.tensors = {name: tensor.clone() for name, tensor in c.source.tensors.items()}
    c.source.step()
    sound = c.source.export_weights
    c.source.export_weights = lambda: export(c.source.tensors)  # type: ignore[method-assign]
    with pytest.raises(SyncError, match=message):
        await c.publisher.publish(2)
    assert not c.publisher.quarantined
    for engine in c.engines:
        assert engine.version == 1
        await engine.step_once()
        assert all(len(weights) == 1 for weights in engine.steps.values())
    c.source.export_weights = sound  # type: ignore[method-assign]
    await c.publisher.publish(2)
    c.check(2, 2)


async def test_an_export_that_hangs_passes_its_deadline(cluster: Make) -> None:
    c = cluster(config=CONFIG.model_copy(update={"export_deadline_s": 0.05}))
    release = threading.Event()

    def stuck() -> Iterator[tuple[str, Tensor]]:
        release.wait(20)
        yield from c.source.tensors.items()

    c.source.export_weights = stuck  # type: ignore[method-assign]
    for version in (1, 2):  # the second one waits behind the first, which hangs on
        with pytest.raises(
            DeadlineError, match=f"did not export bucket 0 of version {version} within 0.05 s"
        ):
            await c.publisher.publish(version)
    release.set()
    assert c.publisher.close() == ""
    assert all("receive" not in port.calls for port in c.ports), "what comes late is sent to nobody"
    c.check(0, 0, trainer_moved=True)


@pytest.mark.parametrize("tensor_idx", [0, 3])
async def test_an_export_that_hangs_through_the_close_reads_nothing_more_afterwards(
    cluster: Make, tensor_idx: int
) -> None:
    """No thread is left that reads weights which a later run, or a later step, writes; and the caller is told."""
    deadlines = {"export_deadline_s": 0.05, "abort_deadline_s": 0.05}
    c = cluster(config=CONFIG.model_copy(update=deadlines))
    release, ended = threading.Event(), threading.Event()
    read: list[str] = []

    def stuck() -> Iterator[tuple[str, Tensor]]:
        try:
            for idx, (name, tensor) in enumerate(c.source.tensors.items()):
                if idx == tensor_idx:
                    release.wait(20)
                read.append(name)
                yield name, tensor
        finally:
            ended.set()

    c.source.export_weights = stuck  # type: ignore[method-assign]
    with pytest.raises(DeadlineError):
        await c.publisher.publish(1)
    queued = c.publisher._export.submit(lambda: read.append("a call that waited behind it"))
    assert "hangs" in c.publisher.close()
    assert len(read) == tensor_idx
    release.set()
    assert await asyncio.to_thread(ended.wait, 20)
    assert c.publisher.close() == ""
    assert len(read) == tensor_idx + 1 and queued.cancelled()
    c.check(0, 0, trainer_moved=True)


async def test_a_close_waits_for_what_the_export_thread_is_at(cluster: Make) -> None:
    c = cluster()
    began, release = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        release.wait(20)

    call = c.publisher._export.submit(slow)
    assert await asyncio.to_thread(began.wait, 20)
    closing = asyncio.create_task(asyncio.to_thread(c.publisher.close))
    await asyncio.sleep(0.05)
    assert not closing.done()
    release.set()
    assert await closing == "" and call.done()


async def test_a_push_that_carries_the_old_bits_is_an_error_when_the_trainer_moved(cluster: Make) -> None:
    """A delivered payload that never changes: adapters dropped on the way, a stale copy."""
    c = cluster()
    await c.publisher.publish(1)
    with pytest.raises(SyncError, match="all 17 tensors of version 2 equal version 1 bit for bit"):
        await c.publisher.publish(2)
    c.check(1, 1)
    report = await c.publisher.publish(2, moved=False)
    assert report.changed_frac == 0.0
    c.check(2, 2)


@pytest.mark.parametrize("scheme", ["int8", "fp8_block"])
async def test_a_move_that_no_code_resolves_is_published_and_an_export_that_stands_still_is_not(
    scheme: Scheme,
) -> None:
    trained = FakeSource(tiny_tensors())
    weight = trained.tensors["model.layers.0.self_attn.q_proj.weight"].view(-1)
    weight[9] = 0  # its code stays 0 whatever follows
    engine = StepEngine(fused_engine(is_tied=False))
    publisher = Publisher(
        QuantizedSource(trained, scheme), [InprocPort(engine, quantize=scheme)], SyncConfig(quantize=scheme)
    )
    try:
        await publisher.publish(1)
        weight[9] = 1e-6
        assert (await publisher.publish(2)).changed_frac == 0
        with pytest.raises(SyncError, match="version 3 equal version 2 bit for bit"):
            await publisher.publish(3)
        weight[9] = 2e-6
        await publisher.resync(0)  # which publishes nothing: the move is still to come
        assert (await publisher.publish(3)).committed == (0,)
        assert engine.version == 3
    finally:
        publisher.close()
        engine.close()


async def test_bits_that_changed_without_an_update_are_an_error(cluster: Make) -> None:
    """Where the trainer says that nothing moved, a version is the one before it bit for bit, or nothing is published:
    a write besides the optimizer, or an update that nobody reported."""
    c = cluster()
    await c.publisher.publish(1)
    name = "model.layers.0.self_attn.q_proj.weight"
    c.source.tensors[name][0, 0] += 1
    with pytest.raises(SyncError, match=rf"1 tensors \({name}\) of version 2 differ from version 1"):
        await c.publisher.publish(2, moved=False)
    c.check(1, 1, trainer_moved=True)
    await c.publisher.publish(2)
    c.check(2, 2)


async def test_adapter_tensors_are_counted(cluster: Make) -> None:
    source = FakeSource(
        {"q.lora_A.weight": torch.ones(2, 2), "q.lora_B.weight": torch.zeros(2, 2), "b": torch.ones(1)}
    )
    from rollbook.sync.layout import MappedWeights, Place

    live = {name: torch.zeros_like(tensor) for name, tensor in source.tensors.items()}
    places = {name: Place(parameter=name, shape=tuple(t.shape)) for name, t in live.items()}
    live["qkv"], places["qkv"] = torch.zeros(1), Place(parameter="qkv", shape=(1,))
    source.tensors["qkv"] = torch.zeros(1)
    engine = StepEngine(MappedWeights(live, places))
    publisher = Publisher(source, [InprocPort(engine)], CONFIG)
    assert (await publisher.publish(1)).num_adapter_tensors == 2
    engine.close()


async def test_a_trainer_killed_after_one_commit_finds_the_replicas_and_brings_them_together(
    cluster: Make,
) -> None:
    c = cluster()
    await c.publisher.publish(1)
    c.source.step()
    committed, commit = asyncio.Event(), c.ports[0].inner.commit

    async def noted() -> CommitReport:  # the label changes on the engine's thread before the commit is over
        report = await commit()
        committed.set()
        return report

    c.ports[0].inner.commit = noted  # type: ignore[method-assign]
    c.ports[1].faults["commit"] = hanging
    dying = asyncio.create_task(c.publisher.publish(2))
    await committed.wait()
    dying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dying
    assert [engine.version for engine in c.engines] == [2, 1]
    for engine in c.engines:
        await engine.step_once()

    c.ports[1].faults.clear()
    c.source.step(1.25)  # the restarted trainer repeats the step and does not end in the same bits
    restarted = c.new_publisher(1)
    await restarted.publish(3)
    c.publisher = restarted
    c.check(3, 3)
    assert not restarted.quarantined


async def test_a_publication_cancelled_on_the_way_changes_nothing(cluster: Make) -> None:
    c = cluster()
    await c.publisher.publish(1)
    c.source.step()
    for phase in ("open", "receive", "prove"):
        c.ports[1].faults = {phase: hanging}
        task = asyncio.create_task(c.publisher.publish(2))
        while phase not in c.ports[1].calls[-1:]:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for engine in c.engines:
            assert engine.version == 1
            await engine.step_once()
        c.ports[1].calls.clear()
    c.ports[1].faults.clear()
    await c.publisher.publish(2)
    c.check(2, 2)


async def test_an_abort_waits_for_a_proof_that_was_given_up_and_still_runs(cluster: Make) -> None:
    c = cluster(1)
    port, source, engine = c.ports[0].inner, c.source, c.engines[0]
    await port.open(Manifest(weight_version=1, base_version=None, tensors=source.weight_specs()))
    transaction, order, released = port.transaction, list[str](), threading.Event()
    assert transaction is not None
    abort = transaction.abort

    def prove(digests: Digests) -> None:
        released.wait()
        order.append("proved")

    def noted() -> None:
        order.append("aborted")
        abort()

    transaction.prove, transaction.abort = prove, noted  # type: ignore[method-assign]
    proving = asyncio.ensure_future(port.prove({}))
    await asyncio.sleep(0)
    proving.cancel()
    aborting = asyncio.ensure_future(port.abort())
    await asyncio.sleep(0)
    await engine.step_once()  # whatever was queued before it has been carried out
    released.set()
    await aborting
    assert order == ["proved", "aborted"]


async def test_an_engine_that_was_paused_for_a_direct_publication_serves_again_after_its_abort(
    cluster: Make,
) -> None:
    c = cluster(1, staging="direct")
    specs = c.source.weight_specs()
    await c.ports[0].open(Manifest(weight_version=1, base_version=None, tensors=specs))
    assert not c.engines[0].is_serving
    await c.ports[0].abort()
    assert c.engines[0].is_serving


async def test_a_commit_cut_off_in_the_middle_takes_the_replica_out(cluster: Make) -> None:
    """The deadline passes while the swap runs on the engine's thread: no token may follow under either label."""
    c = cluster(1)
    await c.publisher.publish(1)
    c.publisher.config = CONFIG.model_copy(update={"commit_deadline_s": 0.05, "abort_deadline_s": 0.05})
    c.source.step()
    engine, release = c.engines[0], threading.Event()
    write = engine.live.write

    def slow(name: str, tensor: Tensor) -> None:
        release.wait(20)
        write(name, tensor)

    engine.live.write = slow  # type: ignore[method-assign]
    with pytest.raises(SyncError, match="did not answer to commit"):
        await c.publisher.publish(2)  # the engine's thread still hangs in the swap
    release.set()
    with pytest.raises(SyncError, match="holds no proven version"):
        await c.ports[0].weight_version()
    assert not engine.is_serving
    assert all(len(weights) == 1 for weights in engine.steps.values())
    engine.live.write = write  # type: ignore[method-assign]
    c.publisher.config = CONFIG
    await c.publisher.publish(2)
    c.check(2)
    await engine.step_once()


async def test_an_engine_that_ends_before_its_commit_says_so_and_is_not_waited_for(cluster: Make) -> None:
    c = cluster()
    await c.publisher.publish(1)
    c.source.step()

    async def ends(_: Any) -> Any:
        async def refused(_: Callable[[], Any]) -> Any:
            raise EngineDownError("the engine of replica 0 ended", "restart it")

        c.engines[0].run_between_steps = refused  # type: ignore[method-assign]

    c.ports[0].faults["commit"] = ends
    report = await c.publisher.publish(2)  # its deadline is beyond this test's
    assert report.quarantined == {0: "the engine of replica 0 ended"}
    assert report.committed == (1,)


# ---- resync and deltas


async def test_resync_brings_one_replica_back_at_the_version_of_the_others(cluster: Make) -> None:
    c = cluster()
    with pytest.raises(SyncError, match="before the first publication"):
        await c.publisher.resync(1)
    await c.publisher.publish(1)
    c.source.step()
    c.ports[1].faults["receive"] = raising
    await c.publisher.publish(2)
    c.ports[1].faults.clear()
    report = await c.publisher.resync(1)
    assert (report.committed, report.weight_version) == ((1,), 2)
    c.check(2, 2)
    c.source.step()
    with pytest.raises(SyncError, match="no longer those published as version 2"):
        await c.publisher.resync(1)
    c.source.step(1 / 1.5)


async def test_a_replica_can_be_re_synced_after_a_publication_that_nobody_took(cluster: Make) -> None:
    c = cluster(1)
    await c.publisher.publish(1)
    c.ports[0].faults["prove"] = raising
    with pytest.raises(SyncError, match="prove failed on replica 0"):
        await c.publisher.publish(2, moved=False)
    c.ports[0].faults.clear()
    report = await c.publisher.resync(0)
    assert (report.weight_version, report.committed) == (1, (0,))
    assert not c.publisher.quarantined
    c.source.step()
    await c.publisher.publish(2)
    c.check(2)


async def test_deltas_send_what_changed_and_fall_back_to_everything_on_any_doubt(cluster: Make) -> None:
    c = cluster(config=CONFIG.model_copy(update={"delta": True}))
    q = "model.layers.0.self_attn.q_proj.weight"
    full = await c.publisher.publish(1)
    assert full.base_version is None
    c.source.tensors[q][0, 0] = float("-inf")
    report = await c.publisher.publish(2)
    num_elements = sum(tensor.numel() for tensor in c.source.tensors.values())
    assert report.base_version == 1
    assert report.changed_frac == pytest.approx(1 / num_elements)
    assert report.sent_bytes == 256  # one padded entry of 6 bytes
    c.check(2, 2)

    c.source.tensors[q][0, 0] = -0.0
    c.ports[1].faults["prove"] = raising
    assert (await c.publisher.publish(3)).base_version == 2
    c.ports[1].faults.clear()
    c.source.step()
    report = await c.publisher.publish(4)  # replica 1 must catch up: everything goes to both
    assert report.base_version is None
    c.check(4, 4)
    c.source.step()
    assert (await c.publisher.publish(5)).base_version == 4
    c.check(5, 5)

    c.engines[0].live.parameters["qkv"][0, 0] += 1  # somebody loads weights behind our back
    c.source.step()
    report = await c.publisher.publish(6)
    assert report.committed == (1,)
    assert f"no longer version 5: {q} changed" in report.quarantined[0]
    assert not c.engines[0].is_serving or c.engines[0].version == 5
    c.source.step()
    await c.publisher.publish(7)
    assert [engine.version for engine in c.engines] == [7, 7]
    assert live_digests(c.engines[0].live) == c.source_digests()


# ---- one replica after the other


async def test_a_rolling_commit_holds_one_replica_at_a_time_and_after_all_have_proven(cluster: Make) -> None:
    c = cluster(num_replicas=3, config=CONFIG.model_copy(update={"commit_order": "rolling"}))
    seen: list[tuple[int, ...]] = []

    for port in c.ports:

        async def note(argument: Any) -> Any:
            assert all("prove" in other.calls for other in c.ports)
            seen.append(tuple(engine.version for engine in c.engines))
            return argument

        port.faults["commit"] = note
    c.source.step()
    report = await c.publisher.publish(1)
    assert seen == [(0, 0, 0), (1, 0, 0), (1, 1, 0)]
    assert report.committed == (0, 1, 2)
    c.check(1, 1, 1)


async def test_a_replica_that_fails_its_turn_leaves_the_others_theirs(cluster: Make) -> None:
    c = cluster(num_replicas=3, config=CONFIG.model_copy(update={"commit_order": "rolling"}))
    c.ports[1].faults["commit"] = raising
    c.source.step()
    report = await c.publisher.publish(1)
    assert report.committed == (0, 2)
    assert list(report.quarantined) == [1]
