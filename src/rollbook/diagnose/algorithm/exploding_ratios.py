"""Policy ratios that explode: in single steps the exponential of a few tokens' log-ratio outweighs all other tokens.

The clip bounds a ratio only where it would be rewarded. A token that the engine found a thousand times likelier than
the trainer does enters the loss of a bad answer, or a low-variance KL, unbounded; norms of gradients leap with it."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

LARGEST: dict[str, float] = {"actor/pg_loss": 3.0, "actor/kl_loss": 5.0}
"""What no step reaches while ratios are near 1: normalised advantages and the KL of a token are of the order of 1."""
TIMES_USUAL = 50.0
"""Of a loss that is a sum over tokens every step is large."""
LEAST_STEPS = 2


def judge(view: View) -> State | None:
    """The state, with each series that leaps and the gradients of those steps."""
    evidence: list[Evidence] = []
    hit = np.zeros(view.n, np.bool_)
    for metric, largest in LARGEST.items():
        if view.count(metric) < 8:
            continue
        size = np.abs(np.nan_to_num(view.values[metric]))
        usual = float(np.median(np.abs(view.values[metric][np.isfinite(view.values[metric])])))
        leaps = size >= max(largest, TIMES_USUAL * usual)
        if leaps.sum() >= LEAST_STEPS:
            evidence.append(_leaps(view, metric, leaps, usual))
            hit |= leaps
    if not evidence:
        return None
    if view.count("actor/grad_norm") >= 8:
        evidence.append(_leaps(view, "actor/grad_norm", hit, view.level("actor/grad_norm")))
    return State(
        name="ratios_explode",
        title="in single steps the ratio of a few tokens explodes: their logprobs are not those they were sampled with",
        step=min(item.step for item in evidence),
        evidence=tuple(evidence),
        advice="log the difference of the engine's and the trainer's logprobs at one version (a sync that is missed "
        "for some steps or another precision shows there), bound the ratio from above in the loss (dual clip, "
        "truncated importance weight), and mask tokens far outside",
    )


def _leaps(
    view: View, metric: str, where: np.ndarray[tuple[int], np.dtype[np.bool_]], usual: float
) -> Evidence:
    at = np.flatnonzero(where & np.isfinite(view.values[metric]))
    most = float(np.max(np.abs(view.values[metric][at]), initial=0.0))
    step = view.step_at(int(at[0])) if len(at) else view.step_at(0)
    says = f"up to {num(most)} in {len(at)} of {view.count(metric)} steps, {num(usual)} is usual"
    return Evidence(metric=metric, step=step, before=usual, after=most, says=says)
