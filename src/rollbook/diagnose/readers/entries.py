"""Entries of anybody's making, wherever they lie: a list of dicts, a dict of columns, the history within a state,
series of [step, value], lines of JSON, tables. Of a document those that hold most numbers of a run are found."""

from __future__ import annotations

import csv
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rollbook.diagnose.readers.text import number
from rollbook.diagnose.readers.words import meant, tells_a_run

Entry = dict[str, Any]

STEP_KEYS = (
    "training/global_step", "trainer/global_step", "train/global_step", "global_step", "global_steps", "grpo_step",
    "ppo_step", "rl_step", "train_step", "training_step", "train/step", "trainer_step", "current_steps", "current_step",
    "step", "steps", "_step", "training_iteration", "iteration", "iter", "update", "updates", "update_step",
    "num_updates", "rollout_step", "rollout_id", "rollout", "optimizer_step", "opt_step", "batch", "batch_idx", "round",
    "progress/batch", "episode", "epoch",
)  # fmt: skip
"""Columns that count steps, the surest first."""
_SAMPLE = re.compile(
    r"(?:prompt|question|problem|response|completion|text|output|answer|messages|generation|conversation)s?",
    re.I,
)
_RUN_LIKE = re.compile(r"reward|loss|kl\b|entropy|grad_norm|return", re.IGNORECASE)
MAX_DEPTH = 6


def are_a_run(entries: list[Entry]) -> bool:
    """Whether entries are steps of a run, rather than settings, samples or anything else with numbers."""
    told = Counter(name for entry in entries for name in entry)
    results = set(filter(tells_a_run, told))
    if not any(key in told for key in STEP_KEYS) and are_samples(entries):
        return False  # nothing says of which step
    if len(entries) == 1:
        return len(results) >= 2
    return len(entries) > 1 and (bool(results) or any(_RUN_LIKE.search(name) for name in told))


def are_samples(entries: list[Entry]) -> bool:
    """Whether entries hold texts that were sampled, a row each."""
    texts = (key for entry in entries for key, value in entry.items() if isinstance(value, str))
    return any(_SAMPLE.fullmatch(key) for key in texts)


def found_in(value: Any) -> list[Entry]:
    """The entries of a document that hold most of a run, the innermost of them; none where nothing does."""
    best = max(_candidates(value, 0), key=_weight, default=[])
    return best if are_a_run(best) else []


def of_document(text: str) -> list[Entry]:
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


def of_table(texts: Iterable[str]) -> Iterator[Entry]:
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
            numbers = {k: v for k, raw in item.items() if _is_count(k) and (v := scalar(raw)) is not None}
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
    scalars = [scalar(v) for v in item]
    if all(v is not None for v in scalars):
        return _Column([v for v in scalars if v is not None])
    if all(isinstance(v, list) and 2 <= len(v) <= 3 for v in item):  # TensorBoard exports [time, step, value]
        pairs = [(scalar(v[-2]), scalar(v[-1])) for v in item]
    elif all(isinstance(v, dict) and "value" in v for v in item):
        pairs = [
            (next((scalar(v[key]) for key in STEP_KEYS if key in v), None), scalar(v["value"])) for v in item
        ]
    else:
        return None
    known = [(at, v) for at, v in pairs if at is not None and v is not None]
    return _Column([v for _, v in known], [at for at, _ in known]) if len(known) == len(item) else None


def scalar(value: Any) -> float | None:
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
