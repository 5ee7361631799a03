"""The engine woke, or took a publication, with broken weights, and samples noise without an error.

At one step everything that depends on the engine breaks together: its logprobs have nothing to do with the
trainer's, rewards fall to the bottom, and lengths run to the limit or collapse. Stale or quantised weights do
much less than that.
"""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.signs.environments import failures_rise
from rollbook.diagnose.signs.gap import GAP, gap_of, metrics_of_gap
from rollbook.diagnose.signs.policy import is_broken_update
from rollbook.diagnose.signs.rewards import lost_reward, lowest_reward, reward_cost, reward_of
from rollbook.diagnose.signs.seconds import validations
from rollbook.diagnose.signs.versions import versions_of
from rollbook.diagnose.spells import follow
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_contrast, share

RULE = "silent_error_after_wake"
BROKEN = 3.5
"""Growth of the disagreement at once beyond which an engine no longer runs these weights."""
NOISE = 0.35
"""Correlation of both sides' probabilities below which they have nothing in common, whatever the reward says: on a task
that a bad policy solves as well as noise does, no reward is lost. Four-bit weights keep 0.75 and more."""


def judge(view: View) -> Finding | NotJudged | None:
    gap, reward = gap_of(view), reward_of(view)
    if gap is None and reward.metric is None:
        return NotJudged(
            rule=RULE,
            missing=("critic/rewards/mean", "training/rollout_probs_diff_mean"),
            lacks="gap of trainer and engine",
            collect="log rewards and the gap",
        )
    if (early := _in_first_steps(view)) is not None:
        return early
    if gap is None:
        return _without_gap(view)
    if (again := _for_single_steps(view)) is not None:
        return again
    rise = gap.rise
    if rise is None or rise.peak_ratio < BROKEN or rise.rise_steps > 3:
        return None
    lost = lost_reward(view, rise.idx)
    pearson = view.contrast("training/rollout_actor_probs_pearson_corr", rise.idx, width=8)
    unrelated = (pearson is not None and pearson.after < 0.6) or _is_far_apart(view, rise.idx)
    noise = pearson is not None and pearson.after < NOISE and pearson.before > 0.8
    changed = _changed_at(view, rise.idx)
    in_part = len(changed) >= 2 and (unrelated or rise.peak_ratio >= FAR_OFF)
    # One change of the answers tells as much where rewards are lost by it, and both sides are not only scaled.
    is_scaled = pearson is not None and pearson.after >= SCALED
    in_part |= len(changed) == 1 and rise.peak_ratio >= FAR_OFF and lost >= 0.15 and not is_scaled
    in_part |= rise.peak_ratio >= IN_SOME and _loses_at_once(view, rise.idx, lost) and not is_scaled
    # Some that run to their limit are noise; numerics change all of them a little.
    in_part |= "response_length/clip_ratio" in changed and rise.peak_ratio >= IN_SOME and not is_scaled
    if not (lost >= 0.4 or (unrelated and lost >= 0.15) or noise or in_part):
        return None
    return _finding(view, rise.idx, 0.95 if (lost >= 0.4 and rise.peak_ratio >= 5) or noise else 0.8)


FAR_APART = (
    ("rollout_corr/k3_kl", 1.0),
    ("rollout_corr/kl", 1.0),
    ("training/rollout_probs_diff_mean", 0.22),
)
"""Nats a token, or differences of probability, that no numerics of the same weights come to."""


def _is_far_apart(view: View, idx: int) -> bool:
    return any(view.level(metric, idx, idx + 8) >= least for metric, least in FAR_APART)


FAR_OFF = 8.0
"""Growth of the disagreement at once beyond any numerics, where answers change with it."""
IN_SOME = 5.0
"""That of a few answers that are noise among many that are not."""
SCALED = 0.97
"""Correlation from which on both sides differ by a temperature alone, which changes answers, too."""
_OF_ANSWERS: tuple[tuple[str, float, float], ...] = (
    # metric, least growth at once, least difference
    ("response_length/clip_ratio", 4.0, 0.03),
    ("response_length/mean", 1.35, 0.0),
    ("actor/entropy", 1.5, 0.0),
)


def _loses_at_once(view: View, idx: int, lost: float) -> bool:
    """Whether a good part of the reward went in the very step, at one hand-over, and some of the answers' lengths or
    entropy with it: numerics alone lose it over many updates."""
    reward = view.contrast(reward_of(view).metric, idx, width=8)
    if reward is None or lost < LOST_AT_ONCE or reward.score > -6 or not reward.is_at_once:
        return False
    others = (view.contrast(metric, idx, width=8) for metric, _, _ in _OF_ANSWERS)
    return any(c is not None and c.ratio >= 1.15 and c.score >= 5 and c.is_at_once for c in others)


LOST_AT_ONCE = 0.15
"""Share of the reward."""


def _changed_at(view: View, idx: int) -> list[str]:
    """What of the answers themselves changed at once: engines that compute a little otherwise write the same ones."""
    found = []
    for metric, ratio, least in _OF_ANSWERS:
        c = view.contrast(metric, idx, width=8)
        if c is None or c.score < 5 or not c.is_at_once:
            continue
        if c.ratio >= ratio and c.diff >= least:
            found.append(metric)
    return found


def _for_single_steps(view: View) -> Finding | None:
    """Steps, one or two at a time, in which the engine has nothing to do with the trainer and its answers differ; the
    next hand-over mends it. After each validation: the engine slept and woke there."""
    spells = view.spells(GAP, least=np.log(BROKEN))
    if spells is None or spells.median_length > 2 or spells.ratio < BROKEN:
        return None
    bottom = lowest_reward(view)
    reward = view.beside(reward_of(view).metric, spells)
    lost = 0.0 if reward is None or reward.before <= bottom else -reward.diff / (reward.before - bottom)
    answers = [
        c
        for metric, ratio, least in _OF_ANSWERS
        if (c := view.beside(metric, spells)) is not None
        and c.ratio >= ratio
        and c.diff >= least
        and c.score >= 4
    ]
    if not (lost >= 0.15 and answers) and len(answers) < 2 and lost < 0.4:
        return None
    after = follow(spells, validations(view))
    when = "in the step after each validation" if after else f"in {spells.num_hits} single steps"
    evidence = []
    for metric in metrics_of_gap(view)[:2]:
        c = view.beside(metric, spells)
        if c is not None:
            evidence.append(of_contrast(view, c, spells.first, f"{when}, against the steps beside them"))
    evidence += [
        of_contrast(view, c, spells.first, "in the same steps") for c in (*answers, reward) if c is not None
    ]
    return Finding(
        rule=RULE,
        title=f"the engine samples noise {when}",
        area="implementation",
        confidence=0.93 if after else 0.85,
        step=view.step_at(spells.first),
        evidence=tuple(evidence),
        cost_reward=max(0.0, -reward.diff) if reward is not None else None,
        action="publish the weights again after the engine woke, before it samples (with sleep level 2 they are gone), "
        "and drop its KV cache; leave those steps' samples out",
        next_check="after one sleep and wake without a publication, decode one greedy prompt and compare digests",
    )


def _in_first_steps(view: View) -> Finding | None:
    """Broken by the second or third hand-over: one or two good steps, then noise for the rest of the run."""
    gap = gap_of(view)
    metric = reward_of(view).metric
    if gap is None or metric is None or view.n < 8:
        return None
    for good in (4, 3, 2, 1):
        before, after = (
            float(np.nanmax(view.values[GAP][:good], initial=0.0)),
            view.level(GAP, good, good + 12),
        )
        reward_before, reward_after = view.level(metric, 0, good), view.level(metric, good, good + 12)
        bottom = lowest_reward(view)
        gone = reward_before > bottom and reward_after - bottom <= 0.5 * (reward_before - bottom)
        is_bad = gone and (gap.num_bad or gap.num_bad_late)
        if after >= BROKEN * before > 0.0 and (
            is_bad or _has_come_apart(view, good) or _are_cut_off(view, good)
        ):
            return _finding(view, good, 0.9)
    return None


def _has_come_apart(view: View, good: int) -> bool:
    """Whether both sides agreed in the first steps, and have nothing to do with each other since."""
    pearson = "training/rollout_actor_probs_pearson_corr"
    if view.level(pearson, 0, good) > 0.9 and view.level(pearson, good, good + 12) < NOISE:
        return True
    return any(
        view.level(metric, good, good + 12) >= least > 10 * view.level(metric, 0, good)
        for metric, least in FAR_APART
    )


def _are_cut_off(view: View, good: int) -> bool:
    """Whether answers run to their limit that did not in the first steps, of samples as fresh as those were."""
    mean = versions_of(view).mean
    if mean is not None and view.level(mean, good, good + 12) >= view.level(mean, 0, good) + 0.5:
        return False  # the pipeline fills, and the gap with it
    metric, ratio, least = _OF_ANSWERS[0]
    before, after = view.level(metric, 0, good), view.level(metric, good, good + 12)
    return after - before >= least and after >= ratio * before


def _without_gap(view: View) -> Finding | None:
    reward = reward_of(view)
    if reward.fall is None or reward.drop_frac < 0.7:
        return None
    idx = reward.fall.idx
    if is_broken_update(view, idx):
        return None  # the weights themselves are broken
    shifted = [
        c
        for metric in ("response_length/mean", "response_length/clip_ratio", "actor/entropy")
        if (c := view.contrast(metric, idx, width=8)) is not None
        and abs(c.score) >= 8
        and abs(c.jump) >= 0.5 * abs(c.diff)
        and not 0.6 <= c.ratio <= 1.7
    ]
    if len(shifted) < 2 or failures_rise(view, idx):
        return None
    return _finding(view, idx, 0.6)


def _finding(view: View, idx: int, confidence: float) -> Finding:
    step = view.step_at(idx)
    evidence: list[Evidence] = []
    metrics = (
        *metrics_of_gap(view)[:2],
        reward_of(view).metric,
        "response_length/mean",
        "response_length/clip_ratio",
    )
    for metric in metrics:
        if metric is None:
            continue
        c = view.contrast(metric, idx, width=8)
        if c is not None and abs(c.score) >= 3:
            evidence.append(of_contrast(view, c, idx))
        elif c is None and metric in view.values:
            before, after = view.level(metric, 0, idx), view.level(metric, idx, idx + 12)
            if np.isfinite(before) and np.isfinite(after):
                says = f"{num(before)} before step {step}, {num(after)} after"
                evidence.append(Evidence(metric=metric, step=step, before=before, after=after, says=says))
    return Finding(
        rule=RULE,
        title="the engine samples noise since one hand-over of weights",
        area="implementation",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        cost_reward=reward_cost(view, idx, width=8),
        action=f"stop; take the run up from the checkpoint before step {step} with freshly started "
        "engines and sleep level 1",
        next_check="after one sleep and wake, compare every tensor's digest with the trainer's and "
        "decode one greedy prompt",
    )
