"""Step 6 of the derivation: publication, staleness, and what stands beside the step."""

from __future__ import annotations

from dataclasses import replace

from rollbook.ledger.asynchrony import AsyncAccount, async_account
from rollbook.observe.numbers import counted
from rollbook.planner.beside import Beside
from rollbook.planner.candidate import Candidate
from rollbook.planner.publication import Publication
from rollbook.planner.reasoned import Reasoned
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.words import capitalized, count, seconds

_LAST_TITLE = "Publication, staleness, and what stands beside the step"


def step_publication(
    request: PlanRequest,
    search: Search,
    chosen: Candidate | None,
    publication: Publication | None,
    around: Beside,
    changes: tuple[str, ...],
) -> Reasoned:
    """What is published how, how old tokens are then, and what stands beside the step."""
    if chosen is None or publication is None:
        return Reasoned(
            step=6,
            title=_LAST_TITLE,
            inputs={},
            outputs={},
            because="Nothing fits, so there is nothing to publish to. "
            + ("Any one of these would do: " + "; ".join(changes) + "." if changes else ""),
        )
    inputs: dict[str, object] = {"max_staleness_steps": request.max_staleness_steps}
    outputs: dict[str, object] = {
        "method": publication.method,
        "sync_s": publication.seconds,
        "bytes": publication.account.total_bytes,
        "sync_every": publication.sync_every,
    }
    because = f"{capitalized(publication.because)}."
    if chosen.is_on_policy:
        outputs["max_staleness_steps"] = 0
        because += (
            " Every token is trained by the version that sampled it, so no bound and no correction is needed."
        )
    else:
        ages = expected_staleness(request, chosen, publication)
        by_bound = step_by_bound(request, search, chosen)
        outputs |= {
            "max_staleness_steps": request.max_staleness_steps,
            "sync_frac": ages.sync_frac,
            "mean_staleness_steps": ages.bounded_staleness_steps,
            "over_bound_frac": ages.over_bound_frac,
            "max_in_flight": ages.max_in_flight,
            "step_s_by_bound": {str(bound): step_s for bound, step_s in by_bound.items()},
        }
        because += (
            f" With a bound of {counted(request.max_staleness_steps, 'version')} at most {count(ages.max_in_flight)} "
            f"trajectories are admitted and not yet trained; a token is {ages.bounded_staleness_steps:.1f} versions "
            "old on average when it trains, and the importance weights correct for it."
        )
        if ages.max_generation_steps > 1:
            because += f" The longest responses span {ages.max_generation_steps:.1f} steps"
            if request.assumptions.method == "paper":
                because += "; the paper account does not charge the wait for them (`rollbook simulate` does)."
            else:
                told = ", ".join(f"{seconds(s)} at {bound}" for bound, s in by_bound.items())
                because += f", and the trainer waits for them as far as the bound demands: {told}."
    return Reasoned(
        step=6,
        title=_LAST_TITLE,
        inputs=inputs,
        outputs=outputs | around.as_json(),
        because=f"{because} {around.sentences()}",
    )


_BOUNDS = (1, 2, 4, 8)


def step_by_bound(request: PlanRequest, search: Search, chosen: Candidate) -> dict[int, float]:
    """Step time of the chosen topology under wider staleness bounds.

    Args:
        search: whose trainers do not know the bound.
    """
    steps = {}
    for bound in _BOUNDS:
        at = chosen
        if bound != request.max_staleness_steps:
            wider = Search(replace(request, max_staleness_steps=bound), layouts=[chosen.rollout_layout])
            wider.trainers = search.trainers
            at = wider.candidate(chosen.mode, *chosen.split, chosen.train.offload)
        steps[bound] = at.step_s
    return steps


def expected_staleness(request: PlanRequest, chosen: Candidate, publication: Publication) -> AsyncAccount:
    """Ages in the steady state of an asynchronous topology."""
    rollout = chosen.account.rollout
    return async_account(
        request.workload.lengths(),
        num_sequences=request.workload.num_sequences,
        token_s=rollout.decode_step_s,
        update_s=chosen.step_s,
        publish_s=publication.seconds,
        max_staleness_steps=request.max_staleness_steps,
    )
