"""Low-rank adapters: what trains, and what of it needs gradients and moments, when the base is frozen."""

from __future__ import annotations

from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.workload import Workload


def lora_params(model: ModelSpec, rank: int, *, active_only: bool = False) -> float:
    """Parameters of adapters of `rank` on every matrix of attention and feed-forward.

    A matrix of m x n gets rank x (m + n). Experts get adapters too.

    Args:
        active_only: count the experts that one token passes through, not all.
    """
    hidden = model.hidden_size
    q, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    attention = model.num_attention_layers * (2 * (hidden + q) + 2 * (hidden + kv))
    dense = (model.num_mlp_layers - model.num_moe_layers) * model.mlp_matrices
    num_experts = model.experts_per_token if active_only else model.num_experts
    experts = model.num_moe_layers * num_experts * model.mlp_matrices
    width = model.expert_input_size or hidden
    mlp = dense * (hidden + model.intermediate_size) + experts * (width + model.moe_intermediate_size)
    return float(rank * (attention + mlp))


def trained_params(model: ModelSpec, workload: Workload) -> float:
    """Parameters of the policy that the optimizer moves: all, or those of the adapters."""
    return lora_params(model, workload.lora_rank) if workload.lora_rank else float(model.params)


def policy_state_bytes(model: ModelSpec, workload: Workload, assumptions: Assumptions) -> float:
    """Weights, gradients, master weights and moments of the policy; of a frozen base its weights alone."""
    base = assumptions.weight_bytes_per_param * model.params if workload.lora_rank else 0.0
    return base + assumptions.train_state_bytes_per_param * trained_params(model, workload)
