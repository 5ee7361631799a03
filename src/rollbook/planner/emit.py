"""The table of exporters: the chosen plan in another system's own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollbook.errors import PlanError, nearest_name
from rollbook.planner.emit_areal import areal_yaml
from rollbook.planner.emit_kubernetes import kubernetes_yaml
from rollbook.planner.emit_ray import ray_script
from rollbook.planner.emit_slime import slime_script
from rollbook.planner.emit_verl import verl_script
from rollbook.planner.plan import Plan

Emitter = Callable[[Plan], str]


def _without_adapters(name: str, write: Emitter) -> Emitter:
    """An exporter of a system whose settings for adapters are not known here: it refuses them."""

    def checked(plan: Plan) -> str:
        if rank := plan.request.workload.lora_rank:
            raise PlanError(
                f"adapters of rank {rank} cannot be exported to {name}",
                "plan without --lora-rank, or use --emit verl or -o run.toml",
            )
        return write(plan)

    return checked


EMITTERS: Mapping[str, Emitter] = {
    "verl": verl_script,
    "slime": _without_adapters("slime", slime_script),
    "areal": _without_adapters("areal", areal_yaml),
    "ray": ray_script,
    "kubernetes": kubernetes_yaml,
}


def emitter(name: str) -> Emitter:
    """Raises PlanError, naming the nearest, for an unknown system."""
    if name not in EMITTERS:
        raise PlanError(f"--emit is {name!r}", nearest_name(name, EMITTERS))
    return EMITTERS[name]
