"""Ray itself, and the places of the actors on it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rollbook.cluster.calls import first_line
from rollbook.cluster.config import ClusterConfig
from rollbook.config.environment import set_environment
from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError

ANSWER_S = 5.0
"""How long a host may take to take a connection."""
JOIN_S = 30.0
"""How long joining a cluster that runs may take."""


async def connect(cluster: ClusterConfig, num_actors: int, stack: AsyncExitStack) -> bool:
    """Join the cluster, or start one on this machine; True for the latter.

    Raises:
        ConfigError: there is none at `cluster.address`, or none can be started.
    """
    if ray.is_initialized():
        return not cluster.address
    set_environment(RAY_USAGE_STATS_ENABLED="0")
    silence()
    terminated = signal.getsignal(signal.SIGTERM)  # Ray takes it, and the run has its own end for it
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": "error", "configure_logging": True}
    if cluster.address:
        try:
            await _require_answer(cluster.address)
            await _join(cluster.address, common)
        except (ValueError, OSError, RuntimeError) as error:  # timeouts and refused connections are OSErrors
            raise ConfigError(
                f"cluster.address is '{cluster.address}', and no Ray cluster is found there: {first_line(error)}",
                "give host:port of a running one, as `ray start --head` prints it (one with a token also wants "
                "RAY_AUTH_MODE=token and that token in ~/.ray/auth_token), or leave it empty to start one here",
            ) from None
    else:
        try:
            ray.init(
                address="local",
                num_cpus=max(os.cpu_count() or 1, 2 * num_actors),
                include_dashboard=False,
                runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo"}},
                **common,
            )
        except Exception as error:  # Ray raises plain ones, too
            raise ConfigError(
                f"cluster.kind is 'ray', and Ray does not start on this machine: {first_line(error)}",
                "its logs are in /tmp/ray/session_latest/logs; where other work keeps the cores or the disk busy, try "
                "again once it is done",
            ) from error
    stack.callback(ray.shutdown)
    with suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGTERM, terminated)
    return not cluster.address


async def _require_answer(address: str) -> None:
    """Ray itself tries for more than a minute where nobody listens.

    Raises:
        OSError: nobody takes a connection there.
    """
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not host or not port.isdigit():  # "auto", which Ray looks up itself
        return
    try:
        async with asyncio.timeout(ANSWER_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        raise OSError(f"nobody answers within {ANSWER_S:g} s") from None
    writer.close()


async def _join(address: str, keywords: dict[str, Any]) -> None:
    """
    Raises:
        OSError: whoever listens there is no Ray cluster.
    """
    joined: Future[None] = Future()

    def join() -> None:
        try:
            ray.init(address=address, **keywords)
        except BaseException as error:
            outcome = partial(joined.set_exception, error)
        else:
            outcome = partial(joined.set_result, None)
        with suppress(InvalidStateError):  # nobody waits any more
            outcome()

    # A thread that does not keep the process alive: Ray cannot be told to stop trying.
    threading.Thread(target=join, name="ray-init", daemon=True).start()
    try:
        async with asyncio.timeout(JOIN_S):
            await asyncio.wrap_future(joined)
    except TimeoutError:
        raise OSError(f"who listens there did not answer as one within {JOIN_S:g} s") from None


def silence() -> None:
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


def placements(config: RunConfig, *, shares_device: bool) -> tuple[list[Place], list[Place]]:
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
