"""The scorer fails: trajectories are produced and get no reward, or all of them that of a wrong answer at once.

Nothing of the policy or the environments moved. The class of the failures tells it from dead sandboxes; where rewards
are logged by source, a single one of them is `one_source_all_zero`.
"""

from __future__ import annotations

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.rules.parts.every_reward_zero import every_reward_zero
from rollbook.diagnose.signs.environments import failure_kinds_of
from rollbook.diagnose.signs.rewards import sources_of
from rollbook.diagnose.stops import stopped_by
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "dead_scorer"
LEAST_FRAC = 0.1
"""Share of the trajectories without a reward below which a scorer has its bad cases and is not down."""


def judge(view: View) -> Finding | None:
    found = stopped_by(view, RULE)
    evidence: list[Evidence] = []
    confidence, step = 0.0, view.step_at(view.n - 1)
    if found is not None:
        evidence.append(found.evidence())
        confidence, step = 0.97, found.step
    kinds = failure_kinds_of(view)
    rise = view.rise("failures/frac", log=False)
    if rise is not None and rise.late >= max(LEAST_FRAC, 3 * rise.before) and kinds.main == "reward":
        says = f"{num(rise.late)} of the trajectories have no reward, {num(rise.before)} before: the scorer failed"
        evidence.append(
            Evidence(metric="failures/frac", step=rise.step, before=rise.before, after=rise.late, says=says)
        )
        confidence, step = max(confidence, 0.9), min(step, rise.step)
    if not evidence:  # where sources are logged, it may be theirs
        return None if any(sources_of(view)) else every_reward_zero(view, RULE)
    return Finding(
        rule=RULE,
        title="the scorer fails: trajectories have no reward",
        area="data",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        action="restart the scorer, then take the run up again: what has no reward was not trained as zero",
        next_check="score ten reference answers in the worker that scores during training",
    )
