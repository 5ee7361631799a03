"""A small Ray instance for tests, and deaths of the processes of a run on it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rollbook.controller.loop import Controller
from rollbook.sync.report import PublicationReport


@contextmanager
def small_ray(*, num_cpus: int) -> Iterator[None]:
    """One instance for all runs of a test file; each starts its own actors on it."""
    import ray

    from rollbook.cluster.placement import silence

    silence()
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        object_store_memory=100 << 20,
        runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}},
    )
    yield
    ray.shutdown()


@dataclass
class KillInGeneration:
    """The replica's process is killed in the middle of the second step, with requests under way."""

    replica_id: int
    pids: list[int] = field(default_factory=list)

    def __call__(self, controller: Controller) -> None:
        engine: Any = controller.router.engines[self.replica_id]
        generate, publisher = engine.generate, controller.publisher
        plain_publish = publisher.publish
        num_calls = 0

        async def killing(request: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 11:
                self.pids.append(engine.address.pid)
                os.kill(engine.address.pid, signal.SIGKILL)
            return await generate(request)

        async def publish(weight_version: int, *, moved: bool = True) -> PublicationReport:
            if weight_version == 3:  # whenever the new process is there, it is before this one
                await engine._pool.is_back(engine)
            return await plain_publish(weight_version, moved=moved)

        engine.generate, publisher.publish = killing, publish  # type: ignore[method-assign]
