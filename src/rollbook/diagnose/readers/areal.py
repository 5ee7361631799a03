"""AReaL's console log: "Epoch 1/10 Step 3/100 Train step 3/1000 done." and then a table of its statistics.

Facts: the table is drawn with box characters, each line holds two or more pairs of name and value; averages
end in /avg; `timeperf/...` are seconds; a step may have several tables ("Stats (1/2):"). Its workers say "Memory-Usage
ppo update: memory allocated (GB): 36.73, memory reserved (GB): 41.47, device memory used/total (GB): 44.67/79.10" at
points of the step, before that line.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.held import note_held
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import TROUBLE_BYTES, lines, number, plain
from rollbook.diagnose.series import Event, Row

_STEP = re.compile(r"Train step (\d+)/\d+ done")
_CELL = re.compile(r"[│|┃]")


def recognizes(head: str) -> float:
    return 0.97 if _STEP.search(head) else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by the train step; the last table of a step completes the earlier ones."""
    watcher = LineWatcher()
    step: int | None = None
    data: dict[str, float] = {}
    held: dict[str, float] = {}
    """The most that was held since the step before."""
    for raw in lines(
        path, (b"Train step", "│".encode(), "┃".encode(), b"|", *TROUBLE_BYTES, *ENDING_BYTES), watcher
    ):
        line = plain(raw)
        if (match := _STEP.search(line)) is not None:
            if step is not None and data:
                yield Row(step=step, data=data)
            step, data, held = int(match.group(1)), held, {}
            if event := watcher.ending.step(step):
                yield event
        elif step is not None and _CELL.search(line):
            cells = [cell.strip() for cell in _CELL.split(line)]
            for name, value in itertools.pairwise(cells):
                if "/" in name and " " not in name and (parsed := number(value)) is not None and value:
                    data.setdefault(name, parsed)
        elif not note_held(line, held) and (event := watcher.watch(line, step)):
            yield event
    if step is not None and data:
        yield Row(step=step, data=data)
    yield from watcher.end(step)
