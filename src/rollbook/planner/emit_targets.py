"""What runs the plan that is written for it: by that a plan is priced, before the exporter itself is asked."""

from __future__ import annotations

from collections.abc import Mapping

from rollbook.errors import PlanError

LOOPS: Mapping[str, str] = {"verl": "verl", "slime": "slime", "kubernetes": "rollbook"}
"""Assumptions that price the loop which runs what an exporter writes, where that loop was measured."""

TRAINS_WITH: Mapping[str, str] = {"slime": "megatron"}
"""The stack of a system that has no other."""
_ENGINES: Mapping[str, tuple[str, ...]] = {
    "verl": ("vllm", "sglang"),
    "slime": ("sglang",),
    "areal": ("sglang",),
    "kubernetes": ("vllm",),
}
"""Engine families that an exporter writes for, the usual one first."""


def engine_written(asked: str, emit: str, *, writes_config: bool) -> str:
    """The engine family to price: what was asked for, or that of whatever runs what is written.

    Raises:
        PlanError: the system that is written for does not run it.
    """
    runs = ("vllm",) if writes_config else _ENGINES.get(emit, ())
    if asked and runs and asked not in runs:
        what = "-o" if writes_config else f"--emit {emit}"
        raise PlanError(
            f"--engine is {asked} beside {what}, which writes for {' or '.join(runs)}",
            f"leave out --engine, or {what}",
        )
    return asked or (runs[0] if runs else "vllm")
