"""The engine woke, or took a publication, with broken weights, and samples noise without an error.

At one step everything that depends on the engine breaks together: its logprobs have nothing to do with the
trainer's, rewards fall to the bottom, and lengths run to the limit or collapse. Stale or quantised weights do
much less than that.
"""

from __future__ import annotations

import numpy as np

from rollbook.diagnose import signs
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.wording import num, of_contrast, share
from rollbook.diagnose.view import View

RULE = "silent_error_after_wake"
BROKEN = 3.5
"""Growth of the disagreement at once beyond which an engine no longer runs these weights."""
NOISE = 0.35
"""Correlation of both sides' probabilities below which they have nothing in common, whatever the reward says: on a task
that a bad policy solves as well as noise does, no reward is lost. Four-bit weights keep 0.75 and more."""


def judge(view: View) -> Finding | NotJudged | None:
    gap, reward = signs.gap(view), signs.reward(view)
    if gap is None and reward.metric is None:
        return NotJudged(
            rule=RULE,
            missing=("critic/rewards/mean", "training/rollout_probs_diff_mean"),
            collect="log rewards and the gap",
        )
    if (early := _in_first_steps(view)) is not None:
        return early
    if gap is None:
        return _without_gap(view)
    rise = gap.rise
    if rise is None or rise.peak_ratio < BROKEN or rise.rise_steps > 3:
        return None
    lost = signs.lost_reward(view, rise.idx)
    pearson = view.contrast("training/rollout_actor_probs_pearson_corr", rise.idx, width=8)
    unrelated = (pearson is not None and pearson.after < 0.6) or _is_far_apart(view, rise.idx)
    noise = pearson is not None and pearson.after < NOISE and pearson.before > 0.8
    if not (lost >= 0.4 or (unrelated and lost >= 0.15) or noise):
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


def _in_first_steps(view: View) -> Finding | None:
    """Broken by the second or third hand-over: one or two good steps, then noise for the rest of the run."""
    gap = signs.gap(view)
    metric = signs.reward(view).metric
    if gap is None or metric is None or view.n < 8:
        return None
    for good in (1, 2, 3, 4):
        before, after = view.level(signs.GAP, 0, good), view.level(signs.GAP, good, good + 12)
        reward_before, reward_after = view.level(metric, 0, good), view.level(metric, good, good + 12)
        bottom = signs.lowest_reward(view)
        gone = reward_before > bottom and reward_after - bottom <= 0.5 * (reward_before - bottom)
        if after >= BROKEN * before and gone and (gap.num_bad or gap.num_bad_late):
            return _finding(view, good, 0.85)
    return None


def _without_gap(view: View) -> Finding | None:
    reward = signs.reward(view)
    if reward.fall is None or reward.drop_frac < 0.7:
        return None
    idx = reward.fall.idx
    if signs.is_broken_update(view, idx):
        return None  # the weights themselves are broken
    shifted = [
        c
        for metric in ("response_length/mean", "response_length/clip_ratio", "actor/entropy")
        if (c := view.contrast(metric, idx, width=8)) is not None
        and abs(c.score) >= 8
        and abs(c.jump) >= 0.5 * abs(c.diff)
        and not 0.6 <= c.ratio <= 1.7
    ]
    if len(shifted) < 2 or signs.failures_rise(view, idx):
        return None
    return _finding(view, idx, 0.6)


def _finding(view: View, idx: int, confidence: float) -> Finding:
    step = view.step_at(idx)
    evidence: list[Evidence] = []
    gap, reward = signs.gap(view), signs.reward(view)
    metrics = (
        *(gap.metrics[:2] if gap else ()),
        reward.metric,
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
    c = view.contrast(reward.metric, idx, width=8)
    return Finding(
        rule=RULE,
        title="the engine samples noise since one hand-over of weights",
        area="implementation",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        cost_reward=None if c is None else max(0.0, -c.diff),
        action=f"stop; take the run up from the checkpoint before step {step} with freshly started "
        "engines and sleep level 1",
        next_check="after one sleep and wake, compare every tensor's digest with the trainer's and "
        "decode one greedy prompt",
    )
