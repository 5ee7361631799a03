"""Nothing is learned although rewards differ: the gradient is exactly zero, or the learning rate is. A reward that
never differs has its own rules (`all_wrong`, `all_right`), groups that are all alike are a state (`states.py`)."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.rules.parts.flat_rewards import flat
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.rewards import REWARD
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

RULE = "no_update"
LEAST_STEPS = 5
LEAST_FRAC = 0.2
"""Share of the run that goes without an update: a schedule may end at zero."""
FEW_ALIKE = 0.1
"""Share of groups with two different rewards below which it is the rewards that carry no signal."""
SOLVED = 0.9
"""Mean reward over the best of an answer from which on groups are alike because they are all right."""

DECIMALS = 5
"""With so many, a learning rate of 2e-6 is printed as zero."""

LR, GRADIENT = "actor/lr", "actor/grad_norm"


def judge(view: View) -> Finding | None:
    if flat(view) is not None:
        return None
    if not _is_printed_coarsely(view) and (since := _zero_since(view, LR)) is not None:
        return _no_rate(view, since)
    since = _zero_since(view, GRADIENT)
    if since is None or not _differs(view, since):
        return None
    return _no_gradient(view, since)


def _zero_since(view: View, metric: str) -> int | None:
    """Position from which on a metric is exactly zero, to the end and for long enough."""
    values = view.values.get(metric)
    if values is None:
        return None
    known = np.flatnonzero(np.isfinite(values))
    some = np.flatnonzero(values[known] != 0.0)
    first = int(some[-1]) + 1 if len(some) else 0
    num_zero = len(known) - first
    return int(known[first]) if num_zero >= max(LEAST_STEPS, LEAST_FRAC * len(known)) else None


def _is_printed_coarsely(view: View) -> bool:
    """Whether the log was printed with so few decimals that a small number reads as zero."""
    fractions = [m for m, v in view.run.values.items() if view.count(m) >= LEAST_STEPS and np.any(v % 1 > 0)]
    coarse = [view.resolution(m) > 0.0 or _has_decimals(view.values[m], DECIMALS) for m in fractions]
    return bool(coarse) and float(np.mean(coarse)) > 0.5


def _has_decimals(values: Series, decimals: int) -> bool:
    """Whether all values are whole with so many decimals."""
    scaled = finite(values) * 10.0**decimals
    return bool(np.all(np.abs(scaled - np.round(scaled)) < 1e-4))


def _differs(view: View, since: int) -> bool:
    """Whether answers of those steps are scored differently, and not only because some prompts are always solved."""
    metric = view.first(*REWARD)
    if metric is None or view.level("batch/effective_frac", since) <= FEW_ALIKE:
        return False
    base = metric.removesuffix("/mean")
    top = view.level(f"{base}/max", since)
    if view.level(metric, since) >= SOLVED * (top if np.isfinite(top) and top > 0 else 1.0):
        return False
    spread = view.level(f"{base}/max", since) - view.level(f"{base}/min", since)
    mean = view.values[metric][since:]
    return bool(spread > 0.0 or np.nanmax(mean) - np.nanmin(mean) > 1e-6)


def _no_rate(view: View, since: int) -> Finding:
    step = view.step_at(since)
    before = view.level(LR, 0, since) if since else None
    ended = f"; {num(before)} before, so the schedule ended there" if before is not None else " in every step"
    return Finding(
        rule=RULE,
        title="the learning rate is zero: no update changes a weight",
        area="implementation",
        confidence=0.92,
        step=step,
        evidence=(Evidence(metric=LR, step=step, before=before, after=0.0, says=f"exactly zero{ended}"),),
        action="give the schedule the steps that the run really makes, optimizer updates and not rollouts, or set the "
        "rate",
        next_check="steps that the schedule was built for against the updates made so far",
    )


def _no_gradient(view: View, since: int) -> Finding:
    step = view.step_at(since)
    says = "exactly zero in every step since" if since else "exactly zero in every step"
    evidence = [Evidence(metric=GRADIENT, step=step, after=0.0, says=says)]
    reward = view.first(*REWARD)
    if reward is not None:
        level = view.level(reward, since)
        evidence.append(
            Evidence(metric=reward, step=step, after=level, says=f"{num(level)}, and answers differ")
        )
    ends = [f"critic/advantages/{end}" for end in ("max", "min")]
    known = [m for m in ends if view.count(m)]
    if known and all(view.level(m, since) == 0.0 for m in known):
        evidence.append(
            Evidence(
                metric=known[0], step=step, after=0.0, says="advantages are zero, too: lost before the loss"
            )
        )
        why = "every advantage is zero"
        action = (
            "look at how answers are grouped: a group of one has no other to be compared with, and so has a group "
            "whose answers carry different ids; or at a filter that takes all of them"
        )
        check = "group size and number of groups of one batch as the estimator sees them, and their rewards"
    elif known:
        why = "advantages are there, and no parameter has a gradient"
        action = (
            "look at what the optimizer holds: frozen parameters, adapters that are not part of the model, a loss mask "
            "that leaves nothing, logprobs computed without gradients"
        )
        check = "number of parameters that require a gradient, and tokens left by the loss mask, in one batch"
    else:
        why = "rewards differ, and no parameter has a gradient"
        action = (
            "log the advantages: if they are zero, look at how answers are grouped (a group of one has no other to be "
            "compared with); if not, at what the optimizer holds (frozen parameters, a loss mask that leaves nothing)"
        )
        check = "advantages of one batch, then the parameters that require a gradient"
    return Finding(
        rule=RULE,
        title=f"nothing is learned: {why}",
        area="implementation",
        confidence=0.9,
        step=step,
        evidence=tuple(evidence),
        action=action,
        next_check=check,
    )
