"""What if: longer responses, wider lengths, slower compute."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rollbook.errors import PlanError
from rollbook.ledger.layout import ReplicaLayout
from rollbook.planner.candidate import Candidate
from rollbook.planner.choice import best_of
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search, with_split
from rollbook.planner.sides import RolloutSides


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """One changed assumption, and what the chosen topology and the best one cost then."""

    change: str
    step_s: float | None
    """Of the recommended topology, unchanged; None when it no longer fits."""
    change_frac: float | None
    best: Candidate | None
    moves: bool
    """Another mode or split would be recommended, and is faster by more than a per cent."""

    def as_json(self) -> dict[str, object]:
        best = self.best
        return {
            "change": self.change,
            "step_s": self.step_s,
            "change_frac": self.change_frac,
            "best": None
            if best is None
            else {
                "mode": best.mode,
                "num_rollout_gpus": best.split[0],
                "num_train_gpus": best.split[1],
                "idle_state": best.idle_state,
                "step_s": best.step_s,
            },
            "moves": self.moves,
        }


def sensitivity(
    request: PlanRequest,
    chosen: Candidate,
    layouts: list[ReplicaLayout],
    engines: RolloutSides | None = None,
) -> list[Shift]:
    """The three questions of a design review; a change that the question itself forbids is left out.

    Args:
        layouts: engine layouts to try again.
        engines: of a search of `request` in these layouts.
    """
    shifts = []
    for change, changed, same_engines in (
        ("responses 1.5 times as long", _longer(request, 1.5), None),
        ("variance of the lengths doubled", _wider(request, 2.0), None),
        # The paper account prefills at the MFU of forwards.
        (
            "train and forward MFU 10 % lower",
            slower_compute(request, 0.9),
            engines if request.assumptions.method != "paper" else None,
        ),
    ):
        if changed is None:
            continue
        search = Search(with_split(changed, chosen), layouts=layouts, is_brief=True)
        search.engines = same_engines or search.engines
        same = search.candidate(chosen.mode, *chosen.split, sleep=chosen.sleep)
        best = best_of(search)
        shifts.append(
            Shift(
                change=change,
                step_s=same.step_s if not same.account.why_not else None,
                change_frac=same.step_s / chosen.step_s - 1 if not same.account.why_not else None,
                best=best,
                moves=best is not None and best.step_s < 0.99 * same.step_s,
            )
        )
    return shifts


def _longer(request: PlanRequest, factor: float) -> PlanRequest | None:
    """Mean and limit of the responses grow together; agents' turns grow with them."""
    work = request.workload
    longest = math.ceil(work.max_response_tokens * factor)
    limit = request.max_context_tokens or request.model.max_context_tokens
    if limit:
        longest = min(longest, int(limit - work.prompt_tokens - work.observation_tokens))
    try:
        longer = replace(
            work,
            response_tokens=min(work.response_tokens * factor, longest),
            max_response_tokens=longest,
            length_samples=tuple(min(x * factor, longest) for x in work.length_samples),
        )
    except PlanError:
        return None
    return replace(request, workload=longer)


def _wider(request: PlanRequest, factor: float) -> PlanRequest:
    """Variance times `factor` at the same mean. The paper account has no variance: its distance to the limit grows."""
    work = request.workload
    if request.assumptions.method == "paper":
        distance = (work.max_response_tokens - work.response_tokens) * math.sqrt(factor)
        return replace(
            request, workload=replace(work, max_response_tokens=math.ceil(work.response_tokens + distance))
        )
    if work.length_samples:
        mean = sum(work.length_samples) / len(work.length_samples)
        stretch = math.sqrt(factor)
        spread = tuple(
            min(max(mean + (x - mean) * stretch, 1.0), work.max_response_tokens) for x in work.length_samples
        )
        return replace(request, workload=replace(work, length_samples=spread))
    # Variance of a log-normal over its squared mean is exp(sigma²) - 1.
    sigma = math.sqrt(math.log1p(factor * math.expm1(work.length_sigma**2)))
    return replace(request, workload=replace(work, length_sigma=sigma))


def slower_compute(request: PlanRequest, factor: float) -> PlanRequest:
    """Training and forwards reach `factor` of the MFU that is assumed."""
    assumptions = request.assumptions
    stacks = {
        name: replace(
            stack,
            gemm_frac={dtype: frac * factor for dtype, frac in stack.gemm_frac.items()},
            attention_frac={name: frac * factor for name, frac in stack.attention_frac.items()},
            dense_bytes=stack.dense_bytes / factor,
            moe_bytes=stack.moe_bytes / factor,
        )
        for name, stack in assumptions.stacks.items()
    }
    slower = replace(
        assumptions,
        train_mfu_frac=assumptions.train_mfu_frac * factor,
        forward_mfu_frac=assumptions.forward_mfu_frac * factor,
        stacks=stacks,
    )
    return replace(request, assumptions=slower)
