"""A tiny policy and train sequences for the trainer's tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import load_model
from rollbook.trainer.config import CriticConfig, TrainerConfig
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainSequence

ALPHABET = "0123456789+= "
VOCAB_SIZE = 8 + len(ALPHABET)


def tiny_config(**new: Any) -> ModelConfig:
    fields = {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 24,
        "initializer_range": 0.3,
        "max_position": 64,
        "alphabet": ALPHABET,
    }
    dtype, device = new.pop("dtype", "float32"), new.pop("device", "cpu")
    return ModelConfig.model_validate({"new": fields | new, "dtype": dtype, "device": device, "seed": 5})


def tiny_trainer(
    *,
    model: dict[str, Any] | None = None,
    float64: bool = False,
    critic: CriticConfig | None = None,
    with_reference: bool = False,
    temperature: float = 1.0,
    num_updates: int | None = None,
    export_dtype: str | None = None,
    ranks: Ranks = ALONE,
    **config: Any,
) -> Trainer:
    model_config = tiny_config(**(model or {}))
    return Trainer(
        TrainerConfig.model_validate({"lr": 1e-2} | config),
        model_config,
        model=load_model(model_config, dtype="float64") if float64 else None,
        compute_dtype="float64" if float64 else None,
        critic_config=critic,
        with_reference=with_reference,
        temperature=temperature,
        max_response_tokens=16,
        num_updates=num_updates,
        export_dtype=export_dtype,
        ranks=ranks,
    )


def sequence(
    prompt: Sequence[int],
    response: Sequence[int],
    *,
    group_id: int = 0,
    member_idx: int = 0,
    loss_mask: Sequence[bool] | None = None,
    advantage: float = 1.0,
    **more: Any,
) -> TrainSequence:
    """Prompt and one response; `loss_mask` is of the response (default: all of it)."""
    n, m = len(prompt), len(response)
    action_mask = np.arange(n + m) >= n
    mask = action_mask.copy()
    if loss_mask is not None:
        mask[n:] = loss_mask
    return TrainSequence(
        group_id=group_id,
        member_idx=member_idx,
        source="test",
        token_ids=np.array([*prompt, *response], np.int32),
        action_mask=action_mask,
        loss_mask=mask,
        behavior_logprobs=np.where(action_mask, -1.0, 0.0).astype(np.float32),
        reward=0.0,
        oldest_version=0,
        advantages=np.where(action_mask, advantage, 0.0).astype(np.float32),
        **more,
    )


def groups(num_groups: int, group_size: int, *, seed: int = 0, max_response: int = 9) -> list[TrainSequence]:
    """Random prompts of 1 to 6 tokens, shared by the members, with responses of 1 to `max_response`."""
    rng = np.random.default_rng(seed)
    out = []
    for group_id in range(num_groups):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(1, 7)).tolist()
        for member_idx in range(group_size):
            response = rng.integers(0, VOCAB_SIZE, rng.integers(1, max_response + 1)).tolist()
            advantage = float(rng.normal())
            out.append(
                sequence(prompt, response, group_id=group_id, member_idx=member_idx, advantage=advantage)
            )
    return out
