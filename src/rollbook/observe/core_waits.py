"""Seconds in which a thread of this process could have run and got no core, as Linux counts them; nothing elsewhere.

They are what a busy machine adds to a stage, whoever keeps it busy: other work, or more threads of this process than
there are cores.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Self

PROC = Path("/proc")


class CoreWaits:
    """Of the threads of this process. Files stay open, so that a reading costs microseconds."""

    def __init__(self, proc: Path = PROC) -> None:
        self._threads = proc / "self" / "task"
        self._files: dict[str, int] = {}

    def look(self) -> None:
        """Know the threads that there are now."""
        try:
            names = {thread.name for thread in self._threads.iterdir()}
        except OSError:
            return
        for name in self._files.keys() - names:
            os.close(self._files.pop(name))
        for name in names - self._files.keys():
            try:
                self._files[name] = os.open(self._threads / name / "schedstat", os.O_RDONLY)
            except OSError:
                continue  # it ended, or the system does not count

    def read(self) -> dict[str, float]:
        """Thread -> seconds waited since it began."""
        waited: dict[str, float] = {}
        for name, file in self._files.items():
            try:
                waited[name] = int(os.pread(file, 96, 0).split()[1]) / 1e9
            except (OSError, ValueError, IndexError):
                continue
        return waited

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


class Waited:
    """`with Waited() as waited:` leaves in `waited.seconds` those for which the thread that waited most, of the threads
    that were there before, waited for a core."""

    seconds = 0.0

    def __enter__(self) -> Self:
        self._waits = CoreWaits()
        self._waits.look()
        self._before = self._waits.read()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = longest_wait_s(self._before, self._waits.read()) or 0.0
        self._waits.close()


def longest_wait_s(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Of the thread that waited most between two readings; None where the system does not say."""
    return max((after[name] - before[name] for name in after.keys() & before.keys()), default=None)
