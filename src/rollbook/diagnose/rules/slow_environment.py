"""The environment became slow within a few steps, for good or for a while, and nothing else did: what fewer sandboxes,
or a service behind them that throttles, look like. What grows ever slower is a leak (`sandbox_leak`)."""

from __future__ import annotations

from rollbook.diagnose.finding import Finding
from rollbook.diagnose.signs.slow_calls import slow_calls
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num

RULE = "slow_environment"


def judge(view: View) -> Finding | None:
    slower = slow_calls(view)
    if slower is None or slower.grows_on:
        return None
    rise = slower.rise
    return Finding(
        rule=RULE,
        title=f"calls of the environment take {num(rise.peak_ratio)} times as long, and the steps wait for them",
        area="data",
        confidence=0.75,
        step=rise.step,
        evidence=slower.evidence,
        cost_s=slower.cost_s,
        action="look at the pool or service that the calls go to: how many sandboxes are alive, what its queue holds, "
        "whether it throttles; give calls a deadline that a step can bear",
        next_check="one call by hand: slow by itself, or only while many run? Then compare sandboxes alive with those "
        "that were started",
        until_step=None if rise.end_idx is None else view.step_at(rise.end_idx),
    )
