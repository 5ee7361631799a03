"""Engine and trainer compute different probabilities at the same weights: other kernels or dtypes, quantised weights,
another temperature, routing that differs.

What singles it out: the disagreement is there from the first step, or appears at once and then stays; it does
not grow with the steps since a publication, and does not follow staleness.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.signs.gap import GAP, accelerates, far_from_start, gap_of, metrics_of_gap, usual_level
from rollbook.diagnose.signs.gap_causes import moves_the_gap, rise_is_explained, trails_the_policy
from rollbook.diagnose.signs.publications import publications_of
from rollbook.diagnose.signs.seconds import is_of_the_schedule
from rollbook.diagnose.signs.versions import STALENESS, has_ages
from rollbook.diagnose.spells import tooth_of
from rollbook.diagnose.stops import Stop, stopped_by
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import collect_gap, gap_in_spells, num, of_contrast, share

RULE = "engine_mismatch"
ACTION = (
    "bring both sides to the same numerics (dtype, attention kernel, temperature and top-p, routing replay for "
    "MoE; no quantised engine weights), or keep the difference and train with truncated importance weights"
)
CHECK = "score one short greedy prompt on both sides with the engine's own weights and find where they part"
finding = partial(Finding, rule=RULE, area="implementation", action=ACTION, next_check=CHECK)
TEMPERATURE = (
    "compare temperature, top-p and top-k of the engine's requests with what the trainer divides its logits by, and "
    "whether the engine returns logprobs before or after them"
)
_PROPORTION: tuple[tuple[str, str, float], ...] = (
    # correlation of both sides over the sampled tokens; how far apart they are; from where on noise would show in it
    ("training/logprob_gap/pearson", "training/logprob_gap/mean", 0.2),
    ("training/rollout_actor_probs_pearson_corr", "training/rollout_probs_diff_mean", 0.03),
)
IN_PROPORTION = 0.98
"""Correlation of two sides that are far apart and yet order tokens alike: 0.99 in real runs at one and a half times the
temperature, 0.89 at the same distance with weights rounded to four bits."""
TELLS_AFTER = 10
"""Steps after which a gap that stays is told from one that grows with the steps since a missed publication."""
TOO_EARLY = (
    f"read it again in {TELLS_AFTER} steps: a gap that grows with them is a publication that lost a part, and stays "
    "where it is for other numerics; compare the digests of one replica with the trainer's meanwhile"
)
OR_OLDER = (
    "this log has no versions of samples: those that are some versions older from that step on look alike, and only an "
    "asynchronous run has such"
)
LEAST_PAST = 6
"""Steps that a level must have had before it can be said to have changed: samples age in the first steps of any
asynchronous run."""


def judge(view: View) -> Finding | NotJudged | None:
    if (refused := stopped_by(view, RULE)) is not None:
        return _refused(view, refused)
    if gap_of(view) is None:
        return NotJudged(
            rule=RULE,
            missing=("training/logprob_gap/mean or training/rollout_probs_diff_mean or rollout_corr/kl",),
            lacks="gap of trainer and engine",
            collect=collect_gap(view),
        )
    for way in (_rises, _in_spells, _weighed_away):
        if (found := way(view)) is not None:
            return found
    surely = far_from_start(view)
    return _disagree(view, 0, surely, "from the first step") if surely else None


def _rises(view: View) -> Finding | None:
    """The gap rises and stays, or was wrong from the start and grows, or feeds on itself; and neither older samples,
    the policy's own steps nor a missing publication are why."""
    gap, absent = gap_of(view), publications_of(view).absent_since
    rise = gap.rise if gap is not None else None
    if gap is None or rise is None or rise.peak_ratio < 1.6 or rise.score < 6:
        return None
    no_sync = absent is not None and view.near(absent, rise.idx, least=8)
    if no_sync or rise_is_explained(view, rise):
        return None
    if rise.is_ramp and gap.num_fine == 0 and gap.num_bad:
        return _disagree(view, 0, 0.7, "from the first step, and grows")
    if rise.is_ramp and accelerates(view, rise):
        return _disagree(view, view.foot(rise), 0.75, "ever more and ever faster: it feeds on itself")
    if rise.is_ramp and trails_the_policy(view, rise):
        return _disagree(
            view, view.foot(rise), 0.75, "ever more, and by less than the policy moves: it is published"
        )
    if rise.is_ramp or rise.idx < LEAST_PAST:
        return None
    if view.n - rise.idx < TELLS_AFTER:
        return _disagree(view, rise.idx, 0.6, "since a few steps", check=f"{TOO_EARLY}; {CHECK}")
    check = CHECK if has_ages(view) else f"{CHECK}; {OR_OLDER}"
    confidence = 0.9 if rise.peak_ratio >= 2 else 0.75
    return _disagree(view, rise.idx, confidence, "at once, and stays", check=check)


WEIGHT = "rollout_corr/rollout_is_mean"
MOST_WEIGHT = 0.5
"""Mean importance weight below which most of a gradient is weighed away."""
LEAST_KL = 0.003
"""Nats a token that the trainer must find the engine's own tokens too unlikely by: ten times what bfloat16 brings."""


def _weighed_away(view: View) -> Finding | None:
    """Importance weights of whole sequences that are far below one on average. Over what the engine sampled they
    average one at equal policies, however noisy; the logarithm of a smaller mean, by the token, is the least that the
    trainer's policy is away from the engine's. Few nats of a very long sequence are its scatter."""
    length = view.level("response_length/mean")
    weights = view.values.get(WEIGHT)
    if weights is None or view.count(WEIGHT) < 5 or not length > 1:
        return None
    third = max(2, view.n // 3)
    ends = (view.level(WEIGHT, 0, third), view.level(WEIGHT, view.n - third))
    usual = view.level(WEIGHT)
    if not 0.0 < usual <= MOST_WEIGHT or not max(ends) <= MOST_WEIGHT:
        return None
    nats = float(-np.log(usual)) / length
    if nats < LEAST_KL:
        return None
    says = f"{num(usual)} on average over sequences, not 1: {num(nats)} nats a token at least"
    return finding(
        title="the trainer finds the engine's own tokens too unlikely from the first step: weights far below one",
        confidence=0.7,
        step=view.step_at(0),
        evidence=(Evidence(metric=WEIGHT, step=view.step_at(0), before=1.0, after=usual, says=says),),
        action=f"{ACTION}; until then every gradient is smaller by that factor",
    )


APART = 3.0
"""Gap in the steps of a spell over that beside them from which on no noise of numerics is it."""


def _in_spells(view: View) -> Finding | None:
    """Stretches of steps in which the gap is several times the usual at once, and at once no longer: another kernel or
    dtype is at work in them. A publication that is missing would let it grow, and broken weights take the reward."""
    spells = view.spells(GAP, least=float(np.log(APART)))
    if spells is None or spells.median_length < 2 or is_of_the_schedule(view, spells):
        return None
    if tooth_of(view.values[GAP], spells).at_once < 0.7:
        return None
    if view.rises_beside((*moves_the_gap(view), ("response_length/clip_ratio", 2.0)), spells, score=4):
        return None
    where = f"in {len(spells.stretches)} stretches"
    evidence = gap_in_spells(
        view, spells, 3, lambda c: f"{num(c.after)} {where}, {num(c.before)} beside them, none between"
    )
    return finding(
        title="engine and trainer disagree at the same weights, in stretches of steps",
        confidence=0.8,
        step=view.step_at(spells.first),
        evidence=tuple(evidence),
        next_check=f"what differs in those steps (shapes, batch sizes, a kernel that is chosen by them); then {CHECK}",
    )


def _refused(view: View, found: Stop) -> Finding:
    """The probe after a publication held engine against trainer and let no replica serve."""
    return finding(
        title="engine and trainer disagree at the same weights: the probe refused every replica",
        confidence=0.97,
        step=found.step,
        evidence=found.evidence_with(view, "probe_failed"),
    )


def _disagree(view: View, idx: int, confidence: float, when: str, *, check: str = CHECK) -> Finding:
    evidence: list[Evidence] = []
    step = view.step_at(idx)
    for metric in metrics_of_gap(view)[:4]:
        c = view.contrast(metric, idx, width=20) if idx else None
        if c is not None:
            evidence.append(of_contrast(view, c, idx))
        else:
            level = view.level(metric, 0, max(5, view.n // 10))
            usual = usual_level(metric)
            says = f"{num(level)} from the first steps on; usual is {num(usual)} or better"
            evidence.append(Evidence(metric=metric, step=step, before=usual, after=level, says=says))
    lag = view.level(f"{STALENESS}/mean")
    if np.isfinite(lag):
        says = f"staleness {num(lag)} does not explain it"
        evidence.append(Evidence(metric=f"{STALENESS}/mean", step=step, after=lag, says=says))
    title, action = f"engine and trainer disagree at the same weights, {when}", ACTION
    if (proportional := _in_proportion(view, idx)) is not None:
        evidence.insert(0, proportional)
        title, action = f"{title}, as at another temperature", f"{TEMPERATURE}; else {ACTION}"
    return finding(
        title=title,
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        action=action,
        next_check=check,
    )


def _in_proportion(view: View, idx: int) -> Evidence | None:
    """Both sides are far apart and yet correlated: another temperature divides every logit alike, what rounds or
    computes otherwise scatters them."""
    for correlation, distance, least in _PROPORTION:
        if view.level(distance, idx) >= least and (alike := view.level(correlation, idx)) >= IN_PROPORTION:
            says = f"{num(alike)} at that distance: both sides order the tokens alike, one is sharper"
            return Evidence(metric=correlation, step=view.step_at(idx), after=alike, says=says)
    return None
