"""W&B exports: the CSV of a chart or of a run's history, and the history as JSON lines or one JSON list.

Facts: a chart's CSV names its columns "run name - metric" and adds "__MIN" and "__MAX"; a chart of several runs
has columns of each; a history row has `_step`, `_timestamp`, `_runtime`; several rows may belong to one training
step, each with other metrics.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollbook.diagnose.readers.text import lines, number, open_binary
from rollbook.diagnose.series import NEXT_RUN, Event, Row
from rollbook.errors import DataError

STEP_KEYS = (
    "training/global_step",
    "trainer/global_step",
    "train/global_step",
    "global_step",
    "step",
    "Step",
    "_step",
)
_MARKS = frozenset({"_timestamp", "_runtime", "_wandb", *STEP_KEYS})


def recognizes(head: str) -> float:
    first = head.lstrip().split("\n", 1)[0]
    if re.match(r'^"?(?:Step|_step|step|global_step|Relative Time[^,]*|training/global_step)"?,', first):
        return 0.9
    if (
        (first.startswith('"') and " - " in first and "__MIN" in first)
        or "_step," in first
        or ",_step" in first
    ):
        return 0.85
    if re.match(r'^\{.*"(?:_step|_timestamp|global_step|training/global_step)":', first):
        return 0.85
    if re.match(r'^\{.*"step":\s*\d+', first) and '"data"' not in first:
        return 0.5
    return 0.6 if first.lstrip().startswith("[") and '"_step"' in head else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by the training step where the export has one, else by its own row count."""
    with open_binary(path) as file:
        first = file.read(1024).lstrip()[:1]
    if first == b"[":
        try:
            with open_binary(path) as file:
                entries = json.load(file)
        except ValueError as error:
            raise DataError(f"{path} is no whole JSON list ({error})", "export the history again") from error
        yield from _rows(entries)
    elif first == b"{":
        yield from _rows(_json_lines(path))
    else:
        yield from _read_csv(path)


def _json_lines(path: Path) -> Iterator[Any]:
    for text in lines(path):
        try:
            yield json.loads(text)
        except ValueError:
            continue


def _read_csv(path: Path) -> Iterator[Row | Event]:
    """The runs of a chart one after the other, or the one run of a history."""
    header = next(csv.reader(lines(path)), [])
    runs = list(dict.fromkeys(name.rpartition(_OF_RUN)[0] for name in header if _OF_RUN in name))
    for run in runs or [""]:
        if len(runs) > 1:
            yield Event(kind=NEXT_RUN, text=run)
        yield from _rows(_csv_rows(path, run))


_OF_RUN = " - "
"""Between a run's name and a metric's in the header of a chart."""


def _csv_rows(path: Path, run: str) -> Iterator[dict[str, str]]:
    for entry in csv.DictReader(lines(path)):
        named: dict[str, str] = {}
        for key, value in entry.items():
            if key is None or value is None or value == "" or key.endswith(("__MIN", "__MAX")):
                continue
            owner, _, name = key.rpartition(_OF_RUN)
            if owner in ("", run):
                named[name] = value
        yield named


def _rows(entries: Any) -> Iterator[Row]:
    for number_of_row, entry in enumerate(entries):
        if not isinstance(entry, dict):
            continue
        step = next((s for k in STEP_KEYS if (s := number(entry.get(k, ""))) is not None and s == s), None)
        at_s = number(entry.get("_timestamp", ""))
        data = {str(k): v for k, raw in entry.items() if k not in _MARKS and (v := number(raw)) is not None}
        if data:
            yield Row(step=int(number_of_row if step is None else step), data=data, at_s=at_s)
