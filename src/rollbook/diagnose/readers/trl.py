"""TRL: `trainer_state.json` (its `log_history`), the same entries as JSON lines, and the dicts it prints.

Facts (TRL 1.16, transformers 5): an entry has `step` in the history but not in print, where `epoch` is the
only clock; some versions print every value as a string; training and evaluation entries alternate.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers.endings import ENDING_BYTES, EndWatcher
from rollbook.diagnose.readers.text import (
    TROUBLE_BYTES,
    TroubleWatcher,
    dict_pairs,
    lines,
    number,
    open_binary,
    plain,
)
from rollbook.diagnose.series import Event, Row
from rollbook.errors import DataError

_TRAIN_KEYS = ("loss", "reward", "grad_norm", "learning_rate")


def recognizes(head: str) -> float:
    if '"log_history"' in head:
        return 0.99
    printed = re.findall(r"\{'loss': [^\n]{0,2000}'(?:reward|completions/mean_length|grad_norm)'", head)
    if printed:
        return 0.9
    history = re.findall(
        r'^\{[^\n]*"(?:reward|completions/mean_length)"[^\n]*"step":\s*\d+', head, re.MULTILINE
    )
    return 0.8 if history else 0.0


def find(folder: Path) -> Path | None:
    """The newest `trainer_state.json` in a folder of checkpoints."""
    states = list(folder.glob("trainer_state.json")) + list(folder.glob("checkpoint-*/trainer_state.json"))
    return max(states, key=lambda p: p.stat().st_mtime, default=None)


def read(path: Path) -> Iterator[Row | Event]:
    """Rows of a state file, a JSON-lines history or a console log."""
    with open_binary(path) as file:
        head = file.read(65_536).lstrip()
    if (head.startswith(b"{") and b'"log_history"' in head) or path.name == "trainer_state.json":
        yield from _read_state(path)
        return
    watcher, ending = TroubleWatcher(), EndWatcher()
    step = 0
    for raw in lines(path, (b"{'", b'{"', *TROUBLE_BYTES, *ENDING_BYTES)):
        line = plain(raw)
        if line.lstrip().startswith('{"') and '"step"' in line:
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if (row := _row(entry)) is not None:
                step = row.step
                if event := ending.step(step):
                    yield event
                yield row
        elif "{'" in line and any(f"'{key}'" in line for key in _TRAIN_KEYS):
            data = dict_pairs(line[line.index("{'") :])
            if "train_runtime" in data or not data:
                ending.watch(line)
                continue
            step = int(data.pop("step", step + 1))
            if event := ending.step(step):
                yield event
            yield Row(step=step, data=data)
        else:
            ending.watch(line)
            if event := watcher.watch(line, step or None):
                yield event
    if event := ending.event(step or None):
        yield event


def _read_state(path: Path) -> Iterator[Row]:
    try:
        with open_binary(path) as file:
            state = json.load(file)
        history = state["log_history"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is no whole trainer state ({error})",
            "use the state of an earlier checkpoint, or the console log",
        ) from error
    for entry in history:
        if (row := _row(entry)) is not None:
            yield row


def _row(entry: Any) -> Row | None:
    if not isinstance(entry, dict) or (step := number(entry.get("step"))) is None or step != step:
        return None
    data = {k: v for k, raw in entry.items() if k != "step" and (v := number(raw)) is not None}
    return Row(step=int(step), data=data) if data else None
