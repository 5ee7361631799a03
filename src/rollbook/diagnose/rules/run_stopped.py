"""The run stopped on an error: what it said comes first, unless a rule of its own tells the same (the tree leaves this
one out then)."""

from __future__ import annotations

from rollbook.diagnose.finding import Finding, NotJudged
from rollbook.diagnose.stops import CAUSES, stop
from rollbook.diagnose.view import View

RULE = "run_stopped"


def judge(view: View) -> Finding | NotJudged | None:
    found = stop(view)
    if found is None:
        return None
    why = (
        "the run stopped on an error" if found.cause is None else f"the run stopped: {CAUSES[found.cause][0]}"
    )
    return Finding(
        rule=RULE,
        title=f"{why}: {found.words}",
        area="implementation",
        confidence=0.99,
        step=found.step,
        evidence=(found.evidence(),),
        action=found.remedy or "read the error and what stands before it in the log",
        next_check="mend its cause, then take the run up again from its newest checkpoint",
    )
