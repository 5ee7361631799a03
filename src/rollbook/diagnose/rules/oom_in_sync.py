"""Out of memory while weights change hands: both copies and the buckets do not fit beside what was not given back.

Told by the error's own words, by the hand-over's peak and seconds rising to the brim, or by a life of the run, or
several, that end in one leap there. Memory that grew, or leapt, with the responses is `late_oom_with_length`.
"""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.brim_in_sync import brim_in_sync
from rollbook.diagnose.signs import memory
from rollbook.diagnose.signs.seconds import lost_seconds
from rollbook.diagnose.stops import stop
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
        confidence = 0.75 if len(view.run.seams) else 0.6
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


LEAP, ONE_LEAP = 1.15, 1.25
"""Peak of the last step over that of the steps before from which on it came at once: of several lives, and of one."""
FAR = 1.5
"""The same where the device's size is only that of the next larger one there is."""
LEAST_PEAKS = 12
"""Values that the only life must have."""


def _lives_end_at_the_brim(view: View, used: str | None, capacity: float | None) -> Evidence | None:
    """The log ends in a step or two whose peak leaps to the size of the device, and so did the run before each time it
    was taken up again, at lengths that are no longer: no batch was so large."""
    if used is None or capacity is None:
        return None
    known = view.values[used][np.isfinite(view.values[used])]
    lives = [known] + [np.asarray(seam.replaced[used]) for seam in view.run.seams if used in seam.replaced]
    is_only_one = len(lives) < 2
    if is_only_one and (_ends_otherwise(view) or len(known) < LEAST_PEAKS):
        return None
    leap = (ONE_LEAP if memory.is_size_known(view, used, capacity) else FAR) if is_only_one else LEAP
    if any(len(peaks) < 4 for peaks in lives):
        return None
    for peaks in lives:
        before = float(np.median(peaks[-6:-2]))
        if peaks[-1] < max(0.95 * capacity, leap * before) or np.max(peaks[:-2]) >= 0.95 * capacity:
            return None
    for metric in ("response_length/max", "response_length/mean", "perf/total_num_tokens"):
        values = view.values.get(metric, np.full(view.n, np.nan))
        if np.nanmax(values[-2:], initial=0.0) > 1.1 * np.nanmax(values[:-2], initial=0.0) > 0.0:
            return None
    before, last = float(np.median(known[-6:-2])), float(known[-1])
    step = view.step_at(view.n - 1)
    says = f"{num(before)} GiB until shortly before the end, then {num(last)} of {num(capacity)}, "
    says += "and the log ends" if is_only_one else f"at the end of each of {len(lives)} lives of the run"
    return Evidence(
        metric=used, step=step, before=before, after=last, says=f"{says}; responses are no longer"
    )


_ONLY_AT_LAST = ("timing_s/save_checkpoint", "timing_s/testing")


def _ends_otherwise(view: View) -> bool:
    """Whether an error that is not of memory ended the run, or its last step did what none before it had: a run that
    saves or validates when it is done may take the memory for that."""
    if stop(view) is not None:
        return True
    for metric in (*_ONLY_AT_LAST, *view.run.matching("val-core/", "")[:1]):
        known = np.flatnonzero(np.isfinite(view.values.get(metric, np.full(view.n, np.nan))))
        if len(known) and known[0] >= view.n - 2:
            return True
    return False


def _leaps(view: View, used: str | None, capacity: float | None, fuller: Break) -> bool:
    """Whether memory came at once to the last twentieth of the device, where it is at the end of the log, and not with
    the longest responses."""
    is_brim = used is not None and capacity is not None and view.last(used, 3) >= 0.95 * capacity
    if not is_brim or fuller.ratio < 1.15 or fuller.rise_steps > 2:
        return False
    by_length = _is_by_length(view, fuller, "response_length/max", 1.3)
    return not by_length and not memory.leaps_with_the_longest(view, fuller.idx)
