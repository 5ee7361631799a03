"""What moves the gap while every publication arrives: samples that are older, a policy whose own steps grew. The rules
about a gap that rises ask here first, and say in `missed_weight_sync`, `engine_mismatch`, `stale_samples` and
`mismatch_to_nan` what is left."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import running_median, spearman
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.gap import GAP, Gap, accelerates, gap_led, gap_of, levels_off
from rollbook.diagnose.signs.policy import policy_of, step_kl_holds_the_gap
from rollbook.diagnose.signs.versions import has_ages, versions_of
from rollbook.diagnose.view import View

LEAST_GROWTH = 1.6
"""Growth of the gap (as an amplitude) below which drift of healthy runs cannot be told apart."""


def rise_is_explained(view: View, rise: Break) -> bool:
    """Whether older samples or the policy's own steps are why a gap rose."""
    return staleness_explains(view, rise) or optimizer_explains(view, rise) or goes_with_the_policy(view)


def staleness_explains(view: View, rise: Break) -> bool:
    """Whether the samples' own staleness rose with the gap: at that step, while the pipeline fills, or slowly."""
    versions = versions_of(view)
    if versions.mean is not None and rise.idx < FILLING_STEPS:
        early, late = (
            view.level(versions.mean, 0, rise.idx + 1),
            view.level(versions.mean, rise.idx, rise.idx + 40),
        )
        if late >= early + 0.5 and late >= 1.35 * early:
            return True
    c = view.contrast(versions.mean, rise.idx, width=20, skip=3)
    if c is not None and c.diff >= 0.5 and c.ratio >= 1.35 and c.score >= 4:
        return True
    found = versions.rise
    if found is None or found.late < found.before + 0.5 or found.late < 1.35 * found.before:
        return False
    if view.near(found.idx, rise.idx, share=0.1, least=10):
        return not _outgrows(view, rise, found)
    return found.idx < rise.idx and follows_staleness(view, found.idx)


OUTGROWS = 2.0
"""Growth of the gap over that of the age from which on old samples are not all of it."""


def _outgrows(view: View, rise: Break, aged: Break) -> bool:
    """Whether the gap grows far more than samples aged, once they had come to their age."""
    mean = versions_of(view).mean or ""
    before = view.level(mean, max(0, rise.idx - 4), rise.idx)
    had_levelled = aged.idx < rise.idx and view.level(mean, rise.idx) < 1.2 * before
    if had_levelled and rise.peak_ratio >= OUTGROWS * aged.late / max(aged.before, 0.1):
        return True
    since = max(aged.idx + aged.rise_steps, rise.idx) + 3
    middle = (since + view.n) // 2
    if middle - since < 5 or view.level(mean, middle) > 1.1 * view.level(mean, since, middle):
        return False
    return view.level(GAP, view.n - 5) >= OUTGROWS * view.level(GAP, since - 2, since + 3)


FILLING_STEPS = 12
"""Steps in which the pipeline of an asynchronous run may still fill up, so that its samples become older."""


def follows_staleness(view: View, idx: int) -> bool:
    """Whether the gap goes up and down with the staleness of the samples from a position on."""
    mean = versions_of(view).mean
    if mean is None or gap_of(view) is None:
        return False
    both = np.isfinite(view.values[mean][idx:]) & np.isfinite(view.values[GAP][idx:])
    if both.sum() < 20:
        return False
    width = max(5, int(both.sum()) // 20) | 1
    smooth = [running_median(view.values[m][idx:][both], width) for m in (mean, GAP)]
    return spearman(*smooth) >= 0.7


def optimizer_explains(view: View, rise: Break) -> bool:
    """Whether the policy's own steps grew first, and by enough: then every version differs more from the last."""
    policy = policy_of(view)
    if policy.blow_up_idx is None or gap_led(view, policy.blow_up_idx):
        return False
    by_far = policy.update_ratio >= 1.25 * rise.peak_ratio  # then a few steps of uncertainty do not matter
    slack = max(8, view.n // 12) if by_far else max(4, view.n // 25)
    return policy.blow_up_idx <= rise.idx + slack and policy.update_ratio >= 0.8 * rise.peak_ratio


def goes_with_the_policy(view: View) -> bool:
    """Whether the gap goes up and down with the trainer's own steps, which grow to many times what they were at first:
    a policy that swings. A gap that grows by more than the distance of a step (the root of its KL) goes its own way."""
    moved = view.values.get("actor/ppo_kl")
    if moved is None or gap_of(view) is None or step_kl_holds_the_gap(view):
        return False
    both = np.isfinite(moved) & np.isfinite(view.values[GAP])
    if both.sum() < 24:
        return False
    width = max(7, int(both.sum()) // 12) | 1
    steps, gap = (running_median(np.abs(x[both]), width) for x in (moved, view.values[GAP]))
    third = len(steps) // 3
    grown, apart = (float(np.quantile(x, 0.95) / max(np.median(x[:third]), 1e-12)) for x in (steps, gap))
    return grown >= 4.0 and spearman(steps, gap) >= 0.7 and apart <= BEYOND_STEPS * np.sqrt(grown)


BEYOND_STEPS = 1.6
"""Growth of the gap over that of the distance of a step from which on the policy's own movement is not all of it."""


def is_of_old_samples(view: View, rise: Break) -> bool:
    """Whether a gap that ramps up is that of samples of ever older versions up to a bound, in a log without their
    ages."""
    return not has_ages(view) and levels_off(view, rise)


def is_unexplained_ramp(view: View, gap: Gap, rise: Break) -> bool:
    """The gap ramps away from a normal level, and neither staleness nor the optimizer explains it."""
    # A ramp that ends at one step: the next publication arrived.
    repaired = rise.ends_at_once and rise.score >= 9 and rise.idx >= 10
    if rise.peak_ratio < (1.25 if repaired else LEAST_GROWTH) or rise.score < 6 or not rise.is_ramp:
        return False
    if rise.end_idx is not None and not rise.ends_at_once:
        return False  # it faded: a publication is there or not
    if rise.idx < 8 and rise.ratio < 2 * LEAST_GROWTH:
        return False  # samples age in the first steps of any asynchronous run
    if gap.num_fine == 0 and gap.num_bad > 0:
        return False  # it was wrong from the start: numerics
    feeds_on_itself = accelerates(view, rise) or policy_of(view).nan_step is not None
    return not (rise_is_explained(view, rise) or feeds_on_itself or trails_the_policy(view, rise))


TRAILS = 0.25
"""KL of engine and trainer that was gained, over that of all steps meanwhile, up to which no engine stands:
it is 0.6 and more in runs whose engines do, and steps that undo each other make up for some of it."""
HELD = 0.3
"""KL of a step over that of engine and trainer from which on they may be the same one."""
MANY_STEPS = 100
SURE = 4.0
"""Standard errors by which the mean of a step's KL, which scatters, must be above zero."""


def trails_the_policy(view: View, rise: Break) -> bool:
    """Whether a gap grows by far less than the policy moved since: an engine with the weights of the start would be as
    far from the trainer as all of its steps add up to."""
    apart = view.first("rollout_corr/kl", "rollout_corr/k3_kl")
    moved = view.values.get("actor/ppo_kl")
    if apart is None or moved is None or rise.end_idx is not None:
        return False
    steps = finite(moved[rise.idx :])
    if len(steps) < MANY_STEPS:
        return False
    mean, error = float(steps.mean()), float(steps.std()) / np.sqrt(len(steps))
    if mean > HELD * view.last(apart):
        return False  # it is taken against the engine's logprobs itself
    gained = view.last(apart, len(steps) // 5) - view.level(apart, max(0, rise.idx - 40), rise.idx)
    return mean >= SURE * error and gained <= TRAILS * mean * (view.n - rise.idx) * view.stride


def moves_the_gap(view: View) -> tuple[tuple[str | None, float], ...]:
    """What moves the gap in spells by itself, and from which ratio on: staleness, the policy's own steps, lengths."""
    return (
        (versions_of(view).mean, 1.35),
        ("actor/ppo_kl", 2.0),
        ("actor/grad_norm", 1.8),
        ("response_length/mean", 1.3),
    )
