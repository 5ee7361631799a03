"""TRL: `trainer_state.json` (its `log_history`), the same entries as JSON lines or a list, the dicts it prints, and the
table that a notebook shows.

Facts (TRL 1.16, transformers 5): an entry has `step` in the history but not in print, where `epoch` is the
only clock; some versions print every value as a string, in whatever order; training and evaluation entries alternate;
ms-swift writes "global_step/max_steps": "1/547" instead; a notebook's table begins with "Step" and "Training Loss".
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.entries import of_lines, whole_of_list
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.records import CUT_LIST, repeats
from rollbook.diagnose.readers.text import (
    TROUBLE_BYTES,
    dict_pairs,
    lines,
    number,
    open_binary,
    plain,
)
from rollbook.diagnose.series import Event, Row
from rollbook.errors import DataError

_TRAIN_KEYS = ("loss", "reward", "grad_norm", "learning_rate")


_TABLE = re.compile(r"^\W*Step\s*[|\t]\s*Training Loss\s*[|\t].*reward", re.MULTILINE)
_TOLD_BY = r"(?:reward|completions/mean_length|completion_length|grad_norm)"
_OF_SWIFT = "global_step/max_steps"


def recognizes(head: str) -> float:
    if '"log_history"' in head:
        return 0.99
    printed = re.findall(r"\{'loss': [^\n]{0,2000}'" + _TOLD_BY + "'", head)
    if (
        printed
        or len(re.findall(r"^[^\n]{0,200}\{'" + _TOLD_BY + r"': [^\n]{0,2000}'loss': ", head, re.MULTILINE))
        >= 3
    ):
        return 0.9
    if _TABLE.search(head):
        return 0.9
    history = re.findall(
        r'^\{[^\n]*"(?:reward|completions/mean_length)"[^\n]*"(?:step"|' + _OF_SWIFT + r'"):\s*"?\d+',
        head,
        re.MULTILINE,
    )
    if history and repeats(list(itertools.islice(of_lines(head.splitlines()), 200)), "step"):
        return 0.0  # a row a sample
    is_list = (
        head.lstrip().startswith("[") and re.search(r'"reward"\s*:', head) and re.search(r'"step"\s*:', head)
    )
    return 0.8 if history or is_list else 0.0


def find(folder: Path) -> Path | None:
    """The newest `trainer_state.json` in a folder of checkpoints."""
    states = list(folder.glob("trainer_state.json")) + list(folder.glob("checkpoint-*/trainer_state.json"))
    return max(states, key=lambda p: p.stat().st_mtime, default=None)


def read(path: Path) -> Iterator[Row | Event]:
    """Rows of a state file, a JSON-lines history or a console log."""
    with open_binary(path) as file:
        head = file.read(65_536).lstrip()
    if (
        re.match(rb"\[\s*\{", head)
        or (b'"log_history"' in head and head.startswith(b"{"))
        or path.name == "trainer_state.json"
    ):
        yield from _read_state(path)
        return
    watcher = LineWatcher()
    step = 0
    columns: list[str] = []
    is_table = _TABLE.search(plain(head.decode("utf-8", errors="replace"))) is not None
    for raw in lines(path, () if is_table else (b"{'", b'{"', *TROUBLE_BYTES, *ENDING_BYTES), watcher):
        line = plain(raw)
        if is_table and _TABLE.search(line):
            columns = _cells(line)
        elif columns and (row := _row_of_table(columns, _cells(line))) is not None:
            step = row.step
            yield row
        elif line.lstrip().startswith('{"') and ('"step"' in line or _OF_SWIFT in line):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if (row := _row(entry)) is not None:
                step = row.step
                if event := watcher.ending.step(step):
                    yield event
                yield row
            yield from watcher.watch_fields(entry, step or None)
        elif "{'" in line and any(f"'{key}'" in line for key in _TRAIN_KEYS):
            data = dict_pairs(line[line.index("{'") :])
            if "train_runtime" in data or not data:
                watcher.ending.watch(line)
                continue
            counted = re.search(rf"'{_OF_SWIFT}': '(\d+)/", line)
            step = int(counted.group(1)) if counted is not None else int(data.pop("step", step + 1))
            if event := watcher.ending.step(step):
                yield event
            yield Row(step=step, data=data)
        else:
            if event := watcher.watch(line, step or None):
                yield event
    yield from watcher.end(step or None)


def _read_state(path: Path) -> Iterator[Row | Event]:
    with open_binary(path) as file:
        text = file.read().decode("utf-8", errors="replace")
    try:
        state = json.loads(text)
        history = state if isinstance(state, list) else state["log_history"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        _, _, after = text.partition('"log_history"')
        history = list(whole_of_list(after.lstrip(": \r\n\t") or text))
        if not history:
            raise DataError(
                f"{path} is no trainer state with a step ({error})",
                "use the state of an earlier checkpoint, or the console log",
            ) from error
        yield CUT_LIST
    for entry in history:
        if (row := _row(entry)) is not None:
            yield row


def _cells(line: str) -> list[str]:
    """The cells of a line of a table, between bars or tabs."""
    return [cell.strip() for cell in re.split(r"[|\t]", line.strip().strip("|"))]


def _row_of_table(columns: list[str], cells: list[str]) -> Row | None:
    if len(cells) != len(columns) or not cells[0].isdigit():
        return None
    names = ["loss" if name == "Training Loss" else name.replace(" / ", "/") for name in columns]
    data = {name: v for name, cell in zip(names[1:], cells[1:]) if (v := number(cell)) is not None}
    return Row(step=int(cells[0]), data=data) if data else None


def _row(entry: Any) -> Row | None:
    if not isinstance(entry, dict):
        return None
    step = number(entry.get("step", str(entry.get(_OF_SWIFT, "")).partition("/")[0]))
    if step is None or step != step:
        return None
    data = {
        k: v for k, raw in entry.items() if k not in ("step", _OF_SWIFT) and (v := number(raw)) is not None
    }
    return Row(step=int(step), data=data) if data else None
