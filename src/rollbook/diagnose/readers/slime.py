"""slime's console log (miles prints the same): `rollout 3: {...}`, `step 6: {...}`, `perf 3: {...}`, `eval 3: {...}`.

Facts: rollout, perf and eval records count rollouts, step records count optimizer steps, of which a rollout
may have several. Step records that follow rollout N belong to it; their last value stands, as in its charts. Lines on
the memory that is held belong to the rollout before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.held import note_held
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import TROUBLE_BYTES, dict_pairs, lines, plain
from rollbook.diagnose.series import Event, Row

_RECORD = re.compile(r"\b(rollout|perf|eval|step|passrate|multi_turn)\s+(\d+): (\{.*)")


def recognizes(head: str) -> float:
    if ": {'" not in head:
        return 0.0
    found = len(re.findall(r"\b(?:rollout|perf|step) \d+: \{'(?:rollout|perf|train)/", head))
    return min(1.0, 0.7 + 0.05 * found) if found else 0.0


def _with_prompts(data: dict[str, float]) -> dict[str, float]:
    """A record with the mean length of its prompts, where it has that of whole samples and of responses."""
    total = data.get("rollout/total_lengths")
    response = data.get("rollout/response_lengths", data.get("rollout/response_len/mean"))
    is_told = total is not None and response is not None and total > response
    return data | ({"prompt_length/mean": total - response} if is_told and total and response else {})


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by rollout id."""
    watcher = LineWatcher()
    rollout: int | None = None
    optimizer: dict[str, float] = {}
    """Of the optimizer steps of the newest rollout, and the most memory that was held since it."""
    for raw in lines(path, (b": {", *TROUBLE_BYTES, *ENDING_BYTES), watcher):
        line = plain(raw)
        match = _RECORD.search(line) if ": {" in line else None
        if match is None:
            if note_held(line, optimizer):
                continue
            if event := watcher.watch(line, rollout):
                yield event
            continue
        kind, number_text, text = match.groups()
        data = dict_pairs(text)
        if not data:
            continue
        if kind == "step":
            data.pop("train/step", None)
            optimizer.update(data)
            if rollout is None:
                rollout = int(number_text)
            continue
        if int(number_text) != rollout:
            if rollout is not None and optimizer:
                yield Row(step=rollout, data=optimizer)
            optimizer = {}
            rollout = int(number_text)
            if event := watcher.ending.step(rollout):
                yield event
        yield Row(step=rollout, data=_with_prompts(data))
    if rollout is not None and optimizer:
        yield Row(step=rollout, data=optimizer)
    yield from watcher.end(rollout)
