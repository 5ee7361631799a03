"""What `rollbook train` makes of a plan for GPUs: in one process beside vLLM's own, or over Ray with vLLM inside it.

    one training GPU, or adapters   in one process; each vLLM replica in processes of its own
    more                            on Ray: FSDP2 divides the trainer over as many ranks as the plan has GPUs, and each
                                    replica is one process of one GPU with vLLM inside it; engine and trainer that
                                    share a GPU stay on it together

Where a rank or a replica of that kind does not fit its GPU, one process is all that is left. Every difference to the
plan is listed with the key of the config that carries it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.decode import replica_weight_bytes
from rollbook.ledger.layout import Recompute, ReplicaLayout, TrainLayout
from rollbook.ledger.memory import TrainMemory, train_memory
from rollbook.ledger.step import is_colocated, shared_memory_frac
from rollbook.ledger.switch import SleepChoice
from rollbook.planner.candidate import BACKEND_TITLES, Candidate
from rollbook.planner.idling import resident_bytes
from rollbook.planner.layouts import train_degrees
from rollbook.planner.offload import HELD
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """How `train` runs a plan."""

    kind: Literal["inproc", "ray"]
    num_trainer_ranks: int
    num_replicas: int
    replica_gpus: int
    num_slots: int
    kv_pool_bytes: float
    """Of one replica."""
    recompute: Recompute
    """Of the trainer's activations."""
    sleep: SleepChoice
    """What leaves a shared GPU in turn."""
    differences: tuple[str, ...] = ()
    """To the plan, each beginning with the key that carries it; empty: it is carried out as planned."""
    why_not: str = ""
    """Why `train` cannot run it at all; empty where it can."""


def execution(request: PlanRequest, chosen: Candidate) -> Execution:
    """The way `train` can carry out `chosen`, and what of it it cannot."""
    rollout = chosen.account.rollout
    plain = Execution(
        kind="inproc",
        num_trainer_ranks=1,
        num_replicas=rollout.num_replicas,
        replica_gpus=chosen.rollout_layout.num_gpus,
        num_slots=rollout.slots_per_replica,
        kv_pool_bytes=rollout.kv_pool_bytes,
        recompute=chosen.train.layout.recompute,
        sleep=chosen.sleep,
    )
    if request.cluster.accelerator.is_cpu:
        return _with(
            plain, _of_the_workload(request, chosen) + _checkpoint(request) + _on_one_processor(request)
        )
    on_ray = None
    if chosen.split[1] > 1 and not request.workload.lora_rank:
        on_ray = _on_ray(request, chosen)
    if on_ray is None:
        why_not = _no_room_alone(request, chosen)
        alone = _beside_a_whole_trainer(request, chosen, plain)
        differences = _always(request, chosen) + _in_one_process(request, chosen, why_not)
        if alone.sleep != chosen.sleep:
            differences.append(
                "memory: planned that training state stays on the GPUs; whole on one of them it leaves engines too "
                "little, so it waits in host memory while they generate"
            )
        return replace(_with(alone, differences), why_not=why_not)
    return _with(on_ray, _always(request, chosen) + _over_ray(request, chosen, on_ray))


def _with(execution: Execution, differences: list[str]) -> Execution:
    return replace(execution, differences=tuple(differences))


def _on_ray(request: PlanRequest, chosen: Candidate) -> Execution | None:
    """Ranks and replicas of one GPU each; None where one of them does not fit."""
    num_rollout, num_train = chosen.split
    usable = request.cluster.accelerator.hbm_bytes * (1 - request.assumptions.memory_overhead_frac)
    recompute = chosen.train.layout.recompute

    def trainer_bytes(recompute: Recompute) -> float:
        return train_memory(
            request.model,
            request.workload,
            _own_trainer(request),
            num_gpus=num_train,
            layout=TrainLayout(recompute=recompute),
        ).total

    # What the plan splits by CP or TP, FSDP2 alone may hold when it recomputes more.
    if trainer_bytes(recompute) > usable:
        recompute = "full"
    trainer = trainer_bytes(recompute)
    weights = replica_weight_bytes(request.model, ReplicaLayout())
    beside = trainer if is_colocated(chosen.mode) else 0.0
    pool = usable - weights - beside
    work = request.workload
    longest = work.prompt_tokens + work.max_response_tokens + work.observation_tokens
    number = request.assumptions.kv_bytes_per_number
    if trainer > usable or pool < request.model.kv_bytes(longest, number):
        return None
    share = math.ceil(work.num_sequences / num_rollout)
    return Execution(
        kind="ray",
        num_trainer_ranks=num_train,
        num_replicas=num_rollout,
        replica_gpus=1,
        num_slots=max(min(_slots_of(request, pool), share, request.assumptions.max_slots), 1),
        kv_pool_bytes=pool,
        recompute=recompute,
        sleep=SleepChoice(sleep_level=0, moves_state=False),
    )


def _slots_of(request: PlanRequest, pool: float) -> int:
    """Half-grown sequences in so many bytes."""
    work = request.workload
    held = work.prompt_tokens + (work.response_tokens + work.observation_tokens) / 2
    return math.floor(pool / request.model.kv_bytes(held, request.assumptions.kv_bytes_per_number))


def _beside_a_whole_trainer(request: PlanRequest, chosen: Candidate, plain: Execution) -> Execution:
    """`plain`, whose pool leaves room for a trainer that was planned over several GPUs and lies whole on one."""
    if chosen.split[1] == 1 or not is_colocated(chosen.mode) or chosen.sleep.moves_state:
        return plain
    memory = _memory_alone(request, chosen)
    held = memory.total if chosen.sleep.sleep_level == 0 else resident_bytes(memory)
    cluster, work = request.cluster, request.workload
    room = shared_memory_frac(cluster, request.assumptions, held) * cluster.accelerator.hbm_bytes
    pool = plain.replica_gpus * (room - chosen.account.rollout.weights_bytes_per_gpu)
    longest = work.prompt_tokens + work.max_response_tokens + work.observation_tokens
    if pool < request.model.kv_bytes(longest, request.assumptions.kv_bytes_per_number):
        return replace(plain, sleep=SleepChoice())
    pool = min(pool, plain.kv_pool_bytes)
    slots = max(min(_slots_of(request, pool), plain.num_slots), 1)
    return replace(plain, kv_pool_bytes=pool, num_slots=slots)


def _of_the_workload(request: PlanRequest, chosen: Candidate) -> list[str]:
    """What a person has to fill in or `train` has no key for, on any device."""
    work, found = request.workload, []
    if work.reward != "rule":
        found.append(
            f"reward.terms: planned a reward by {work.reward}; the file scores with `exact` until it is replaced"
        )
    if work.agent.num_turns > 1:
        found.append(
            f"data.sources: planned {counted(work.agent.num_turns, 'turn')} with an environment; prompts of a "
            "file have none, "
            "so every trajectory is one turn until a task with one is named"
        )
    if not work.shares_prompt:
        found.append(
            "rollout: planned without sharing prompts in a group; engines share them, which costs less than planned"
        )
    if request.rebuilds_engine and is_colocated(chosen.mode):
        found.append("memory: planned to make KV pool and graphs again at each wake; they are kept")
    if request.lends(chosen.mode):
        found.append(
            "lending.is_on: planned to lend waiting training GPUs; the file leaves it off, because it lends "
            "within one "
            "process only"
        )
    return found


def _always(request: PlanRequest, chosen: Candidate) -> list[str]:
    found = _of_the_workload(request, chosen)
    found += _checkpoint(request)
    if chosen.train.is_offloaded:
        found.append(
            f"trainer: planned with {HELD[chosen.train.offload]} in host memory; they stay on the device, or go "
            "there "
            "and back with [memory] where the schedule hands the device over"
        )
    if chosen.rollout_layout.weight_dtype not in ("bfloat16", "float16"):
        found.append(
            f"rollout.dtype: planned as {chosen.rollout_layout.weight_dtype} weights; engines hold bfloat16 at least"
        )
    return found


def _on_one_processor(request: PlanRequest) -> list[str]:
    if (planned := request.cluster.num_gpus) == 1:
        return []
    return [
        f"cluster: planned {planned} machines like this one; the file runs on one, where a step takes about "
        f"{planned} "
        "times as long. Plan with --num-gpus 1 for its seconds"
    ]


def _checkpoint(request: PlanRequest) -> list[str]:
    if not request.checkpoint_is_async:
        return []
    return ["checkpoint: planned to be written beside training; training stands still until it is written"]


def _own_trainer(request: PlanRequest) -> Assumptions:
    """`train` is an FSDP2 trainer, whatever was planned."""
    return replace(request.assumptions, stack="fsdp")


def _memory_alone(request: PlanRequest, chosen: Candidate) -> TrainMemory:
    """Of a trainer that is one process on one GPU."""
    layout = TrainLayout(recompute=chosen.train.layout.recompute, lora=request.workload.lora_rank > 0)
    return train_memory(request.model, request.workload, _own_trainer(request), num_gpus=1, layout=layout)


def _no_room_alone(request: PlanRequest, chosen: Candidate) -> str:
    alone = _memory_alone(request, chosen).total
    usable = request.cluster.accelerator.hbm_bytes * (1 - request.assumptions.memory_overhead_frac)
    if chosen.split[1] == 1 or alone <= usable:
        return ""
    return (
        f"its {format_bytes(alone)} do not fit into {format_bytes(usable)}, so `train` will run out of memory: print "
        "the plan for another trainer with --emit verl, slime or areal"
    )


def _in_one_process(request: PlanRequest, chosen: Candidate, why_not: str) -> list[str]:
    found = []
    num_train = chosen.split[1]
    if num_train > 1:
        alone = format_bytes(_memory_alone(request, chosen).total)
        fits = f"its {alone} fit, and training takes {num_train} times as long"
        ends = f"; {why_not or fits}"
        found.append(
            f"cluster.num_trainer_ranks: planned {counted(num_train, 'training GPU')}; it is one process on one "
            f"GPU{ends}"
        )
    if request.cluster.num_nodes > 1:
        found.append(
            f"rollout.num_replicas: planned on {request.cluster.num_nodes} hosts; this file runs on one, because "
            f"vLLM's processes take weights within a host. For one host plan with --num-gpus "
            f"{request.cluster.gpus_per_node}"
        )
    if request.workload.publishes_adapters:
        found.append(
            "model.lora.publish: planned adapters alone; vLLM's processes take them merged into whole weights"
        )
    return found


def _over_ray(request: PlanRequest, chosen: Candidate, on_ray: Execution) -> list[str]:
    rollout, layout = chosen.account.rollout, chosen.rollout_layout
    found = []
    if layout.num_gpus > 1:
        found.append(
            f"rollout.num_replicas: planned {rollout.num_replicas} of {counted(layout.num_gpus, 'GPU')}; it is "
            f"{on_ray.num_replicas} of one GPU each, because a replica on Ray is one process"
        )
    if degrees := ", ".join(train_degrees(chosen.train.layout)):
        planned = f"{BACKEND_TITLES[chosen.train.backend]} with {degrees}"
        found.append(f"trainer: planned as {planned}; FSDP2 alone divides it over the same GPUs")
    if on_ray.recompute != chosen.train.layout.recompute:
        found.append(
            f"trainer.gradient_checkpointing: planned {chosen.train.layout.recompute} recomputation; undivided, the "
            "longest sequence fits only when everything is computed again"
        )
    if is_colocated(chosen.mode) and not chosen.sleep.moves_nothing:
        planned = "hand-overs of every GPU" if chosen.sleep.moves_state else "engines that sleep"
        found.append(
            f"memory: planned {planned}; on Ray engine and trainer stay on it together, which leaves "
            f"{format_bytes(on_ray.kv_pool_bytes)} of KV a GPU where the plan has "
            f"{format_bytes(rollout.kv_pool_bytes / layout.num_gpus)}"
        )
    found.append(
        f"sync.transport: planned {chosen.sync_method}; between Ray's processes it is "
        f"{'files on a shared disk' if request.cluster.num_nodes > 1 else 'shared memory of the host'}"
    )
    return found
