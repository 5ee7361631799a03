"""FLOPs of forwards, prefill and whole steps, with attention and logits."""

from __future__ import annotations

import functools

import numpy as np

from rollbook.ledger.account import Flops
from rollbook.ledger.adapters import lora_params
from rollbook.ledger.lengths import Curve
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.workload import Workload


def forward_flops(model: ModelSpec, sequence_tokens: float, mean_square_tokens: float = 0.0) -> float:
    """FLOPs of one forward over one sequence, logits of every position included.

    Args:
        sequence_tokens: mean length.
        mean_square_tokens: mean of the squared length; 0 takes all sequences as equally long.
    """
    spread = (mean_square_tokens / sequence_tokens**2) if mean_square_tokens else 1.0
    return (
        2.0 * model.matmul_params * sequence_tokens + float(attention_flops(model, sequence_tokens)) * spread
    )


def prefill_flops(
    model: ModelSpec, prompt_tokens: Curve | float, cached_tokens: Curve | float = 0.0
) -> Curve:
    """FLOPs of prefilling one prompt of `prompt_tokens` of which `cached_tokens` already hold KV.

    Matrices without the output matrix (only the last position needs it), and the causal half of attention.
    """
    total = np.asarray(prompt_tokens, np.float64)
    cached = np.asarray(cached_tokens, np.float64)
    matrices = 2.0 * (model.body_params + model.active_routed_params) * (total - cached)
    return matrices + attention_flops(model, total) - attention_flops(model, cached)


def attention_flops(model: ModelSpec, sequence_tokens: Curve | float) -> Curve:
    """Forward attention FLOPs of one sequence: the causal half, windows cap their layers.

    Linear layers cost 3 passes over their state a token (decay and update, read; chunked form alike).
    """
    tokens = np.asarray(sequence_tokens, np.float64)
    windowed = model.num_sliding_layers if model.sliding_window else 0
    full_pairs = tokens * tokens / 2
    window = np.minimum(tokens, model.sliding_window)
    windowed_pairs = window * window / 2 + (tokens - window) * window
    softmax = model.attention_flops_per_pair() * (
        (model.num_attention_layers - windowed) * full_pairs + windowed * windowed_pairs
    )
    state = model.linear_value_heads * model.linear_head_dim * model.linear_state_dim
    return softmax + 6.0 * model.num_linear_layers * state * tokens


def turn_prefill_flops(model: ModelSpec, workload: Workload) -> float:
    """Prefill after the first turn, of one trajectory: linear in turns with the prefix kept, quadratic without."""
    agent = workload.agent
    if agent.num_turns <= 1:
        return 0.0
    per_turn = workload.response_tokens / agent.num_turns
    turns = np.arange(1, round(agent.num_turns))
    context = workload.prompt_tokens + turns * (per_turn + agent.observation_tokens)
    cached = context - agent.observation_tokens if agent.keeps_prefix else np.zeros_like(context)
    return float(prefill_flops(model, context, cached).sum())


def turn_prefill_tokens(workload: Workload) -> float:
    """Tokens prefilled after the first turn of one trajectory: linear with the prefix kept, quadratic without."""
    agent = workload.agent
    later_turns = agent.num_calls
    if agent.keeps_prefix:
        return later_turns * agent.observation_tokens
    per_turn = workload.response_tokens / agent.num_turns + agent.observation_tokens
    return later_turns * workload.prompt_tokens + per_turn * later_turns * (later_turns + 1) / 2


@functools.lru_cache(maxsize=64)
def default_flops(model: ModelSpec, workload: Workload) -> Flops:
    """FLOPs of one step with attention and logits, without recomputation."""
    sequence = workload.sequence_tokens
    square = sequence_mean_square(workload)
    one_pass = workload.num_sequences * forward_flops(model, sequence, square)
    prompt = workload.num_prefills * float(prefill_flops(model, workload.prompt_tokens))
    turns = workload.num_sequences * turn_prefill_flops(model, workload)
    before = forward_flops(model, workload.prompt_tokens)
    generate = workload.num_sequences * (forward_flops(model, sequence, square) - before)
    generate -= workload.num_sequences * 2.0 * model.matmul_params * workload.observation_tokens
    has_critic = workload.algorithm == "ppo"
    judge = workload.reward_model or model
    verdicts = workload.num_sequences * workload.reward_response_tokens
    judged = workload.num_sequences * forward_flops(judge, sequence, square)
    if workload.reward == "generative":
        judged += 2.0 * judge.matmul_params * verdicts
    return Flops(
        generate=max(generate, 0.0),
        prefill=prompt + turns,
        reference=one_pass if workload.uses_reference else 0.0,
        proximal=one_pass if workload.uses_proximal else 0.0,
        reward_model=judged if workload.reward in ("model", "generative") else 0.0,
        train=train_flops(model, workload),
        critic=(1 + 3 * workload.num_epochs) * one_pass if has_critic else 0.0,
        num_epochs=workload.num_epochs,
    )


def train_flops(model: ModelSpec, workload: Workload) -> float:
    """FLOPs of training, without recomputation: forward 1, backward 2.

    A frozen matrix has no weight gradient, so its backward is 1; adapters pass three times.
    """
    one_pass = workload.num_sequences * forward_flops(
        model, workload.sequence_tokens, sequence_mean_square(workload)
    )
    if not workload.lora_rank:
        return 3 * one_pass * workload.num_epochs
    adapters = lora_params(model, workload.lora_rank, active_only=True)
    saved = 2.0 * (model.matmul_params - 3 * adapters) * workload.trained_tokens
    return (3 * one_pass - saved) * workload.num_epochs


def sequence_mean_square(workload: Workload) -> float:
    """Mean of the squared sequence length; prompts and observations are taken at their means."""
    lengths = workload.lengths()
    return float(workload.sequence_tokens**2 + lengths.mean_square() - lengths.mean_tokens**2)
