"""Memory grows with the responses until a long batch no longer fits, hours into the run."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.changes import spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules import memory
from rollbook.diagnose.rules.wording import num, share
from rollbook.diagnose.series import Series
from rollbook.diagnose.view import View

RULE = "late_oom_with_length"


def judge(view: View) -> Finding | NotJudged | None:
    said = [e for e in view.events("out_of_memory") if e.fields.get("stage") != "sync"]
    used = memory.allocated(view)
    length = _grown_with(view, used)
    if used is None and not said:
        return NotJudged(
            rule=RULE,
            missing=(memory.ALLOCATED,),
            lacks="device memory",
            collect="log peak device memory a step, and keep the console log (the error is written there)",
        )
    evidence: list[Evidence] = []
    step = view.step_at(view.n - 1)
    if said:
        step = said[0].step if said[0].step is not None else step
        told = next((e for e in said if e.step == said[0].step and "Tried to allocate" in e.text), said[0])
        evidence.append(Evidence(metric="log", step=step, says=told.text[:300]))
    grown, _ = view.trend(length)
    fuller, steadiness = view.trend(used)
    capacity = memory.device_gib(view)
    is_full = capacity is not None and used is not None and memory.is_full(view, used, capacity)
    grows = grown >= 1.3 and fuller >= 1.12 and steadiness >= 0.7 and not _at_once(view, used)
    if used is not None and grows and length is not None:
        first, last = view.level(used, 0, max(3, view.n // 10)), view.last(used, 3)
        short, long = view.level(length, 0, max(3, view.n // 10)), view.last(length, 3)
        of = f" of {num(capacity)}" if capacity else ""
        evidence.append(
            Evidence(
                metric=used, step=step, before=first, after=last, says=f"{num(first)} to {num(last)}{of} GiB"
            )
        )
        says = f"{num(short)} to {num(long)}: memory follows it"
        evidence.append(Evidence(metric=length, step=step, before=short, after=long, says=says))
    if said and grows:
        confidence = 0.97
    elif said:
        confidence = 0.7
    elif grows and is_full and not _lives_with_it(view, used, capacity):
        confidence = 0.85
    elif (
        not _lives_with_it(view, used, capacity)
        and (brim := _ends_at_the_brim(view, used, capacity)) is not None
    ):
        confidence = 0.78
        evidence += brim
    elif grows and view.run.seams and any(seam.num_replaced for seam in view.run.seams) and fuller >= 1.3:
        confidence = 0.6
    else:
        return None
    has_grown = len(evidence) > bool(said)
    return Finding(
        rule=RULE,
        title="memory grows with the responses until a long batch does not fit"
        if has_grown
        else "device memory ran out: a batch did not fit",
        area="implementation",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        action="pack micro batches by a token budget, split long sequences over ranks (context "
        "parallelism), or cap the "
        "response length; plan for the longest batch, not the mean",
        next_check="peak memory against the tokens of the largest micro batch, step by step"
        + ("" if has_grown else ": whether it grew with the responses, the log does not say"),
    )


def _goes_with(peaks: Series, longest: Series) -> bool:
    """Whether memory goes with the longest responses so far: step by step, or where both stand until both rise."""
    both = np.isfinite(peaks) & np.isfinite(longest)
    if spearman(peaks, longest) >= 0.7:
        return True
    moves = both.sum() >= 8 and all(np.ptp(x[both]) > 0 for x in (peaks, longest))
    return bool(moves and np.corrcoef(peaks[both], longest[both])[0, 1] >= 0.9)


LIVED_FRAC = 1 / 3
"""Share of the steps that memory must have been full for, up to the end, to show that the longest batches fit."""
STILL_GROWS = 0.02
"""Share of the device by which it must have grown over those steps to be on its way out all the same."""


def _lives_with_it(view: View, used: str | None, capacity: float | None) -> bool:
    """Whether memory came near the brim long ago and hardly moved since: what has fitted for so long will fit."""
    if used is None or capacity is None:
        return False
    values = view.values[used]
    known = values[np.isfinite(values)]
    below = np.flatnonzero(known < known[-1] - STILL_GROWS * capacity)
    return len(known) - (int(below[-1]) + 1 if len(below) else 0) >= LIVED_FRAC * len(known)


BRIM = 0.93
"""Share of the device that the peak of the last steps must reach, as the highest of the run."""


def _ends_at_the_brim(view: View, used: str | None, capacity: float | None) -> list[Evidence] | None:
    """The log ends with the highest peak of memory, at the size of the device, in the step of the longest responses:
    the next batch as long did not fit. Whether lengths grew steadily or came in spells does not matter."""
    length = view.first("response_length/max", "response_length/mean")
    if used is None or capacity is None or length is None or view.count(used) < 20:
        return None
    peaks, lengths = view.values[used], view.values[length]
    both = np.isfinite(peaks) & np.isfinite(lengths)
    if both.sum() < 20:
        return None
    peaks, lengths = peaks[both], lengths[both]
    last, longest = float(peaks[-2:].max()), float(lengths[-2:].max())
    coupled = max(spearman(peaks, lengths), spearman(peaks, np.maximum.accumulate(lengths)))
    usual = float(np.median(lengths[: len(lengths) // 2]))
    if last < max(BRIM * capacity, float(peaks.max())) or longest < 0.97 * float(lengths.max()):
        return None
    if coupled < 0.6 or longest < 1.4 * usual:
        return None
    step = view.step_at(view.n - 1)
    says = f"the log ends at the highest peak of all, {num(last)} of {num(capacity)} GiB"
    with_length = (
        f"{num(longest)} in the same steps, {num(usual)} at first: memory follows it (rank correlation "
    )
    with_length += f"{num(coupled)})"
    before = float(np.median(peaks[: len(peaks) // 2]))
    return [
        Evidence(metric=used, step=step, before=before, after=last, says=says),
        Evidence(metric=length, step=step, before=usual, after=longest, says=with_length),
    ]


def _grown_with(view: View, used: str | None) -> str | None:
    """The measure of length that grew most, of those that memory goes with."""
    lengths = ("response_length/mean", "perf/total_num_tokens", "global_seqlen/max", "response_length/max")
    together = (
        m
        for m in lengths
        if used is not None
        and view.has(m)
        and _goes_with(view.values[used], np.fmax.accumulate(view.values[m]))
    )
    return max(together, key=lambda m: view.trend(m)[0], default=None)


def _at_once(view: View, used: str | None) -> bool:
    """Whether most of the growth of memory came within three steps: that is a hand-over's, not the lengths'."""
    if used is None:
        return False
    values = view.values[used]
    known = np.flatnonzero(np.isfinite(values))
    values = values[known]
    grown = float(np.median(values[-3:]) - np.median(values[: max(3, len(values) // 10)]))
    if len(values) <= 8 or float(np.max(values[3:] - values[:-3])) < 0.6 * grown:
        return False
    leap = int(known[int(np.argmax(np.diff(values))) + 1])
    return not memory.leaps_with_the_longest(view, leap)
