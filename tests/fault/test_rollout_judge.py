"""Models behind a server that judge, and one to compare with: asked over HTTP on loopback. What they cannot say is a
failure, never a score of zero."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from fake_server import serving
from rollbook.envs.config import EndpointConfig, JudgeConfig, RewardConfig
from rollbook.envs.rewards.result import RewardResult
from rollbook.envs.rewards.scorer import Scorer
from rollbook.errors import ConfigError, EngineError
from rollbook.rollout.judge import Baseline, HttpJudge
from rollbook.rollout.openai import OpenAIClient
from rollbook.rollout.teacher import HttpTeacher
from rollbook.types import FailureKind, Prompt, SamplingParams
from tiny_run import run_tiny, tiny_config

PROMPT = Prompt(
    prompt_id="a/0",
    prompt_ids=np.array([1], np.int32),
    source="a",
    task={"answer": "42"},
    messages=({"role": "user", "content": "What is six times seven?"},),
)


def judge_table(url: str, **changes: Any) -> dict[str, Any]:
    endpoint = {"url": url, "model": "big", "max_attempts": 1, **changes.pop("endpoint", {})}
    return {"endpoint": endpoint, **changes}


async def judged(said: str | int, response: str = "42", **changes: Any) -> RewardResult:
    """The whole scorer's result where the judge says `said`."""
    with serving(lambda question: said) as server:
        table = judge_table(server.url, **changes)
        config = RewardConfig.model_validate({"terms": [{"function": "judge", "judge": table}]})
        assert config.terms[0].judge is not None
        judge = HttpJudge(config.terms[0].judge)
        await judge.start()
        try:
            return await Scorer(config, {"judge": judge}).score(response, PROMPT)
        finally:
            await judge.close()


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Right. Score: 10", 1.0),
        ("Half of it. Score: 5", 0.5),
        ("Score: 9? No, it is wrong.\nScore: 0", 0.0),  # the last one counts
        ("score 3. Score: 2.5", 0.25),
    ],
)
async def test_the_last_number_of_the_judges_answer_is_the_reward(said: str, reward: float) -> None:
    assert (await judged(said)).reward == reward


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("I would rather not say.", "finds no number"),
        ("", "finds no number"),
        ("Score: 11", "outside 0 to 10"),
        ("Score: -1", "outside 0 to 10"),
        (400, "HTTP 400"),
        (503, "HTTP 503"),
    ],
)
async def test_a_judge_that_gives_no_score_is_a_failure_and_not_a_zero(said: str | int, why: str) -> None:
    result = await judged(said)
    assert result.reward is None and result.failure is not None
    assert result.failure.kind is FailureKind.REWARD and why in result.failure.message


async def test_a_number_that_is_none_is_a_failure() -> None:
    result = await judged("Score: nan", score_pattern=r"Score: (\w+)")
    assert result.failure is not None and "outside" in result.failure.message
    result = await judged("Score: good", score_pattern=r"Score: (\w+)")
    assert result.failure is not None and "is no number" in result.failure.message


async def test_a_judge_that_is_late_is_a_timeout() -> None:
    class Stuck(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    config = JudgeConfig.model_validate(judge_table("http://judge/v1"))
    client = OpenAIClient("http://judge/v1", "big", deadline_s=0.01, transport=Stuck())
    table = {"terms": [{"function": "judge", "judge": config.model_dump()}]}
    scorer = Scorer(RewardConfig.model_validate(table), {"judge": HttpJudge(config, client)})
    result = await scorer.score("42", PROMPT)
    assert result.failure is not None and result.failure.kind is FailureKind.TIMEOUT
    assert "judge" in result.failure.message


async def test_the_judge_reads_question_reference_and_response_and_nothing_is_replaced_twice() -> None:
    with serving(lambda question: "Score: 10") as server:
        template = "Q {prompt} A {answer} R {response}"
        judge = HttpJudge(JudgeConfig.model_validate(judge_table(server.url, template=template)))
        await judge("{answer} {prompt} \\1", PROMPT)
        await judge.close()
    (question,) = server.questions
    wanted = "Q What is six times seven? A 42 R {answer} {prompt} \\1"
    assert question["messages"] == [{"role": "user", "content": wanted}]
    assert question["temperature"] == 0 and question["model"] == "big"


async def test_the_key_comes_from_a_file_and_stands_in_no_config_or_message(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("s3cret\n")
    with serving(lambda question: 400) as server:
        table = judge_table(server.url, endpoint={"token_file": str(key)})
        config = JudgeConfig.model_validate(table)
        judge = HttpJudge(config)
        with pytest.raises(EngineError) as raised:
            await judge("42", PROMPT)
        await judge.close()
    assert server.keys == {"Bearer s3cret"}
    assert "s3cret" not in config.model_dump_json() + str(raised.value)


@pytest.mark.parametrize("content", [None, "", "two words", "schlüssel"])
def test_a_file_without_a_key_is_refused(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_text(content)
    endpoint = EndpointConfig(url="http://127.0.0.1:1/v1", model="big", token_file=str(path))
    with pytest.raises(ConfigError, match="token_file"):
        OpenAIClient.at(endpoint)


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ({"function": "judge"}, "does not say which"),
        ({"function": "exact", "judge": judge_table("http://a/v1")}, "another function"),
        ({"function": "judge", "judge": judge_table("a/v1")}, "no address"),
        ({"function": "judge", "judge": judge_table("http://a/v1", template="x")}, "no {response}"),
        ({"function": "judge", "judge": judge_table("http://a/v1", score_pattern="x")}, "no group"),
        ({"function": "judge", "judge": judge_table("http://a/v1", score_pattern="(")}, "no regular"),
        ({"function": "judge", "judge": judge_table("http://a/v1", lowest=10)}, "raise highest"),
        ({"function": "judge", "judge": judge_table("http://a/v1"), "isolation": "process"}, "isolation"),
    ],
)
def test_what_a_judge_cannot_be_is_refused_with_its_remedy(table: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        RewardConfig.model_validate({"terms": [table]})


def test_a_password_in_the_url_is_refused_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="token_file") as raised:
        run_tiny(
            tmp_path,
            num_steps=1,
            **{"reward.terms": [{"function": "judge", "judge": judge_table("http://me:pw@a/v1")}]},
        )
    assert "pw" not in str(raised.value)


async def test_a_baselines_failure_is_counted_and_never_scored() -> None:
    scorer = Scorer(RewardConfig.model_validate({"terms": [{"function": "exact"}]}))
    sampling = SamplingParams(max_response_tokens=4, temperature=0.0)
    for said, reward in (("42", 1.0), ("41", 0.0), (500, None)):
        with serving(lambda question, said=said: said) as server:  # type: ignore[misc]
            endpoint = EndpointConfig(url=server.url, model="big", max_attempts=1)
            baseline = Baseline(endpoint, scorer)
            answer = await baseline.answer(PROMPT, sampling, seed=1)
            await baseline.close()
        assert answer.result.reward == reward
        assert (answer.result.failure is None) == (reward is not None)


def by_low_digits(question: str) -> str:
    response = question.rpartition("R: ")[2]
    return f"Score: {round(10 * sum(c in '01234' for c in response) / max(len(response), 1))}"


def test_a_run_is_trained_by_a_judge_and_compared_with_a_baseline(tmp_path: Path) -> None:
    def sum_of(question: str) -> str:
        a, _, b = question.rstrip("=").partition("+")
        return f"{int(a) + int(b):0{len(a) + 1}d}"[::-1]  # as the task writes sums

    with serving(by_low_digits) as judge, serving(sum_of) as strong:
        table = judge_table(judge.url, template="A: {answer} R: {response}")
        terms = [
            {"function": "judge", "judge": table, "is_tested": False},
            {"function": "exact", "weight": 0.0},
        ]
        run = run_tiny(
            tmp_path,
            num_steps=1,
            **{
                "reward.terms": terms,
                "data.held_out_frac": 0.3,
                "eval.num_prompts": 4,
                "eval.baseline": {"url": strong.url, "model": "big"},
            },
        )
    first = run.metrics[0]
    assert first["val/addition/baseline_exact_match"] == 1.0
    assert first["val/addition/baseline_failed_frac"] == 0.0
    assert first["val/addition/exact_match"] < 1.0
    assert len(strong.questions) == 4
    rewards = [row["reward"] for row in run.trajectories(0)]
    assert len(rewards) == 8 and all(0 <= reward <= 1 for reward in rewards)
    assert first["critic/rewards/mean"] == pytest.approx(float(np.mean(rewards)))


def test_a_policy_is_drawn_to_a_teacher_behind_a_server(tmp_path: Path) -> None:
    with serving(lambda question: "") as server:
        endpoint = {"url": server.url, "model": "big"}
        run = run_tiny(tmp_path, num_steps=1, **{"algorithm.name": "distill", "teacher_endpoint": endpoint})
    rows = run.trajectories(0)
    asked = [question["prompt"] for question in server.questions[1:]]  # the first is the check before the run
    assert sorted(asked) == sorted(list(row["token_ids"]) for row in rows)
    gaps = [
        behavior - (-0.5 - token_id / 100)
        for row in rows
        for token_id, behavior, is_action in zip(
            row["token_ids"], row["behavior_logprobs"], row["action_mask"], strict=True
        )
        if is_action
    ]
    assert run.metrics[0]["actor/teacher_kl_k1"] == pytest.approx(float(np.mean(gaps)), abs=1e-5)
    assert run.metrics[0]["actor/grad_norm"] > 0


async def test_a_teacher_that_cannot_say_a_token_stops_the_step_by_name(tmp_path: Path) -> None:
    def reply(request: httpx.Request) -> httpx.Response:
        rows: list[Any] = [None, {"4": {"logprob": -1.0}}, {"5": {"logprob": float("-inf")}}]
        return httpx.Response(200, content=json.dumps({"choices": [{"prompt_logprobs": rows}]}))

    client = OpenAIClient("http://teacher/v1", "big", transport=httpx.MockTransport(reply))
    teacher = HttpTeacher(EndpointConfig(url="http://teacher/v1", model="big"), client)
    batch = SimpleNamespace(sequences=[SimpleNamespace(token_ids=np.array([3, 4, 5]), teacher_logprobs=None)])
    with pytest.raises(EngineError, match="token 2 of 3"):
        await teacher.fill(batch)  # type: ignore[arg-type]
    assert batch.sequences[0].teacher_logprobs is None
    await teacher.close()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"algorithm.name": "distill", "rollout.temperature": 0.7}, "sample at 1"),
        ({"algorithm.name": "distill", "teacher": {"path": "x"}}, "remove one of them"),
        ({}, "it would never be asked"),
    ],
)
def test_a_teacher_that_makes_no_sense_is_refused(overrides: dict[str, Any], says: str) -> None:
    endpoint = {"url": "http://teacher/v1", "model": "big"}
    with pytest.raises(ConfigError, match=says):
        tiny_config(teacher_endpoint=endpoint, **overrides).check()


def test_a_server_that_is_not_there_stops_the_run_before_it_has_a_directory(tmp_path: Path) -> None:
    table = judge_table("http://127.0.0.1:9/v1")
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        run_tiny(tmp_path, num_steps=1, **{"reward.terms": [{"function": "judge", "judge": table}]})
    assert not any(tmp_path.rglob("metrics.jsonl"))
