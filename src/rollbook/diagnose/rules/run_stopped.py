"""The run stopped on an error: what it said comes first, unless a rule of its own tells the same (the tree leaves this
one out then). Or it stands still without one, and the log ends in the line that says so."""

from __future__ import annotations

from rollbook.diagnose.finding import Finding
from rollbook.diagnose.signs.standstill import Standstill, standstill_of
from rollbook.diagnose.stops import CAUSES, stop
from rollbook.diagnose.view import View

RULE = "run_stopped"
_FROM_OUTSIDE = ("killed", "scheduler", "interrupted", "process_gone")
"""Somebody or something ended what stood still, or a process of it that the others went on without."""


def judge(view: View) -> Finding | None:
    found, standing = stop(view), standstill_of(view)
    if found is None or (standing is not None and found.cause in _FROM_OUTSIDE):
        return None if standing is None or standing.told_by is not None else _stands_still(standing)
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


def _stands_still(found: Standstill) -> Finding:
    return Finding(
        rule=RULE,
        title=f"the run stands still, and says so to the end of the log: {found.words}",
        area="implementation",
        confidence=0.8,
        step=found.step,
        evidence=(found.evidence,),
        cost_s=found.lasted_s,
        action="look at what that line waits for, and dump the stacks of its process (py-spy) before killing anything",
        next_check="give that wait a deadline that ends the step with an error of its own",
    )
