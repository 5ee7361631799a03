"""The labels of weight versions: how old samples are, and replicas that keep their version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import foot_of_climb, noise_scale, running_median, spearman
from rollbook.diagnose.readers.words import pieces_of
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.deaths import deaths_of
from rollbook.diagnose.view import View, once

STALENESS = "training/off_policy/trajectory_staleness"
EVICTED = "training/off_policy/evicted_samples"
"""Samples that were too old to be trained."""


@dataclass(frozen=True, slots=True)
class Versions:
    """What the labels of weight versions say."""

    mean: str | None
    oldest: str | None
    newest: str | None
    """Metrics of staleness: mean (the largest stands for it where it is all there is), largest, smallest."""
    rise: Break | None
    """Of the mean staleness."""
    all_standing_since: int | None
    """Position from which every sample grows older by about a version a step."""
    some_standing_since: int | None
    """The same for the oldest samples only."""
    standing_replicas: tuple[str, ...]
    """Replicas that keep their version while the trainer's goes on."""
    standing_since: int | None


@once("versions")
def versions_of(view: View) -> Versions:
    oldest = view.first(f"{STALENESS}_worst/max", f"{STALENESS}/max")
    mean = view.first(f"{STALENESS}/mean", f"{STALENESS}_worst/mean")
    if mean is None and unit_ramp(view, oldest) is None:  # by a version a step a single replica's samples age
        mean = oldest
    once_full = _once_full(view, mean)
    newest = view.first(f"{STALENESS}/min", f"{STALENESS}_worst/min")
    replicas, since = _standing_replicas(view)
    rise = view.rise(once_full, log=False)
    climb = _climbs_all_along(view, once_full)
    if climb is not None and (rise is None or rise.before > 0.5 * (climb.before + climb.late)):
        rise = climb
    all_standing = unit_ramp(view, newest or mean)
    if all_standing is not None and _wait_in_a_queue(view, mean or newest or "", all_standing):
        all_standing = None
    return Versions(
        mean=mean,
        oldest=oldest,
        newest=newest,
        rise=None if rise is None else replace(rise, metric=mean or ""),
        all_standing_since=all_standing,
        some_standing_since=unit_ramp(view, f"{STALENESS}/max" if view.has(f"{STALENESS}/max") else oldest),
        standing_replicas=replicas,
        standing_since=since,
    )


def has_ages(view: View) -> bool:
    """Whether a log says of which versions its samples are."""
    return versions_of(view).mean is not None or bool(view.family("replica/", "/weight_version"))


def newest_follows(view: View, idx: int) -> bool:
    """Whether the newest samples grew older too: then all stand still, or generation is slow."""
    versions = versions_of(view)
    if versions.all_standing_since is not None:
        return True
    c = view.contrast(versions.newest, idx, width=15, skip=5)
    oldest = view.contrast(versions.oldest, idx, width=15, skip=5)
    return c is not None and oldest is not None and c.diff >= max(1.0, 0.2 * oldest.diff) and c.score >= 4


def _once_full(view: View, mean: str | None) -> str | None:
    """Name of the mean staleness once the pipeline is full: from fresh samples it grows up to its bound, and stays."""
    if mean is None:
        return None
    values = view.values[mean].copy()
    known = np.flatnonzero(np.isfinite(values))
    end = 0
    while end + 1 < len(known) and values[known[end + 1]] >= values[known[end]] + 0.3:
        end += 1
    end = max(end, _filled_at(values[known]))
    if end and values[known[0]] <= 1.0:
        values[: known[end]] = np.nan
    return view.derive(f"{mean} once full", values)


FULL = 0.9
"""Share of what follows at which a pipeline is full."""


def _filled_at(ages: Series) -> int:
    """Where ages that grow ever more slowly from the first, fresh samples on come to a level; 0 where they do not."""
    smooth = running_median(ages, 3)
    for i in range(1, len(ages) // 4):
        after = ages[i + 1 : i + 1 + max(8, 2 * i)]
        if smooth[i] >= FULL * float(np.median(after)):
            return i
    return 0


OLDER, OLDER_TIMES = 1.5, 2.0
"""Versions, and times those at first, by which samples are older in the end of a climb over all of the log."""
LEAST_CLIMB = 24
"""Values that such a climb has."""


def _climbs_all_along(view: View, metric: str | None) -> Break | None:
    """Samples that grow older from nearly the first step to the last, so evenly that no step parts before and after."""
    if metric is None or view.count(metric) < LEAST_CLIMB or view.trend(metric)[1] < 0.95:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    foot = max(int(np.searchsorted(known, foot_of_climb(values))), 3)
    climb = values[known[foot:]]
    before, late = float(np.median(values[known[:foot]])), float(np.median(climb[-max(3, len(climb) // 3) :]))
    if len(climb) < LEAST_CLIMB // 2 or late < max(before + OLDER, OLDER_TIMES * before):
        return None
    idx = int(known[foot])
    return Break(
        metric=metric,
        idx=idx,
        step=view.step_at(idx),
        before=before,
        after=float(np.median(climb[:12])),
        late=late,
        score=(late - before) / max(noise_scale(values[known]), 1e-9),
        growth=2.0,
        rise_steps=max(3, int(0.7 * len(climb))),
        end_idx=None,
        early_share=0.25,
        num_after=len(climb),
    )


QUEUES = 3.0
"""Times as many samples in a queue from which on they grow old there."""
_OF_A_SIZE = frozenset(("size", "length", "len", "depth", "num"))


def _wait_in_a_queue(view: View, age: str, idx: int) -> bool:
    """Whether a queue of samples grows as their ages do: engines that stand still make no queue longer."""
    for metric in view.run.values:
        words = pieces_of(metric)
        if "queue" not in words or not words & _OF_A_SIZE:
            continue
        before, late = view.level(metric, max(0, idx - 20), max(idx - 2, 1)), view.last(metric, 5)
        if (
            late >= QUEUES * max(before, 1.0)
            and spearman(view.values[metric][idx:], view.values[age][idx:]) >= 0.9
        ):
            return True
    return False


STANDSTILL_STEPS = 6
"""Steps in a row over which samples must age by one version a step."""


def unit_ramp(view: View, metric: str | None) -> int | None:
    """Where a staleness begins to grow by one version with every step, to beyond what it ever was before."""
    if metric is None:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < STANDSTILL_STEPS + 4:
        return None
    gained = np.diff(values[known])
    passed = np.diff(view.steps[known])
    is_unit = (np.abs(gained - passed) < 0.35 * np.maximum(passed, 1)).astype(np.int64)
    reach = STANDSTILL_STEPS + 2
    enough = np.convolve(is_unit, np.ones(reach, np.int64), "valid") >= STANDSTILL_STEPS
    for i in np.flatnonzero(enough):
        start, end = int(i), min(int(i) + reach, len(known) - 1)
        if start <= 3 and values[known[-1]] < 0.7 * (view.steps[known[-1]] - view.steps[known[0]]):
            continue  # the pipeline fills up to its bound
        before = float(np.max(values[known[max(0, start - 20) : start + 1]]))
        rise = values[known[end]] - values[known[start]]
        if (
            rise >= 0.75 * (view.steps[known[end]] - view.steps[known[start]])
            and values[known[end]] >= before + 4
            and not _levels_off(values[known[end:]])
            and _goes_on(values[known], view.steps[known], start, reach)
        ):
            return int(known[start]) + 1
    return None


UNIT = 0.85
"""Versions a step, up to the height of a ramp, from which on it is one: whole numbers hide a slower one for a while."""


def _goes_on(values: Series, steps: Series, start: int, reach: int) -> bool:
    """Whether an age grows by a version a step beyond the steps in which that shows, as far as it does grow, and did
    not grow nearly as fast before."""
    past = max(0, start - reach)
    grew = start - past == reach and values[start] - values[past] >= 0.5 * (steps[start] - steps[past])
    top = start + int(np.argmax(values[start : start + 4 * reach]))
    return not grew and bool(values[top] - values[start] >= UNIT * (steps[top] - steps[start]))


def _levels_off(values: Series) -> bool:
    """Whether an age stops growing at its height: a bound holds it, so somebody still takes new versions."""
    top = int(np.argmax(values))
    after = values[top:]
    back = values[top] - float(np.median(after[-3:]))  # the oldest of a step wobbles with its height
    return len(after) >= 6 and bool(
        after.min() >= 0.75 * values[top] and back <= max(2.0, 0.15 * values[top])
    )


def _standing_replicas(view: View) -> tuple[tuple[str, ...], int | None]:
    trainer = view.values.get("training/weight_version")
    standing: list[str] = []
    since: int | None = None
    every = view.family("replica/", "/weight_version")
    gone = {death.replica: death for death in deaths_of(view) if death.back_step is None}
    for metric in every:
        values = view.values[metric]
        known = np.flatnonzero(np.isfinite(values))
        if len(known) < 4:
            continue
        last = values[known[-1]]
        same = known[values[known] == last]
        begin = int(same[0])
        if trainer is not None:
            behind = np.nanmax(trainer) - last
        else:
            behind = max(np.nanmax(view.values[m]) for m in every) - last
        replica = metric.split("/")[1]
        is_dead = replica in gone and gone[replica].step <= view.step_at(begin) + 1
        is_left = _is_left_behind(view, every, metric, begin)
        if behind >= 3 and len(same) >= 3 and is_left and not is_dead:
            standing.append(replica)
            since = begin if since is None else min(since, begin)
    return tuple(standing), since


LEFT_BEHIND = 2
"""Newer versions that other replicas took since one stands: between two publications all stand, and one takes the next
of them a little later."""


def _is_left_behind(view: View, every: Sequence[str], metric: str, begin: int) -> bool:
    """Whether other replicas went on without this one, or all of them stand."""
    last = view.last(metric, 1)
    newer = [v[v > last] for m in every if m != metric and len(v := finite(view.values[m][begin:]))]
    taken = len(np.unique(np.concatenate(newer))) if newer else 0
    return taken == 0 or taken >= LEFT_BEHIND
