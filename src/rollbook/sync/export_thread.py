"""The one thread on which a trainer's weights are exported: a trainer's collectives come from one thread, in one order.

It keeps no process alive. An export may hang in a gather for good, and nothing can end a thread from outside: `close`
waits for it as long as it is told, and nothing more is begun.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

Result = TypeVar("Result")


class ExportThread:
    """Calls, one after another."""

    def __init__(self) -> None:
        self.is_closed = False
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._thread: Thread | None = None

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Make `call` after those before it. Cancelled, it is not made, unless it is under way."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        if self._thread is None:
            self._thread = Thread(target=self._run, name="export", daemon=True)
            self._thread.start()
        return future

    def close(self, deadline_s: float) -> bool:
        """Start no further call, and wait for the one under way; whether it ended in time."""
        self.is_closed = True
        self._calls.put(None)
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            future, call = item
            if self.is_closed:
                future.cancel()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del item, future, call  # which would keep a publication's tensors until the next one
