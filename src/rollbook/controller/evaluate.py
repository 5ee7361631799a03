"""Held-out prompts under the newest proven version, on the engines that train."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollbook.controller.config import EvalSection
from rollbook.envs.env import EnvFactory
from rollbook.errors import RolloutError
from rollbook.observe.values import Ratio, Values
from rollbook.rollout.agent_loop import run_trajectory
from rollbook.rollout.router import Router
from rollbook.types import Failure, FailureKind, Prompt, SamplingParams, Trajectory

EXACT = "exact"
"""Reward term, alone or as part of another, that says whether an answer is right as a whole."""


@dataclass(kw_only=True)
class Evaluator:
    """Samples `prompts` and scores them as training does."""

    config: EvalSection
    prompts: Sequence[Prompt]
    make_env: EnvFactory
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
        """Metrics `val/<source>/...`; a failed trajectory is counted, never scored as zero."""
        members = [
            (idx, sample)
            for idx in range(len(self.prompts))
            for sample in range(self.config.samples_per_prompt)
        ]
        done = await asyncio.gather(*(self._one(router, idx, sample) for idx, sample in members))
        by_source: dict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in done:
            by_source[trajectory.prompt.source].append(trajectory)
        values: Values = {}
        for source, trajectories in by_source.items():
            values |= _values(f"val/{source}", trajectories)
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
        except RolloutError as error:
            failure = Failure(kind=FailureKind.ENGINE, message=error.what)
            return Trajectory(group_id=group_id, member_idx=sample, prompt=prompt, failure=failure)


def _values(prefix: str, trajectories: Sequence[Trajectory]) -> Values:
    scored = [t for t in trajectories if t.failure is None and t.reward is not None]
    values: Values = {
        f"{prefix}/reward": Ratio(sum(t.reward or 0.0 for t in scored), len(scored)),
        f"{prefix}/failed_frac": Ratio(len(trajectories) - len(scored), len(trajectories)),
        f"{prefix}/response_length": Ratio(sum(t.num_response_tokens for t in scored), len(scored)),
        f"{prefix}/clip_ratio": Ratio(sum(t.is_truncated for t in scored), len(scored)),
    }
    exact = [part for t in scored for name, part in t.reward_terms.items() if name.split(".")[-1] == EXACT]
    if exact:
        values[f"{prefix}/exact_match"] = Ratio(sum(exact), len(exact))
    return values
