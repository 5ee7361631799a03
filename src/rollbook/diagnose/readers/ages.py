"""How old samples are, where a log has their weight versions alone (slime, miles).

Facts: `rollout/weight_version/{min,mean,max}` are absolute, counted by the job's updates: rollout N is trained at
version N + 1 where every rollout is followed by one. A job that is taken up again begins at 1. Colocated jobs may label
all their samples alike; then versions say nothing.
"""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.series import RunSeries, Series

_VERSION = "rollout/weight_version/"
_NOW = "rollout/fully_async/current_weight_version"
_AGE = "training/off_policy/trajectory_staleness"
_AGES = {"mean": f"{_AGE}/mean", "max": f"{_AGE}/min", "min": f"{_AGE}_worst/max"}
"""What is told of versions -> what it is of ages: the newest version is the youngest sample."""
LEAST_ROWS = 12
LARGEST_INTERVAL = 8
"""Rollouts between two publications, at most."""
BACK = 3.0
"""Versions by which the newest falls when a job begins to count anew."""


def add(run: RunSeries) -> None:
    """Add those ages, in steps, that a run with versions has not logged itself."""
    newest = run.values.get(f"{_VERSION}max")
    if newest is None:
        return
    now = run.values.get(_NOW)
    interval = 1 if now is not None else _interval(run, newest)
    if now is None:
        now = None if interval is None else _trainers(run, newest, interval)
    if now is None or interval is None:
        return
    for stat, age in _AGES.items():
        version = run.values.get(f"{_VERSION}{stat}")
        if version is not None and age not in run.values:
            run.values[age] = np.maximum((now - version) * interval, 0.0)
            run.in_log[age] = f"age by {_VERSION}{stat}"


def _interval(run: RunSeries, newest: Series) -> int | None:
    """Rollouts between two publications, from the pace of the newest version in the first third; None where it has
    none, or no steady one."""
    known = np.flatnonzero(np.isfinite(newest))
    first = known[: max(LEAST_ROWS, len(known) // 3)]
    if len(first) < LEAST_ROWS:
        return None
    paces = np.diff(newest[first]) / np.diff(run.steps[first])
    paces = paces[paces > -BACK]  # a job that counted anew
    pace = float(paces.mean())
    interval = round(1.0 / pace) if pace > 0.5 / LARGEST_INTERVAL else 0
    return interval if 1 <= interval <= LARGEST_INTERVAL and abs(pace * interval - 1.0) <= 0.15 else None


def _trainers(run: RunSeries, newest: Series, interval: int) -> Series:
    """[n] the trainer's version at each step: on from that of the first samples of each life of the job, which are
    fresh."""
    now = np.full(len(newest), np.nan)
    known = np.flatnonzero(np.isfinite(newest))
    begins = [0, *(np.flatnonzero(np.diff(newest[known]) <= -BACK) + 1).tolist()]
    for begin, end in zip(begins, [*begins[1:], len(known)], strict=True):
        life = known[begin:end]
        passed = run.steps[life] / interval
        now[life] = passed + float(np.median((newest[life] - passed)[:5]))
    return now
