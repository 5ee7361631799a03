"""What the native engine promises the controller, through its public face."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from rollout_tiny import (
    VOCAB,
    AtStep,
    generate,
    random_ids,
    request,
    running,
    tiny_model,
    trainer_logprobs,
    write_weights,
)

from rollbook.errors import DeadlineError, EngineError, SyncError
from rollbook.modeling.load import wrap_transformers
from rollbook.modeling.logprobs import LmHead
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.native import paged_attention
from rollbook.rollout.native.paged_attention import KVPool, LayerShape
from rollbook.rollout.native.pages import CopyPages, ZeroPages
from rollbook.types import FinishReason, SamplingParams, VersionRun


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
async def test_ratio_to_the_trainer_is_one_at_every_temperature(temperature: float) -> None:
    """BR-061: both sides divide the logits, and top-p or top-k do not change what is reported."""
    model, prompt = tiny_model(), random_ids(9)
    async with running(model) as engine:
        found = await generate(
            engine,
            [
                request(prompt, "0/0", max_response_tokens=30, temperature=temperature),
                request(prompt, "0/1", max_response_tokens=30, temperature=temperature, top_p=0.8),
                request(prompt, "0/2", max_response_tokens=30, temperature=temperature, top_k=5),
            ],
        )
    for response in found:
        expected = trainer_logprobs(model, prompt, response.response_ids, temperature)
        np.testing.assert_allclose(np.exp(expected - response.logprobs), 1.0, atol=1e-5)


async def test_greedy_repeats_the_likeliest_token_and_reports_unscaled_logprobs() -> None:
    model, prompt = tiny_model(), random_ids(5)
    async with running(model) as engine:
        one, other = await generate(
            engine, [request(prompt, "0/0", temperature=0.0), request(prompt, "3/4", temperature=0.0)]
        )
    assert one.response_ids.tolist() == other.response_ids.tolist()
    np.testing.assert_allclose(one.logprobs, trainer_logprobs(model, prompt, one.response_ids), atol=1e-5)


async def test_tokens_depend_on_seed_group_member_and_index_alone() -> None:
    """Alone, beside others, in another order, put off and recomputed: the same tokens."""
    model = tiny_model()
    requests = [request(random_ids(3 + g, g), f"{g}/{m}") for g in range(5) for m in range(3)]
    async with running(model, num_slots=16) as engine:
        together = {r.request_id: r.response_ids.tolist() for r in await generate(engine, requests)}
        alone = await engine.generate(requests[4])
    async with running(model, num_slots=4, kv_pool_tokens=28, prefix_cache=False) as engine:
        squeezed = {r.request_id: r.response_ids.tolist() for r in await generate(engine, requests[::-1])}
        assert (await engine.stats()).num_preemptions > 0
    assert together == squeezed
    assert together[alone.request_id] == alone.response_ids.tolist()
    assert len({tuple(ids) for ids in together.values()}) == len(requests)
    async with running(model) as engine:
        reseeded = await engine.generate(request(random_ids(3, 0), "0/0", seed=6))
    assert reseeded.response_ids.tolist() != together["0/0"]


async def test_a_response_cut_in_two_continues_with_the_same_tokens() -> None:
    model, prompt = tiny_model(), random_ids(6)
    async with running(model) as engine:
        whole = await engine.generate(request(prompt, max_response_tokens=12))
        first = await engine.generate(request(prompt, max_response_tokens=5))
        rest = await engine.generate(
            request(np.concatenate([prompt, first.response_ids]), max_response_tokens=7, first_token_idx=5)
        )
    joined = first.response_ids.tolist() + rest.response_ids.tolist()
    assert joined == whole.response_ids.tolist()


async def test_bfloat16_steps_come_in_few_sizes_and_give_the_trainers_logprobs() -> None:
    """A CPU compiles a kernel for each size: 19 rows that end one by one run as 24, 16 and 8."""
    model, prompt = tiny_model(), random_ids(9)
    model.module.to(torch.bfloat16)
    sizes: list[int] = []
    async with running(model, num_slots=32, dtype="bfloat16") as engine:
        runner = engine._runner
        assert runner is not None
        embedding = runner.model.module.get_submodule("model.embed_tokens")
        embedding.register_forward_hook(lambda module, given, out: sizes.append(given[0].numel()))
        found = await generate(
            engine, [request(prompt, f"0/{m}", max_response_tokens=m + 1) for m in range(19)]
        )
    assert set(sizes) == {24, 16, 8}
    for response in found:
        expected = trainer_logprobs(model, prompt, response.response_ids)
        np.testing.assert_allclose(response.logprobs, expected, atol=0.15)


# ---- how responses end


async def reference_response(**settings: Any) -> list[int]:
    async with running(tiny_model()) as engine:
        found = await engine.generate(request(random_ids(4), max_response_tokens=24, **settings))
    return found.response_ids.tolist()


def first_at(ids: list[int], position: int) -> tuple[int, int]:
    """A token of `ids` at or after `position` that did not occur before it, and where."""
    for idx in range(position, len(ids)):
        if ids[idx] not in ids[:idx]:
            return ids[idx], idx
    raise AssertionError("the sample repeats itself: choose another seed")


async def test_end_of_sequence_ends_a_response_and_is_kept_unless_ignored() -> None:
    whole = await reference_response()
    eos, position = first_at(whole, 4)
    async with running(tiny_model(), engine={"eos_token_ids": (eos,)}) as engine:
        ended, ignored = await generate(
            engine,
            [
                request(random_ids(4), "0/0", max_response_tokens=24),
                request(random_ids(4), "0/0#ignore", max_response_tokens=24, ignore_eos=True),
            ],
        )
    assert ended.response_ids.tolist() == whole[: position + 1]
    assert ended.finish_reason is FinishReason.STOP
    assert ignored.response_ids.tolist() == whole and ignored.finish_reason is FinishReason.LENGTH


async def test_stop_token_ends_a_response_and_is_kept() -> None:
    whole = await reference_response()
    stop, position = first_at(whole, 6)
    async with running(tiny_model()) as engine:
        found = await engine.generate(
            request(random_ids(4), max_response_tokens=24, stop_token_ids=(VOCAB + 1, stop))
        )
    assert found.response_ids.tolist() == whole[: position + 1]
    assert found.finish_reason is FinishReason.STOP


class TwoLetters:
    """Token i is two letters, so that a stop string may begin and end inside tokens."""

    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(97 + i // 10) + chr(65 + i % 10) for i in token_ids)


async def test_stop_string_across_tokens_ends_a_response_with_the_token_that_completes_it() -> None:
    whole = await reference_response()
    text = TwoLetters().decode(whole)
    stop = text[9:14]  # the second half of token 4, tokens 5 and 6
    end = text.index(stop) + len(stop)
    async with running(tiny_model(), engine={"tokenizer": TwoLetters()}) as engine:
        found, other = await generate(
            engine,
            [
                request(random_ids(4), "0/0", max_response_tokens=24, stop_strings=("never", stop)),
                request(random_ids(4), "0/0#free", max_response_tokens=24),
            ],
        )
    assert found.response_ids.tolist() == whole[: -(-end // 2)]
    assert found.finish_reason is FinishReason.STOP
    assert other.response_ids.tolist() == whole


@pytest.mark.parametrize("cut", [1, 4, 5, 6])
async def test_a_stop_string_that_began_before_an_abort_ends_the_continued_response(cut: int) -> None:
    """Tokens 4 to 6 complete it; a part that was aborted in the middle of them goes on as if it had not been."""
    whole = await reference_response()
    text = TwoLetters().decode(whole)
    stop = text[9:14]
    end = -(-(text.index(stop) + len(stop)) // 2)
    rest = GenerateRequest(
        request_id="0/0#0+",
        prompt_ids=np.concatenate([random_ids(4), np.array(whole[:cut], np.int32)]),
        sampling=SamplingParams(max_response_tokens=24 - cut, stop_strings=(stop,)),
        seed=5,
        group_id=0,
        member_idx=0,
        first_token_idx=cut,
        num_continued=cut,
    )
    async with running(tiny_model(), engine={"tokenizer": TwoLetters()}) as engine:
        found = await engine.generate(rest)
    assert found.response_ids.tolist() == whole[cut:end]
    assert found.finish_reason is FinishReason.STOP


async def test_the_models_context_ends_a_response() -> None:
    async with running(tiny_model()) as engine:
        found = await engine.generate(request(random_ids(120), max_response_tokens=50))
    assert len(found.response_ids) == 8  # 128 positions
    assert found.finish_reason is FinishReason.LENGTH


# ---- requests that can't be served


@pytest.mark.parametrize(
    ("prompt_tokens", "max_response_tokens", "words"),
    [
        (128, 4, "the prompt has 128 tokens, the model's context is 128"),
        (60, 50, "60 + 50 tokens of keys and values and the pool holds 64"),
        (0, 4, "0 prompt tokens"),
    ],
)
async def test_a_request_that_can_never_run_is_refused_at_once_with_values(
    prompt_tokens: int, max_response_tokens: int, words: str
) -> None:
    async with running(tiny_model(), kv_pool_tokens=64) as engine:
        with pytest.raises(EngineError, match=words.replace("+", r"\+")):
            await engine.generate(request(random_ids(prompt_tokens), max_response_tokens=max_response_tokens))


async def test_stop_strings_without_a_tokenizer_are_refused() -> None:
    async with running(tiny_model()) as engine:
        with pytest.raises(EngineError, match="no tokenizer"):
            await engine.generate(request(random_ids(3), stop_strings=("x",)))


async def test_an_id_that_already_runs_is_refused_and_the_first_goes_on() -> None:
    async with running(tiny_model()) as engine:
        await engine.pause()
        first = asyncio.create_task(engine.generate(request(random_ids(3))))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="already running"):
            await engine.generate(request(random_ids(3)))
        await engine.resume()
        assert len((await first).response_ids) == 8


async def test_cancelling_frees_the_slot_and_the_pages() -> None:
    model = tiny_model()
    async with running(model, num_slots=1, prefix_cache=False) as engine:
        hook = AtStep(engine, 3, engine.pause)
        running_one = asyncio.create_task(engine.generate(request(random_ids(20), "0/0")))
        waiting = asyncio.create_task(engine.generate(request(random_ids(3), "1/0")))
        while hook.answer is None:
            await asyncio.sleep(0)
        await hook.answer
        assert (await engine.stats()).num_running == 1
        running_one.cancel()
        await asyncio.gather(running_one, return_exceptions=True)
        await engine.resume()
        assert len((await waiting).response_ids) == 8
        stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_used_tokens) == (0, 0, 0)


async def test_a_response_that_takes_too_long_names_its_request() -> None:
    async with running(tiny_model(), response_deadline_s=0.01) as engine:
        await engine.pause()
        with pytest.raises(DeadlineError, match="request 4/2 has no response after 0.01 s"):
            await engine.generate(request(random_ids(3), "4/2"))
        await engine.resume()
        assert (await engine.stats()).num_waiting == 0


# ---- pauses


async def paused_after(engine: Any, step: int, mode: str) -> tuple[asyncio.Task[Response], AtStep]:
    """A response of 8 tokens and a pause asked for while token number `step` is sampled."""
    hook = AtStep(engine, step, lambda: engine.pause(mode))
    task = asyncio.create_task(engine.generate(request(random_ids(5))))
    while hook.answer is None:
        await asyncio.sleep(0)
    await hook.answer
    return task, hook


async def test_pause_keep_holds_a_response_and_resume_ends_it_unchanged() -> None:
    model = tiny_model()
    async with running(model) as engine:
        whole = await engine.generate(request(random_ids(5), "0/0"))
    async with running(model) as engine:
        task, _ = await paused_after(engine, 3, "keep")
        assert not task.done() and (await engine.stats()).decode_tokens == 3
        await engine.resume()
        assert (await task).response_ids.tolist() == whole.response_ids.tolist()


async def test_pause_abort_returns_what_was_sampled_and_it_can_be_continued() -> None:
    model, prompt = tiny_model(), random_ids(5)
    async with running(model) as engine:
        whole = await engine.generate(request(prompt))
    async with running(model) as engine:
        task, _ = await paused_after(engine, 3, "abort")
        part = await task
        assert part.finish_reason is FinishReason.ABORTED
        assert part.response_ids.tolist() == whole.response_ids.tolist()[:3]
        queued = asyncio.create_task(
            engine.generate(
                request(np.concatenate([prompt, part.response_ids]), max_response_tokens=5, first_token_idx=3)
            )
        )
        await engine.resume()
        assert (await queued).response_ids.tolist() == whole.response_ids.tolist()[3:]


async def test_pause_drain_ends_what_runs_and_starts_nothing() -> None:
    async with running(tiny_model(), num_slots=1) as engine:
        hook = AtStep(engine, 3, lambda: engine.pause("drain"))
        first = asyncio.create_task(engine.generate(request(random_ids(5), "0/0")))
        second = asyncio.create_task(engine.generate(request(random_ids(5), "1/0")))
        assert len((await first).response_ids) == 8
        assert hook.answer is not None
        await hook.answer
        stats = await engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.decode_tokens) == (0, 1, 8)
        await engine.resume()
        assert len((await second).response_ids) == 8


# ---- sleep


@pytest.mark.parametrize("share_weights", [False, True])
async def test_a_response_goes_on_after_sleep_with_the_same_tokens(share_weights: bool) -> None:
    model = tiny_model()
    async with running(model) as engine:
        whole = await engine.generate(request(random_ids(5)))
    async with running(model, engine={"share_weights": share_weights}) as engine:
        task, _ = await paused_after(engine, 3, "keep")
        await engine.sleep(1)
        assert (await engine.stats()).kv_used_tokens == 0
        await engine.wake()
        await engine.resume()
        found = await task
    assert found.response_ids.tolist() == whole.response_ids.tolist()
    np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=1e-6)


async def test_after_deep_sleep_nothing_is_served_before_a_publication() -> None:
    model = tiny_model()
    async with running(model) as engine:
        before = await engine.generate(request(random_ids(5), "0/0"))
        await engine.sleep(2)
        weights = await engine.live_weights()
        assert all(weights.read(name).numel() == 0 for name in weights.specs())
        await engine.wake()
        task = asyncio.create_task(engine.generate(request(random_ids(5), "0/0")))
        await write_weights(engine, model)
        assert not task.done() and (await engine.stats()).decode_tokens == 8
        await engine.adopt_version(1)
        after = await task
    assert after.response_ids.tolist() == before.response_ids.tolist()
    assert after.version_runs == (VersionRun(1, 8),)


async def test_a_light_sleep_after_a_deep_one_does_not_stand_for_the_publication() -> None:
    async with running(tiny_model()) as engine:
        for level in (2, 1):
            await engine.sleep(level)
            await engine.wake()
        task = asyncio.create_task(engine.generate(request(random_ids(5))))
        for _ in range(3):
            await engine.run_between_steps(lambda: None)  # a turn of the engine's thread
        assert not task.done() and (await engine.stats()).decode_tokens == 0
        await write_weights(engine, tiny_model())
        await engine.adopt_version(1)
        assert (await task).version_runs == (VersionRun(1, 8),)


# ---- weights


async def test_live_weights_are_the_models_tensors_by_name_tied_once() -> None:
    model = tiny_model()
    async with running(model) as engine:
        weights = await engine.live_weights()
        specs = weights.specs()
        assert list(specs) == list(model.named_tensors())
        assert "lm_head.weight" not in specs
        embedding = specs["model.embed_tokens.weight"]
        assert (embedding.shape, embedding.dtype, embedding.num_bytes) == (
            (VOCAB, 32),
            "float32",
            VOCAB * 32 * 4,
        )
        with pytest.raises(SyncError, match="no tensor 'model.embed_token.weight'"):
            weights.write("model.embed_token.weight", torch.zeros(1))
        with pytest.raises(SyncError, match=r"carries \(32, 40\)"):
            weights.write("model.embed_tokens.weight", torch.zeros(32, VOCAB))


async def test_a_copying_engine_changes_with_a_write_and_not_with_the_trainer() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    async with running(model) as engine:
        with torch.no_grad():
            for tensor in model.named_tensors().values():
                tensor.zero_()
        prompt = random_ids(5)
        found = await engine.generate(request(prompt, "0/0"))
        np.testing.assert_allclose(
            found.logprobs, trainer_logprobs(tiny_model(), prompt, found.response_ids), atol=1e-5
        )
        await write_weights(engine, other)
        await engine.adopt_version(1)
        found = await engine.generate(request(prompt, "1/0"))
    np.testing.assert_allclose(found.logprobs, trainer_logprobs(other, prompt, found.response_ids), atol=1e-5)


async def test_a_sharing_engine_computes_with_the_trainers_memory_and_leaves_its_module_alone() -> None:
    model, other = tiny_model(), tiny_model(seed=1)
    parameters = dict(model.module.named_parameters())
    async with running(model, engine={"share_weights": True}) as engine:
        with torch.no_grad():
            for name, tensor in other.named_tensors().items():
                parameters[name].copy_(tensor)
        await write_weights(engine, model)  # its own memory: nothing to copy
        await engine.adopt_version(1)
        prompt = random_ids(5)
        found = await engine.generate(request(prompt))
        np.testing.assert_allclose(
            found.logprobs, trainer_logprobs(model, prompt, found.response_ids), atol=1e-5
        )
    assert all(parameter.requires_grad for parameter in model.module.parameters())
    assert {id(p) for p in model.module.parameters()} == {id(p) for p in parameters.values()}


async def test_sharing_is_refused_when_the_dtypes_differ() -> None:
    with pytest.raises(EngineError, match=r"is torch.float32 on cpu, the engine runs torch.bfloat16"):
        async with running(tiny_model(), engine={"share_weights": True}, dtype="bfloat16"):
            pass


async def test_bfloat16_engine_of_a_float32_model() -> None:
    model, prompt = tiny_model(), random_ids(5)
    async with running(model, dtype="bfloat16") as engine:
        found = await engine.generate(request(prompt, max_response_tokens=20))
    gap = np.abs(found.logprobs - trainer_logprobs(model, prompt, found.response_ids))
    assert 0 < gap.mean() < 0.05  # bfloat16 keeps 8 bits


async def test_rotary_frequencies_of_a_transformers_model_keep_their_precision() -> None:
    """A bfloat16 frequency is off by up to 0.4 %: at position 1,000 the angle would be off by whole turns."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    model = wrap_transformers(AutoModelForCausalLM.from_config(config))
    async with running(model, dtype="bfloat16") as engine:
        assert engine._runner is not None
        module = engine._runner.model.module
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer, model.module.get_buffer(name))
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}


async def test_only_rows_that_sample_get_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """3 prompts of 30 tokens: 87 rows of prefill without logits, then 3 rows a step."""
    rows: list[int] = []
    logits = LmHead.logits

    def counted(head: LmHead, hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return logits(head, hidden)

    monkeypatch.setattr(LmHead, "logits", counted)
    async with running(tiny_model()) as engine:
        await generate(engine, [request(random_ids(30, g), f"{g}/0") for g in range(3)])
        assert (await engine.stats()).prefill_tokens == 87
    assert sum(rows) == 3 * 8


async def test_work_between_steps_runs_on_the_engines_thread_and_may_fail() -> None:
    async with running(tiny_model()) as engine:
        import threading

        name = await engine.run_between_steps(lambda: threading.current_thread().name)
        assert name == "the engine of replica 0"

        def fail() -> None:
            raise ValueError("mine")

        with pytest.raises(ValueError, match="mine"):
            await engine.run_between_steps(fail)
        assert len((await engine.generate(request(random_ids(3)))).response_ids) == 8


# ---- numbers


async def test_counters_of_two_groups() -> None:
    """2 prompts of 10 tokens with 3 members: 9 tokens of prefill each, 9 copied by each of the other 4; 6 x 8 tokens
    in 8 steps of 6 rows, after one step of prefill alone."""
    async with running(tiny_model()) as engine:
        await engine.pause()
        tasks = [
            asyncio.create_task(engine.generate(request(random_ids(10, g), f"{g}/{m}")))
            for g in range(2)
            for m in range(3)
        ]
        await asyncio.sleep(0)
        await engine.resume()
        found = await asyncio.gather(*tasks)
        stats = await engine.stats()
    assert (stats.prefill_tokens, stats.cached_prompt_tokens) == (18, 36)
    assert (stats.decode_tokens, stats.decode_steps, stats.active_slots_sum) == (48, 8, 48)
    assert sorted(r.num_cached_prompt_tokens for r in found) == [0, 0, 9, 9, 9, 9]
    assert stats.busy_s == pytest.approx(stats.prefill_s + stats.decode_s) and stats.prefill_s > 0


async def test_the_next_turn_of_an_agent_reuses_what_the_last_one_computed() -> None:
    """10 prompt tokens, 8 sampled, of which 17 are in the pool; the next prompt adds 4."""
    model = tiny_model()
    async with running(model) as engine:
        first = await engine.generate(request(random_ids(10), "0/0"))
        history = np.concatenate([random_ids(10), first.response_ids, random_ids(4, 1)])
        second = await engine.generate(request(history, "0/0", first_token_idx=8))
        await engine.reset_prefix_cache()
        again = await engine.generate(request(history, "0/0", first_token_idx=8))
    assert second.num_cached_prompt_tokens == 17 and again.num_cached_prompt_tokens == 0
    assert second.response_ids.tolist() == again.response_ids.tolist()
    np.testing.assert_allclose(
        second.logprobs, trainer_logprobs(model, history, second.response_ids), atol=1e-5
    )


async def test_pages_hold_their_numbers_when_others_end() -> None:
    """Lengths from 1 to 60 in 8 slots: pages move towards the start of the pool while their owners decode."""
    model = tiny_model()
    requests = [
        request(random_ids(4 + i, i), f"{i}/0", max_response_tokens=1 + (i * 17) % 60) for i in range(24)
    ]
    async with running(model, prefix_cache=False) as engine:
        found = await generate(engine, requests)
    for asked, response in zip(requests, found, strict=True):
        expected = trainer_logprobs(model, asked.prompt_ids, response.response_ids)
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("at_once", [1, 1 << 30])
def test_pages_are_copied_in_parts_that_fit_beside_the_pool(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_attention, "COPY_BYTES", at_once)
    shape = LayerShape(num_kv_heads=1, key_dim=2, value_dim=2)
    pool = KVPool([shape] * 2, num_pages=9, page_tokens=3, dtype=torch.float32, device=torch.device("cpu"))
    for page in range(9):
        for plane in (*pool.keys, *pool.values):
            plane[page] = page
    pool.carry_out([CopyPages((0, 1), (4, 5)), CopyPages((0, 2), (6, 7)), ZeroPages((8,))])
    for plane in (*pool.keys, *pool.values):
        assert [int(plane[page].unique().item()) for page in range(9)] == [0, 1, 2, 3, 0, 1, 0, 2, 0]
