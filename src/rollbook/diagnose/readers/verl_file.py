"""JSON lines `{"step": N, "data": {name: value}}`: verl's file logger, and `metrics.jsonl` of our run directory.

Facts (verl 0.9): one line per log call; NaN becomes null; a resumed run opens the file for writing, so the
earlier steps are gone. A step may have two lines (training and validation).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import lines, number
from rollbook.diagnose.series import Event, Row
from rollbook.observe.numbers import counted


def recognizes(head: str) -> float:
    line = r'^\s*\{(?:"step":\s*-?\d+(?:\.0*)?,\s*"data":\s*\{|"data":\s*\{[^\n]*\},\s*"step":\s*-?\d)'
    return 0.95 if re.search(line, head, re.MULTILINE) else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows in the order of the file. A line that is not whole is an event, never an error."""
    num_damaged = 0
    last_damaged = False
    newest: int | None = None
    watcher = LineWatcher()
    for text in lines(path):
        if not text.strip():
            continue
        entry = _object(text)
        row = None if entry is None else _row(entry)
        last_damaged = entry is None or (row is None and "data" in entry)
        num_damaged += last_damaged
        if row is not None:
            newest = row.step
            if ended := watcher.ending.step(newest):
                yield ended
            yield row
        if entry is not None:
            yield from watcher.watch_fields(entry, newest)
    yield from watcher.end(newest)
    if last_damaged:
        num_damaged -= 1
        yield Event(kind="truncated", text="the last line is cut short")
    if num_damaged:
        yield Event(kind="damaged", text=f"{counted(num_damaged, 'line')} not whole and left out")


def _object(text: str) -> dict[str, Any] | None:
    """The object of a line; Python's JSON reader takes NaN and Infinity as they are."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _row(value: dict[str, Any]) -> Row | None:
    step = number(value.get("step"))
    data = value.get("data")
    if step is None or step != step or not isinstance(data, dict) or not step.is_integer():
        return None
    numbers = {str(name): parsed for name, v in data.items() if (parsed := number(v)) is not None}
    at_s = number(value.get("at_s")) if "at_s" in value else None
    return Row(step=int(step), data=numbers, at_s=at_s)
