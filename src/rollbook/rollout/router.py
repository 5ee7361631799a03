"""Sends each request to one replica in service.

The members of a group and the turns of a trajectory go to the same replica, which has their prefix. A replica
that failed, missed a publication or reports versions that cannot be is out of service until it is re-synced: nothing is
sent to it.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from rollbook.errors import EngineDownError, EngineError
from rollbook.rollout.engine import Engine, GenerateRequest, PauseMode, Response

MAX_REMEMBERED_GROUPS = 65_536


class Router:
    """Replicas with their service state. Called from the event loop only."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = list(engines)
        self.newest_version: int | None = None
        """The newest version that any replica may hold; None: not known, so not checked."""
        self.on_quarantine: Callable[[int, str], None] | None = None
        self.on_return: Callable[[int], None] | None = None
        """Told which replica serves nothing, and why: once for each reason."""
        self._announced: dict[int, str] = {}
        self.out_of_service: dict[int, str] = {}
        """replica_id -> why. Set by a failed publication or an engine failure."""
        self._num_open = {engine.replica_id: 0 for engine in self.engines}
        self._replica_of_group: OrderedDict[int, Engine] = OrderedDict()

    async def generate(
        self, request: GenerateRequest, *, on_sent: Callable[[int], None] | None = None
    ) -> Response:
        """One response. A replica that goes down, or whose versions cannot be, hands its requests on: what is sampled
        depends on the request alone.

        Args:
            on_sent: told the replica that has the request now, for deadline messages.
        Raises:
            EngineError: no replica is in service, or the chosen one cannot answer this request.
        """
        while True:
            engine = self._pick(request.group_id)
            self._num_open[engine.replica_id] += 1
            if on_sent is not None:
                on_sent(engine.replica_id)
            try:
                response = await engine.generate(request)
                lie = self._impossible(response)
                if not lie:
                    return response
                why = f"response {request.request_id} {lie}"
                if engine in self.engines:  # else it has been removed meanwhile
                    self.take_out(engine.replica_id, why)
                    self.announce(engine.replica_id, why)
            except EngineDownError as error:
                if engine in self.engines:
                    self.out_of_service.setdefault(engine.replica_id, error.what)  # a first reason says more
            finally:
                self._num_open[engine.replica_id] -= 1

    def _impossible(self, response: Response) -> str:
        """What is wrong with the versions that its replica reports, or nothing."""
        versions = [run.weight_version for run in response.version_runs]
        if any(later < earlier for earlier, later in itertools.pairwise(versions)):
            return f"has weight versions that run backwards: {versions}"
        newest = self.newest_version
        if newest is not None and any(not 0 <= version <= newest for version in versions):
            return f"has weight versions {versions}, and the newest that was published is {newest}"
        return ""

    def _pick(self, group_id: int) -> Engine:
        held = self._replica_of_group.get(group_id)
        if held is not None and held.replica_id not in self.out_of_service:
            return held
        serving = [e for e in self.engines if e.replica_id not in self.out_of_service]
        if not serving:
            reasons = "; ".join(f"replica {i}: {why}" for i, why in self.out_of_service.items())
            raise EngineError(
                f"none of {len(self.engines)} replicas is in service ({reasons})",
                "look at the first failure in events.jsonl; resume the run once its cause is mended",
            )
        engine = min(serving, key=lambda e: (self._num_open[e.replica_id], e.replica_id))
        self._replica_of_group[group_id] = engine
        while len(self._replica_of_group) > MAX_REMEMBERED_GROUPS:
            self._replica_of_group.popitem(last=False)
        return engine

    def add(self, engine: Engine) -> None:
        """One more replica that serves. Groups are dealt out anew, so that it gets its share of what comes next."""
        self.engines.append(engine)
        self._num_open[engine.replica_id] = 0
        self._replica_of_group.clear()

    def remove(self, replica_id: int) -> None:
        """It is no replica any more: what it still returns is taken, and nothing is sent to it."""
        self.engines = [engine for engine in self.engines if engine.replica_id != replica_id]
        self.put_back(replica_id)
        self._replica_of_group.clear()

    def num_open(self) -> dict[int, int]:
        """Replica in service -> requests that it has not answered yet."""
        serving = [e.replica_id for e in self.engines if e.replica_id not in self.out_of_service]
        return {replica_id: self._num_open[replica_id] for replica_id in serving}

    def take_out(self, replica_id: int, why: str) -> None:
        """The replica gets no further request; those it has end by its own failure or deadline."""
        self.out_of_service[replica_id] = why

    def announce(self, replica_id: int, why: str) -> None:
        """Put on record why a replica serves nothing; the same reason is no news until it was back."""
        if self._announced.get(replica_id) != why:
            self._announced[replica_id] = why
            if self.on_quarantine is not None:
                self.on_quarantine(replica_id, why)

    def put_back(self, replica_id: int) -> None:
        """It serves again."""
        self.out_of_service.pop(replica_id, None)
        was_announced = self._announced.pop(replica_id, None) is not None
        if was_announced and self.on_return is not None:
            self.on_return(replica_id)

    async def pause(self, mode: PauseMode) -> None:
        await self._each(lambda engine: engine.pause(mode))

    async def resume(self) -> None:
        await self._each(lambda engine: engine.resume())

    async def sleep(self, level: int) -> None:
        await self._each(lambda engine: engine.sleep(level))

    async def wake(self) -> None:
        await self._each(lambda engine: engine.wake())

    async def _each(self, call: Callable[[Engine], Awaitable[None]]) -> None:
        """On every replica; one that is down takes no step whatever is asked of it."""
        outcomes = await asyncio.gather(*(call(engine) for engine in self.engines), return_exceptions=True)
        for engine, outcome in zip(self.engines, outcomes, strict=True):
            if isinstance(outcome, EngineDownError):
                self.out_of_service.setdefault(engine.replica_id, outcome.what)
            elif isinstance(outcome, BaseException):
                raise outcome
