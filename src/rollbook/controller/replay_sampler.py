"""The engine of a replay: it holds the weights of any version that is still needed, and cuts responses where the run's
were cut."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from rollbook.controller.loop import Controller
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.quantized import as_sent, as_sent_to
from rollbook.types import Trajectory, Turn


class Sampler:
    """The engine with the weights of any version that is still needed, and responses cut where the run's were."""

    def __init__(self, engine: NativeEngine, controller: Controller) -> None:
        self.engine = engine
        self._config = controller.config
        self._source = as_sent(controller.trainer, controller.config.sync.quantize)
        self.recorded: dict[str, Trajectory] = {}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._generate = engine.generate
        self._plain_step = engine.step
        self._stop_at: int | None = None
        """Sampled tokens after which the engine is to stand still."""
        self._stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        controller.router.generate = self.generate  # type: ignore[method-assign]
        engine.step = self._step  # type: ignore[method-assign]

    def remember(self, version: int) -> dict[str, Tensor]:
        held = self._held[version] = {name: t.clone() for name, t in self._source.export_weights()}
        return held

    def forget(self, before: int) -> None:
        """Versions that nothing will be sampled from any more."""
        self._held = {version: tensors for version, tensors in self._held.items() if version >= before}

    async def hold(self, version: int) -> None:
        """Put a version's weights into the engine, below its publications. Its own label only ever grows: labels are
        read from the log instead."""
        weights = as_sent_to(await self.engine.live_weights(), self._config.sync.quantize)
        tensors = self._held[version]

        @torch.no_grad()
        def write() -> None:
            for name in weights.specs():
                weights.write(name, tensors[name])
            for name in weights.specs():
                weights.read(name)  # codes and scales are decoded where they are read
            scheduler = self.engine._scheduler
            scheduler.reset_cache()
            scheduler._siblings.clear()

        await self.engine.run_between_steps(write)

    async def generate(
        self, request: GenerateRequest, *, on_sent: Callable[[int], None] | None = None
    ) -> Response:
        """One response, under the versions that the log gives it; in place of the router's."""
        trajectory_id, _, which = request.request_id.partition("#")
        logged = self.recorded.get(trajectory_id)
        turn_idx = int(which.rstrip("+") or 0)
        if logged is None or turn_idx >= len(logged.turns):
            return await self._generate(request)
        turn = logged.turns[turn_idx]
        runs = turn.version_runs
        if logged.oldest_version == logged.newest_version:
            response = await self._generate(request)
        else:
            response = await self._cut(request, turn)
        if len(response.response_ids) != sum(run.num_tokens for run in runs):
            return response  # another length: its own labels do for the comparison
        return replace(response, version_runs=runs)

    async def _cut(self, request: GenerateRequest, turn: Turn) -> Response:
        """The engine stands still wherever the run swapped its weights or computed keys and values anew, and goes on
        with those that the run had."""
        versions = [run.weight_version for run in turn.version_runs for _ in range(run.num_tokens)]
        anew = {start.token_idx: start.weight_version for start in turn.kv_starts}
        swaps = {idx for idx, pair in enumerate(itertools.pairwise(versions), start=1) if len(set(pair)) > 1}
        await self.hold(versions[0])
        response = asyncio.create_task(self._generate(request))
        for idx in sorted((swaps | anew.keys()) & set(range(1, len(versions)))):
            await self._stand_still(response, idx)
            if idx in anew:
                await self.hold(anew[idx])
                await self.engine.run_between_steps(self._compute_anew)
                await self._stand_still(response, idx)  # once they are there, and before the next token
            await self.hold(versions[idx])
        await self.engine.resume()
        return await response

    def _compute_anew(self) -> None:
        scheduler = self.engine._scheduler
        scheduler._restart(scheduler.running())

    async def _stand_still(self, response: asyncio.Task[Response], num_sampled: int) -> None:
        """Until so many tokens were sampled, and their keys and values are there to sample the next one."""
        self._stopped.clear()
        self._stop_at = num_sampled
        await self.engine.resume()
        stopped = asyncio.create_task(self._stopped.wait())
        waits: set[asyncio.Task[Response] | asyncio.Task[Literal[True]]] = {stopped, response}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        self._stop_at = None

    def _step(self) -> bool:
        """On the engine's thread: a step, and a stand-still where one is asked for (one sequence runs then)."""
        if self._stop_at is not None and self._has_reached(self._stop_at):
            self.engine._pauses.is_on = True
            self._loop.call_soon_threadsafe(self._stopped.set)
            return False
        return self._plain_step()

    def _has_reached(self, num_tokens: int) -> bool:
        slots = self.engine._scheduler.slots
        return any(
            bool(slots.is_ready[slot]) and int(slots.num_response[slot]) >= num_tokens
            for slot, sequence in enumerate(slots.sequences)
            if sequence is not None
        )
