"""The table of exporters: the chosen plan in another system's own words, headed by what those words leave out."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollbook.errors import PlanError, nearest_name
from rollbook.observe.numbers import counted
from rollbook.planner.emit_areal import areal_yaml
from rollbook.planner.emit_kubernetes import kubernetes_yaml
from rollbook.planner.emit_ray import ray_script
from rollbook.planner.emit_slime import slime_script
from rollbook.planner.emit_verl import verl_script
from rollbook.planner.offload import HELD
from rollbook.planner.plan import Plan

Emitter = Callable[[Plan], str]


def planned_parts(plan: Plan) -> dict[str, str]:
    """What this plan has beyond the plainest job, by the name an exporter claims it under, each as a clause."""
    chosen, r = plan.require_chosen(), plan.request
    work = r.workload
    of_model = f" of {work.reward_model.name}" if work.reward_model else ""
    parts = {
        "adapters": (work.lora_rank > 0, f"adapters of rank {work.lora_rank}"),
        "critic": (work.algorithm == "ppo", "a critic"),
        "reward": (work.reward != "rule", f"a reward by {work.reward}{of_model}"),
        "turns": (work.agent.num_turns > 1, f"{counted(work.agent.num_turns, 'turn')} with an environment"),
        "epochs": (work.num_epochs > 1, f"{work.num_epochs} passes of training over a step"),
        "float8": (chosen.rollout_layout.weight_dtype == "float8", "engine weights in float8"),
        "own prompts": (not work.shares_prompt, "members of a group that prefill their prompt each"),
        "host state": (chosen.train.is_offloaded, f"{HELD[chosen.train.offload]} in host memory"),
        "rebuilt engine": (r.rebuilds_engine, "KV pool and graphs made again at each wake"),
        "checkpoints beside": (r.checkpoint_is_async, "checkpoints written beside training"),
        "lending": (r.lend_switch_s > 0, "training GPUs lent to generation"),
    }
    return {name: clause for name, (is_planned, clause) in parts.items() if is_planned}


def _listing_omissions(
    name: str, write: Emitter, *, refused: tuple[str, ...] = (), written: tuple[str, ...]
) -> Emitter:
    """`write`, headed by the parts of the plan that it does not write.

    Args:
        refused: parts without which the job would be another one.
        written: parts that `write` has settings for.
    """

    def checked(plan: Plan) -> str:
        parts = planned_parts(plan)
        for part in refused:
            if clause := parts.get(part):
                raise PlanError(
                    f"{clause} cannot be exported to {name}", f"plan without, or use {_takers(part)}"
                )
        text = write(plan)
        missing = [clause for part, clause in parts.items() if part not in written]
        if not missing:
            return text
        head = ["# Planned, and not set here:", *(f"# - {clause}" for clause in missing)]
        first, _, rest = text.partition("\n")
        return "\n".join([first, *head, rest] if first.startswith("#!") else [*head, text])

    return checked


def _takers(part: str) -> str:
    return " or ".join(
        (*(f"--emit {name}" for name, parts in _WRITTEN.items() if part in parts), "-o run.toml")
    )


_WRITTEN: Mapping[str, tuple[str, ...]] = {
    "verl": ("adapters", "critic", "epochs", "float8", "host state"),
    "slime": ("critic", "host state"),
    "areal": (),
}
"""Parts of a plan that each exporter of a training system has settings for."""

EMITTERS: Mapping[str, Emitter] = {
    "verl": _listing_omissions("verl", verl_script, written=_WRITTEN["verl"]),
    "slime": _listing_omissions("slime", slime_script, refused=("adapters",), written=_WRITTEN["slime"]),
    "areal": _listing_omissions("areal", areal_yaml, refused=("adapters",), written=_WRITTEN["areal"]),
    "ray": ray_script,
    "kubernetes": kubernetes_yaml,
}
"""Ray's script places pools, and Kubernetes' manifest holds a run.toml, which lists its own differences."""


def emitter(name: str) -> Emitter:
    """Raises PlanError, naming the nearest, for an unknown system."""
    if name not in EMITTERS:
        raise PlanError(f"--emit is {name!r}", nearest_name(name, EMITTERS))
    return EMITTERS[name]
