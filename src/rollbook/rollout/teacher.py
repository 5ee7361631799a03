"""A teacher behind a server: its logprobs of the tokens that the policy sampled, by token id."""

from __future__ import annotations

import asyncio

import numpy as np

from rollbook.envs.config import EndpointConfig
from rollbook.errors import EngineError
from rollbook.rollout.openai import OpenAIClient
from rollbook.types import Floats, Ids, TrainBatch


class HttpTeacher:
    """Fills a batch as `Trainer.fill_teacher` does. The server must be a vLLM (its `prompt_logprobs`), and its model
    must have the policy's tokenizer: that it knows the ids is all that can be seen from here.

    Args:
        client: closed with `close`.
    """

    def __init__(self, endpoint: EndpointConfig, client: OpenAIClient | None = None) -> None:
        self.client = client or OpenAIClient.at(endpoint)
        self._slots = asyncio.Semaphore(endpoint.max_requests)

    async def start(self, prompt_ids: Ids) -> None:
        """See that the server answers, has the model, and scores the tokens of one prompt.

        Raises:
            EngineError: it does not.
        """
        await self.client.max_context_tokens()
        await self._score(prompt_ids)

    async def close(self) -> None:
        await self.client.close()

    async def fill(self, batch: TrainBatch) -> None:
        """Write `teacher_logprobs` of every sequence. All or none: an error leaves the batch as it was.

        Raises:
            EngineError: the server cannot be asked, or gives no logprob for a token.
            DeadlineError: it did not answer in time.
        """
        asked = [asyncio.ensure_future(self._score(sequence.token_ids)) for sequence in batch.sequences]
        try:
            answers = await asyncio.gather(*asked)
        finally:
            for task in asked:
                task.cancel()
        for sequence, answer in zip(batch.sequences, answers, strict=True):
            sequence.teacher_logprobs = answer

    async def _score(self, token_ids: Ids) -> Floats:
        """[n] float32; 0 for the first token, which nothing precedes."""
        async with self._slots:
            logprobs = await self.client.score(token_ids)
        logprobs[0] = 0.0
        if not np.isfinite(logprobs).all():
            at = int(np.flatnonzero(~np.isfinite(logprobs))[0])
            raise EngineError(
                f"the teacher at {self.client.base_url} gives token {at} of {len(token_ids)} the logprob "
                f"{logprobs[at]}",
                "a teacher must be able to say every token: see that its tokenizer is the policy's",
            )
        return logprobs
