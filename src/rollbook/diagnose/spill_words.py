"""What a log says of an object store that spills, under names of its own: bytes by the step or since the start, in any
unit. A name is read by its words."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from rollbook.diagnose.readers.words import pieces_of
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.units import BYTES, unit_of

SPILLED = "host/object_store_spilled_bytes"


def spilled_by_words(values: Mapping[str, Series]) -> tuple[str, Series] | None:
    """The log's name for what the object store spilled, and that in bytes of each step; None without one.

    >>> name, spilled = spilled_by_words({"ray/spilled_gb_total": np.array([0.0, 0.0, 2.0, 5.0])})
    >>> name, (spilled / 2**30).tolist()
    ('ray/spilled_gb_total', [0.0, 0.0, 2.0, 3.0])
    """
    for name, series in values.items():
        words = pieces_of(name)
        unit = unit_of(words)
        if (
            unit is None
            or not words & {"spilled", "spill", "spills", "spilling"}
            or words & {"restored", "s", "sec"}
        ):
            continue
        known = finite(series)
        if len(known) < 3:
            continue
        if words & {"total", "cumulative", "cum", "sum"} or _only_grows(known):
            return name, BYTES[unit] * _by_the_step(series)
        return name, BYTES[unit] * series
    return None


def _only_grows(known: Series) -> bool:
    """Whether a series is counted since the start: it never falls, and rises in more than a few places."""
    rises = np.diff(known)
    return bool(np.all(rises >= 0) and np.count_nonzero(rises) >= 3)


def _by_the_step(series: Series) -> Series:
    """Differences of a count, which begins anew where it falls; a step without a value has none."""
    out = np.full(len(series), np.nan)
    known = np.flatnonzero(np.isfinite(series))
    rises = np.diff(series[known], prepend=series[known[0]])
    out[known] = np.where(rises >= 0, rises, series[known])
    return out
