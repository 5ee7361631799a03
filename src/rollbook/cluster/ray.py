"""Trainer ranks and replicas as Ray actors, each behind the face of its local counterpart.

    driver: Controller ── RemoteTrainer ────calls, batches────► TrainerRank 0..N-1   Trainer, divided by FSDP2
                       ── RemotePublisher ──version───────────► TrainerRank 0        Publisher ─┐ buckets, by
                       ── Router ── RemoteEngine ──requests───► ReplicaActor 0..M-1  engine ◄───┘ sync.transport

Weights never pass through Ray's object store: rank 0 publishes to the replicas, by shared memory or a disk. Each
call has a deadline and names the actor and the call when it passes. A replica that dies is started again, re-synced in
full and put back; its requests go to another one or wait for it. A trainer rank that dies ends the attempt
(`TrainerDownError`): the run goes on from its last checkpoint. What passes through Ray is pickled, and Ray's ports are
its own affair, guarded by its token; ours listen on loopback where all actors are on one machine.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import ray
import torch
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from rollbook.cluster.config import ClusterConfig
from rollbook.config.environment import set_environment
from rollbook.config.run_config import RunConfig
from rollbook.errors import (
    ConfigError,
    DeadlineError,
    EngineDownError,
    EngineError,
    RunError,
    SyncError,
    TrainerDownError,
)
from rollbook.modeling.load import DTYPES, LoadedModel, ModelFacts, load_model, load_tokenizer
from rollbook.modeling.lora import adapter_tensors
from rollbook.modeling.tokenizer import Tokenizer
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Values
from rollbook.rollout.engine import EngineStats, GenerateRequest, PauseMode, Response
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.router import Router
from rollbook.sync.broadcast import BroadcastGroup, BroadcastReceiver, BroadcastSender
from rollbook.sync.digest import digest, fold
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import PublicationReport, Publisher
from rollbook.sync.remote import RemotePort, ReplicaServer
from rollbook.sync.transport import Receiver, Sender
from rollbook.trainer.objective import CriticObjective, NotingObjective, Objective
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainBatch
from rollbook.weights import TensorSpec

SETTLE_S = 5.0
"""After one rank raised, the others may take this long to come to their own end."""
CLOSE_S = 5.0
"""How long rank 0 may take to give its shared memory back."""
MAX_CONCURRENT = 4096
"""Calls that one replica may have open."""


# ---- inside the actors


class TrainerRank:
    """One rank of the trainer; rank 0 also publishes. Calls are carried out one at a time, in their order."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.trainer: Trainer
        self.publisher: Publisher | None = None
        self._loop = asyncio.new_event_loop()
        self._sender: Sender | None = None

    def free_port(self) -> tuple[str, int]:
        """Where the ranks meet: rank 0's host, and a port of it."""
        import socket

        host = ray.util.get_node_ip_address()
        with socket.socket() as listener:
            listener.bind((host, 0))
            return host, int(listener.getsockname()[1])

    def build(self, store: str, timeout_s: float, keywords: dict[str, Any]) -> RemoteFacts:
        """Meet the other ranks and make the trainer.

        Raises:
            ConfigError: the model cannot be loaded.
        """
        device = torch.device(keywords["model_config"].device)
        ranks = ALONE
        if self.size > 1:
            import torch.distributed as dist

            if device.type == "cuda":
                torch.cuda.set_device(device.index or 0)
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                init_method=store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=timeout_s),
            )
            ranks = Ranks(dist.group.WORLD, device)
        self.trainer = Trainer(**keywords, ranks=ranks)
        model = self.trainer.model
        return RemoteFacts(
            facts=model.facts,
            source=model.source,
            dtype=model.dtype,
            hf_config=model.hf_config(),
            specs=self.trainer.weight_specs(),
            base_digest=base_digest(model),
        )

    def pid(self) -> int:
        return os.getpid()

    def do(self, method: str, *args: Any, **keywords: Any) -> Any:
        """A method of the trainer whose answer is small."""
        return self._mine(getattr(self.trainer, method)(*args, **keywords))

    def fill(self, method: str, batch: TrainBatch, name: str) -> Any:
        """A forward pass: its readings, and what it wrote into each sequence."""
        values = getattr(self.trainer, method)(batch)
        return self._mine((values, [getattr(s, name) for s in batch.sequences]))

    def update(self, method: str, batch: TrainBatch, objective: Any, keywords: dict[str, Any]) -> Any:
        """Optimizer updates: their readings, and what the objective noted."""
        values = getattr(self.trainer, method)(batch, objective, **keywords)
        noted = objective.noted if isinstance(objective, NotingObjective) else {}
        return self._mine((values, {i: row.float().cpu().numpy() for i, row in noted.items()}))

    def state_dict(self) -> Any:
        return self._mine(_on_host(self.trainer.state_dict()))

    def reset_moments(self) -> None:
        self.trainer.optimizer.reset_moments()

    def _mine(self, answer: Any) -> Any:
        """Rank 0 answers for all."""
        return answer if self.rank == 0 else None

    # ---- publications

    def open_publisher(self, config: RunConfig, addresses: Sequence[ReplicaAddress], meeting: str) -> None:
        sync = config.sync
        if sync.transport == "disk":
            from rollbook.sync.disk import DiskSender

            self._sender = DiskSender(sync.disk_dir, self.trainer.weight_specs())
        elif sync.transport == "broadcast":
            self._sender = BroadcastSender(join_broadcast(config, meeting, rank=0))
        else:
            from rollbook.sync.shm import ShmSender

            self._sender = ShmSender(sync.shm_dir)
        self._stream = FinishedStream(self.trainer)
        ports = [self._port(address) for address in addresses]
        self.publisher = Publisher(self._stream, ports, sync, buffers=self._sender.buffer)

    def set_port(self, address: ReplicaAddress) -> None:
        """A replica was started again: it listens elsewhere and holds nothing."""
        assert self.publisher is not None
        if isinstance(self._sender, BroadcastSender):
            self._sender.dissolve()
        self.publisher.ports[address.replica_id] = self._port(address)
        self.publisher.quarantined[address.replica_id] = "it was started again"

    def publish(
        self, weight_version: int, moved: bool, quarantined: Mapping[int, str], only: int | None
    ) -> tuple[PublicationReport | RunError, dict[int, str]]:
        """One publication (or, with `only`, the re-sync of one replica), and who is out of service after it."""
        publisher = self.publisher
        assert publisher is not None
        publisher.quarantined.update(quarantined)
        self._stream.begin()
        answer: PublicationReport | RunError
        try:
            work = publisher.publish(weight_version, moved=moved) if only is None else publisher.resync(only)
            answer = self._loop.run_until_complete(work)
        except RunError as error:
            answer = error
        if self.size > 1:
            self._stream.finish()
        return answer, dict(publisher.quarantined)

    def close(self) -> None:
        """Give shared memory back."""
        if self.publisher is not None:
            self.publisher.close()
        if self._sender is not None:
            self._sender.close()

    def drain(self) -> None:
        """Another rank's part of a publication."""
        for _ in self.trainer.export_weights():
            pass

    def _port(self, address: ReplicaAddress) -> RemotePort:
        assert self._sender is not None
        return RemotePort(
            address.replica_id, self._sender, host=address.host, port=address.port, token=address.token
        )


class FinishedStream:
    """The trainer's export, which rank 0 always goes through to its end: the others do too."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._stream: Iterator[tuple[str, Tensor]] | None = None

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self.trainer.weight_specs()

    def begin(self) -> None:
        self._stream = None

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        self._stream = self.trainer.export_weights()
        return self._stream

    def finish(self) -> None:
        for _ in self._stream or self.trainer.export_weights():
            pass


class ReplicaActor:
    """One engine and the server through which its weights come."""

    def __init__(
        self,
        config: RunConfig,
        replica_id: int,
        *,
        dtype: str,
        eos_ids: tuple[int, ...],
        host: str,
        base_digest: str,
    ) -> None:
        self.config, self.replica_id = config, replica_id
        self._base_digest = base_digest
        self._host = host or ray.util.get_node_ip_address()
        self._dtype, self._eos_ids = dtype, eos_ids

    async def start(self) -> ReplicaAddress:
        """Load the model, start the engine and listen for publications; its weights come by the first of them."""
        config, rollout = self.config, self.config.rollout
        if rollout.num_threads:
            torch.set_num_threads(rollout.num_threads)
        model = await asyncio.to_thread(self._load)
        self.engine = NativeEngine(
            model,
            rollout,
            replica_id=self.replica_id,
            eos_token_ids=self._eos_ids,
            tokenizer=load_tokenizer(config.model) if rollout.stop_strings else None,
        )
        await self.engine.start()
        await self.engine.sleep(2)  # nothing is sampled from these weights: they are of no version
        await self.engine.wake()
        receiver: Receiver
        if config.sync.transport == "disk":
            from rollbook.sync.disk import DiskReceiver

            receiver = DiskReceiver(config.sync.disk_dir)
        elif config.sync.transport == "broadcast":
            receiver = BroadcastReceiver(None, max_bucket_bytes=config.sync.bucket_bytes)
        else:
            from rollbook.sync.shm import ShmReceiver

            receiver = ShmReceiver(config.sync.shm_dir)
        token = secrets.token_hex(16)
        in_message_bytes = config.sync.bucket_bytes if config.sync.transport == "broadcast" else 0
        self.server = ReplicaServer(
            InprocPort(self.engine, staging=config.sync.staging),
            receiver,
            token=token,
            max_payload_bytes=in_message_bytes,
        )
        port = await self.server.start(self._host)
        return ReplicaAddress(
            replica_id=self.replica_id, host=self._host, port=port, token=token, pid=os.getpid()
        )

    def _load(self) -> LoadedModel:
        """
        Raises:
            EngineError: adapters are published alone, and the base here is another one than the trainer's.
        """
        config, device = self.config.model, self.config.rollout.device
        if not self._base_digest:
            whole = config.model_copy(update={"lora": None})  # adapters come merged
            return load_model(whole, dtype=self._dtype, device=device, with_tokenizer=False)
        model = load_model(
            config, dtype="float32", device=device, with_tokenizer=False
        )  # as the trainer does
        found = base_digest(model)
        if found != self._base_digest:
            raise EngineError(
                f"the base of replica {self.replica_id} has the digest {found}, the trainer's {self._base_digest}",
                "adapters alone need one base everywhere: give all hosts the same files, or use "
                "model.lora.publish = 'merged'",
            )
        for adapter in adapter_tensors(model).values():
            adapter.data = adapter.data.to(DTYPES[self._dtype])
        return model

    async def join(self, meeting: str) -> None:
        """Meet the trainer and the other replicas, before the first publication."""
        group = await asyncio.to_thread(join_broadcast, self.config, meeting, rank=self.replica_id + 1)
        self.server.receiver = BroadcastReceiver(group, max_bucket_bytes=self.config.sync.bucket_bytes)

    async def do(self, method: str, *args: Any) -> Any:
        return await getattr(self.engine, method)(*args)


def base_digest(model: LoadedModel) -> str:
    """Of the tensors that no publication carries: the base, where adapters are published alone. Else empty."""
    published = model.published_shapes()
    base = {name: digest(t) for name, t in model.named_tensors().items() if name not in published}
    return fold(base) if model.lora is not None and model.lora.publish == "adapter" else ""


def join_broadcast(config: RunConfig, meeting: str, *, rank: int) -> BroadcastGroup:
    """The group of publications: trainer rank 0, and every replica behind it. Between GPUs by NCCL, else by gloo.

    Args:
        meeting: path of a file, or host:port of rank 0.
    """
    devices = (config.model.device, config.rollout.device)
    is_nccl = all(name.startswith("cuda") for name in devices) and config.run.schedule == "separate_async"
    host, _, port = meeting.rpartition(":")
    return BroadcastGroup.create(
        "nccl" if is_nccl else "gloo",
        rank=rank,
        size=config.rollout.num_replicas + 1,
        device=torch.device(devices[min(rank, 1)]) if is_nccl else torch.device("cpu"),
        deadline_s=config.cluster.start_deadline_s,
        **({"file": meeting} if meeting.startswith("/") else {"host": host, "port": int(port)}),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """Where a replica takes publications."""

    replica_id: int
    host: str
    port: int
    token: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFacts:
    """What the driver must know of a model that lives elsewhere."""

    facts: ModelFacts
    source: str
    dtype: torch.dtype
    hf_config: dict[str, Any]
    specs: tuple[TensorSpec, ...]
    base_digest: str
    """Of what adapters stand on, where they are published alone; else empty."""


# ---- the driver's side


@dataclass(slots=True, kw_only=True)
class RemoteModel:
    """The readable part of `LoadedModel`."""

    facts: ModelFacts
    source: str
    dtype: torch.dtype
    device: torch.device
    """Of this process: it computes nothing, and owns no memory of an accelerator."""
    tokenizer: Tokenizer
    config: dict[str, Any]

    def hf_config(self) -> dict[str, Any]:
        return dict(self.config)


class RemoteTrainer(Trainer):
    """A trainer whose ranks are actors: every method calls all of them, and rank 0 answers."""

    def __init__(self, actors: Sequence[Any], config: RunConfig, facts: RemoteFacts, tokenizer: Tokenizer):
        self.actors = list(actors)
        self.config = config.trainer
        self.deadline_s = config.cluster.step_deadline_s
        self.max_response_tokens = config.rollout.max_response_tokens
        self.temperature = config.rollout.temperature
        self.export_dtype = getattr(torch, facts.specs[0].dtype)
        self.specs = facts.specs
        remote = RemoteModel(
            facts=facts.facts,
            source=facts.source,
            dtype=facts.dtype,
            device=torch.device("cpu"),
            tokenizer=tokenizer,
            config=facts.hf_config,
        )
        self.model = cast(LoadedModel, remote)
        self.optimizer = cast(Any, _RemoteOptimizer(self))
        self._lock = threading.Lock()
        self._lost = ""

    def fill_proximal(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_proximal", batch, "proximal_logprobs")

    def fill_reference(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_reference", batch, "reference_logprobs")

    def fill_teacher(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_teacher", batch, "teacher_logprobs")

    def fill_values(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_values", batch, "values")

    def update(
        self,
        batch: TrainBatch,
        objective: Objective,
        *,
        lr: float | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Values:
        assert before_step is None, "the ranks cannot call back"
        values, noted = self.call("update", "update", ray.put(batch), objective, {"lr": lr})
        if isinstance(objective, NotingObjective):
            objective.noted.update({i: torch.tensor(row) for i, row in noted.items()})
        return cast(Values, values)

    def update_critic(self, batch: TrainBatch, objective: CriticObjective) -> Values:
        values, _ = self.call("update", "update_critic", ray.put(batch), objective, {})
        return cast(Values, values)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise SyncError("the weights are in other processes", "rank 0 publishes them itself")

    def save_model(self, folder: Path) -> None:
        self.call("do", "save_model", folder.absolute())

    def reset_moments(self) -> None:
        self.call("reset_moments")

    def state_dict(self) -> dict[str, Any]:
        return cast(dict[str, Any], self.call("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.call("do", "load_state_dict", ray.put(dict(state)))

    def freeze_reference(self) -> None:
        self.call("do", "freeze_reference")

    def offload(self) -> None:
        self.call("do", "offload")

    def onload(self) -> None:
        self.call("do", "onload")

    def _fill_remote(self, method: str, batch: TrainBatch, name: str) -> Values:
        values, rows = self.call("fill", method, ray.put(batch), name)
        for sequence, row in zip(batch.sequences, rows, strict=True):
            setattr(sequence, name, row)
        return cast(Values, values)

    def call(self, name: str, *args: Any) -> Any:
        """The same call on all ranks; rank 0's answer.

        Raises:
            RunError: what a rank raised.
            TrainerDownError: a rank is gone, or stopped in the middle of a collective.
            DeadlineError: a rank does not answer; names it and the call.
        """
        return self.each([(name, args)] * len(self.actors))

    def each(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
        """One call for each rank, as `call`."""
        if self._lost:
            raise _rank_lost(self._lost)
        with self._lock:  # every rank sees the calls in one order
            refs = {
                getattr(actor, name).remote(*args): Asked(rank, _label(name, args))
                for rank, (actor, (name, args)) in enumerate(zip(self.actors, calls, strict=True))
            }
        return self._answers(refs)

    def _answers(self, refs: Mapping[Any, Asked]) -> Any:
        waiting, answers = dict(refs), dict[int, Any]()
        ends_at_s = time.monotonic() + self.deadline_s
        failed: Exception | None = None
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(ends_at_s - time.monotonic(), 0.0))
            if not ready:
                break
            asked = waiting.pop(ready[0])
            try:
                answers[asked.rank] = ray.get(ready[0])
            except ray.exceptions.RayActorError as error:
                self._lose(f"rank {asked.rank} died in {asked.call}: {_first_line(error)}")
                raise _rank_lost(self._lost) from None
            except ray.exceptions.RayTaskError as error:
                if failed is None:
                    failed = _cause(error, f"rank {asked.rank} of the trainer failed in {asked.call}")
                    ends_at_s = time.monotonic() + SETTLE_S
        if waiting:
            late = ", ".join(f"rank {asked.rank} of the trainer ({asked.call})" for asked in waiting.values())
            if failed is not None:
                self._lose(f"{late} did not come to an end after {_first_line(failed)}")
                raise failed
            self._lose(f"{late} did not answer within {self.deadline_s:g} s")
            raise DeadlineError(
                self._lost,
                "look at its log, or raise cluster.step_deadline_s; "
                "`rollbook train --resume` continues from the last checkpoint",
            )
        if failed is not None:
            raise failed
        return answers[0]

    def _lose(self, why: str) -> None:
        """The ranks are out of step for good."""
        self._lost = why
        for actor in self.actors:
            ray.kill(actor)


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of one rank that is under way."""

    rank: int
    call: str


def _label(name: str, args: Sequence[Any]) -> str:
    """The method that a call comes down to."""
    return args[0] if name in ("do", "fill", "update") and args and isinstance(args[0], str) else name


class _RemoteOptimizer:
    def __init__(self, trainer: RemoteTrainer) -> None:
        self._trainer = trainer

    def reset_moments(self) -> None:
        self._trainer.reset_moments()


class RemotePublisher(Publisher):
    """Publications by rank 0 of the trainer, while the other ranks take part in its gathers."""

    def __init__(self, trainer: RemoteTrainer) -> None:
        self.trainer = trainer
        self.weight_version = 0
        self.quarantined: dict[int, str] = {}
        self.lost: dict[int, str] = {}
        """Replicas whose process is gone, and why, until another one takes their publications. That nobody answers at
        the old address is no reason of its own."""
        self.pool: RayPool | None = None
        """Asked whether a replica that missed a publication is dead."""
        self._in_turn = asyncio.Lock()
        self._checks: set[asyncio.Task[bool]] = set()

    @property
    def ports(self) -> dict[int, Any]:  # type: ignore[override]
        raise ConfigError(
            "the ports of the replicas are in the process of trainer rank 0",
            "drills and replays wrap parts of one process: use cluster.kind = 'inproc'",
        )

    async def publish(self, weight_version: int, *, moved: bool = True) -> PublicationReport:
        """A replica that dies in it misses it, is started again and re-synced in full. If no replica is left, the
        publication waits for the one that is started again.

        Raises:
            SyncError: no replica took it, and none of them is dead.
            EngineError: one died too often.
        """
        while True:
            try:
                report = await self._publish(weight_version, moved, None)
            except SyncError:
                if self.pool is None or not await self.pool.are_back(list(self.quarantined)):
                    raise
                continue
            if self.pool is not None and report.quarantined:
                check = asyncio.ensure_future(self.pool.are_back(list(report.quarantined)))
                check.add_done_callback(self._checked)
                self._checks.add(check)
            return report

    def _checked(self, check: asyncio.Task[bool]) -> None:
        self._checks.discard(check)
        if not check.cancelled():
            check.exception()  # a replica that stays down is out of service, and said so

    async def resync(self, replica_id: int) -> PublicationReport:
        return await self._publish(0, False, replica_id)

    async def set_port(self, address: ReplicaAddress) -> None:
        """Where a replica that was started again takes publications."""
        calls = [("set_port", (address,)), *[("pid", ())] * (len(self.trainer.actors) - 1)]
        async with self._in_turn:
            await asyncio.to_thread(self.trainer.each, calls)
        self.lost.pop(address.replica_id, None)
        self.quarantined[address.replica_id] = "it was started again"

    async def _publish(self, weight_version: int, moved: bool, only: int | None) -> PublicationReport:
        async with self._in_turn:
            first = ("publish", (weight_version, moved, dict(self.quarantined), only))
            calls = [first, *[("drain", ())] * (len(self.trainer.actors) - 1)]
            answer, quarantined = await asyncio.to_thread(self.trainer.each, calls)
        self.quarantined.clear()
        self.quarantined.update(quarantined | self.lost)
        if isinstance(answer, RunError):
            raise answer
        self.weight_version = answer.weight_version
        return replace(cast(PublicationReport, answer), quarantined=dict(self.quarantined))

    def close(self) -> None:
        for check in self._checks:
            check.cancel()


class RemoteEngine:
    """A replica in another process; implements `rollbook.rollout.engine.Engine`.

    Args:
        start_actor: makes a new actor.
        pool: told when the actor is gone.
    """

    def __init__(self, replica_id: int, config: RunConfig, start_actor: Callable[[], Any], pool: RayPool):
        self.replica_id = replica_id
        self.config = config
        self._start_actor = start_actor
        self._pool = pool
        self._actor: Any = None
        self._stats: EngineStats | None = None
        self.down = "it was not started"
        """Why it takes no call; empty while it does."""
        self.address: ReplicaAddress

    async def start(self) -> None:
        """
        Raises:
            EngineError: the model can't run there.
            DeadlineError: no answer in time.
        """
        self._actor = self._start_actor()
        self.address = await self._ask("start", (), self.config.cluster.start_deadline_s)
        self.down = ""

    async def join(self, meeting: str) -> None:
        """Into the group of publications (`sync.transport = "broadcast"`)."""
        await self._ask("join", (meeting,), self.config.cluster.start_deadline_s)

    async def close(self) -> None:
        if self._actor is not None:
            self.down = self.down or "it was closed"
            ray.kill(self._actor)

    async def generate(self, request: GenerateRequest) -> Response:
        """As NativeEngine. With no other replica to hand it to, the request waits until this one is back, and is
        made again: what is sampled depends on the request alone."""
        deadline_s = self.config.rollout.response_deadline_s + self.config.cluster.call_deadline_s
        while True:
            try:
                return cast(Response, await self._ask("do", ("generate", request), deadline_s))
            except EngineDownError:
                if not self._pool.is_last(self):
                    raise
                await self._pool.is_back(self)

    async def pause(self, mode: PauseMode = "keep") -> None:
        await self._do("pause", mode)

    async def resume(self) -> None:
        await self._do("resume")

    async def sleep(self, level: int = 1) -> None:
        await self._do("sleep", level)

    async def wake(self) -> None:
        await self._do("wake")

    async def reset_prefix_cache(self) -> None:
        await self._do("reset_prefix_cache")

    async def require_alive(self) -> None:
        """
        Raises:
            EngineDownError: its process is gone; the pool knows of it then.
        """
        await self._do("stats")

    async def stats(self) -> EngineStats:
        """The last ones known while it is down."""
        try:
            self._stats = await self._do("stats")
        except EngineDownError:
            if self._stats is None:
                raise
        return self._stats

    async def _do(self, method: str, *args: Any) -> Any:
        return await self._ask("do", (method, *args), self.config.cluster.call_deadline_s)

    async def _ask(self, name: str, args: tuple[Any, ...], deadline_s: float) -> Any:
        if self.down and name != "start":
            raise EngineDownError(f"replica {self.replica_id} is down: {self.down}", "it is started again")
        actor = self._actor
        ref = getattr(actor, name).remote(*args)
        label = _label(name, args)
        try:
            async with asyncio.timeout(deadline_s):
                return await asyncio.wrap_future(ref.future())
        except TimeoutError:
            ray.cancel(ref)
            raise DeadlineError(
                f"replica {self.replica_id} did not answer to {label} within {deadline_s:g} s",
                "look at the replica's log: a long step, a process that hangs; or raise cluster.call_deadline_s",
            ) from None
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except ray.exceptions.RayActorError as error:
            why = f"its process is gone: {_first_line(error)}"
            if actor is self._actor and not self.down:
                self.down = why
                self._pool.lost(self, why)
            raise EngineDownError(
                f"replica {self.replica_id} is down: {why}", "it is started again"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise _cause(error, f"replica {self.replica_id} failed in {label}") from None


@dataclass(slots=True, kw_only=True)
class RayPool:
    """The replicas, and what is done when one of them dies."""

    config: ClusterConfig
    recorder: Recorder
    publisher: RemotePublisher
    engines: list[RemoteEngine] = field(default_factory=list)
    router: Router | None = None
    _num_restarts: dict[int, int] = field(default_factory=dict)
    _restarts: dict[int, asyncio.Task[None]] = field(default_factory=dict)

    def lost(self, engine: RemoteEngine, why: str) -> None:
        """Out of service until it was started again and holds a proven version."""
        replica_id = engine.replica_id
        self.publisher.lost[replica_id] = self.publisher.quarantined[replica_id] = why
        if self.router is None:
            self.recorder.event("quarantined", replica_id=replica_id, why=why)
        else:
            self.router.announce(replica_id, why)
            if not self.is_last(engine):
                self.router.take_out(replica_id, why)
        self._restarts[replica_id] = asyncio.ensure_future(self._restart(engine))

    def is_last(self, engine: RemoteEngine) -> bool:
        """No other replica could take its requests."""
        out = {} if self.router is None else self.router.out_of_service
        return not any(not e.down and e.replica_id not in out for e in self.engines if e is not engine)

    async def is_back(self, engine: RemoteEngine) -> None:
        """
        Raises:
            EngineError: it could not be brought back.
        """
        restarting = self._restarts.get(engine.replica_id)
        if restarting is None:
            raise EngineError(f"replica {engine.replica_id} is down: {engine.down}", "resume the run")
        await asyncio.shield(restarting)

    async def are_back(self, replica_ids: Sequence[int]) -> bool:
        """Ask replicas that missed a publication whether they live, and wait until those that do not are started again.

        Returns:
            Whether one was.
        Raises:
            EngineError: it could not be brought back.
        """
        found_dead = False
        for engine in [engine for engine in self.engines if engine.replica_id in replica_ids]:
            try:
                await engine.require_alive()
            except EngineDownError:
                await self.is_back(engine)
                found_dead = True
        return found_dead

    async def _restart(self, engine: RemoteEngine) -> None:
        replica_id = engine.replica_id
        number = self._num_restarts[replica_id] = self._num_restarts.get(replica_id, 0) + 1
        if number > self.config.max_restarts:
            raise EngineError(
                f"replica {replica_id} died {number} times, the last time because {engine.down}",
                "look at its log; resume the run once the cause is mended, or raise cluster.max_restarts",
            )
        await engine.close()
        await engine.start()
        await self.publisher.set_port(engine.address)
        with suppress(SyncError):  # the trainer has moved on: the next publication brings it along
            report = await self.publisher.resync(replica_id)
            self.recorder.event("publication", **report.as_event())
            if self.router is not None and replica_id in report.committed:
                self.router.put_back(replica_id)

    async def close(self) -> None:
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        for engine in self.engines:
            await engine.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class RayParts:
    """A run's parts that live in actors."""

    trainer: RemoteTrainer
    publisher: RemotePublisher
    pool: RayPool


async def start_on_ray(
    config: RunConfig,
    recorder: Recorder,
    stack: AsyncExitStack,
    trainer_keywords: dict[str, Any],
    *,
    shares_device: bool,
) -> RayParts:
    """Start Ray where there is none, place the actors, and wait until all of them are ready.

    Args:
        trainer_keywords: of `Trainer`.
        shares_device: trainer rank i and replica i live on one device ("colocated"); else each pool has its own.
    Raises:
        ConfigError: the cluster has not the resources.
        DeadlineError: an actor does not start in time.
    """
    cluster = config.cluster
    num_ranks, num_replicas = cluster.num_trainer_ranks, config.rollout.num_replicas
    is_local = _connect(cluster, num_ranks + num_replicas, stack)
    train, rollout = _placements(config, shares_device=shares_device)
    groups = list({id(place.group): place.group for place in (*train, *rollout)}.values())
    for group in groups:
        stack.callback(remove_placement_group, group)
    _, late = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=cluster.start_deadline_s)
    if late:
        raise ConfigError(
            f"{num_ranks} trainer ranks and {num_replicas} replicas have no place: the cluster has "
            f"{ray.cluster_resources()}",
            "use fewer ranks or replicas, or add nodes",
        )
    make_rank, make_replica = ray.remote(TrainerRank), ray.remote(ReplicaActor)
    actors = [make_rank.options(**train[rank].options()).remote(rank, num_ranks) for rank in range(num_ranks)]
    stack.push_async_callback(_end, actors)
    store = ""
    if num_ranks > 1:
        store = await _meeting_point(actors[0], cluster, stack, is_local=is_local)
        store = f"file://{store}" if is_local else f"tcp://{store}"
    built = [actor.build.remote(store, cluster.step_deadline_s, trainer_keywords) for actor in actors]
    facts = [
        await _within(ref, f"rank {rank} of the trainer", "build", cluster.start_deadline_s)
        for rank, ref in enumerate(built)
    ]
    tokenizer = load_tokenizer(config.model, facts=facts[0].facts)
    trainer = RemoteTrainer(actors, config, facts[0], tokenizer)
    publisher = RemotePublisher(trainer)
    pool = publisher.pool = RayPool(config=cluster, recorder=recorder, publisher=publisher)
    stack.push_async_callback(pool.close)
    dtype = facts[0].specs[0].dtype
    for replica_id in range(num_replicas):

        def start_actor(replica_id: int = replica_id) -> Any:
            options = rollout[replica_id].options()
            made = make_replica.options(max_concurrency=MAX_CONCURRENT, **options)
            host = "127.0.0.1" if is_local else ""
            return made.remote(
                config,
                replica_id,
                dtype=dtype,
                eos_ids=tokenizer.eos_ids,
                host=host,
                base_digest=facts[0].base_digest,
            )

        pool.engines.append(RemoteEngine(replica_id, config, start_actor, pool))
    await asyncio.gather(*(engine.start() for engine in pool.engines))
    addresses = [engine.address for engine in pool.engines]
    meeting = ""
    if config.sync.transport == "broadcast":
        meeting = await _meeting_point(actors[0], cluster, stack, is_local=is_local)
    opening = actors[0].open_publisher.remote(config, addresses, meeting)
    joining = [engine.join(meeting) for engine in pool.engines] if meeting else []
    await asyncio.gather(
        _within(opening, "rank 0 of the trainer", "open_publisher", cluster.start_deadline_s), *joining
    )
    return RayParts(trainer=trainer, publisher=publisher, pool=pool)


async def _meeting_point(
    first_rank: Any, cluster: ClusterConfig, stack: AsyncExitStack, *, is_local: bool
) -> str:
    """Where processes find each other: a file of this machine, or a port on the host of the trainer's first rank."""
    if is_local:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-ranks-"))
        return f"{folder}/store"
    host, port = await _within(first_rank.free_port.remote(), "rank 0", "free_port", cluster.start_deadline_s)
    return f"{host}:{port}"


def _connect(cluster: ClusterConfig, num_actors: int, stack: AsyncExitStack) -> bool:
    """Join the cluster, or start one on this machine; True for the latter."""
    if ray.is_initialized():
        return not cluster.address
    set_environment(RAY_USAGE_STATS_ENABLED="0")
    _silence()
    terminated = signal.getsignal(signal.SIGTERM)  # Ray takes it, and the run has its own end for it
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
    if cluster.address:
        ray.init(address=cluster.address, **common)
    else:
        ray.init(
            address="local",
            num_cpus=max(os.cpu_count() or 1, 2 * num_actors),
            include_dashboard=False,
            runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}},
            **common,
        )
    stack.callback(ray.shutdown)
    with suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGTERM, terminated)
    return not cluster.address


def _silence() -> None:
    """Ray writes about dead workers to stdout, whatever it is told about logs; their deaths are events of the run."""
    from ray._private import worker

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = lambda *args, **keywords: None


@dataclass(frozen=True, slots=True)
class Place:
    """A bundle of a placement group, and the share of its GPU that an actor takes."""

    group: Any
    bundle_idx: int
    num_gpus: float

    def options(self) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundle_idx)
        return {"num_cpus": 1, "num_gpus": self.num_gpus, "scheduling_strategy": strategy}


def _placements(config: RunConfig, *, shares_device: bool) -> tuple[list[Place], list[Place]]:
    """Of trainer ranks and of replicas: one pool whose bundles hold one of each, or two pools."""
    num_ranks, num_replicas = config.cluster.num_trainer_ranks, config.rollout.num_replicas
    train_gpus = float(config.model.device != "cpu")
    rollout_gpus = float(config.rollout.device != "cpu")
    if shares_device:
        bundle = {"CPU": 2.0, **({"GPU": 1.0} if train_gpus or rollout_gpus else {})}
        group = placement_group([bundle] * max(num_ranks, num_replicas), strategy="PACK")
        share = 0.5 if train_gpus and rollout_gpus else 1.0
        return (
            [Place(group, i, train_gpus * share) for i in range(num_ranks)],
            [Place(group, i, rollout_gpus * share) for i in range(num_replicas)],
        )

    def pool(count: int, gpus: float) -> list[Place]:
        bundle = {"CPU": 1.0, **({"GPU": gpus} if gpus else {})}
        group = placement_group([bundle] * count, strategy="PACK")
        return [Place(group, i, gpus) for i in range(count)]

    return pool(num_ranks, train_gpus), pool(num_replicas, rollout_gpus)


async def _within(ref: Any, actor: str, call: str, deadline_s: float) -> Any:
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(ref.future())
    except TimeoutError:
        raise DeadlineError(
            f"{actor} did not answer to {call} within {deadline_s:g} s",
            "look at its log, or raise cluster.start_deadline_s",
        ) from None
    except ray.exceptions.RayTaskError as error:
        raise _cause(error, f"{actor} failed in {call}") from None
    except ray.exceptions.RayActorError as error:
        raise TrainerDownError(f"{actor} died in {call}: {_first_line(error)}", "look at its log") from None


async def _end(actors: Sequence[Any]) -> None:
    """Let the trainer's ranks go; one that is busy or gone is not waited for long."""
    with suppress(RunError):
        await _within(actors[0].close.remote(), "rank 0 of the trainer", "close", CLOSE_S)
    for actor in actors:
        ray.kill(actor)


def _rank_lost(why: str) -> TrainerDownError:
    return TrainerDownError(
        f"the trainer lost a rank: {why}", "the run goes on from its last checkpoint; look at the rank's log"
    )


def _cause(error: Any, what: str) -> RunError:
    """What an actor raised, as it was raised there."""
    cause = error.cause
    if isinstance(cause, RunError):
        return cause
    return EngineError(f"{what}: {type(cause).__name__}: {_first_line(cause)}", "look at the actor's log")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _on_host(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().cpu()
    if isinstance(state, Mapping):
        return {name: _on_host(value) for name, value in state.items()}
    return state
