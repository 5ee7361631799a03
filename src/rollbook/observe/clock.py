"""Time, passed in: a wall clock for people and a monotonic clock for durations."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Two readings of now, seconds."""

    def unix_s(self) -> float:
        """Wall clock, seconds since 1970; may jump."""

    def mono_s(self) -> float:
        """Monotonic clock; only differences mean something."""


class SystemClock:
    """The machine's clocks."""

    def unix_s(self) -> float:
        return time.time()

    def mono_s(self) -> float:
        return time.monotonic()


@dataclass(slots=True)
class ManualClock:
    """A clock that moves when told, for tests and simulations."""

    now_s: float = 0.0
    epoch_s: float = 1_700_000_000.0

    def unix_s(self) -> float:
        return self.epoch_s + self.now_s

    def mono_s(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
