"""Some replicas no longer take new versions while the others do: their share of the samples grows ever older.

The oldest samples age by one version a step, the newest do not: the spread is the sign, not the mean. Where a bound
evicts them, they age among what is evicted; a replica that only takes new versions late ages more slowly. Without
versions, the quantiles of the gap tell: its median nearly stands, and what is above moves away.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import running_median, spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.gap import metrics_of_gap
from rollbook.diagnose.signs.gap_causes import rise_is_explained
from rollbook.diagnose.signs.gap_humps import has_quantiles, two_humps
from rollbook.diagnose.signs.seconds import over_the_others
from rollbook.diagnose.signs.versions import EVICTED, STALENESS, newest_follows, unit_ramp, versions_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, of_contrast, share

RULE = "version_drift"


@dataclass(frozen=True, slots=True)
class Told:
    """One way in which a log tells it: since when, how surely, and by what."""

    idx: int
    confidence: float
    evidence: tuple[Evidence, ...] = ()
    never_ends: bool = False
    """Whether it is trajectories that do not end, rather than replicas that stand."""


def judge(view: View) -> Finding | NotJudged | None:
    versions = versions_of(view)
    has_versions = versions.oldest is not None or bool(view.family("replica/", "/weight_version"))
    if not has_versions and _spread(view) is None and not has_quantiles(view):
        return NotJudged(
            rule=RULE,
            missing=("replica/*/weight_version", f"{STALENESS}/max"),
            lacks="versions or ages of samples",
            collect="log the weight version of every replica, or of every sample (verl V1 does in its async modes)",
        )
    ways = (
        _keep_their_version,
        _oldest_age,
        _among_evicted,
        _into_the_bound,
        _lags,
        _never_end,
        _spreads,
        _gap_parts,
        _two_humps,
    )
    told = next((told for way in ways if (told := way(view)) is not None), None)
    if told is None:
        return None
    idx, evidence = told.idx, [*told.evidence]
    if versions.some_standing_since is not None and versions.oldest:
        evidence.append(
            Evidence(
                metric=versions.oldest,
                step=view.step_at(versions.some_standing_since),
                before=view.level(versions.oldest, 0, idx),
                after=view.last(versions.oldest, 3),
                says="the oldest sample ages by one version a step",
            )
        )
        c = view.contrast(versions.newest, idx, width=20)
        if c is not None:
            evidence.append(of_contrast(view, c, idx, "the newest does not"))
    for metric in metrics_of_gap(view)[:1]:
        c = view.contrast(metric, idx, width=30)
        if c is not None:
            evidence.append(of_contrast(view, c, idx))
    title, action, next_check = _NEVER_ENDS if told.never_ends else _STANDS
    return Finding(
        rule=RULE,
        title=title,
        area="version",
        confidence=share(told.confidence),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        action=action,
        next_check=next_check,
    )


def _keep_their_version(view: View) -> Told | None:
    """Some replicas say themselves that they stand."""
    versions, replicas = versions_of(view), view.family("replica/", "/weight_version")
    if not versions.standing_replicas or len(versions.standing_replicas) == len(replicas):
        return None
    idx, names = versions.standing_since or 0, ", ".join(versions.standing_replicas)
    says = f"replicas {names} of {len(replicas)} keep their version while the trainer's goes on"
    return Told(idx, 0.97, (Evidence(metric="replica/*/weight_version", step=view.step_at(idx), says=says),))


def _oldest_age(view: View) -> Told | None:
    """The oldest samples age by one version a step, the newest do not."""
    since = versions_of(view).some_standing_since
    return None if since is None or newest_follows(view, since) else Told(since, 0.9)


def _spread(view: View) -> str | None:
    return view.first("sync/version_spread")


def _spreads(view: View) -> Told | None:
    rise = view.rise(_spread(view), log=False)
    if rise is None or rise.late < rise.before + 2 or rise.score < 5:
        return None
    return Told(rise.idx, 0.85, (of_break(rise),))


def _gap_parts(view: View) -> Told | None:
    rise = _gap_of_one_replica(view)
    if rise is None:
        return None
    return Told(rise.idx, 0.96, (of_break(rise, "the labels of that replica are not its weights"),))


def _two_humps(view: View) -> Told | None:
    """Most tokens are as near to the trainer as they were, and a part of them moves away with every update."""
    humps = two_humps(view)
    if humps is None or rise_is_explained(view, humps.rise):
        return None
    says = f"the median is {num(humps.median_ratio)} times what it was: the labels of most replicas are their weights"
    step = humps.rise.step
    stands = Evidence(metric=humps.median, step=step, after=view.last(humps.median), says=says)
    return Told(
        humps.rise.idx, 0.88, (of_break(humps.rise, "grows with the steps in a part of the tokens"), stands)
    )


_NEVER_ENDS = (
    "a few trajectories do not end: they run on over ever more weight versions",
    "put a deadline on every trajectory, in versions or seconds, and leave out the prompts that meet it; if they are "
    "of one replica, take it out of service",
    "the oldest trajectory still running: its prompt, its turn and its replica",
)
_STANDS = (
    "a part of the replicas stands at an old weight version",
    "take the standing replicas out of service, give them the full weights, and let them serve again only after their "
    "digests agree",
    "look in the log of those replicas for the first failed or skipped publication",
)
"""What it is called, what to do, and what to look at next."""


EVICTED_AGE = f"{EVICTED}_staleness/max"


def _among_evicted(view: View) -> Told | None:
    """Samples are evicted older by one version with every step: one replica stands."""
    since = unit_ramp(view, view.first(EVICTED_AGE))
    if since is None:
        return None
    known = np.flatnonzero(np.isfinite(view.values[EVICTED_AGE][:since]))
    first = int(known[-1]) if len(known) else since
    age = float(view.values[EVICTED_AGE][first]) if len(known) else 0.0
    idx = max(0, min(first, view.idx_of(view.step_at(first) - age)))  # as old as it is, since then it stands
    evidence = [
        Evidence(
            metric=EVICTED_AGE,
            step=view.step_at(first),
            before=age,
            after=view.last(EVICTED_AGE, 3),
            says=f"what is evicted ages by one version a step, from {num(age)} to {num(view.last(EVICTED_AGE, 3))}",
        )
    ]
    c = view.contrast(EVICTED, first, width=20)
    if c is not None:
        evidence.append(of_contrast(view, c, first, "evicted a step: that replica's share"))
    return Told(idx, 0.92, tuple(evidence))


LEAST_UNITS = 4
"""Steps in a row in which the oldest samples age by a version each, before the bound throws them away."""


def _into_the_bound(view: View) -> Told | None:
    """The oldest samples age by a version a step, others do not; then they are as young as before, and from that step
    on a part of the samples is evicted: those of a replica that stands are all beyond the bound."""
    oldest, mean = f"{STALENESS}/max", f"{STALENESS}/mean"
    evicts = view.rise(EVICTED, log=False)
    if evicts is None or evicts.end_idx is not None or evicts.score < 5 or not view.has(oldest, mean):
        return None
    for end in range(max(1, evicts.idx - 2), min(evicts.idx + 3, view.n)):
        ages = view.values[oldest][:end]
        known = np.flatnonzero(np.isfinite(ages))
        gained, passed = np.diff(ages[known]), np.diff(view.steps[known])
        other = np.flatnonzero(np.abs(gained - passed) >= 0.35 * passed)
        if not len(other) or len(gained) - 1 - other[-1] < LEAST_UNITS:
            continue
        foot, top = int(known[other[-1] + 1]), int(known[-1])
        usual, age = view.level(oldest, max(0, foot - 20), foot + 1), float(ages[top])
        few = np.nanmax(view.values[mean][foot : top + 1]) - view.level(mean, max(0, foot - 20), foot + 1)
        if view.level(oldest, end, end + 12) > usual + 1.0 or not age >= usual + LEAST_UNITS - 1:
            continue
        if few > 0.5 * (age - usual):
            continue  # all of them age
        idx = max(0, view.idx_of(view.step_at(top) - age))
        says = f"ages by one version a step to {num(age)}, then is what it was before"
        old = Evidence(metric=oldest, step=view.step_at(foot), before=usual, after=age, says=says)
        return Told(idx, 0.9, (old, of_break(evicts, "from there on: that replica's share")))
    return None


LAG = 6.0
"""Versions that the oldest samples must have fallen behind."""
FEW = 0.3
"""Growth of the mean age over that of the oldest beyond which all samples grow older, not those of some replicas."""


def _lags(view: View) -> Told | None:
    """The oldest samples fall ever further behind while the newest are fresh and the mean rises by the share of a few:
    some replicas take new versions late."""
    oldest, newest, mean = (f"{STALENESS}/{end}" for end in ("max", "min", "mean"))
    if not view.has(oldest, newest, mean) or view.n < 40:
        return None
    begin, quarter, tenth = max(5, view.n // 20), max(15, view.n // 4), max(5, view.n // 10)
    early, late = view.level(oldest, begin, quarter), view.level(oldest, view.n - tenth)
    if late < early + LAG or late < 2.5 * early:
        return None
    fresh = view.level(newest, view.n - tenth) <= view.level(newest, begin, quarter) + 0.5
    grown = view.level(mean, view.n - tenth) - view.level(mean, begin, quarter)
    known = np.flatnonzero(np.isfinite(view.values[oldest]))
    smooth = running_median(view.values[oldest][known], 7)
    low = np.flatnonzero(smooth <= early + 1.0)
    steady = spearman(smooth[int(low[-1]) :], known[int(low[-1]) :].astype(np.float64)) if len(low) else 0.0
    rise = view.rise(oldest, log=False)
    at_once = rise is not None and rise.score >= 8 and rise.end_idx is None and rise.after >= 0.7 * late
    if not fresh or grown > FEW * (late - early) or not (steady >= 0.8 or at_once):
        return None
    idx = rise.idx if rise is not None and at_once else int(known[int(low[-1])])
    how = "at once, and stay there" if at_once else "step by step"
    says = f"the oldest samples fall behind {how}, from {num(early)} to {num(late)} versions"
    few = f"the mean by {num(grown / (late - early))} of that: the share of a few replicas"
    fresh_age, mean_age = view.level(newest, view.n - tenth), view.level(mean, view.n - tenth)
    step = view.step_at(idx)
    evidence = (
        Evidence(metric=oldest, step=step, before=early, after=late, says=says),
        Evidence(metric=newest, step=step, after=fresh_age, says="stays fresh"),
        Evidence(metric=mean, step=step, after=mean_age, says=few),
    )
    return Told(idx, 0.85, evidence)


WORST = f"{STALENESS}_worst"
"""Age of the oldest token of a sample, where the one above is that of its newest."""
SPANS = "training/off_policy/trajectory_spans/max"
"""Weight versions that the longest-running trajectory of a step was sampled with."""


def _never_end(view: View) -> Told | None:
    """Trajectories are continued over ever more versions: their first tokens age, their last ones and all other samples
    do not, and the answers are no longer."""
    oldest, mean = f"{WORST}/max", f"{WORST}/mean"
    rise, spans = view.rise(oldest, log=False), view.rise(SPANS, log=False)
    if rise is None or spans is None or not view.has(f"{STALENESS}/max", f"{WORST}/min"):
        return None
    if rise.end_idx is not None or not (
        rise.score >= 5 and spans.score >= 5 and spans.late >= 2.0 * spans.before
    ):
        return None
    idx, tenth = min(rise.idx, spans.idx), max(5, view.n // 10)
    aged = rise.late - rise.before

    def grown(metric: str) -> float:
        return view.level(metric, max(idx, view.n - tenth)) - view.level(metric, 0, idx)

    thrown_away = view.contrast(EVICTED, idx + 4, width=20)
    is_old = aged >= LAG and rise.late >= 2.5 * rise.before
    is_cut = thrown_away is not None and thrown_away.after >= 2.0 * thrown_away.before + 4.0
    is_cut &= aged >= 2.0  # at the bound of staleness
    if not (is_old or is_cut) or not view.near(rise.idx, spans.idx, share=0.1, least=10):
        return None
    few = (
        grown(mean) <= 0.5 * aged and grown(f"{STALENESS}/max") <= 0.5 * aged and grown(f"{WORST}/min") <= 0.5
    )
    longer = [view.last(m, tenth) / view.level(m, 0, idx) for m in LENGTHS if view.has(m)]
    if not few or max(longer, default=1.0) > 0.7 * spans.late / spans.before:
        return None
    evidence = [
        of_break(spans, "versions of the trajectory that runs longest"),
        of_break(rise, "age of the oldest token"),
    ]
    fresh = view.level(f"{STALENESS}/max", max(idx, view.n - tenth))
    says = "the newest tokens of the same samples stay fresh"
    evidence.append(Evidence(metric=f"{STALENESS}/max", step=view.step_at(idx), after=fresh, says=says))
    if thrown_away is not None and is_cut:
        evidence.append(of_contrast(view, thrown_away, idx, "evicted a step as too stale"))
    return Told(idx, 0.85, tuple(evidence), never_ends=True)


LENGTHS = ("response_length/mean", "response_length/max")


def _gap_of_one_replica(view: View) -> Break | None:
    """A replica whose gap to the trainer leaves that of the others, and grows on with the steps."""
    gaps = view.family("training/logprob_gap_by_replica/", "/mean")
    if len(gaps) < 2:
        return None
    for metric in gaps:
        rise = view.rise(over_the_others(view, metric, gaps))
        own = view.rise(metric)
        if rise is None or own is None or rise.ratio < 3 or rise.score < 5:
            continue
        after = view.values[metric][rise.idx :]
        after = finite(after)
        third = max(2, len(after) // 3)
        if len(after) >= 6 and np.median(after[-third:]) >= 1.5 * np.median(after[:third]):
            return replace(own, idx=rise.idx, step=rise.step)
    return None
