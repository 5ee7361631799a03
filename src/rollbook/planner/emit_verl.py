"""The plan as a verl 0.9 command: Hydra overrides of its `ppo_trainer` config, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollbook.errors import PlanError
from rollbook.ledger.step import is_colocated
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import Candidate
from rollbook.planner.emit_engine import engine_memory_frac, is_megatron, uneven_last_stage
from rollbook.planner.engines import engine_sentence
from rollbook.planner.plan import Plan, staleness_bound
from rollbook.planner.words import MODE_TITLES, format_bytes, split_gpus

_TRAINER_MODES = {
    "sync": "sync",
    "colocate_async": "colocate_async",
    "separate_sync": "separate_async",
    "separate_async": "separate_async",
}


@dataclass(frozen=True, slots=True)
class Override:
    """One `key=value` of the command line."""

    key: str
    value: str | int | float | bool
    because: str = ""

    def text(self) -> str:
        value = self.value
        return f"{self.key}={str(value) if isinstance(value, bool) else value}"


def verl_script(plan: Plan) -> str:
    """A bash script that starts verl with the chosen plan.

    Raises:
        PlanError: nothing fits.
    """
    chosen = plan.require_chosen()
    r = plan.request
    lines = [
        "#!/usr/bin/env bash",
        f"# {r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}: {MODE_TITLES[chosen.mode]}, "
        f"{split_gpus(*chosen.split, chosen.mode)}, {chosen.expected} a step expected.",
        "# For verl 0.9.1. Reasons stand above the arguments they belong to.",
        "set -euo pipefail",
        "",
        "args=(",
    ]
    for override in verl_overrides(plan):
        if override.because:
            lines.append(f"  # {override.because}")
        lines.append(f"  {override.text()}")
    return "\n".join([*lines, ")", "", 'python3 -m verl.trainer.main_ppo "${args[@]}" "$@"']) + "\n"


def verl_overrides(plan: Plan) -> list[Override]:
    """Overrides of verl's `ppo_trainer` config."""
    chosen = plan.require_chosen()
    return [
        *_data(plan),
        *_model(plan, chosen),
        *_actor(plan, chosen),
        *_rollout(plan, chosen),
        *_algorithm(plan, chosen),
        *_trainer(plan, chosen),
    ]


def _data(plan: Plan) -> list[Override]:
    work = plan.request.workload
    return [
        Override("data.train_files", "train.parquet", "your prompts"),
        Override("data.val_files", "val.parquet"),
        Override("data.train_batch_size", work.num_prompts),
        Override("data.max_prompt_length", _longest_prompt(plan), "twice the mean prompt"),
        Override("data.max_response_length", work.max_response_tokens),
        Override("data.filter_overlong_prompts", True),
        Override("data.truncation", "error"),
    ]


def _longest_prompt(plan: Plan) -> int:
    return int(2 ** math.ceil(math.log2(2 * plan.request.workload.prompt_tokens)))


def _model(plan: Plan, chosen: Candidate) -> list[Override]:
    layout = chosen.train.layout
    overrides = [Override("actor_rollout_ref.model.path", plan.request.loadable)]
    if is_megatron(chosen):
        why = f"the planned trainer layout has TP {layout.tp_size}, PP {layout.pp_size}, EP {layout.ep_size}"
        if max(layout.tp_size, layout.pp_size, layout.ep_size) == 1:
            why = f"training is priced as {chosen.train.assumptions.stack}"
        overrides.insert(0, Override("model_engine", "megatron", why))
    overrides.append(
        Override("actor_rollout_ref.model.enable_gradient_checkpointing", layout.recompute == "full")
    )
    return overrides + _adapters(plan, chosen)


def _adapters(plan: Plan, chosen: Candidate) -> list[Override]:
    """verl's FSDP trainer takes adapters by these keys; for Megatron it has others, by another library."""
    rank = plan.request.workload.lora_rank
    if rank and is_megatron(chosen):
        raise PlanError(
            f"adapters of rank {rank} with a planned trainer layout for Megatron, whose adapters are not exported",
            "plan without --lora-rank, or for a model and length that need no tensor or pipeline parallelism",
        )
    if not rank:
        return []
    model = "actor_rollout_ref.model"
    return [
        Override(
            f"{model}.lora_rank", rank, "adapters of all matrices; the base is frozen, and the reference"
        ),
        Override(f"{model}.lora_alpha", 2 * rank),
        Override(f"{model}.target_modules", "all-linear"),
    ]


def _actor(plan: Plan, chosen: Candidate) -> list[Override]:
    work, layout = plan.request.workload, chosen.train.layout
    longest = math.ceil(_longest_prompt(plan) + work.max_response_tokens + work.observation_tokens)
    tokens = math.ceil(max(plan.request.assumptions.micro_batch_tokens, longest) / layout.cp_size)
    actor = "actor_rollout_ref.actor"
    # verl asserts that a separated step's prompts are the updates between publications times the mini batch.
    mini_batch = work.num_prompts // _updates_per_sync(plan, chosen)
    overrides = [
        Override(f"{actor}.ppo_mini_batch_size", mini_batch, "prompts of one optimizer update"),
        Override(f"{actor}.ppo_epochs", work.num_epochs),
        Override(f"{actor}.use_dynamic_bsz", True),
        Override(
            f"{actor}.ppo_max_token_len_per_gpu",
            tokens,
            f"one longest sequence of {longest} tokens"
            + (f" over CP {layout.cp_size}" * (layout.cp_size > 1)),
        ),
        Override(f"{actor}.use_kl_loss", work.uses_reference and work.algorithm == "grpo"),
    ]
    is_shared = is_colocated(chosen.mode)
    offloads = (is_shared and chosen.sleep.moves_state) or chosen.train.is_offloaded
    why = "the engine has the memory while it generates" if offloads else ""
    if is_shared and not offloads:
        why = "the state fits beside the engine's KV pool: nothing has to move"
    if is_megatron(chosen):
        for role in ("actor", "ref"):
            engine = f"actor_rollout_ref.{role}.megatron"
            overrides += [
                Override(f"{engine}.tensor_model_parallel_size", layout.tp_size),
                Override(f"{engine}.pipeline_model_parallel_size", layout.pp_size),
                Override(f"{engine}.context_parallel_size", layout.cp_size),
                Override(f"{engine}.expert_model_parallel_size", layout.ep_size),
            ]
        if num_last := uneven_last_stage(plan.request, chosen):  # `ref` takes it from `actor`
            key = f"+{actor}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage"
            overrides.append(Override(key, num_last))
        overrides += [
            Override(f"{actor}.megatron.param_offload", offloads, why),
            Override(f"{actor}.megatron.optimizer_offload", offloads),
        ]
    else:
        overrides += [
            Override(f"{actor}.strategy", "fsdp2", "state sharded over all training GPUs"),
            Override(f"{actor}.ulysses_sequence_parallel_size", layout.cp_size),
            Override(f"{actor}.fsdp_config.param_offload", offloads, why),
            Override(f"{actor}.fsdp_config.optimizer_offload", offloads),
        ]
        if chosen.train.offload == "weights":
            overrides.append(
                Override(
                    f"{actor}.fsdp_config.offload_policy", True, "shards stay on the host while it trains"
                )
            )
    return overrides


def _updates_per_sync(plan: Plan, chosen: Candidate) -> int:
    if is_colocated(chosen.mode):
        return plan.request.workload.num_mini_batches
    work = plan.request.workload
    updates = work.num_mini_batches
    while work.num_prompts % updates:
        updates -= 1
    return updates


def _rollout(plan: Plan, chosen: Candidate) -> list[Override]:
    r, layout, side = plan.request, chosen.rollout_layout, chosen.account.rollout
    rollout = "actor_rollout_ref.rollout"
    overrides = [
        Override(f"{rollout}.name", r.engine, engine_sentence(r, chosen)),
        Override(f"{rollout}.n", r.workload.group_size),
        Override(
            f"{rollout}.tensor_model_parallel_size",
            layout.tp_size,
            f"{counted(side.num_replicas, 'replica')} of {counted(layout.num_gpus, 'GPU')}, "
            f"{format_bytes(side.kv_pool_bytes)} for KV each",
        ),
        Override(f"{rollout}.data_parallel_size", layout.num_gpus // layout.tp_size),
        Override(f"{rollout}.expert_parallel_size", layout.ep_size),
        Override(f"{rollout}.gpu_memory_utilization", round(engine_memory_frac(r, chosen), 2)),
        *_awake(chosen),
        Override(f"{rollout}.max_num_seqs", max(side.slots_per_replica, 1), "slots of a replica"),
        Override(f"{rollout}.calculate_log_probs", True),
    ]
    if chunk := r.workload.prefill_chunk_tokens:
        why = "tokens of an engine's step, running sequences included"
        overrides += [
            Override(f"{rollout}.enable_chunked_prefill", True),
            Override(f"{rollout}.max_num_batched_tokens", math.ceil(chunk), why),
        ]
    if layout.weight_dtype == "float8":
        overrides.append(Override(f"{rollout}.quantization", "fp8"))
    if not is_colocated(chosen.mode):
        per_node = min(r.cluster.gpus_per_node, side.num_gpus)
        overrides += [
            Override(f"{rollout}.nnodes", math.ceil(side.num_gpus / per_node), "the separated rollout pool"),
            Override(f"{rollout}.n_gpus_per_node", per_node),
            Override(f"{rollout}.checkpoint_engine.backend", _backend(plan)),
            Override("actor_rollout_ref.hybrid_engine", False, "no rollout replica on the training GPUs"),
        ]
    return overrides


def _awake(chosen: Candidate) -> list[Override]:
    """verl's engines sleep while the trainer works, unless told not to."""
    if not is_colocated(chosen.mode) or chosen.sleep.sleep_level:
        return []
    key = "actor_rollout_ref.rollout.free_cache_engine"
    return [Override(key, False, "engines fit beside a trainer at work, so they stay awake")]


def _backend(plan: Plan) -> str:
    publication = plan.publication
    return "delta_sharded" if publication is not None and publication.method == "delta" else "nccl"


def _algorithm(plan: Plan, chosen: Candidate) -> list[Override]:
    work = plan.request.workload
    overrides = [
        Override("algorithm.adv_estimator", "grpo" if work.algorithm == "grpo" else "gae"),
        Override("algorithm.use_kl_in_reward", work.uses_reference and work.algorithm == "ppo"),
    ]
    if work.algorithm == "ppo":
        overrides.append(Override("critic.model.path", plan.request.loadable))
    if not work.uses_proximal:
        overrides.append(
            Override(
                "algorithm.rollout_correction.bypass_mode", True, "the engine's logprobs anchor the step"
            )
        )
    elif not chosen.is_on_policy:
        overrides += [
            Override(
                "algorithm.rollout_correction.rollout_is", "token", "importance weights for older tokens"
            ),
            Override("algorithm.rollout_correction.rollout_is_threshold", 2.0),
        ]
    return overrides


def _trainer(plan: Plan, chosen: Candidate) -> list[Override]:
    r, train = plan.request, chosen.account.train
    per_node = min(r.cluster.gpus_per_node, train.num_gpus)
    mode = _TRAINER_MODES[chosen.mode]
    overrides = [
        Override("trainer.use_v1", True),
        Override("trainer.v1.trainer_mode", mode, plan.choice_because),
        Override("trainer.save_freq", plan.beside.checkpoint.every_steps, "steps between checkpoints"),
        Override("trainer.nnodes", math.ceil(train.num_gpus / per_node)),
        Override("trainer.n_gpus_per_node", per_node),
    ]
    if mode != "sync":
        bound = staleness_bound(chosen, r)
        overrides += [
            Override(
                "trainer.v1.sampler.max_off_policy_threshold",
                bound + 1,
                f"verl counts versions a trajectory spans: a staleness bound of {bound}",
            ),
            Override("trainer.v1.sampler.max_off_policy_strategy", "wait", "long responses are not dropped"),
        ]
    if mode == "separate_async":
        overrides.append(
            Override("trainer.v1.separate_async.parameter_sync_step", _updates_per_sync(plan, chosen))
        )
    return overrides
