"""prime-rl's console log: "SUCCESS Step 12 | Time: 34.10s | Reward: 0.51 | Seq. Length: 1234.5 tokens/sample | ...".

Facts: orchestrator and trainer write logs of their own, in the same form and with other fields; where both went into
one file their lines of a step complete each other, and the orchestrator's seconds stand. Times before the lines have
no date.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.line_watcher import LineWatcher
from rollbook.diagnose.readers.text import TROUBLE_BYTES, lines, number, plain
from rollbook.diagnose.series import Event, Row

_STEP = re.compile(r"SUCCESS\s+Step (\d+) \| (Time: .*)")
_FIELD = re.compile(r"([A-Z][\w. -]*): ([-+.\w]+)(%?)")
_OF_DEVICE = re.compile(r"Peak Mem\.: [\d.]+/([\d.]+) GiB")
_NAMES = {
    "Reward": "critic/rewards/mean",
    "Seq. Length": "response_length/mean",
    "Max. Off-Policy Level": "training/off_policy/trajectory_staleness/max",
    "Loss": "actor/pg_loss",
    "Entropy": "actor/entropy",
    "Mismatch KL": "rollout_corr/kl",
    "Grad. Norm": "actor/grad_norm",
    "LR": "actor/lr",
    "Peak Mem.": "perf/max_memory_reserved_gb",
}


def recognizes(head: str) -> float:
    found = len(_STEP.findall(head))
    return min(1.0, 0.8 + 0.05 * found) if found else 0.0


def read(path: Path) -> Iterator[Row | Event]:
    """Rows keyed by the step; of both processes in one file, each in its own line."""
    watcher = LineWatcher()
    step: int | None = None
    is_timed = False
    for raw in lines(path, (b"SUCCESS", *TROUBLE_BYTES, *ENDING_BYTES), watcher):
        line = plain(raw)
        match = _STEP.search(line)
        if match is None:
            if event := watcher.watch(line, step):
                yield event
            continue
        data, is_trainers = _data(match.group(2)), "| Reward: " not in match.group(2)
        if is_trainers and is_timed:
            data.pop("timing_s/step", None)
        is_timed |= not is_trainers
        row = Row(step=int(match.group(1)), data=data)
        if step is None or row.step > step:
            step = row.step
            if event := watcher.ending.step(step):
                yield event
        yield row
    yield from watcher.end(step)


def _data(text: str) -> dict[str, float]:
    """Seconds are those of a whole step in either line: the trainer's, whose line has no reward, wait for its batch."""
    fields = {name: value for name, value, _ in _FIELD.findall(text)}
    data: dict[str, float] = {}
    for name, value in fields.items():
        digits = re.match(r"[-+]?[\d.]+(?:e[-+]?\d+)?|nan|inf", value, re.IGNORECASE)
        parsed = number(digits.group()) if digits is not None else None
        if parsed is None:
            continue
        if name == "Peak Mem." and (of := _OF_DEVICE.search(text)) is not None:
            data["perf/device_memory_gb"] = float(of.group(1))
        if name == "Time":
            data["timing_s/step"] = parsed
        elif name in _NAMES:
            data[_NAMES[name]] = parsed
    return data
