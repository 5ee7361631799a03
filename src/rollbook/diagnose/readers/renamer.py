"""Rows in the catalogue's names: by the tables of other frameworks' names, else by the words of a name where the log
has its metric under no better one. What was renamed is remembered, so that findings speak in the log's names."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from rollbook.diagnose.readers.names import (
    AREAL,
    EFFECTIVE,
    OF_AN_ACTOR,
    ONE_MINUS,
    PATTERNS,
    SINCE_THE_START,
    SUMMED,
    TRL,
)
from rollbook.diagnose.readers.words import (
    IN_WORDS,
    are_of_a_reward_model,
    is_length,
    is_mean_of_exp,
    is_share_of_nothing,
    meant,
    sources_in,
    words_of,
)
from rollbook.diagnose.series import Event, Row
from rollbook.observe.numbers import counted

REWARD = "critic/rewards/mean"
LENGTH = "response_length/mean"
LOGPROB_GAP = "training/logprob_gap/mean"
HEAD_ROWS = 400
"""Rows that are looked at before names are read by their words, so that the best name of each metric stands."""
MAX_TOLD = 6
"""Names whose reading is told in full."""


@dataclass(slots=True)
class Renamer:
    """Renames rows as they stream by, and remembers what it renamed."""

    tables: tuple[dict[str, str], ...]
    by_words: bool = False
    """Whether a name that no table has is read by its words, if its metric is under no other name in the log."""
    renamed: dict[str, str] = field(default_factory=dict)
    _known: dict[str, str] = field(default_factory=dict)
    _so_far: dict[str, float] = field(default_factory=dict)
    _read: dict[str, str] = field(default_factory=dict)
    """What was read by its words: name -> metric."""
    _taken: set[str] = field(default_factory=set)
    """Metrics that have a name in the log."""

    def in_log(self) -> dict[str, str]:
        """Catalogue name -> what the log calls the series that stands there, where it is another."""
        of_name: dict[str, list[str]] = {}
        for old, new in self._known.items():
            of_name.setdefault(new, []).append(old)
        called = {new: self._as_written(olds) for new, olds in of_name.items() if new not in olds}
        return {new: old for new, old in called.items() if new != old}

    def notes(self) -> list[str]:
        """What was read by its words, for "about the log"."""
        order = list(IN_WORDS)
        read = sorted(
            ((n, m) for n, m in self._read.items() if m in IN_WORDS), key=lambda item: order.index(item[1])
        )
        told = [f"{name} as {IN_WORDS[metric]}" for name, metric in read[:MAX_TOLD]]
        more = [counted(len(read) - MAX_TOLD, "more metric")] if len(read) > MAX_TOLD else []
        return [f"read by the words of their names: {', '.join(told + more)}"] if told else []

    def rows(self, items: Iterable[Row | Event]) -> Iterator[Row | Event]:
        items = iter(items)
        if self.by_words:
            head: list[Row | Event] = []
            num_rows = 0
            for item in items:
                head.append(item)
                num_rows += isinstance(item, Row)
                if num_rows == HEAD_ROWS:
                    break
            self._settle([item for item in head if isinstance(item, Row)])
            items = itertools.chain(head, items)
        for item in items:
            yield replace(item, data=self._data(item.data)) if isinstance(item, Row) else item

    def _settle(self, rows: list[Row]) -> None:
        """Give each metric the name of the log that means it best: by a table, else by its words."""
        count: dict[str, int] = {}
        for row in rows:
            for name in row.data:
                count[name] = count.get(name, 0) + 1
        self._taken = {self._by_table(name) for name in count if self._by_table(name) != name or "/" in name}
        if are_of_a_reward_model(count):
            scores = [name for name in count if words_of(name) & {"reward", "accuracy", "margin", "score"}]
            self._read.update({name: f"preference/{name}" for name in scores})
            return
        best: dict[str, tuple[int, int, int]] = {}
        named: dict[str, str] = {}
        for place, name in enumerate(count):
            found = meant(name) if self._by_table(name) == name else None
            if found is None or found[0] in self._taken:
                continue
            key = (found[1], -count[name], place)
            if found[0] not in best or key < best[found[0]]:
                best[found[0]], named[found[0]] = key, name
        for metric, name in named.items():
            self._read[name] = metric
            self._taken.add(metric)
        if REWARD in self._taken:
            sources = sources_in(name for name in count if self._by_table(name) == name)
            for name in count:
                if name in self._read or self._by_table(name) != name:
                    continue
                source = sources.get(name)
                metric = f"reward/{source}/mean" if source is not None else LENGTH if is_length(name) else ""
                if metric and metric not in self._taken:
                    self._read[name] = metric
                    self._taken.add(metric)

    def _data(self, data: dict[str, float]) -> dict[str, float]:
        known = self._known
        out: dict[str, float] = {}
        for name, value in data.items():
            new = known.get(name)
            if new is None:
                new = known[name] = self._name(name)
                if new != name:
                    self.renamed[name] = new
            if new == EFFECTIVE and self._is_one_minus(name):
                value = 1.0 - value
            elif new == LOGPROB_GAP and is_mean_of_exp(name):
                value = math.log(value) if value > 0 else math.nan
            if name in SINCE_THE_START:
                before = self._so_far.get(name)
                self._so_far[name] = value
                if before is None or value < before:
                    continue  # the first of a process
                value -= before
            if new in out and new != name:
                if any(pattern.fullmatch(name) for pattern, _ in SUMMED):
                    out[new] += value
                continue  # the catalogue's own name, or the first alias, stands
            out[new] = value
        return out

    def _name(self, name: str) -> str:
        new = self._by_table(name)
        if new != name or not self.by_words:
            return new
        if name not in self._read and (found := meant(name)) is not None and found[0] not in self._taken:
            self._read[name] = found[0]
            self._taken.add(found[0])
        return self._read.get(name, name)

    def _by_table(self, name: str) -> str:
        if name in ONE_MINUS:
            return ONE_MINUS[name]
        for table in self.tables:
            if name in table:
                return table[name]
        if (
            AREAL in self.tables
            and (known := AREAL.get(OF_AN_ACTOR.sub("ppo_actor/", name, count=1))) is not None
        ):
            return known
        if TRL in self.tables and name.startswith(
            "train/"
        ):  # how its trackers call what its history calls `reward`
            bare = name.removeprefix("train/")
            if bare in TRL or bare in ONE_MINUS or bare.startswith(("rewards/", "objective/")):
                return self._by_table(bare)
        for pattern, new in (*SUMMED, *PATTERNS):
            if (match := pattern.fullmatch(name)) is not None:
                return match.expand(new)
        return name

    def _is_one_minus(self, name: str) -> bool:
        if name.removeprefix("train/") in ONE_MINUS:
            return True
        return self._read.get(name) == EFFECTIVE and is_share_of_nothing(name)

    def _as_written(self, names: list[str]) -> str:
        """How the log writes a series: of several aliases the first stands, of a family that counts as one all do."""
        if len(names) > 1 and all(pattern.fullmatch(name) for name in names for pattern, _ in SUMMED):
            return f"{names[0]} and {len(names) - 1} more"
        if self._is_one_minus(names[0]):
            return f"1 - {names[0]}"
        return f"log {names[0]}" if is_mean_of_exp(names[0]) else names[0]
