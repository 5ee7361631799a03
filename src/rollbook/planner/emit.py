"""The table of exporters: the chosen plan in another system's own words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollbook.errors import PlanError, nearest_name
from rollbook.planner.plan import Plan

Emitter = Callable[[Plan], str]

EMITTERS: Mapping[str, Emitter] = {}


def emitter(name: str) -> Emitter:
    """Raises PlanError, naming the nearest, for an unknown system."""
    if name not in EMITTERS:
        raise PlanError(f"--emit is {name!r}", nearest_name(name, EMITTERS))
    return EMITTERS[name]
