"""Waits that became longer (`buffer_never_fills`): in every step, in spells, or added up over the batches that come at
once; and what else may have made them so. Near zero, multiples say nothing: waits are judged against their steps."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import foot_of_climb
from rollbook.diagnose.cost import is_asynchronous
from rollbook.diagnose.filter_words import DROPPED
from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.series import Series
from rollbook.diagnose.signs.environments import ENV_FAILURES
from rollbook.diagnose.signs.seconds import host_slowdown, is_of_the_schedule, residual_of, step_seconds
from rollbook.diagnose.signs.versions import EVICTED, STALENESS
from rollbook.diagnose.view import Contrast, View
from rollbook.diagnose.wording import num, of_break, of_contrast, share

RULE = "buffer_never_fills"
"""Whose waits these are."""
OLDEST = "the oldest trajectory still running: its age, its turn and its replica"
"""What to look at next where samples do not come."""
HICCUP_S = 30.0
"""Seconds that any host may stand still for once."""
LONGER = 1.25
"""Seconds of waiting over those before that are more than a wobble."""
HOST_EXPLAINS = 1.6
"""Waits may grow that much more than what waits for nobody, where the host is slow."""
OTHER_SHARE = 0.3
"""Seconds that no stage has, over those that the trainer waits longer: from there on, all of the host is slow."""


def for_good(view: View, excess: str) -> Finding | None:
    """The trainer waits longer since a step, for responses that are no longer: in every step, or else added up."""
    idx = _longer_since(view, excess)
    if idx is None:
        return _by_batches(view)
    wait, step_s = view.level("timing_s/gen", idx), step_seconds(view, idx)
    before = view.level("timing_s/gen", max(0, idx - 40), idx)
    evicted, failed = _evicted_since(view, idx), _fails_since(view, idx)
    least = LOST_FRAC if evicted or failed else WAITS_FRAC
    if not np.isfinite(wait) or wait < least * step_s or wait < LONGER * before:
        return _by_batches(view)  # shorter responses need no shorter wait: prompts, calls and the tail stay
    if _has_another_reason(view, idx):
        return None
    evidence: list[Evidence] = []
    says = f"the trainer waits {num(wait)} s of {num(step_s)} s a step, {num(before)} s before"
    evidence.append(
        Evidence(metric="timing_s/gen", step=view.step_at(idx), before=before, after=wait, says=says)
    )
    c = view.contrast("response_length/mean", idx)
    if c is not None:
        evidence.append(of_contrast(view, c, idx, "responses are no longer"))
    confidence = 0.6
    if evicted:
        evidence.append(of_contrast(view, evicted, idx, "evicted as too stale"))
        confidence += 0.2
    if view.has(f"{STALENESS}/mean") or view.family("buffer/"):
        confidence += 0.12
    fall = view.fall("buffer/num_finished")
    if fall is not None and view.near(fall.idx, idx, least=8):
        evidence.append(of_break(fall))
        confidence += 0.1
    evidence += [of_break(rise, "what fails does not reach the trainer") for rise in failed]
    lost = (wait - before) * (view.n - idx) * view.stride if np.isfinite(before) else None
    return _waits(view, idx, evidence, confidence, lost)


def _longer_since(view: View, excess: str) -> int | None:
    """Position from which on the trainer clearly waits longer than lengths explain."""
    rise = view.rise(excess)
    if rise is not None and rise.peak_ratio >= 1.9:
        c = view.contrast(excess, rise.idx, width=20)  # many values tell what one would not in a noisy log
        is_clear = rise.score >= 3 and rise.peak_ratio >= 2.5 and c is not None and c.score >= 8
        if rise.score >= 5 or is_clear:
            return rise.idx
    ratio, steadiness = view.trend(excess)
    if ratio >= MANY_TIMES and steadiness >= 0.95:  # a climb over all of the log has no break
        return max(3, foot_of_climb(np.log(view.values[excess])))
    return _ends_waiting(view)


MANY_TIMES = 3.0
"""Growth of the wait over the log, beyond what lengths explain."""


WAITS_FRAC, LOST_FRAC = 0.35, 0.2
"""Share of a step that the trainer must wait, and where more samples are lost since then."""


def _evicted_since(view: View, idx: int) -> Contrast | None:
    """Evicted samples, where they are many more from a position on."""
    evicted = view.contrast(EVICTED, idx)
    if evicted is None or evicted.after < 2 * evicted.before + 3 or evicted.score < 4:
        return None
    return evicted


def _fails_since(view: View, idx: int) -> list[Break]:
    """Failures that rise, near a position."""
    found = []
    for metric in dict.fromkeys((*ENV_FAILURES, *view.family("failures/", "/num"))):
        rise = view.rise(metric, log=False)
        least = 0.03 if metric.endswith(("frac", "ratio")) else 3.0
        many = rise is not None and rise.late >= 2 * rise.before + least and rise.score >= 4
        if rise is not None and many and view.near(rise.idx, idx, share=0.15, least=10):
            found.append(rise)
    return found


def _waits(
    view: View, idx: int, evidence: list[Evidence], confidence: float, cost_s: float | None
) -> Finding:
    return Finding(
        rule=RULE,
        title="the trainer waits for samples that do not come",
        area="async",
        confidence=share(confidence),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=cost_s,
        action="compare admitted with running + finished + failed + evicted; raise the staleness bound "
        "or admit less ahead "
        "when they are evicted, put a deadline on every trajectory when they hang",
        next_check=OLDEST,
    )


WAITS_S = 60.0
"""Seconds over the usual wait from which on a spell of waiting is one."""


def in_spells(view: View) -> Finding | None:
    """Steps in which the trainer waits many times longer than beside them, for responses that are no longer."""
    spells = view.spells("timing_s/gen", least=np.log(3.0)) if is_asynchronous(view) else None
    if spells is None or spells.inside - spells.before < WAITS_S or is_of_the_schedule(view, spells):
        return None  # who validates on the replicas waits for them afterwards
    explains: tuple[tuple[str | None, float], ...] = (
        ("response_length/mean", 1.2),
        ("response_length/max", 1.4),
        ("env/turn_s/mean", 1.4),
        ("timing_s/update_actor", 1.3),
        ("timing_s/old_log_prob", 1.3),
        *((dropped, 1.7) for dropped in DROPPED),
    )
    if view.rises_beside(explains, spells, score=3):
        return None
    cost = spells.over_quiet(view.values["timing_s/gen"]) * view.stride
    says = f"the trainer waits {num(spells.inside)} s in {spells.num_hits} steps, {num(spells.before)} s in between"
    evidence = [
        Evidence(
            metric="timing_s/gen",
            step=view.step_at(spells.first),
            before=spells.before,
            after=spells.inside,
            says=says,
        )
    ]
    c = view.beside("response_length/mean", spells)
    if c is not None:
        evidence.append(of_contrast(view, c, spells.first, "responses are no longer in those steps"))
    return Finding(
        rule=RULE,
        title="the trainer waits again and again for samples that do not come",
        area="async",
        confidence=0.82,
        step=view.step_at(spells.first),
        evidence=tuple(evidence),
        cost_s=cost,
        action="compare admitted with running + finished + failed + evicted in such a step, and put a deadline on "
        "every group: a step then goes on with those that have finished",
        next_check=OLDEST,
    )


BLOCK = 4
"""Steps over which waits are added up: those of an asynchronous run come with the batch, in every second step or so."""
LEAST_BLOCKS = (3, 2)
"""Before and after a change of what the blocks add up to."""
WAIT_SHARE = 0.35
"""Of the steps' seconds, by which the wait must have grown."""

HARDLY = 0.5
"""Of the steps' seconds, up to which a trainer hardly waited."""


def _by_batches(view: View) -> Finding | None:
    """The trainer hardly ever waited, and now does for a good part of every few steps: not of each one, as several
    batches come at once. Near zero, multiples say nothing; added up, waits are judged against the steps' seconds."""
    if not is_asynchronous(view) or not view.has("timing_s/gen", "timing_s/step"):
        return None
    known = np.isfinite(view.values["timing_s/gen"]) & np.isfinite(view.values["timing_s/step"])
    at = np.flatnonzero(known)[1:]  # the first step waits for the first samples
    wait_s, step_s = view.values["timing_s/gen"][at], view.values["timing_s/step"][at]
    best: tuple[float, int] | None = None
    for i in range(LEAST_BLOCKS[0] * BLOCK, len(at) - LEAST_BLOCKS[1] * BLOCK + 1):
        grown = float(wait_s[i:].mean() - wait_s[:i].mean()) * np.sqrt(i * (len(at) - i))
        best = (grown, i) if best is None or grown > best[0] else best
    if best is None:
        return None
    i = best[1]
    before, after = _added_up(wait_s[:i][::-1])[::-1], _added_up(wait_s[i:])
    step_before, step_after = float(_added_up(step_s[:i]).mean()), float(_added_up(step_s[i:]).mean())
    grown = float(np.median(after) - np.median(before))
    is_apart = float(np.quantile(after, 0.1)) > float(np.max(before[-10:])) + 0.25 * grown
    if not is_apart or grown < WAIT_SHARE * step_after or step_after < LONGER * step_before:
        return None
    if float(np.median(before)) > HARDLY * step_before:
        return None  # it always waited: against the lengths, multiples tell
    idx = int(at[i])
    if _has_another_reason(view, idx):
        return None
    usual, now = float(np.median(before)) / BLOCK, float(np.median(after)) / BLOCK
    evidence = [
        Evidence(
            metric="timing_s/gen",
            step=view.step_at(idx),
            before=usual,
            after=now,
            says=f"the trainer waits {num(now)} s of {num(step_after / BLOCK)} s a step on average over {BLOCK}, "
            f"{num(usual)} s before",
        )
    ]
    if (c := view.contrast("response_length/mean", idx)) is not None:
        evidence.append(of_contrast(view, c, idx, "responses are no longer"))
    return _waits(view, idx, evidence, 0.75, (now - usual) * (len(at) - i) * view.stride)


def _added_up(values: Series) -> Series:
    """[k] sums of each `BLOCK` values in a row, without the rest at the end."""
    return np.asarray(values[: len(values) // BLOCK * BLOCK].reshape(-1, BLOCK).sum(axis=1))


def _ends_waiting(view: View) -> int | None:
    """The last steps of the log wait many times longer than ever before."""
    gen = view.values["timing_s/gen"]
    known = np.flatnonzero(np.isfinite(gen))
    if len(known) < 12:
        return None
    usual = float(np.median(gen[known[:-3]]))
    largest = float(np.quantile(gen[known[:-3]], 0.98))
    last = known[-3:]
    high = last[gen[last] >= max(6 * usual, 3 * largest, usual + HICCUP_S)]
    return int(high[0]) if len(high) and high[-1] == known[-1] else None


def _has_another_reason(view: View, idx: int) -> bool:
    """Longer responses, a filter, slow environments or a slow host explain the seconds."""
    for metric, factor in (
        *((m, 1.7) for m in DROPPED),
        ("env/turn_s/mean", 1.5),
        ("env/queue_depth", 3.0),
        ("response_length/max", 1.5),
        ("response_length/p99", 1.5),
        ("response_length/mean", 1.6),
        ("timing_per_token_ms/update_actor", 1.4),
    ):
        if view.moved(metric, idx, 1, factor=factor):
            return True
    wait = view.contrast("timing_s/gen", idx)
    slowdown = host_slowdown(view, idx)
    if slowdown > 1.0 and (wait is None or wait.ratio <= HOST_EXPLAINS * slowdown):
        return True
    clip = view.contrast("response_length/clip_ratio", idx)
    if clip is not None and clip.after >= clip.before + 0.02 and clip.ratio >= 2 and clip.score >= 4:
        return True
    found = view.rise(residual_of(view))
    return (
        found is not None
        and found.peak_ratio >= 2
        and view.near(found.idx, idx)
        and found.late - found.before >= OTHER_SHARE * (wait.diff if wait is not None else step_seconds(view))
    )
