"""Faults of the scorer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollbook.drill.fault import Site, wrap
from rollbook.envs.rewards.result import RewardResult
from rollbook.types import Failure, FailureKind, Prompt

Score = Callable[[str, Prompt], Awaitable[RewardResult]]


def source_all_zero(site: Site) -> None:
    """The scorer gives 0 to everything from the first source."""
    first = site.controller.train_prompts[0].source

    def around(score: Score) -> Score:
        async def zero(response: str, prompt: Prompt) -> RewardResult:
            result = await score(response, prompt)
            if site.is_on and prompt.source == first and result.reward is not None:
                return replace(result, reward=0.0, terms=dict.fromkeys(result.terms, 0.0))
            return result

        return zero

    wrap(site.controller.scorer, "score", around)


def scorer_down(site: Site) -> None:
    """Every call of the scorer fails."""

    def around(score: Score) -> Score:
        async def down(response: str, prompt: Prompt) -> RewardResult:
            if site.is_on:
                failure = Failure(kind=FailureKind.REWARD, message="the scorer does not answer (a drill)")
                return RewardResult(reward=None, failure=failure)
            return await score(response, prompt)

        return down

    wrap(site.controller.scorer, "score", around)
