"""Reported faults of inference engines, and failures of this one, entered through its public face."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

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

from rollbook.errors import EngineError
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import LoadedModel, load_model, wrap_transformers
from rollbook.rollout.native.engine import NativeEngine
from rollbook.types import FinishReason, VersionRun


async def publish(engine: NativeEngine, model: LoadedModel, version: int, kv_policy: Any = "keep") -> None:
    await engine.pause("keep")
    await write_weights(engine, model)
    await engine.adopt_version(version, kv_policy)
    await engine.resume()


def gap(model: LoadedModel, prompt: np.ndarray, response: Any) -> float:
    expected = trainer_logprobs(model, prompt, response.response_ids)
    return float(np.abs(expected - response.logprobs).max())


# ---- BR-026: prefixes computed before a publication


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
async def test_prompt_of_before_a_publication_is_computed_again_after_it(kv_policy: str) -> None:
    old, prompt = tiny_model(), random_ids(64)
    new = tiny_model(seed=1)
    async with running(old) as engine:
        first = await engine.generate(request(prompt, "0/0"))
        hit = await engine.generate(request(prompt, "0/1"))
        await publish(engine, new, 1, kv_policy)
        fresh = await engine.generate(request(prompt, "1/0"))
        later = await engine.generate(request(prompt, "1/1"))
    assert hit.num_cached_prompt_tokens == 63 and fresh.num_cached_prompt_tokens == 0
    assert later.num_cached_prompt_tokens == 63  # cached again, under the new weights
    assert gap(old, prompt, first) < 1e-5 and gap(old, prompt, hit) < 1e-5
    assert gap(new, prompt, fresh) < 1e-5 and gap(new, prompt, later) < 1e-5
    assert first.version_runs == (VersionRun(0, 8),) and fresh.version_runs == (VersionRun(1, 8),)


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
async def test_group_across_a_publication_shares_nothing_stale(kv_policy: str) -> None:
    """A member and a stranger with the same prompt are admitted after the push while an old member still runs on
    the keys it has."""
    old, prompt = tiny_model(), random_ids(64)
    new = tiny_model(seed=1)
    async with running(old) as engine:
        hook = AtStep(engine, 5, engine.pause)
        running_one = asyncio.create_task(engine.generate(request(prompt, "0/0", max_response_tokens=40)))
        while hook.answer is None:
            await asyncio.sleep(0)
        await hook.answer
        member = asyncio.create_task(engine.generate(request(prompt, "0/1")))
        stranger = asyncio.create_task(engine.generate(request(prompt, "7/0")))
        await publish(engine, new, 1, kv_policy)
        mixed, second, third = await asyncio.gather(running_one, member, stranger)
        # The mixed sequence ended after the others began; nothing of it may have been cached.
        after = await engine.generate(request(prompt, "8/0"))
    for response in (second, third, after):
        assert response.version_runs == (VersionRun(1, 8),)
        assert gap(new, prompt, response) < 1e-5
    assert mixed.version_runs == (VersionRun(0, 5), VersionRun(1, 35))
    ids = mixed.response_ids
    np.testing.assert_allclose(mixed.logprobs[:5], trainer_logprobs(old, prompt, ids)[:5], atol=1e-5)
    newer_gap = np.abs(mixed.logprobs[5:] - trainer_logprobs(new, prompt, ids)[5:]).max()
    # Recomputed keys are the new model's; kept ones are not, which is what "keep" means.
    assert newer_gap < 1e-5 if kv_policy == "recompute" else newer_gap > 1e-3


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
@pytest.mark.parametrize("seed", [0, 1, 2])
async def test_a_response_of_one_version_read_that_versions_keys_alone(seed: int, kv_policy: str) -> None:
    """Groups of two turns, and weights that change at random steps: while prompts are half computed, or whole and no
    token sampled yet. What a label says in full holds: the trainer's model of that version finds the same logprobs."""
    draw = np.random.default_rng(seed)
    models = [tiny_model(seed=version) for version in range(4)]
    prompts = [random_ids(int(draw.integers(5, 40)), seed=group) for group in range(6)]
    turns: list[tuple[np.ndarray, Any]] = []
    async with running(
        models[0],
        num_slots=int(draw.integers(6, 20)),
        max_prefill_tokens=int(draw.integers(5, 60)),
        kv_pool_tokens=640,
    ) as engine:

        async def play(group: int, member: int) -> None:
            name, prompt = f"{group}/{member}", prompts[group]
            for turn, count in enumerate(draw.integers(1, 12, 2)):
                asked = request(prompt, f"{name}#{turn}", max_response_tokens=int(count))
                turns.append((prompt, await engine.generate(asked)))
                prompt = np.concatenate([prompt, turns[-1][1].response_ids, random_ids(3, seed=member)])

        def swap(version: int) -> Any:
            return lambda: publish(engine, models[version], version, kv_policy)

        steps = np.cumsum(draw.integers(2, 7, 3))
        for version, step in enumerate(steps, start=1):
            AtStep(engine, int(step), swap(version))
        await asyncio.gather(*(play(group, member) for group in range(6) for member in range(3)))
    pure = [(prompt, response) for prompt, response in turns if len(response.version_runs) == 1]
    assert len(pure) >= 9 and any(response.version_runs[0].weight_version for _, response in pure)
    gaps = [gap(models[r.version_runs[0].weight_version], prompt, r) for prompt, r in pure]
    assert max(gaps) < 1e-5


# ---- BR-031: which version sampled a token


async def test_a_push_before_the_first_token_labels_all_tokens_new() -> None:
    model = tiny_model()
    async with running(model) as engine:
        await engine.pause("keep")
        task = asyncio.create_task(engine.generate(request(random_ids(5))))
        await asyncio.sleep(0)
        await engine.adopt_version(1)
        await engine.resume()
        assert (await task).version_runs == (VersionRun(1, 8),)


@pytest.mark.parametrize("mode", ["keep", "drain"])
async def test_a_push_after_token_3_of_8_labels_each_token_with_what_sampled_it(mode: str) -> None:
    model = tiny_model()
    async with running(model) as engine:

        async def push() -> None:
            await engine.pause(mode)  # type: ignore[arg-type]
            await engine.adopt_version(1)
            await engine.resume()

        hook = AtStep(engine, 3, push)
        found = await engine.generate(request(random_ids(5)))
        assert hook.answer is not None
        await hook.answer
    labels = {"keep": (VersionRun(0, 3), VersionRun(1, 5)), "drain": (VersionRun(0, 8),)}
    assert found.version_runs == labels[mode]


async def test_a_push_with_abort_after_token_3_ends_the_response_under_the_old_version() -> None:
    async with running(tiny_model()) as engine:

        async def push() -> None:
            await engine.pause("abort")
            await engine.adopt_version(1)
            await engine.resume()

        hook = AtStep(engine, 3, push)
        found = await engine.generate(request(random_ids(5)))
        assert hook.answer is not None
        await hook.answer
    assert found.version_runs == (VersionRun(0, 3),) and found.finish_reason is FinishReason.ABORTED


@pytest.mark.parametrize("mode", ["keep", "drain", "abort"])
async def test_a_push_after_the_last_token_and_before_the_reply_labels_nothing_new(mode: str) -> None:
    async with running(tiny_model()) as engine:

        async def push() -> None:
            await engine.pause(mode)  # type: ignore[arg-type]
            await engine.adopt_version(1)

        hook = AtStep(engine, 8, push)  # the push is queued while the last token is being sampled
        found = await engine.generate(request(random_ids(5)))
        assert hook.answer is not None
        await hook.answer
        assert await engine.weight_version() == 1
    assert found.version_runs == (VersionRun(0, 8),)


async def test_several_pushes_during_one_response_are_told_apart_and_empty_ones_left_out() -> None:
    async with running(tiny_model()) as engine:

        async def push() -> None:
            for version in (1, 2, 3):
                await engine.adopt_version(version)

        await engine.pause()
        task = asyncio.create_task(engine.generate(request(random_ids(5))))
        await asyncio.sleep(0)
        AtStep(engine, 2, push)
        await engine.resume()
        runs = (await task).version_runs
    assert runs[0] == VersionRun(0, 2) and runs[-1].weight_version == 3
    assert sum(run.num_tokens for run in runs) == 8 and all(run.num_tokens > 0 for run in runs)


async def test_a_version_never_runs_backwards() -> None:
    async with running(tiny_model(), engine={"weight_version": 4}) as engine:
        with pytest.raises(EngineError, match="holds weight version 4 and was told to serve 3"):
            await engine.adopt_version(3)
        assert await engine.weight_version() == 4


async def test_weights_repaired_under_the_same_version_are_not_mixed_with_what_they_replace() -> None:
    old, prompt = tiny_model(), random_ids(20)
    new = tiny_model(seed=1)
    async with running(old) as engine:
        await engine.generate(request(prompt, "0/0"))
        await publish(engine, new, 0)
        found = await engine.generate(request(prompt, "0/1"))
    assert found.num_cached_prompt_tokens == 0 and gap(new, prompt, found) < 1e-5


# ---- BR-063: sampling settings beside a checkpoint


@pytest.mark.parametrize("implementation", ["rollbook", "transformers"])
async def test_sampling_settings_of_a_checkpoint_are_never_used(implementation: Any, tmp_path: Path) -> None:
    model, prompt = tiny_model(), random_ids(6)
    model.save(tmp_path)
    (tmp_path / "generation_config.json").write_text(
        json.dumps(
            {
                "repetition_penalty": 1.3,
                "top_k": 1,
                "temperature": 0.1,
                "min_new_tokens": 5,
                "do_sample": True,
            }
        )
    )
    loaded = load_model(ModelConfig(path=str(tmp_path), implementation=implementation), with_tokenizer=False)
    async with running(loaded, num_slots=64, kv_pool_tokens=4096) as engine:
        found = await generate(engine, [request(prompt, f"0/{m}") for m in range(64)])
    assert len({tuple(r.response_ids) for r in found}) == 64
    gaps = [trainer_logprobs(model, prompt, r.response_ids) - r.logprobs for r in found]
    ratios = np.exp(np.concatenate(gaps))
    assert ratios.mean() == pytest.approx(1.0, abs=1e-5)
    assert np.exp(np.log(ratios).mean()) == pytest.approx(1.0, abs=1e-5)


async def test_response_shorter_than_a_checkpoints_minimum_ends_at_its_end_of_sequence() -> None:
    """min_new_tokens would forbid it: the first token ends the response."""
    model, prompt = tiny_model(), random_ids(6)
    async with running(model, engine={"eos_token_ids": tuple(range(VOCAB))}) as engine:
        found = await engine.generate(request(prompt))
    assert len(found.response_ids) == 1 and found.finish_reason is FinishReason.STOP


# ---- failures of the engine itself


async def failing(engine: NativeEngine, error: Exception, after: int) -> None:
    """The engine's step number `after` raises."""
    runner = engine._runner
    assert runner is not None
    run, calls = runner.step, iter(range(1, 1000))

    def step(*args: Any) -> Any:
        if next(calls) >= after:
            raise error
        return run(*args)

    runner.step = step  # type: ignore[method-assign]


async def test_an_exception_in_a_step_fails_every_request_with_its_cause_and_close_returns() -> None:
    async with running(tiny_model(), num_slots=2) as engine:
        await failing(engine, RuntimeError("CUDA error: device-side assert"), after=3)
        tasks = [asyncio.create_task(engine.generate(request(random_ids(4), f"{g}/0"))) for g in range(5)]
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineError)
            assert "replica 0 failed: RuntimeError: CUDA error: device-side assert" in str(result)
        with pytest.raises(EngineError, match="device-side assert"):
            await engine.generate(request(random_ids(4), "9/0"))
        with pytest.raises(EngineError, match="device-side assert"):
            await engine.run_between_steps(lambda: None)
        with pytest.raises(EngineError, match="device-side assert"):
            await engine.pause("drain")


async def test_a_drain_that_waits_when_the_engine_fails_is_told() -> None:
    async with running(tiny_model()) as engine:
        await failing(engine, RuntimeError("gone"), after=5)
        hook = AtStep(engine, 3, lambda: engine.pause("drain"))
        task = asyncio.create_task(engine.generate(request(random_ids(4))))
        with pytest.raises(EngineError, match="gone"):
            await task
        assert hook.answer is not None
        with pytest.raises(EngineError, match="gone"):
            await hook.answer


async def test_close_with_requests_in_flight_answers_them() -> None:
    engine_tasks = []
    async with running(tiny_model(), num_slots=1) as engine:
        await engine.pause()
        for group in range(3):
            engine_tasks.append(asyncio.create_task(engine.generate(request(random_ids(4), f"{group}/0"))))
        await asyncio.sleep(0)
    for result in await asyncio.gather(*engine_tasks, return_exceptions=True):
        assert isinstance(result, EngineError) and "was closed" in str(result)
    with pytest.raises(EngineError, match="was closed"):
        await engine.generate(request(random_ids(4)))
    await engine.close()  # twice does no harm


async def test_an_engine_that_was_not_started_says_so() -> None:
    from rollbook.rollout.config import RolloutConfig

    engine = NativeEngine(tiny_model(), RolloutConfig())
    with pytest.raises(EngineError, match="await engine.start"):
        await engine.generate(request(random_ids(4)))
    await engine.close()


@pytest.mark.parametrize("spoil", [lambda t: t.fill_(float("nan")), lambda t: t.fill_(float("inf"))])
async def test_weights_that_are_not_finite_fail_their_requests_and_leave_nothing_behind(
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """After good weights are back, the pages that held NaN serve others: no trace of it may be read."""
    model, prompt = tiny_model(), random_ids(30)
    async with running(model, kv_pool_tokens=80) as engine:
        weights = await engine.live_weights()
        await engine.run_between_steps(lambda: spoil(weights.read("model.layers.0.self_attn.v_proj.weight")))
        with pytest.raises(EngineError, match="token 0 is not finite under weight version 0"):
            await engine.generate(request(prompt, "0/0"))
        await publish(engine, model, 1)
        found = await generate(engine, [request(random_ids(3 + g, g), f"{g}/0") for g in range(8)])
    for group, response in enumerate(found):
        assert gap(model, random_ids(3 + group, group), response) < 1e-5


async def test_a_mixture_is_refused_by_a_batch_invariant_engine() -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
    )
    model = wrap_transformers(AutoModelForCausalLM.from_config(config))
    with pytest.raises(EngineError, match="with 4 expert"):
        async with running(model, batch_invariant=True):
            pass


async def test_bfloat16_is_refused_by_a_batch_invariant_engine() -> None:
    with pytest.raises(EngineError, match=r"in bfloat16 on cpu"):
        async with running(tiny_model(), batch_invariant=True, dtype="bfloat16"):
            pass


async def test_a_model_with_state_beside_keys_and_values_is_refused() -> None:
    """LFM2's convolution layers keep a state that a KV pool does not hold."""
    from transformers import AutoModelForCausalLM, Lfm2Config

    config = Lfm2Config(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        layer_types=["conv", "full_attention"],
    )
    model = wrap_transformers(AutoModelForCausalLM.from_config(config))
    with pytest.raises(EngineError, match="2 layers and 1 of them attend"):
        async with running(model):
            pass
