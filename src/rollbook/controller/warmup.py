"""A short supervised phase on the task's own reference answers, before the first step.

It uses the trainer as a step does (packing, micro batches, one optimizer update a mini batch) with the mean
cross-entropy of the answer tokens as objective. Data comes from the training prompts alone; held-out prompts only
say when to stop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np

from rollbook.errors import ConfigError
from rollbook.types import Ids, Prompt, TrainSequence


class AnswerTokenizer(Protocol):
    """What the warm-up needs of a tokenizer."""

    eos_ids: tuple[int, ...]

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids: ...


def answer_sequences(
    prompts: Sequence[Prompt],
    tokenizer: AnswerTokenizer,
    *,
    batch_sequences: int,
    num_batches: int,
    seed: int,
) -> Iterator[list[TrainSequence]]:
    """Batches of prompt + reference answer + end of sequence, drawn without order by `seed`.

    Raises:
        ConfigError: a prompt has no reference answer.
    """
    if not tokenizer.eos_ids:
        raise ConfigError(
            "the tokenizer has no end-of-sequence token, so an answer could not end",
            "set warmup.num_updates = 0, or give the tokenizer an eos_token",
        )
    draw = np.random.default_rng([seed, 0x57])
    for batch_idx in range(num_batches):
        chosen = draw.integers(0, len(prompts), batch_sequences)
        yield [
            _sequence(prompts[i], tokenizer, batch_idx * batch_sequences + n) for n, i in enumerate(chosen)
        ]


def _sequence(prompt: Prompt, tokenizer: AnswerTokenizer, number: int) -> TrainSequence:
    answer = prompt.task.get("answer")
    if answer is None:
        raise ConfigError(
            f"prompt {prompt.prompt_id} has no reference answer to warm up on",
            "set warmup.num_updates = 0, or name the answer column in data.sources",
        )
    answer_ids = np.append(tokenizer.encode(str(answer)), tokenizer.eos_ids[0]).astype(np.int32)
    token_ids = np.concatenate([prompt.prompt_ids, answer_ids])
    is_answer = np.arange(len(token_ids)) >= len(prompt.prompt_ids)
    return TrainSequence(
        group_id=number,
        member_idx=0,
        source=prompt.source,
        token_ids=token_ids,
        action_mask=is_answer,
        loss_mask=is_answer.copy(),
        behavior_logprobs=np.zeros(len(token_ids), np.float32),
        reward=0.0,
        oldest_version=0,
    )


def warmup_lr(peak: float, update: int, num_updates: int) -> float:
    """Learning rate of update 1, 2, ...: up over the first tenth, then down to nothing.

    >>> [round(warmup_lr(1.0, update, 20), 2) for update in (1, 2, 11, 20)]
    [0.5, 1.0, 0.53, 0.05]
    """
    rise = max(num_updates // 10, 1)
    if update <= rise:
        return peak * update / rise
    return peak * (num_updates - update + 1) / (num_updates - rise + 1)
