"""A publication of weights failed its proof, again when it was repeated, and the run stopped rather than serve it.
Only the run's own words tell it: weights that arrived wrong and were served are `missed_weight_sync` or
`silent_error_after_wake`."""

from __future__ import annotations

from rollbook.diagnose.finding import Finding
from rollbook.diagnose.stops import stopped_by
from rollbook.diagnose.view import View

RULE = "refused_publication"


def judge(view: View) -> Finding | None:
    found = stopped_by(view, RULE)
    if found is None:
        return None
    return Finding(
        rule=RULE,
        title="a weight publication was refused: what arrived is not what the trainer sent",
        area="version",
        confidence=0.97,
        step=found.step,
        evidence=found.evidence_with(view, "publication_failed"),
        action=found.remedy or "look at the tensor that is named: it did not arrive, or arrived changed",
        next_check="the replicas still hold the version before: resume, and watch whether the same tensor fails again",
    )
