"""Tokens are only appended, exactly as sampled; an aborted response continues from its own tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rollbook.envs.env import Observation
from rollbook.envs.rewards.result import RewardResult
from rollbook.rollout.agent_loop import run_trajectory
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.types import (
    Failure,
    FailureKind,
    FinishReason,
    Ids,
    KVStart,
    Prompt,
    SamplingParams,
    Trajectory,
    VersionRun,
)

PROMPT = Prompt(prompt_id="p", prompt_ids=np.array([1, 2, 3], np.int32), source="test")


def ids(*numbers: int) -> Ids:
    return np.array(numbers, np.int32)


class ScriptedEngine:
    """Answers request after request from a list, and keeps what it was asked."""

    def __init__(self, *responses: tuple[list[int], int, FinishReason]) -> None:
        self.responses = list(responses)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> Response:
        self.requests.append(request)
        tokens, version, reason = self.responses.pop(0)
        return Response(
            request_id=request.request_id,
            response_ids=ids(*tokens),
            logprobs=np.full(len(tokens), -0.5, np.float32),
            version_runs=(VersionRun(version, len(tokens)),) if tokens else (),
            finish_reason=reason,
            replica_id=4,
            kv_starts=(KVStart(0, version),) if tokens else (),
        )


class ScriptedEnv:
    """Gives observations from a list, then a score of 1."""

    def __init__(self, *observations: list[int]) -> None:
        self.observations = list(observations)
        self.is_closed = False

    async def start(self) -> Ids:
        return PROMPT.prompt_ids

    async def observe(self, response_ids: Ids, finish_reason: FinishReason) -> Observation:
        if self.observations:
            return Observation(observation_ids=ids(*self.observations.pop(0)))
        return Observation(result=await self.finish())

    async def finish(self) -> RewardResult:
        return RewardResult(reward=1.0, terms={"score": 1.0})

    async def close(self) -> None:
        self.is_closed = True


async def play(
    engine: ScriptedEngine,
    env: ScriptedEnv,
    *,
    max_turns: int = 8,
    context: int = 100,
    clock: Callable[[], float] = lambda: 0.0,
) -> Trajectory:
    return await run_trajectory(
        engine.generate,
        env,
        prompt=PROMPT,
        group_id=5,
        member_idx=2,
        seed=0,
        sampling=SamplingParams(max_response_tokens=10),
        max_turns=max_turns,
        max_context_tokens=context,
        clock=clock,
        on_turn=lambda turn_idx, replica_id: None,
    )


async def test_three_turns_keep_every_sampled_token_and_each_prompt_starts_with_the_last() -> None:
    """41, 42 stand for "to" + "day", which the tokenizer would write as one token: they stay two."""
    stop = FinishReason.STOP
    engine = ScriptedEngine(([41, 42], 0, stop), ([7], 0, stop), ([8, 9], 1, stop))
    trajectory = await play(engine, ScriptedEnv([50, 51], [60]))
    assert trajectory.token_ids().tolist() == [1, 2, 3, 41, 42, 50, 51, 7, 60, 8, 9]
    assert trajectory.action_mask().tolist() == [False] * 3 + [
        True,
        True,
        False,
        False,
        True,
        False,
        True,
        True,
    ]
    for earlier, later in zip(engine.requests, engine.requests[1:], strict=False):
        assert later.prompt_ids[: len(earlier.prompt_ids)].tolist() == earlier.prompt_ids.tolist()
    assert [r.first_token_idx for r in engine.requests] == [0, 2, 3]
    assert (trajectory.oldest_version, trajectory.newest_version, trajectory.replica_id) == (0, 1, 4)
    assert trajectory.reward == 1.0


async def test_seconds_of_an_environment_are_those_of_turns_that_go_on() -> None:
    """Two observations, 3 s and 5 s; the third call scores."""
    now_s = [0.0]

    class SlowEnv(ScriptedEnv):
        async def observe(self, response_ids: Ids, finish_reason: FinishReason) -> Observation:
            now_s[0] += {2: 3.0, 1: 5.0, 0: 40.0}[len(self.observations)]
            return await super().observe(response_ids, finish_reason)

    engine = ScriptedEngine(*[([7], 0, FinishReason.STOP)] * 3)
    trajectory = await play(engine, SlowEnv([50], [60]), clock=lambda: now_s[0])
    assert trajectory.env_turns_s == (3.0, 5.0)


async def test_an_aborted_response_is_continued_and_its_versions_joined() -> None:
    aborted = FinishReason.ABORTED
    engine = ScriptedEngine(([11, 12], 3, aborted), ([13], 3, aborted), ([14, 15], 4, FinishReason.STOP))
    trajectory = await play(engine, ScriptedEnv())
    (turn,) = trajectory.turns
    assert turn.response_ids.tolist() == [11, 12, 13, 14, 15]
    assert turn.version_runs == (VersionRun(3, 3), VersionRun(4, 2))
    assert [r.prompt_ids.tolist() for r in engine.requests] == [
        [1, 2, 3],
        [1, 2, 3, 11, 12],
        [1, 2, 3, 11, 12, 13],
    ]
    assert [(r.first_token_idx, r.sampling.max_response_tokens) for r in engine.requests] == [
        (0, 10),
        (2, 8),
        (3, 7),
    ]
    assert [r.num_continued for r in engine.requests] == [0, 2, 3]


async def test_each_part_says_where_its_context_was_computed_anew() -> None:
    """The second was given back before it had a slot: it computed nothing."""
    aborted = FinishReason.ABORTED
    engine = ScriptedEngine(
        ([11, 12], 3, aborted), ([], 3, aborted), ([13], 4, aborted), ([14], 5, FinishReason.STOP)
    )
    (turn,) = (await play(engine, ScriptedEnv())).turns
    assert turn.response_ids.tolist() == [11, 12, 13, 14]
    assert turn.kv_starts == (KVStart(0, 3), KVStart(2, 4), KVStart(3, 5))


@pytest.mark.parametrize(("max_turns", "context"), [(1, 100), (8, 6), (8, 7)])
async def test_an_episode_cut_by_turns_or_context_is_scored_as_it_stands(
    max_turns: int, context: int
) -> None:
    engine = ScriptedEngine(([41, 42], 0, FinishReason.STOP))
    env = ScriptedEnv([50, 51])
    trajectory = await play(engine, env, max_turns=max_turns, context=context)
    assert trajectory.token_ids().tolist() == [1, 2, 3, 41, 42]
    assert trajectory.reward == 1.0
    assert trajectory.is_truncated
    assert env.is_closed


@pytest.mark.parametrize(
    ("reason", "is_truncated"), [(FinishReason.STOP, False), (FinishReason.LENGTH, True)]
)
async def test_an_episode_that_its_environment_ended_is_truncated_only_if_its_last_response_is(
    reason: FinishReason, is_truncated: bool
) -> None:
    """The first response hits its limit either way; prompt and tokens fill the context and the turns exactly."""
    engine = ScriptedEngine(([41, 42], 0, FinishReason.LENGTH), ([7], 0, reason))
    trajectory = await play(engine, ScriptedEnv([50]), max_turns=2, context=7)
    assert trajectory.token_ids().tolist() == [1, 2, 3, 41, 42, 50, 7]
    assert trajectory.is_truncated == is_truncated


async def test_a_request_says_whether_a_turn_may_follow() -> None:
    """So that an engine keeps what the next turn begins with, and nothing else."""
    engine = ScriptedEngine(*[([7], 0, FinishReason.STOP)] * 3)
    await play(engine, ScriptedEnv([50], [51], [52]), max_turns=3)
    assert [request.is_last_turn for request in engine.requests] == [False, False, True]


async def test_a_scorers_failure_is_the_trajectorys_and_no_reward_of_zero() -> None:
    failure = Failure(kind=FailureKind.TIMEOUT, message="gave no answer")

    class FailingEnv(ScriptedEnv):
        async def finish(self) -> RewardResult:
            return RewardResult(reward=None, failure=failure)

    trajectory = await play(ScriptedEngine(([41], 0, FinishReason.STOP)), FailingEnv())
    assert (trajectory.reward, trajectory.failure) == (None, failure)
    assert trajectory.num_response_tokens == 1, "what was sampled is on record"


async def test_the_environment_is_closed_when_the_engine_fails() -> None:
    env = ScriptedEnv()
    with pytest.raises(IndexError):
        await play(ScriptedEngine(), env)
    assert env.is_closed


@pytest.mark.parametrize("reward", [None, float("nan")])
async def test_an_environment_that_gives_neither_a_reward_nor_a_failure_is_at_fault(
    reward: float | None,
) -> None:
    """Else the trajectory would be nothing: not scored, not failed, and lost to every count."""

    class Silent(ScriptedEnv):
        async def finish(self) -> RewardResult:
            return RewardResult(reward=reward)

    env = Silent()
    with pytest.raises(ValueError, match=f"a result has reward {reward}"):
        await play(ScriptedEngine(([41], 0, FinishReason.STOP)), env)
    assert env.is_closed
