"""Sandboxes are not given back: every step leaves a few behind, so that load grows although the work does not.

A ramp, not a break: leases or active sandboxes, queue, seconds a turn and host memory grow together while
turns and lengths stay. Failures come last, when the quota is used up.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rollbook.diagnose.changes import foot_of_climb, running_median, spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.environments import ENV_FAILURES, SANDBOX_S, TURNS, failing_lines
from rollbook.diagnose.signs.gap import has_parted
from rollbook.diagnose.signs.living import unreturned
from rollbook.diagnose.signs.rewards import reward_decline
from rollbook.diagnose.signs.seconds import (
    beyond_lengths,
    excess_of,
    lost_in_steps,
    residual_of,
    step_seconds,
    waiting_of,
)
from rollbook.diagnose.signs.slow_calls import CALLS, slow_calls
from rollbook.diagnose.spells import climbs
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, share

RULE = "sandbox_leak"
TITLE = "sandboxes are not given back: load grows although the work does not"
ACTION = "give every lease an owner and a time to live, and reap what no running trajectory owns; restart the pool now"
CHECK = "count living sandboxes against running trajectories, by run id"

finding = partial(Finding, rule=RULE, area="data", action=ACTION, next_check=CHECK)
_LEVELS = (
    # metric, least growth over the run, points
    ("env/num_leased", 1.25, 2.0),
    ("env/num_active", 1.25, 2.0),
    ("env/queue_depth", 2.0, 1.5),
    ("env/turn_s/mean", 1.5, 1.5),
    ("perf/cpu_memory_used_gb", 1.12, 1.0),
)
_COUNTS = ("env/num_leased", "env/num_active")


def judge(view: View) -> Finding | NotJudged | None:
    if (counted := _counted(view)) is not None:
        return counted
    is_agentic = view.level(TURNS) > 2.2
    told = _told(view)
    if not is_agentic and not view.family("env/"):
        found = told or _calls_alone(view)
        if found is not None or view.has(TURNS):
            return found
        return NotJudged(
            rule=RULE,
            missing=("env/num_leased", "env/queue_depth", "env/turn_s/mean"),
            lacks="environments",
            collect="only for jobs with environments: log leases not returned, queue depth and seconds a turn",
        )
    if (teeth := _in_teeth(view)) is not None:
        return teeth
    if is_agentic and (fast := _in_a_few_steps(view)) is not None:
        return fast
    weighed = _weighed(view, is_agentic=is_agentic)
    return weighed or told or _calls_alone(view)


def _counted(view: View) -> Finding | None:
    """Ever more sandboxes live while as many are in use as before: nothing else is a leak so plainly."""
    found = unreturned(view)
    if found is None:
        return None
    step = view.step_at(found.idx)
    if found.in_use is None:
        says = f"{num(found.early)} were made and not gone at first, {num(found.late)} are now"
    else:
        says = f"{num(found.early)} lived at first, {num(found.late)} now, of which {num(found.in_use)} are in use"
    evidence = [Evidence(metric=found.metric, step=step, before=found.early, after=found.late, says=says)]
    for metric, least, _ in (("env/acquire_s/mean", 1.3, 0.0), *_LEVELS[2:]):
        ratio, steadiness = view.trend(metric)
        if ratio >= least and steadiness >= 0.75:
            evidence.append(_growth(view, metric, step, "with them"))
    fails = any(view.trend(m)[0] >= 2 and view.last(m) > 0 for m in ENV_FAILURES)
    return finding(
        title=TITLE + (", until no more can be made" if fails else ""),
        confidence=0.99 if fails else share(0.85 + 0.03 * len(evidence)),
        step=step,
        evidence=tuple(evidence),
        cost_s=lost_in_steps(view, found.idx),
    )


def _growth(view: View, metric: str, step: int, how: str) -> Evidence:
    part = max(3, view.n // 8)
    early, late = view.level(metric, 0, part), view.last(metric, part)
    says = f"grows {how} from {num(early)} to {num(late)}"
    return Evidence(metric=metric, step=step, before=early, after=late, says=says)


NO_GENERATION = CALLS[1]
SAMPLES_WAIT = 1.5
"""Growth of the seconds of a sample or a step from which on sandboxes are waited for."""


def _told(view: View) -> Finding | None:
    """Ever more lines that say that a limit of sandboxes, their networks or their processors is reached: those that
    live are too many, whatever is measured of them."""
    lines = failing_lines(view)
    if lines is None or not (lines.is_used_up and lines.grows):
        return None
    step = view.step_at(lines.idx)
    says = f"{num(lines.before)} lines a step before, {num(lines.after)} since and growing, as: {lines.example[:160]}"
    evidence = [Evidence(metric="log", step=step, before=lines.before, after=lines.after, says=says)]
    waits = beyond_lengths(view, waiting_of(view) or "", "waiting beyond length")
    for metric, of in (
        (NO_GENERATION, "seconds of a sample without generation"),
        (waits, "what lengths explain"),
    ):
        ratio, steadiness = view.trend(metric)
        if metric is None or ratio < SAMPLES_WAIT or steadiness < 0.75:
            continue
        begun = foot_of_climb(view.values[metric])
        says = f"grows to {num(ratio)} times, step by step: samples wait for sandboxes ({of})"
        evidence.append(Evidence(metric=metric, step=view.step_at(begun), says=says))
        step = min(step, view.step_at(begun))
        break
    return finding(
        title="sandboxes are not given back: ever more cannot be made, as a limit is reached",
        confidence=0.84,
        step=step,
        evidence=tuple(evidence),
        cost_s=lost_in_steps(view, view.idx_of(step)),
    )


def _weighed(view: View, *, is_agentic: bool) -> Finding | None:
    """What leases, queue, calls, host memory and generation say together."""
    points = 0.0
    evidence: list[Evidence] = []
    env = False
    more_turns = max(1.0, view.trend(TURNS)[0])  # of a policy that learns to use more
    begin = view.n
    counted_at: int | None = None
    held = [metric for metric in _COUNTS if _is_held_ever_more(view, metric)]
    for metric, least, worth in _LEVELS:
        ratio, steadiness = view.trend(metric)
        if metric.startswith("env/turn_s"):
            ratio /= more_turns
        is_steady = steadiness >= 0.75 or metric in held
        if ratio < least or not is_steady or not _is_gradual(view, metric):
            continue
        if metric == "env/turn_s/mean" and view.last(metric) < SANDBOX_S:
            continue
        points += worth
        env |= metric.startswith("env/")
        idx = foot_of_climb(view.values[metric])
        counted_at = idx if metric in _COUNTS else counted_at
        begin = min(begin, idx)
        evidence.append(_growth(view, metric, view.step_at(idx), "step by step"))
    begin = begin if counted_at is None else counted_at  # seconds scatter, counts do not
    if env and view.trend("env/turn_s/mean")[0] >= MANY_TIMES and not has_parted(view):
        worse = _gets_worse(view)
        points += 1.0 * bool(worse)
        evidence += worse
    unreturned = bool(held) or _grows_every_step(view, "env/num_leased")
    if unreturned:
        points += 1.0  # leases are counted, not timed: this is the fault itself
    excess = excess_of(view)
    if is_agentic and excess is not None:
        ratio, steadiness = view.trend(excess)
        ratio /= more_turns
        if ratio >= 1.2 and steadiness >= 0.7 and _is_gradual(view, excess) and not _trainer_slows(view):
            points += 1.2
            if not evidence:  # else what is measured of the pool tells it better than what waits for it
                begin = foot_of_climb(view.values[excess])
            says = f"generation takes {num(ratio)} times what the lengths explain"
            evidence.append(Evidence(metric="timing_s/gen", step=view.step_at(begin), says=says))
    if points < (2.5 if env else 2.2) or len(evidence) < (1 if unreturned else 2):
        return None
    late_failures = [m for m in ENV_FAILURES if view.trend(m)[0] >= 2 and view.last(m) > 0]
    return finding(
        title=TITLE,
        confidence=share(0.5 + 0.1 * points + 0.05 * bool(late_failures)),
        step=view.step_at(min(begin, view.n - 1)),
        evidence=tuple(evidence),
        cost_s=lost_in_steps(view, begin),
    )


CALLS_GROW = 2.5
"""Growth of the seconds of a call from which on the host is what is slow."""
HELD_GROWS = 1.12
"""Growth of host memory from which on somebody holds it."""
LEAST_RAMP = 4
"""Steps that a growth must take: what breaks at once is a pool that died."""


def _in_a_few_steps(view: View) -> Finding | None:
    """Calls and host memory grow together over a few steps, late in a run or up to a level at which they stay, while
    turns and lengths are what they were."""
    seconds, held = view.rise("env/turn_s/mean"), view.rise("perf/cpu_memory_used_gb")
    if seconds is None or held is None or view.level("env/turn_s/mean") < SANDBOX_S:
        return None
    if seconds.peak_ratio < CALLS_GROW or held.peak_ratio < HELD_GROWS or min(seconds.score, held.score) < 6:
        return None
    if min(seconds.rise_steps, held.rise_steps) < LEAST_RAMP or not view.near(
        seconds.idx, held.idx, share=0.1, least=8
    ):
        return None
    if seconds.end_idx is not None or held.end_idx is not None or has_parted(view):
        return None
    for metric in (TURNS, "response_length/mean"):
        c = view.contrast(metric, seconds.idx, width=20)
        if c is not None and not 0.85 <= c.ratio <= 1.25:
            return None
    return finding(
        title=TITLE,
        confidence=0.82,
        step=min(seconds.step, held.step),
        evidence=(of_break(seconds, "calls wait"), of_break(held, "and the host fills up")),
        cost_s=lost_in_steps(view, seconds.idx),
    )


def _calls_alone(view: View) -> Finding | None:
    """Calls take ever longer, for good, and the steps with them, while turns, lengths, failures, rewards, the host and
    the trainer are what they were: what grows is on the pool's own hosts, of which nothing is logged."""
    slower = slow_calls(view)
    if slower is None or not slower.grows_on:
        return None
    rise = slower.rise
    begun = foot_of_climb(view.values[rise.metric]) if slower.had_grown else view.foot(rise)
    return finding(
        title="calls of the sandboxes take ever longer although the work does not grow: what they run on fills up",
        confidence=0.72,
        step=view.step_at(begun),
        evidence=slower.evidence,
        cost_s=slower.cost_s,
        next_check=CHECK + "; where those agree, what the calls go to is overloaded",
    )


LOADS = ("perf/cpu_memory_used_gb", "env/num_leased", "env/num_active", "env/queue_depth")
"""What holds the sandboxes that were not given back."""
TOOTH = 0.3
"""Height of a tooth over its foot, as a share of it, from which on a load grew."""
SLOWER = 1.25
"""Seconds of a turn at the top of a tooth over those at its foot from which on the load is felt."""


def _in_teeth(view: View) -> Finding | None:
    """A load grows step by step and is gone at one, again and again, and the environment becomes slower and as quick
    again with it: somebody restarts the pool. A cache that fills and is emptied slows no sandbox."""
    seconds = "env/turn_s/mean"
    if view.count(seconds) < 12 or view.level(seconds) < SANDBOX_S:
        return None
    for metric in LOADS:
        if view.count(metric) < 12:
            continue
        values = view.values[metric]
        least = TOOTH * float(np.nanquantile(values, 0.1))
        teeth = climbs(values, least) if least > 0 else []
        slower = [_grows_over(view.values[seconds], foot, top) for foot, top, _ in teeth]
        if len(teeth) < 2 or float(np.mean([ratio >= SLOWER for ratio in slower])) < 0.75:
            continue
        length = [_grows_over(view.values.get("response_length/mean", values), a, b) for a, b, _ in teeth]
        if view.has("response_length/mean") and float(np.median(length)) >= 1.2:
            continue
        together = spearman(values, view.values[seconds])
        if together < 0.6 or has_parted(view):
            continue
        step, top = view.step_at(teeth[0][0]), float(np.median([values[b] for _, b, _ in teeth]))
        foot = float(np.median([values[a] for a, _, _ in teeth]))
        at = [(float(view.values[seconds][a]), float(view.values[seconds][b])) for a, b, _ in teeth]
        before, after = (float(np.nanmedian(x)) for x in zip(*at))
        steps = float(np.median([b - a for a, b, _ in teeth]))
        says = f"{len(teeth)} times it grows from {num(foot)} to {num(top)} over {num(steps)} steps, and is gone at one"
        felt = f"{num(before)} s at the foot of a tooth, {num(after)} s at its top"
        return finding(
            title=f"{TITLE}, until the pool is restarted",
            confidence=share(0.75 + 0.05 * min(len(teeth), 3)),
            step=step,
            evidence=(
                Evidence(metric=metric, step=step, before=foot, after=top, says=says),
                Evidence(metric=seconds, step=step, before=before, after=after, says=felt),
            ),
        )
    return None


def _grows_over(values: Series, foot: int, top: int) -> float:
    """Values about the top of a tooth over those about its foot."""
    low, high = values[max(0, foot - 1) : foot + 2], values[max(0, top - 1) : top + 1]
    if not np.isfinite(low).any() or not np.isfinite(high).any():
        return 1.0
    return float(np.nanmedian(high) / max(float(np.nanmin(low)), 1e-12))


MANY_TIMES = 2.5
"""Growth of the seconds of an environment beyond what other calls of a policy that learns would bring."""


def _gets_worse(view: View) -> list[Evidence]:
    """Turns that become fewer, and rewards that are lost, while calls wait: their time-outs."""
    worse = []
    ratio, _ = view.trend(TURNS)
    part = max(3, view.n // 8)
    if ratio <= 0.93:
        early, late = view.level(TURNS, 0, part), view.level(TURNS, view.n - part)
        says = f"{num(early)} turns at first, {num(late)} now: episodes end early"
        worse.append(
            Evidence(metric=TURNS, step=view.step_at(view.n - part), before=early, after=late, says=says)
        )
    falls = reward_decline(view)
    if falls is not None:
        says = f"{num(falls.before)} at its best, {num(falls.after)} now: what times out scores nothing"
        worse.append(
            Evidence(metric=falls.metric, step=falls.step, before=falls.before, after=falls.after, says=says)
        )
    return worse


def _grows_every_step(view: View, metric: str) -> bool:
    """Whether a count goes up in nearly every step since it began to, by more than all it ever was before."""
    rise = view.rise(metric, log=False)
    if rise is None or rise.late < 2 * rise.before + 3:
        return False
    values = view.values[metric][rise.idx :]
    gained = np.diff(finite(values))
    return len(gained) >= 8 and float((gained > 0).mean()) >= 0.9


HELD_TIMES = 1.6
"""Growth of sandboxes in use at the same work from which on they are not given back."""
LEAST_HELD_STEPS = 12


def _is_held_ever_more(view: View, metric: str) -> bool:
    """Whether a count of sandboxes in use goes up and up since a step, to the end or to its limit, and lengths, turns
    and numbers of samples do not."""
    rise = view.rise(metric)
    if rise is None or rise.score < 6 or rise.end_idx is not None or rise.early_share >= 0.65:
        return False
    values = view.values[metric][rise.idx :]
    values = running_median(finite(values), 5)
    if len(values) < LEAST_HELD_STEPS or rise.late < HELD_TIMES * rise.before:
        return False
    if spearman(values, np.arange(len(values), dtype=np.float64)) < 0.9:
        return False
    width = max(5, view.n // 12)
    for work in (TURNS, "response_length/mean", "batch/num_sequences", "generated/num_trajectories"):
        before, after = view.level(work, max(0, rise.idx - 20), rise.idx), view.last(work, width)
        if before > 0 and after / before * 1.25 > rise.late / rise.before:
            return False
    return True


def _is_gradual(view: View, metric: str) -> bool:
    """No single step accounts for most of the growth."""
    rise = view.rise(metric)
    if rise is not None and rise.before == 0.0:
        rise = view.rise(metric, log=False)  # from nothing every first step is a leap in multiples
    return rise is None or rise.early_share < 0.65


def _trainer_slows(view: View) -> bool:
    """Whether stages that need no sandbox slow down as well."""
    ratio, _ = view.trend("timing_per_token_ms/update_actor")
    other = residual_of(view)
    found = view.rise(other)
    step = step_seconds(view)
    return ratio >= 1.3 or (found is not None and found.peak_ratio >= 2 and found.late >= 0.12 * step)
