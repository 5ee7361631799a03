"""BR-070: what is trained is what was sampled, over several turns with observations in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollbook.envs.config import RewardConfig
from rollbook.envs.env import Env, Observation
from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer
from rollbook.envs.single_turn import SingleTurnEnv
from rollbook.types import FinishReason, Ids, Prompt, Trajectory, Turn, VersionRun


class MergingTokenizer:
    """Writes "today" as one id, so that the sampled "to" + "day" is not what it would encode."""

    has_chat_template = False
    eos_ids = (0,)
    pieces = ("<eos>", "today", "to", "day", " ", "{", "}", '"b":', '"a":', "1", "ok", ",")

    def encode(self, text: str, *, add_special_tokens: bool = False) -> Ids:
        ids: list[int] = []
        while text:
            piece = next(p for p in self.pieces if text.startswith(p))
            ids.append(self.pieces.index(piece))
            text = text[len(piece) :]
        return np.array(ids, np.int32)

    def decode(self, ids: Ids | Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self.pieces[i] for i in ids if not (skip_special_tokens and i == 0))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> Ids:
        raise AssertionError("this tokenizer has no chat template")


class ThreeTurnEnv:
    """Answers "ok" twice, then ends. Reads responses as text, and only appends ids."""

    def __init__(self, tokenizer: MergingTokenizer) -> None:
        self.tokenizer = tokenizer
        self.seen: list[str] = []

    async def start(self) -> Ids:
        return self.tokenizer.encode("today")

    async def observe(self, response_ids: Ids, finish_reason: FinishReason) -> Observation:
        self.seen.append(self.tokenizer.decode(response_ids.tolist(), skip_special_tokens=True))
        if len(self.seen) == 3:
            return Observation(result=RewardResult(reward=1.0))
        return Observation(observation_ids=self.tokenizer.encode("ok"))

    async def close(self) -> None:
        pass


async def test_br070_sampled_ids_survive_three_turns() -> None:
    tokenizer = MergingTokenizer()
    # "to"+"day"; a tool call with unusual key order and spacing; trailing blanks.
    sampled = [[2, 3, 0], [5, 7, 4, 4, 9, 11, 8, 9, 6, 0], [2, 3, 4, 4, 4]]
    encoded_again = tokenizer.encode(tokenizer.decode(sampled[0][:2]))
    assert encoded_again.tolist() == [1]  # not what was sampled
    env = ThreeTurnEnv(tokenizer)
    prompt = Prompt(prompt_id="row", prompt_ids=await env.start(), source="test")
    turns: list[Turn] = []
    prompts_given: list[list[int]] = []
    for number, ids in enumerate(sampled):
        trajectory = Trajectory(group_id=0, member_idx=0, prompt=prompt, turns=tuple(turns))
        prompts_given.append(trajectory.token_ids().tolist())
        response_ids = np.array(ids, np.int32)
        observation = await env.observe(response_ids, FinishReason.STOP)
        turns.append(
            Turn(
                response_ids=response_ids,
                behavior_logprobs=np.full(len(ids), -1.0 - number, np.float32),
                version_runs=(VersionRun(0, len(ids)),),
                finish_reason=FinishReason.STOP,
                observation_ids=observation.observation_ids,
            )
        )
    assert observation.is_done
    assert env.seen == ["today", '{"b":  1,"a":1}', "today   "]
    whole = Trajectory(group_id=0, member_idx=0, prompt=prompt, turns=tuple(turns))
    ids = whole.token_ids().tolist()
    assert ids == [1, *sampled[0], 10, *sampled[1], 10, *sampled[2]]
    assert [ids[: len(given)] for given in prompts_given] == prompts_given  # each prompt begins the next
    assert np.array(ids)[whole.action_mask()].tolist() == [token for turn in sampled for token in turn]
    by_turn = whole.behavior_logprobs()[whole.action_mask()]
    assert by_turn.tolist() == [-1.0] * 3 + [-2.0] * 10 + [-3.0] * 5


async def test_single_turn_scores_the_text_without_special_tokens() -> None:
    prompt = Prompt(
        prompt_id="row", prompt_ids=np.array([1, 4], np.int32), source="test", task={"answer": "today"}
    )
    env: Env = SingleTurnEnv(prompt, tokenizer=MergingTokenizer(), scorer=Scorer(RewardConfig()))
    assert (await env.start()).tolist() == [1, 4]
    observation = await env.observe(np.array([2, 3, 0], np.int32), FinishReason.STOP)
    assert observation.result == RewardResult(reward=1.0, terms={"exact": 1.0, "score": 1.0})
    assert observation.observation_ids.tolist() == []
