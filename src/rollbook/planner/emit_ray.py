"""The plan as Ray placement groups: one bundle a node, each pool gang-scheduled on nodes of its own."""

from __future__ import annotations

import json

from rollbook.planner.plan import Plan
from rollbook.planner.pools import Pool, pools
from rollbook.planner.words import MODE_TITLES, split

_SCRIPT = '''"""Placement groups for {title}.

{because}
"""

import ray
from ray.util.placement_group import PlacementGroup, placement_group

POOLS = {pools}
# GPUs of each engine replica: (bundle of its first GPU, first GPU in that bundle, GPUs).
REPLICAS = {replicas}


def create(timeout_s: float = 600.0) -> dict[str, PlacementGroup]:
    """All pools or none: a pool that cannot be placed in time removes the others."""
    groups = {{name: placement_group(pool["bundles"], pool["strategy"], name=name) for name, pool in POOLS.items()}}
    for name, group in groups.items():
        if not group.wait(timeout_s):
            for other in groups.values():
                ray.util.remove_placement_group(other)
            raise RuntimeError(f"pool {{name}} was not placed within {{timeout_s:.0f}} s: {{POOLS[name]}}")
    return groups


if __name__ == "__main__":
    ray.init(address="auto")
    print(create())
'''


def ray_script(plan: Plan) -> str:
    """A Python file that creates the pools on a running Ray cluster.

    Raises:
        PlanError: nothing fits.
    """
    chosen = plan.require_chosen()
    r = plan.request
    found = pools(plan, chosen)
    engine_pool = found[0]
    replicas = _replicas(engine_pool, chosen.rollout_layout.num_gpus, chosen.account.rollout.num_replicas)
    title = (
        f"{r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}, {MODE_TITLES[chosen.mode]} "
        f"{split(*chosen.split, chosen.mode)}"
    )
    because = f"Expected: {chosen.expected} a step, because {plan.choice_because}."
    return _SCRIPT.format(
        title=title,
        because=because,
        pools=_literal({pool.name: _group(pool) for pool in found}),
        replicas=json.dumps(replicas),
    )


def _group(pool: Pool) -> dict[str, object]:
    bundle: dict[str, float] = {"CPU": pool.cores_per_node}
    if pool.gpus_per_node:
        bundle["GPU"] = pool.gpus_per_node
    # A bundle fills its node, so that no other job shares its links.
    strategy = "STRICT_SPREAD" if pool.num_nodes > 1 else "STRICT_PACK"
    return {"bundles": [bundle] * pool.num_nodes, "strategy": strategy}


def _replicas(pool: Pool, gpus_per_replica: int, num_replicas: int) -> list[tuple[int, int, int]]:
    starts = [i * gpus_per_replica for i in range(num_replicas)]
    return [(at // pool.gpus_per_node, at % pool.gpus_per_node, gpus_per_replica) for at in starts]


def _literal(value: dict[str, dict[str, object]]) -> str:
    lines = ["{"]
    for name, group in value.items():
        bundles = group["bundles"]
        assert isinstance(bundles, list)
        text = f"[{json.dumps(bundles[0])}] * {len(bundles)}"
        lines.append(f'    "{name}": {{"bundles": {text}, "strategy": "{group["strategy"]}"}},')
    return "\n".join([*lines, "}"])
