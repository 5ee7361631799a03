"""Calls of an environment that take many times as long as they did while nothing else moved."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.cost import run_seconds
from rollbook.diagnose.finding import Evidence
from rollbook.diagnose.signs.environments import SANDBOX_S, TURNS, failures_rise
from rollbook.diagnose.signs.gap import has_parted
from rollbook.diagnose.signs.rewards import lost_reward
from rollbook.diagnose.signs.seconds import host_slowdown, lost_in_steps
from rollbook.diagnose.view import View, once
from rollbook.diagnose.wording import num, of_break

CALLS = ("env/turn_s/mean", "perf/non_generation_time/mean")
"""Seconds of a call; or of a sample in which nothing is generated for it (slime): its tools, environment and score."""
TIMES_AS_LONG = 2.2
"""Growth of the seconds of a call beyond what other calls of a policy that learns would bring."""
GRADUAL = 0.65
"""Share of a growth that its first quarter may have."""
HAD_GROWN, STEADY = 1.5, 0.9
"""Growth before a break, and rank correlation with the steps, from which on the break is a part of one growth."""
FELT_FRAC = 0.04
"""Share of those steps' seconds that must be lost to it: calls that overlap with others may be slow for nobody."""


@dataclass(frozen=True, slots=True)
class SlowCalls:
    """The growth, and what it costs."""

    rise: Break
    evidence: tuple[Evidence, ...]
    cost_s: float
    had_grown: bool
    """Whether calls had become longer, step by step, before the break."""

    @property
    def grows_on(self) -> bool:
        """Whether no few steps account for most of it, and it never ended."""
        is_gradual = self.rise.is_ramp and self.rise.early_share < GRADUAL
        return (is_gradual or self.had_grown) and self.rise.end_idx is None


@once("slow calls")
def slow_calls(view: View) -> SlowCalls | None:
    """Calls that became slow at equal turns, lengths, failures and rewards, on a host that is no slower, and that the
    steps wait for."""
    rise = view.rise(view.first(*CALLS))
    if rise is None or rise.score < 6 or rise.peak_ratio < TIMES_AS_LONG or rise.before < SANDBOX_S:
        return None
    end = view.n if rise.end_idx is None else rise.end_idx
    for metric in (TURNS, "response_length/mean", "prompt_length/mean"):
        before, after = view.level(metric, max(0, rise.idx - 20), rise.idx), view.level(metric, rise.idx, end)
        if before > 0 and not 0.8 <= after / before <= 1.3:
            return None
    if failures_rise(view, rise.idx) or has_parted(view):
        return None
    if lost_reward(view, rise.idx, width=20) >= 0.12 or host_slowdown(view, rise.idx) >= 1.4:
        return None
    cost_s = lost_in_steps(view, rise.idx, rise.end_idx)
    if cost_s is None or not cost_s >= FELT_FRAC * run_seconds(view) * (end - rise.idx) / view.n:
        return None
    evidence = [of_break(rise)]
    for metric, what in ((TURNS, "turns"), ("response_length/mean", "response tokens")):
        if view.has(metric):
            now = view.level(metric, rise.idx, end)
            says = f"{num(now)} {what}, {num(view.level(metric, 0, rise.idx))} before: not for more work"
            evidence.append(Evidence(metric=metric, step=rise.step, after=now, says=says))
    return SlowCalls(rise, tuple(evidence), cost_s, _had_grown(view, rise))


def _had_grown(view: View, rise: Break) -> bool:
    first, before = (
        view.level(rise.metric, 0, max(3, view.n // 8)),
        view.level(rise.metric, rise.idx - 5, rise.idx),
    )
    return before >= HAD_GROWN * first > 0.0 and view.trend(rise.metric)[1] >= STEADY
