"""One trajectory: turns of an engine and an environment until the environment ends it.

Token ids are only ever appended, exactly as sampled; a partial response (an engine paused with "abort") is
continued from its own tokens, never from text.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from rollbook.envs.env import Env
from rollbook.envs.rewards.result import RewardResult
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.types import FinishReason, Ids, KVStart, Prompt, SamplingParams, Trajectory, Turn, VersionRun

Generate = Callable[[GenerateRequest], Awaitable[Response]]


async def run_trajectory(
    generate: Generate,
    env: Env,
    *,
    prompt: Prompt,
    group_id: int,
    member_idx: int,
    seed: int,
    sampling: SamplingParams,
    max_turns: int,
    max_context_tokens: int,
    clock: Callable[[], float],
    on_turn: Callable[[int, int | None], None],
) -> Trajectory:
    """Sample one episode and take its score from the environment.

    Args:
        generate: sends a request to a replica; raises EngineError.
        env: of this trajectory alone; closed here.
        prompt: its ids must be what `env.start` gives.
        group_id, member_idx, seed: with the token index they decide what is sampled.
        sampling: of every response.
        max_turns, max_context_tokens: where an episode is cut off, and scored as it stands.
        clock: seconds, for the trajectory's start and end.
        on_turn: told each turn's index, before it is sampled without and afterwards with its replica.
    Returns:
        The trajectory with a reward, or with the failure its scorer reported.
    """
    trajectory = Trajectory(group_id=group_id, member_idx=member_idx, prompt=prompt, started_at_s=clock())
    try:
        context = await env.start()
        if not np.array_equal(context, prompt.prompt_ids):
            trajectory.prompt = replace(prompt, prompt_ids=context)
        result: RewardResult | None = None
        while result is None:
            turn_idx = len(trajectory.turns)
            is_last_turn = turn_idx + 1 >= max_turns
            on_turn(turn_idx, None)
            response = await _sample(generate, _request(trajectory, context, sampling, seed, is_last_turn))
            on_turn(turn_idx, response.replica_id)
            trajectory.replica_id = response.replica_id
            asked_at_s = clock()
            observation = await env.observe(response.response_ids, response.finish_reason)
            if not observation.is_done:
                trajectory.env_turns_s += (clock() - asked_at_s,)
            num_tokens = len(context) + len(response.response_ids) + len(observation.observation_ids)
            goes_on = not (observation.is_done or is_last_turn or num_tokens >= max_context_tokens)
            turn = _turn(response, observation.observation_ids if goes_on else np.zeros(0, np.int32))
            trajectory.turns += (turn,)
            context = np.concatenate([context, turn.response_ids, turn.observation_ids])
            result = observation.result
            if result is None and not goes_on:
                trajectory.was_cut_off = True
                result = await env.finish()
    finally:
        await env.close()
    trajectory.reward, trajectory.failure = result.reward, result.failure
    trajectory.reward_terms = dict(result.terms)
    trajectory.finished_at_s = clock()
    return trajectory


def _request(
    trajectory: Trajectory, context: Ids, sampling: SamplingParams, seed: int, is_last_turn: bool
) -> GenerateRequest:
    """For the next turn."""
    return GenerateRequest(
        request_id=f"{trajectory.group_id}/{trajectory.member_idx}#{len(trajectory.turns)}",
        prompt_ids=context,
        sampling=sampling,
        seed=seed,
        group_id=trajectory.group_id,
        member_idx=trajectory.member_idx,
        first_token_idx=trajectory.num_response_tokens,
        is_last_turn=is_last_turn,
    )


async def _sample(generate: Generate, request: GenerateRequest) -> Response:
    """One response, continued across aborts. Its parts join into one response of one turn."""
    parts: list[Response] = []
    while True:
        response = await generate(request)
        parts.append(response)
        num_sampled = len(response.response_ids)
        left = request.sampling.max_response_tokens - num_sampled
        if response.finish_reason is not FinishReason.ABORTED or left <= 0:
            break
        request = replace(
            request,
            request_id=f"{request.request_id}+",
            prompt_ids=np.concatenate([request.prompt_ids, response.response_ids]),
            first_token_idx=request.first_token_idx + num_sampled,
            num_continued=request.num_continued + num_sampled,
            sampling=replace(request.sampling, max_response_tokens=left),
        )
    if len(parts) == 1:
        return response
    return replace(
        response,
        response_ids=_join([part.response_ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        version_runs=_join_runs([run for part in parts for run in part.version_runs]),
        kv_starts=_join_starts(parts),
    )


def _join(parts: list[Ids]) -> Ids:
    return np.concatenate(parts).astype(np.int32, copy=False)


def _join_runs(runs: list[VersionRun]) -> tuple[VersionRun, ...]:
    joined: list[VersionRun] = []
    for run in runs:
        if joined and joined[-1].weight_version == run.weight_version:
            joined[-1] = VersionRun(run.weight_version, joined[-1].num_tokens + run.num_tokens)
        elif run.num_tokens:
            joined.append(run)
    return tuple(joined)


def _join_starts(parts: list[Response]) -> tuple[KVStart, ...]:
    """Token indices of the whole; of two starts before the same token the later one made what it read."""
    starts: dict[int, KVStart] = {}
    num_before = 0
    for part in parts:
        for start in part.kv_starts:
            at = num_before + start.token_idx
            starts[at] = KVStart(at, start.weight_version)
        num_before += len(part.response_ids)
    return tuple(starts.values())


def _turn(response: Response, observation_ids: Ids) -> Turn:
    return Turn(
        response_ids=response.response_ids,
        behavior_logprobs=response.logprobs,
        version_runs=response.version_runs,
        finish_reason=response.finish_reason,
        observation_ids=observation_ids,
        kv_starts=response.kv_starts,
    )
