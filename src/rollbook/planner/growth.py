"""How topologies move while responses grow over training, under the limit that the run began with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.lengths import grown_by
from rollbook.ledger.workload import Mode, Workload
from rollbook.planner.candidate import Candidate
from rollbook.planner.choice import choose
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search, with_split
from rollbook.planner.words import count, seconds, split

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_MOST_OF_LIMIT = 0.95
"""Mean response over the limit: at most this, because some responses always end before it."""


_COLOCATED: tuple[Mode, ...] = ("sync", "colocate_async")
_SEPARATED: tuple[Mode, ...] = ("separate_sync", "separate_async")
GROWTH_HEAD = ("step", "response", "this plan", "best shared", "best separated", "then recommended")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """One moment of training."""

    step: int
    response_tokens: float
    chosen_step_s: float | None
    """Of the recommended topology; None when it no longer fits."""
    best_step_s: Mapping[Mode, float]
    """Of the best split of each mode."""
    best: Candidate | None
    """What would be recommended then."""

    def cells(self) -> tuple[str, ...]:
        """Under `GROWTH_HEAD`."""
        here = seconds(self.chosen_step_s) if self.chosen_step_s is not None else "does not fit"
        best = [
            min((self.best_step_s[mode] for mode in modes if mode in self.best_step_s), default=None)
            for modes in (_COLOCATED, _SEPARATED)
        ]
        then = "nothing fits"
        if self.best is not None:
            then = f"{self.best.title} {split(*self.best.split, self.best.mode)}"
        told = ["" if value is None else seconds(value) for value in best]
        return (str(self.step), count(self.response_tokens), here, *told, then)

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.step,
            "response_tokens": self.response_tokens,
            "chosen_step_s": self.chosen_step_s,
            "best_step_s": dict(self.best_step_s),
            "recommended": None
            if self.best is None
            else {
                "mode": self.best.mode,
                "num_rollout_gpus": self.best.split[0],
                "num_train_gpus": self.best.split[1],
                "idle_state": self.best.idle_state,
                "step_s": self.best.step_s,
            },
        }


def growth(request: PlanRequest, chosen: Candidate, layouts: list[ReplicaLayout]) -> list[Grown]:
    """Five moments from the first step to the horizon.

    Args:
        layouts: engine layouts to try again.
    """
    moments = []
    for share in _SHARES:
        step = round(share * request.horizon_steps)
        work = _grown(request.workload, grown_by(request.length_growth_frac, step))
        changed = replace(request, workload=work)
        search = Search(with_split(changed, chosen), layouts=layouts, is_brief=True)
        candidates = search.run()
        same = search.candidate(chosen.mode, *chosen.split, sleep=chosen.sleep)
        best, _ = choose(changed, candidates)
        fitting = [c for c in candidates if c.fits]
        moments.append(
            Grown(
                step=step,
                response_tokens=work.response_tokens,
                chosen_step_s=None if same.account.why_not else same.step_s,
                best_step_s={
                    c.mode: c.step_s for c in sorted(fitting, key=lambda c: -c.step_s)
                },  # the fastest last
                best=best,
            )
        )
    return moments


def _grown(work: Workload, factor: float) -> Workload:
    limit = work.max_response_tokens
    most = max(_MOST_OF_LIMIT * limit, min(work.response_tokens, limit))
    mean = max(min(work.response_tokens * factor, most), 1.0)
    samples = tuple(min(max(x * factor, 1.0), limit) for x in work.length_samples)
    return replace(work, response_tokens=mean, length_samples=samples)
