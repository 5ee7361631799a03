"""Bytes of every role on every GPU.

training   weights, gradients, master weights, moments (sharded) + activations + logits chunk + buffers
rollout    weights + KV pool + CUDA graphs
"""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.layout import TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.workload import Workload

LOGITS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once when logprobs are computed in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMemory:
    """Bytes on one GPU while the trainer runs."""

    policy_state: float
    """Weights, gradients, float32 master weights, two moments."""
    critic_state: float
    reference: float
    activations: float
    logits: float
    buffers: float
    """Gathered layers of FSDP, gradient buckets."""

    @property
    def state(self) -> float:
        return self.policy_state + self.critic_state

    @property
    def fixed(self) -> float:
        """What more GPUs do not shrink."""
        return self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        return self.state + self.reference + self.fixed


def train_memory(
    model: ModelSpec, workload: Workload, assumptions: Assumptions, *, num_gpus: int, layout: TrainLayout
) -> TrainMemory:
    """Bytes on one of `num_gpus` training GPUs, state sharded evenly over all of them.

    A micro batch holds at least one longest sequence, divided by tensor and context parallelism.
    """
    longest = workload.prompt_tokens + workload.max_response_tokens + workload.observation_tokens
    tokens = max(longest, assumptions.micro_batch_tokens) / (layout.tp_size * layout.cp_size)
    state = assumptions.train_state_bytes_per_param * model.params / num_gpus
    weights = assumptions.weight_bytes_per_param * model.params / num_gpus
    return TrainMemory(
        policy_state=state,
        critic_state=state if workload.algorithm == "ppo" else 0.0,
        reference=weights if workload.uses_reference else 0.0,
        activations=activation_bytes(model, tokens, layout),
        logits=logits_bytes(model, min(tokens, LOGITS_CHUNK_TOKENS), layout),
        buffers=gathered_bytes(model, assumptions, layout),
    )


def activation_bytes(model: ModelSpec, num_tokens: float, layout: TrainLayout) -> float:
    """Activations kept for the backward of one micro batch of `num_tokens` on this GPU.

    Full recomputation keeps one hidden state a layer and the inside of the layer being recomputed; selective
    keeps 34 bytes per token and hidden unit a layer, attention scores recomputed; none is the same here because
    flash attention never keeps scores.

    Source: Korthikanti et al., arXiv:2205.05198, equations 2 and 4 (34 s b h a layer).
    """
    layers = model.num_layers / layout.pp_size
    per_layer = 34.0 * num_tokens * model.hidden_size
    if layout.recompute == "full":
        return layers * 2.0 * num_tokens * model.hidden_size + per_layer
    return layers * per_layer


def logits_bytes(model: ModelSpec, num_tokens: float, layout: TrainLayout) -> float:
    """Logits of a chunk in bfloat16, their float32 copy and gradient."""
    return 10.0 * num_tokens * model.vocab_size / layout.tp_size


def gathered_bytes(model: ModelSpec, assumptions: Assumptions, layout: TrainLayout) -> float:
    """Two layers' weights gathered at once (one in use, one prefetched), and one layer's gradients."""
    per_layer = (model.body_params + model.routed_params / layout.ep_size) / model.num_layers
    largest = max(per_layer, model.embedding_params)
    return 3 * assumptions.weight_bytes_per_param * largest / layout.tp_size
