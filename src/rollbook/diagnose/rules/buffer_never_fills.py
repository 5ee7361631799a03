"""The trainer waits for samples that do not come: they are evicted as fast as they finish, fail, or hang.

Waiting grows although responses are no longer, the filter drops no more, and sandboxes are as quick as before:
what is generated does not reach the trainer.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollbook.diagnose.cost import is_asynchronous
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts import longer_waits
from rollbook.diagnose.rules.parts.longer_waits import OLDEST, RULE
from rollbook.diagnose.rules.parts.lost_in_flight import lost_in_flight
from rollbook.diagnose.signs.dropped import batch_of
from rollbook.diagnose.signs.environments import failure_kinds_of
from rollbook.diagnose.signs.seconds import excess_of, lost_seconds, stalls_at_end, waiting_of
from rollbook.diagnose.signs.standstill import Standstill, standstill_of
from rollbook.diagnose.signs.versions import EVICTED, STALENESS
from rollbook.diagnose.stops import Stop, stop, stopped_by
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break

MISSING = (
    "look at what is still running: the trajectories that are missing, their replica and their environment"
)
"""What to do first where a batch does not come."""


def judge(view: View) -> Finding | NotJudged | None:
    stopped = stopped_by(view, RULE)
    if stopped is not None:
        return _stopped(stopped)
    excess = excess_of(view)
    if (standing := standstill_of(view)) is not None and standing.told_by == RULE:
        waits = longer_waits.for_good(view, excess) if excess is not None else None
        told = [found for found in (lost_in_flight(view), waits) if found is not None]
        return _stands_still(standing, min(told, key=lambda found: found.step, default=None), stop(view))
    if (lost := lost_in_flight(view)) is not None:
        return lost
    if excess is None and (stalled := _whole_steps(view)) is not None:
        return stalled
    if excess is None:
        return NotJudged(
            rule=RULE,
            missing=("timing_s/gen",),
            lacks="seconds of generation",
            collect="log the seconds the trainer waits for samples",
        )
    if (late := _deadlines(view)) is not None:
        return late
    if not is_asynchronous(view) and view.run.format.startswith("verl"):
        return None  # generation of a synchronous step waits for no buffer
    return longer_waits.in_spells(view) or _evicts_most(view) or longer_waits.for_good(view, excess)


def _stopped(found: Stop) -> Finding:
    return Finding(
        rule=RULE,
        title="the trainer waited for samples until a deadline ended the run",
        area="async",
        confidence=0.96,
        step=found.step,
        evidence=(found.evidence(),),
        action=found.remedy
        or "put a deadline on every trajectory; look at the replica or environment that is named",
        next_check=OLDEST,
    )


def _stands_still(found: Standstill, waits: Finding | None, beside: Stop | None) -> Finding:
    """The finding, dated by where waiting began to grow where it did before, with what died beside it."""
    earlier = waits if waits is not None and waits.step < found.step else None
    died = () if beside is None else (Evidence(metric="log", step=beside.step, says=beside.words),)
    return Finding(
        rule=RULE,
        title="the log ends while the trainer waits for samples that do not come",
        area="async",
        confidence=0.92,
        step=earlier.step if earlier else found.step,
        evidence=(found.evidence, *died, *(earlier.evidence if earlier else ())),
        cost_s=found.lasted_s,
        action=f"{MISSING}; put a deadline on every trajectory, so that a step goes on without them",
        next_check=OLDEST,
    )


def _whole_steps(view: View) -> Finding | None:
    """Steps of an asynchronous trainer stall, and nothing else of them is timed: what such a trainer waits for is its
    batch."""
    if not is_asynchronous(view) or waiting_of(view) != "timing_s/step":
        return None
    if (found := stalls_at_end(view, "timing_s/step")) is None or view.events("collective_timeout"):
        return None
    idx, usual, seconds = found
    step = view.step_at(idx)
    says = f"{num(seconds)} s in step {step}, {num(usual)} s is usual"
    return Finding(
        rule=RULE,
        title="steps of a trainer that takes its samples from a queue stall: it waits for a batch",
        area="async",
        confidence=0.7,
        step=step,
        evidence=(Evidence(metric="timing_s/step", step=step, before=usual, after=seconds, says=says),),
        cost_s=seconds - usual,
        action=f"{MISSING}; where all samples had come, dump the stacks of the trainer's ranks",
        next_check="log the seconds that the trainer waits for its batch apart from those it computes",
    )


def _deadlines(view: View) -> Finding | None:
    """Trajectories that used to end run into their deadline: counted, so that a slow host cannot look like it."""
    if failure_kinds_of(view).main != "timeout" or view.family("env/"):
        return None
    rise = view.rise("failures/frac", log=False)
    if rise is not None and rise.late >= max(0.04, 3 * rise.before) and rise.score >= 6:
        idx, evidence = rise.idx, of_break(rise, "failures are time-outs")
    elif (since := view.begins("failures/frac", 0.02)) is not None and view.level(
        "failures/frac", since
    ) >= 0.04:
        after, says = view.level("failures/frac", since), "failures are time-outs, and there were none before"
        idx = since
        evidence = Evidence(
            metric="failures/frac", step=view.step_at(since), before=0.0, after=after, says=says
        )
    else:
        return None
    before, after = view.level("timing_s/gen", max(0, idx - 40), idx), view.level("timing_s/gen", idx)
    return Finding(
        rule=RULE,
        title="trajectories hang until their deadline, and the trainer waits for them",
        area="async",
        confidence=0.88,
        step=view.step_at(idx),
        evidence=(
            evidence,
            Evidence(
                metric="timing_s/gen",
                step=view.step_at(idx),
                before=before,
                after=after,
                says=f"the trainer waits {num(after)} s a step, {num(before)} s before",
            ),
        ),
        cost_s=max(after - before, 0.0) * (view.n - idx) * view.stride
        if np.isfinite(after - before)
        else None,
        action="look at what hangs (failures name trajectory, turn and replica), leave its prompts out, and lower the "
        "deadline of a group so that a step does not wait for it",
        next_check="do the same prompts hang again? Then it is the prompt or its environment, else the replica",
    )


def _evicts_most(view: View) -> Finding | None:
    """More is evicted as too old than is trained, and the trainer waits for what is made instead. Whatever the lengths:
    what is thrown away is what is waited for."""
    rise = view.rise(EVICTED, log=False)
    batch = batch_of(view, EVICTED)
    if not is_asynchronous(view) or rise is None or rise.end_idx is not None or not rise.late >= 0.8 * batch:
        return None
    width = max(8, view.n // 10)
    before = view.level("timing_s/gen", max(0, rise.idx - 40), rise.idx)
    after = view.level("timing_s/gen", max(rise.idx, view.n - width))
    if not after >= 1.5 * before:
        return None
    evidence = [of_break(rise, f"evicted as too stale, for a batch of {num(batch)}")]
    says = f"the trainer waits {num(after)} s a step, {num(before)} s before"
    evidence.append(
        Evidence(metric="timing_s/gen", step=rise.step, before=before, after=after, says=says),
    )
    oldest = f"{STALENESS}/max"
    if view.has(oldest):
        bound = view.last(oldest)
        says = f"what is trained is at most {num(bound)} versions old: the bound"
        evidence.append(Evidence(metric=oldest, step=rise.step, after=bound, says=says))
    return Finding(
        rule=RULE,
        title="samples are evicted as fast as they finish: the bound of staleness is shorter than a trajectory",
        area="async",
        confidence=0.9,
        step=rise.step,
        evidence=tuple(evidence),
        cost_s=lost_seconds(view, "timing_s/gen", replace(rise, before=before)),
        action="raise the staleness bound above the versions that pass while the longest trajectory runs, admit less "
        "ahead, or continue unfinished trajectories across versions",
        next_check="versions that pass during one trajectory: its seconds over those of a step",
    )
