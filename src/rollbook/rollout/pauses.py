"""What an engine stands still for: a pause, or a drain, which becomes one when what was started has finished.

Everything but the coroutines is for the engine's thread.
"""

from __future__ import annotations

from collections.abc import Callable

from rollbook.errors import RunError
from rollbook.rollout.engine import PauseMode
from rollbook.rollout.thread import Answer, Command, EngineThread


class Pauses:
    """Of one engine, whose steps ask it.

    Args:
        abort: ends every request with the tokens it has.
        freeze: returns when no step is on its way; for an engine whose steps overlap its commands.
    """

    def __init__(
        self, thread: EngineThread, *, abort: Callable[[], None], freeze: Callable[[], None] | None = None
    ) -> None:
        self.is_on = False
        """No step is to run."""
        self.is_draining = False
        """Nothing new is to be started."""
        self._thread = thread
        self._abort = abort
        self._freeze = freeze
        self._waiting: list[Answer[None]] = []
        """Whoever waits for a drain."""

    async def begin(self, mode: PauseMode) -> None:
        """Returns when no step runs."""
        if mode == "drain":
            drained = Answer[None]()
            self._thread.post(Command(lambda: self._drain(drained), drained.fail))
            await drained.future
        else:
            await self._thread.ask(lambda: self._stop(mode))

    async def end(self) -> None:
        await self._thread.ask(self._go_on)

    def drained(self) -> None:
        """What was started has finished."""
        self.is_on = True
        self._end_drain()

    def fail(self, error: RunError) -> None:
        """The engine ended."""
        for waiter in self._waiting:
            waiter.fail(error)

    def _stop(self, mode: PauseMode) -> None:
        if self._freeze is not None:
            self._freeze()
        self.is_on = True
        if mode == "abort":
            self._abort()

    def _drain(self, drained: Answer[None]) -> None:
        self.is_draining = True
        self._waiting.append(drained)

    def _go_on(self) -> None:
        self.is_on = False
        self._end_drain()

    def _end_drain(self) -> None:
        self.is_draining = False
        for waiter in self._waiting:
            waiter.give(None)
        self._waiting.clear()
