"""JSON lines `{"step": N, "data": {name: value}}`: verl's file logger, and `metrics.jsonl` of our run directory.

Facts (verl 0.9): one line per log call; NaN becomes null; a resumed run opens the file for writing, so the
earlier steps are gone. A step may have two lines (training and validation).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

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
    for text in lines(path):
        if not text.strip():
            continue
        row = parse_line(text)
        last_damaged = row is None
        num_damaged += row is None
        if row is not None:
            yield row
    if last_damaged:
        num_damaged -= 1
        yield Event(kind="truncated", text="the last line is cut short")
    if num_damaged:
        yield Event(kind="damaged", text=f"{counted(num_damaged, 'line')} not whole and left out")


def parse_line(text: str) -> Row | None:
    """One line, or None when it is damaged. Python's JSON reader takes NaN and Infinity as they are."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict):
        return None
    step = number(value.get("step"))
    data = value.get("data")
    if step is None or step != step or not isinstance(data, dict) or not step.is_integer():
        return None
    numbers = {str(name): parsed for name, v in data.items() if (parsed := number(v)) is not None}
    at_s = number(value.get("at_s")) if "at_s" in value else None
    return Row(step=int(step), data=numbers, at_s=at_s)
