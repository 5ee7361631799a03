"""Memory grows with the responses until a long batch no longer fits, hours into the run.

It follows the lengths and ends at the brim, or the log says that it ran out outside a hand-over. A peak that leaps at
equal lengths is the hand-over's (`oom_in_sync`); memory that has stood at the brim for long has shown that it fits.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rollbook.diagnose.changes import foot_of_climb, spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs import memory
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "late_oom_with_length"


def judge(view: View) -> Finding | NotJudged | None:
    said = memory.said(view, in_sync=False)
    used = memory.allocated(view) or memory.reserved(view)
    if used is None and not said:
        how = "log peak device memory a step, and keep the console log (the error is written there)"
        return memory.not_logged(view, RULE, (memory.ALLOCATED,), how)
    grown = _memory_grows(view, used)
    if said:
        end = said[0].step if said[0].step is not None else view.step_at(view.n - 1)
        told = next((e for e in said if e.step == said[0].step and "Tried to allocate" in e.text), said[0])
        words = Evidence(metric="log", step=end, says=told.text[:300])
        lengths = grown or _lengths_grow(view, end)
        found = _finding(view, 0.97 if grown else 0.8 if lengths else 0.7, end, (words, *lengths))
        return _of_the_engine(found) if told.fields.get("stage") == "rollout" and not grown else found
    end = view.step_at(view.n - 1)
    capacity = memory.device_gib(view)
    if used is None or capacity is None:
        return None
    is_known = memory.is_size_known(view, used, capacity)
    may_end = is_known and not _lives_with_it(view, used, capacity)
    if may_end and grown and memory.is_full(view, used, capacity):
        return _finding(view, 0.85, end, grown)
    if may_end and (brim := _ends_at_the_brim(view, used, capacity)):
        return _finding(view, 0.78, end, (*grown, *brim))
    if is_known and grown and view.last(used, 3) >= NOTHING_LEFT * capacity:
        return _finding(view, 0.55, end, grown)
    restarts = any(seam.num_replaced for seam in view.run.seams)
    if grown and restarts and view.trend(used)[0] >= 1.3:
        return _finding(view, 0.6, end, grown)
    return None


NOTHING_LEFT = 0.985
"""Share of the device that is allocated, however long already, from which on no longer batch fits: whether one ended
the log, it does not say."""


def _finding(view: View, confidence: float, end: int, evidence: tuple[Evidence, ...]) -> Finding:
    """The finding, dated by where the lengths began to climb; by its end where they did not."""
    measures = ["response_length/mean", *(item.metric for item in evidence)]
    climbing = next((m for m in measures if m in _LENGTHS and view.trend(m)[0] >= GROWN), None)
    foot = (
        end
        if climbing is None
        else view.step_at(foot_of_climb(np.log(np.maximum(view.values[climbing], 1.0))))
    )
    is_of_memory = any(item.metric not in ("log", *_LENGTHS) for item in evidence)
    return Finding(
        rule=RULE,
        title="memory grows with the responses until a long batch does not fit"
        if is_of_memory
        else f"device memory ran out: a batch did not fit{', as the responses grew' * (len(evidence) > 1)}",
        area="implementation",
        confidence=share(confidence),
        step=min(foot, end),
        evidence=evidence,
        action="pack micro batches by a token budget, split long sequences over ranks (context "
        "parallelism), or cap the response length; plan for the longest batch, not the mean",
        next_check="peak memory against the tokens of the largest micro batch, step by step"
        + ("" if is_of_memory else ": whether it grew with the responses, the log does not say"),
    )


def _of_the_engine(found: Finding) -> Finding:
    """The same while the engine generates, where no micro batch is at fault."""
    return replace(
        found,
        title="device memory ran out while the engine generated",
        action="give the engine less of the device (gpu_memory_utilization, mem_fraction_static), fewer sequences at "
        "a time or shorter ones, and free what the trainer holds meanwhile (optimizer and gradients offloaded, cache "
        "emptied)",
        next_check="memory by owner while it generates: what beside weights and KV pool is on that device?",
    )


_LENGTHS = ("response_length/mean", "perf/total_num_tokens", "global_seqlen/max", "response_length/max")
GROWN = 1.3
"""Late length over the early one from which on the responses grew."""


def _memory_grows(view: View, used: str | None) -> tuple[Evidence, ...]:
    """Memory that grows with the lengths, and both of them; nothing where it does not."""
    length = _grown_with(view, used)
    fuller, steadiness = view.trend(used)
    if used is None or length is None or view.trend(length)[0] < GROWN:
        return ()
    if fuller < MEMORY_GREW or steadiness < 0.7 or _at_once(view, used):
        return ()
    capacity = memory.device_gib(view)
    of = f" of {num(capacity)}" if capacity else ""
    return (_ends(view, used, f"{of} GiB"), _ends(view, length, ": memory follows it"))


def _lengths_grow(view: View, end: int) -> tuple[Evidence, ...]:
    """Responses that had grown when memory ran out, where memory itself was not logged, or does not show it."""
    length = "response_length/mean"
    grown, steadiness = view.trend(length)
    had_grown = grown >= GROWN and steadiness >= 0.5 and end >= view.step_at(view.n - 1)
    return (_ends(view, length, " when it ran out"),) if had_grown else ()


def _ends(view: View, metric: str, says: str) -> Evidence:
    """What a series was at first and at last."""
    first, last = view.level(metric, 0, max(3, view.n // 10)), view.last(metric, 3)
    step = view.step_at(view.n - 1)
    return Evidence(
        metric=metric, step=step, before=first, after=last, says=f"{num(first)} to {num(last)}{says}"
    )


def _goes_with(peaks: Series, longest: Series) -> bool:
    """Whether memory goes with the longest responses so far: step by step, or where both stand until both rise."""
    both = np.isfinite(peaks) & np.isfinite(longest)
    if spearman(peaks, longest) >= 0.7:
        return True
    moves = both.sum() >= 8 and all(np.ptp(x[both]) > 0 for x in (peaks, longest))
    return bool(moves and np.corrcoef(peaks[both], longest[both])[0, 1] >= 0.9)


LIVED_FRAC = 1 / 4
"""Share of the steps that memory must have been full for, up to the end, to show that the longest batches fit."""
LIVED_STEPS = 12
"""And how many they must be."""
STILL_GROWS = 0.02
"""Share of the device by which it must have grown over those steps to be on its way out all the same."""


def _lives_with_it(view: View, used: str, capacity: float) -> bool:
    """Whether memory came near the brim long ago and hardly moved since, or stands below it while the longest responses
    are at their limit in step after step: what has fitted for so long, or at its longest, will fit."""
    values = view.values[used]
    most = np.maximum.accumulate(finite(values))
    if not len(most) or most[-1] <= 0.0:
        return False
    since = int(np.flatnonzero(most >= most[-1] - STILL_GROWS * capacity)[0])
    longest = view.values.get("response_length/max", np.zeros(0))
    stands = np.flatnonzero(np.nan_to_num(values) >= AT_LIMIT * most[-1])[0]
    num_at_limit = int((longest[stands:] >= AT_LIMIT * np.nanmax(longest, initial=1.0)).sum())
    if num_at_limit >= LIMIT_STEPS and most[-1] < BRIM * capacity and not _grew_at_the_limit(values, longest):
        return True
    return len(most) - since >= max(LIVED_FRAC * len(most), LIVED_STEPS)


def _grew_at_the_limit(values: Series, longest: Series) -> bool:
    """Whether memory grew while the longest responses were at their limit all along: then it goes with how many are
    long, and the longest of them says nothing of what will fit."""
    if len(longest) != len(values):
        return False
    at_limit = np.isfinite(values) & (longest >= AT_LIMIT * np.nanmax(longest, initial=1.0))
    peaks = values[at_limit]
    part = len(peaks) // 4
    return part >= LIMIT_STEPS and float(np.median(peaks[-part:])) >= MEMORY_GREW * float(
        np.median(peaks[:part])
    )


MEMORY_GREW = 1.12
"""Late peak over the early one from which on memory grew."""
AT_LIMIT = 0.999
"""Share of the longest response of all from which on one has the same length: the limit's."""
LIMIT_STEPS = 8
"""Steps with a response at the limit, and memory where it stands, from which on the longest batch has fitted."""


BRIM = 0.93
"""Share of the device that the peak of the last steps must reach, as the highest of the run."""


FITTED = 0.85
"""Peak of earlier steps with as long a response, over that at the end, below which it is not the length's."""


def _ends_at_the_brim(view: View, used: str, capacity: float) -> tuple[Evidence, ...]:
    """The log ends with the highest peak of memory, at the size of the device, in the step of the longest responses:
    the next batch as long did not fit. Whether lengths grew steadily or came in spells does not matter."""
    length = view.first("response_length/max", "response_length/mean")
    if length is None or view.count(used) < 20:
        return ()
    peaks, lengths = view.values[used], view.values[length]
    both = np.isfinite(peaks) & np.isfinite(lengths)
    if both.sum() < 20:
        return ()
    peaks, lengths = peaks[both], lengths[both]
    last, longest = float(peaks[-2:].max()), float(lengths[-2:].max())
    coupled = max(spearman(peaks, lengths), spearman(peaks, np.maximum.accumulate(lengths)))
    usual = float(np.median(lengths[: len(lengths) // 2]))
    if last < max(BRIM * capacity, float(peaks.max())) or longest < 0.97 * float(lengths.max()):
        return ()
    as_long = peaks[:-2][lengths[:-2] >= 0.97 * longest]
    if coupled < 0.6 or longest < 1.4 * usual or (len(as_long) >= 3 and np.median(as_long) < FITTED * last):
        return ()
    step = view.step_at(view.n - 1)
    says = f"the log ends at the highest peak of all, {num(last)} of {num(capacity)} GiB"
    with_length = (
        f"{num(longest)} in the same steps, {num(usual)} at first: memory follows it (rank correlation "
    )
    with_length += f"{num(coupled)})"
    before = float(np.median(peaks[: len(peaks) // 2]))
    return (
        Evidence(metric=used, step=step, before=before, after=last, says=says),
        Evidence(metric=length, step=step, before=usual, after=longest, says=with_length),
    )


def _grown_with(view: View, used: str | None) -> str | None:
    """The measure of length that grew most, of those that memory goes with."""
    together = (
        m
        for m in _LENGTHS
        if used is not None
        and view.has(m)
        and _goes_with(view.values[used], np.fmax.accumulate(view.values[m]))
    )
    return max(together, key=lambda m: view.trend(m)[0], default=None)


def _at_once(view: View, used: str) -> bool:
    """Whether most of the growth of memory came within three steps: that is a hand-over's, not the lengths'."""
    values = view.values[used]
    known = np.flatnonzero(np.isfinite(values))
    values = values[known]
    grown = float(np.median(values[-3:]) - np.median(values[: max(3, len(values) // 10)]))
    if len(values) <= 8 or float(np.max(values[3:] - values[:-3])) < 0.6 * grown:
        return False
    leap = int(known[int(np.argmax(np.diff(values))) + 1])
    return not memory.leaps_with_the_longest(view, leap)
