"""The allocator holds ever more memory that nobody uses: reserved grows, allocated does not.

For good, in teeth that are given back at a hand-over, or up to the brim, where the update waits for the allocator; or
the error itself says how much was held and not used. Where allocated grows as well it is `late_oom_with_length`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np

from rollbook.diagnose.changes import foot_of_climb
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs import memory
from rollbook.diagnose.signs.seconds import lost_seconds
from rollbook.diagnose.spells import climbs
from rollbook.diagnose.units import BYTES, GIB
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast, share

RULE = "fragmentation"
ACTION = (
    "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (with an engine in the same process: separate memory pools), "
    "and empty the cache at the hand-over"
)
CHECK = "a memory snapshot after the hand-over: which shapes leave the holes?"
finding = partial(Finding, rule=RULE, area="implementation", action=ACTION, next_check=CHECK)
HELD = "reserved - allocated GiB"


def judge(view: View) -> Finding | NotJudged | None:
    used, kept = memory.allocated(view), memory.reserved(view)
    said = _said(view)
    if used is None or kept is None:
        how = "log allocated and reserved device memory each step"
        return said or memory.not_logged(view, RULE, (memory.ALLOCATED, memory.RESERVED), how)
    view.derive(HELD, view.values[kept] - view.values[used])
    seen = _in_teeth(view, used, kept) or _grows(view, used, kept) or _retries_at_the_brim(view, used, kept)
    if said is None or seen is None:
        return said or seen
    confidence = max(said.confidence, seen.confidence)  # it ended in what was seen to come
    return replace(seen, confidence=confidence, evidence=(*seen.evidence, *said.evidence))


def _grows(view: View, used: str, kept: str) -> Finding | None:
    """What is held and not used grows over the whole run."""
    part = max(4, view.n // 6)
    # The first sixth is warm-up: an allocator grows until every shape has been seen once.
    early, third = view.level(HELD, part, 2 * part), view.level(HELD, view.n // 3, view.n // 3 + part)
    late, top = view.level(HELD, view.n - part), view.last(kept, part)
    used_before, used_after = view.level(used, part, 2 * part), view.level(used, view.n - part)
    if not all(map(np.isfinite, (early, third, late, top, used_before, used_after))) or view.n < 24:
        return None
    grown = late - early
    flat = abs(used_after - used_before) <= 0.6 * grown
    after_warmup = late - third >= 0.4 * grown or _is_full_and_waits(view, kept)
    if (
        grown < 0.07 * top
        or late < 1.4 * early
        or not flat
        or not after_warmup
        or _is_one_piece(view, part, grown)
    ):
        return None
    idx = foot_of_climb(view.values[HELD])
    slower = view.rise("timing_s/update_actor")
    per_token = view.rise("timing_per_token_ms/update_actor")
    evidence = [
        Evidence(
            metric=kept,
            step=view.step_at(idx),
            before=view.level(kept, part, 2 * part),
            after=top,
            says=f"reserved grows to {num(top)} GiB, allocated stays at {num(used_after)}",
        ),
        Evidence(
            metric=HELD,
            step=view.step_at(idx),
            before=early,
            after=late,
            says=f"held and not used: {num(early)} to {num(late)} GiB, and growing",
        ),
    ]
    cost = None
    if slower is not None and per_token is not None and slower.idx > part and slower.ratio > 1.1:
        cost = lost_seconds(view, "timing_s/update_actor", slower)
    capacity = memory.device_gib(view)
    near = capacity is not None and top >= 0.9 * capacity
    return finding(
        title="device memory is fragmented: ever more is held and not used",
        confidence=share(0.8 + 0.1 * near + 0.05 * (late >= 2 * early)),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=cost,
    )


def _is_full_and_waits(view: View, kept: str) -> bool:
    """Whether what is held has come to the brim, however early, and the update now takes longer than longer answers
    explain: a warm-up that fills the device costs no seconds."""
    capacity, (length, _) = memory.device_gib(view), view.trend("response_length/mean")
    seconds, steadiness = view.trend("timing_s/update_actor")
    is_full = capacity is not None and view.last(kept) >= BRIM * capacity
    return is_full and seconds >= RETRIES * max(length, 1.0) ** 1.5 and steadiness >= 0.6


def _is_one_piece(view: View, start: int, grown: float) -> bool:
    """Whether half of the growth since `start` came at one step and it was left at that: a first validation or
    checkpoint does that. One that creeps on from there is no end of a warm-up."""
    values = view.values[HELD][start:]
    values = finite(values)
    leaps = values[3:] - values[:-3]
    if np.max(leaps, initial=0.0) < 0.5 * grown:
        return False
    at = int(np.argmax(leaps)) + 3
    creeps = float(np.median(values[-5:]) - np.median(values[at : at + 5])) if len(values) > at + 10 else 0.0
    return creeps < CREEPS * grown


CREEPS = 0.12
"""Share of the growth that must come after its largest leap."""
TOOTH = 0.1
"""Share of the device that is held and given back from which on a tooth is more than a cache."""


def _in_teeth(view: View, used: str, kept: str) -> Finding | None:
    """What is held and not used grows for some steps and is given back at one, up to a tenth of the device and more."""
    capacity = memory.device_gib(view)
    if capacity is None:
        return None
    teeth = climbs(view.values[HELD], 0.06 * capacity)
    if len(teeth) < 3:
        return None
    heights = np.array([height for _, _, height in teeth])
    with_used = [float(view.values[used][top] - view.values[used][foot]) for foot, top, _ in teeth]
    top_height = float(np.quantile(heights, 0.75))
    if top_height < TOOTH * capacity or float(np.nanmedian(with_used)) > 0.25 * top_height:
        return None
    thirds = np.array_split(heights, 3)
    grows = float(np.max(thirds[-1])) >= 1.25 * float(np.max(thirds[0]))
    is_brim = float(np.nanmax(view.values[kept])) >= 0.9 * capacity
    if not (grows or is_brim):
        return None
    foot, steps = teeth[0][0], float(np.median([top - foot for foot, top, _ in teeth]))
    step, before = view.step_at(foot), float(view.values[HELD][foot])
    most = float(np.nanmax(view.values[kept]))
    return finding(
        title="device memory is fragmented between hand-overs: more is held and not used until it is given back",
        confidence=share(0.8 + 0.08 * grows + 0.06 * is_brim),
        step=step,
        evidence=(
            Evidence(
                metric=HELD,
                step=step,
                before=before,
                after=before + float(heights.max()),
                says=f"{len(teeth)} times it grows over {num(steps)} steps, by up to {num(float(heights.max()))} GiB, "
                "and is given back at once",
            ),
            Evidence(metric=kept, step=step, after=most, says=f"up to {num(most)} of {num(capacity)} GiB"),
        ),
    )


BRIM = 0.975
"""Share of the device at which the allocator has taken all there is: then it must give back before it can take."""
LEAST_GROWN = 0.015
"""Share of the device that must have been taken since what is used stands still."""
RETRIES = 1.15
"""Seconds of the update over those before, at the same tokens, from which on it waits for that."""


def _retries_at_the_brim(view: View, used: str, kept: str) -> Finding | None:
    """What is held grows to the whole of the device, what is used does not, and since then the update takes longer for
    the same tokens while stages that need little memory do not: every step frees and takes again."""
    capacity = memory.device_gib(view)
    slower = view.rise("timing_s/update_actor")
    if capacity is None or slower is None or slower.idx < 12 or view.last(kept, 5) < BRIM * capacity:
        return None
    per_token = view.contrast(slower.metric, slower.idx, width=40)
    if per_token is None or per_token.ratio < RETRIES or per_token.score < 6 or slower.end_idx is not None:
        return None
    taken, needed = view.values[kept], view.values[used]
    full = np.flatnonzero(taken >= BRIM * capacity)
    slack = max(10, view.n // 15)
    if not len(full) or not full[0] - 3 <= slower.idx <= full[0] + slack:
        return None
    stands = view.level(used, slower.idx, slower.idx + 2 * slack) - 0.003 * capacity
    start = int(np.flatnonzero(needed >= stands)[0])
    if full[0] - start < 10:
        return None  # it came with what is used
    before = float(np.nanmin(taken[start : full[0]]))
    if view.level(kept, slower.idx) - before < LEAST_GROWN * capacity:
        return None
    for metric, most in (
        ("perf/total_num_tokens", 1.1),
        ("response_length/mean", 1.1),
        ("timing_s/old_log_prob", 1.1),
        ("timing_s/ref", 1.1),
        ("timing_s/gen", 1.1),
    ):
        c = view.contrast(metric, slower.idx, width=40)
        if c is not None and c.ratio >= most and c.score >= 3:
            return None
    step = view.step_at(int(full[0]))
    says = f"reserved grows to {num(view.last(kept, 5))} of {num(capacity)} GiB, allocated stays at "
    says += num(view.last(used, 5))
    return finding(
        title="device memory is fragmented: held up to the brim, and the update waits for the allocator",
        confidence=0.75,
        step=step,
        evidence=(
            Evidence(
                metric=kept,
                step=step,
                before=before,
                after=view.last(kept, 5),
                says=says,
            ),
            of_contrast(view, per_token, slower.idx, "at the same tokens, and no other stage"),
        ),
        cost_s=lost_seconds(view, slower.metric, slower),
    )


_UNALLOCATED = re.compile(r"([\d.]+) ([MG]iB) is reserved by PyTorch but unallocated")
_TRIED = re.compile(r"Tried to allocate ([\d.]+) ([MG]iB)")


def _said(view: View) -> Finding | None:
    """An out-of-memory error whose own words say that several times what did not fit was held and not used."""
    for event in (*memory.said(view, in_sync=True), *memory.said(view, in_sync=False)):
        left, tried = (_gib(pattern, event.text) for pattern in (_UNALLOCATED, _TRIED))
        if left is None or tried is None or left < max(4.0, 2.0 * tried):
            continue
        step = event.step if event.step is not None else view.step_at(view.n - 1)
        says = f"{num(tried)} GiB did not fit while {num(left)} GiB were reserved and not used"
        return finding(
            title="device memory is fragmented: an allocation failed beside memory that was held and not used",
            confidence=0.93,
            step=step,
            evidence=(Evidence(metric="log", step=step, says=says),),
        )
    return None


def _gib(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return None if found is None else float(found[1]) * (BYTES[found[2].lower()] / GIB)
