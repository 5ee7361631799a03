"""Groups that are counted as under way while ever fewer really run (`buffer_never_fills`): they were lost, and nobody
submits them again. Where fewer are admitted, both counts fall and nobody waits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollbook.diagnose.changes import foot_of_climb, running_median, spearman
from rollbook.diagnose.cost import is_asynchronous, is_worth
from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.readers.words import pieces_of
from rollbook.diagnose.rules.parts.longer_waits import RULE
from rollbook.diagnose.signs.books import missing_groups
from rollbook.diagnose.signs.seconds import lost_in_steps
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

_OF = frozenset(
    ("group", "groups", "sample", "samples", "trajectory", "trajectories", "rollouts", "episodes", "buffer")
)
_RUNNING = frozenset(("running", "inflight", "flight", "active"))
_COUNTED = frozenset(("submitted", "admitted", "outstanding", "unfinished"))
_OTHER = frozenset(
    ("max", "min", "limit", "capacity", "s", "seconds", "time", "ratio", "frac", "rate", "tokens")
)
GONE = 0.65
"""Those that run over those that ran at first, up to which the others are gone."""
STANDS = 0.9
"""Those that are counted over those at first, from which on as many are thought to be under way."""
WAITS = 1.5
"""Growth of the wait from which on they are missed, where nothing counts them."""


def lost_in_flight(view: View) -> Finding | None:
    """Counts of what is sent off and of what comes that part; ever fewer that run at the same count of those under way,
    or while the trainer waits ever longer; or batches that stay short with nothing under way."""
    return _counts_part(view) or _ever_fewer(view) or _short_with_none_left(view)


def _counts_part(view: View) -> Finding | None:
    """What was sent off is neither trained, given up nor under way."""
    missing = missing_groups(view)
    if missing is None:
        return None
    since, others = missing.since, ", ".join(missing.others)
    says = f"{num(since.late)} of what is sent off never comes, {num(missing.num)} by now; before, the counts agreed"
    beside = f"against this one, with {others}" if others else "against this one"
    evidence = [
        Evidence(metric=missing.sent, step=since.step, before=since.before, after=since.late, says=says),
        Evidence(metric=missing.came, step=since.step, after=view.last(missing.came, 1), says=beside),
    ]
    title = "groups vanish on their way: more is sent off than comes, fails or is under way"
    return _felt_or_not(view, _finding(view, since.idx, title, evidence, 0.93 if others else 0.88))


def _ever_fewer(view: View) -> Finding | None:
    running = _named(view, _RUNNING, but=_COUNTED)
    if running is None:
        return None
    values = view.values[running]
    known = np.flatnonzero(np.isfinite(values))
    part = max(3, len(known) // 8)
    early, late = (float(np.median(values[piece])) for piece in (known[:part], known[-part:]))
    smooth = running_median(values[known], 5)
    if late > GONE * early or spearman(smooth, known.astype(np.float64)) > -0.85:
        return None
    counted = _named(view, _COUNTED, but=frozenset())
    stands = counted is not None and view.last(counted, part) >= STANDS * view.level(counted, 0, part) > 0.0
    wait, steadiness = view.trend("timing_s/gen")
    waits = wait >= WAITS and steadiness >= 0.7
    if not stands and not (waits and is_asynchronous(view)):
        return None
    idx = foot_of_climb(-values)
    step = view.step_at(idx)
    says = f"{num(early)} at first, {num(late)} now"
    evidence = [Evidence(metric=running, step=step, before=early, after=late, says=says)]
    if counted is not None and stands:
        still = view.last(counted, part)
        says = f"{num(still)}, as at first: what is gone still counts"
        evidence.append(Evidence(metric=counted, step=step, before=still, after=still, says=says))
    if waits:
        before, after = view.level("timing_s/gen", 0, part), view.last("timing_s/gen", part)
        says = f"the trainer waits {num(after)} s, {num(before)} s at first"
        evidence.append(Evidence(metric="timing_s/gen", step=step, before=before, after=after, says=says))
    title = "groups vanish on their way, and the trainer waits for the others"
    found = _finding(view, idx, title, evidence, 0.7 + 0.15 * stands + 0.08 * waits)
    return _felt_or_not(view, found) if stands else found


_GOT = frozenset(("collected", "accepted", "received", "delivered"))
_WANTED = frozenset(("required", "needed", "wanted", "target", "expected"))
MOSTLY, HARDLY = 0.8, 0.1
"""Shares of the steps since it began, and before, in which a batch is short."""


def _short_with_none_left(view: View) -> Finding | None:
    """Batches that used to be full come short of a few groups, step after step, while none is under way any more: what
    is missing was lost, and a deadline ends the wait for it."""
    got, wanted = _named(view, _GOT, but=_WANTED), _named(view, _WANTED, but=_GOT)
    running = _named(view, _RUNNING, but=_COUNTED)
    if got is None or wanted is None or running is None:
        return None
    short = view.values[got] < view.values[wanted]
    at = np.flatnonzero(short)
    if len(at) < 8 or at[0] < 4:
        return None
    idx = int(at[0])
    early, late = view.level(running, 0, idx), view.level(running, idx)
    if short[idx:].mean() < MOSTLY or short[:idx].mean() > HARDLY or not early > 0.0 or late > 0.02 * early:
        return None
    step = view.step_at(idx)
    missing = float(np.nanmedian((view.values[wanted] - view.values[got])[at]))
    says = (
        f"{num(missing)} short of {num(view.last(wanted))} in {len(at)} of {view.n - idx} steps, none before"
    )
    evidence = [
        Evidence(
            metric=got, step=step, before=view.level(got, 0, idx), after=view.level(got, idx), says=says
        ),
        Evidence(
            metric=running,
            step=step,
            before=early,
            after=late,
            says=f"{num(early)} under way until then, {num(late)} since: nothing is left to wait for",
        ),
    ]
    title = "batches stay short of groups that were lost on their way"
    return replace(
        _finding(view, idx, title, evidence, 0.87), cost_s=None
    )  # of what is missing, not of seconds


def _finding(view: View, idx: int, title: str, evidence: list[Evidence], confidence: float) -> Finding:
    return Finding(
        rule=RULE,
        title=title,
        area="async",
        confidence=share(confidence),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=lost_in_steps(view, idx),
        action="give every group an owner and a deadline, and submit it again when either is gone; restart the "
        "rollout side to fill the buffer now",
        next_check="ids submitted and not finished against those that an engine or an environment works on",
    )


def _felt_or_not(view: View, found: Finding) -> Finding:
    """Groups that are known to be gone stay so, whether they are felt yet or not: seconds do not weigh them then."""
    is_felt = found.cost_s is not None and is_worth(view, found.cost_s)
    return found if is_felt else replace(found, cost_s=None)


def _named(view: View, words: frozenset[str], *, but: frozenset[str]) -> str | None:
    """The first metric whose name has one of the words, and speaks of groups or samples."""
    for metric in view.run.values:
        pieces = pieces_of(metric)
        if pieces & words and pieces & _OF and not pieces & (_OTHER | but) and view.count(metric) >= 12:
            return metric
    return None
