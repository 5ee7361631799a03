"""A server that speaks OpenAI's interface, scripted at the HTTP border. Answers have the shape of vLLM 0.32's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from rollbook.errors import DeadlineError, EngineError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest
from rollbook.rollout.openai import OpenAIClient, OpenAIEngine
from rollbook.types import FinishReason, SamplingParams, VersionRun

MODELS = {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 32}]}


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "text": " w28 w0 w2",
        "logprobs": {
            "text_offset": [0, 3, 5],
            "token_logprobs": [-3.25, -0.25, -1.5],
            "tokens": ["token_id:28", "token_id:0", "token_id:2"],
            "top_logprobs": [{}, {}, {}],
        },
        "finish_reason": "stop",
        "stop_reason": 2,
        "token_ids": [28, 0, 2],
        **changes,
    }


def completion(**changes: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 4, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return {"object": "text_completion", "choices": [choice(**changes)], "usage": usage}


class Server:
    """Answers requests by a script and keeps what it was sent."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.sent: list[dict[str, Any]] = []
        self.headers: list[httpx.Headers] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.num_inside = 0

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.headers.append(request.headers)
        if request.url.path == "/v1/models":
            return httpx.Response(200, json=MODELS)
        self.sent.append(json.loads(request.content))
        self.num_inside += 1
        try:
            await self.may_answer.wait()
        finally:
            self.num_inside -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, httpx.Response) else httpx.Response(200, json=answer)


@asynccontextmanager
async def running(server: Server, **options: Any) -> AsyncIterator[OpenAIEngine]:
    client_options = {key: options.pop(key) for key in ("api_key", "deadline_s") if key in options}
    client = OpenAIClient(
        "http://server/v1/",
        "tiny",
        retry_wait_s=0.0,
        transport=httpx.MockTransport(server),
        **client_options,
    )
    config = RolloutConfig(
        num_slots=options.pop("num_slots", 4), response_deadline_s=options.pop("response_deadline_s", 60.0)
    )
    engine = OpenAIEngine(client, config, **options)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def request(name: str = "0/0", prompt: int = 4, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=name,
        prompt_ids=np.arange(5, 5 + prompt, dtype=np.int32),
        sampling=SamplingParams(**{"max_response_tokens": 8, **sampling}),
        seed=1,
        group_id=0,
        member_idx=int(name.partition("/")[2]),
    )


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


async def test_token_ids_go_in_and_come_out() -> None:
    server = Server(completion())
    async with running(server, weight_version=7, replica_id=2) as engine:
        response = await engine.generate(request())
    assert server.sent[0]["prompt"] == [5, 6, 7, 8]
    assert response.response_ids.tolist() == [28, 0, 2]
    assert response.logprobs.tolist() == [-3.25, -0.25, -1.5]
    assert response.version_runs == (VersionRun(7, 3),) and response.replica_id == 2
    assert (response.finish_reason, response.num_cached_prompt_tokens) == (FinishReason.STOP, 2)


async def test_every_sampling_parameter_is_sent_neutral_ones_too() -> None:
    """BR-063: what is not sent comes from the server's model folder."""
    server = Server(completion())
    async with running(server, eos_token_ids=(2,)) as engine:
        await engine.generate(request(stop_token_ids=(9,)))
        await engine.generate(request("0/1", ignore_eos=True))
    body = server.sent[0]
    neutral = {
        "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_tokens": 0, "stop": [], "n": 1,
    }  # fmt: skip
    assert {key: body[key] for key in neutral} == neutral
    assert (body["stop_token_ids"], server.sent[1]["stop_token_ids"]) == ([2, 9], [])
    assert body["seed"] != server.sent[1]["seed"] and 0 <= body["seed"] < 2**31


async def test_token_ids_may_also_be_written_into_the_logprobs() -> None:
    async with running(Server(completion(token_ids=None))) as engine:
        assert (await engine.generate(request())).response_ids.tolist() == [28, 0, 2]


async def test_a_server_that_gives_text_alone_is_an_error() -> None:
    text_only = completion(token_ids=None, logprobs={"tokens": ["w28"], "token_logprobs": [-1.0]})
    async with running(Server(text_only)) as engine:
        with pytest.raises(EngineError, match="with text, not with token ids"):
            await engine.generate(request())


@pytest.mark.parametrize(
    ("mode", "sampling", "is_known"),
    [
        ("raw_logprobs", {}, True),
        ("raw_logprobs", {"top_p": 0.9}, True),
        ("raw_logprobs", {"temperature": 0.0}, True),
        ("raw_logprobs", {"temperature": 0.7}, False),
        ("processed_logprobs", {"temperature": 0.7}, True),
        ("processed_logprobs", {"top_k": 5}, False),
    ],
)
async def test_logprobs_of_another_meaning_are_not_passed_on(
    mode: Any, sampling: dict[str, Any], is_known: bool
) -> None:
    async with running(Server(completion()), logprobs_mode=mode) as engine:
        response = await engine.generate(request(**sampling))
    assert np.isfinite(response.logprobs).all() == is_known and len(response.logprobs) == 3


async def test_the_response_ends_with_the_servers_context() -> None:
    server = Server(completion(finish_reason="length"))
    async with running(server) as engine:
        response = await engine.generate(request(prompt=30, max_response_tokens=100))
        with pytest.raises(EngineError, match="32 tokens, the server's context is 32"):
            await engine.generate(request(prompt=32))
    assert server.sent[0]["max_tokens"] == 2 and response.finish_reason is FinishReason.LENGTH


async def test_an_unknown_model_is_named_with_those_there_are() -> None:
    client = OpenAIClient("http://server/v1", "huge", transport=httpx.MockTransport(Server(completion())))
    with pytest.raises(EngineError, match="no model 'huge'\nhint: it has 'tiny'"):
        await OpenAIEngine(client, RolloutConfig()).start()


async def test_passing_failures_are_repeated_and_lasting_ones_told() -> None:
    busy = httpx.Response(503, json={"error": {"message": "loading"}}, headers={"retry-after": "0"})
    async with running(Server(busy, httpx.ConnectError("refused"), completion())) as engine:
        assert len((await engine.generate(request())).response_ids) == 3
    async with running(Server(busy)) as engine:
        with pytest.raises(EngineError, match="failed 4 times, at last with HTTP 503: loading"):
            await engine.generate(request())
    refused = httpx.Response(400, json={"error": {"message": "max_tokens is too large"}})
    server = Server(refused)
    async with running(server) as engine:
        with pytest.raises(EngineError, match="refused with HTTP 400: max_tokens is too large"):
            await engine.generate(request())
    assert len(server.sent) == 1


async def test_a_key_is_sent_and_never_shown() -> None:
    server = Server(httpx.Response(401, json={"error": {"message": "no"}}))
    async with running(server, api_key="secret-42") as engine:
        with pytest.raises(EngineError) as raised:
            await engine.generate(request())
    assert server.headers[-1]["authorization"] == "Bearer secret-42"
    assert "secret-42" not in str(raised.value)


async def test_a_silent_server_runs_into_the_deadline() -> None:
    server = Server(completion())
    async with running(server, deadline_s=0.05) as engine:
        server.may_answer.clear()
        with pytest.raises(DeadlineError, match="/completions did not answer within 0.05 s"):
            await engine.generate(request())


async def test_slots_bound_what_runs_on_the_server() -> None:
    server = Server(completion())
    async with running(server, num_slots=2) as engine:
        server.may_answer.clear()
        tasks = [asyncio.create_task(engine.generate(request(f"0/{i}"))) for i in range(5)]
        await until(lambda: server.num_inside == 2)
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting) == (2, 3)
        server.may_answer.set()
        await asyncio.gather(*tasks)
        stats = await engine.stats()
    assert (stats.decode_tokens, stats.prefill_tokens, stats.num_running) == (15, 10, 0)


async def test_a_pause_waits_for_what_runs_and_holds_back_the_rest() -> None:
    server = Server(completion())
    async with running(server) as engine:
        server.may_answer.clear()
        first = asyncio.create_task(engine.generate(request("0/0")))
        await until(lambda: server.num_inside == 1)
        pausing = asyncio.create_task(engine.pause("keep"))
        second = asyncio.create_task(engine.generate(request("0/1")))
        await asyncio.sleep(0)
        assert not pausing.done()
        server.may_answer.set()
        await pausing
        assert (await first).finish_reason is FinishReason.STOP and not second.done()
        await engine.resume()
        await second


async def test_an_abort_returns_every_request_without_tokens() -> None:
    server = Server(completion())
    async with running(server, num_slots=1) as engine:
        server.may_answer.clear()
        tasks = [asyncio.create_task(engine.generate(request(f"0/{i}"))) for i in range(3)]
        await until(lambda: server.num_inside == 1)
        await engine.pause("abort")
        responses = await asyncio.gather(*tasks)
        assert [r.finish_reason for r in responses] == [FinishReason.ABORTED] * 3
        assert all(len(r.response_ids) == 0 and r.version_runs == () for r in responses)
        server.may_answer.set()
        later = asyncio.create_task(engine.generate(request("0/9")))
        await asyncio.sleep(0)
        assert not later.done()
        await engine.resume()
        assert (await later).finish_reason is FinishReason.STOP


async def test_closing_fails_whoever_waits() -> None:
    server = Server(completion())
    async with running(server, num_slots=1) as engine:
        server.may_answer.clear()
        tasks = [asyncio.create_task(engine.generate(request(f"0/{i}"))) for i in range(2)]
        await until(lambda: server.num_inside == 1)
        await engine.close()
        for task in tasks:
            with pytest.raises(EngineError, match="was closed"):
                await task


async def test_a_servers_memory_is_not_ours() -> None:
    async with running(Server(completion())) as engine:
        with pytest.raises(EngineError, match="memory is its own"):
            await engine.sleep(1)
        await engine.wake()
        await engine.reset_prefix_cache()
        assert await engine.weight_version() == 0


async def test_a_judge_answers_in_text() -> None:
    said = {"choices": [{"message": {"role": "assistant", "content": "7/10"}, "finish_reason": "stop"}]}
    server = Server({**said, "usage": {"prompt_tokens": 9, "completion_tokens": 3}})
    client = OpenAIClient("http://server/v1", "tiny", transport=httpx.MockTransport(server))
    answer = await client.chat(
        [{"role": "user", "content": "grade it"}], max_response_tokens=5, seed=2**40 + 3
    )
    assert (answer.text, answer.num_prompt_tokens, answer.num_response_tokens) == ("7/10", 9, 3)
    assert set(server.sent[0]) == {
        "model",
        "messages",
        "max_tokens",
        "temperature",
        "top_p",
        "seed",
        "n",
        "stream",
    }
    assert server.sent[0]["seed"] == 3
    await client.close()


async def test_a_teacher_scores_given_tokens() -> None:
    rows = [None, {"6": {"logprob": -5.5}, "1": {"logprob": -0.1}}, {"7": {"logprob": -2.0}}]
    client = OpenAIClient(
        "http://server/v1", "tiny", transport=httpx.MockTransport(Server(completion(prompt_logprobs=rows)))
    )
    scores = await client.score(np.array([5, 6, 7], np.int32))
    assert np.isnan(scores[0]) and scores[1:].tolist() == [-5.5, -2.0]
    with pytest.raises(EngineError, match="no logprobs for the 4 tokens"):
        await client.score(np.array([5, 6, 7, 8], np.int32))
    await client.close()
