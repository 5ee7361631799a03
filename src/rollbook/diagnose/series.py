"""A run as series: one row a step, one column a metric, in the catalogue's names, with what the log also said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]
"""[n] float64, one value a step; NaN where the log has none."""


def finite(values: Series) -> Series:
    """The values that are there."""
    return values[np.isfinite(values)]


def runs_of(mask: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[start, end) of each run of True.

    >>> runs_of(np.array([True, False, True, True]))
    [(0, 1), (2, 4)]
    """
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    return [(start, end) for start, end in edges.reshape(-1, 2).tolist()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a log says of one step; a step may have several rows that complete each other."""

    step: int
    data: dict[str, float]
    """Values as written: NaN stands for NaN, null and infinities of either sign for themselves."""
    at_s: float | None = None
    """Unix time of the row, where the log has one."""


NEXT_RUN = "next_run"
"""Kind of an event after which the rows are another run's; its text is that run's name."""


COMPLAINT = "complaint"
"""Kind of an event for the lines with an error that a log repeats: the step before the first, and how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something a log says in words: an error, a restart, a span of the run directory."""

    kind: str
    """For example out_of_memory, collective_timeout, object_store_spill, resumed, publication, span_open."""
    step: int | None = None
    """The step under way, as far as the log shows."""
    at_s: float | None = None
    text: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """A place where the run was started again."""

    step: int
    """First step after the restart."""
    num_replaced: int
    """Steps that had already been logged and were run again."""
    replaced: dict[str, list[float]] = field(default_factory=dict)
    """Their values, oldest first, at most the last 50."""


@dataclass(slots=True, kw_only=True)
class RunSeries:
    """One run. `values[name][i]` belongs to `steps[i]`."""

    source: str
    format: str
    steps: NDArray[np.int64]
    """[n] int64, strictly increasing."""
    values: dict[str, Series]
    at_s: Series
    """[n] unix seconds, NaN where unknown."""
    non_finite: dict[str, list[int]] = field(default_factory=dict)
    """Metric -> steps at which the log says NaN, null or infinity (absent is not in here)."""
    events: list[Event] = field(default_factory=list)
    seams: list[Seam] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    """Name in the log -> name in `values`, where they differ."""
    in_log: dict[str, str] = field(default_factory=dict)
    """Name in `values` -> what the log calls what stands there, where they differ."""
    notes: list[str] = field(default_factory=list)
    """What was odd in the log and what was done about it."""
    num_runs: int = 1
    run_idx: int = 0

    @property
    def num_steps(self) -> int:
        return len(self.steps)

    def matching(self, prefix: str, suffix: str = "") -> list[str]:
        """Metrics that start and end so, sorted."""
        return sorted(
            n for n in self.values if n.startswith(prefix) and n.endswith(suffix) and len(n) > len(prefix)
        )
