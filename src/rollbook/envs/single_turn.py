"""One prompt, one response, one score."""

from __future__ import annotations

from rollbook.envs.env import Observation, Tokenizer
from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer
from rollbook.types import FinishReason, Ids, Prompt


class SingleTurnEnv:
    """Scores the response's text, special tokens left out. A truncated response is scored as it stands."""

    def __init__(self, prompt: Prompt, *, tokenizer: Tokenizer, scorer: Scorer) -> None:
        self.prompt = prompt
        self.tokenizer = tokenizer
        self.scorer = scorer
        self.text = ""

    async def start(self) -> Ids:
        return self.prompt.prompt_ids

    async def observe(self, response_ids: Ids, finish_reason: FinishReason) -> Observation:
        self.text = self.tokenizer.decode(response_ids)
        return Observation(result=await self.finish())

    async def finish(self) -> RewardResult:
        return await self.scorer.score(self.text, self.prompt)

    async def close(self) -> None:
        pass
