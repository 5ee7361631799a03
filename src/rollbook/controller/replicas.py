"""The engines of a run, each with the port through which its weights come: one function for each kind of engine.

A new kind is a function here and a line in KINDS; `startable.py` says which configs it cannot serve.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rollbook.config.run_config import RunConfig
from rollbook.controller.schedule import SCHEDULES
from rollbook.modeling.tokenizer import Tokenizer
from rollbook.rollout.engine import Engine
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.inproc import InprocPort
from rollbook.trainer.trainer import Trainer
from rollbook.weights import WeightPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine that runs, and how weights get into it."""

    engine: Engine
    port: WeightPort


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What replicas are made from."""

    config: RunConfig
    trainer: Trainer
    tokenizer: Tokenizer
    stack: AsyncExitStack
    """Closes what was started, last first."""


async def start_replicas(parts: Parts) -> list[Replica]:
    """All replicas of the config, started.

    Raises:
        EngineError: one cannot run here; says why.
    """
    make = KINDS[parts.config.rollout.engine]
    return [await make(parts, replica_id) for replica_id in range(parts.config.rollout.num_replicas)]


async def native_replica(parts: Parts, replica_id: int) -> Replica:
    """Our own engine, in this process."""
    config, rollout = parts.config, parts.config.rollout
    engine = NativeEngine(
        parts.trainer.model,
        rollout,
        replica_id=replica_id,
        eos_token_ids=parts.tokenizer.eos_ids,
        tokenizer=parts.tokenizer if rollout.stop_strings else None,
        share_weights=_shares_weights(config),
    )
    await engine.start()
    parts.stack.push_async_callback(engine.close)
    return Replica(engine=engine, port=InprocPort(engine, staging=config.sync.staging))


def _shares_weights(config: RunConfig) -> bool:
    """The engine computes with the trainer's memory where one device holds both in one dtype and they never run at
    once."""
    return (
        SCHEDULES[config.run.schedule].shares_device
        and config.rollout.device == config.model.device
        and config.rollout.dtype in ("auto", config.model.dtype)
        and config.rollout.mismatch == "none"
        and config.sync.transport == "inproc"
        and config.sync.staging == "staged"
        and config.sync.every_steps == 1  # else the engine would serve updates that no publication has named
    )


KINDS: dict[str, Callable[[Parts, int], Awaitable[Replica]]] = {"native": native_replica}
"""By `rollout.engine`."""
