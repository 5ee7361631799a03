"""Which engine family decoding is priced as, and what another one would make of it."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from rollbook.ledger.step import Layouts, is_colocated, rollout_side
from rollbook.planner.candidate import ENGINE_TITLES, Candidate, rollout_s
from rollbook.planner.idling import held_bytes
from rollbook.planner.request import Engine, PlanRequest
from rollbook.planner.words import seconds

_SAME_FRAC = 0.005
"""Up to which two families are priced alike."""


def engine_seconds(request: PlanRequest, of: Candidate) -> dict[Engine, float]:
    """Generation of a step as each family, the planned one first, in the layout of `of`."""
    families: list[Engine] = sorted(get_args(Engine), key=lambda name: name != request.engine)
    return {name: _generation_s(request, of, name) for name in families}


def _generation_s(request: PlanRequest, of: Candidate, engine: Engine) -> float:
    side = rollout_side(
        request.model,
        request.workload,
        request.cluster,
        request.assumptions,
        mode=of.mode,
        num_gpus=of.account.rollout.num_gpus,
        layouts=Layouts(
            replica=replace(of.rollout_layout, engine=engine),
            max_staleness_steps=max(request.max_staleness_steps, 1),
        ),
        held_bytes=held_bytes(request, of.train, of.sleep) if is_colocated(of.mode) else 0.0,
        follows_environments=False,  # which change nothing of `rollout_s`
    )
    return rollout_s(side, of.mode)


def engine_sentence(request: PlanRequest, of: Candidate) -> str:
    """The family that is assumed, and how far the others are from it; empty where the books know no families."""
    if request.cluster.accelerator.is_cpu or request.assumptions.method == "paper":
        return ""
    (_, planned_s), *others = engine_seconds(request, of).items()
    head = f"Engines are priced as {ENGINE_TITLES[request.engine]}"
    told: dict[str, list[str]] = {}
    for name, other_s in others:
        if abs(other_s - planned_s) > _SAME_FRAC * planned_s:
            told.setdefault(seconds(other_s), []).append(ENGINE_TITLES[name])
    if not told:
        names = " and ".join(ENGINE_TITLES[name] for name, _ in others)
        return f"{head}; the ledger knows no difference to {names} here, where the device sets the pace."
    apart = ", ".join(
        f"{' and '.join(names)} {'would take ' if not i else ''}{took}"
        for i, (took, names) in enumerate(told.items())
    )
    return f"{head}, which generates a step in {seconds(planned_s)}; {apart}."
