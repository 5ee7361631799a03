"""Rows of metrics that tell of no step: what waits and for how long (`buffer/ready_groups`, `buffer/wait_s`), how long
ago the last step was, or what the devices do meanwhile. Each stands for those before it; a log that ends in the same
one again and again stands still.

What of it is an alarm, against the seconds of a step, is decided where lines said again and again are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from rollbook.diagnose.readers.standstill import KIND, LEAST_LINES
from rollbook.diagnose.readers.words import pieces_of, tells_a_run, words_of
from rollbook.diagnose.series import Event, Row
from rollbook.diagnose.wording import num

_OF_A_STEP = re.compile(r"(?:actor|critic|training|timing_s|response_length|reward|val\w*|val-\w+)/")
_WAITING = frozenset({"wait", "waiting", "waited", "elapsed", "idle", "stalled", "stuck", "pending"})
_SINCE_A_STEP = frozenset({"since", "last", "step"})
_OF_COLLECTIVES = frozenset({"nccl", "rccl", "collective", "collectives"})
_OF_DEVICES = re.compile(r"(?:^|/)system[./]")
MAX_SHOWN = 6
"""Values of a row that are shown."""
BUSY = 0.95
"""Share of its time that a device reports to be busy which spins in a collective."""
IDLE_POWER = 0.5
"""Of its power in the steps that it draws then at the most."""


@dataclass(slots=True)
class _Devices:
    """Means over the devices, row by row."""

    busy: list[float] = field(default_factory=list)
    power: list[float] = field(default_factory=list)

    def add(self, data: dict[str, float]) -> None:
        busy = [v for name, v in data.items() if _is_busy_share(name)]
        power = [v for name, v in data.items() if _is_power(name)]
        if busy and power:
            self.busy.append(min(busy) / 100.0)
            self.power.append(float(np.mean(power)))


@dataclass(slots=True)
class StatusRows:
    """Takes them out of the rows of a log as these stream by."""

    _held: Row | None = None
    _since: Row | None = None
    """The first that said the same as the one that is held."""
    _count: int = 0
    _in_steps: _Devices = field(default_factory=_Devices)
    _after: _Devices = field(default_factory=_Devices)
    """Since the newest step."""

    def rows(self, items: Iterable[Row | Event]) -> Iterator[Row | Event]:
        for item in items:
            if isinstance(item, Event):
                yield item
            elif _is_of_devices(item):
                self._after.add(item.data)
                self._hold(item)
            elif _waits(item):
                yield from self._let_go(unless=item)
                self._after.add(item.data)
                self._hold(item)
            else:
                yield from self._let_go()
                self._in_steps.add(item.data)
                self._after = _Devices()
                yield item
        if (stands := self._stands()) is not None:
            yield stands
        yield from self._let_go()

    def _hold(self, row: Row) -> None:
        if self._held is None or self._since is None or not _says_the_same(self._held, row):
            self._since, self._count = row, 0
        self._held, self._count = row, self._count + 1

    def _let_go(self, unless: Row | None = None) -> Iterator[Row]:
        """The row that is held, if no later one stands for it; those of the devices, and those that say how long ago a
        step was, stand beside no step."""
        held = self._held
        if held is None or (
            unless is not None and held.step == unless.step and held.data.keys() == unless.data.keys()
        ):
            return
        self._held = None
        if not _is_of_devices(held) and not any(map(_is_since_a_step, held.data)):
            yield held

    def _stands(self) -> Event | None:
        """The row that a log ends in, where it was said again and again."""
        first, last = self._since, self._held
        if first is None or last is None or self._count < LEAST_LINES:
            return None
        lasted_s = 0.0 if first.at_s is None or last.at_s is None else last.at_s - first.at_s
        lasted_s = max([lasted_s, *(v for name, v in last.data.items() if _counts(name))])
        says = self._spin() or _behind(last.data)
        if says is None and _is_of_devices(last):
            return None
        if says is None:
            shown = [item for item in last.data.items() if not pieces_of(item[0]) & _OF_COLLECTIVES]
            says = ", ".join(f"{name} {num(v)}" for name, v in shown[:MAX_SHOWN])
        return Event(
            kind=KIND,
            step=last.step,
            text=says,
            fields={"lasted_s": lasted_s, "count": self._count, "beside": ()},
        )

    def _spin(self) -> str | None:
        """That the devices are busy and draw little, where both are known."""
        if not self._after.busy or not self._in_steps.power:
            return None
        busy, power = np.median(self._after.busy), float(np.median(self._after.power))
        usual = float(np.median(self._in_steps.power))
        if busy < BUSY or power > IDLE_POWER * usual:
            return None
        says = f"no step, while all devices are busy at {num(power)} W, {num(usual)} W in the steps before: "
        return says + "they spin in a collective"


def _is_of_devices(row: Row) -> bool:
    return bool(row.data) and all(_OF_DEVICES.search(name) for name in row.data)


def _waits(row: Row) -> bool:
    """Whether a row counts what waits, and holds nothing of a step."""
    return any(map(_counts, row.data)) and not any(
        _OF_A_STEP.match(name) or tells_a_run(name) for name in row.data
    )


@lru_cache(maxsize=4096)
def _counts(name: str) -> bool:
    """Whether a name is of seconds that a wait has lasted."""
    return ("s" in words_of(name) and bool(pieces_of(name) & _WAITING)) or _is_since_a_step(name)


def _is_since_a_step(name: str) -> bool:
    return "s" in words_of(name) and pieces_of(name) >= _SINCE_A_STEP


def _behind(data: dict[str, float]) -> str | None:
    """That some ranks have not come to the collective in which others are: its number differs from rank to rank."""
    numbers = [(name, v) for name, v in data.items() if _is_number_of_a_collective(name)]
    if len({v for _, v in numbers}) < 2:
        return None
    shown = sorted(numbers, key=lambda item: item[1])
    shown = [shown[0], shown[-1]]
    return "no step, and ranks stand in different collectives: " + ", ".join(f"{n} {v:.0f}" for n, v in shown)


def _is_number_of_a_collective(name: str) -> bool:
    said = pieces_of(name)
    return bool(said & _OF_COLLECTIVES and said & {"seq", "sequence"})


def _says_the_same(a: Row, b: Row) -> bool:
    """Whether nothing moved from one row to another: a wait goes on, and what devices do is no movement."""
    if a.step != b.step or a.data.keys() != b.data.keys():
        return False
    if _is_of_devices(a):
        return True
    stands = {n: v for n, v in a.data.items() if not _is_busy_share(n) and not _is_power(n)}
    return all(b.data[n] >= v if _counts(n) else b.data[n] == v for n, v in stands.items())


@lru_cache(maxsize=4096)
def _is_busy_share(name: str) -> bool:
    said = pieces_of(name)
    return "gpu" in said and (
        said <= {"system", "gpu", "mean", "avg"} | _digits(said) or bool(said & {"util", "utilization"})
    )


@lru_cache(maxsize=4096)
def _is_power(name: str) -> bool:
    said = pieces_of(name)
    return "gpu" in said and bool(said & {"power", "watts"}) and not said & {"percent", "limit"}


def _digits(said: frozenset[str]) -> frozenset[str]:
    return frozenset(filter(str.isdigit, said))
