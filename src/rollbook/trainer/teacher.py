"""The teacher of a distillation: a second model, frozen, that reads the policy's own tokens."""

from __future__ import annotations

import numpy as np

from rollbook.errors import ConfigError
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import LoadedModel, load_model
from rollbook.trainer.parallel import ALONE, Ranks

NUM_COMPARED_TOKENS = 2000
"""Ids whose text is compared, spread over the vocabulary."""


def load_teacher(config: ModelConfig, policy: LoadedModel, ranks: Ranks = ALONE) -> LoadedModel:
    """The model of `[teacher]`, without gradients; on the host where it is to be divided among ranks.

    Raises:
        ConfigError: it cannot be loaded, or its token ids, context or device are not those of the policy.
    """
    teacher = load_model(config, device=None if ranks.is_alone else "cpu")
    teacher.module.requires_grad_(False)
    if teacher.device != policy.device:
        raise ConfigError(
            f"teacher.device is {teacher.device} and model.device {policy.device}",
            "put both on the same device",
        )
    if teacher.facts.max_position < policy.facts.max_position:
        raise ConfigError(
            f"the teacher's context is {teacher.facts.max_position} tokens and the policy's "
            f"{policy.facts.max_position}",
            "use a teacher that can read everything the policy may write",
        )
    _require_same_tokens(teacher, policy)
    return teacher


def _require_same_tokens(teacher: LoadedModel, policy: LoadedModel) -> None:
    """One id must mean one token to both: logprobs are compared token by token."""
    ours, theirs = policy.tokenizer, teacher.tokenizer
    assert ours is not None and theirs is not None, "both were loaded with a tokenizer"
    if ours.vocab_size != theirs.vocab_size:
        raise ConfigError(
            f"the policy's tokenizer has {ours.vocab_size} tokens and the teacher's {theirs.vocab_size}",
            "on-policy distillation needs one tokenizer: use a teacher of the same family",
        )
    ids = np.unique(np.linspace(0, ours.vocab_size - 1, NUM_COMPARED_TOKENS).astype(int)).tolist()
    for token_id in ids:
        one, other = (t.decode([token_id], skip_special_tokens=False) for t in (ours, theirs))
        if one != other:
            raise ConfigError(
                f"token {token_id} is {one!r} to the policy and {other!r} to the teacher",
                "on-policy distillation needs one tokenizer: use a teacher of the same family",
            )
