"""The plan as an AReaL 1.0 experiment: separated engines and trainer, bounded by `max_head_offpolicyness`."""

from __future__ import annotations

import math

from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.step import is_colocated
from rollbook.planner.candidate import Candidate
from rollbook.planner.emit_engine import engine_memory_frac, is_megatron, prompt_tokens_of_chunk
from rollbook.planner.engines import engine_sentence
from rollbook.planner.plan import Plan, staleness_bound
from rollbook.planner.words import MODE_TITLES, split_gpus
from rollbook.planner.yaml_text import to_yaml


def areal_yaml(plan: Plan) -> str:
    """YAML of a GRPO experiment.

    Colocated topologies place the engines on the actor's GPUs by scheduling strategy.

    Raises:
        PlanError: nothing fits.
    """
    chosen = plan.require_chosen()
    r, work = plan.request, plan.request.workload
    path = r.loadable
    names = {"experiment_name": "${experiment_name}", "trial_name": "${trial_name}"}
    longest = math.ceil(work.prompt_tokens + work.max_response_tokens + work.observation_tokens)
    micro_batch = {"max_tokens_per_mb": max(r.assumptions.micro_batch_tokens, longest)}
    bound = staleness_bound(chosen, r)
    rollout: dict[str, object] = {
        **names,
        "backend": f"sglang:{_engine_degrees(chosen.rollout_layout, chosen.account.rollout.num_replicas)}",
        "max_concurrent_rollouts": work.num_prompts * (bound + 1),
        "consumer_batch_size": "${train_dataset.batch_size}",
        "max_head_offpolicyness": bound,
        "tokenizer_path": "${tokenizer_path}",
    }
    if is_colocated(chosen.mode):
        rollout["scheduling_strategy"] = {"type": "colocation", "target": "actor"}
    actor: dict[str, object] = {
        **names,
        "path": path,
        "backend": _trainer_backend(chosen),
        "dtype": "bfloat16",
        "gradient_checkpointing": chosen.train.layout.recompute == "full",
        "mb_spec": micro_batch,
        "optimizer": {"type": "adam", "lr": 1e-6, "weight_decay": 0.01, "gradient_clipping": 1.0},
        "ppo_n_minibatches": work.num_mini_batches,
        "eps_clip": 0.2,
        "kl_ctl": 0.001 if work.uses_reference else 0.0,
        "recompute_logprob": work.uses_proximal,
        "use_decoupled_loss": work.uses_proximal and bound > 0,
    }
    sglang: dict[str, object] = {
        "model_path": "${actor.path}",
        "dtype": "${actor.dtype}",
        "context_length": longest,
        "mem_fraction_static": round(engine_memory_frac(r, chosen), 2),
        "max_running_requests": max(chosen.account.rollout.slots_per_replica, 1),
    }
    data: dict[str, object] = {
        "experiment_name": f"{r.model.name.lower().replace('_', '-')}-{r.cluster.num_gpus}gpu",
        "trial_name": "trial0",
        "seed": 1,
        "total_train_epochs": 1,
        "tokenizer_path": path,
        "enable_offload": is_colocated(chosen.mode) and chosen.sleep.moves_state,
        "cluster": {
            "n_nodes": r.cluster.num_nodes,
            "n_gpus_per_node": min(r.cluster.gpus_per_node, r.cluster.num_gpus),
            "fileroot": "experiments",
        },
        "gconfig": {
            "n_samples": work.group_size,
            "max_new_tokens": work.max_response_tokens,
            "max_tokens": longest,
            "temperature": 1.0,
        },
        "rollout": rollout,
        "actor": actor,
        "sglang": sglang,
        "saver": {
            **names,
            "fileroot": "${cluster.fileroot}",
            "freq_steps": plan.beside.checkpoint.every_steps,
        },
        "train_dataset": {
            "path": "train.jsonl",
            "type": "rl",
            "batch_size": work.num_prompts,
            "shuffle": True,
        },
    }
    if prompts := prompt_tokens_of_chunk(r, chosen):
        sglang["chunked_prefill_size"] = prompts
    if work.uses_reference:
        data["ref"] = {
            **names,
            "path": "${actor.path}",
            "backend": "${actor.backend}",
            "dtype": "${actor.dtype}",
            "mb_spec": micro_batch,
            "optimizer": None,
            "scheduling_strategy": {"type": "colocation", "target": "actor"},
        }
    head = (
        f"# {r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}: {MODE_TITLES[chosen.mode]}, "
        f"{split_gpus(*chosen.split, chosen.mode)}, {chosen.expected} a step expected.\n"
        f"# Because {plan.choice_because}.\n"
        f"# {engine_sentence(r, chosen)}\n"
    )
    return head + to_yaml(data)


def _engine_degrees(layout: ReplicaLayout, num_replicas: int) -> str:
    return f"d{num_replicas}" + (f"t{layout.num_gpus}" if layout.num_gpus > 1 else "")


def _trainer_backend(chosen: Candidate) -> str:
    layout, num_gpus = chosen.train.layout, chosen.account.train.num_gpus
    if is_megatron(chosen):
        return f"megatron:{_megatron_degrees(layout, num_gpus)}"
    dp = num_gpus // layout.model_parallel_size
    return f"fsdp:d{dp}{_degree('t', layout.tp_size)}{_degree('c', layout.cp_size)}"


def _megatron_degrees(layout: TrainLayout, num_gpus: int) -> str:
    dp = num_gpus // layout.model_parallel_size
    attention = (
        f"d{dp}{_degree('p', layout.pp_size)}{_degree('t', layout.tp_size)}{_degree('c', layout.cp_size)}"
    )
    if layout.ep_size == 1:
        return attention
    expert_dp = num_gpus // (layout.pp_size * layout.ep_size)
    experts = f"d{expert_dp}{_degree('p', layout.pp_size)}{_degree('e', layout.ep_size)}"
    return f"(attn:{attention}|ffn:{experts})"


def _degree(letter: str, size: int) -> str:
    return f"{letter}{size}" if size > 1 else ""
