"""Sandboxes died: trajectories that need them fail, at once, as failures or (worse) as rewards of zero.

The policy did not change at that step: the gap, the entropy and the other sources stay what they were, while
the environment's own signals (failures, time-outs, seconds a turn, turns, active sandboxes) break together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.dying_sandboxes import ACTION, LOST, RULE, dying_sandboxes, finding
from rollbook.diagnose.rules.parts.failed_rollouts import failed_rollouts
from rollbook.diagnose.signs.environments import (
    ENV_FAILURES,
    ENV_LOAD,
    SANDBOX_S,
    TURNS,
    failing_lines,
    failure_kinds_of,
    failures_rise,
)
from rollbook.diagnose.signs.gap import GAP, gap_of, parts_at
from rollbook.diagnose.signs.living import too_few
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import lost_reward, lowest_reward, other_prompts, reward_of, sources_of
from rollbook.diagnose.stops import Stop, stopped_by
from rollbook.diagnose.view import Contrast, View
from rollbook.diagnose.wording import num, of_contrast, share

TITLE, SCORED = "sandboxes are dead: what needs them fails", " and counts as reward zero"
_CAPACITY = ("env/num_active", "env/capacity", "env/num_alive")
SCORER = "timing_s/reward"
"""Seconds of scoring: code is scored in sandboxes, which then time out or refuse."""
CALLS = ("env/turn_s/mean", "env/turn_s/p99", "perf/non_generation_time/mean")
"""Seconds of a call, or of a sample in which nothing is generated for it (slime): its tools, environment and score."""
CALLED_S = 1.0
"""Such seconds from which on something outside of the engine is called."""


def judge(view: View) -> Finding | NotJudged | None:
    stopped = stopped_by(view, RULE)
    if stopped is not None:
        return _stopped(stopped)
    known = [m for m in (*ENV_LOAD, *ENV_FAILURES, TURNS, *_CAPACITY) if view.has(m)]
    is_agentic = any(m.startswith("env/") for m in known) or view.level(TURNS) > 2.2
    is_agentic |= view.level(CALLS[-1]) >= CALLED_S
    if (told := _told(view)) is not None and not is_agentic:
        return told
    if not is_agentic and not _scorer_breaks(view) and not any(view.has(m) for m in ENV_FAILURES):
        return NotJudged(
            rule=RULE,
            missing=("failures/frac", "env/turn_s/mean", "env/num_active", "num_turns/mean"),
            lacks="environments",
            collect="only for jobs with environments: log failures by class, seconds a turn, and active sandboxes",
        )
    if not is_agentic and failure_kinds_of(view).main in ("reward", "timeout", "engine", "out_of_memory"):
        return None  # the log says what the failures are, and they are not the environment's
    found = [at for idx in _moments(view) if (at := _at(view, idx)) is not None]
    best = max(found, key=lambda at: at.confidence, default=None)
    if best is not None:
        # The first of the surest, at the one of the steps around it that parts before and after.
        beside = [f for f in found if f.confidence == best.confidence and 0 <= f.step - best.step <= BESIDE]
        return max(beside, key=_parted)
    anew = failed_rollouts(view) if is_agentic else None
    return dying_sandboxes(view) or anew or told


BESIDE = 2
"""Steps by which a noisy series may date its break early."""


def _parted(finding: Finding) -> float:
    """How far apart what was before and after lie, over all evidence: most at the very step."""
    ends = [(item.before or 0.0, item.after or 0.0) for item in finding.evidence]
    return sum(abs(after - before) / max(abs(before), abs(after), 1e-12) for before, after in ends)


def _told(view: View) -> Finding | None:
    """Lines on sandboxes that fail come in numbers since a step, and since then the reward is lower or scoring waits
    for time-outs: where nothing of environments is measured, the log's own words are."""
    lines = failing_lines(view)
    if lines is None or policy_of(view).blow_up_idx is not None:
        return None
    if parts_at(view, lines.idx):
        return None
    lost = _lost_at(view, lines.idx)
    waits = view.contrast(SCORER, lines.idx, width=8, log=True)
    is_broken = waits is not None and _is_broken(waits)
    if lost is None and not is_broken:
        return None
    step = view.step_at(lines.idx)
    says = f"{num(lines.before)} lines a step before, {num(lines.after)} since, as: {lines.example[:160]}"
    evidence = [Evidence(metric="log", step=step, before=lines.before, after=lines.after, says=says)]
    if waits is not None and is_broken:
        evidence.append(of_contrast(view, waits, lines.idx, "scoring waits for them, or is refused at once"))
    if lost is not None:
        evidence.append(of_contrast(view, lost, lines.idx))
    return finding(
        title=TITLE + (SCORED if lost else ""),
        confidence=0.8,
        step=step,
        evidence=tuple(evidence),
        cost_reward=-lost.diff if lost is not None else None,
    )


def _lost_at(view: View, idx: int) -> Contrast | None:
    """The reward after a position against that before, where a good part is gone: over many steps, or over few of one
    that was rising."""
    for width in (40, 12):
        lost = view.contrast(reward_of(view).metric, idx, width=width)
        if lost is not None and lost.score <= -4 and -lost.diff >= LOST * (lost.before - lowest_reward(view)):
            return lost
    return None


MOST = 0.5
"""Share of calls or trajectories that fail in the end from which on little else matters."""


def _scorer_breaks(view: View) -> list[int]:
    """Positions at which scoring became many times longer or shorter."""
    breaks = (view.rise(SCORER), view.fall(SCORER, log=True))
    at = [b.idx for b in breaks if b is not None and b.score >= 5]
    if (fall := reward_of(view).fall) is not None:
        at.append(fall.idx)
    near = (i for idx in at for i in (idx, idx + 1))
    return [
        i for i in near if (c := view.contrast(SCORER, i, width=8, log=True)) is not None and _is_broken(c)
    ]


def _stopped(found: Stop) -> Finding:
    return finding(
        title="sandboxes are dead: so many trajectories failed that the run stopped",
        confidence=0.97,
        step=found.step,
        evidence=(found.evidence(),),
        action="restart the sandbox pool, then take the run up again: no failure was trained as zero",
    )


def _moments(view: View) -> list[int]:
    """Steps at which something of the environment or the reward broke."""
    moments = _scorer_breaks(view)
    reward = reward_of(view)
    if reward.fall is not None:
        moments.append(reward.fall.idx)
    for metric in (*ENV_FAILURES, CALLS[0], CALLS[-1]):
        found = view.rise(metric, log=metric in CALLS)
        if found is not None and found.score >= 5:
            moments.append(found.idx)
    for metric in (*_CAPACITY, TURNS, "env/turn_s/mean"):
        found = view.fall(metric)
        if found is not None and found.score >= 5:
            moments.append(found.idx)
    # A noisy series may date its break a step early: values of before would stand among those of after.
    return sorted({i for idx in moments for i in (idx, idx + 1)})


def _is_broken(c: Contrast) -> bool:
    """Seconds of a service that became much longer or much shorter at once."""
    return abs(c.score) >= 6 and not 0.5 <= c.ratio <= 2.0 and c.is_at_once


MANY = 0.1
"""Share of calls that fail, from nearly none, from which on they are those of sandboxes that are gone."""


def _fails_for_good(view: View, failed: Sequence[str], idx: int) -> bool:
    """Whether many calls of environments fail from a step on, at once and to the end, where hardly one did before."""
    for metric in failed:
        if metric not in ("rollout/sandbox_error_ratio", "rollout/timeout_sample_ratio"):
            continue  # trajectories are cut off for other reasons, too
        c, rise = view.contrast(metric, idx), view.rise(metric, log=False)
        lasts = rise is not None and rise.end_idx is None and abs(rise.idx - idx) <= 1
        if c is not None and lasts and c.is_at_once and c.score >= 10 and c.after >= max(MANY, 5 * c.before):
            return True
    return False


def _grows_on(view: View, metric: str, early: float) -> bool:
    """Whether a metric rises on over the rest of the run: its first quarter has less than a share of the end's rise."""
    rise = view.rise(metric, log=metric.startswith("env/turn_s"))
    return rise is not None and rise.growth >= 1.3 and rise.early_share < early and rise.end_idx is None


QUICK_STEPS = 8
"""Steps within which a pool is gone, beside the hundreds of steps of a leak or of a policy that changes."""


def _is_quick(view: View, metric: str) -> bool:
    """Whether a share of failures became that of most calls within some steps: as good as at once."""
    rise = view.rise(metric, log=False) if metric.endswith(("frac", "ratio")) else None
    return (
        rise is not None
        and rise.late >= MOST
        and rise.late >= 5 * rise.before
        and rise.rise_steps <= QUICK_STEPS
    )


HALF = 0.5
"""Share of a source's reward whose loss at once is no luck."""


def _lost_of_a_source(view: View, idx: int) -> Contrast | None:
    """The reward of the one source that lost half of it and more at a position: what needs a sandbox is one of many."""
    train, held_out = sources_of(view)
    lost = [
        c
        for metric in (train or held_out).values()
        if (c := view.contrast(metric, idx, width=20)) is not None
        and c.score <= -4
        and -c.diff >= HALF * c.before
    ]
    return lost[0] if len(lost) == 1 else None


@dataclass(frozen=True, slots=True)
class Sign:
    """What one series did at a step, and what it counts for."""

    contrast: Contrast
    points: float
    says: str = ""


LEAST_POINTS = 3.0


def _at(view: View, idx: int) -> Finding | None:
    """What the environment, the reward and what follows from them say together at one position."""
    gap = view.contrast(GAP, idx, width=8) if gap_of(view) else None
    if gap is not None and gap.ratio >= 2.0 and gap.score >= 6:
        return None  # the engine itself changed
    failed = failures_rise(view, idx)
    signs = [*_of_the_environment(view, idx, failed)]
    if not signs:
        return None
    lost = view.contrast(reward_of(view).metric, idx, width=8)
    fell = lost is not None and _is_lost(view, lost, idx)
    if lost is not None and fell:
        signs.append(Sign(lost, 1.5))
    elif (of_one := _lost_of_a_source(view, idx)) is not None:
        signs.append(Sign(of_one, 1.5, "of one source, and the others go on"))
    for metric in ("timing_s/gen", "response_length/mean"):
        c = view.contrast(metric, idx, width=8)
        if c is not None and abs(c.score) >= 5 and not 0.8 <= c.ratio <= 1.25:
            signs.append(Sign(c, 0.5))
    if failed and _grows_on(view, failed[0], 0.6) and _grows_on(view, "env/turn_s/mean", 0.75):
        return None  # one by one, and calls wait ever longer: leaked, not dead
    weight = sum(sign.points for sign in signs) + 1.0 * _most_fail(view, failed, idx)
    at_once = float(np.mean([sign.contrast.is_at_once for sign in signs])) >= 0.5
    is_quick = any(_is_quick(view, metric) for metric in failed)  # what follows takes as many steps
    if weight < LEAST_POINTS or not (at_once or is_quick or _waits_for_less(view, idx)):
        return None
    return finding(
        title=TITLE + (SCORED if fell else ""),
        confidence=share(0.55 + 0.08 * weight),
        step=view.step_at(idx),
        evidence=tuple(of_contrast(view, sign.contrast, idx, sign.says) for sign in signs),
        cost_reward=max(0.0, -lost.diff) if lost is not None else None,
        action=f"{ACTION}; drop the updates since step {view.step_at(idx)} if they were scored",
    )


def _waits_for_less(view: View, idx: int) -> bool:
    """Whether generation takes longer from a position on though episodes and answers are shorter: calls that time out,
    one after the other; a policy that gives up early is quicker."""
    longer, *shorter = (
        view.contrast(metric, idx, width=8) for metric in ("timing_s/gen", TURNS, "response_length/mean")
    )
    waits = longer is not None and longer.score >= 5 and longer.ratio >= 1.2
    return waits and all(c is not None and c.score <= -5 and c.ratio <= 0.9 for c in shorter)


def _of_the_environment(view: View, idx: int, failed: Sequence[str]) -> Iterator[Sign]:
    """Its failures, the seconds of its calls and of scoring, what lives of it, and its turns."""
    for metric in failed[:3]:
        if (c := view.contrast(metric, idx)) is not None:
            yield Sign(c, 2.0 if metric == failed[0] else 0.5)
    for metric in CALLS:
        c = view.contrast(metric, idx, width=8, log=True)
        is_called = c is not None and max(c.before, c.after) >= SANDBOX_S
        if c is not None and is_called and abs(c.score) >= 5 and not 0.6 <= c.ratio <= 1.6:
            yield Sign(c, 1.5, "refused at once" if c.ratio < 1 else "waiting for time-outs")
            break
    c = view.contrast(SCORER, idx, width=8, log=True)
    if c is not None and _is_broken(c):
        yield Sign(c, 1.5, "scoring " + ("is refused at once" if c.ratio < 1 else "waits for time-outs"))
    for metric in _CAPACITY:
        c = view.contrast(metric, idx, width=8)
        if c is not None and c.score <= -5 and c.ratio <= 0.75:
            yield Sign(c, 2.0)
            if (few := too_few(view, idx)) is not None and (
                used := view.contrast(few, idx, width=8)
            ) is not None:
                yield Sign(used, 1.5, "all that are left are in use: fewer than were before")
            break
    c = view.contrast(TURNS, idx, width=8)
    if c is not None and c.score <= -5 and c.ratio <= 0.85:
        yield Sign(c, 1.5, "episodes end early")


def _is_lost(view: View, lost: Contrast, idx: int) -> bool:
    """Whether a good part of the reward went at a position, surely or as its own fall over the run tells."""
    ends = (view.contrast(metric, idx, width=8) for metric in (TURNS, "response_length/mean"))
    end_early = all(c is not None and c.score <= -8 and c.ratio <= 0.85 for c in ends)
    surely = -3.0 if end_early and not other_prompts(view, idx) else -5.0
    fall = reward_of(view).fall
    is_the_fall = fall is not None and abs(fall.idx - idx) <= 1
    return lost_reward(view, idx) >= LOST and (lost.score <= surely or is_the_fall)


def _most_fail(view: View, failed: Sequence[str], idx: int) -> bool:
    """Whether most calls or trajectories fail in the end, or many do for good where hardly one did before."""
    at_last = any(m.endswith(("frac", "ratio")) and view.last(m) >= MOST for m in failed)
    return at_last or _fails_for_good(view, failed, idx)
