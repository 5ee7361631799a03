"""The engines went on sampling with old weights: a publication was skipped, lost a part, or never reached them.

What singles it out: the disagreement of trainer and engine *grows* with the steps since the last good
publication, while the policy's own step stays what it was. If the engines say their version, every sample
ages by one version a step; if their labels lie (they usually do), staleness says nothing. A publication that
carries nothing, or takes a fraction of its time, is the same fault seen from the other side.
"""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import noise_scale, running_median, spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.signs.gap import GAP, Gap, begins_fine, gap_of, metrics_of_gap
from rollbook.diagnose.signs.gap_causes import (
    is_of_old_samples,
    is_unexplained_ramp,
    moves_the_gap,
    optimizer_explains,
    staleness_explains,
)
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.publications import publications_of
from rollbook.diagnose.signs.rewards import reward_cost
from rollbook.diagnose.signs.versions import has_ages, versions_of
from rollbook.diagnose.spells import tooth_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import collect_gap, gap_in_spells, num, of_contrast, share

RULE = "missed_weight_sync"


def judge(view: View) -> Finding | NotJudged | None:
    gap, versions, publications = gap_of(view), versions_of(view), publications_of(view)
    if (
        gap is None
        and versions.newest is None
        and not versions.standing_replicas
        and publications.size is None
    ):
        return NotJudged(
            rule=RULE,
            missing=("training/rollout_probs_diff_mean or rollout_corr/kl", "replica/*/weight_version"),
            lacks="gap of trainer and engine",
            collect=collect_gap(view),
        )
    told = _told_by_versions(view)
    if told is not None:
        return told
    rise = gap.rise if gap else None
    absent = publications.absent_since
    if absent is not None:
        late = rise is not None and rise.idx <= absent + max(10, view.n // 8) and rise.idx >= absent - 8
        grew = gap is not None and (late or _grows_after(view, absent))
        if grew or (gap is None and publications.how in ("carry less", "change nothing", "fail")):
            return _finding(
                view, absent, rise if late else None, 0.95 if grew else 0.7, publications.absent_until
            )
    if gap is None:
        return None
    if (teeth := _in_teeth(view)) is not None:
        return teeth
    if rise is not None and is_unexplained_ramp(view, gap, rise) and not is_of_old_samples(view, rise):
        idx = rise.idx if rise.end_idx is not None else _foot(view, rise.idx)
        return _finding(view, idx, rise, 0.8 if gap.num_fine else 0.6, rise.end_idx)
    if _never_synced(view, gap):
        return _finding(view, 0, rise, 0.65, None)
    return None


def _told_by_versions(view: View) -> Finding | None:
    """Replicas or samples that say themselves that they stand still."""
    versions = versions_of(view)
    num_replicas = len(view.family("replica/", "/weight_version"))
    if versions.standing_replicas and len(versions.standing_replicas) == num_replicas:
        return _finding(view, versions.standing_since or 0, None, 0.97, None)
    if versions.all_standing_since is not None:
        return _finding(view, versions.all_standing_since, None, 0.95, None)
    return None


def _in_teeth(view: View) -> Finding | None:
    """The gap grows for some steps and is back at its floor in one, again and again: publications are skipped, and the
    next whole one mends it. Numerics come at once; staleness and the optimizer would show themselves."""
    spells = view.spells(GAP, least=np.log(1.5))
    if spells is None:
        return None
    tooth = tooth_of(view.values[GAP], spells)
    if not tooth.is_saw or len(tooth.heights) < 2:
        return None
    if view.rises_beside(moves_the_gap(view), spells, score=4):
        return None
    step = view.step_at(spells.first)
    how = f"{len(spells.stretches)} times it grows over {num(tooth.rise_steps)} steps and is back in one"
    evidence = gap_in_spells(
        view, spells, 2, lambda c: f"{how}: {num(c.before)} beside them, {num(c.after)} in them"
    )
    return Finding(
        rule=RULE,
        title="engines sample with old weights again and again: weight syncs are skipped",
        area="version",
        confidence=0.88,
        step=step,
        evidence=tuple(evidence),
        action="publish the full weights after every step and let a publication that is skipped or refused stop the "
        f"step; what was sampled in those stretches since step {step} is off-policy",
        next_check="the log of publications over one stretch: which were skipped, and did the digests of the replicas "
        "change?",
    )


def _grows_after(view: View, idx: int) -> bool:
    c = view.contrast(GAP, idx, width=20, skip=3)
    return c is not None and c.ratio >= 1.2 and c.score >= 4


def _never_synced(view: View, gap: Gap) -> bool:
    """The gap only ever grows, from a normal level on, while the reward stands."""
    if gap.overall_ratio < 2.5 or gap.steadiness < 0.9 or not (gap.num_fine or begins_fine(view)):
        return False
    rise = gap.rise
    if rise is not None and (not rise.is_ramp or rise.idx > 0.2 * view.n):
        return False  # it began later
    if rise is not None and (optimizer_explains(view, rise) or staleness_explains(view, rise)):
        return False
    if policy_of(view).nan_step is not None or policy_of(view).blow_up_idx is not None:
        return False
    first = view.level(GAP, 0, max(3, view.n // 20))
    early = view.level(GAP, view.n // 6, view.n // 3) / first
    midway = view.level(GAP, view.n // 3, view.n // 2) / first
    return bool(early >= 1.25 or (early >= 1.1 and midway >= 1.3))


def _finding(view: View, idx: int, rise: Break | None, confidence: float, end: int | None) -> Finding:
    versions, publications = versions_of(view), publications_of(view)
    evidence: list[Evidence] = []
    if end is not None and rise is not None and rise.idx == idx:
        idx = _left_at(view, idx, end)
    step = view.step_at(idx)
    if versions.standing_replicas:
        names = ", ".join(versions.standing_replicas)
        evidence.append(
            Evidence(
                metric="replica/*/weight_version", step=step, says=f"replicas {names} keep their version"
            )
        )
    if versions.all_standing_since is not None and versions.newest:
        evidence.append(
            Evidence(
                metric=versions.newest,
                step=view.step_at(versions.all_standing_since),
                before=view.level(versions.newest, 0, versions.all_standing_since),
                after=view.last(versions.newest, 3),
                says="even the newest sample ages by one version a step",
            )
        )
    for metric in metrics_of_gap(view)[:2]:
        c = view.contrast(metric, idx, width=30)
        if c is not None and end is not None:
            evidence.append(_peak(view, metric, idx, end, c.before))
        elif c is not None:
            evidence.append(of_contrast(view, c, idx, "grows with the steps since the last good publication"))
    if rise is not None:
        evidence.append(
            Evidence(
                metric="gap",
                step=rise.step,
                before=1.0,
                after=rise.peak_ratio,
                says=f"trainer and engine disagree {num(rise.peak_ratio)} times as much, growing "
                f"{num(rise.growth)} times over the first {min(40, view.n - rise.idx)} steps",
            )
        )
    for carried in (publications.size, publications.seconds):
        c = view.contrast(carried, idx)
        if c is not None and publications.absent_since is not None and c.ratio < 0.75:
            evidence.append(of_contrast(view, c, idx, f"publications {publications.how}"))
    return Finding(
        rule=RULE,
        title="engines sample with old weights: a weight sync was missed",
        area="version",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        cost_reward=reward_cost(view, idx, width=20),
        action="stop, publish the full weights to every replica, and take the run up again from the checkpoint "
        f"before step {step}; what was sampled since then is off-policy",
        next_check="compare a digest of the live parameters of one replica with the trainer's, then the logprobs "
        "of one short prompt on both sides" + ("" if has_ages(view) else f"; {LIKE_IT}"),
        until_step=view.step_at(end) if end is not None else None,
    )


LIKE_IT = (
    "this log has no versions of samples: of one replica of several that stands, or of samples that wait ever longer, "
    "the gap grows alike; log the weight version of every sample, and the next log tells"
)
FOOT_NOISES = 2.0
"""Noises over the lowest level up to which a smoothed gap is at its floor."""


def _foot(view: View, idx: int) -> int:
    """Where the gap left its floor, if it grows without a break from there to a position: a scan sees the bend of a
    slow ramp when it is well under way, and takes the part before it for what was usual."""
    known = np.flatnonzero(np.isfinite(view.values[GAP][: idx + 1]))
    if len(known) < 12:
        return idx
    smooth = running_median(np.log(view.values[GAP][known]), 5)
    noise = max(noise_scale(np.log(view.values[GAP][known])), 1e-9)
    floor = float(np.quantile(smooth[: max(5, len(smooth) // 2)], 0.25))
    at_floor = np.flatnonzero(smooth <= floor + FOOT_NOISES * noise)
    foot = int(at_floor[-1]) + 1 if len(at_floor) else 0
    way = smooth[foot:]
    grows = len(way) >= 8 and spearman(way, np.arange(len(way), dtype=np.float64)) >= 0.8
    return int(known[foot]) if grows else idx


def _left_at(view: View, idx: int, end: int) -> int:
    """First position of the way up to the peak of a gap that came and went: a scan may begin in the noise before it."""
    values = view.values[GAP][idx:end]
    before = view.level(GAP, max(0, idx - 40), idx)
    if len(values) < 2 or not np.isfinite(values).any() or not np.isfinite(before):
        return idx
    top = int(np.nanargmax(values))
    low = np.flatnonzero(~(values[:top] > before + 0.1 * (values[top] - before)))
    return idx + (int(low[-1]) + 1 if len(low) else 0)


def _peak(view: View, metric: str, idx: int, end: int, before: float) -> Evidence:
    """What a series that came and went was at its farthest."""
    values = view.values[metric][idx:end]
    away = np.where(np.isfinite(values), np.abs(values - before), -1.0)
    at = int(np.argmax(away))
    until = view.step_at(end)
    says = f"{num(before)} before, {num(float(values[at]))} at its peak in step {view.step_at(idx + at)}, back at step "
    says += f"{until}: grows with the steps since the last good publication"
    return Evidence(
        metric=metric, step=view.step_at(idx + at), before=before, after=float(values[at]), says=says
    )
