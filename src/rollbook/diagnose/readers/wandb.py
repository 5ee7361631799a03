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

from rollbook.diagnose.readers.entries import Entry, flat, named, whole_of_list
from rollbook.diagnose.readers.records import CUT_LIST, rows
from rollbook.diagnose.readers.text import lines, open_binary
from rollbook.diagnose.series import NEXT_RUN, Event, Row


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
    return 0.6 if first.lstrip().startswith("[") and '"_step"' in head else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by the training step where the export has one, else by its own row count."""
    with open_binary(path) as file:
        first = file.read(1024).lstrip()[:1]
    if first == b"[":
        with open_binary(path) as file:
            text = file.read().decode("utf-8", errors="replace")
        try:
            entries = [flat(entry) for entry in json.loads(text) if isinstance(entry, dict)]
        except (ValueError, RecursionError):
            entries = list(whole_of_list(text))
            yield CUT_LIST
        yield from rows(entries)
    elif first == b"{":
        yield from rows(_json_lines(path))
    else:
        yield from _read_csv(path)


def _json_lines(path: Path) -> Iterator[Entry]:
    for text in lines(path):
        try:
            entry = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict):
            yield flat(entry)


def _read_csv(path: Path) -> Iterator[Row | Event]:
    """The runs of a chart one after the other, or the one run of a history."""
    header = next(csv.reader(lines(path)), [])
    runs = list(dict.fromkeys(name.rpartition(_OF_RUN)[0] for name in header if _OF_RUN in name))
    for run in runs or [""]:
        if len(runs) > 1:
            yield Event(kind=NEXT_RUN, text=run)
        yield from rows(_csv_rows(path, run))


_OF_RUN = " - "
"""Between a run's name and a metric's in the header of a chart."""


def _csv_rows(path: Path, run: str) -> Iterator[dict[str, str]]:
    for entry in csv.DictReader(lines(path)):
        values: dict[str, str] = {}
        for key, value in entry.items():
            if key is None or value is None or value == "" or key.endswith(("__MIN", "__MAX")):
                continue
            owner, _, name = key.rpartition(_OF_RUN)
            if owner in ("", run):
                values[named(name)] = value
        yield values
