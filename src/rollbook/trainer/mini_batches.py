"""Which sequences of a step share an optimizer update, and what none of them may be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import DataError
from rollbook.modeling.load import LoadedModel
from rollbook.trainer.config import TrainerConfig
from rollbook.types import TrainSequence


def mini_batches(sequences: Sequence[TrainSequence], config: TrainerConfig, step: int) -> list[list[int]]:
    """Indices of the sequences of each update, all epochs one after the other: a function of seed and step. Groups are
    kept together where the sizes allow."""
    count = min(config.num_mini_batches, len(sequences))  # filters may leave few
    made: list[list[int]] = []
    for epoch in range(config.num_epochs):
        order = _group_order(sequences, (config.seed, step, epoch) if config.shuffle else None)
        made += [part.tolist() for part in np.array_split(order, count)]
    return made


def require_trainable(sequences: Sequence[TrainSequence], model: LoadedModel, step: int) -> None:
    """Raises DataError where a sequence is none that this model can have sampled."""
    if not sequences:
        raise DataError(
            f"step {step} has no sequences to train on",
            "every trajectory failed or was filtered: look at the failures and at algorithm.filter",
        )
    for sequence in sequences:
        name = f"sequence {sequence.group_id}/{sequence.member_idx}"
        if sequence.num_tokens > model.facts.max_position:
            raise DataError(
                f"{name} has {sequence.num_tokens} tokens and the model's context {model.facts.max_position}",
                "lower rollout.max_response_tokens or drop long prompts",
            )
        if (sequence.loss_mask & ~sequence.action_mask).any():
            raise DataError(
                f"{name} has loss tokens that the policy did not sample",
                "a loss mask is a part of the action mask",
            )
        low, high = int(sequence.token_ids.min()), int(sequence.token_ids.max())
        if low < 0 or high >= model.facts.vocab_size:
            raise DataError(
                f"{name} has token ids from {low} to {high} and the model {model.facts.vocab_size} embeddings",
                "engine and trainer must use the same tokenizer",
            )


def _group_order(sequences: Sequence[TrainSequence], seed: tuple[int, int, int] | None) -> NDArray[np.int64]:
    """Indices with the members of a group side by side; groups in drawn order, or as they came."""
    groups: dict[int, list[int]] = {}
    for i, sequence in enumerate(sequences):
        groups.setdefault(sequence.group_id, []).append(i)
    members = list(groups.values())
    if seed is not None:
        members = [members[i] for i in np.random.default_rng(seed).permutation(len(members))]
    return np.array([i for group in members for i in group], np.int64)
