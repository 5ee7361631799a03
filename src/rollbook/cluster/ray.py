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
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from rollbook.cluster.calls import within
from rollbook.cluster.config import ClusterConfig
from rollbook.cluster.meeting import EngineFacts
from rollbook.cluster.placement import connect, placements
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
    cluster = config.cluster
    num_ranks, num_replicas = cluster.num_trainer_ranks, config.rollout.num_replicas
    is_local = await connect(cluster, num_ranks + num_replicas, stack)
    await asyncio.sleep(0)  # who was interrupted meanwhile starts nothing more
    train, rollout = placements(config, shares_device=shares_device)
    groups = list({id(place.group): place.group for place in (*train, *rollout)}.values())
    for group in groups:
        stack.callback(remove_placement_group, group)
    ready = [g.ready() for g in groups]
    _, late = await asyncio.to_thread(
        ray.wait, ready, num_returns=len(groups), timeout=cluster.start_deadline_s
    )
    if late:
        raise ConfigError(
            f"{num_ranks} trainer ranks and {num_replicas} replicas have no place: the cluster has "
            f"{ray.cluster_resources()}",
            "use fewer ranks or replicas, or add nodes",
        )
    make_rank, make_replica = ray.remote(TrainerRank), ray.remote(ReplicaActor)
    host = "127.0.0.1" if is_local else ""

    def start_replica(replica_id: int) -> Any:
        options = rollout[replica_id].options()
        made = make_replica.options(max_concurrency=MAX_CONCURRENT, **options)
        actor = made.remote(config, replica_id, host=host)
        actor.warm_up.remote()
        return actor

    actors = [make_rank.options(**train[rank].options()).remote(rank, num_ranks) for rank in range(num_ranks)]
    stack.callback(_end, actors)
    # Their processes start while the ranks are made; an engine takes the one that waits for it first.
    waiting = {replica_id: start_replica(replica_id) for replica_id in range(num_replicas)}
    stack.callback(lambda: _end(list(waiting.values())))
    store = ""
    if num_ranks > 1:
        store = await _meeting_point(actors[0], cluster, stack, is_local=is_local)
        store = f"file://{store}" if is_local else f"tcp://{store}"
    tells_config = config.rollout.engine == "vllm"
    built = [
        actor.build.remote(store, cluster.step_deadline_s, trainer_keywords, tells_config=tells_config)
        for actor in actors
    ]
    facts = [
        await within(ref, f"rank {rank} of the trainer", "build", cluster.start_deadline_s)
        for rank, ref in enumerate(built)
    ]
    tokenizer = load_tokenizer(config.model, facts=facts[0].facts)
    trainer = RemoteTrainer(actors, config, facts[0], tokenizer)
    publisher = RemotePublisher(trainer)
    pool = publisher.pool = RayPool(config=cluster, recorder=recorder, publisher=publisher)
    stack.push_async_callback(pool.close)
    for_engines = EngineFacts(
        dtype=facts[0].specs[0].dtype,
        eos_ids=tokenizer.eos_ids,
        base_digest=facts[0].base_digest,
        config_json=facts[0].config_json,
    )
    for replica_id in range(num_replicas):

        def start_actor(replica_id: int = replica_id) -> Any:
            return waiting.pop(replica_id, None) or start_replica(replica_id)

        pool.engines.append(RemoteEngine(replica_id, config, start_actor, for_engines, pool))
    await pool.start()
    addresses = [engine.address for engine in pool.engines]
    meeting = ""
    if config.sync.transport == "broadcast":
        meeting = await _meeting_point(actors[0], cluster, stack, is_local=is_local)
    stack.push_async_callback(_close_publisher, actors[0])
    opening = actors[0].open_publisher.remote(config, addresses, meeting)
    joining = [engine.join(meeting) for engine in pool.engines] if meeting else []
    await asyncio.gather(
        within(opening, "rank 0 of the trainer", "open_publisher", cluster.start_deadline_s), *joining
    )
    return RayParts(trainer=trainer, publisher=publisher, pool=pool)


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
