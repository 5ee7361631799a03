"""Weight publications: their seconds and sizes, and where they stop or carry nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.view import View, once


@dataclass(frozen=True, slots=True)
class Publications:
    """What is known of weight publications."""

    seconds: str | None
    size: str | None
    absent_since: int | None
    """Position from which they carry nothing or take a fraction of their time."""
    absent_until: int | None
    failed: str | None
    how: str


@once("publications")
def publications_of(view: View) -> Publications:
    seconds = view.first("timing_s/update_weights")
    size = view.first(
        "sync/num_bytes",
        "checkpoint_engine/payload_mbytes",
        "checkpoint_engine/changed_elems",
        "sync/num_publications",
    )
    failed = view.first("sync/num_failed")
    silent = _no_longer_logged(view, seconds)
    if silent is not None:
        return Publications(seconds, size, silent, None, failed, "are no longer logged")
    says_bytes = size == "sync/num_bytes" and np.isfinite(view.values[size][-3:]).any()
    for metric, least, how in ((size, 0.7, "carry less"), (seconds, 0.45, "take less time")):
        if metric == seconds and says_bytes:
            continue  # what was sent is known: fewer seconds are only a quieter host
        fall = view.fall(metric)
        if fall is not None and fall.drop >= least and fall.score >= 5 and fall.rise_steps <= 3:
            return Publications(seconds, size, fall.idx, fall.end_idx, failed, how)
    rise = view.rise(failed, log=False)
    if rise is not None and rise.late >= 1:
        return Publications(seconds, size, rise.idx, rise.end_idx, failed, "fail")
    ratio = view.first("checkpoint_engine/changed_ratio")
    fall = view.fall(ratio)
    if fall is not None and fall.drop >= 0.9 and fall.score >= 5:
        return Publications(seconds, size, fall.idx, fall.end_idx, failed, "change nothing")
    return Publications(seconds, size, None, None, failed, "")


def _no_longer_logged(view: View, metric: str | None) -> int | None:
    """Where a metric that every step (or every k-th) had stops while the steps go on."""
    if metric is None:
        return None
    known = np.flatnonzero(np.isfinite(view.values[metric]))
    if len(known) < 8:
        return None
    usual = int(np.max(np.diff(known)[-20:]))
    missing = view.n - 1 - int(known[-1])
    return int(known[-1]) + 1 if missing >= max(5, 3 * usual) else None
