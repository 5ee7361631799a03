"""The plain account: what a careful person works out with a pocket calculator.

Weights 2 B and training state 16 B per parameter; 2N FLOPs a token for generation and each forward, 6N for
training, 8N for a critic, with N the parameters behind one token; every rate a fixed fraction of a peak. A
decode step reads all weights of the replica once (a batch of a mixture-of-experts model touches all experts)
and the KV of half-grown responses.
"""

from __future__ import annotations

import math

from rollbook.ledger.account import Flops, RolloutSide, TrainSide
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.quantity import format_bytes
from rollbook.ledger.workload import Workload
from rollbook.observe.numbers import counted


def paper_flops(model: ModelSpec, workload: Workload) -> Flops:
    """FLOPs of one step. Every pass sees prompt, responses and observations of every sequence."""
    per_token = 2.0 * model.active_params
    one_pass = per_token * workload.trained_tokens
    prefill_tokens = workload.num_prefills * workload.prompt_tokens
    prefill_tokens += workload.num_sequences * workload.observation_tokens
    has_critic = workload.algorithm == "ppo"
    has_reward_model = _has_reward_model(workload)
    return Flops(
        generate=per_token * workload.response_tokens_total,
        prefill=per_token * prefill_tokens,
        reference=one_pass if workload.uses_reference else 0.0,
        proximal=one_pass if workload.uses_proximal else 0.0,
        reward_model=one_pass if has_reward_model else 0.0,
        train=3 * one_pass * workload.num_epochs,
        critic=(1 + 3 * workload.num_epochs) * one_pass if has_critic else 0.0,
        num_epochs=workload.num_epochs,
    )


def paper_rollout_side(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    num_gpus: int,
    tp_size: int,
) -> RolloutSide:
    """Generation on `num_gpus` devices in replicas of `tp_size`."""
    accelerator = cluster.accelerator
    num_replicas = max(num_gpus // tp_size, 1)
    usable_bytes = tp_size * accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    weights_bytes = assumptions.weight_bytes_per_param * model.params
    pool_bytes = usable_bytes - weights_bytes
    sequence_bytes = half_grown_tokens(workload) * model.kv_bytes_per_token(assumptions.kv_bytes_per_number)
    slots = min(math.floor(pool_bytes / sequence_bytes), math.ceil(workload.num_sequences / num_replicas))
    why_not = []
    if num_gpus < tp_size:
        why_not.append(f"a replica takes {counted(tp_size, 'GPU')}, the rollout side has {num_gpus}")
    if slots < 1:
        why_not.append(
            f"a replica of {counted(tp_size, 'GPU')} holds {format_bytes(usable_bytes)}, weights take "
            f"{format_bytes(weights_bytes)} and one sequence {format_bytes(sequence_bytes)}"
        )
        slots = 1
    bytes_per_s = tp_size * accelerator.hbm_bytes_per_s * assumptions.decode_hbm_frac
    decode_step_s = (weights_bytes + slots * sequence_bytes) / bytes_per_s
    tokens_per_s = num_replicas * slots / decode_step_s
    flops = paper_flops(model, workload)
    peak = accelerator.peak("bfloat16")
    tokens_per_s_per_gpu = slots / decode_step_s / tp_size
    idle_gpus = num_gpus - num_replicas * tp_size
    return RolloutSide(
        num_gpus=num_gpus,
        tp_size=tp_size,
        num_replicas=num_replicas,
        slots_per_replica=slots,
        num_waves=math.ceil(workload.num_sequences / (num_replicas * slots)),
        decode_step_s=decode_step_s,
        throughput_s=workload.response_tokens_total / tokens_per_s,
        tail_s=(workload.max_response_tokens - workload.response_tokens) * weights_bytes / bytes_per_s,
        prefill_s=flops.prefill / (num_gpus * peak * assumptions.forward_mfu_frac),
        tokens_per_s_per_gpu=tokens_per_s_per_gpu,
        mfu_frac=tokens_per_s_per_gpu * 2 * model.active_params / peak,
        weights_bytes_per_gpu=weights_bytes / tp_size,
        kv_pool_bytes=max(pool_bytes, 0.0),
        why_not=tuple(why_not),
        notes=(
            f"{idle_gpus} of {counted(num_gpus, 'rollout GPU')} {'is' if idle_gpus == 1 else 'are'} left over "
            f"at TP {tp_size}",
        )
        if idle_gpus > 0
        else (),
    )


def paper_train_side(
    model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions, *, num_gpus: int
) -> TrainSide:
    """Forwards and training, sharded evenly over `num_gpus` devices."""
    accelerator = cluster.accelerator
    flops = paper_flops(model, workload)
    peak = num_gpus * accelerator.peak("bfloat16")
    critic_forward = flops.critic_values
    forward_flops = flops.reference + flops.proximal + flops.reward_model + critic_forward
    train_flops = flops.train + flops.critic - critic_forward
    state_bytes = assumptions.train_state_bytes_per_param * model.params
    critic_bytes = state_bytes * (workload.num_trained_models - 1)
    weights_bytes = assumptions.weight_bytes_per_param * model.params
    usable_bytes = accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    why_not = []
    # As the account has it, the state decides; frozen weights may wait their turn in host memory.
    held_bytes = state_bytes + critic_bytes
    if held_bytes > num_gpus * usable_bytes:
        why_not.append(
            f"{counted(num_gpus, 'GPU')} cannot hold {format_bytes(held_bytes)} of training state: "
            f"{format_bytes(held_bytes / num_gpus)} a GPU of {format_bytes(usable_bytes)} usable; "
            f"it takes at least {math.ceil(held_bytes / usable_bytes)}"
        )
    train_s = train_flops / (peak * assumptions.train_mfu_frac)
    return TrainSide(
        num_gpus=num_gpus,
        forward_s=forward_flops / (peak * assumptions.forward_mfu_frac),
        train_s=train_s,
        train_state_bytes_per_gpu=state_bytes / num_gpus,
        reference_bytes_per_gpu=weights_bytes / num_gpus if workload.uses_reference else 0.0,
        reward_model_bytes_per_gpu=weights_bytes / num_gpus if _has_reward_model(workload) else 0.0,
        critic_state_bytes_per_gpu=critic_bytes / num_gpus,
        mfu_frac=assumptions.train_mfu_frac,
        why_not=tuple(why_not),
    )


def _has_reward_model(workload: Workload) -> bool:
    """The plain account reads a trajectory once for its reward, also where the model then writes a verdict."""
    return workload.reward in ("model", "generative")


def paper_switch_s(model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions) -> float:
    """Offload and reload of a colocated step, each GPU its share: `offload_bytes_per_param` both ways, and the
    training state of a critic."""
    critics = workload.num_trained_models - 1
    per_param = assumptions.offload_bytes_per_param + critics * assumptions.train_state_bytes_per_param
    moved_bytes = 2 * per_param * model.params
    return moved_bytes / cluster.num_gpus / assumptions.offload_bytes_per_s


def paper_sync_s(model: ModelSpec, assumptions: Assumptions) -> float:
    """One copy of the weights over one link; replicas receive at the same time."""
    return assumptions.weight_bytes_per_param * model.params / assumptions.sync_bytes_per_s


def half_grown_tokens(workload: Workload) -> float:
    """Mean context of a running sequence: prompt and half its response and observations."""
    return workload.prompt_tokens + (workload.response_tokens + workload.observation_tokens) / 2
