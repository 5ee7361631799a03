"""The engines of a run, each with the port through which its weights come: one function for each kind of engine.

    trainer ──Publisher──► port ──────────────────────────────► InprocPort ► engine          inproc
                           RemotePort ──loopback──► ReplicaServer ► InprocPort ► engine      shm, disk, broadcast
                           VllmPort ──► vLLM's worker processes                              shm, ipc

A new kind is a function here and a line in KINDS; `startable.py` says which configs it cannot serve.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from rollbook.config.run_config import RunConfig
from rollbook.modeling.lora import without_adapters
from rollbook.modeling.tokenizer import Tokenizer
from rollbook.rollout.engine import Engine
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.bucket import Buffers
from rollbook.sync.inproc import InprocPort, SwapEngine
from rollbook.sync.quantized import as_sent
from rollbook.sync.remote import RemotePort, ReplicaServer
from rollbook.sync.transport import Receiver, Sender
from rollbook.trainer.trainer import Trainer
from rollbook.weights import WeightPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine that runs, and how weights get into it."""

    engine: Engine
    port: WeightPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The trainer's half of a transport, shared by all replicas, and a half for each replica."""

    sender: Sender
    receivers: list[Receiver] = field(default_factory=list)
    """By replica id; empty where the engines' own processes have them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What replicas are made from."""

    config: RunConfig
    trainer: Trainer
    tokenizer: Tokenizer
    stack: AsyncExitStack
    """Closes what was started, last first."""
    in_turn: bool
    """Engine and trainer never compute at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """All engines of a run and their ports, by replica id."""

    engines: list[Engine]
    ports: list[WeightPort]
    buffers: Buffers | None
    """Where the publisher packs; None: tensors go by reference."""
    lent: Replica | None = None
    """Of `[lending]`: on the trainer's device, asleep, and none of the engines above."""


async def start_replicas(parts: Parts) -> Replicas:
    """All replicas of the config, started.

    Raises:
        EngineError: one cannot run here; says why.
    """
    link = await _open_link(parts)
    make = KINDS[parts.config.rollout.engine]
    count = parts.config.rollout.num_replicas
    made = [await make(parts, link, replica_id) for replica_id in range(count)]
    lent = await native_replica(_on_trainer(parts), link, count) if parts.config.lending.is_on else None
    return Replicas(
        engines=[replica.engine for replica in made],
        ports=[replica.port for replica in made],
        buffers=None if link is None else link.sender.buffer,
        lent=lent,
    )


def _on_trainer(parts: Parts) -> Parts:
    """The same for an engine on the trainer's device and threads."""
    config, lending = parts.config, parts.config.lending
    update = {
        "device": config.model.device,
        "num_threads": config.trainer.num_threads or 0,
        "num_slots": lending.num_slots or config.rollout.num_slots,
        "kv_pool_tokens": lending.kv_pool_tokens or config.rollout.kv_pool_tokens,
    }
    rollout = config.rollout.model_copy(update=update)
    return replace(parts, config=config.model_copy(update={"rollout": rollout}), in_turn=True)


async def native_replica(parts: Parts, link: Link | None, replica_id: int) -> Replica:
    """Our own engine, in this process."""
    config, rollout, model = parts.config, parts.config.rollout, parts.trainer.model
    engine = NativeEngine(
        without_adapters(model) if _takes_merged(config) else model,
        rollout,
        replica_id=replica_id,
        eos_token_ids=parts.tokenizer.eos_ids,
        tokenizer=parts.tokenizer if rollout.stop_strings else None,
        share_weights=parts.in_turn and _can_share_weights(config),
    )
    await engine.start()
    parts.stack.push_async_callback(engine.close)
    return Replica(engine=engine, port=await _port(parts, link, engine))


async def vllm_replica(parts: Parts, link: Link | None, replica_id: int) -> Replica:
    """vLLM, in this process or in its own. It starts from a config alone: its weights come by the first publication."""
    from rollbook.rollout.vllm.engine import VllmEngine
    from rollbook.rollout.vllm.port import VllmPort

    config, rollout, model = parts.config, parts.config.rollout, parts.trainer.model
    dtype = str(parts.trainer.export_dtype).removeprefix("torch.")
    folder = Path(parts.stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-vllm-")))
    model.save_config(folder, dtype)
    engine = VllmEngine(
        folder,
        rollout.model_copy(update={"dtype": dtype}),
        rollout.vllm.model_copy(update={"load_format": "dummy"}),
        replica_id=replica_id,
        eos_token_ids=parts.tokenizer.eos_ids,
        tokenizer=parts.tokenizer if rollout.stop_strings else None,
    )
    await engine.start()
    parts.stack.push_async_callback(engine.close)
    if rollout.vllm.in_process:
        return Replica(engine=engine, port=await _port(parts, link, engine))
    assert link is not None, "startable.py asks for shm or ipc"
    transport = "ipc" if config.sync.transport == "ipc" else "shm"
    port = VllmPort(engine, sender=link.sender, transport=transport, staging=config.sync.staging)  # type: ignore[arg-type]
    return Replica(engine=engine, port=port)


KINDS: dict[str, Callable[[Parts, Link | None, int], Awaitable[Replica]]] = {
    "native": native_replica,
    "vllm": vllm_replica,
}
"""By `rollout.engine`."""


def _takes_merged(config: RunConfig) -> bool:
    """Engines know nothing of adapters: they get the weights they make."""
    return config.model.lora is not None and config.model.lora.publish == "merged"


def _can_share_weights(config: RunConfig) -> bool:
    """The engine can compute with the trainer's memory where one device holds both in one dtype."""
    return (
        config.rollout.device == config.model.device
        and config.rollout.dtype in ("auto", config.model.dtype)
        and config.rollout.mismatch == "none"
        and config.sync.transport == "inproc"
        and config.sync.quantize == "none"
        and not _takes_merged(config)
        and config.sync.staging == "staged"
        and config.sync.every_steps == 1  # else the engine would serve updates that no publication has named
    )


async def _port(parts: Parts, link: Link | None, engine: SwapEngine) -> WeightPort:
    """The port of an engine of this process. Over a transport, its server listens on loopback and asks for a token that
    nobody else is told."""
    sync = parts.config.sync
    port = InprocPort(engine, staging=sync.staging, quantize=sync.quantize)
    if link is None:
        return port
    token = secrets.token_hex(16)
    # a broadcast to some of the replicas goes by messages
    in_message_bytes = sync.bucket_bytes if sync.transport == "broadcast" else 0
    server = ReplicaServer(
        port, link.receivers[engine.replica_id], token=token, max_payload_bytes=in_message_bytes
    )
    number = await server.start()
    parts.stack.push_async_callback(server.close)
    remote = RemotePort(engine.replica_id, link.sender, port=number, token=token)
    parts.stack.push_async_callback(remote.close)
    return remote


async def _open_link(parts: Parts) -> Link | None:
    """Both halves of `sync.transport`; None within one process, where tensors go by reference."""
    config = parts.config.sync
    count = parts.config.rollout.num_replicas + int(parts.config.lending.is_on)
    is_own_process = parts.config.rollout.engine == "vllm" and not parts.config.rollout.vllm.in_process
    link: Link
    if config.transport == "shm":
        from rollbook.sync.shm import ShmReceiver, ShmSender

        receivers: list[Receiver] = (
            [] if is_own_process else [ShmReceiver(config.shm_dir) for _ in range(count)]
        )
        link = Link(sender=ShmSender(config.shm_dir), receivers=receivers)
    elif config.transport == "disk":
        from rollbook.sync.disk import DiskReceiver, DiskSender

        link = Link(
            sender=DiskSender(config.disk_dir, as_sent(parts.trainer, config.quantize).weight_specs()),
            receivers=[DiskReceiver(config.disk_dir) for _ in range(count)],
        )
    elif config.transport == "ipc":
        from rollbook.sync.ipc import IpcSender

        link = Link(sender=IpcSender())
    elif config.transport == "broadcast":
        link = await _broadcast(parts)
    else:
        return None
    parts.stack.callback(link.sender.close)
    return link


async def _broadcast(parts: Parts) -> Link:
    """A gloo group of trainer and replicas, over host memory: NCCL takes no two ranks of one process."""
    from rollbook.sync.broadcast import BroadcastGroup, BroadcastReceiver, BroadcastSender

    config, size = parts.config.sync, parts.config.rollout.num_replicas + 1
    folder = parts.stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-gloo-"))

    def meet(rank: int) -> BroadcastGroup:
        return BroadcastGroup.create(
            "gloo",
            rank=rank,
            size=size,
            device=torch.device("cpu"),
            deadline_s=config.receive_deadline_s,
            file=str(Path(folder) / "store"),
        )

    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(size) as threads:  # each waits for all the others
        groups = await asyncio.gather(*(loop.run_in_executor(threads, meet, rank) for rank in range(size)))
    return Link(
        sender=BroadcastSender(groups[0]),
        receivers=[BroadcastReceiver(group, max_bucket_bytes=config.bucket_bytes) for group in groups[1:]],
    )
