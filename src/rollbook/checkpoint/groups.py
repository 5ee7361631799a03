"""Groups as plain state, so that finished but untrained work survives a resume."""

from __future__ import annotations

from typing import Any

from rollbook.types import FinishReason, Group, Prompt, Trajectory, Turn, VersionRun


def encode_group(group: Group) -> dict[str, Any]:
    """A group whose members were all scored or failed; failed members are left out (they train nothing)."""
    return {
        "group_id": group.group_id,
        "prompt": encode_prompt(group.prompt),
        "trajectories": [
            {
                "member_idx": t.member_idx,
                "reward": t.reward,
                "reward_terms": t.reward_terms,
                "replica_id": t.replica_id,
                "started_at_s": t.started_at_s,
                "finished_at_s": t.finished_at_s,
                "turns": [
                    {
                        "response_ids": turn.response_ids,
                        "behavior_logprobs": turn.behavior_logprobs,
                        "version_runs": [[run.weight_version, run.num_tokens] for run in turn.version_runs],
                        "finish_reason": turn.finish_reason.value,
                        "observation_ids": turn.observation_ids,
                    }
                    for turn in t.turns
                ],
            }
            for t in group.scored
        ],
    }


def decode_group(state: dict[str, Any]) -> Group:
    prompt = decode_prompt(state["prompt"])
    trajectories = tuple(
        Trajectory(
            group_id=state["group_id"],
            member_idx=t["member_idx"],
            prompt=prompt,
            reward=t["reward"],
            reward_terms=t["reward_terms"],
            replica_id=t["replica_id"],
            started_at_s=t["started_at_s"],
            finished_at_s=t["finished_at_s"],
            turns=tuple(
                Turn(
                    response_ids=turn["response_ids"],
                    behavior_logprobs=turn["behavior_logprobs"],
                    version_runs=tuple(VersionRun(*run) for run in turn["version_runs"]),
                    finish_reason=FinishReason(turn["finish_reason"]),
                    observation_ids=turn["observation_ids"],
                )
                for turn in t["turns"]
            ),
        )
        for t in state["trajectories"]
    )
    return Group(group_id=state["group_id"], prompt=prompt, trajectories=trajectories)


def encode_prompt(prompt: Prompt) -> dict[str, Any]:
    return {
        "prompt_id": prompt.prompt_id,
        "prompt_ids": prompt.prompt_ids,
        "source": prompt.source,
        "task": dict(prompt.task),
    }


def decode_prompt(state: dict[str, Any]) -> Prompt:
    return Prompt(
        prompt_id=state["prompt_id"],
        prompt_ids=state["prompt_ids"],
        source=state["source"],
        task=state["task"],
    )
