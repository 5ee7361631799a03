"""Losses or gradients are no numbers any more, and nothing else says why: every update since then was lost, or has
written its NaN into the weights."""

from __future__ import annotations

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.signs.gap import gap_of
from rollbook.diagnose.signs.policy import MUST_BE_FINITE, policy_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import collect_gap

RULE = "not_finite"
PRINTS_NAN = ("verl-console", "slime", "trl")
"""Formats in which a NaN was computed: files of JSON write null for what was not, too."""
FEW_STEPS = 5
"""Steps of an excerpt, which need not show that a metric was a number before."""


def judge(view: View) -> Finding | None:
    step, metrics = policy_of(view).nan_step, policy_of(view).nan_metrics
    if step is not None and len(metrics) == 1 and sum(s >= step for s in view.run.non_finite[metrics[0]]) < 2:
        return None  # one value of the last row: a logger loses some
    if step is not None and _had_run_away(view, step):
        return None  # the policy had left its range long before: a state of the algorithm
    if step is None:
        step, metrics = _in_an_excerpt(view)
    if step is None:
        return None
    which = ", ".join(metrics[:3])
    blind = f"; or the engine: {collect_gap(view)}" if gap_of(view) is None else ""
    finite = [m for m in MUST_BE_FINITE if m not in metrics and view.count(m)]
    beside = f", while {', '.join(finite[:2])} still are" if finite else ""
    evidence = tuple(
        Evidence(metric=metric, step=step, says=f"not finite from step {step} on") for metric in metrics[:4]
    )
    return Finding(
        rule=RULE,
        title=f"{which} {'is no number' if len(metrics) == 1 else 'are no numbers'} since step {step}{beside}",
        area="implementation",
        confidence=0.8,
        step=step,
        evidence=evidence,
        action=f"take the run up again from before step {step}; skip an update whose gradient is not finite instead of "
        "applying it, and find its batch",
        next_check="which comes first on that batch: a logprob of minus infinity, exp() of a large ratio (low-variance "
        f"KL), a division by no tokens, or float16 that overflows{blind}",
    )


RAN_AWAY = 2.0
"""Gradients of the steps before over those of the run's first third from which on the policy had left its range."""


def _had_run_away(view: View, step: int) -> bool:
    """Whether gradients and step KL were many times what they had been, before losses ceased to be numbers."""
    idx = view.idx_of(step)
    third = max(8, idx // 3)
    grown = [
        view.level(m, max(0, idx - max(20, idx // 3)), idx) >= times * view.level(m, 0, third)
        for m, times in (("actor/grad_norm", RAN_AWAY), ("actor/ppo_kl", RAN_AWAY**2))
    ]
    return idx >= 24 and all(grown)


def _in_an_excerpt(view: View) -> tuple[int | None, tuple[str, ...]]:
    """What a few lines of a console show as NaN in their last step."""
    last = int(view.run.steps[-1])
    if view.n > FEW_STEPS or view.run.format not in PRINTS_NAN:
        return None, ()
    metrics = tuple(m for m in MUST_BE_FINITE if last in view.run.non_finite.get(m, ()))
    steps = [step for m in metrics for step in view.run.non_finite[m]]
    return (min(steps), metrics) if metrics else (None, ())
