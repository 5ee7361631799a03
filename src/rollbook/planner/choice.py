"""Which of the candidates to recommend, and the sentence that defends it."""

from __future__ import annotations

from rollbook.planner.candidate import Candidate
from rollbook.planner.host_memory import OFFLOAD_GAIN_FRAC
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.words import percent, seconds


def _fastest(candidates: list[Candidate]) -> Candidate | None:
    """The first, whose training state is in host memory only where that saves what it should."""
    first = next(iter(candidates), None)
    near = next((c for c in candidates if not c.train.is_offloaded), None)
    if first is None or near is None or first.step_s < (1 - OFFLOAD_GAIN_FRAC) * near.step_s:
        return first
    return near


def choose(request: PlanRequest, candidates: list[Candidate]) -> tuple[Candidate | None, str]:
    """The recommendation with its reason: on-policy unless asynchrony saves enough to pay for itself."""
    fitting = [c for c in candidates if c.fits]
    if not fitting:
        shared = next(c for c in candidates if c.mode == "sync")  # no split has more memory for either side
        return None, f"no topology fits: {'; '.join(shared.why_not)}"
    on_policy = _fastest([c for c in fitting if c.is_on_policy])
    asynchronous = _fastest([c for c in fitting if not c.is_on_policy])
    if asynchronous is None or request.max_staleness_steps == 0:
        assert on_policy is not None or asynchronous is not None
        if on_policy is None:
            return asynchronous, "only an asynchronous topology fits in memory"
        reason = (
            "the staleness bound is 0" if request.max_staleness_steps == 0 else "no asynchronous one fits"
        )
        return on_policy, f"{reason}, so the step stays on-policy at {seconds(on_policy.step_s)}"
    if on_policy is None:
        return asynchronous, "no on-policy topology fits in memory, this asynchronous one does"
    gain = 1 - asynchronous.step_s / on_policy.step_s
    if gain <= 0:
        return on_policy, f"no asynchronous topology has a shorter step than its {seconds(on_policy.step_s)}"
    if gain < request.min_async_gain_frac:
        return on_policy, (
            f"asynchrony would save {percent(gain)} of the step, less than the "
            f"{percent(request.min_async_gain_frac)} that stale tokens and a second moving part should earn"
        )
    return asynchronous, (
        f"it takes {seconds(asynchronous.step_s)} a step where the best on-policy topology takes "
        f"{seconds(on_policy.step_s)}: {percent(gain)} less for tokens at most "
        f"{request.max_staleness_steps} version{'s' if request.max_staleness_steps > 1 else ''} old"
    )


def best_of(search: Search) -> Candidate | None:
    """What `choose` recommends of all that `search` finds, of which no more is followed than the choice needs."""
    request = search.request
    # Where no old token is allowed nothing is gained by them.
    gain = request.min_async_gain_frac if request.max_staleness_steps else 1.0
    contenders = search.contenders(gain)
    return choose(request, contenders)[0] if contenders else None
