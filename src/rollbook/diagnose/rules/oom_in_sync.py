"""Out of memory while weights change hands: both copies and the buckets do not fit beside what was not given back.

Told by the error's own words, by the hand-over's peak and seconds rising to the brim, or by lives of the run that each
end in one leap there. Memory that grew, or leapt, with the responses is `late_oom_with_length`.
"""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.brim_in_sync import brim_in_sync
from rollbook.diagnose.signs import memory
from rollbook.diagnose.signs.seconds import lost_seconds
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, share

RULE = "oom_in_sync"


def judge(view: View) -> Finding | NotJudged | None:
    said = memory.said(view, in_sync=True)
    used, seconds = memory.allocated(view), view.first("timing_s/update_weights")
    brim = brim_in_sync(view)
    if used is None and not said and not brim:
        how = "log device memory at the hand-over, and keep the console log (the error is written there)"
        return memory.not_logged(view, RULE, (memory.ALLOCATED, "memory/switch/allocated_bytes"), how)
    evidence: list[Evidence] = []
    step = view.step_at(view.n - 1)
    if said:
        step = said[0].step if said[0].step is not None else step
        evidence.append(Evidence(metric="log", step=step, says=f"during the sync: {said[0].text}"))
    slower, fuller = view.rise(seconds), view.rise(used, log=False)
    capacity = memory.device_gib(view)
    is_full = capacity is not None and used is not None and memory.is_full(view, used, capacity)
    is_slow = slower is not None and slower.peak_ratio >= 1.4 and slower.score >= 5
    grew = fuller is not None and fuller.ratio >= 1.06 and fuller.score >= 4
    together = slower is not None and fuller is not None and view.near(slower.idx, fuller.idx, least=6)
    grows_with_length = fuller is not None and _is_by_length(view, fuller, "response_length/mean", 1.25)
    if slower is not None and is_slow:
        evidence.append(of_break(slower, "seconds of the hand-over"))
        step = min(step, slower.step) if not said else step
    if fuller is not None and grew and capacity is not None:
        evidence.append(of_break(fuller, f"GiB allocated on a device of {num(capacity)}"))
    if said:
        confidence = 0.97 if is_slow or is_full else 0.92
    elif brim:
        confidence, step = 0.85, brim[0].step
        evidence = list(brim)
    elif is_slow and grew and together and is_full and not grows_with_length:
        confidence = 0.85
    elif is_slow and is_full and view.run.seams:
        confidence = 0.7
    elif (lives := _lives_end_at_the_brim(view, used, capacity)) is not None:
        confidence = 0.75
        evidence.append(lives)
        step = lives.step
    elif fuller is not None and grew and not grows_with_length and _leaps(view, used, capacity, fuller):
        confidence, step = 0.6, fuller.step
    else:
        return None
    return Finding(
        rule=RULE,
        title="out of memory while weights change hands",
        area="implementation",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        cost_s=lost_seconds(view, seconds, slower) if seconds and slower is not None and is_slow else None,
        action="gather and send one bucket at a time (smaller bucket_bytes), drop the KV pool and "
        "offload the optimizer before "
        "the engine's weights come back, and set expandable segments",
        next_check="memory by owner at the three points of the hand-over: who had not given back what "
        "the plan expected?",
    )


def _is_by_length(view: View, fuller: Break, length: str, factor: float) -> bool:
    """Whether responses grew where memory did, and as it did: lengths that climb over many steps explain no leap."""
    if not view.moved(length, fuller.idx, 1, factor=factor):
        return False
    c = view.contrast(length, fuller.idx)
    return fuller.rise_steps > 2 or (c is not None and c.is_at_once)


LEAP = 1.15
"""Peak of the last step over that of the steps before from which on it came at once."""


def _lives_end_at_the_brim(view: View, used: str | None, capacity: float | None) -> Evidence | None:
    """The log ends in a step whose peak leaps to the size of the device, and so did the run before it was taken up
    again, at lengths that are no longer: what died so twice did not die of a batch."""
    if used is None or capacity is None:
        return None
    known = view.values[used][np.isfinite(view.values[used])]
    lives = [known] + [np.asarray(seam.replaced[used]) for seam in view.run.seams if used in seam.replaced]
    if len(lives) < 2 or any(len(peaks) < 4 for peaks in lives):
        return None
    for peaks in lives:
        before = float(np.median(peaks[-6:-2]))
        if peaks[-1] < max(0.95 * capacity, LEAP * before) or np.max(peaks[:-2]) >= 0.95 * capacity:
            return None
    for metric in ("response_length/max", "response_length/mean", "perf/total_num_tokens"):
        values = view.values.get(metric, np.full(view.n, np.nan))
        if np.nanmax(values[-2:], initial=0.0) > 1.1 * np.nanmax(values[:-2], initial=0.0) > 0.0:
            return None
    step, before, last = view.step_at(view.n - 1), float(np.median(known[-6:-2])), float(known[-1])
    says = f"{num(before)} GiB until the step before, then {num(last)} of {num(capacity)}, at the end of each of "
    says += f"{len(lives)} lives of the run; responses are no longer"
    return Evidence(metric=used, step=step, before=before, after=last, says=says)


def _leaps(view: View, used: str | None, capacity: float | None, fuller: Break) -> bool:
    """Whether memory came at once to the last twentieth of the device, where it is at the end of the log, and not with
    the longest responses."""
    is_brim = used is not None and capacity is not None and view.last(used, 3) >= 0.95 * capacity
    if not is_brim or fuller.ratio < 1.15 or fuller.rise_steps > 2:
        return False
    by_length = _is_by_length(view, fuller, "response_length/max", 1.3)
    return not by_length and not memory.leaps_with_the_longest(view, fuller.idx)
