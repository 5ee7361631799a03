"""The pools of machines of a plan: who gets how many nodes, and the CPU pool for environments."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollbook.ledger.step import is_colocated
from rollbook.planner.candidate import Candidate
from rollbook.planner.plan import Plan

CORES_PER_CPU_NODE = 64
_CORES_PER_GPU = 8
"""CPU cores that a GPU's share of engine, trainer and loader takes."""
_HOST_BYTES_PER_GPU = 128 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal nodes that serve one role."""

    name: str
    """`gpu` (both roles in turn), `rollout`, `train` or `sandbox`."""
    num_nodes: int
    gpus_per_node: int
    cores_per_node: int
    host_bytes_per_node: int


def pools(plan: Plan, chosen: Candidate) -> list[Pool]:
    """GPU pools of the topology, and a CPU pool where environments or sandboxes need one."""
    per_node = plan.request.cluster.gpus_per_node
    if not is_colocated(chosen.mode):
        rollout, train = chosen.split
        found = [_gpu_pool("rollout", rollout, per_node), _gpu_pool("train", train, per_node)]
    else:
        found = [_gpu_pool("gpu", plan.request.cluster.num_gpus, per_node)]
    cores = sandbox_cores(plan, chosen)
    if cores:
        nodes = math.ceil(cores / CORES_PER_CPU_NODE)
        found.append(
            Pool(
                name="sandbox",
                num_nodes=nodes,
                gpus_per_node=0,
                cores_per_node=CORES_PER_CPU_NODE,
                host_bytes_per_node=math.ceil(CORES_PER_CPU_NODE * _bytes_per_core(plan)),
            )
        )
    return found


def _bytes_per_core(plan: Plan) -> float:
    agent = plan.request.workload.agent
    return agent.bytes_per_sandbox / agent.cpu_cores_per_sandbox


def _gpu_pool(name: str, num_gpus: int, per_node: int) -> Pool:
    per_node = min(per_node, num_gpus)
    return Pool(
        name=name,
        num_nodes=math.ceil(num_gpus / per_node),
        gpus_per_node=per_node,
        cores_per_node=_CORES_PER_GPU * per_node,
        host_bytes_per_node=_HOST_BYTES_PER_GPU * per_node,
    )


def sandbox_cores(plan: Plan, chosen: Candidate) -> int:
    """CPU cores that sandboxes hold at once: all that are open, or those that score a response when it ends."""
    work = plan.request.workload
    if plan.beside.agents is not None:
        return math.ceil(plan.beside.agents.held_cores)
    if work.reward != "sandbox":
        return 0
    scoring_s = work.agent.sandbox_start_s + _SANDBOX_S
    busy_s = work.num_sequences * scoring_s * work.agent.cpu_cores_per_sandbox
    return max(1, math.ceil(_HEADROOM * busy_s / chosen.step_s))


_SANDBOX_S = 5.0
"""Seconds of one scoring run where nothing was said."""
_HEADROOM = 2.0
"""Calls come in bursts when many responses end together."""
