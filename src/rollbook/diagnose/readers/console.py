"""Console logs of anybody's making: whatever prints names with numbers, a step at a time, and texts without any step
that hold an error.

Read are `step:3 | mean_reward=0.4 | loss=0.1`, `Epoch:[1/1](3/900), Reward: 0.4`, `iter 3: loss 0.1, reward 0.4`, dicts
on one line or over several, and blocks with a name and a number a line. A record is one only if it holds something
that a run alone can tell (`words.RESULTS`). Its step is what its line or the heading above it says; else records are
counted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.diagnose.readers.bars import Bars
from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.entries import STEP_KEYS, Entry
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.records import rows
from rollbook.diagnose.readers.text import (
    NUMBER,
    TROUBLE_BYTES,
    dict_pairs,
    lines,
    number,
    plain,
)
from rollbook.diagnose.readers.words import RESULTS, meant, words_of
from rollbook.diagnose.series import Event, Row

_NAME = r"[A-Za-z][\w./@%-]*(?: [A-Za-z][\w./@%-]*){0,3}"
_PAIR = re.compile(rf"(?<![\w./])({_NAME})\s*[:=]\s*({NUMBER})(%|m?s\b|(?![\w.:/-]))")
_BESIDE = re.compile(rf"(?<![\w./])([A-Za-z][\w/]*)\s+({NUMBER})(%|m?s\b|(?![\w.:/-]))")
_CELLS = re.compile(rf"^\W*({_NAME})\s*[|│┃]\s*({NUMBER})()\s*[|│┃]?\s*$")
_OF_STEPS = (
    r"(?:(?:global|grpo|ppo|rl|train|training|optimizer|policy)[ _])?(?:step|iteration|iter|update|rollout)"
)
_STEP = re.compile(rf"(?<![\w/.-])({_OF_STEPS})\s?[:=#]?\s?[\[(]?(\d+)(?![\w.%-]|:\d)", re.IGNORECASE)
_HEADING = re.compile(rf"^\W*{_OF_STEPS}\s?[:=#]?\s?[\[(]?(\d+)(?![\w.%-]|:\d)", re.IGNORECASE)
_WEAK_STEP = re.compile(r"(?<![\w/.-])(?:episode|round)\s?[:=#]?\s?[\[(]?(\d+)(?![\w.%-]|:\d)", re.IGNORECASE)
_RULE = re.compile(r"^\W*[=*#-]{3}")
_OF_A_STEP = frozenset({"step", "global", "grpo", "ppo", "rl", "train", "update", "rollout", "policy"})
_NO_STEP = re.compile(
    r"(?:total|max|num|every|warmup|last|next|best|per|each|optimization|mean|avg)\W*$", re.I
)
_OF_TOTAL = re.compile(r"[(\[]\s*(\d+)/(?:\d\d+)\s*[)\]]|\|\s*(\d+)/\d+ \[[^\]{]*\w=")
"""One of all of them, in brackets or of a progress bar with numbers of its own."""
_STEP_KEYS = STEP_KEYS[: STEP_KEYS.index("batch")]
MAX_GAP = 30
"""Lines without a number after which a record is over."""
MAX_LOOKED_AT = 4000
"""Characters of a line that are looked at."""
_TELLING = (
    "eward",
    "REWARD",
    "oss",
    "kl",
    "KL",
    "core",
    "ccuracy",
    "eturn",
    "ntropy",
    "norm",
    "uccess",
    "acc",
)
_NEEDLES = tuple(word.encode() for word in (*_TELLING, "step", "Step", "STEP", "teration", "%|"))
_OF_TROUBLE = (
    "rror",
    "Traceback",
    "xception",
    "illed",
    "fault",
    "SIG",
    "CANCELLED",
    "imeout",
    "imed out",
    "memory",
)
SMALL_BYTES = 8 * 1024 * 1024
"""Size up to which every line is looked at; of a larger log those that may tell something."""


def recognizes(head: str) -> float:
    """0 or 0.3: any format of its own goes before."""
    if not any(map(head.__contains__, _TELLING)):
        return 0.0
    records = _Records()
    found = [results for line in head.splitlines() for _, results in records.add(line)]
    found += [results for _, results in records.end()]
    return 0.3 if len(found) >= 3 or any(len(results) >= 2 for results in found) else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows and trouble of a console log, in its order; of a text without steps its trouble and its end."""
    yield from rows(_items(path))


def _items(path: Path) -> Iterator[Entry | Event]:
    is_small = path.stat().st_size <= SMALL_BYTES
    watcher, records = LineWatcher(sees_all=is_small), _Records()
    wanted = () if is_small else (*_NEEDLES, *TROUBLE_BYTES, *ENDING_BYTES)
    newest: int | None = None
    bars = Bars()
    for raw in lines(path, wanted):
        line = plain(raw)
        bars.add(line)
        ended = list(records.add(line))
        if not records.holds_line and any(map(line.__contains__, _OF_TROUBLE)):
            ended += records.end()  # before what went wrong after it
        for record, _ in ended:
            newest = int(record["step"])
            if event := watcher.ending.step(newest):
                yield event
            yield dict(record)
        if not records.holds_line and (
            event := watcher.watch(line, bars.newest if newest is None else newest)
        ):
            yield event
    for record, _ in records.end():
        newest = int(record["step"])
        yield dict(record)
    if newest is None and bars.tell:
        for step, seconds in bars.seconds.items():
            yield {"step": float(step), "timing_s/step": seconds}
    yield from watcher.end(bars.newest if newest is None else newest)
    if newest is None and bars.tell:
        says = f"this log holds progress bars alone ({bars.newest} of {bars.of} steps): the seconds of steps are judged"
        yield Event(kind="note", text=f"{says}, and errors; print metrics or keep what was sent to a tracker")
    elif newest is None:
        yield Event(
            kind="note", text="this text holds no step: judged is the error that it holds, and nothing else"
        )
    elif records.are_counted:
        yield Event(kind="note", text="no line says which step it is of: records are counted")


def has_bars(head: str) -> bool:
    """Whether a text holds the progress bars of a training."""
    bars = Bars()
    for line in head.splitlines():
        bars.add(line)
    return bars.tell


@dataclass(slots=True)
class _Records:
    """Lines that become records."""

    are_counted: bool = False
    holds_line: bool = False
    """Whether the newest line was one of metrics."""
    _data: dict[str, float] = field(default_factory=dict)
    _results: set[str] = field(default_factory=set)
    _step: int | None = None
    _heading: int | None = None
    _newest: int = 0
    _gap: int = 0

    def add(self, line: str) -> Iterator[tuple[dict[str, float], set[str]]]:
        """The record that a line ends, if it does: (names and numbers with the step, results among them)."""
        line = line[-MAX_LOOKED_AT:]
        data, step = _pairs(line), None
        results = _results(data)
        if results or not data:
            step = _step_of(line, is_record=bool(results))
        self.holds_line = bool(results)
        if not data:
            if step is not None:
                yield from self.end()
                self._heading = step
            self._gap += 1
            if self._gap > MAX_GAP:
                yield from self.end()
            return
        if (
            (results and not self._results and len(data) > 1)  # what came before was no record
            or any(name in self._data for name in data)
            or (step is not None and self._step is not None and step != self._step)
        ):
            yield from self.end()
        self._gap = 0
        self._data.update(data)
        self._results |= results
        self._step = step if step is not None else self._step

    def end(self) -> Iterator[tuple[dict[str, float], set[str]]]:
        data, results, step = self._data, self._results, self._step
        self._data, self._results, self._step, self._gap = {}, set(), None, 0
        if not results:
            return
        counted = next((key for key in _STEP_KEYS if data.get(key, 0.5).is_integer()), None)
        if step is None and counted is not None:
            step = int(data[counted])
        if step is None:
            step, self._heading = self._heading, None
        if step is None and len(results) < 2:
            return  # a sentence with a number
        if step is None:
            self.are_counted = True
            step = self._newest + 1
        self._newest = step
        yield {**data, "step": float(step)}, results


def _results(data: dict[str, float]) -> set[str]:
    return {found[0] for name in data if (found := meant(name)) is not None} & RESULTS


def _step_of(line: str, *, is_record: bool) -> int | None:
    """The step that a line says it is of; a line without metrics must begin with it, or be drawn as a heading."""
    if not is_record and _RULE.match(line) is None:
        heading = _HEADING.match(line)
        return int(heading.group(1)) if heading is not None else None
    for found in _STEP.finditer(line):
        if not _NO_STEP.search(line[: found.start()]):
            return int(found.group(2))
    of_total = _OF_TOTAL.findall(line)
    if of_total:
        return int("".join(of_total[-1]))
    weak = _WEAK_STEP.search(line)
    return int(weak.group(1)) if weak is not None else None


def _pairs(line: str) -> dict[str, float]:
    """Names and numbers of a line: a dict, assignments, cells or, where it has none of these, names beside numbers."""
    if "': " in line or '": ' in line or "':" in line:
        pairs = dict_pairs(line)
        if pairs:
            return pairs
    cells = _CELLS.match(line) if "|" in line or "│" in line or "┃" in line else None
    found = [cells.groups()] if cells is not None else _PAIR.findall(line)
    if any(map(line.__contains__, _TELLING)) and not any(meant(_named(name)) for name, *_ in found):
        found += _BESIDE.findall(line)
    data: dict[str, float] = {}
    for name, written, unit in found:
        value = number(written)
        name = "step" if _counts_steps(name) else _named(name)
        if value is not None:
            data.setdefault(name, value / 100 if unit == "%" else value / 1000 if unit == "ms" else value)
    return data


def _named(name: str) -> str:
    """Of the words before a number those that name it: the most that mean something, else the last."""
    words = name.split(" ")
    for start in range(len(words)):
        if meant(" ".join(words[start:])) is not None:
            return "_".join(words[start:])
    return "_".join(words)


def _counts_steps(name: str) -> bool:
    words = words_of(name)
    return words <= _OF_A_STEP and bool(words & {"step", "update", "rollout"})
