"""A reward from a model that reads the response, and a baseline from a model that answers in the policy's place.

Both ask an OpenAI-compatible server for text. Whatever goes wrong (no connection, no number in the answer, a number
outside its range) is a failure of that trajectory, never a score of zero.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from rollbook.envs.config import EndpointConfig, JudgeConfig
from rollbook.envs.rewards.builtin import answer_of
from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer
from rollbook.errors import DeadlineError, EngineError, RewardError
from rollbook.rollout.openai import OpenAIClient
from rollbook.types import Failure, FailureKind, Prompt, SamplingParams

PLACES = re.compile(r"\{(prompt|answer|response)\}")
SHOWN_CHARS = 120


class HttpJudge:
    """A scorer: `await judge(response, prompt)`.

    Args:
        client: closed with `close`.
    """

    def __init__(self, config: JudgeConfig, client: OpenAIClient | None = None) -> None:
        self.config = config
        self.client = client or OpenAIClient.at(config.endpoint)
        self._score = re.compile(config.score_pattern)
        self._slots = asyncio.Semaphore(config.endpoint.max_requests)

    async def start(self) -> None:
        """See that the server answers and has the model. Raises EngineError."""
        await self.client.max_context_tokens()

    async def close(self) -> None:
        await self.client.close()

    async def __call__(self, response: str, prompt: Prompt) -> float:
        """0 for `lowest`, 1 for `highest`.

        Raises:
            RewardError: the answer holds no such number.
            EngineError: the server cannot be asked.
            DeadlineError: it did not answer in time.
        """
        config = self.config
        question = self._question(response, prompt)
        async with self._slots:
            answer = await self.client.chat(
                [{"role": "user", "content": question}],
                max_response_tokens=config.max_response_tokens,
                temperature=config.temperature,
            )
        found = list(self._score.finditer(answer.text))
        said = f"the judge said {answer.text[-SHOWN_CHARS:]!r}"
        if not found:
            is_cut = answer.finish_reason == "length"
            raise RewardError(
                f"{said}, in which score_pattern finds no number"
                + (" (its answer was cut short)" if is_cut else ""),
                "raise judge.max_response_tokens" if is_cut else "ask for the number in judge.template",
            )
        try:
            value = float(found[-1].group(1))
        except (TypeError, ValueError):
            raise RewardError(
                f"{said}, and {found[-1].group(1)!r} is no number",
                "let the group of score_pattern match a number",
            ) from None
        if not config.lowest <= value <= config.highest:  # NaN, too
            raise RewardError(
                f"{said}, outside {config.lowest:g} to {config.highest:g}",
                "ask for that range in judge.template, or set judge.lowest and judge.highest",
            )
        return (value - config.lowest) / (config.highest - config.lowest)

    def _question(self, response: str, prompt: Prompt) -> str:
        """One pass: what stands in a response is never replaced."""

        def fill(place: re.Match[str]) -> str:
            match place.group(1):
                case "response":
                    return response
                case "answer":
                    return answer_of(prompt.task)
                case _:
                    return prompt.text()

        return PLACES.sub(fill, self.config.template)


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineAnswer:
    """One answer of the other model, scored as the policy's are."""

    prompt: Prompt
    result: RewardResult


class Baseline:
    """Another model's answers to held-out prompts, as text, scored by the run's scorer."""

    def __init__(self, endpoint: EndpointConfig, scorer: Scorer, client: OpenAIClient | None = None) -> None:
        self.endpoint = endpoint
        self.client = client or OpenAIClient.at(endpoint)
        self._scorer = scorer
        self._slots = asyncio.Semaphore(endpoint.max_requests)

    async def start(self) -> None:
        """See that the server answers and has the model. Raises EngineError."""
        await self.client.max_context_tokens()

    async def close(self) -> None:
        await self.client.close()

    async def answer(self, prompt: Prompt, sampling: SamplingParams, *, seed: int) -> BaselineAnswer:
        """Never raises for the server's fault: its failure is the result."""
        try:
            async with self._slots:
                said = await self.client.chat(
                    prompt.messages,
                    max_response_tokens=sampling.max_response_tokens,
                    temperature=sampling.temperature,
                    seed=seed,
                )
        except (EngineError, DeadlineError) as error:
            kind = FailureKind.TIMEOUT if isinstance(error, DeadlineError) else FailureKind.ENGINE
            result = RewardResult(reward=None, failure=Failure(kind=kind, message=error.what))
            return BaselineAnswer(prompt=prompt, result=result)
        return BaselineAnswer(prompt=prompt, result=await self._scorer.score(said.text, prompt))
