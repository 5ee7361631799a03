"""Rows in the order of the log become one `RunSeries`: pieces of a step joined, restarts and second runs told apart.

A row whose step is known already either completes it (other metrics, or the same values again) or
contradicts it. A contradiction at the beginning of the run starts another run; a later one is a restart
from a checkpoint: the steps from there on were rolled back, and the later rows stand.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.series import NEXT_RUN, Event, Row, RunSeries, Seam
from rollbook.errors import DataError
from rollbook.observe.numbers import counted

MAX_REPLACED_KEPT = 50
LARGEST_STEP = 2**53
LARGEST = 1e100
"""Size from which on a reading counts as infinite: beyond it squares and sums over a log are."""


@dataclass(slots=True)
class _Column:
    rows: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def at(self, row: int) -> float | None:
        i = bisect.bisect_left(self.rows, row)
        return self.values[i] if i < len(self.rows) and self.rows[i] == row else None


SAME = 1e-6
"""Relative difference within which two rows of a step say the same: one may print more digits of an epoch."""


@dataclass(slots=True)
class _Run:
    """One run under construction. Rows are numbered in the order of the log."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    at_s: array[float] = field(default_factory=lambda: array("d"))
    columns: dict[str, _Column] = field(default_factory=dict)
    rows_of_step: dict[int, list[int]] = field(default_factory=dict)
    newest_step: int = -1
    dropped: set[int] = field(default_factory=set)
    seams: list[Seam] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    num_out_of_order: int = 0
    num_clock_jumps: int = 0

    def contradicts(self, row: Row) -> bool:
        """Whether a metric of the row was already logged for this step with another value."""
        for earlier in self.rows_of_step[row.step]:
            for name, value in row.data.items():
                column = self.columns.get(name)
                held = column.at(earlier) if column else None
                if (
                    held is None
                    or math.isclose(held, value, rel_tol=SAME)
                    or (math.isnan(held) and math.isnan(value))
                ):
                    continue
                return True
        return False

    def roll_back(self, step: int) -> None:
        """Forget the rows from `step` on: the run was taken up again there."""
        gone = sorted(s for s in self.rows_of_step if s >= step)
        kept = gone[-MAX_REPLACED_KEPT:]
        rows = [row for s in kept for row in self.rows_of_step[s]]
        replaced: dict[str, list[float]] = {}
        for name, column in self.columns.items():
            values = [value for row in rows if (value := column.at(row)) is not None]
            if values:
                replaced[name] = values
        self.seams = [seam for seam in self.seams if seam.step < step]
        self.seams.append(Seam(step=step, num_replaced=len(gone), replaced=replaced))
        for s in gone:
            self.dropped.update(self.rows_of_step.pop(s))
        self.newest_step = max(self.rows_of_step, default=-1)

    def add(self, row: Row) -> None:
        number = len(self.steps)
        if row.step < self.newest_step:
            self.num_out_of_order += 1
        self.newest_step = max(self.newest_step, row.step)
        self.steps.append(row.step)
        self.at_s.append(math.nan if row.at_s is None else row.at_s)
        if number and row.at_s is not None and row.at_s < self.at_s[number - 1] - 1.0:
            self.num_clock_jumps += 1
        self.rows_of_step.setdefault(row.step, []).append(number)
        for name, value in row.data.items():
            column = self.columns.get(name)
            if column is None:
                column = self.columns[name] = _Column()
            if column.rows and column.rows[-1] == number:
                continue  # said twice in one row
            column.rows.append(number)
            column.values.append(value)


WHEN_EMPTY = "check that this is the log of a run that finished a step"


def assemble(
    items: Iterable[Row | Event],
    *,
    source: str,
    format: str,
    renamed: dict[str, str] | None = None,
    notes: Iterable[str] = (),
    run_idx: int | None = None,
    if_empty: str = WHEN_EMPTY,
) -> RunSeries:
    """Make one run of the rows and events of a log, in the log's order.

    Args:
        run_idx: which run to return when the log holds several; None is the last.
        if_empty: what to do where no row comes.
    Raises:
        DataError: no row at all, or no such run.
    """
    runs, names_of_runs = _runs_of(items)
    if not runs[0].steps and (died := _died_early(runs[0])) is not None:
        runs[0].add(Row(step=died, data={}))
    if not runs[-1].steps:
        raise DataError(f"{source} holds no step", if_empty)
    chosen = len(runs) - 1 if run_idx is None else run_idx
    if not 0 <= chosen < len(runs):
        holds, use = ("one run", "leave it out, or use 0") if len(runs) == 1 else (f"{len(runs)} runs", "")
        raise DataError(
            f"{source} holds {holds}, and run {run_idx} was asked for", use or f"use 0 to {len(runs) - 1}"
        )
    all_notes = list(notes)
    if len(runs) > 1:
        lengths = ", ".join(counted(len(r.rows_of_step), "step") for r in runs)
        which = f"run {chosen} of 0 to {len(runs) - 1}"
        if len(names_of_runs) == len(runs):
            which += f", {names_of_runs[chosen]}"
        all_notes.append(f"{len(runs)} runs in one log ({lengths}): this is {which}")
    return _finish(runs[chosen], source, format, renamed or {}, all_notes, len(runs), chosen)


def _runs_of(items: Iterable[Row | Event]) -> tuple[list[_Run], list[str]]:
    """The runs of a log, and their names where it has some: one begins anew where the log says so, or where steps are
    logged again from the first on with other values; where that is so further in, the run was taken up again."""
    runs = [_Run()]
    waiting: list[Event] = []
    names_of_runs: list[str] = []
    for item in items:
        run = runs[-1]
        if isinstance(item, Event) and item.kind == NEXT_RUN:
            names_of_runs.append(item.text)
            if run.steps:
                runs.append(_Run())
            continue
        if isinstance(item, Event):
            waiting.append(item)
            continue
        if not 0 <= item.step <= LARGEST_STEP:
            continue
        if item.step in run.rows_of_step and run.contradicts(item):
            first = min(run.rows_of_step)
            if item.step <= first + 1 and run.newest_step > item.step + 1:
                run.events.extend(event for event in waiting if event.kind == "run_failed")
                waiting = [event for event in waiting if event.kind != "run_failed"]
                run = _Run()
                runs.append(run)
            else:
                run.roll_back(item.step)
        run.events.extend(waiting)
        waiting.clear()
        run.add(item)
    runs[-1].events.extend(waiting)
    return runs, names_of_runs


def _died_early(run: _Run) -> int | None:
    """The step under way when a run stopped on an error before any step was logged."""
    failed = [event for event in run.events if event.kind in ("step_failed", "run_failed") and event.text]
    return None if not failed else next((e.step for e in failed if e.step is not None), 0)


MAX_NAMED = 3
"""Metrics that a note names; of the rest it tells how many."""


SECONDS = "timing_s/"
"""Names of what was timed begin so; seconds are never negative."""


def _where(steps_of: dict[str, list[int]]) -> str:
    """Metrics and steps whose values were left out, for a note."""
    most = sorted(steps_of, key=lambda name: (-len(steps_of[name]), name))
    named = [
        f"{name} in {counted(len(steps_of[name]), 'step')}, the first {steps_of[name][0]}"
        for name in most[:MAX_NAMED]
    ]
    more = [counted(len(most) - MAX_NAMED, "more metric")] if len(most) > MAX_NAMED else []
    return "; ".join(named + more)


def _finish(
    run: _Run,
    source: str,
    format: str,
    renamed: dict[str, str],
    notes: list[str],
    num_runs: int,
    run_idx: int,
) -> RunSeries:
    ordered = np.array(sorted(run.rows_of_step), np.int64)
    position_of_step = {int(step): i for i, step in enumerate(ordered)}
    position = np.array(
        [-1 if n in run.dropped else position_of_step[step] for n, step in enumerate(run.steps)], np.int64
    )
    at_s = np.full(len(ordered), np.nan)
    keep = position >= 0
    row_at_s = np.frombuffer(run.at_s, np.float64)
    known = keep & ~np.isnan(row_at_s)
    at_s[position[known]] = row_at_s[known]
    values: dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]] = {}
    non_finite: dict[str, list[int]] = {}
    negative: dict[str, list[int]] = {}
    for name, column in run.columns.items():
        rows = np.frombuffer(column.rows, np.int64)
        written = np.frombuffer(column.values, np.float64)
        places = position[rows]
        used = places >= 0
        if not used.any():
            continue
        finite = np.abs(written) < LARGEST  # NaN is not
        dense = np.full(len(ordered), np.nan)
        dense[places[used]] = np.where(finite, written, np.nan)[used]
        if name.startswith(SECONDS) and (dense < 0.0).any():
            negative[name] = ordered[dense < 0.0].tolist()
            dense[dense < 0.0] = np.nan
        values[name] = dense
        if not finite[used].all():
            non_finite[name] = sorted(
                {int(ordered[p]) for p in places[used & ~finite] if not np.isfinite(dense[p])}
            )
    non_finite = {name: steps for name, steps in non_finite.items() if steps}
    notes += _oddities(run, ordered, non_finite, negative)
    return RunSeries(
        source=source,
        format=format,
        steps=ordered,
        values=values,
        at_s=at_s,
        non_finite=non_finite,
        events=run.events,
        seams=run.seams,
        renamed={old: new for old, new in renamed.items() if new in values},
        notes=notes,
        num_runs=num_runs,
        run_idx=run_idx,
    )


def _oddities(
    run: _Run, ordered: NDArray[np.int64], non_finite: dict[str, list[int]], negative: dict[str, list[int]]
) -> Iterator[str]:
    """What was odd in the log, and what was done about it."""
    if non_finite:
        yield f"NaN, null or infinite, and left out: {_where(non_finite)}"
    if negative:
        yield f"less than 0 s (a clock was set back), and left out: {_where(negative)}"
    if run.num_out_of_order and not run.seams:
        yield f"{counted(run.num_out_of_order, 'row')} out of order: sorted by step"
    if run.num_clock_jumps:
        yield (
            f"the clock ran backwards {counted(run.num_clock_jumps, 'time')}: times are not used, seconds of stages are"
        )
    for seam in run.seams:
        yield (
            f"the run was taken up again at step {seam.step} ({counted(seam.num_replaced, 'step')} run twice)"
        )
    if len(ordered) > 1:
        num_missing = int(ordered[-1] - ordered[0]) + 1 - len(ordered)
        stride = int(np.median(np.diff(ordered)))
        if stride == 1 and num_missing:
            yield f"{num_missing} of {int(ordered[-1] - ordered[0]) + 1} steps are not in the log"
    if ordered[0] > 2:
        yield f"the log begins at step {int(ordered[0])}: what came before cannot be judged"
