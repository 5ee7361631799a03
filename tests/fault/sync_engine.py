"""An engine that only takes steps: each one notes its label and what the weights were, on a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

from rollbook.sync.layout import MappedWeights


class StepEngine:
    """Implements `sync.inproc.SwapEngine`. `steps` maps each version label to the weights it was sampled with."""

    def __init__(self, live: MappedWeights, *, replica_id: int = 0, weight_version: int = 0) -> None:
        self.live = live
        self.replica_id = replica_id
        self.version = weight_version
        self.steps: dict[int, set[float]] = {}
        self.num_steps = 0
        self.is_paused = self.is_asleep = self.needs_publication = False
        self._commands: deque[Callable[[], None]] = deque()
        self._wake_up = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return not (self.is_paused or self.is_asleep or self.needs_publication)

    def _main(self) -> None:
        while not self._is_closing:
            self._wake_up.clear()
            while self._commands:
                self._commands.popleft()()
            if self.is_serving:
                weights = float(self.live.parameters["qkv"].double().sum())
                self.steps.setdefault(self.version, set()).add(weights)
                self.num_steps += 1
            self._wake_up.wait(0.0002 if self.is_serving else None)

    async def _ask(self, fn: Callable[[], Any]) -> Any:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            if not answer.done():
                if error is None:
                    answer.set_result(result)
                else:
                    answer.set_exception(error)

        def run() -> None:
            try:
                result, error = fn(), None
            except BaseException as raised:
                result, error = None, raised
            loop.call_soon_threadsafe(settle, result, error)

        self._commands.append(run)
        self._wake_up.set()
        return await answer

    async def step_once(self) -> None:
        """Returns after at least one more step."""
        before = self.num_steps
        while self.num_steps == before:
            await self._ask(lambda: None)

    async def pause(self, mode: Literal["keep", "abort"] = "keep") -> None:
        await self._ask(lambda: setattr(self, "is_paused", True))

    async def resume(self) -> None:
        await self._ask(lambda: setattr(self, "is_paused", False))

    async def sleep(self, level: int = 1) -> None:
        def sleep() -> None:
            self.is_asleep = True
            self.needs_publication |= level == 2

        await self._ask(sleep)

    async def wake(self) -> None:
        await self._ask(lambda: setattr(self, "is_asleep", False))

    async def run_between_steps(self, fn: Callable[[], Any]) -> Any:
        return await self._ask(fn)

    async def adopt_version(self, weight_version: int) -> None:
        def adopt() -> None:
            assert weight_version >= self.version
            self.version = weight_version
            self.needs_publication = False

        await self._ask(adopt)

    async def live_weights(self) -> MappedWeights:
        return self.live

    async def weight_version(self) -> int:
        return self.version

    def close(self) -> None:
        self._is_closing = True
        self._wake_up.set()
        self._thread.join()
