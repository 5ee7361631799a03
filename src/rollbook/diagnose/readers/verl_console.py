"""verl's console log: `step:12 - actor/entropy:0.31 - timing_s/gen:41.2 ...`, however it was captured.

Facts (verl 0.9): a record is one print of `step:N` and numeric `key:value` pairs joined by " - "; with
numpy 2 values may read `np.float64(1.5)`; Ray puts "(TaskRunner pid=81)" and colour codes before it. Other
processes' lines may be written between or into it, terminals may wrap it, and a step may be printed twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import (
    NUMBER,
    TROUBLE_BYTES,
    is_ended_by_newline,
    lines,
    number,
    plain,
)
from rollbook.diagnose.series import Event, Row
from rollbook.observe.numbers import counted

_STEP = re.compile(r"step:(?<![\w/]step:)\s?(\d+)(?=\s+-\s|\s*$)")
"""Its letters come first: a scanner skips to them."""
_PAIR = re.compile(
    rf"(?:^|\s|-\s)-?\s?([A-Za-z_][\w@./+=,\-]*(?::[A-Za-z_][\w@./+=\-]*)*):({NUMBER})(?![\w.])"
)


def recognizes(head: str) -> float:
    """0 to 1: how much the beginning of a file looks like this format."""
    found = len(re.findall(r"step:\s?\d+ - \S+:", head))
    return min(1.0, 0.6 + 0.1 * found) if found else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows and trouble of a console log, in its order."""
    watcher = LineWatcher()
    step: int | None = None
    data: dict[str, float] = {}
    keys: list[str] = []
    for raw in lines(path, (b"step:", b" - ", *TROUBLE_BYTES, *ENDING_BYTES), watcher):
        line = plain(raw)
        begins = list(_STEP.finditer(line)) if "step:" in line else []
        if not begins:
            if step is not None and " - " in line and _is_continuation(line):
                data.update(_pairs(line)[0])
                continue
            if event := watcher.watch(line, step):
                yield event
            continue
        for i, match in enumerate(begins):
            if step is not None and data:
                yield Row(step=step, data=data)
                keys = list(data)
            step = int(match.group(1))
            if event := watcher.ending.step(step):
                yield event
            end = begins[i + 1].start() if i + 1 < len(begins) else len(line)
            data, others_words = _pairs(line[match.end() : end])
        # Values report no trouble: what is before them and what another process wrote between them may.
        if event := watcher.trouble.watch(line[: begins[-1].end()] + others_words, step):
            yield event
    if step is not None and data:
        if keys and keys[-1] not in data and not is_ended_by_newline(path):
            data.popitem()
            whole = f"{len(data)} of {counted(len(keys), 'value')}"
            says = (
                f"the last line is cut short after {whole} (the process was killed, or is writing it): "
                "the value at the cut was left out"
            )
            yield Event(kind="damaged", step=step, text=says)
        yield Row(step=step, data=data)
    yield from watcher.end(step)


def _is_continuation(line: str) -> bool:
    """A wrapped or interrupted record goes on: it begins with " - key:value" and keys hold a slash."""
    return line.lstrip().startswith("- ") and len(re.findall(r"[\w@]+/[\w@./-]+:[-+\dn]", line)) >= 1


def _pairs(text: str) -> tuple[dict[str, float], str]:
    """The values of a record, and the pieces of it that are not just a value."""
    pairs: dict[str, float] = {}
    others: list[str] = []
    for piece in text.split(" - "):
        key, _, value = piece.strip().rpartition(":")
        try:  # nearly every piece is a plain key:value, or key:np.float64(value)
            plain_value = value[11:-1] if value.startswith("np.float64(") else value
            pairs[key.removeprefix("- ")] = float(plain_value)
            continue
        except ValueError:
            others.append(piece)
        for found, written in _PAIR.findall(piece):
            if (parsed := number(written)) is not None:
                pairs[found] = parsed
    pairs.pop("", None)
    return {key: value for key, value in pairs.items() if " " not in key}, " - ".join(others)
