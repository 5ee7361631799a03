"""How many sequences run at each decode step: slots, waves and the tail from the lengths.

Every running row advances one token per decode step, so the schedule in units of steps does not depend on what
a step costs, and the curve is exact for given lengths.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.ledger.lengths import Curve, LengthDistribution


@dataclass(frozen=True, slots=True)
class RowCurve:
    """One replica's decode steps, first to last."""

    rows: Curve
    """[T] running sequences."""
    response_tokens: Curve
    """[T] response tokens that the running rows hold together before this step."""
    num_admissions: int
    """Distinct steps before which new sequences were admitted."""

    @property
    def num_steps(self) -> int:
        return len(self.rows)


def row_curve(steps_per_row: NDArray[np.int64], num_slots: int) -> RowCurve:
    """Run sequences in order through `num_slots` slots; a freed slot takes the next one at once.

    Args:
        steps_per_row: [n] decode steps of each sequence, in order of admission; zeros take a slot for no step.
        num_slots: sequences that run at once, at least 1.

    >>> curve = row_curve(np.array([3, 1, 2]), num_slots=2)
    >>> curve.rows.tolist(), curve.response_tokens.tolist(), curve.num_admissions
    ([2.0, 2.0, 2.0], [0.0, 1.0, 3.0], 2)
    """
    steps = np.asarray(steps_per_row, np.int64)
    starts = np.zeros(len(steps), np.int64)
    if len(steps) > num_slots:
        free_at = steps[:num_slots].tolist()
        heapq.heapify(free_at)
        for idx in range(num_slots, len(steps)):
            start = free_at[0]
            starts[idx] = start
            heapq.heapreplace(free_at, start + int(steps[idx]))
    ends = starts + steps
    num_steps = int(ends.max(initial=0))
    started = np.bincount(starts, minlength=num_steps + 1)
    rows = np.cumsum(started - np.bincount(ends, minlength=num_steps + 1))[:num_steps]
    start_sum = np.bincount(starts, starts, num_steps + 1) - np.bincount(ends, starts, num_steps + 1)
    held = np.arange(num_steps) * rows - np.cumsum(start_sum)[:num_steps]
    return RowCurve(rows.astype(np.float64), held.astype(np.float64), int(np.count_nonzero(started)))


def draw_lengths(lengths: LengthDistribution, num_sequences: int, seed: int) -> NDArray[np.int64]:
    """[n] response lengths in whole tokens, at least 1, drawn independently; the same for the same seed."""
    uniform = np.random.default_rng(seed).random(num_sequences)
    drawn: NDArray[np.int64] = np.maximum(np.rint(lengths.quantile(uniform)), 1).astype(np.int64)
    return drawn
