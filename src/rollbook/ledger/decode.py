"""Seconds of decode steps and of prefill: a roofline with what rooflines leave out.

One decode step of a replica reads the dense weights once, the experts that its batch touches, and the KV of its
sequences; multiplies; exchanges activations between the replica's GPUs; and pays a fixed time per layer for
launches and small operators. Bytes and FLOPs overlap within a part (`max`), parts follow each other (`+`). Beside
them the host prepares the next step, and without CUDA graphs launches every operator: a model so small that its device
is done first waits for it.
All functions take arrays of rows, so a whole curve of running sequences costs one call.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from rollbook.ledger.assumptions import DecodeAssumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import DTYPE_BYTES, ReplicaLayout
from rollbook.ledger.lengths import Curve
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.tensors import tensor_kinds
from rollbook.ledger.traffic import dense_width, expert_width

TILE_ROWS = 64.0
"""Rows that a tensor core multiplies whether or not a sequence fills them. One decoded sequence costs 64 rows of FLOPs,
which a device of little arithmetic for its bandwidth (H20: 148 TFLOPS to 4 TB/s) spends longer on than on reading.

Source: PTX ISA, `wgmma.mma_async` (M = 64).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """Parts of a decode step, arrays over the points that were asked for."""

    weights_s: Curve
    kv_s: Curve
    exchange_s: Curve
    fixed_s: float
    launch_s: float
    """Of the host for launching every operator, beside all of these."""
    bytes_per_gpu: Curve
    host_s: Curve | float = 0.0
    """Of the host, beside all of these."""
    waiting_frac: float = 0.0
    """Of the host's seconds, while the device waits."""
    young_factor: float = 1.0
    """On the device's seconds."""

    @property
    def seconds(self) -> Curve:
        device_s = self.young_factor * (self.weights_s + self.kv_s + self.exchange_s + self.fixed_s)
        device_s = np.maximum(device_s, self.launch_s)
        waiting_s = self.waiting_frac * self.host_s
        return waiting_s + np.maximum(device_s, self.host_s - waiting_s)


def experts_touched(model: ModelSpec, num_rows: Curve | float) -> Curve:
    """Expected distinct experts of one layer that a batch of `num_rows` tokens is routed to.

    E (1 - (1 - k/E)^n): every token picks k of E experts, independently and evenly.
    """
    share = model.experts_per_token / max(model.num_experts, 1)
    return np.asarray(model.num_experts * (1 - (1 - share) ** np.asarray(num_rows, np.float64)))


def weight_bytes(model: ModelSpec, layout: ReplicaLayout, num_rows: Curve | float) -> tuple[float, Curve]:
    """Bytes that one step reads over the whole replica: dense weights (one copy), and touched experts.

    The output matrix stays in bfloat16 in quantized models; the embedding is a lookup.
    """
    dtype = DTYPE_BYTES[layout.weight_dtype]
    expert_dtype = min(dtype, DTYPE_BYTES["float4"]) if "mxfp4" in model.quantized else dtype
    dense = model.body_params * dtype + model.head_params * max(dtype, 2.0)
    experts = model.num_moe_layers * experts_touched(model, num_rows) * model.expert_params * expert_dtype
    return dense, experts


@functools.lru_cache(maxsize=256)
def replica_weight_bytes(model: ModelSpec, layout: ReplicaLayout) -> float:
    """Bytes that the weights take on one GPU of the replica: its pieces, and a copy of what is not cut."""
    total = 0.0
    for kind in tensor_kinds(model):
        is_mxfp4 = kind.cut == "experts" and "mxfp4" in model.quantized
        dtype = "float4" if is_mxfp4 else layout.weight_dtype
        total += kind.bytes_in(dtype) / kind.engine_cuts(layout)
    return total


def kv_shards(model: ModelSpec, tp_size: int) -> int:
    """Ways a sequence's KV is split: by KV head, so a latent cache is repeated on every GPU."""
    return 1 if model.kv_lora_rank else min(tp_size, model.num_kv_heads)


def kv_bytes_of(model: ModelSpec, context_tokens: Curve | float, dtype_bytes: float) -> Curve:
    """Bytes of one sequence at each context: `ModelSpec.kv_bytes` over an array."""
    windowed = model.num_sliding_layers if model.sliding_window else 0
    layers = (model.num_attention_layers - windowed) * context_tokens
    layers = layers + windowed * np.minimum(context_tokens, model.sliding_window)
    return np.asarray(model.kv_width * dtype_bytes * layers + model.state_bytes)


def decode_step(
    model: ModelSpec,
    cluster: Cluster,
    assumptions: DecodeAssumptions,
    layout: ReplicaLayout,
    *,
    num_rows: Curve | float,
    context_tokens: Curve | float,
    prompt_tokens: float = 0.0,
    prompt_attention_flops: float = 0.0,
) -> DecodeStep:
    """One step of a replica with `num_rows` sequences of `context_tokens` mean context.

    Args:
        prompt_tokens: of prompts, computed in the same step.
        prompt_attention_flops: that those take in attention, over the whole replica.
    """
    rows = np.asarray(num_rows, np.float64)
    context = np.asarray(context_tokens, np.float64)
    accelerator = cluster.accelerator
    num_gpus, copies = layout.num_gpus, layout.attention_copies
    bytes_per_s = accelerator.hbm_bytes_per_s * assumptions.hbm_frac_of(accelerator)
    flops_per_s = accelerator.peak(layout.weight_dtype) * assumptions.gemm_frac_of(accelerator)
    dense, experts = weight_bytes(model, layout, rows + prompt_tokens)
    tile = 1.0 if accelerator.is_cpu else TILE_ROWS
    # Rows of prompts fill the same tiles.
    dense_rows = np.maximum(rows, tile * copies - prompt_tokens)
    touched = experts_touched(model, rows + prompt_tokens)
    expert_rows = np.maximum(rows * model.experts_per_token, tile * touched)
    dense_flops = 2.0 * (model.body_params + model.head_params) * dense_rows / copies / layout.tp_size
    dense_flops += 2.0 * model.body_params * prompt_tokens / num_gpus
    expert_flops = 2.0 * model.num_moe_layers * model.expert_params * expert_rows / num_gpus
    expert_flops += 2.0 * model.active_routed_params * prompt_tokens / num_gpus
    dense_s = np.maximum(dense / layout.tp_size / bytes_per_s, dense_flops / flops_per_s)
    experts_s = np.maximum(experts / num_gpus / bytes_per_s, expert_flops / flops_per_s)
    experts_s = experts_s / accelerator.fraction(assumptions.expert_frac)
    kv = rows / copies * kv_bytes_of(model, context, DTYPE_BYTES[layout.kv_dtype])
    kv = kv / kv_shards(model, layout.tp_size)
    pairs = model.num_attention_layers * context * rows / copies / layout.tp_size
    attention_flops_per_s = accelerator.peak("bfloat16") * assumptions.gemm_frac_of(accelerator)
    kv_s = np.maximum(
        kv / (accelerator.hbm_bytes_per_s * assumptions.kv_frac_of(accelerator)),
        _absorbed_flops_per_pair(model) * pairs / attention_flops_per_s,
    )
    kv_s = kv_s + prompt_attention_flops / num_gpus / attention_flops_per_s
    prompt_traffic_s = prompt_tokens * _traffic_s(model, cluster, assumptions) / num_gpus
    host_s, host_row_s = assumptions.host_s_of(layout.engine)
    step = DecodeStep(
        weights_s=dense_s + experts_s + prompt_traffic_s,
        kv_s=kv_s,
        exchange_s=_exchange_s(model, cluster, assumptions, layout, rows),
        fixed_s=assumptions.step_s + _layer_s(model, cluster, assumptions, layout),
        launch_s=_num_launches(model) * assumptions.launch_layer_s_of(layout.engine),
        bytes_per_gpu=dense / layout.tp_size + experts / num_gpus + kv,
        host_s=host_s + host_row_s * rows / copies,
        waiting_frac=assumptions.waiting_frac_of(layout.engine),
        young_factor=assumptions.young_factor_of(layout.engine, accelerator, layout.weight_dtype),
    )
    if accelerator.fitted is None or accelerator.fitted.decode is None:
        return step
    fit = accelerator.fitted.decode
    return replace(
        step,
        weights_s=fit.per_row_s * rows + prompt_tokens / fit.prefill_tokens_per_s,
        kv_s=fit.per_row_token_s * rows * context,
        exchange_s=np.zeros_like(rows),
        fixed_s=fit.base_s,
        launch_s=0.0,
        host_s=0.0,
        young_factor=1.0,
    )


def _num_blocks(model: ModelSpec) -> float:
    """Pairs of a mixer and a feed-forward block."""
    return (model.num_attention_layers + model.num_linear_layers + model.num_mlp_layers) / 2


_LINEAR_LAUNCHES = 1.5
"""Operators of a linear mixer to those of attention, 14 to 9: projections, convolution, gates, norms, recurrence."""
_EXPERTS_LAUNCHES = 3.6
"""Operators of a layer of experts to those of a dense feed-forward block, 18 to 5: router, choice, sorting, two grouped
products, sum, and a shared expert with its gate."""


def _num_launches(model: ModelSpec) -> float:
    """Operators of one step, in those of a pair of attention and dense feed-forward block."""
    mixers = model.num_attention_layers + _LINEAR_LAUNCHES * model.num_linear_layers
    dense = model.num_mlp_layers - model.num_moe_layers
    return (mixers + dense + _EXPERTS_LAUNCHES * model.num_moe_layers) / 2


def _layer_s(
    model: ModelSpec, cluster: Cluster, assumptions: DecodeAssumptions, layout: ReplicaLayout
) -> float:
    latent = model.num_attention_layers if model.kv_lora_rank else 0
    seconds = _num_blocks(model) * assumptions.layer_s_of(layout.engine)
    seconds += model.num_moe_layers * assumptions.moe_layer_s_of(cluster.accelerator)
    return seconds + latent * assumptions.latent_layer_s


def _absorbed_flops_per_pair(model: ModelSpec) -> float:
    """Latent attention decodes in the compressed space: score and value over the latent, for every head."""
    if model.kv_lora_rank:
        return 2.0 * model.num_heads * (2 * model.kv_lora_rank + model.qk_rope_head_dim)
    return float(model.attention_flops_per_pair())


def _exchange_s(
    model: ModelSpec, cluster: Cluster, assumptions: DecodeAssumptions, layout: ReplicaLayout, rows: Curve
) -> Curve:
    """Two all-reduces a layer for tensor parallelism, dispatch and combine for experts beyond it."""
    accelerator = cluster.accelerator
    seconds = np.zeros_like(rows)
    blocks = model.num_attention_layers + model.num_linear_layers + model.num_mlp_layers
    if layout.tp_size > 1:
        crosses = layout.tp_size > accelerator.scale_up_gpus
        near_link = accelerator.scale_up_bytes_per_s * accelerator.fraction(assumptions.exchange_frac)
        link = cluster.nic_bytes_per_s if crosses else near_link
        moved = (
            2 * (layout.tp_size - 1) / layout.tp_size * rows / layout.attention_copies * model.hidden_size * 2
        )
        latency = assumptions.cross_node_latency_s if crosses else assumptions.all_reduce_latency_s
        seconds = seconds + blocks * (latency + moved / link)
    if layout.ep_size > layout.tp_size and model.num_moe_layers:
        crosses = layout.ep_size > accelerator.scale_up_gpus
        near = min(accelerator.scale_up_gpus / layout.ep_size, 1.0)
        width = model.expert_input_size or model.hidden_size
        # Dispatch in float8, combine in bfloat16.
        moved = rows / layout.num_gpus * model.experts_per_token * width * 3
        latency = assumptions.cross_node_latency_s if crosses else assumptions.all_reduce_latency_s
        # Experts are picked evenly, so a token's share within the scale-up domain is the domain's share of the GPUs.
        moved_s = moved * (near / accelerator.scale_up_bytes_per_s + (1 - near) / cluster.nic_bytes_per_s)
        seconds = seconds + model.num_moe_layers * (2 * latency + moved_s)
    return seconds


def prefill_s(
    model: ModelSpec,
    cluster: Cluster,
    assumptions: DecodeAssumptions,
    layout: ReplicaLayout,
    *,
    flops: Curve | float,
    attention_flops: Curve | float = 0.0,
) -> Curve:
    """Seconds of `flops` of prefill on one replica, large enough to fill the GPUs.

    Args:
        flops: all of them.
        attention_flops: those among them that attention takes, which runs in bfloat16 whatever the weights.
    """
    in_attention = np.asarray(attention_flops, np.float64)
    in_matrices = np.asarray(flops, np.float64) - in_attention
    tokens = in_matrices / (2.0 * (model.body_params + model.active_routed_params))
    if (machine := cluster.accelerator.fitted) is not None and machine.decode is not None:
        return np.asarray(tokens / machine.decode.prefill_tokens_per_s)
    peak = cluster.accelerator.peak
    busy = in_matrices / peak(layout.weight_dtype) + in_attention / peak("bfloat16")
    gpu_s = busy / assumptions.gemm_frac_of(cluster.accelerator) + tokens * _traffic_s(
        model, cluster, assumptions
    )
    return np.asarray(gpu_s / layout.num_gpus)


def prefill_call_s(model: ModelSpec, cluster: Cluster, assumptions: DecodeAssumptions) -> float:
    """Seconds that a call of prefill takes whatever its tokens, on top of `prefill_s`: launches of every operator."""
    if cluster.accelerator.fitted is not None and cluster.accelerator.fitted.decode is not None:
        return 0.0
    return assumptions.prefill_layer_s * model.num_layers


def _traffic_s(model: ModelSpec, cluster: Cluster, assumptions: DecodeAssumptions) -> float:
    """GPU-seconds of one prompt token in what memory bounds."""
    moved = assumptions.prefill_bytes["dense"] * dense_width(model)
    moved += assumptions.prefill_bytes["moe"] * expert_width(model)
    return moved / cluster.accelerator.hbm_bytes_per_s
