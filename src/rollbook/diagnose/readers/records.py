"""Records of metrics in JSON, JSON lines or CSV of anybody's making: found wherever they lie, keyed by their own step.

Which they are, `entries.py` finds. Which column is the step is told by its name, else rows are counted, and that is
said. Rows of one step complete each other; where they repeat each other (one row a sample, a rank or a micro batch)
their means are read. Rows of an evaluation (`"type": "eval"`) are kept apart.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers.entries import (
    STEP_KEYS,
    Entry,
    are_a_run,
    are_samples,
    found_in,
    of_document,
    of_lines,
    of_table,
    scalar,
    whole_of_list,
)
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import lines, open_binary
from rollbook.diagnose.readers.words import meant
from rollbook.diagnose.series import Event, Row
from rollbook.observe.numbers import counted

_MAY_BEGIN_AGAIN = STEP_KEYS[: STEP_KEYS.index("batch")]
"""The others count steps only where they never stand still or go back: batches of an epoch do."""
NO_METRICS = frozenset(
    {"_timestamp", "_runtime", "_wandb", "seed", "timestamp", "time_stamp", *STEP_KEYS} - {"epoch"}
)
_SPLITS = ("type", "split", "phase", "mode", "stage", "kind", "event", "prefix")
_IS_EVAL = re.compile(r"(?:eval|val|valid|validation|test|evaluation)(?:_.*)?", re.IGNORECASE)
MOST_RESUMED = 3
"""Times at the most that a counter goes back for restarts: what does so more often counts within an epoch."""
HEAD_ENTRIES = 2000
"""Entries that are looked at to find the column of steps and how often one repeats."""
_ALWAYS_MEASURED = frozenset({"actor/loss", "actor/pg_loss", "actor/grad_norm"})
"""A step without a number of these had none that is one."""


def recognizes(head: str) -> float:
    """0 to 0.4: any format of its own goes before; least for rows of samples, of whose steps the means are read."""
    start = head.lstrip()
    if start[:1] in ("{", "["):
        entries = of_document(start) or list(itertools.islice(of_lines(start.splitlines()), 200))
    else:
        entries = list(itertools.islice(of_table(start.splitlines()), 200))
    return 0.0 if not are_a_run(entries) else 0.1 if are_samples(entries) else 0.4


CUT_LIST = Event(kind="note", text="the list is damaged or cut short: read are its records before that")


def read(path: Path) -> Iterator[Row | Event]:
    """Rows of the file, and what was done about them."""
    with open_binary(path) as file:
        first = file.read(4096).lstrip()[:1]
    if first not in (b"{", b"["):
        yield from rows(of_table(lines(path)))
        return
    entries: Iterable[Entry] | None = None
    if first == b"[" or not _is_of_lines(path):
        with open_binary(path) as file:
            document = file.read().decode("utf-8", errors="replace")
        try:
            entries = found_in(json.loads(document))
        except (ValueError, RecursionError):
            entries = list(whole_of_list(document)) or None
            if entries:
                yield CUT_LIST
    yield from rows(of_lines(lines(path)) if entries is None else entries)


def _is_of_lines(path: Path) -> bool:
    """Whether the first line is an object by itself, and not the only one."""
    first = list(itertools.islice((line for line in lines(path) if line.strip()), 2))
    try:
        return len(first) == 2 and isinstance(json.loads(first[0]), dict)
    except (ValueError, RecursionError):
        return False


def rows(items: Iterable[Entry | Event]) -> Iterator[Row | Event]:
    """Rows of entries in their order, keyed by the column that counts steps; events stay where they are."""
    items = iter(items)
    head = list(itertools.islice(items, HEAD_ENTRIES))
    entries = [item for item in head if isinstance(item, dict)]
    key = step_key(entries)
    made = _Rows(key, repeats(entries, key))
    for item in itertools.chain(head, items):
        if isinstance(item, Event):
            yield item
        else:
            yield from made.add(item)
    yield from made.rest()


def step_key(entries: list[Entry]) -> str | None:
    """The column that counts steps: the surest that half of the entries have and that is not the same in all."""
    for key in STEP_KEYS:
        found = [s for entry in entries if (s := _count(entry.get(key))) is not None]
        grows = all(a < b for a, b in itertools.pairwise(found))
        if (
            found
            and 2 * len(found) >= len(entries)
            and (len(set(found)) > 1 or len(entries) == 1)
            and (grows or key in _MAY_BEGIN_AGAIN)
        ):
            return key
    return next((k for k in _MAY_BEGIN_AGAIN if any(_count(e.get(k)) is not None for e in entries)), None)


def _count(value: Any) -> int | None:
    """A step as a column may write it: 7, "7", 7.0 or "7/100"."""
    if isinstance(value, str):
        value = value.partition("/")[0]
    found = None if value is None or isinstance(value, bool) else scalar(value)
    return (
        int(found)
        if found is not None and found == found and abs(found) < 2**53 and found == int(found)
        else None
    )


def repeats(entries: list[Entry], key: str | None) -> bool:
    """Whether most steps have several entries with the same names, one after the other."""
    if key is None:
        return False
    same = Counter[bool]()
    for _, group in itertools.groupby(entries, lambda entry: _count(entry.get(key))):
        shapes = Counter(frozenset(entry) for entry in group)
        same[max(shapes.values()) > 1] += 1
    return same[True] >= max(2, same[False])


@dataclass(slots=True)
class _Rows:
    """Entries that become rows."""

    key: str | None
    repeats: bool
    _step: int = 0
    _num: int = 0
    _held: dict[str, list[float]] = field(default_factory=dict)
    _most: int = 1
    _told: set[str] = field(default_factory=set)
    """Metrics that have had a number."""
    _counted: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What other columns count steps, too -> the least and the newest."""
    _went_back: list[Event] = field(default_factory=list)
    _open: set[str] = field(default_factory=set)
    """Metrics without a step since the newest that has one."""
    watcher: LineWatcher = field(default_factory=LineWatcher)
    """Of errors that stand in fields; in rows of samples they are the samples'."""

    def add(self, entry: Entry) -> Iterator[Row | Event]:
        found = _count(entry.get(self.key)) if self.key is not None else None
        step = found if found is not None else self._num if self.key is None else self._step
        at_s = scalar(entry.get("_timestamp", ""))
        prefix = "val/all/" if any(_is_eval(entry.get(split)) for split in _SPLITS) else ""
        data = {
            f"{prefix}{name}": v
            for name, raw in entry.items()
            if name != self.key and name not in NO_METRICS and (v := scalar(raw)) is not None
            if raw is not None or self._is_measured(f"{prefix}{name}")
        }
        self._told.update(name for name, value in data.items() if value == value)
        self._num += 1
        self._open = self._open | data.keys() if found is None else set()
        if found is not None and not self.repeats:
            self._count_others(entry, step)
        if not self.repeats:
            if data and (ended := self.watcher.ending.step(step)):
                yield ended
            yield from self.watcher.watch_fields(entry, self._step)
        if not data:
            return
        if not self.repeats:
            self._step = step
            yield Row(step=step, data=data, at_s=at_s)
            return
        if step != self._step:
            yield from self._mean()
            self._step = step
        for name, value in data.items():
            self._held.setdefault(name, []).append(value)

    def _count_others(self, entry: Entry, step: int) -> None:
        """Notice a column that counts steps, too, and goes back where the steps go on: the run was taken up again."""
        for key in _MAY_BEGIN_AGAIN:
            if key == self.key or (count := _count(entry.get(key))) is None:
                continue
            least, before = self._counted.get(key, (count, count))
            self._counted[key] = min(least, count), count
            if least + 1 < count < before and step == self._step + 1:  # to the least: the next epoch
                says = f"{key} goes back from {before} to {count} at step {step}"
                self._went_back.append(Event(kind="resumed", step=self._step, text=says))

    def _is_measured(self, name: str) -> bool:
        """Whether null stands for NaN: a logger writes null of what it does not measure, too, from the first row on."""
        found = meant(name)
        return name in self._told or (found is not None and found[0] in _ALWAYS_MEASURED)

    def _mean(self) -> Iterator[Row]:
        if self._held:
            self._most = max(self._most, *map(len, self._held.values()))
            yield Row(step=self._step, data={n: sum(v) / len(v) for n, v in self._held.items()})
        self._held = {}

    def rest(self) -> Iterator[Row | Event]:
        yield from self._mean()
        yield from self._went_back if len(self._went_back) <= MOST_RESUMED else ()
        yield from self.watcher.end(self._step)
        if self._open and self.key is not None and not self.repeats:
            names = frozenset(self._open)
            yield Event(kind="open_step", step=self._step, text="a step is open", fields={"names": names})
        if self.repeats:
            says = f"a step has up to {counted(self._most, 'row')} of the same metrics: their means are read"
            yield Event(kind="note", text=says)
        if self.key is None and self._num > 1:
            yield Event(kind="note", text="no column counts steps: rows are counted")


def _is_eval(value: Any) -> bool:
    return isinstance(value, str) and _IS_EVAL.fullmatch(value.strip()) is not None
