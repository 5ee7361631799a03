"""A run directory read while it is written: columns of readings, the spans of a step, the notable events.

`refresh` takes up what was appended since the last call, a bounded share at a time, so that a page over
100,000 steps answers at once and fills in. A metrics.jsonl of another program (verl's file logger) will do.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import RunError
from rollbook.observe.run_dir import EVENTS, METRICS, TOKENS


@dataclass(frozen=True, slots=True)
class Column:
    """Readings of one metric, one a bucket; NaN where the bucket holds none."""

    mean: NDArray[np.float64]
    min: NDArray[np.float64]
    max: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Table:
    """Readings of several metrics over the same buckets of consecutive steps."""

    steps: NDArray[np.int64]
    """[buckets] the last step of each bucket, ascending."""
    max_steps_per_bucket: int
    columns: dict[str, Column]
    """Only metrics with at least one reading in the range."""


CHUNK_BYTES = 8 << 20
MAX_NOTABLE = 300
"""Events of one kind that are kept, the latest."""
SPAN_KINDS = (b'{"kind": "span"', b'{"kind": "span_open"')


class AppendedLines:
    """Whole lines appended to a file since the last call, with their offsets."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def read(self, max_bytes: int) -> Iterator[tuple[int, bytes]]:
        """(offset, line) pairs; a line still being written waits for the next call."""
        if self.size() <= self.offset:
            return
        with self.path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(max_bytes)
            if b"\n" not in data:  # one line longer than the share
                data += file.readline()
        end = data.rfind(b"\n") + 1
        at = self.offset
        self.offset += end
        for line in data[:end].split(b"\n")[:-1]:
            yield at, line
            at += len(line) + 1


class RunHistory:
    """What a reader may ask of a run directory (or of a lone metrics.jsonl).

    Raises:
        RunError: `path` holds neither a run nor a metrics file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        metrics = path if path.is_file() else path / METRICS
        if not path.exists():
            raise RunError(f"there is no run directory {path}", _nearby(path))
        if not metrics.exists() and not (path / EVENTS).exists():
            raise RunError(f"{path} is not a run directory: it holds no {METRICS}", _nearby(path))
        if path.is_file():
            _require_steps(path)
        self._metrics = AppendedLines(metrics)
        self._events = AppendedLines(path / EVENTS)
        self._tokens = AppendedLines(path / TOKENS)
        self._row_of_step: dict[int, int] = {}
        self._steps: NDArray[np.int64] = np.zeros(1024, np.int64)
        self._columns: dict[str, NDArray[np.float64]] = {}
        self._is_sorted = True
        self._step_bytes: dict[int, tuple[int, int]] = {}
        self._open_step_at = 0
        self._open_step: int | None = None
        self.notable: dict[str, deque[dict[str, Any]]] = {}
        """Event kind -> the latest events, spans excepted."""
        self.token_texts: dict[int, str] = {}
        self.last_at_s: float | None = None
        """Wall clock of the last event."""
        self.first_at_s: float | None = None

    # -- taking up what was written

    def refresh(self, max_bytes: int = CHUNK_BYTES) -> bool:
        """Take up at most about `max_bytes` of each file; True when something was new."""
        before = (self._metrics.offset, self._events.offset, self._tokens.offset)
        self._take_metrics(self._metrics.read(max_bytes))
        for at, line in self._events.read(max_bytes):
            self._take_event(at, line)
        for _, line in self._tokens.read(max_bytes):
            token = _parsed(line)
            if token is not None and isinstance(token.get("id"), int):
                self.token_texts[token["id"]] = str(token.get("text", ""))
        return before != (self._metrics.offset, self._events.offset, self._tokens.offset)

    def refresh_all(self) -> None:
        while self.refresh():
            pass

    @property
    def loaded_frac(self) -> float:
        """Share of the files taken up so far."""
        files = (self._metrics, self._events, self._tokens)
        total = sum(file.size() for file in files)
        return min(1.0, sum(file.offset for file in files) / total) if total else 1.0

    def _take_metrics(self, lines: Iterator[tuple[int, bytes]]) -> None:
        # Consecutive lines hold the same metrics: convert them together, a value at a time is slow.
        blocks: dict[tuple[str, ...], tuple[list[int], list[list[Any]]]] = {}
        for _, line in lines:
            entry = _parsed(line)
            if (
                entry is None
                or not isinstance(entry.get("data"), dict)
                or not isinstance(entry.get("step"), int)
            ):
                continue
            data: dict[str, Any] = entry["data"]
            row, is_repeated = self._row(entry["step"])
            if is_repeated:  # a later line counts, name by name
                self._fill(blocks)
                blocks = {}
            rows, values = blocks.setdefault(tuple(data), ([], []))
            rows.append(row)
            values.append(list(data.values()))
        self._fill(blocks)

    def _row(self, step: int) -> tuple[int, bool]:
        row = self._row_of_step.get(step)
        if row is not None:
            return row, True
        row = len(self._row_of_step)
        if row == len(self._steps):
            self._steps = np.resize(self._steps, 2 * row)
            for name, column in self._columns.items():
                self._columns[name] = np.concatenate([column, np.full(row, np.nan)])
        if row and step < self._steps[row - 1]:
            self._is_sorted = False
        self._steps[row] = step
        self._row_of_step[step] = row
        return row, False

    def _fill(self, blocks: dict[tuple[str, ...], tuple[list[int], list[list[Any]]]]) -> None:
        for names, (rows, values) in blocks.items():
            try:
                block = np.array(values, np.float64)  # None becomes NaN
            except (TypeError, ValueError):
                block = np.array([[_number(value) for value in row] for row in values], np.float64)
            for idx, name in enumerate(names):
                column = self._columns.get(name)
                if column is None:
                    column = np.full(len(self._steps), np.nan)
                    self._columns[name] = column
                here = np.isfinite(block[:, idx])
                column[np.asarray(rows)[here]] = block[here, idx]

    def _take_event(self, at: int, line: bytes) -> None:
        if line.startswith(SPAN_KINDS):
            if b'"name": "step"' in line and (event := _parsed(line)) is not None and event["name"] == "step":
                self._take_step_span(at, len(line), event)
            return
        event = _parsed(line)
        if event is None or "kind" not in event:
            return
        self.notable.setdefault(str(event["kind"]), deque(maxlen=MAX_NOTABLE)).append(event)
        self._take_time(event)

    def _take_step_span(self, at: int, num_bytes: int, event: dict[str, Any]) -> None:
        step = event.get("step")
        if not isinstance(step, int):
            return
        self._take_time(event)
        if event["kind"] == "span_open":
            self._open_step, self._open_step_at = step, at
        elif self._open_step == step:
            self._step_bytes[step] = (self._open_step_at, at + num_bytes)
            self._open_step = None

    def _take_time(self, event: dict[str, Any]) -> None:
        at_s = event.get("at_s")
        if isinstance(at_s, (int, float)):
            self.last_at_s = float(at_s)
            if self.first_at_s is None:
                self.first_at_s = float(at_s)

    # -- what it holds

    @property
    def names(self) -> list[str]:
        """Metrics that were reported at least once."""
        return sorted(self._columns)

    @property
    def num_steps(self) -> int:
        return len(self._row_of_step)

    @property
    def steps(self) -> NDArray[np.int64]:
        """[num_steps] int64, ascending."""
        return np.sort(self._steps[: self.num_steps])

    @property
    def last_step(self) -> int | None:
        return int(self._steps[: self.num_steps].max()) if self.num_steps else None

    def readings(self, step: int) -> dict[str, float]:
        """Every finite reading of one step."""
        row = self._row_of_step.get(step)
        if row is None:
            return {}
        return {n: float(c[row]) for n, c in sorted(self._columns.items()) if np.isfinite(c[row])}

    def latest(self, name: str) -> float | None:
        """The last finite reading of a metric."""
        column = self.table([name], num_buckets=0).columns.get(name)
        if column is None:
            return None
        return float(column.mean[np.isfinite(column.mean)][-1])

    def table(
        self,
        names: Sequence[str],
        *,
        first_step: int | None = None,
        last_step: int | None = None,
        num_buckets: int = 400,
    ) -> Table:
        """Readings of the named metrics in at most `num_buckets` buckets of equal numbers of steps.

        Unknown metrics and metrics without a reading in the range are left out. `num_buckets` 0: every step.
        """
        num = self.num_steps
        order = np.arange(num) if self._is_sorted else np.argsort(self._steps[:num], kind="stable")
        steps = self._steps[:num][order]
        low = 0 if first_step is None else int(np.searchsorted(steps, first_step, "left"))
        high = num if last_step is None else int(np.searchsorted(steps, last_step, "right"))
        if high <= low:
            return Table(np.zeros(0, np.int64), 0, {})
        order, steps = order[low:high], steps[low:high]
        count = high - low
        if num_buckets and count > num_buckets:
            edges = np.unique(np.linspace(0, count, num_buckets + 1).astype(np.int64)[:-1])
        else:
            edges = np.arange(count)
        ends = np.append(edges[1:], count)
        columns: dict[str, Column] = {}
        for name in names:
            held = self._columns.get(name)
            if held is None:
                continue
            values = held[:num][order]
            finite = np.isfinite(values)
            num_finite = np.add.reduceat(finite, edges, dtype=np.int64)
            if not num_finite.any():
                continue
            sums = np.add.reduceat(np.where(finite, values, 0.0), edges)
            mean = np.divide(sums, num_finite, out=np.full(len(edges), np.nan), where=num_finite > 0)
            columns[name] = Column(mean, np.fmin.reduceat(values, edges), np.fmax.reduceat(values, edges))
        return Table(steps[ends - 1], int((ends - edges).max()), columns)

    def steps_with_spans(self) -> list[int]:
        """Finished steps that events.jsonl covers, ascending."""
        return sorted(self._step_bytes)

    def spans(self, step: int) -> list[dict[str, Any]]:
        """Span events that ended while the step was open, the step's own span last; [] when unknown."""
        return [event for event in self.events(step) if event["kind"] == "span"]

    def events(self, step: int) -> list[dict[str, Any]]:
        """Every event written while the step was open, the step's own span last; [] when unknown."""
        where = self._step_bytes.get(step)
        if where is None:
            return []
        with self._events.path.open("rb") as file:
            file.seek(where[0])
            lines = file.read(where[1] - where[0]).split(b"\n")
        events = (_parsed(line) for line in lines)
        return [event for event in events if event is not None and "kind" in event]

    def open_spans(self) -> list[dict[str, Any]]:
        """Spans announced and not ended: what the run is in now, or was in when it died."""
        if self._open_step is None:
            return []
        open_now: dict[int, dict[str, Any]] = {}
        with self._events.path.open("rb") as file:
            file.seek(self._open_step_at)
            for line in file.read(CHUNK_BYTES).split(b"\n"):
                event = _parsed(line)
                if event is None:
                    continue
                if event.get("kind") == "span_open":
                    open_now[event["span_id"]] = event
                elif event.get("kind") == "span":
                    open_now.pop(event["span_id"], None)
                elif event.get("kind") in ("run_resumed", "run_ended"):
                    open_now.clear()
        return list(open_now.values())

    def trajectory_steps(self) -> list[int]:
        """Steps with a trajectory file, ascending."""
        if not self.path.is_dir():
            return []
        names = (
            path.stem.removeprefix("step_") for path in (self.path / "trajectories").glob("step_*.parquet")
        )
        return sorted(int(name) for name in names if name.isdigit())


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _require_steps(path: Path) -> None:
    """Refuse a file whose first whole lines hold no step; one that is still empty may be a run that begins."""
    with path.open("rb") as file:
        lines = [line for line in file.readlines(CHUNK_BYTES) if line.endswith(b"\n")]
    if lines and not any(isinstance((_parsed(line) or {}).get("data"), dict) for line in lines):
        raise RunError(
            f'{path} is not a {METRICS}: no line of it is {{"step": N, "data": {{...}}}}',
            "the page shows run directories and verl's file logger; for other logs there is "
            f"rollbook diagnose {path} --html page.html",
        )


def _nearby(path: Path) -> str:
    found = [p.parent for folder in (path, path.parent) for p in sorted(folder.glob(f"*/{METRICS}"))]
    return (
        "runs near it: " + ", ".join(str(p) for p in found[:8])
        if found
        else "no run is near it; check the path"
    )
