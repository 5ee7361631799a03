"""Steps 1 to 3 of the derivation: what a step has to do, what has to fit where, how generation runs."""

from __future__ import annotations

import math

from rollbook.ledger.account import Flops
from rollbook.ledger.adapters import policy_state_bytes
from rollbook.ledger.step import shared_memory_frac
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import Candidate, rollout_layout_json
from rollbook.planner.engines import engine_sentence
from rollbook.planner.idling import has_choice, held_bytes
from rollbook.planner.offload import HELD, host_state_bytes
from rollbook.planner.reasoned import Reasoned
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import count, flop_count, format_bytes, percent, seconds

_MOST_OF_READING = 0.3
"""Share of peak above which a decode step is no matter of memory alone."""


def step_work(request: PlanRequest, base: Candidate) -> Reasoned:
    """Tokens and FLOPs, and the time that they take at peak."""
    work, model, flops = request.workload, request.model, base.account.flops
    at_peak_s = flops.total / request.cluster.peak_flops_per_s
    training = flops.train + flops.critic
    return Reasoned(
        step=1,
        title="What one step has to do",
        inputs={
            "num_prompts": work.num_prompts,
            "group_size": work.group_size,
            "prompt_tokens": work.prompt_tokens,
            "response_tokens": work.response_tokens,
            "max_response_tokens": work.max_response_tokens,
            "algorithm": work.algorithm,
            "params": model.params,
            "active_params": model.active_params,
        },
        outputs={
            "num_sequences": work.num_sequences,
            "response_tokens_total": work.response_tokens_total,
            "trained_tokens": work.trained_tokens,
            "flops": flops.total,
            "generate_frac": (flops.generate + flops.prefill) / flops.total,
            "train_frac": training / flops.total,
            "at_peak_s": at_peak_s,
        },
        because=(
            f"A step samples {count(work.num_sequences)} responses ({count(work.response_tokens_total)} tokens) and "
            f"passes {count(work.trained_tokens)} tokens through the trainer: {flop_count(flops.total)} FLOPs, of "
            f"which {_shares(flops)}. At the peak of {request.cluster.num_gpus} "
            f"{request.cluster.accelerator.name} that is {seconds(at_peak_s)}; whatever the step takes beyond that "
            f"has to be explained.{_critic_note(request)}"
        ),
    )


def _shares(flops: Flops) -> str:
    """Of the step's FLOPs: all kinds of work that it has."""
    parts = {
        "training is": flops.train + flops.critic,
        "generation": flops.generate + flops.prefill,
        "the reference and proximal passes": flops.reference + flops.proximal,
        "the reward model": flops.reward_model,
    }
    *first, last = (f"{name} {percent(value / flops.total)}" for name, value in parts.items() if value)
    return f"{', '.join(first)} and {last}"


def _critic_note(request: PlanRequest) -> str:
    """What the paper account takes a critic for, which its text leaves open."""
    if request.workload.num_trained_models == 1 or request.assumptions.method != "paper":
        return ""
    return (
        f" The critic's 8 N FLOPs a token are 2 N of values at the forward MFU and 6 N of training at the training "
        f"MFU; its {request.assumptions.train_state_bytes_per_param:g} bytes a parameter cross in a colocated "
        "hand-over like the policy's."
    )


def step_memory(request: PlanRequest, base: Candidate) -> Reasoned:
    """Training state, weights and KV, and the fewest GPUs of each."""
    cluster, assumptions, model = request.cluster, request.assumptions, request.model
    memory = base.account.memory
    usable = cluster.accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    num_models = request.workload.num_trained_models
    rank = request.workload.lora_rank
    state = num_models * policy_state_bytes(model, request.workload, assumptions)
    on_host = host_state_bytes(request, base.train.offload)
    least = max(math.ceil((state - on_host) / usable), 1)
    per_node = cluster.gpus_per_node
    nodes = math.ceil(least / per_node)
    weights = memory["weights_bytes"]
    critic = ", policy and critic," if num_models == 2 else ""
    kept = (
        f"of it {format_bytes(on_host)}, the {HELD[base.train.offload]}, are kept in host memory; "
        if on_host
        else ""
    )
    of = f" of the adapters, {assumptions.weight_bytes_per_param:g} of the frozen base" if rank else ""
    return Reasoned(
        step=2,
        title="What has to fit where",
        inputs={
            "hbm_bytes": cluster.accelerator.hbm_bytes,
            "memory_overhead_frac": assumptions.memory_overhead_frac,
            "train_state_bytes_per_param": assumptions.train_state_bytes_per_param,
        },
        outputs={
            "usable_bytes_per_gpu": usable,
            "weights_bytes": weights,
            "train_state_bytes": state,
            "host_state_bytes": on_host,
            "min_train_gpus": least,
            "replica_gpus": base.rollout_layout.num_gpus,
            "kv_bytes_per_token": memory["kv_bytes_per_token"],
        },
        because=(
            f"The training state of {model.name}{critic} is {format_bytes(state)} at "
            f"{assumptions.train_state_bytes_per_param:g} bytes a parameter{of}; {kept}with {format_bytes(usable)} "
            f"usable on a GPU {'the rest' if on_host else 'it'} needs at least {counted(least, 'GPU')}"
            + (f", so {nodes} whole nodes" if nodes > 1 and cluster.num_nodes > 1 else "")
            + f", before activations. {_replica_words(request, base)}"
        ),
    )


def _replica_words(request: PlanRequest, base: Candidate) -> str:
    """What the weights take of an engine replica: in its number format, tensors that several GPUs repeat once each."""
    rollout, num_gpus = base.account.rollout, base.rollout_layout.num_gpus
    held = num_gpus * (rollout.weights_bytes_per_gpu - rollout.judge_bytes_per_gpu)
    replica = f"replica of {counted(num_gpus, 'GPU')}"
    if rollout.why_not:
        return f"The {format_bytes(held)} of weights for generation are more than a {replica} can hold."
    judge = num_gpus * rollout.judge_bytes_per_gpu
    both = f" and the {format_bytes(judge)} of the reward model" if judge else ""
    return (
        f"A {replica} holds the {format_bytes(held)} of weights for generation{both}, with "
        f"{format_bytes(rollout.kv_pool_bytes)} left for KV{_engine_share(request, base)}."
    )


def _engine_share(request: PlanRequest, base: Candidate) -> str:
    """How much of a GPU an engine may take where a trainer lives on it, which is what `base` is."""
    if not has_choice(request):
        return ""
    held = held_bytes(request, base.train, base.sleep)
    if (
        shared_memory_frac(request.cluster, request.assumptions, held)
        < request.assumptions.engine_memory_frac
    ):
        return f" beside the {format_bytes(held)} that the trainer keeps on each GPU while they generate"
    return (
        f", of the {percent(request.assumptions.engine_memory_frac)} of a GPU that an engine beside a trainer may take "
        "(of its own GPUs it takes all that is usable)"
    )


def step_generation(request: PlanRequest, base: Candidate) -> Reasoned:
    """Slots, waves, decode steps and the tail, on all GPUs."""
    rollout, work = base.account.rollout, request.workload
    busy = base.account.seconds.generate_throughput + base.account.seconds.generate_tail
    waves = counted(rollout.num_waves, "wave")
    replicas = counted(rollout.num_replicas, "replica")
    whose = "the replica" if rollout.num_replicas == 1 else "all replicas"
    return Reasoned(
        step=3,
        title="How generation runs",
        inputs={
            "replica": rollout_layout_json(base.rollout_layout),
            "num_rollout_gpus": rollout.num_gpus,
            "response_tokens": work.response_tokens,
            "max_response_tokens": work.max_response_tokens,
        },
        outputs={
            "num_replicas": rollout.num_replicas,
            "slots_per_replica": rollout.slots_per_replica,
            "num_waves": rollout.num_waves,
            "decode_step_s": rollout.decode_step_s,
            "tokens_per_s_per_gpu": rollout.tokens_per_s_per_gpu,
            "mfu_frac": rollout.mfu_frac,
            "generate_s": busy,
            "clip_frac": work.lengths().clip_frac,
            "tail_frac": base.account.tail_frac,
        },
        because=(
            f"On all GPUs, {replicas} of {counted(rollout.slots_per_replica, 'slot')} "
            f"{'takes' if rollout.num_replicas == 1 else 'each take their share of'} the "
            f"{count(work.num_sequences)} responses in {waves}. A decode step of {seconds(rollout.decode_step_s)} "
            f"{'is spent reading memory, not computing' if rollout.mfu_frac < _MOST_OF_READING else 'computes'}: "
            f"{percent(rollout.mfu_frac)} of peak with full slots. "
            + (
                f"Of the {seconds(busy)} of decoding, {percent(base.account.tail_frac)} is the tail, in which a few "
                f"responses of up to {count(work.max_response_tokens)} tokens hold {whose}; only asynchrony can "
                "fill it."
                if base.account.seconds.generate_tail
                else f"The {seconds(busy)} of decoding have no tail: all responses end together."
            )
            + (f" {families}" if (families := engine_sentence(request, base)) else "")
        ),
    )
