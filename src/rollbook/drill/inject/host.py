"""Faults of the host."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.drill.fault import Site
from rollbook.observe.clock import Clock


@dataclass(slots=True)
class _JumpingClock:
    """A wall clock that is set back by an hour, and forward by two a few steps later; the monotonic one goes on."""

    clock: Clock
    site: Site

    def unix_s(self) -> float:
        hours = (0, -1, 1)[self.site.is_on + (self.site.age >= 6)]
        return self.clock.unix_s() + 3600.0 * hours

    def mono_s(self) -> float:
        return self.clock.mono_s()


def clock_jump(site: Site) -> None:
    """The host's wall clock jumps back and forth; nothing else happens."""
    recorder = site.controller.recorder
    recorder.clock = _JumpingClock(recorder.clock, site)
