"""A mismatch of engine and trainer that feeds on itself until a loss is no longer a number.

The disagreement grows, its tail faster than its mean, gradients spike, and then NaN. A learning rate that is
too high ends in NaN as well, but then the policy's own steps grow first and the gap follows.
"""

from __future__ import annotations

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.signs.gap import gap_of
from rollbook.diagnose.signs.gap_causes import optimizer_explains, staleness_explains
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.stops import stopped_by
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import collect_gap, num, of_break, share

RULE = "mismatch_to_nan"


def judge(view: View) -> Finding | NotJudged | None:
    policy = policy_of(view)
    stopped = stopped_by(view, RULE)
    nan_step = policy.nan_step if stopped is None else stopped.step
    if nan_step is None:
        return None
    gap = gap_of(view)
    if gap is None:
        return NotJudged(
            rule=RULE,
            missing=("training/rollout_probs_diff_mean or rollout_corr/kl",),
            lacks="gap of trainer and engine",
            collect=f"losses are not finite and the gap was not logged: {collect_gap(view)}",
        )
    rise = gap.rise
    nan_idx = view.idx_of(nan_step)
    grew = rise is not None and rise.peak_ratio >= 1.5 and rise.idx < nan_idx and rise.score >= 5
    if rise is not None and grew and (optimizer_explains(view, rise) or staleness_explains(view, rise)):
        return None
    if not grew and not (gap.num_bad > gap.num_fine or gap.num_bad_late > gap.num_fine_late):
        return None
    begun = view.step_at(view.foot(rise)) if rise is not None and grew else nan_step
    evidence = [] if stopped is None else [stopped.evidence()]
    if policy.nan_step is not None:
        says = f"not finite from step {policy.nan_step} on: {', '.join(policy.nan_metrics)}"
        evidence.append(Evidence(metric=policy.nan_metrics[0], step=policy.nan_step, says=says))
    if rise is not None and grew:
        says = f"trainer and engine disagree {num(rise.peak_ratio)} times as much before that"
        evidence.insert(0, Evidence(metric="gap", step=begun, before=1.0, after=rise.peak_ratio, says=says))
    for metric in ("rollout_corr/chi2_token", "rollout_corr/rollout_is_max", "actor/grad_norm"):
        found = view.rise(metric)
        if found is not None and found.idx <= nan_idx and found.peak_ratio >= 2:
            evidence.append(of_break(found))
    return Finding(
        rule=RULE,
        title="a growing mismatch of engine and trainer ended in NaN",
        area="implementation",
        confidence=share(0.93 if grew else 0.7),
        step=begun,
        evidence=tuple(evidence),
        action=f"go back to a checkpoint before step {begun}, truncate the importance weights and mask what lies far "
        "outside, then bring both sides to the same numerics",
        next_check="does the gap at staleness 0 grow in a run with the learning rate at 0? Then it is the engine",
    )
