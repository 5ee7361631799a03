"""The plan as arguments of slime: Megatron training and SGLang engines on Ray."""

from __future__ import annotations

import math

from rollbook.ledger.step import is_colocated
from rollbook.planner.candidate import Candidate
from rollbook.planner.emit_engine import engine_memory_frac, prompt_tokens_of_chunk, uneven_last_stage
from rollbook.planner.engines import engine_sentence
from rollbook.planner.plan import Plan
from rollbook.planner.words import MODE_TITLES, split_gpus


def slime_script(plan: Plan) -> str:
    """A bash script with the arguments that follow from the plan.

    slime has no colocated asynchronous mode: it becomes `--colocate` with `--partial-rollout`.

    Raises:
        PlanError: nothing fits.
    """
    chosen = plan.require_chosen()
    r = plan.request
    groups = {
        "CLUSTER_ARGS": _cluster(plan, chosen),
        "CKPT_ARGS": _checkpoint(plan),
        "ROLLOUT_ARGS": _rollout(plan, chosen),
        "PERF_ARGS": _perf(plan, chosen),
        "ALGORITHM_ARGS": _algorithm(plan, chosen),
        "SGLANG_ARGS": _sglang(plan, chosen),
    }
    lines = [
        "#!/usr/bin/env bash",
        f"# {r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}: {MODE_TITLES[chosen.mode]}, "
        f"{split_gpus(*chosen.split, chosen.mode)}, {chosen.expected} a step expected.",
        f"# Because {plan.choice_because}.",
        f"# {engine_sentence(r, chosen)}",
        "# MODEL_ARGS come from slime's scripts/models/*.sh for this model.",
        "set -euo pipefail",
        'source "${MODEL_ARGS_FILE:?set it to the scripts/models/*.sh of your model}"',
    ]
    for name, arguments in groups.items():
        lines += ["", f"{name}=(", *(f"   {argument}" for argument in arguments), ")"]
    entry = "train_async.py" if chosen.mode == "separate_async" else "train.py"
    names = ["MODEL_ARGS", *groups]
    call = " ".join(f'"${{{name}[@]}}"' for name in names)
    return "\n".join([*lines, "", f'python3 {entry} {call} "$@"']) + "\n"


def _cluster(plan: Plan, chosen: Candidate) -> list[str]:
    rollout, train = chosen.split
    per_node = min(plan.request.cluster.gpus_per_node, train)
    arguments = [
        f"--actor-num-nodes {math.ceil(train / per_node)}",
        f"--actor-num-gpus-per-node {per_node}",
        f"--rollout-num-gpus-per-engine {chosen.rollout_layout.num_gpus}",
    ]
    if not is_colocated(chosen.mode):
        return [*arguments, f"--rollout-num-gpus {rollout}"]
    arguments.append("--colocate")  # which offloads both, unless told not to
    if not chosen.sleep.moves_state:
        arguments.append("--no-offload-train")
    if chosen.sleep.sleep_level == 0:
        arguments.append("--no-offload-rollout")
    return arguments


def _checkpoint(plan: Plan) -> list[str]:
    path = plan.request.model_path or plan.request.model.name
    arguments = [f"--hf-checkpoint {path}"]
    if plan.request.workload.uses_reference:
        arguments.append(f"--ref-load {path}_torch_dist")
    return [*arguments, "--save checkpoints/", f"--save-interval {plan.beside.checkpoint.every_steps}"]


def _rollout(plan: Plan, chosen: Candidate) -> list[str]:
    work = plan.request.workload
    arguments = [
        "--prompt-data train.jsonl",
        "--input-key prompt",
        "--label-key answer",
        "--apply-chat-template",
        "--rollout-shuffle",
        "--num-rollout 200",
        f"--rollout-batch-size {work.num_prompts}",
        f"--n-samples-per-prompt {work.group_size}",
        f"--rollout-max-response-len {work.max_response_tokens}",
        "--rollout-temperature 1.0",
        f"--global-batch-size {work.num_sequences // work.num_mini_batches}",
        "--balance-data",
    ]
    if chosen.mode == "colocate_async":
        arguments.append("--partial-rollout")
    if chosen.mode == "separate_async":
        arguments.append("--update-weights-interval 1")
    return arguments


def _perf(plan: Plan, chosen: Candidate) -> list[str]:
    work, layout = plan.request.workload, chosen.train.layout
    longest = math.ceil(work.prompt_tokens + work.max_response_tokens + work.observation_tokens)
    tokens = max(plan.request.assumptions.micro_batch_tokens, longest)
    arguments = [
        f"--tensor-model-parallel-size {layout.tp_size}",
        f"--pipeline-model-parallel-size {layout.pp_size}",
        f"--context-parallel-size {layout.cp_size}",
        f"--expert-model-parallel-size {layout.ep_size}",
        "--expert-tensor-parallel-size 1",
        "--use-dynamic-batch-size",
        f"--max-tokens-per-gpu {math.ceil(tokens / layout.cp_size)}",
    ]
    if num_last := uneven_last_stage(plan.request, chosen):
        arguments.append(f"--decoder-last-pipeline-num-layers {num_last}")
    if layout.tp_size > 1:
        arguments.append("--sequence-parallel")
    if layout.recompute == "full":
        arguments += [
            "--recompute-granularity full",
            "--recompute-method uniform",
            "--recompute-num-layers 1",
        ]
    if chosen.train.is_offloaded:
        arguments += ["--optimizer-cpu-offload", "--overlap-cpu-optimizer-d2h-h2d"]
    return arguments


def _algorithm(plan: Plan, chosen: Candidate) -> list[str]:
    work = plan.request.workload
    arguments = [f"--advantage-estimator {work.algorithm}", "--eps-clip 0.2", "--entropy-coef 0.00"]
    if work.uses_reference:
        arguments += ["--use-kl-loss", "--kl-loss-coef 0.001", "--kl-loss-type low_var_kl"]
    if not work.uses_proximal:
        arguments.append("--use-rollout-logprobs")
    elif not chosen.is_on_policy:
        arguments.append("--use-tis")
    return arguments


def _sglang(plan: Plan, chosen: Candidate) -> list[str]:
    layout = chosen.rollout_layout
    arguments = [
        f"--sglang-mem-fraction-static {engine_memory_frac(plan.request, chosen):.2f}",
        f"--sglang-max-running-requests {max(chosen.account.rollout.slots_per_replica, 1)}",
    ]
    if prompts := prompt_tokens_of_chunk(plan.request, chosen):
        arguments.append(f"--sglang-chunked-prefill-size {prompts}")
    if layout.ep_size > 1:
        arguments.append(f"--sglang-ep-size {layout.ep_size}")
    if layout.attention_copies > 1:
        arguments += ["--sglang-enable-dp-attention", f"--sglang-dp-size {layout.attention_copies}"]
    return arguments
