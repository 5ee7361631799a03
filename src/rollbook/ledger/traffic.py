"""What of a forward is bound by memory traffic: norms, rotary, activations, permutation of tokens to experts.

It grows with layers x hidden size rather than with parameters, which is why small and sparse models reach so
little of the peak. The units below take no view on how many bytes one of them is.
"""

from __future__ import annotations

from rollbook.ledger.model import ModelSpec


def dense_width(model: ModelSpec) -> float:
    """Layers x hidden units of mixers and dense feed-forward blocks, for one token."""
    mixers = model.num_attention_layers + model.num_linear_layers
    dense_mlps = model.num_mlp_layers - model.num_moe_layers
    return (mixers + dense_mlps) / 2 * model.hidden_size


def expert_width(model: ModelSpec) -> float:
    """Units of input, output and middle of the experts that one token visits, over all layers."""
    in_experts = 2 * (model.expert_input_size or model.hidden_size)
    in_experts += model.mlp_matrices * model.moe_intermediate_size
    return float(model.num_moe_layers * model.experts_per_token * in_experts)
