"""Ctrl-C and termination signals, from the first moment of a run to its last: one clean message and exit code each.

    starting ────1──────────────────────────► stopping ──2──► gone
    stepping ────1──► ending ───────2───────► stopping ──3──► gone
    closing  ────1──► (goes on closing) ────────────────2──► gone

*ending* finishes the step in progress and saves; *stopping* cancels what runs and closes the parts; *gone* leaves the
process as it is. A signal is never an exception: Python would raise it wherever the program happens to be, also in the
middle of closing a part.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Self

from rollbook.observe.numbers import counted
from rollbook.observe.recorder import Recorder

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

EXIT_CODE = 130
_SHOW_CURSOR = "\x1b[?25h"


class Interrupts:
    """Takes the signals while its `with` block lasts. Does nothing on a thread that is not the main one."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self.controller: Controller | None = None
        """Set once there is one: its `is_stepping` says whether a step could be finished."""
        self.is_closing = False
        """Set once the run has ended and only its parts are left to close."""
        self.is_interrupted = False
        """The run was asked to end before it had reached its end."""
        self.is_stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[object] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        self.take()
        return self

    def take(self) -> None:
        """Become the handler, also of a signal that a library (Ray) has taken since."""
        with contextlib.suppress(ValueError):  # not on the main thread
            for number in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(number, self._take)
                self._before.setdefault(number, before)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what `signal.signal` gave

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Around the run's own task, as soon as it runs: it is what `stopping` cancels.

        The system may hand a signal to any thread, and Python takes it on the main one alone, which then sleeps in its
        event loop: a socket wakes it.
        """
        self._loop, self._task = loop, _ = asyncio.get_running_loop(), asyncio.current_task()
        ours, theirs = socket.socketpair()
        with ours, theirs:
            for end in (ours, theirs):
                end.setblocking(False)
            loop.add_reader(ours, _drain, ours)
            before = -1
            with contextlib.suppress(ValueError):  # not on the main thread
                before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
            try:
                if self.is_stopping:
                    self._stop()
                yield
            finally:
                self._loop = self._task = None
                with contextlib.suppress(ValueError):
                    signal.set_wakeup_fd(before)
                loop.remove_reader(ours)

    def _take(self, number: int, frame: FrameType | None) -> None:
        """Runs between two instructions of the main thread, which may hold any lock: decides, and lets the loop speak
        and act."""
        run = "the run" if self.recorder is None else str(self.recorder.path)
        again = "again to leave without closing the parts"
        if self.is_stopping:
            self._leave()
        elif self.is_closing:
            self.is_stopping = True
            self._call(self._say, "closing the parts of the run", again)
        elif self.controller is not None and self.controller.is_stepping and not self.is_interrupted:
            self.is_interrupted = self.controller.is_stop_requested = True
            repeated = counted(self.controller.num_steps_uncommitted + 1, "step")
            self._call(
                self._say,
                "ending after the step in progress, with a checkpoint",
                f"again to stop at once: `rollbook train --resume {run}` then goes on from its newest checkpoint and "
                f"repeats {repeated}",
            )
        else:
            was_stepping, self.is_interrupted = self.is_interrupted, True
            self.is_stopping = True
            where = (
                "stopping at once, without the step in progress"
                if was_stepping
                else "stopping before the first step"
            )
            self._call(self._say, where, again)
            self._call(self._stop)

    def _call(self, work: Callable[..., None], *args: str) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(work, *args)
        elif args:  # before the loop, or after it; a stop is seen by `attached`
            self._write("interrupted: " + "\nhint: ".join(args))

    def _stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _say(self, effect: str, remedy: str) -> None:
        if self.recorder is not None:
            self.recorder.event("interrupted", effect=effect, remedy=remedy)

    def _leave(self) -> None:
        left = "nothing was written"
        if self.recorder is not None and self.recorder.is_accepted:
            left = f"`rollbook train --resume {self.recorder.path}` continues from its newest checkpoint"
        elif self.recorder is not None:
            self.recorder.run_dir.abandon()
        self._write(f"interrupted again: left without closing the parts; {left}")
        os._exit(EXIT_CODE)

    @staticmethod
    def _write(text: str) -> None:
        """Past every buffer and lock of the program."""
        if sys.stderr.isatty():
            text = _SHOW_CURSOR + text
        with contextlib.suppress(OSError):
            os.write(2, f"{text}\n".encode())


def _drain(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        end.recv(4096)
