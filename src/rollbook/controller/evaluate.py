"""Held-out prompts under the newest proven version, on the engines that train."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rollbook.controller.config import EvalSection
from rollbook.controller.rollout import in_words, kind_of
from rollbook.envs.env import EnvFactory
from rollbook.errors import DeadlineError, RolloutError
from rollbook.observe.values import Ratio, Values
from rollbook.rollout.agent_loop import run_trajectory
from rollbook.rollout.judge import Baseline, BaselineAnswer
from rollbook.rollout.router import Router
from rollbook.types import Failure, Prompt, SamplingParams, Trajectory

EXACT = "exact"
"""Reward term, alone or as part of another, that says whether an answer is right as a whole."""


@dataclass(kw_only=True)
class Evaluator:
    """Samples `prompts` and scores them as training does."""

    config: EvalSection
    prompts: Sequence[Prompt]
    make_env: EnvFactory
    baseline: Baseline | None
    """Another model, for comparison."""
    sampling: SamplingParams
    """Of evaluation: greedy unless the config says otherwise."""
    seed: int
    max_turns: int
    max_context_tokens: int
    clock: Callable[[], float]

    def is_due(self, num_steps_done: int, *, is_last: bool) -> bool:
        if not self.prompts:
            return False
        every = self.config.every_steps
        return is_last or (every > 0 and num_steps_done % every == 0)

    async def run(self, router: Router) -> Values:
        """Answers to all prompts, as metrics."""
        return evaluation_values(await self.answer(router))

    async def answer(self, router: Router, *, every: int = 1) -> list[Trajectory]:
        """Answers to each `every`-th prompt, in their order; all are asked for at once."""
        members = [
            (idx, sample)
            for idx in range(0, len(self.prompts), every)
            for sample in range(self.config.samples_per_prompt)
        ]
        return list(await asyncio.gather(*(self._one(router, idx, sample) for idx, sample in members)))

    async def run_baseline(self) -> Values:
        """What the other model reaches on the same prompts, as `val/<source>/baseline_...`; empty where there is
        none."""
        if self.baseline is None:
            return {}
        answers = await asyncio.gather(
            *(
                self.baseline.answer(prompt, self.sampling, seed=self.seed + sample)
                for prompt in self.prompts
                for sample in range(self.config.samples_per_prompt)
            )
        )
        by_source: dict[str, list[BaselineAnswer]] = defaultdict(list)
        for answer in answers:
            by_source[answer.prompt.source].append(answer)
        values: Values = {}
        for source, held in by_source.items():
            scored = [answer for answer in held if answer.result.reward is not None]
            values |= _scores(
                f"val/{source}/baseline_",
                [answer.result.reward or 0.0 for answer in scored],
                [answer.result.terms for answer in scored],
                num_asked=len(held),
            )
        return values

    async def _one(self, router: Router, prompt_idx: int, sample: int) -> Trajectory:
        prompt = self.prompts[prompt_idx]
        group_id = -1 - prompt_idx  # training groups count from 0: evaluation never shares a draw with them
        try:
            return await run_trajectory(
                router.generate,
                self.make_env(prompt),
                prompt=prompt,
                group_id=group_id,
                member_idx=sample,
                seed=self.seed,
                sampling=self.sampling,
                max_turns=self.max_turns,
                max_context_tokens=self.max_context_tokens,
                clock=self.clock,
                on_turn=lambda turn_idx, replica_id: None,
            )
        except (RolloutError, DeadlineError, MemoryError) as error:
            failure = Failure(kind=kind_of(error), message=in_words(error))
            return Trajectory(group_id=group_id, member_idx=sample, prompt=prompt, failure=failure)


def response_lengths(trajectories: Sequence[Trajectory]) -> list[int]:
    """Response tokens of those that were scored."""
    return [max(t.num_response_tokens, 1) for t in trajectories if t.failure is None and t.reward is not None]


def evaluation_values(trajectories: Sequence[Trajectory]) -> Values:
    """Metrics `val/<source>/...`; a failed trajectory is counted, never scored as zero."""
    by_source: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        by_source[trajectory.prompt.source].append(trajectory)
    values: Values = {}
    for source, own in by_source.items():
        values |= _values(f"val/{source}", own)
    return values


def _values(prefix: str, trajectories: Sequence[Trajectory]) -> Values:
    scored = [t for t in trajectories if t.failure is None and t.reward is not None]
    values: Values = {
        f"{prefix}/response_length": Ratio(sum(t.num_response_tokens for t in scored), len(scored)),
        f"{prefix}/clip_ratio": Ratio(sum(t.is_truncated for t in scored), len(scored)),
    }
    return values | _scores(
        f"{prefix}/",
        [t.reward or 0.0 for t in scored],
        [t.reward_terms for t in scored],
        num_asked=len(trajectories),
    )


def _scores(
    prefix: str, rewards: Sequence[float], terms: Sequence[Mapping[str, float]], *, num_asked: int
) -> Values:
    """Of answers that were scored, of `num_asked`."""
    values: Values = {
        f"{prefix}reward": Ratio(sum(rewards), len(rewards)),
        f"{prefix}failed_frac": Ratio(num_asked - len(rewards), num_asked),
    }
    exact = [part for held in terms for name, part in held.items() if name.split(".")[-1] == EXACT]
    if exact:
        values[f"{prefix}exact_match"] = Ratio(sum(exact), len(exact))
    return values
