"""The one thread on which a trainer's weights are exported: a trainer's collectives come from one thread, in one order.

It keeps no process alive, and ends with its owner. An export may hang in a gather for good, and nothing can end a
thread from outside: `close` waits for it as long as it is told, and nothing more is begun.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar

Result = TypeVar("Result")
Calls = SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class ExportThread:
    """Calls, one after another."""

    def __init__(self) -> None:
        self._is_closed = Event()
        self._calls: Calls = SimpleQueue()
        self._thread: Thread | None = None
        weakref.finalize(self, self._calls.put, None)  # the thread knows the calls, not their owner

    @property
    def is_closed(self) -> bool:
        return self._is_closed.is_set()

    def submit(self, call: Callable[[], Result]) -> Future[Result]:
        """Make `call` after those before it. Cancelled, it is not made, unless it is under way."""
        future: Future[Result] = Future()
        self._calls.put((future, call))
        if self._thread is None:
            self._thread = Thread(
                target=_make, args=(self._calls, self._is_closed), name="export", daemon=True
            )
            self._thread.start()
        return future

    def close(self, deadline_s: float) -> bool:
        """Start no further call, and wait for the one under way; whether it ended in time."""
        self._is_closed.set()
        self._calls.put(None)
        if self._thread is None:
            return True
        self._thread.join(deadline_s)
        return not self._thread.is_alive()


def _make(calls: Calls, is_closed: Event) -> None:
    while (item := calls.get()) is not None:
        future, call = item
        if is_closed.is_set():
            future.cancel()
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        del item, future, call  # which would keep a publication's tensors until the next one
