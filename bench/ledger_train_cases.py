"""Adapters of published training throughput."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ledger_words import (
    Case,
    NotCovered,
    accelerator_of,
    count_of,
    degree_of,
    dtype_of,
    find_model,
    first_named,
    middle,
    within,
)
from rollbook.ledger.account import Range
from rollbook.ledger.assumptions import Assumptions, StackAssumptions
from rollbook.ledger.flops import forward_flops
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import Recompute, TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.train import (
    optimizer_s,
    train_tokens_per_s_per_gpu,
    train_widening,
    update_exchange_s,
)


def train_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Tokens per second of a trainer at a fixed sequence length."""
    config, measured = case["config"], case["measured"]
    model = find_model(config["model"])
    accelerator = accelerator_of(config.get("gpu", config.get("system", "")))
    sequence = float(first_named(config, {}, "sequence_length", "mean_sequence_tokens", "seq_length"))
    cluster = Cluster(accelerator=accelerator, num_gpus=count_of(config["gpus"]))
    stack = train_stack_of(case, model)
    if re.search(
        r"\b(?:not|un)-?\s?tuned\b|smoke", " ".join(str(case.get(k, "")) for k in ("config", "notes")), re.I
    ):
        raise NotCovered("a run that shows that it works: its source says that nothing was tuned")
    if (
        model.num_experts
        and stack.startswith("fsdp")
        and not re.search(_SHOWN_EXPERTS, str(config.get("framework")), re.I)
    ):
        raise NotCovered("experts under torch FSDP in an implementation that no published run shows")
    if stack.startswith("fsdp") and stack != "fsdp_experts":
        rate, error_frac = _fsdp_rate(config, model, cluster, assumptions, sequence, stack)
    elif stack:
        rate, error_frac = _pretraining_rate(config, model, cluster, assumptions, sequence, stack)
    else:
        raise NotCovered("neither a torch FSDP trainer nor a Megatron recipe")
    tflops = rate * 3 * forward_flops(model, sequence) / sequence / 1e12
    sequences = float(first_named(config, {}, "sequences_per_step", "gbs") or 0)
    step_s = sequences * sequence / rate / cluster.num_gpus
    predicted = {
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s_per_device": rate,
        "tokens_per_s_total": rate * cluster.num_gpus,
        "tokens_per_s": rate * cluster.num_gpus,
        "model_tflops_per_gpu": tflops,
        "tflops_per_gpu": tflops,
        "mfu_pct": 1e14 * tflops / accelerator.peak(dtype_of(config.get("precision", "bf16"))),
        "actor_train_s": step_s,
        "update_actor_s": step_s,
        "train_s": step_s,
        "step_s": step_s,
        "step_ms": 1e3 * step_s,
    }
    for key, value in predicted.items():
        if key in measured:
            yield key, middle(measured[key]), within(value, error_frac)
            return
    raise NotCovered("no throughput was published")


_SHOWN_EXPERTS = r"automodel|torchtitan|prime-?rl|halo|\btrl\b"
"""Implementations of experts under torch FSDP whose pace a published run shows: on the same GPUs they differ threefold,
and of two that no run had shown half were off by more than twice at first sight."""


def train_stack_of(case: Case, model: ModelSpec) -> str:
    """Our name of the software that trains, by the source's words; "" where it is neither torch FSDP nor Megatron.

    Experts have two generations of kernels: exchanged and permuted operator by operator, or by DeepEP or HybridEP under
    the computation (NeMo AutoModel, Megatron's recipes of 2026).
    """
    config = case["config"]
    framework, kind = (str(config.get(key, "")).lower() for key in ("framework", "kind"))
    if "megatron" not in framework and (
        config.get("gpus") == 1 or re.search(r"ms-swift|\broll\b", framework)
    ):
        framework += " fsdp"
    if "automodel" in framework:
        return "fsdp_experts" if model.num_experts else "fsdp_plain"
    if model.num_experts and (
        "torchtitan" in framework or (degree_of(config.get("ep", 1)) > 1 and "fsdp" in framework)
    ):
        return "fsdp_experts"
    said = str(config.get("torch_compile", "")).lower()
    # Liger's kernels fuse what torch.compile fuses, as do llm-foundry's norm and loss.
    if said == "true" or (
        said == "" and re.search(r"torchtitan|fms|torch\.compile|liger|foundry", framework)
    ):
        return "fsdp_compiled"
    if "fsdp2 trainer" in framework:
        return "fsdp_primerl" if "rl" in kind else "fsdp_plain"
    if re.search(
        r"fsdp|torchtitan|torchtune|unsloth|deepspeed|zero-?[123]|hugging ?face|transformers|axolotl"
        r"|llama-?factory|prime-?rl",
        framework,
    ):
        return "fsdp_plain"
    if "gbs" not in config and "megatron" not in framework:
        return ""
    if "rl" in kind.split() or re.search(r"skyrl|verl|slime|nemo[ -]?rl", framework):
        return "megatron"
    if not model.num_experts:
        return "megatron_tuned"
    release = re.search(r"\b(2\d)\.(\d\d)\b", f"{config.get('release', '')} {framework}")
    words = f"{framework} {config.get('dispatcher', '')} {config.get('note', '')}"
    is_new = re.search(r"recipe|verification|primus|hybridep|deepep", words, re.IGNORECASE) is not None
    if release is not None:
        is_new = is_new or (int(release[1]), int(release[2])) >= (26, 8)
    elif "bridge" in framework:
        is_new = True  # nobody names the release of today
    return "megatron_overlap" if is_new or _spans_a_rack(config, framework) else "megatron_tuned"


def _spans_a_rack(config: dict[str, Any], framework: str) -> bool:
    """Recipes of racks spread their experts over NVLink between nodes by HybridEP, from the first release on."""
    device = f"{config.get('gpu', '')} {config.get('system', '')}".upper()
    float8 = dtype_of(config.get("precision", "bf16")) != "bfloat16"
    return re.search(r"GB[23]00", device) is not None and float8 and degree_of(config.get("ep", 1)) > 8


def _published_ep(config: dict[str, Any], model: ModelSpec, cluster: Cluster) -> int:
    """Where a recipe's degrees are not printed at all, experts lie over the scale-up domain."""
    if "ep" in config or "tp" in config or not model.num_experts:
        return degree_of(config.get("ep", 1))
    return math.gcd(
        math.gcd(model.num_experts, 2 ** int(math.log2(cluster.accelerator.scale_up_gpus))), cluster.num_gpus
    )


def _sharded_ep(config: dict[str, Any], cluster: Cluster) -> int:
    """torch FSDP2 with DeepEP shards experts over the whole group where no degree is printed."""
    return degree_of(config["ep"]) if str(config.get("ep")).isdigit() else cluster.num_gpus


def _recompute_words(config: dict[str, Any]) -> str:
    return str(config.get("activation", config.get("recompute", ""))).lower()


def _pretraining_rate(
    config: dict[str, Any],
    model: ModelSpec,
    cluster: Cluster,
    assumptions: Assumptions,
    sequence: float,
    name: str,
) -> tuple[float, float]:
    """Tokens a second and GPU, and its relative error."""
    degrees = [degree_of(config.get(key, 1)) for key in ("tp", "pp", "cp")]
    model_parallel = degrees[0] * degrees[1] * degrees[2]
    published = first_named(config, {}, "gbs", "mini_batch", "sequences_per_step")
    if published is None:
        raise NotCovered("the batch of an update was not published, and small ones wait for their exchange")
    sequences = int(published)
    micro_batches = sequences // degree_of(config.get("mbs", 1)) // max(cluster.num_gpus // model_parallel, 1)
    layout = TrainLayout(
        tp_size=degrees[0],
        pp_size=degrees[1],
        cp_size=degrees[2],
        ep_size=_sharded_ep(config, cluster)
        if name == "fsdp_experts"
        else _published_ep(config, model, cluster),
        dtype=dtype_of(config.get("precision", "bf16")),
        recompute="full" if "full" in _recompute_words(config) else "selective",
        lora="lora" in str(config.get("kind", "")).lower(),
        micro_batches_per_step=micro_batches,
        virtual_stages=degree_of(config.get("vp", 1)),
    )
    stack = assumptions.stacks[name]
    rate = train_tokens_per_s_per_gpu(model, cluster, stack, layout, sequence_tokens=sequence)
    micro_batch_tokens = degree_of(config.get("mbs", 1)) * sequence / (degrees[0] * degrees[2])
    rate = min(rate, micro_batch_tokens / _launches_s(model, assumptions, stack, degrees[1]))
    tokens = sequences * sequence / cluster.num_gpus
    update_s = update_exchange_s(model, cluster, stack, layout, num_gpus=cluster.num_gpus)
    rate = tokens / (tokens / rate + update_s + optimizer_s(model.computed_params, cluster, cluster.num_gpus))
    wider, _ = train_widening(model, cluster, assumptions, layout, stack=name)
    return rate, assumptions.train_error_frac * wider


def _launches_s(model: ModelSpec, assumptions: Assumptions, stack: StackAssumptions, pp_size: int) -> float:
    """Least seconds of a micro batch, however few its tokens; as `TrainPrices` has them for steps.

    Experts are launched alike wherever torch FSDP shards them.
    """
    if model.num_experts and stack.gather_passes:
        stack = assumptions.stacks["fsdp_experts"]
    return max(model.num_layers / pp_size * stack.micro_batch_layer_s, 1e-9)


def _fsdp_rate(
    config: dict[str, Any],
    model: ModelSpec,
    cluster: Cluster,
    assumptions: Assumptions,
    sequence: float,
    name: str,
) -> tuple[float, float]:
    """One micro batch of one sequence a GPU, and in RL with full weights the publication to a shared disk."""
    kind = str(config.get("kind", ""))
    if (
        model.num_experts
        and cluster.accelerator.chip in ("B200", "B300")
        and "prime-rl" in str(config.get("framework", ""))
    ):
        raise NotCovered("prime-rl's unspread experts on Blackwell: no grouped kernel in the published runs")
    stack = assumptions.stacks[name]
    # torchtitan calls torch's own attention, which is FlashAttention 2, as is what llm-foundry was measured with.
    attention = str(
        config.get(
            "attention",
            "FA2" if re.search(r"torchtitan|llm-foundry", str(config.get("framework", ""))) else "",
        )
    )
    if "FA2" in attention and cluster.accelerator.chip == "H100":
        stack = replace(stack, attention_frac={"default": assumptions.flash2_attention_frac})
    pp_size = degree_of(config.get("pp", 1))
    replicas = max(
        cluster.num_gpus // (degree_of(config.get("tp", 1)) * count_of(config.get("cp", 1)) * pp_size), 1
    )
    words = _recompute_words(config)
    recompute: Recompute = (
        "none" if words == "none" else "selective" if words.startswith("select") else "full"
    )
    layout = TrainLayout(
        tp_size=degree_of(config.get("tp", 1)),
        dtype=dtype_of(config.get("precision", "bf16")),
        recompute=recompute,
        lora="LoRA" in kind,
        cp_size=count_of(config.get("cp", 1)),
        pp_size=pp_size,
        # One sequence a micro batch, as where nothing is said.
        micro_batches_per_step=count_of(config["gbs"]) // replicas if pp_size > 1 else 0,
        virtual_stages=2 if "interleav" in str(config.get("schedule", "")).lower() else 1,
    )
    rate = train_tokens_per_s_per_gpu(model, cluster, stack, layout, sequence_tokens=sequence)
    micro_batch_tokens = degree_of(config.get("mbs", 1)) * sequence / (layout.tp_size * layout.cp_size)
    rate = min(rate, micro_batch_tokens / _launches_s(model, assumptions, stack, pp_size))
    seconds = sequence / layout.cp_size / rate
    if kind == "RL Full":
        seconds += 2 * model.params / assumptions.sync.disk_bytes_per_s
    wider, _ = train_widening(model, cluster, assumptions, layout, stack=name)
    return sequence / layout.cp_size / seconds, assumptions.train_error_frac * wider
