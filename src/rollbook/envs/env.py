"""The environment protocol: it gives the prompt, and what follows each response.

One instance per trajectory, no reset. Token ids cross this border in both directions and are only ever appended:

    prompt_ids │ response_ids │ observation_ids │ response_ids │ ...
                 as sampled      by the env        as sampled

An environment may decode a response to understand it; it never encodes one, so what is trained is what was
sampled, whatever the tokenizer would have made of the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from rollbook.envs.rewards.result import RewardResult
from rollbook.types import FinishReason, Ids, Prompt


class Tokenizer(Protocol):
    """What prompts and environments need of `modeling.tokenizer.Tokenizer`."""

    eos_ids: tuple[int, ...]
    has_chat_template: bool

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids: ...

    def decode(self, ids: Ids | Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Ids:
        """[n] int32: the messages by the chat template, ending where the assistant's answer begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What follows a response: more tokens, or the end with its reward."""

    observation_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """[m] int32 to append; empty at the end."""
    result: RewardResult | None = None
    """Given exactly when the episode is over."""

    @property
    def is_done(self) -> bool:
        return self.result is not None


class Env(Protocol):
    """One episode. Methods are called from the event loop, one at a time."""

    async def start(self) -> Ids:
        """[n] int32: tokens before the first response. Raises EnvError."""

    async def observe(self, response_ids: Ids, finish_reason: FinishReason) -> Observation:
        """What follows this response of the policy, given exactly as sampled. Raises EnvError."""

    async def finish(self) -> RewardResult:
        """The episode was cut off, by its turns or the model's context: score it as it stands. Raises EnvError."""

    async def close(self) -> None:
        """Free what the episode holds; safe to call twice."""


EnvFactory = Callable[[Prompt], Env]
"""A new environment for one trajectory."""
