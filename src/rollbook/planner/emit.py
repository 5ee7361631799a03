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

EMITTERS: Mapping[str, Emitter] = {
    "verl": verl_script,
    "slime": slime_script,
    "areal": areal_yaml,
    "ray": ray_script,
    "kubernetes": kubernetes_yaml,
}


def emitter(name: str) -> Emitter:
    """Raises PlanError, naming the nearest, for an unknown system."""
    if name not in EMITTERS:
        raise PlanError(f"--emit is {name!r}", nearest_name(name, EMITTERS))
    return EMITTERS[name]
