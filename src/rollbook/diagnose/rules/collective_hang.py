"""One rank stopped, or is slow, and the others wait in a collective: a trainer stage stalls once and the log ends,
stalls again and again, or slows down for good by a failing link. The work is the same, and the time goes elsewhere. Or
the log ends in stacks of ranks that stand in a collective, and none stood so before.

Longer batches, memory at the brim, validations and checkpoints take minutes as well, and a rank that raised an error
lets the others wait: there the error is the cause.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rollbook.diagnose.cost import is_asynchronous, is_worth, run_seconds
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import Event, Series
from rollbook.diagnose.signs import memory
from rollbook.diagnose.signs.seconds import (
    TRAINER_STAGES,
    beside_the_schedule,
    is_of_the_schedule,
    lost_seconds,
    stalls_at_end,
    step_seconds,
    waiting_of,
)
from rollbook.diagnose.signs.standstill import standstill_of
from rollbook.diagnose.spells import Spells
from rollbook.diagnose.stops import stop
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, of_contrast, share

RULE = "collective_hang"


def judge(view: View) -> Finding | NotJudged | None:
    last = view.step_at(view.n - 1)
    said = view.events("collective_timeout")
    said += [e for e in view.events("collective_missed") if e.step is not None and e.step >= last]
    if (ended := stop(view)) is not None and ended.is_of_its_own:
        said = []  # the others wait for the rank that raised it
    stages = [f"timing_s/{s}" for s in TRAINER_STAGES if view.has(f"timing_s/{s}")]
    if not is_asynchronous(view):
        stages.append("timing_s/gen")  # in an asynchronous run that one is a wait for samples
        if waiting_of(view) == "timing_s/step":
            stages = ["timing_s/step"]  # no stage is timed: at equal lengths the whole step tells
    slow = _stalls_again(view, _COLLECTIVE) or _slow_link(view)
    if slow is None and not view.has("timing_s/gen"):
        slow = _stalls_again(view, ("step",))  # what waits for responses is in the whole step alone
    if slow is not None and not said:
        return slow
    signs = [*_words(view, said), *_open_spans(view), *_last_stalls(view, stages, surely=bool(said))]
    if signs:
        return _hangs(view, signs)
    if stages:
        return None
    return NotJudged(
        rule=RULE,
        missing=("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/update_weights"),
        lacks="seconds of stages",
        collect="log the seconds of each trainer stage, and keep the console log (the watchdog writes there)",
    )


Sign = tuple[Evidence, float]
"""Evidence of a hang, and how sure it makes of it."""


def _words(view: View, said: list[Event]) -> Iterator[Sign]:
    """A watchdog's words, and a last line on other ranks that is said again and again."""
    for event in said[:1]:
        step = event.step if event.step is not None else view.step_at(view.n - 1)
        yield (
            Evidence(metric="log", step=step, says=event.text),
            0.75 if event.kind == "collective_missed" else 0.9,
        )
    standing = standstill_of(view)
    if standing is not None and standing.told_by == RULE:
        yield standing.evidence, 0.92
    last = view.step_at(view.n - 1)
    every = view.events("stack_in_collective")
    stacks = [e for e in every if e.step is None or e.step >= last]
    if len(stacks) >= 2 and stop(view) is not None:  # of a run that goes on, a stack may be anywhere
        yield Evidence(metric="log", step=last, says=f"then it was stopped: {stacks[0].text}"), 0.92
    elif stacks and len(stacks) == len(every) and stop(view) is None:
        yield (
            Evidence(metric="log", step=last, says=f"somebody looked, and no step follows: {stacks[0].text}"),
            0.8,
        )


def _open_spans(view: View) -> Iterator[Sign]:
    """Stages of a run of ours that goes on which have been open for many times what they take."""
    for event in view.events("open_span"):
        metric = f"timing_s/{event.text}"
        usual = view.level(f"timing_s/{event.fields.get('metric', event.text)}")
        open_s = float(event.fields.get("open_s", 0.0))
        is_long = open_s >= max(60.0, 10 * usual if np.isfinite(usual) else 600.0)
        if is_long and event.text not in ("step", "rollout"):
            says = f"stage {event.text} is open for {num(open_s)} s, {num(usual)} s is usual"
            yield Evidence(metric=metric, step=event.step or view.step_at(view.n - 1), says=says), 0.85


def _last_stalls(view: View, stages: list[str], *, surely: bool) -> Iterator[Sign]:
    """Stages that take many times their usual time in the last steps, with nothing that explains it."""
    for stage in stages:
        found = stalls_at_end(view, stage) if view.has(stage) else None
        if found is None or (not surely and _has_a_reason(view, stage, found[0])):
            continue
        idx, usual, seconds = found
        step = view.step_at(idx)
        says = f"{num(seconds)} s in step {step}, {num(usual)} s is usual"
        evidence = Evidence(metric=stage, step=step, before=usual, after=seconds, says=says)
        yield evidence, 0.97 if surely else 0.8


def _hangs(view: View, signs: list[Sign]) -> Finding:
    evidence = [item for item, _ in signs]
    stalled = [e.after - e.before for e in evidence if e.after is not None and e.before is not None]
    step = min(item.step for item in evidence)
    imbalance = view.contrast("global_seqlen/minmax_diff", view.idx_of(step))
    if imbalance is not None and imbalance.ratio >= 3:
        says = "tokens of the ranks differ more than before"
        before, after = imbalance.before, imbalance.after
        evidence.append(Evidence(metric=imbalance.metric, step=step, before=before, after=after, says=says))
    return Finding(
        rule=RULE,
        title="a collective hangs: one rank does not take part",
        area="implementation",
        confidence=share(max(confidence for _, confidence in signs)),
        step=step,
        evidence=tuple(evidence),
        cost_s=float(sum(stalled)) if stalled else None,
        action="dump the stacks of all ranks (py-spy, or TORCH_NCCL_TRACE_BUFFER_SIZE) before killing "
        "the job; the rank that is elsewhere is the cause: fewer micro batches, an exception, a dead host",
        next_check="number of micro batches per rank in that step, and the kernel log of each host",
    )


def _has_a_reason(view: View, stage: str, idx: int) -> bool:
    """Whether the step of a stall is one of the schedule's, or waits for the longest response of all."""
    spells = view.spells(stage, least=np.log(1.5))
    if spells is not None and spells.hit[idx] and is_of_the_schedule(view, spells):
        return True
    return stage in ("timing_s/gen", "timing_s/step") and memory.leaps_with_the_longest(view, idx)


_COLLECTIVE = ("update_actor", "update_weights", "old_log_prob", "ref", "values", "update_critic")
"""Stages in which ranks wait for each other."""
STALL_S = 45.0
"""Seconds over the usual from which a step of such a stage stalls: at equal tokens no work differs by so much."""
LEAST_STALLS = 5
"""Steps that stall before it is a habit: a busy cluster stands still for a moment, too."""
LONG_STALL, LONG_STALL_S = 2.0, 120.0
"""Times the quiet seconds, and seconds, over them, from which on a stall is long: no moment lasts minutes."""
LEAST_LONG, BY_CHANCE = 3, 0.1
"""Long stalls that are enough, however rare, and the odds up to which a host would stand still in that stage only."""
GRAVE_FRAC = 0.2
"""Share of the run's seconds that is lost from which on fewer stalls are no moment."""
RARE = 0.02
"""Share of the steps since the first stall below which stalls are hiccups."""
ONE_LENGTH = 0.05
"""Spread of the seconds of stalls, over their median, below which they are one time-out: hiccups vary."""
STEP_TIMES = 2.0
"""Times their usual seconds that whole steps take, where they alone are timed, before they stall: much takes less."""
LINK = 2.5
"""Times as long at the same tokens from which on computing cannot be it."""


def _stalls_again(view: View, timed: tuple[str, ...]) -> Finding | None:
    """Steps in which one stage takes minutes longer than in those beside them, for the same work."""
    evidence: list[Evidence] = []
    idx, cost = view.n, 0.0
    for stage in timed:
        metric = f"timing_s/{stage}"
        spells = view.spells(metric, least=np.log(1.5))
        spells = beside_the_schedule(view, metric, spells) if spells is not None else None
        if spells is None or not _are_no_hiccups(view, metric, spells) or _works_more(view, metric, spells):
            continue
        first = int(np.flatnonzero(_over_quiet(view, metric, spells) >= STALL_S)[0])
        longest, usual = float(np.nanmax(view.values[metric][spells.hit])), spells.before
        says = f"{num(usual)} s is usual, up to {num(longest)} s in {spells.num_hits} steps in between"
        evidence.append(
            Evidence(metric=metric, step=view.step_at(first), before=usual, after=longest, says=says)
        )
        idx = min(idx, first)
        cost += spells.over_quiet(view.values[metric]) * view.stride
    if not evidence or not is_worth(view, cost):
        return None
    confidence = 0.8 + 0.05 * len(evidence)
    if timed == _COLLECTIVE:
        title = "a collective stalls again and again: one rank comes late"
        return _finding(view, idx, title, evidence, confidence, cost)
    title = "steps stall again and again at the same work: a rank, a service or the host comes late"
    found = _finding(view, idx, title, evidence, confidence, cost)
    return replace(
        found,
        action="look in the job's log what those steps waited for: a rank, a service for sampling or scoring that did "
        "not answer, a host that was busy or asleep; put a deadline on every call that leaves the process",
        next_check=f"log the seconds of each stage: which of them has the {num(cost)} s?",
    )


def _are_no_hiccups(view: View, metric: str, spells: Spells) -> bool:
    """Whether spells of a stage are stalls, and not the moments for which a busy cluster stands still."""
    if spells.inside - spells.before < STALL_S:
        return False
    if metric == "timing_s/step" and spells.inside < STEP_TIMES * spells.before:
        return False
    if _keep_to_a_stage(view, metric, spells):
        return True
    lost = spells.over_quiet(view.values[metric]) * view.stride
    if spells.num_hits < LEAST_STALLS and not lost >= GRAVE_FRAC * run_seconds(view):
        return False
    is_rare = spells.num_hits < RARE * (view.n - spells.first)
    return not is_rare or _are_of_one_length(view, metric, spells)


def _keep_to_a_stage(view: View, metric: str, spells: Spells) -> bool:
    """Whether minutes are lost in one stage each time: a host that stands still does so in whatever stage it is."""
    over = _over_quiet(view, metric, spells)
    num_long = int(np.sum((over >= LONG_STALL_S) & (over >= LONG_STALL * spells.quiet)))
    share_of_step = spells.before / max(spells.before, step_seconds(view))
    return num_long >= LEAST_LONG and share_of_step ** (num_long - 1) <= BY_CHANCE


def _over_quiet(view: View, metric: str, spells: Spells) -> Series:
    """[n] seconds over the quiet level in the steps of spells, 0 in the others."""
    return np.where(spells.hit, view.values[metric] - spells.quiet, 0.0)


def _are_of_one_length(view: View, metric: str, spells: Spells) -> bool:
    """Whether all stalls last as long as each other: what they wait for is a time-out, however rarely."""
    stalls = (view.values[metric] - spells.quiet)[spells.hit]
    low, high = np.quantile(stalls, (0.1, 0.9))
    return bool(high - low <= ONE_LENGTH * np.median(stalls))


def _works_more(view: View, metric: str, spells: Spells) -> bool:
    """Whether the steps of spells have more to do, are slow in all they do, or lack memory."""
    explains: tuple[tuple[str | None, float], ...] = (
        ("perf/total_num_tokens", 1.2),
        ("response_length/mean", 1.2),
        ("response_length/max", 1.5),
        ("global_seqlen/max", 1.3),
        (None if _is_timed_within(view, metric, "timing_s/gen", spells) else "timing_s/gen", 1.4),
        ("timing_s/adv", 2.0),
        ("perf/cpu_memory_used_gb", 1.05),
        *(
            (held, 1.03)
            for held in (memory.allocated(view), memory.reserved(view))
            if _is_near_full(view, held)
        ),
    )
    return view.rises_beside(explains, spells, score=3)


WITHIN = 0.1
"""Share by which the same seconds may differ in two stages."""


def _is_timed_within(view: View, metric: str, outer: str, spells: Spells) -> bool:
    """Whether another stage is longer by the very seconds of a spell: it has this one inside it, as generation has the
    hand-over in verl's `timing_s/reshard`."""
    own, other = view.beside(metric, spells), view.beside(outer, spells)
    return own is not None and other is not None and abs(other.diff - own.diff) <= WITHIN * own.diff


NEAR_FULL = 0.9
"""Share of the device from which on a step may wait for memory."""


def _is_near_full(view: View, held: str | None) -> bool:
    capacity = memory.device_gib(view)
    return (
        held is not None
        and capacity is not None
        and float(np.nanmax(view.values[held])) >= NEAR_FULL * capacity
    )


def _slow_link(view: View) -> Finding | None:
    """Training and another stage of collectives became many times slower at the same tokens; generation did not."""
    found = view.rise("timing_s/update_actor")
    if found is None or found.peak_ratio < LINK or found.score < 6 or found.end_idx is not None:
        return None
    width = max(8, view.n // 12)
    others = []
    for stage in _COLLECTIVE[1:]:
        slower = view.rise(f"timing_s/{stage}")
        is_slower = slower is not None and slower.peak_ratio >= 1.5 and slower.score >= 5
        if slower is not None and is_slower and view.near(slower.idx, found.idx, share=0.1, least=8):
            others.append(slower)
    usual = slice(max(0, found.idx - 40), found.idx)
    late = slice(max(found.idx, view.n - width), view.n)
    for metric, most in (
        ("perf/total_num_tokens", 1.4),
        ("response_length/mean", 1.4),
        ("timing_s/gen", 1.5),
        ("rollout/decode_step_s", 1.5),  # in an asynchronous run generation is a wait, and this is it
        ("timing_s/adv", 2.0),
        ("timing_s/reward", 2.0),
    ):
        before, after = (view.level(metric, piece.start, piece.stop) for piece in (usual, late))
        if after > before and after >= most * before:
            return None
    if not others:
        return None
    if any(view.moved(m, found.idx, 1, factor=1.1) for m in (memory.reserved(view), memory.allocated(view))):
        return None
    evidence = [of_break(found, "at the same tokens"), *(of_break(b) for b in others)]
    mfu = view.contrast("perf/mfu/actor", found.idx, width=20)
    if mfu is not None and mfu.ratio <= 0.7:
        evidence.append(of_contrast(view, mfu, found.idx, "the time is not spent computing"))
    cost = lost_seconds(view, "timing_s/update_actor", found)
    title = "collectives became slow: a link or a rank fails"
    return _finding(view, found.idx, title, evidence, 0.82 + 0.03 * len(others), cost)


def _finding(
    view: View, idx: int, title: str, evidence: list[Evidence], confidence: float, cost: float
) -> Finding:
    return Finding(
        rule=RULE,
        title=title,
        area="implementation",
        confidence=share(confidence),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=cost,
        action="find the rank that comes late before it takes the job with it: seconds of each rank before its "
        "collectives (NCCL_DEBUG=INFO, flight recorder), link errors and clocks of its host; take that host out",
        next_check="all_reduce bandwidth between pairs of hosts, and `ibstat`/`nvidia-smi nvlink -e` of the slow one",
    )
