"""Sandboxes died: trajectories that need them fail, at once, as failures or (worse) as rewards of zero.

The policy did not change at that step: the gap, the entropy and the other sources stay what they were, while
the environment's own signals (failures, time-outs, seconds a turn, turns, active sandboxes) break together.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rollbook.diagnose.changes import running_median, spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.environments import (
    ENV_FAILURES,
    ENV_LOAD,
    SANDBOX_S,
    TURNS,
    failing_lines,
    failure_kinds_of,
    failures_rise,
)
from rollbook.diagnose.signs.gap import GAP, gap_of
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import (
    Moved,
    Reward,
    lost_reward,
    lowest_reward,
    other_prompts,
    reward_decline,
    reward_of,
    sources_of,
)
from rollbook.diagnose.stops import Stop, stopped_by
from rollbook.diagnose.view import Contrast, View
from rollbook.diagnose.wording import num, of_break, of_contrast, share

RULE = "dead_sandbox_pool"
ACTION = "restart the sandbox pool and take failed trajectories out of the batch instead of scoring them 0"
CHECK = "run one sandbox by hand; then look at failures by class and source for what the rest is"

_CAPACITY = ("env/num_active", "env/capacity", "env/num_alive")
SCORER = "timing_s/reward"
"""Seconds of scoring: code is scored in sandboxes, which then time out or refuse."""


def judge(view: View) -> Finding | NotJudged | None:
    stopped = stopped_by(view, RULE)
    if stopped is not None:
        return _stopped(view, stopped)
    known = [m for m in (*ENV_LOAD, *ENV_FAILURES, TURNS, *_CAPACITY) if view.has(m)]
    is_agentic = any(m.startswith("env/") for m in known) or view.level(TURNS) > 2.2
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
    found = [finding for idx in _moments(view) if (finding := _at(view, idx)) is not None]
    best = max(found, key=lambda finding: finding.confidence, default=None)
    if best is not None:
        # The first of the surest, at the one of the steps around it that parts before and after.
        beside = [f for f in found if f.confidence == best.confidence and 0 <= f.step - best.step <= BESIDE]
        return max(beside, key=_parted)
    return _one_by_one(view) or _ever_fewer(view) or told


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
    if gap_of(view) is not None and view.moved(GAP, lines.idx, 1, factor=2.0):
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
    return Finding(
        rule=RULE,
        title="sandboxes are dead: what needs them fails" + (" and counts as reward zero" if lost else ""),
        area="data",
        confidence=0.8,
        step=step,
        evidence=tuple(evidence),
        cost_reward=-lost.diff if lost is not None else None,
        action=ACTION,
        next_check=CHECK,
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
FEWER_TURNS = 0.7
"""Turns of the end over those at first from which on episodes end early."""


def _ever_fewer(view: View) -> Finding | None:
    """Episodes end ever earlier, their calls return ever sooner, and rewards are lost with them, while the policy stays
    what it was: ever more of the sandboxes refuse."""
    seconds = "env/turn_s/mean"
    metric = reward_of(view).metric
    if metric is None or view.count(seconds) < 24 or view.count(TURNS) < 24 or view.level(TURNS) <= 2.2:
        return None
    part = max(5, view.n // 8)
    turns, calls = ((view.level(m, 0, part), view.last(m, part)) for m in (TURNS, seconds))
    lost = reward_decline(view)
    if turns[1] > FEWER_TURNS * turns[0] or calls[1] > FEWER_TURNS * calls[0] or lost is None:
        return None
    smooth = [running_median(np.nan_to_num(view.values[m], nan=view.level(m)), 7) for m in (TURNS, metric)]
    if spearman(*smooth) < 0.6 or policy_of(view).blow_up_idx is not None:
        return None
    entropy, _ = view.trend("actor/entropy")
    if not 0.8 <= entropy <= 1.25 or (gap_of(view) is not None and view.trend(GAP)[0] >= 1.5):
        return None
    begin = view.fall(TURNS)
    step = begin.step if begin is not None else lost.step
    evidence = (
        Evidence(
            metric=TURNS,
            step=step,
            before=turns[0],
            after=turns[1],
            says=f"{num(turns[0])} to {num(turns[1])}",
        ),
        Evidence(
            metric=seconds,
            step=step,
            before=calls[0],
            after=calls[1],
            says=f"{num(calls[0])} s to {num(calls[1])} s",
        ),
        Evidence(
            metric=lost.metric,
            step=lost.step,
            before=lost.before,
            after=lost.after,
            says=f"{num(lost.before)} at its best, {num(lost.after)} now, and goes with the turns",
        ),
    )
    return Finding(
        rule=RULE,
        title="sandboxes die in part: ever more episodes end early and score nothing",
        area="data",
        confidence=0.78,
        step=step,
        evidence=evidence,
        cost_reward=max(0.0, lost.before - lost.after),
        action=ACTION,
        next_check=CHECK,
    )


DEADLINE = 0.02
"""Spread of the longest calls, over their median, below which a time-out ends them all: it is nobody's own length."""


def _one_by_one(view: View) -> Finding | None:
    """Calls grow to many times their seconds while the longest of them, which had lengths of their own, all end at one
    time-out; rewards are lost, and the host is no fuller: nothing leaks, what is called is gone."""
    mean, longest, held = "env/turn_s/mean", "env/turn_s/max", "perf/cpu_memory_used_gb"
    rise, top = view.rise(mean), view.rise(longest)
    if rise is None or top is None or rise.end_idx is not None or rise.ratio < 2.5 or rise.score < 6:
        return None
    before = view.values[longest][: top.idx]
    after = view.values[longest][top.idx + 3 :]
    before, after = finite(before), finite(after)
    if len(before) < 8 or len(after) < 12 or _spread(before) < 2 * DEADLINE or _spread(after) > DEADLINE:
        return None
    if float(np.median(after)) < 1.2 * float(np.median(before)) or view.trend(held)[0] >= 1.1:
        return None
    lost = _lost_since(view, rise.idx)
    if lost is None or (gap_of(view) is not None and view.moved(GAP, rise.idx, 1, factor=2.0)):
        return None
    says = f"the longest call had a length of its own; now all end at {num(float(np.median(after)))} s, a time-out"
    evidence = (
        of_break(rise, "ever more calls wait for time-outs"),
        Evidence(
            metric=longest,
            step=top.step,
            before=float(np.median(before)),
            after=float(np.median(after)),
            says=says,
        ),
        Evidence(
            metric=lost.metric,
            step=lost.step,
            before=lost.before,
            after=lost.after,
            says=f"{num(lost.before)} before, {num(lost.after)} now: what times out scores nothing",
        ),
    )
    return Finding(
        rule=RULE,
        title="sandboxes die one by one: ever more calls run into their time-out",
        area="data",
        confidence=0.8,
        step=min(rise.step, top.step),
        evidence=evidence,
        cost_reward=max(0.0, lost.before - lost.after),
        action=ACTION,
        next_check=CHECK,
    )


LOST = 0.12
"""Share of the reward that must be gone by the end of the log."""


def _lost_since(view: View, idx: int) -> Moved | None:
    """The reward of the last steps against that just before a position, where it is lower beyond its noise."""
    metric = reward_of(view).metric
    if metric is None:
        return None
    width = max(10, view.n // 10)
    before, after = view.level(metric, idx - width, idx), view.last(metric, width)
    error = 1.25 * view.noise_before(metric, view.n) * float(np.sqrt(2 / width))
    if not before - after >= max(LOST * before, 4.0 * error):
        return None
    return Moved(metric, view.step_at(idx), before, after)


def _spread(values: Series) -> float:
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
    return float((high - low) / max(float(middle), 1e-12))


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


def _stopped(view: View, found: Stop) -> Finding:
    return Finding(
        rule=RULE,
        title="sandboxes are dead: so many trajectories failed that the run stopped",
        area="data",
        confidence=0.97,
        step=found.step,
        evidence=(found.evidence(),),
        action="restart the sandbox pool, then take the run up again: no failure was trained as zero",
        next_check="run one sandbox by hand; then look at failures by class and source for what the rest is",
    )


def _moments(view: View) -> list[int]:
    """Steps at which something of the environment or the reward broke."""
    moments = _scorer_breaks(view)
    reward = reward_of(view)
    if reward.fall is not None:
        moments.append(reward.fall.idx)
    for metric in (*ENV_FAILURES, "env/turn_s/mean"):
        found = view.rise(metric, log=metric.startswith("env/turn_s"))
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


def _is_the_fall(reward: Reward, idx: int) -> bool:
    """Whether the reward's own fall, told from the whole run, is at a position."""
    return reward.fall is not None and abs(reward.fall.idx - idx) <= 1


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


def _at(view: View, idx: int) -> Finding | None:
    gap = view.contrast(GAP, idx, width=8) if gap_of(view) else None
    if gap is not None and gap.ratio >= 2.0 and gap.score >= 6:
        return None  # the engine itself changed
    weight = 0.0
    evidence: list[Evidence] = []
    is_env = False
    sudden: list[bool] = []

    def add(c: Contrast, points: float, env: bool, says: str = "") -> None:
        nonlocal weight, is_env
        weight += points
        is_env |= env
        sudden.append(c.is_at_once)
        evidence.append(of_contrast(view, c, idx, says))

    failed = failures_rise(view, idx)
    for metric in failed[:3]:
        c = view.contrast(metric, idx)
        assert c is not None
        add(c, 2.0 if metric == failed[0] else 0.5, True)
    if any(m.endswith(("frac", "ratio")) and view.last(m) >= MOST for m in failed) or _fails_for_good(
        view, failed, idx
    ):
        weight += 1.0
    for metric in ("env/turn_s/mean", "env/turn_s/p99"):
        c = view.contrast(metric, idx, width=8, log=True)
        if (
            c is not None
            and max(c.before, c.after) >= SANDBOX_S
            and abs(c.score) >= 5
            and not 0.6 <= c.ratio <= 1.6
        ):
            add(c, 1.5, True, "refused at once" if c.ratio < 1 else "waiting for time-outs")
            break
    c = view.contrast(SCORER, idx, width=8, log=True)
    if c is not None and _is_broken(c):
        add(c, 1.5, True, "scoring " + ("is refused at once" if c.ratio < 1 else "waits for time-outs"))
    for metric in _CAPACITY:
        c = view.contrast(metric, idx, width=8)
        if c is not None and c.score <= -5 and c.ratio <= 0.75:
            add(c, 2.0, True)
            break
    c = view.contrast(TURNS, idx, width=8)
    if c is not None and c.score <= -5 and c.ratio <= 0.85:
        add(c, 1.5, True, "episodes end early")
    shorter = view.contrast("response_length/mean", idx, width=8)
    ends_early = all(x is not None and x.score <= -8 and x.ratio <= 0.85 for x in (c, shorter))
    surely = -3.0 if ends_early and not other_prompts(view, idx) else -5.0
    reward = reward_of(view)
    lost = view.contrast(reward.metric, idx, width=8)
    share_lost = lost_reward(view, idx)
    fell = lost is not None and share_lost >= 0.12 and (lost.score <= surely or _is_the_fall(reward, idx))
    if lost is not None and fell:
        add(lost, 1.5, False)
    elif (of_one := _lost_of_a_source(view, idx)) is not None:
        add(of_one, 1.5, False, "of one source, and the others go on")
    if not is_env:
        return None
    for metric in ("timing_s/gen", "response_length/mean"):
        c = view.contrast(metric, idx, width=8)
        if c is not None and abs(c.score) >= 5 and not 0.8 <= c.ratio <= 1.25:
            add(c, 0.5, False)
    if failed and _grows_on(view, failed[0], 0.6) and _grows_on(view, "env/turn_s/mean", 0.75):
        return None  # one by one, and calls wait ever longer: leaked, not dead
    is_quick = any(_is_quick(view, metric) for metric in failed)  # what follows takes as many steps
    if weight < 3.0 or (sum(sudden) < 0.5 * len(sudden) and not is_quick):
        return None
    return Finding(
        rule=RULE,
        title="sandboxes are dead: what needs them fails" + (" and counts as reward zero" if fell else ""),
        area="data",
        confidence=share(0.55 + 0.08 * weight),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_reward=max(0.0, -lost.diff) if lost is not None else None,
        action="restart the sandbox pool and take failed trajectories out of the batch instead of scoring them 0; "
        f"drop the updates since step {view.step_at(idx)} if they were scored",
        next_check="run one sandbox by hand; then look at failures by class and source for what the rest is",
    )
