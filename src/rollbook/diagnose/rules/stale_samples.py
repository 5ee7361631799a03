"""The trainer trains on samples that are several versions old, honestly labelled: generation does not keep up, or the
bound lets too much through. The disagreement of trainer and engine follows the staleness, up and down with it.

Samples that age by one version a step are those of engines that stand (`missed_weight_sync`, all of them;
`version_drift`, some). Without ages a gap that ramps up and then stays is taken for it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import running_median, spearman
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.gap import GAP, gap_of, metrics_of_gap
from rollbook.diagnose.signs.gap_causes import follows_staleness, is_of_old_samples, is_unexplained_ramp
from rollbook.diagnose.signs.policy import is_broken_update
from rollbook.diagnose.signs.rewards import reward_cost
from rollbook.diagnose.signs.versions import EVICTED, STALENESS, newest_follows, versions_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break, of_contrast, share

RULE = "stale_samples"
ACTION = (
    "bound the staleness (max_staleness_steps 1 or 2), admit fewer prompts ahead, or give generation "
    "more GPUs; until then "
    "use the decoupled loss with truncated importance weights"
)
CHECK = "at staleness 0 the gap must return to its floor: plot the gap against the staleness of the samples"


finding = partial(Finding, rule=RULE, area="async", action=ACTION, next_check=CHECK)


def judge(view: View) -> Finding | NotJudged | None:
    versions = versions_of(view)
    if versions.mean is None:
        return _by_the_gap_alone(view) or NotJudged(
            rule=RULE,
            missing=(f"{STALENESS}/mean",),
            lacks="versions or ages of samples",
            collect="log how many versions old the trained samples are (needed in asynchronous modes only)",
        )
    rise = versions.rise
    if versions.mean != versions.oldest and (always := _from_start(view, versions.mean)) is not None:
        return always
    if rise is None or rise.score < 5:
        return None
    # A slow rise is seen half-way up: what it was at first counts.
    at_first = min(rise.before, view.level(versions.mean, view.n // 50, max(rise.idx // 2, 5)))
    is_clear = rise.late >= rise.before + 1.0 and rise.peak_ratio >= 1.5
    begun = _from_its_beginning(view, versions.mean, rise, at_first)
    if not is_clear and not _apart_slowly(view, begun):
        return None
    if is_broken_update(view, rise.idx):
        return (
            None  # losses are no numbers by then: what the policy writes since is noise, and takes its time
        )
    standing = versions.all_standing_since
    if standing is None and versions.some_standing_since is not None and not newest_follows(view, rise.idx):
        standing = versions.some_standing_since
    if standing is not None or _fills_slowly(view, versions.mean, begun):
        return None  # engines stand still: another rule's; or it is the pipeline that fills
    harm = _harm(view, rise.idx, min(rise.rise_steps, 40))
    if not harm:  # a slow rise is seen late: look from further back
        back = min(30, rise.idx // 3)
        harm = _harm(view, rise.idx - back, back + min(rise.rise_steps, 40))
    is_large = rise.late >= max(at_first + 2.0, 2.5 * at_first) and rise.score >= 8
    if not harm and (not is_large or versions.mean == versions.oldest):
        return None
    together = spearman(view.values[versions.mean], view.values[GAP]) if gap_of(view) else 0.0
    return finding(
        title="samples are stale when they are trained",
        confidence=share(0.6 + 0.15 * bool(harm) + 0.05 * len(harm) + 0.1 * (together > 0.5)),
        step=begun.step,
        evidence=(of_break(begun, "versions behind the trainer"), *harm),
        cost_reward=reward_cost(view, begun.idx, width=20),
        until_step=view.step_at(rise.end_idx) if rise.end_idx is not None else None,
    )


def _by_the_gap_alone(view: View) -> Finding | None:
    """The gap ramps up and levels off, in a log that has no ages: samples wait longer, up to the bound."""
    gap = gap_of(view)
    rise = gap.rise if gap is not None else None
    if (
        gap is None
        or rise is None
        or not is_unexplained_ramp(view, gap, rise)
        or not is_of_old_samples(view, rise)
    ):
        return None
    contrasts = (
        view.contrast(metric, rise.idx, width=20, skip=rise.rise_steps) for metric in gap.metrics[:2]
    )
    return finding(
        title="samples are probably stale when they are trained: the gap grew and stays where it came to",
        confidence=0.7,
        step=rise.step,
        evidence=tuple(
            of_contrast(view, c, rise.idx, "over some steps, and then no further")
            for c in contrasts
            if c is not None
        ),
        cost_reward=reward_cost(view, rise.idx, width=20),
        next_check="log how many versions old the trained samples are: if they are fresh, a part of the weights is no "
        "longer published (compare digests of a replica's live parameters with the trainer's), or the engine computes "
        "otherwise",
    )


SLOWLY_OLDER, SLOWLY_APART = 2.5, 1.6
"""Staleness, and the gap with it, over what they were at first, from which on a slow rise is no pipeline that fills."""
LEFT = 0.15
"""Share of a rise by which a level has been left."""


def _from_its_beginning(view: View, metric: str, rise: Break, at_first: float) -> Break:
    """A rise, dated where its first level was left."""
    left = at_first + LEFT * (rise.late - at_first)
    known = np.nan_to_num(view.values[metric][: rise.idx + 1], nan=at_first)
    low = np.flatnonzero(running_median(known, 9) <= left)
    idx = min(rise.idx, int(low[-1]) + 1 if len(low) else 0)
    before = rise.before if rise.before <= left else at_first
    return replace(rise, idx=idx, step=view.step_at(idx), before=before)


FRESH, FILLED = 0.3, 1.15
"""Versions behind of the first samples of an empty pipeline, and what its ages may still grow by once it is full."""


def _fills_slowly(view: View, metric: str, rise: Break) -> bool:
    """Whether ages grew from those of an empty pipeline to a level within the bounds in use, and stay there."""
    known = finite(view.values[metric])
    third = len(known) // 3
    if third < 10 or rise.idx > third or rise.end_idx is not None or float(np.median(known[:3])) > FRESH:
        return False
    middle, end = float(np.median(known[third : 2 * third])), float(np.median(known[-third:]))
    evicts = view.contrast(EVICTED, rise.idx, width=20)
    return end <= min(FILLED * middle, VERY_OLD) and (evicts is None or evicts.score < 4)


def _apart_slowly(view: View, rise: Break) -> bool:
    """Whether samples grew many times as old over many steps, and the gap went with them."""
    if rise.idx < 8 or rise.late < max(rise.before + 1.5, SLOWLY_OLDER * rise.before) or gap_of(view) is None:
        return False
    before, after = (
        view.level(GAP, max(0, rise.idx - 60), rise.idx),
        view.level(GAP, (view.n + rise.idx) // 2),
    )
    return after >= SLOWLY_APART * before


def _harm(view: View, idx: int, skip: int) -> list[Evidence]:
    """What got worse with the staleness."""
    worse: list[Evidence] = []
    if gap_of(view) is not None:
        c = view.contrast(GAP, idx, width=20, skip=skip)
        if c is not None and c.ratio >= 1.12 and c.score >= 4:
            worse.append(of_contrast(view, c, idx, "the gap follows"))
        elif (slowly := _gap_follows(view, idx)) is not None:
            worse.append(slowly)
    for metric, direction, factor in (
        ("rollout_corr/rollout_is_eff_sample_size", -1, 1.05),
        ("rollout_corr/chi2_token", 1, 1.5),
        ("rollout_corr/rollout_is_std", 1, 1.3),
        ("actor/pg_clipfrac", 1, 1.4),
        (EVICTED, 1, 2.0),
    ):
        c = view.contrast(metric, idx, width=20)
        if (
            c is not None
            and direction * c.score >= 4
            and (c.ratio if direction > 0 else 1 / c.ratio) >= factor
        ):
            worse.append(of_contrast(view, c, idx))
    return worse


def _gap_follows(view: View, idx: int) -> Evidence | None:
    """The gap goes with a staleness that rises so slowly that nothing shows at any one step."""
    before, late = (
        view.level(GAP, max(0, idx - 60), idx),
        view.level(GAP, view.n - (view.n - idx) // 3),
    )
    if not late >= 1.25 * before or not follows_staleness(view, idx):
        return None
    metric = metrics_of_gap(view)[0]
    now, then = view.level(metric, view.n - (view.n - idx) // 3), view.level(metric, max(0, idx - 60), idx)
    says = f"{num(then)} before step {view.step_at(idx)}, {num(now)} now: the gap follows"
    return Evidence(metric=metric, step=view.step_at(idx), before=then, after=now, says=says)


ALWAYS = 4.0
"""Mean staleness from the first steps on that is more than any usual bound, if the importance weights suffer too."""


AS_FRESH = 1.2
"""The gap over that of fresh samples up to which age has no part in it."""
PARTED = 2.5
"""The gap over that of fresh samples from which on age is most of it."""


VERY_OLD = 5.0
"""Versions behind from which on that alone is a finding: bounds of four and less are in use, and fill up."""


def _of_fresh(view: View, metric: str) -> float | None:
    """The gap on the first, nearly fresh samples of a run; None where there were none."""
    if gap_of(view) is None:
        return None
    fresh = np.flatnonzero(np.nan_to_num(view.values[metric][:10], nan=np.inf) <= 0.5)
    values = view.values[GAP][fresh]
    return float(np.nanmedian(values)) if np.isfinite(values).any() else None


def _from_start(view: View, metric: str) -> Finding | None:
    start, level = view.level(metric, 0, max(5, view.n // 8)), view.level(metric)
    weights = view.level("rollout_corr/rollout_is_eff_sample_size")
    gap = gap_of(view)
    fresh = _of_fresh(view, metric)
    parted = view.level(GAP) / fresh if fresh is not None else 1.0
    suffers = (
        weights <= 0.75 or (gap is not None and gap.num_fine == 0) or (parted >= PARTED and level >= VERY_OLD)
    )
    if not (start >= ALWAYS and level >= ALWAYS and suffers):
        return None
    if fresh is not None and parted <= AS_FRESH and not weights <= 0.75:
        return None  # the first, fresh samples were as far off: age has no part in it
    evidence = [
        Evidence(
            metric=metric, step=view.step_at(0), after=level, says=f"{num(level)} versions behind all along"
        )
    ]
    if weights <= 0.75:
        says = f"effective sample size {num(weights)} of 1"
        name = "rollout_corr/rollout_is_eff_sample_size"
        evidence.append(Evidence(metric=name, step=view.step_at(0), after=weights, says=says))
    if gap is not None and parted >= PARTED:
        says = f"the gap is {num(parted)} times that of the first, fresh samples"
        evidence.append(
            Evidence(metric=gap.metrics[0], step=view.step_at(0), after=view.level(gap.metrics[0]), says=says)
        )
    return finding(
        title="samples are stale from the first steps on",
        confidence=0.7,
        step=view.step_at(0),
        evidence=tuple(evidence),
    )
