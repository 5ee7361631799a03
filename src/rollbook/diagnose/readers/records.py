"""Records of metrics in JSON, JSON lines or CSV of anybody's making: found wherever they lie, keyed by their own step.

A document is searched for what holds most numbers of a run: a list of dicts, a dict of columns, the history within a
state, series of [step, value]. Which column is the step is told by its name, else rows are counted and that is said.
Rows of one step complete each other; where they repeat each other (one row a sample, a rank or a micro batch) their
means are read. Rows of an evaluation (`"type": "eval"`) are kept apart.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import lines, number, open_binary
from rollbook.diagnose.readers.words import meant, tells_a_run
from rollbook.diagnose.series import Event, Row
from rollbook.observe.numbers import counted

Entry = dict[str, Any]

STEP_KEYS = (
    "training/global_step", "trainer/global_step", "train/global_step", "global_step", "global_steps", "grpo_step",
    "ppo_step", "rl_step", "train_step", "training_step", "train/step", "trainer_step", "current_steps", "current_step",
    "step", "steps", "_step", "training_iteration", "iteration", "iter", "update", "updates", "update_step",
    "num_updates", "rollout_step", "rollout_id", "rollout", "optimizer_step", "opt_step", "batch", "batch_idx", "round",
    "progress/batch", "episode", "epoch",
)  # fmt: skip
"""Columns that count steps, the surest first."""
_MAY_BEGIN_AGAIN = STEP_KEYS[: STEP_KEYS.index("batch")]
"""The others count steps only where they never stand still or go back: batches of an epoch do."""
NO_METRICS = frozenset(
    {"_timestamp", "_runtime", "_wandb", "seed", "timestamp", "time_stamp", *STEP_KEYS} - {"epoch"}
)
_SPLITS = ("type", "split", "phase", "mode", "stage", "kind", "event", "prefix")
_IS_EVAL = re.compile(r"(?:eval|val|valid|validation|test|evaluation)(?:_.*)?", re.IGNORECASE)
_SAMPLE = re.compile(
    r"(?:prompt|question|problem|response|completion|text|output|answer|messages|generation|conversation)s?",
    re.I,
)
_RUN_LIKE = re.compile(r"reward|loss|kl\b|entropy|grad_norm|return", re.IGNORECASE)
HEAD_ENTRIES = 2000
"""Entries that are looked at to find the column of steps and how often one repeats."""
MAX_DEPTH = 6
_ALWAYS_MEASURED = frozenset({"actor/loss", "actor/pg_loss", "actor/grad_norm"})
"""A step without a number of these had none that is one."""


def recognizes(head: str) -> float:
    """0 to 0.4: any format of its own goes before; least for rows of samples, of whose steps the means are read."""
    start = head.lstrip()
    if start[:1] in ("{", "["):
        entries = _of_document(start) or list(itertools.islice(of_lines(start.splitlines()), 200))
    else:
        entries = list(itertools.islice(_of_table(start.splitlines()), 200))
    return 0.0 if not are_a_run(entries) else 0.1 if _are_samples(entries) else 0.4


CUT_LIST = Event(kind="note", text="the list is damaged or cut short: read are its records before that")


def read(path: Path) -> Iterator[Row | Event]:
    """Rows of the file, and what was done about them."""
    with open_binary(path) as file:
        first = file.read(4096).lstrip()[:1]
    if first not in (b"{", b"["):
        yield from rows(_of_table(lines(path)))
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


def are_a_run(entries: list[Entry]) -> bool:
    """Whether entries are steps of a run, rather than settings, samples or anything else with numbers."""
    told = Counter(name for entry in entries for name in entry)
    results = set(filter(tells_a_run, told))
    if not any(key in told for key in STEP_KEYS) and _are_samples(entries):
        return False  # nothing says of which step
    if len(entries) == 1:
        return len(results) >= 2
    return len(entries) > 1 and (bool(results) or any(_RUN_LIKE.search(name) for name in told))


def _are_samples(entries: list[Entry]) -> bool:
    """Whether entries hold texts that were sampled, a row each."""
    texts = (key for entry in entries for key, value in entry.items() if isinstance(value, str))
    return any(_SAMPLE.fullmatch(key) for key in texts)


# -- finding the records


def found_in(value: Any) -> list[Entry]:
    """The entries of a document that hold most of a run, the innermost of them; none where nothing does."""
    best = max(_candidates(value, 0), key=_weight, default=[])
    return best if are_a_run(best) else []


def _of_document(text: str) -> list[Entry]:
    try:
        return found_in(json.loads(text))
    except (ValueError, RecursionError):
        pass
    return list(itertools.islice(whole_of_list(text), 200))


def whole_of_list(text: str) -> Iterator[Entry]:
    """The records of a list up to where it is cut or damaged."""
    decoder = json.JSONDecoder()
    at = text.find("{") if text.lstrip()[:1] == "[" else -1
    while at >= 0:
        try:
            entry, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        if isinstance(entry, dict):
            yield flat(entry)
        at = text.find("{", end)
        if "]" in text[end : max(at, end)]:
            return


def of_lines(texts: Iterable[str]) -> Iterator[Entry]:
    """Objects, one a line or each over several lines; what is no object is left out."""
    held: list[str] = []
    for text in texts:
        if not text.strip():
            continue
        if held and not text[:1].isspace() and text[:1] not in "}]":
            held = []  # it never closed
        held.append(text)
        if not text.rstrip().rstrip(",").endswith("}"):
            held = held[-MAX_LINES_AN_OBJECT:] if held[0].lstrip()[:1] == "{" else []
            continue
        try:
            entry = json.loads("\n".join(held).strip().rstrip(","))
        except (ValueError, RecursionError):
            if len(held) > MAX_LINES_AN_OBJECT or held[0].lstrip()[:1] != "{":
                held = []
            continue
        held = []
        if isinstance(entry, dict):
            yield flat(entry)


MAX_LINES_AN_OBJECT = 500


def _of_table(texts: Iterable[str]) -> Iterator[Entry]:
    """Rows of a table with a header, separated by commas, tabs or semicolons; else of each table that stands in a text,
    between bars or in columns."""
    texts = iter(text for text in texts if text.strip() and not text.startswith("#"))
    header = next(texts, "")
    split = max(",\t;", key=header.count)
    names = [name.strip() for name in next(csv.reader([header], delimiter=split), [])]
    if not _are_names(names):
        yield from _in_a_text(itertools.chain([header], texts))
        return
    for cells in csv.reader(texts, delimiter=split):
        if len(cells) <= len(names):
            yield {named(name): cell for name, cell in zip(names, cells, strict=False) if cell != ""}


def _are_names(names: list[str]) -> bool:
    return 2 <= len(names) == len(set(names)) and not any(number(name) is not None for name in names)


_BARS = re.compile(r"\s*[|│┃]\s*")
_BLANKS = re.compile(r"\s+")


def _in_a_text(texts: Iterable[str]) -> Iterator[Entry]:
    names: list[str] = []
    split = _BARS
    for text in texts:
        cells = split.split(text.strip(" \t|│┃"))
        numbers = [value for cell in cells if (value := number(cell)) is not None]
        if names and len(cells) in (len(names), len(names) + 1) and 2 * len(numbers) >= len(cells):
            told = cells[-len(names) :]  # a data frame has a column of its own before them
            yield {name: cell for name, cell in zip(names, told, strict=True) if number(cell) is not None}
            continue
        if numbers or not any(
            word in text.lower() for word in ("reward", "loss", "return", "score", "accuracy")
        ):
            continue
        for split in (_BARS, _BLANKS):
            names = [named(name) for name in split.split(text.strip(" \t|│┃"))]
            results = set(filter(tells_a_run, names))
            if _are_names(names) and results and (len(results) >= 2 or set(names) & set(STEP_KEYS)):
                break
        else:
            names = []


@lru_cache(maxsize=8192)
def named(name: str) -> str:
    """A column's name; one that counts steps as `STEP_KEYS` has it, however it is capitalised."""
    plain = name.lower().replace(" ", "_")
    return plain if plain in STEP_KEYS else name


def _weight(entries: list[Entry]) -> int:
    """How much of a run there is in entries."""
    some = entries[:: max(1, len(entries) // 50)]
    told = {
        name: 2 if tells_a_run(name) else 1
        for entry in some
        for name in entry
        if meant(name) is not None or _RUN_LIKE.search(name)
    }
    return sum(told.get(name, 0) for entry in some for name in entry) * len(entries) // max(1, len(some))


def _candidates(value: Any, depth: int) -> Iterator[list[Entry]]:
    if depth > MAX_DEPTH:
        return
    if isinstance(value, list):
        for item in value[:20]:
            if isinstance(item, dict | list):
                yield from _candidates(item, depth + 1)
        entries = [flat(entry) for entry in value if isinstance(entry, dict)]
        if entries and 2 * len(entries) >= len(value):
            yield entries
    elif isinstance(value, dict):
        for item in value.values():
            if isinstance(item, dict | list):
                yield from _candidates(item, depth + 1)
        yield _of_columns(value)
        single = flat(value)
        if single:
            yield [single]
        if len(value) >= 2 and all(isinstance(item, dict) and _is_count(key) for key, item in value.items()):
            yield [{"step": int(str(key).removeprefix("step_")), **flat(item)} for key, item in value.items()]


def _is_count(key: object) -> bool:
    return str(key).removeprefix("step_").isdigit()


def _of_columns(value: Entry) -> list[Entry]:
    """The rows of a dict of columns: lists of numbers, of [step, value] or of {"step": ..., "value": ...}, and dicts
    from step to value; nested dicts of these too."""
    columns = dict(_columns(value, ""))
    if not columns:
        return []
    length = Counter(len(column.values) for column in columns.values() if column.steps is None)
    common = max(length, key=lambda n: (length[n] * n, n), default=0)
    counted = next((key for key in STEP_KEYS if key in columns and len(columns[key].values) == common), None)
    steps = columns[counted].values if counted is not None else None
    of_step: dict[float, Entry] = {}
    for name, column in columns.items():
        at = column.steps
        if at is None and len(column.values) == common:
            at = steps if steps is not None else [float(i + 1) for i in range(common)]
        for step, found in zip(at or [], column.values, strict=False):
            of_step.setdefault(step, {})[name] = found
    return [{**of_step[step], "step": step} for step in sorted(of_step)]


@dataclass(slots=True)
class _Column:
    values: list[float]
    steps: list[float] | None = None


def _columns(value: Entry, prefix: str) -> Iterator[tuple[str, _Column]]:
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            numbers = {k: v for k, raw in item.items() if _is_count(k) and (v := _scalar(raw)) is not None}
            if len(numbers) >= 2 and len(numbers) == len(item):
                at = [float(str(k).removeprefix("step_")) for k in numbers]
                yield name, _Column(list(numbers.values()), at)
            else:
                yield from _columns(item, f"{name}/")
        elif isinstance(item, list) and len(item) >= 2:
            column = _column(item)
            if column is not None:
                yield name, column


def _column(item: list[Any]) -> _Column | None:
    scalars = [_scalar(v) for v in item]
    if all(v is not None for v in scalars):
        return _Column([v for v in scalars if v is not None])
    if all(isinstance(v, list) and 2 <= len(v) <= 3 for v in item):  # TensorBoard exports [time, step, value]
        pairs = [(_scalar(v[-2]), _scalar(v[-1])) for v in item]
    elif all(isinstance(v, dict) and "value" in v for v in item):
        pairs = [
            (next((_scalar(v[key]) for key in STEP_KEYS if key in v), None), _scalar(v["value"]))
            for v in item
        ]
    else:
        return None
    known = [(at, v) for at, v in pairs if at is not None and v is not None]
    return _Column([v for _, v in known], [at for at, _ in known]) if len(known) == len(item) else None


def _scalar(value: Any) -> float | None:
    """A number, of any spelling; a string must be one, and null is NaN."""
    if type(value) is float:
        return value
    return None if isinstance(value, list | dict) else number(value)


def flat(entry: Entry, prefix: str = "", depth: int = 0) -> Entry:
    """An entry without nesting: dicts as name/inner, lists of numbers as their mean."""
    out: Entry = {}
    for key, value in entry.items():
        name = named(f"{prefix}{key}" if prefix else key)
        if type(value) is float:  # nearly all are
            out[name] = value
        elif isinstance(value, dict):
            if depth < MAX_DEPTH:
                inner = flat(value, "" if not prefix and key in _WRAPPERS else f"{name}/", depth + 1)
                out.update({k: v for k, v in inner.items() if k not in out})
        elif isinstance(value, list):
            numbers = [
                v for item in value if isinstance(item, bool | int | float) and (v := float(item)) == v
            ]
            if numbers and len(numbers) == len(value):
                out[name] = sum(numbers) / len(numbers)
        else:
            out[name] = value
    return out


_WRAPPERS = frozenset(
    {"metrics", "data", "values", "scalars", "stats", "log", "logs", "fields", "payload", "extra"}
)
"""Dicts of an entry whose names say nothing."""


# -- from entries to rows


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
    found = None if value is None or isinstance(value, bool) else _scalar(value)
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
    watcher: LineWatcher = field(default_factory=LineWatcher)
    """Of errors that stand in fields; in rows of samples they are the samples'."""

    def add(self, entry: Entry) -> Iterator[Row | Event]:
        found = _count(entry.get(self.key)) if self.key is not None else None
        step = found if found is not None else self._num if self.key is None else self._step
        at_s = _scalar(entry.get("_timestamp", ""))
        prefix = "val/all/" if any(_is_eval(entry.get(split)) for split in _SPLITS) else ""
        data = {
            f"{prefix}{name}": v
            for name, raw in entry.items()
            if name != self.key and name not in NO_METRICS and (v := _scalar(raw)) is not None
            if raw is not None or self._is_measured(f"{prefix}{name}")
        }
        self._told.update(name for name, value in data.items() if value == value)
        self._num += 1
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
        yield from self.watcher.end(self._step)
        if self.repeats:
            says = f"a step has up to {counted(self._most, 'row')} of the same metrics: their means are read"
            yield Event(kind="note", text=says)
        if self.key is None and self._num > 1:
            yield Event(kind="note", text="no column counts steps: rows are counted")


def _is_eval(value: Any) -> bool:
    return isinstance(value, str) and _IS_EVAL.fullmatch(value.strip()) is not None
