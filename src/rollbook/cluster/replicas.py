"""The replicas as the driver sees them, what is done when one of them dies, and how versions reach them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, cast

import ray

from rollbook.cluster.calls import cause_of, first_line, label_of
from rollbook.cluster.config import ClusterConfig
from rollbook.cluster.meeting import EngineFacts, ReplicaAddress
from rollbook.cluster.trainer import RemoteTrainer
from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError, DeadlineError, EngineDownError, EngineError, RunError, SyncError
from rollbook.observe.recorder import Recorder
from rollbook.rollout.engine import EngineStats, GenerateRequest, PauseMode, Response
from rollbook.rollout.router import Router
from rollbook.sync.publisher import Publisher
from rollbook.sync.report import PublicationReport


class RemoteEngine:
    """A replica in another process; implements `rollbook.rollout.engine.Engine`.

    Args:
        start_actor: makes a new actor.
        facts: of the trainer's model.
        pool: told when the actor is gone.
    """

    def __init__(
        self,
        replica_id: int,
        config: RunConfig,
        start_actor: Callable[[], Any],
        facts: EngineFacts,
        pool: RayPool,
    ) -> None:
        self.replica_id = replica_id
        self._facts = facts
        self.config = config
        self._start_actor = start_actor
        self._pool = pool
        self._actor: Any = None
        self._stats: EngineStats | None = None
        """The last ones known."""
        self._ended: EngineStats | None = None
        """Of the process before this one, and all before it."""
        self.down = "it was not started"
        """Why it takes no call; empty while it does."""
        self.address: ReplicaAddress

    async def start(self) -> None:
        """
        Raises:
            EngineError: the model can't run there.
            DeadlineError: no answer in time.
        """
        self._ended = self._stats
        self._actor = self._start_actor()
        self.address = await self._ask("start", (self._facts,), self.config.cluster.start_deadline_s)
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
        """The last ones known while it is down; counters go on when it is started again."""
        try:
            stats: EngineStats = await self._do("stats")
            self._stats = stats.going_on(self._ended)
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
        label = label_of(name, args)
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
            why = f"its process is gone: {first_line(error)}"
            if actor is self._actor:
                was_up, self.down = not self.down, why
                if was_up:
                    self._pool.lost(self, why)
            raise EngineDownError(
                f"replica {self.replica_id} is down: {why}", "it is started again"
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise cause_of(error, f"replica {self.replica_id} failed in {label}") from None


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

    async def start(self) -> None:
        """Start all replicas; one that dies on the way, or waiting for it, is started again.

        Raises:
            EngineError: one died too often, or the model can't run there.
            DeadlineError: one does not start in time.
        """

        async def start(engine: RemoteEngine) -> None:
            try:
                await engine.start()
            except EngineDownError:
                await self._start_again(engine)

        await asyncio.gather(*map(start, self.engines))

    async def _restart(self, engine: RemoteEngine) -> None:
        replica_id = engine.replica_id
        try:
            await self._start_again(engine)
        except (EngineError, DeadlineError) as error:
            if not self.is_last(engine):  # else the run ends with it
                self.recorder.finding(
                    "replica_given_up",
                    f"replica {replica_id} serves no more in this run: {error.what}",
                    remedy=f"the others go on without it; {error.remedy}",
                )
            raise
        await self.publisher.set_port(engine.address)
        with suppress(SyncError):  # the trainer has moved on: the next publication brings it along
            report = await self.publisher.resync(replica_id)
            self.recorder.event("publication", **report.as_event())
            if self.router is not None and replica_id in report.committed:
                self.router.put_back(replica_id)

    async def _start_again(self, engine: RemoteEngine) -> None:
        """A new process in place of the one that died; another one if it dies in its turn before it is ready.

        Raises:
            EngineError: it died too often, or the model can't run there.
            DeadlineError: it does not start in time.
        """
        replica_id = engine.replica_id
        while True:
            number = self._num_restarts[replica_id] = self._num_restarts.get(replica_id, 0) + 1
            if number > self.config.max_restarts:
                times = "once" if number == 1 else f"{number} times"
                raise EngineError(
                    f"replica {replica_id} died {times}: {engine.down}",
                    "look at its log; resume the run once the cause is mended, or raise cluster.max_restarts",
                )
            await engine.close()
            with suppress(EngineDownError):
                await engine.start()
                return

    async def close(self) -> None:
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        for engine in self.engines:
            await engine.close()


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

    def close(self) -> str:
        for check in self._checks:
            check.cancel()
        return ""
