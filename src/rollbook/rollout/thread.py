"""The thread that an engine computes on: commands from event loops between its steps, answers back to them.

    event loop ──post, ask──► inbox ──► [commands in their order] [one step] [commands] [one step] ...

Commands that are queued together are carried out without a step in between. When the thread ends, whatever the
reason, every command left and every later one fails with that reason. Answers that become due together take one call of
the event loop, so that a decode step costs it next to nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from rollbook.errors import DeadlineError, EngineDownError, RunError

Result = TypeVar("Result")


@dataclass(slots=True)
class Command:
    """Something to do between two steps; exactly one of `run` and `fail` is called."""

    run: Callable[[], None]
    fail: Callable[[RunError], None]


class Answer(Generic[Result]):
    """A future of an event loop that another thread may settle, once; settling it again does nothing."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Result] = self._loop.create_future()

    def give(self, result: Result) -> None:
        _call(self._loop, _give, self.future, result)

    def fail(self, error: BaseException) -> None:
        _call(self._loop, _fail, self.future, error)


class Work(Protocol):
    """What the thread does; all methods are called on it."""

    def step(self) -> bool:
        """One step, if anything can run."""

    def ended(self, error: RunError) -> None:
        """The thread is about to end: fail what waits, close what is open."""


class EngineThread:
    """See the module. `name` is the engine's, for messages."""

    def __init__(self, name: str, work: Work) -> None:
        self.name = name
        self._work = work
        self._lock = threading.Lock()
        self._inbox: deque[Command] = deque()
        self._wake_up = threading.Event()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self.end: RunError | None = EngineDownError(f"{name} is not running", "await engine.start() first")
        """Why nothing runs; None while something may."""

    async def start(self, first: Callable[[], None]) -> None:
        """Begin, with `first` before anything else; its exception is raised here."""
        if self._thread is not None:
            raise EngineDownError(f"{self.name} was already started", "start it once")
        self.end = None
        self._thread = threading.Thread(target=self._main, name=self.name, daemon=True)
        began = asyncio.ensure_future(self.ask(first))
        await asyncio.sleep(0)
        self._thread.start()
        await began

    async def close(self, deadline_s: float) -> None:
        """End after the step that runs.

        Raises:
            DeadlineError: it did not end in time.
        """
        if self._thread is None:
            return
        self._is_closing = True
        self._wake_up.set()
        with ThreadPoolExecutor(1) as waiter:
            await asyncio.get_running_loop().run_in_executor(waiter, self._thread.join, deadline_s)
        if self._thread.is_alive():
            raise DeadlineError(
                f"{self.name} did not end within {deadline_s:.0f} s",
                "end the process; a step this long means the machine is overloaded or a kernel hangs",
            )

    def post(self, command: Command) -> None:
        with self._lock:
            end = self.end
            if end is None:
                self._inbox.append(command)
        if end is not None:
            command.fail(end)
        self._wake_up.set()

    async def ask(self, fn: Callable[[], Result]) -> Result:
        """Run `fn` between two steps. Its exception is raised here and harms nothing else."""
        answer = Answer[Result]()

        def run() -> None:
            try:
                result = fn()
            except BaseException as error:
                answer.fail(error)
            else:
                answer.give(result)

        self.post(Command(run, answer.fail))
        return await answer.future

    def _main(self) -> None:
        try:
            while not self._is_closing:
                self._wake_up.clear()
                while self._inbox:
                    self._inbox.popleft().run()
                if not self._work.step():
                    self._wake_up.wait()
            error: RunError = EngineDownError(
                f"{self.name} was closed", "start a new engine; the request had no response"
            )
        except RunError as cause:
            error = cause
        except BaseException as cause:
            error = EngineDownError(
                f"{self.name} failed: {type(cause).__name__}: {cause}",
                "look at the cause; restart the replica and publish the weights to it again",
            )
            error.__cause__ = cause
        with self._lock:
            self.end = error
            left = list(self._inbox)
            self._inbox.clear()
        for command in left:
            command.fail(error)
        self._work.ended(error)


def give_all(results: Iterable[tuple[Answer[Result], Result | RunError]]) -> None:
    """Settle many answers in one call per event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Answer[Result], Result | RunError]]] = {}
    for answer, result in results:
        by_loop.setdefault(answer._loop, []).append((answer, result))
    for loop, items in by_loop.items():
        _call(loop, _settle, items)


def _settle(items: list[tuple[Answer[Any], Any]]) -> None:
    for answer, result in items:
        (_fail if isinstance(result, RunError) else _give)(answer.future, result)


def _give(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *args: Any) -> None:
    # The loop may be closed while the thread finishes: then nobody waits any more.
    if not loop.is_closed():
        try:
            loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            return
