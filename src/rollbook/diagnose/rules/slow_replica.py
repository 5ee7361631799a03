"""One replica generates much more slowly than the others, and every step waits for what was sent to it. Its tokens a
second are held against the others' in the same step, so that lengths and the host's load drop out."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.changes import best_splits
from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.signs.seconds import over_the_others
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "slow_replica"
SLOW = 0.4
"""Share of the others' tokens a second at which a replica is slow."""


def judge(view: View) -> Finding | None:
    speeds = view.family("replica/", "/tokens_per_s")
    if len(speeds) < 2:
        return None
    best: Finding | None = None
    for metric in speeds:
        found = _judge(view, metric, over_the_others(view, metric, speeds))
        if found is not None and (best is None or found.confidence > best.confidence):
            best = found
    return best


def _parted(view: View, name: str) -> int | None:
    """Where a noisy speed parts into two ranges that hardly overlap, the later one slow."""
    values = view.values[name]
    known = np.flatnonzero(np.isfinite(values) & (values > 0))
    if len(known) < 16:
        return None
    splits = best_splits(np.log(values[known]), min_points=6, direction=-1)
    level = next((split for split in splits if split.kind == "level"), None)
    if level is None:
        return None
    before, after = values[known[: level.idx]], values[known[level.idx :]]
    is_apart = np.quantile(after, 0.85) < np.quantile(before, 0.2)
    is_slow = np.median(after) <= SLOW * min(1.0, float(np.median(before)))
    return int(known[level.idx]) if is_apart and is_slow else None


def _judge(view: View, metric: str, name: str) -> Finding | None:
    replica = metric.split("/")[1]
    fall = view.fall(name, log=True)
    level = view.level(name)
    if fall is not None and fall.late <= SLOW and fall.ratio <= 0.5 and fall.score >= 5:
        idx, before, after, confidence = fall.idx, fall.before, fall.late, 0.92
    elif (at := _parted(view, name)) is not None:
        idx, before, after, confidence = at, view.level(name, 0, at), view.level(name, at), 0.85
    elif view.count(name) >= 8 and level <= SLOW and view.level(name, 0, max(5, view.n // 8)) <= SLOW:
        idx, before, after, confidence = 0, 1.0, level, 0.8
    else:
        return None
    step = view.step_at(idx)
    says = f"{num(after)} of the other replicas' tokens a second, {num(before)} before"
    gen = view.contrast("timing_s/gen", idx)
    cost = None if gen is None else max(gen.diff, 0.0) * (view.n - idx) * view.stride
    return Finding(
        rule=RULE,
        title=f"replica {replica} generates at {num(after)} of the others' speed",
        area="implementation",
        confidence=share(confidence),
        step=step,
        evidence=(Evidence(metric=metric, step=step, before=before, after=after, says=says),),
        cost_s=cost or None,
        action=f"take replica {replica} out of service; look for another process, a throttled device or a slow host",
        next_check="the same request on that replica alone: seconds a decode step against the others'",
    )
