"""Trainer ranks and replicas as Ray actors, each behind the face of its local counterpart.

    driver: Controller ── RemoteTrainer ────calls, batches────► TrainerRank 0..N-1   Trainer, divided by FSDP2
                       ── RemotePublisher ──version───────────► TrainerRank 0        Publisher ─┐ buckets, by
                       ── Router ── RemoteEngine ──requests───► ReplicaActor 0..M-1  engine ◄───┘ sync.transport

Weights never pass through Ray's object store: rank 0 publishes to the replicas, by shared memory or a disk. Each
call has a deadline and names the actor and the call when it passes. A replica that dies is started again, re-synced in
full and put back; its requests go to another one or wait for it. A trainer rank that dies ends the attempt
(`TrainerDownError`): the run goes on from its last checkpoint. What passes through Ray is pickled, and Ray's ports are
its own affair, guarded by its token; ours listen on loopback where all actors are on one machine.

    inside the actors     rank.py (TrainerRank), replica.py (ReplicaActor)
    on the driver's side  trainer.py (RemoteTrainer), replicas.py (RemoteEngine, RayPool, RemotePublisher)
    between them          meeting.py (what they tell each other first), calls.py (waiting for an answer)
    where they live       placement.py; this file starts them all
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from rollbook.cluster.calls import within
from rollbook.cluster.config import ClusterConfig
from rollbook.cluster.meeting import EngineFacts, RemoteFacts
from rollbook.cluster.placement import Place, connect, placements
from rollbook.cluster.rank import TrainerRank
from rollbook.cluster.replica import ReplicaActor
from rollbook.cluster.replicas import RayPool, RemoteEngine, RemotePublisher
from rollbook.cluster.trainer import RemoteTrainer
from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError, RunError
from rollbook.modeling.load import load_tokenizer
from rollbook.observe.recorder import Recorder

CLOSE_S = 5.0
"""How long rank 0 may take to give its shared memory back."""
MAX_CONCURRENT = 4096
"""Calls that one replica may have open."""


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
    num_ranks, num_replicas = config.cluster.num_trainer_ranks, config.rollout.num_replicas
    is_local = await connect(config.cluster, num_ranks + num_replicas, stack)
    await asyncio.sleep(0)  # who was interrupted meanwhile starts nothing more
    train, rollout = await _placed(config, stack, shares_device=shares_device)
    make_rank = ray.remote(TrainerRank)
    ranks = [make_rank.options(**place.options()).remote(rank, num_ranks) for rank, place in enumerate(train)]
    stack.callback(_end, ranks)
    replicas = _ReplicaActors(config, rollout, host="127.0.0.1" if is_local else "")
    stack.callback(replicas.end)
    facts = await _build_trainer(ranks, config, trainer_keywords, stack, is_local=is_local)
    tokenizer = load_tokenizer(config.model, facts=facts.facts)
    trainer = RemoteTrainer(ranks, config, facts, tokenizer)
    publisher = RemotePublisher(trainer)
    pool = publisher.pool = RayPool(config=config.cluster, recorder=recorder, publisher=publisher)
    stack.push_async_callback(pool.close)
    for_engines = EngineFacts(
        dtype=facts.specs[0].dtype,
        eos_ids=tokenizer.eos_ids,
        base_digest=facts.base_digest,
        config_json=facts.config_json,
    )
    for replica_id in range(num_replicas):
        start_actor = partial(replicas.start, replica_id)
        pool.engines.append(RemoteEngine(replica_id, config, start_actor, for_engines, pool))
    await pool.start()
    await _open_publisher(ranks[0], pool, config, stack, is_local=is_local)
    return RayParts(trainer=trainer, publisher=publisher, pool=pool)


async def _placed(
    config: RunConfig, stack: AsyncExitStack, *, shares_device: bool
) -> tuple[list[Place], list[Place]]:
    """Places of the ranks and of the replicas, once the cluster has given them.

    Raises:
        ConfigError: it has not the resources.
    """
    train, rollout = placements(config, shares_device=shares_device)
    groups = list({id(place.group): place.group for place in (*train, *rollout)}.values())
    for group in groups:
        stack.callback(remove_placement_group, group)
    ready = [group.ready() for group in groups]
    _, late = await asyncio.to_thread(
        ray.wait, ready, num_returns=len(groups), timeout=config.cluster.start_deadline_s
    )
    if late:
        raise ConfigError(
            f"{len(train)} trainer ranks and {len(rollout)} replicas have no place: the cluster has "
            f"{ray.cluster_resources()}",
            "use fewer ranks or replicas, or add nodes",
        )
    return train, rollout


class _ReplicaActors:
    """Makes the actors of replicas. The first one of each is made at once: its process starts while the ranks are made,
    and its engine takes it first."""

    def __init__(self, config: RunConfig, places: Sequence[Place], *, host: str) -> None:
        self._config, self._places, self._host = config, places, host
        self._make = ray.remote(ReplicaActor)
        self._waiting = {replica_id: self._new(replica_id) for replica_id in range(len(places))}

    def _new(self, replica_id: int) -> Any:
        options = self._places[replica_id].options()
        made = self._make.options(max_concurrency=MAX_CONCURRENT, **options)
        actor = made.remote(self._config, replica_id, host=self._host)
        actor.warm_up.remote()
        return actor

    def start(self, replica_id: int) -> Any:
        return self._waiting.pop(replica_id, None) or self._new(replica_id)

    def end(self) -> None:
        _end(list(self._waiting.values()))


async def _build_trainer(
    ranks: Sequence[Any],
    config: RunConfig,
    keywords: dict[str, Any],
    stack: AsyncExitStack,
    *,
    is_local: bool,
) -> RemoteFacts:
    """Let the ranks meet and make their parts of the trainer; what rank 0 tells of it."""
    cluster, store = config.cluster, ""
    if len(ranks) > 1:
        store = await _meeting_point(ranks[0], cluster, stack, is_local=is_local)
        store = f"file://{store}" if is_local else f"tcp://{store}"
    tells_config = config.rollout.engine == "vllm"
    built = [
        actor.build.remote(store, cluster.step_deadline_s, keywords, tells_config=tells_config)
        for actor in ranks
    ]
    facts: list[RemoteFacts] = [
        await within(ref, f"rank {rank} of the trainer", "build", cluster.start_deadline_s)
        for rank, ref in enumerate(built)
    ]
    return facts[0]


async def _open_publisher(
    first_rank: Any, pool: RayPool, config: RunConfig, stack: AsyncExitStack, *, is_local: bool
) -> None:
    """Tell rank 0 where the replicas listen; for broadcasts let all of them meet."""
    cluster, meeting = config.cluster, ""
    if config.sync.transport == "broadcast":
        meeting = await _meeting_point(first_rank, cluster, stack, is_local=is_local)
    stack.push_async_callback(_close_publisher, first_rank)
    opening = first_rank.open_publisher.remote(config, [engine.address for engine in pool.engines], meeting)
    joining = [engine.join(meeting) for engine in pool.engines] if meeting else []
    await asyncio.gather(
        within(opening, "rank 0 of the trainer", "open_publisher", cluster.start_deadline_s), *joining
    )


async def _meeting_point(
    first_rank: Any, cluster: ClusterConfig, stack: AsyncExitStack, *, is_local: bool
) -> str:
    """Where processes find each other: a file of this machine, or a port on the host of the trainer's first rank."""
    if is_local:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rollbook-ranks-"))
        return f"{folder}/store"
    host, port = await within(first_rank.free_port.remote(), "rank 0", "free_port", cluster.start_deadline_s)
    return f"{host}:{port}"


async def _close_publisher(first_rank: Any) -> None:
    """One that is busy or gone is not waited for long."""
    with suppress(RunError):
        await within(first_rank.close.remote(), "rank 0 of the trainer", "close", CLOSE_S)


def _end(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)
