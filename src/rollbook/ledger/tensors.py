"""The tensors of a model by kind: how many parameters each has, and along which side it may be cut.

What a trainer's and an engine's layout do to a tensor depends on its kind alone: a projection out of the hidden
width is cut by rows, one back into it by columns, experts go whole to different GPUs, norms and routers to all.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from rollbook.ledger.layout import DTYPE_BYTES, ReplicaLayout
from rollbook.ledger.model import ModelSpec

Cut = Literal["rows", "columns", "experts", "whole"]
"""Along outputs, along inputs, expert by expert, or not at all."""

_SCALE_BYTES = 4.0 / (128 * 128)
"""Of one float8 number: a float32 scale for every block of 128 x 128."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorKind:
    """All tensors of one kind in all layers."""

    name: str
    params: int
    num_tensors: int
    """As a Hugging Face checkpoint names them, experts apart."""
    cut: Cut
    stacked_params: int = 0
    """Of the largest tensor where a layer's experts are one; 0: they never are."""
    max_cuts: int = 0
    """Pieces beyond which copies repeat, such as KV heads; 0: no limit."""
    is_quantized: bool = True
    """False for what quantized engines leave in bfloat16: norms, router, embedding, output matrix."""

    def bytes_in(self, dtype: str) -> float:
        """Bytes of one copy in an engine's dtype, scales included."""
        width = DTYPE_BYTES[dtype]
        if not self.is_quantized:
            return self.params * max(width, 2.0)
        return self.params * (width + (_SCALE_BYTES if dtype == "float8" else 0.0))

    def engine_cuts(self, engine: ReplicaLayout) -> int:
        """Different pieces in a replica; where there are fewer than GPUs, several of them hold the same one."""
        if self.cut == "whole":
            return 1
        if self.cut == "experts":
            return engine.num_gpus
        return min(engine.tp_size, self.max_cuts or engine.tp_size)

    def largest(self, *, splits_experts: bool) -> float:
        """Parameters of its largest tensor."""
        is_stacked = self.stacked_params > 0 and not splits_experts
        return float(self.stacked_params) if is_stacked else self.params / self.num_tensors


@functools.lru_cache(maxsize=64)
def tensor_kinds(model: ModelSpec) -> tuple[TensorKind, ...]:
    """Every parameter of the model once: their sum is `model.computed_params`."""
    norms = model.num_attention_layers + model.num_linear_layers + model.num_mlp_layers + 1
    kinds = [
        _kind("embedding", model.embedding_params, 1, "rows", is_quantized=False),
        _kind("output matrix", 0 if model.tie_embeddings else model.head_params, 1, "rows", is_quantized=False),
        *(_latent_attention(model) if model.kv_lora_rank else _attention(model)),
        *_linear_attention(model),
        *_feed_forward(model),
        _kind("norms", norms * model.hidden_size, norms, "whole", is_quantized=False),
    ]  # fmt: skip
    return tuple(kind for kind in kinds if kind.params)


def _kind(
    name: str, params: int, num_tensors: int, cut: Cut, *, max_cuts: int = 0, is_quantized: bool = True
) -> TensorKind:
    return TensorKind(
        name=name,
        params=params,
        num_tensors=max(num_tensors, 1),
        cut=cut,
        max_cuts=max_cuts,
        is_quantized=is_quantized,
    )


def _attention(model: ModelSpec) -> list[TensorKind]:
    layers, hidden = model.num_attention_layers, model.hidden_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    bias = int(model.qkv_bias)
    width = 2 if model.has_attention_gate else 1
    return [
        _kind("attention q", layers * (hidden * q * width + bias * q), layers * (1 + bias), "rows"),
        _kind(
            "attention k, v",
            layers * (2 * hidden * kv + bias * 2 * kv),
            2 * layers * (1 + bias),
            "rows",
            max_cuts=model.num_kv_heads,
        ),
        _kind("attention output", layers * q * hidden, layers, "columns"),
        _kind(
            "q and k norms",
            layers * 2 * model.head_dim * int(model.qk_norm),
            2 * layers,
            "whole",
            is_quantized=False,
        ),
    ]


def _latent_attention(model: ModelSpec) -> list[TensorKind]:
    """Compressions are repeated on every GPU, what leads out of them is cut by heads."""
    layers, hidden, heads, rank = (
        model.num_attention_layers,
        model.hidden_size,
        model.num_heads,
        model.kv_lora_rank,
    )
    qk = model.qk_nope_head_dim + model.qk_rope_head_dim
    q_rank = model.q_lora_rank
    into_latent = hidden * (rank + model.qk_rope_head_dim) + hidden * q_rank
    out_of_latent = rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
    out_of_latent += (q_rank or hidden) * heads * qk
    compressed = 2 if q_rank else 1
    return [
        _kind("into the latent", layers * into_latent, compressed * layers, "whole"),
        _kind("out of the latent", layers * out_of_latent, 2 * layers, "rows"),
        _kind("attention output", layers * heads * model.v_head_dim * hidden, layers, "columns"),
        _kind("latent norms", layers * (rank + q_rank), compressed * layers, "whole", is_quantized=False),
    ]


def _linear_attention(model: ModelSpec) -> list[TensorKind]:
    layers, hidden = model.num_linear_layers, model.hidden_size
    keys = model.linear_key_heads * model.linear_state_dim
    values = model.linear_value_heads * model.linear_head_dim
    inputs = hidden * (2 * keys + 2 * values + 2 * model.linear_value_heads)
    small = (2 * keys + values) * model.linear_conv_kernel + 2 * model.linear_value_heads
    return [
        _kind("linear attention in", layers * inputs, 2 * layers, "rows"),
        _kind("linear attention out", layers * values * hidden, layers, "columns"),
        _kind("convolution and decay", layers * small, 3 * layers, "rows", is_quantized=False),
        _kind("linear attention norms", layers * model.linear_head_dim, layers, "whole", is_quantized=False),
    ]


def _feed_forward(model: ModelSpec) -> list[TensorKind]:
    hidden, into = model.hidden_size, model.mlp_matrices - 1
    dense, moe = model.num_mlp_layers - model.num_moe_layers, model.num_moe_layers
    shared = moe * hidden * model.shared_intermediate_size
    num_shared = moe if model.shared_intermediate_size else 0
    inside = model.num_experts * (model.expert_input_size or hidden) * model.moe_intermediate_size
    return [
        _kind("feed-forward in", dense * into * hidden * model.intermediate_size, into * dense, "rows"),
        _kind("feed-forward out", dense * hidden * model.intermediate_size, dense, "columns"),
        _kind("router", moe * hidden * model.num_experts, moe, "whole", is_quantized=False),
        _kind("around latent experts", moe * 2 * hidden * model.expert_input_size, 2 * moe, "whole"),
        _kind("shared expert in", into * shared, into * num_shared, "rows"),
        _kind("shared expert out", shared, num_shared, "columns"),
        TensorKind(
            name="experts",
            params=model.mlp_matrices * moe * inside,
            num_tensors=max(moe * model.mlp_matrices * model.num_experts, 1),
            cut="experts",
            stacked_params=into * inside,  # gate and up of all experts of a layer
        ),
    ]
