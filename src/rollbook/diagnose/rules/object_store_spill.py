"""The object store is full and batches go over the disk: moving data becomes slow, computing does not.

Told by Ray's lines, by the bytes that are spilled, or by stages that hardly compute (advantages, scoring, seconds of no
stage) becoming many times as slow at the same tokens, or each by the same seconds. Where computing stages slow down
alone, or all do in proportion, the host is slow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np

from rollbook.diagnose.breaks import BASELINE, Break
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.same_seconds import LOST_S, same_seconds
from rollbook.diagnose.signs.seconds import (
    is_of_the_schedule,
    lost_in_steps,
    lost_seconds,
    residual_of,
    step_seconds,
)
from rollbook.diagnose.units import BYTES, GIB
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, of_contrast, share
from rollbook.observe.numbers import counted

RULE = "object_store_spill"

MOVERS = ("timing_s/adv", "timing_s/reward", "timing_s/pack")
"""Stages that hardly compute: their seconds are those of moving data."""


def judge(view: View) -> Finding | NotJudged | None:
    told = _by_signs(view)
    if isinstance(told, Finding) or (same := same_seconds(view)) is None:
        return told
    evidence = [of_break(rise, "at the same tokens") for rise in same.light]
    step = view.step_at(same.idx)
    for metric, (before, late) in same.computing.items():
        says = (
            f"about {num(same.each_s)} s more as well, from {num(before)} to {num(late)} s, beyond its tokens"
        )
        evidence.append(Evidence(metric=metric, step=step, before=before, after=late, says=says))
    confidence = 0.65 + 0.05 * min(len(evidence), 5)
    return _finding(view, same.idx, evidence, confidence, same.cost_s)


def _by_signs(view: View) -> Finding | NotJudged | None:
    said = view.events("object_store_spill")
    spilled = view.first("host/object_store_spilled_bytes")
    other = residual_of(view)
    if other is None and spilled is None and not said:
        return NotJudged(
            rule=RULE,
            missing=("timing_s/step", "host/object_store_spilled_bytes"),
            lacks="seconds of stages",
            collect="log the seconds of the whole step beside its stages, and what the object store spills",
        )
    evidence: list[Evidence] = []
    direct, alone = 0.0, 0.0
    idx: int | None = None
    if said:
        steps = [e.step for e in said if e.step is not None]
        first = min(steps, default=view.step_at(view.n - 1))
        idx = view.idx_of(first)
        gib = _spilled_gib(e.text for e in said)
        says = f"{counted(len(said), 'time')}: {said[0].text}"
        says += f" (in the end {num(max(gib))} GiB)" if gib else ""
        evidence.append(Evidence(metric="log", step=first, says=says))
        direct = 0.3 if len(said) >= 3 else 0.15
        if len(said) >= 3:
            alone = _alone(gib)
    measured = _measured(view, spilled)
    if measured is not None:
        evidence.append(measured[1])
        idx, direct = measured[0] if idx is None else min(idx, measured[0]), 0.35
    slow = _slow_movers(view, other, None if measured is None else measured[0])
    step_s = step_seconds(view)
    host = view.rise("perf/cpu_memory_used_gb")
    fuller = host is not None and host.ratio >= 1.12 and host.score >= 5
    if not slow and host is not None and fuller:
        slow = _all_slow(view, host)
    cost = 0.0
    for found in slow:
        evidence.append(of_break(found, "seconds of moving data"))
        cost += lost_seconds(view, found.metric, found)
    if slow:
        idx = min(f.idx for f in slow) if idx is None else idx
    if host is not None and fuller:
        evidence.append(of_break(host, "host memory"))
    if direct < 0.3 and (again := _in_spells(view, other)) is not None:
        return again
    if measured is not None and not slow and (waits := _slower_since(view, measured[0])):
        cost = lost_in_steps(view, measured[0]) or 0.0
        return _finding(view, measured[0], evidence + waits, 0.8 + 0.1 * fuller, cost or None)
    if idx is None or not slow:
        return None if not alone else _finding(view, idx or 0, evidence, alone, None)
    heavy = sum(f.late - f.before for f in slow) >= max(LOST_S, 0.08 * step_s)
    together = host is not None and view.near(host.idx, slow[0].idx, share=0.1, least=8)
    cost = max(cost, lost_in_steps(view, idx) or 0.0)  # computing waits for what is moved
    fed = [] if direct else _fed_slowly(view, slow, cost)
    if not direct and not fed and not (heavy and ((fuller and together) or len(slow) >= 2)):
        return None
    evidence += [of_break(found, "at the same tokens: it waits for its batch") for found in fed]
    confidence = 0.5 + direct + 0.1 * len(slow) + 0.05 * len(fed) + 0.15 * (fuller and together)
    return _finding(view, idx, evidence, confidence, cost)


def _measured(view: View, spilled: str | None) -> tuple[int, Evidence] | None:
    """Where it begins that bytes are spilled step by step, and by how many."""
    if spilled is None:
        return None
    since, rise = view.begins(spilled, LEAST_BYTES), view.rise(spilled, log=False)
    if since is not None:
        step, after = view.step_at(since), view.level(spilled, since)
        says = "bytes a step, none before"
        return since, Evidence(metric=spilled, step=step, before=0.0, after=after, says=says)
    if rise is not None and rise.late > LEAST_BYTES and rise.score >= 4:
        return rise.idx, of_break(rise, "bytes a step")
    return None


SLOWER, SLOWER_STEP = 1.08, 1.03
"""Times as long per token that some stage, and the whole step, take where much is spilled step by step."""
MUCH_A_STEP = 4 * GIB


def _slower_since(view: View, since: int) -> list[Evidence]:
    """Stages that compute, and the step, which take longer per token in the later half of the steps that spill than
    before; nothing where little is spilled, or a step takes what it took."""
    if view.level("host/object_store_spilled_bytes", since) < MUCH_A_STEP:
        return []
    late = since + (view.n - since) // 2
    work = view.first("perf/total_num_tokens", "response_length/mean")
    grown = 1.0 if work is None else view.level(work, late) / view.level(work, since - BASELINE, since)

    def slower(metric: str, least: float) -> Evidence | None:
        before, after = view.level(metric, since - BASELINE, since), view.level(metric, late)
        noise = view.noise_before(metric, since) / np.sqrt(min(since, BASELINE))
        lost_s = after - before * max(grown, 1.0)
        if not lost_s >= max((least - 1.0) * before, 4.0 * noise, LOST_S):  # one of them is not known
            return None
        return Evidence(
            metric=metric,
            step=view.step_at(since),
            before=before,
            after=after,
            says=f"{num(lost_s)} s more than its tokens ask for",
        )

    step = slower("timing_s/step", SLOWER_STEP)
    stages = (slower(f"timing_s/{name}", SLOWER) for name in ("gen", "old_log_prob", "ref", "update_actor"))
    found = [stage for stage in stages if stage is not None]
    return [*found, step] if found and step is not None else []


MUCH_GIB, VERY_MUCH_GIB = 20.0, 100.0
"""Spilled since the start by one node, from which on that alone is worth a word, or fills a disk: the first 2 GiB are
said of any job whose batch was once larger than the store."""
GROWN = 4.0
"""The most that was spilled over the least that was said, from which on it goes on."""
_SPILLED = re.compile(r"Spilled (\d+(?:\.\d+)?) ?([KMGT]i?B)")


def _spilled_gib(lines: Iterable[str]) -> list[float]:
    """What a node has spilled since its start, as far as lines tell."""
    found = (_SPILLED.search(line) for line in lines)
    return [float(match[1]) * (BYTES[match[2].lower()] / GIB) for match in found if match is not None]


def _alone(gib: list[float]) -> float:
    """Confidence of several lines that nothing else bears out, by what they add up to."""
    if not gib:
        return 0.55  # the store is full, they say
    if max(gib) < MUCH_GIB or max(gib) < GROWN * min(gib):
        return 0.0
    return 0.8 if max(gib) >= VERY_MUCH_GIB else 0.55


LEAST_BYTES = 1e6
"""Spilled in a step, from which on it is worth a word."""


def _in_spells(view: View, other: str | None) -> Finding | None:
    """Stretches in which the seconds of no stage, or of moving data, are many times as long, with a full host memory or
    both together, while computing takes what it took."""
    found = [
        (m, s)
        for m in (other, *MOVERS)
        if m is not None and (s := view.spells(m, least=np.log(2.5))) is not None
    ]
    if not found:
        return None
    _, spells = max(found, key=lambda pair: pair[1].over_quiet(view.values[pair[0]]))
    if is_of_the_schedule(view, spells):
        return None
    for stage, most in (("timing_s/update_actor", 1.3), ("response_length/mean", 1.2), ("timing_s/gen", 1.6)):
        c = view.beside(stage, spells)
        if c is not None and c.ratio >= most and c.score >= 4:
            return None
    evidence = []
    for mover, own in found:
        c = view.beside(mover, spells)
        if c is not None and c.ratio >= 1.8 and own.num_hits >= 0.3 * spells.num_hits:
            evidence.append(
                of_contrast(view, c, spells.first, f"seconds of moving data in {spells.num_hits} steps")
            )
    host = view.beside("perf/cpu_memory_used_gb", spells)
    fuller = host is not None and host.ratio >= 1.1 and host.score >= 5
    if host is not None and fuller:
        evidence.append(of_contrast(view, host, spells.first, "host memory in the same steps"))
    cost = sum(own.over_quiet(view.values[mover]) for mover, own in found) * view.stride
    if len(evidence) < 2 or cost < max(LOST_S, 0.02 * step_seconds(view)) * spells.num_hits * view.stride:
        return None
    confidence = 0.65 + 0.1 * len(evidence) + 0.1 * fuller
    return _finding(view, spells.first, evidence, min(confidence, 0.9), cost)


SLOW, SLOW_AS_SPILLED = 1.8, 1.25
"""Times as long that a stage without compute takes, and that it takes where bytes are spilled since the same step."""


def _slow_movers(view: View, other: str | None, spills_since: int | None) -> list[Break]:
    """Stages without compute, and the seconds of no stage, that became slow while compute did not."""
    found = []
    for metric in (other, *MOVERS):
        rise = view.rise(metric)
        if rise is None or rise.score < 4:
            continue
        is_told = spills_since is not None and view.near(rise.idx, spills_since, least=8)
        if rise.peak_ratio < (SLOW_AS_SPILLED if is_told else SLOW):
            continue
        grown = _more_work(view, rise.idx) or 1.0
        beyond = 1.1 if is_told else 1.5
        lost_s = rise.late - rise.before if is_told else rise.late
        if rise.peak_ratio >= beyond * grown and lost_s >= 0.01 * step_seconds(view):
            found.append(rise)
    return found


SHARPLY = 3.0
"""Times as long that a stage without compute must take where it is computing that loses most."""
FED = 1.08
"""Times as long per token from which on a stage that computes waits for its batch."""
LOST_FRAC = 0.06
"""Share of a step that must be lost then."""


def _fed_slowly(view: View, movers: list[Break], cost_s: float) -> list[Break]:
    """Stages that compute and became slower together with a stage that only moves the batch, at the same tokens; at
    least two, or nothing."""
    sharp = [f for f in movers if f.metric in MOVERS and f.peak_ratio >= SHARPLY]
    if not sharp or cost_s < LOST_FRAC * step_seconds(view) * (view.n - sharp[0].idx) * view.stride:
        return []
    found = []
    for stage in ("old_log_prob", "ref", "values", "update_actor", "update_critic"):
        rise = view.rise(f"timing_s/{stage}")
        if rise is None or rise.score < 4 or not view.near(rise.idx, sharp[0].idx, share=0.1, least=8):
            continue
        grown = _more_work(view, rise.idx)
        if grown is not None and rise.peak_ratio >= FED * grown:
            found.append(rise)
    return found if len(found) >= 2 else []


def _more_work(view: View, idx: int) -> float | None:
    """Tokens, or lengths, after a step over those before it; None where neither is logged."""
    tokens = view.contrast("perf/total_num_tokens", idx, width=20)
    length = view.contrast("response_length/mean", idx, width=20)
    return max((c.ratio for c in (tokens, length) if c is not None), default=None)


def _all_slow(view: View, host: Break) -> list[Break]:
    """At least three stages, whatever they compute, that became slower per token when host memory filled."""
    found = []
    for stage in ("gen", "old_log_prob", "ref", "reward", "adv", "update_actor", "update_weights"):
        rise = view.rise(f"timing_s/{stage}")
        if rise is None or rise.peak_ratio < 1.25 or rise.score < 4:
            continue
        length = view.contrast("response_length/mean", rise.idx, width=20)
        together = view.near(rise.idx, host.idx, share=0.1, least=8)
        if together and (length is None or rise.peak_ratio >= 1.2 * length.ratio):
            found.append(rise)
    return found if len(found) >= 3 else []


def _finding(
    view: View, idx: int, evidence: list[Evidence], confidence: float, cost: float | None
) -> Finding:
    share_of_step = ""
    if cost:
        share_of_step = f" ({num(cost / max(1, (view.n - idx) * view.stride))} s a step)"
    return Finding(
        rule=RULE,
        title=f"the object store spills to disk: moving data is slow{share_of_step}",
        area="implementation",
        confidence=share(confidence),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=cost,
        action="give the object store more memory, drop references to old batches, and pass large "
        "tensors by shared memory "
        "instead of through the driver",
        next_check="`ray memory --stats-only`: who holds the objects, and how many steps old are they?",
    )
