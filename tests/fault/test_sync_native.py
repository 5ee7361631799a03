"""Publications into the native engine: what it samples afterwards is the trainer's model, whatever options are set."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sync_fakes import FakeSource
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from rollout_tiny import AtStep, random_ids, request, running, tiny_model, trainer_logprobs

from rollbook.errors import SyncError
from rollbook.modeling.load import LoadedModel
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.bucket import SlotBuffers
from rollbook.sync.config import SyncConfig
from rollbook.sync.digest import digest
from rollbook.sync.inproc import InprocPort
from rollbook.sync.probe import Probe
from rollbook.sync.publisher import Publisher
from rollbook.types import Floats, Ids, VersionRun
from rollbook.weights import TensorSpec

pytestmark = pytest.mark.timeout(60)
CONFIG = SyncConfig.model_construct(**{**SyncConfig().model_dump(), "bucket_bytes": 8192})


class ModelSource:
    """A trainer that exports a model's own tensors."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return FakeSource(self.model.named_tensors()).weight_specs()

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_tensors().items()

    @torch.no_grad()
    def step(self, seed: int) -> None:
        """Every parameter moves, visibly."""
        draw = torch.Generator().manual_seed(seed)
        for tensor in self.model.named_tensors().values():
            tensor += 0.05 * torch.randn(tensor.shape, generator=draw)

    def digests(self) -> dict[str, str]:
        return {name: digest(tensor) for name, tensor in self.model.named_tensors().items()}


async def live_digests(engine: NativeEngine) -> dict[str, str]:
    weights = await engine.live_weights()
    return await engine.run_between_steps(lambda: {n: digest(weights.read(n)) for n in weights.specs()})


async def gap(engine: NativeEngine, model: LoadedModel, prompt: Ids, name: str) -> tuple[float, Any]:
    response = await engine.generate(request(prompt, name))
    expected = trainer_logprobs(model, prompt, response.response_ids)
    return float(np.abs(expected - response.logprobs).max()), response


@pytest.mark.parametrize("sleep_level", [0, 1, 2])
@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize("share_weights", [False, True])
@pytest.mark.parametrize("by_reference", [False, True])
async def test_no_option_switches_the_publication_off(
    share_weights: bool, staging: Any, sleep_level: int, by_reference: bool
) -> None:
    """BR-001 and BR-002: three steps under every combination of memory options; push, sleep, wake, generate."""
    source, prompt = ModelSource(tiny_model()), random_ids(20)
    seen = [source.digests()]
    async with running(source.model, engine={"share_weights": share_weights}) as engine:
        buffers = None if by_reference else SlotBuffers()
        publisher = Publisher(source, [InprocPort(engine, staging=staging)], CONFIG, buffers=buffers)
        for version in (1, 2, 3):
            await engine.pause("keep")
            if sleep_level:
                await engine.sleep(sleep_level)
            source.step(version)
            if sleep_level:
                await engine.wake()
            await publisher.publish(version)
            await engine.resume()
            assert await live_digests(engine) == source.digests()
            if sleep_level == 1:  # the weights survive a nap after the push as well
                await engine.sleep(1)
                await engine.wake()
            worst, response = await gap(engine, source.model, prompt, f"{version}/0")
            assert worst < 1e-4
            assert response.version_runs == (VersionRun(version, 8),)
            seen.append(source.digests())
        publisher.close()
    assert len({d["model.embed_tokens.weight"] for d in seen}) == 4  # the test moved something


async def test_after_dropping_its_weights_the_engine_serves_nothing_but_a_proven_publication() -> None:
    source, prompt = ModelSource(tiny_model()), random_ids(20)
    async with running(source.model) as engine:
        publisher = Publisher(source, [InprocPort(engine)], CONFIG)
        await publisher.publish(1)
        await engine.sleep(2)
        await engine.wake()
        waiting = asyncio.create_task(gap(engine, source.model, prompt, "0/0"))
        await engine.resume()
        for _ in range(20):
            await engine.run_between_steps(lambda: None)
        assert not waiting.done()
        await publisher.resync(0)
        worst, response = await waiting
        assert worst < 1e-5
        assert response.version_runs == (VersionRun(1, 8),)
        publisher.close()


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 6000, 4096, 512])
@pytest.mark.parametrize("seed", [0, 1])
async def test_any_chunking_gives_the_same_engine(bucket_bytes: int, seed: int) -> None:
    """BR-011: one chunk, several, less than a tensor, in shuffled orders; one begin and one finish each."""
    source, engine_side = ModelSource(tiny_model(seed=3)), tiny_model()
    names = list(source.model.named_tensors())
    np.random.default_rng(seed).shuffle(names)
    shuffled = FakeSource({name: source.model.named_tensors()[name].detach() for name in names})
    config = CONFIG.model_copy(update={"bucket_bytes": bucket_bytes})
    async with running(engine_side) as engine:
        publisher = Publisher(shuffled, [InprocPort(engine)], config, buffers=SlotBuffers())
        await publisher.publish(1)
        assert await live_digests(engine) == source.digests()
        publisher.close()


async def test_cached_prefixes_of_the_old_weights_are_not_used() -> None:
    """BR-026 through a publication: all weights negated."""
    source, prompt = ModelSource(tiny_model()), random_ids(64)
    async with running(source.model) as engine:
        publisher = Publisher(source, [InprocPort(engine)], CONFIG)
        await engine.generate(request(prompt, "0/0"))
        hit = await engine.generate(request(prompt, "0/1"))
        with torch.no_grad():
            for tensor in source.model.named_tensors().values():
                tensor.neg_()
        await publisher.publish(1)
        worst, fresh = await gap(engine, source.model, prompt, "1/0")
        publisher.close()
    assert hit.num_cached_prompt_tokens == 63
    assert fresh.num_cached_prompt_tokens == 0
    assert worst < 1e-5


async def test_a_publication_during_generation_labels_every_token_with_the_weights_that_sampled_it() -> None:
    source, prompt = ModelSource(tiny_model()), random_ids(12)
    old = tiny_model()
    async with running(source.model, kv_policy="recompute") as engine:
        publisher = Publisher(source, [InprocPort(engine)], CONFIG)
        source.step(1)

        async def push() -> None:
            await publisher.publish(1)

        hook = AtStep(engine, 6, push)
        response = await engine.generate(request(prompt, "0/0", max_response_tokens=110))
        assert hook.answer is not None
        await hook.answer
        publisher.close()
    (before, after) = response.version_runs
    assert (before.weight_version, after.weight_version) == (0, 1)
    assert before.num_tokens >= 6
    assert before.num_tokens + after.num_tokens == 110
    at = before.num_tokens
    by_old = trainer_logprobs(old, prompt, response.response_ids)
    by_new = trainer_logprobs(source.model, prompt, response.response_ids)
    assert np.abs(by_old - response.logprobs)[:at].max() < 1e-4
    assert np.abs(by_new - response.logprobs)[at:].max() < 1e-4
    assert np.abs(by_old - by_new).max() > 0.05


async def test_a_failed_commit_keeps_the_old_weights_and_their_label() -> None:
    source, prompt = ModelSource(tiny_model()), random_ids(12)
    async with running(source.model) as engine:
        publisher = Publisher(source, [InprocPort(engine)], CONFIG)
        await publisher.publish(1)
        old = ModelSource(tiny_model())
        source.step(2)
        weights: Any = await engine.live_weights()
        write, written = weights.write, []

        def fail_late(name: str, tensor: Tensor) -> None:
            written.append(name)
            if len(written) == 5:
                raise RuntimeError("out of memory")
            write(name, tensor)

        weights.write = fail_late
        with pytest.raises(SyncError, match="out of memory; its old weights were put back and proven"):
            await publisher.publish(2)
        worst, response = await gap(engine, old.model, prompt, "0/0")
        assert worst < 1e-5
        assert response.version_runs == (VersionRun(1, 8),)
        await publisher.publish(2)
        worst, response = await gap(engine, source.model, prompt, "0/1")
        assert worst < 1e-5
        publisher.close()


async def test_the_probe_passes_on_a_sound_engine_and_fails_on_a_tied_tensor_gone_astray() -> None:
    source = ModelSource(tiny_model())
    probe = Probe(random_ids(10))

    async def score(prompt_ids: Ids, response_ids: Ids) -> Floats:
        return trainer_logprobs(source.model, prompt_ids, response_ids).astype(np.float32)

    async with running(source.model) as engine:
        publisher = Publisher(source, [InprocPort(engine)], CONFIG)
        for version in (1, 2, 3, 4):
            source.step(version)
            await publisher.publish(version)

            async def sample(prompt_ids: Ids, version: int = version) -> Any:
                return await engine.generate(request(prompt_ids, f"9/{version}"))

            report = await probe.check(
                replica_id=0,
                weight_version=version,
                engine="native",
                dtype="float32",
                sample=sample,
                score=score,
            )
            assert report.is_passed, report.why
        source.step(5)  # the engine's weights are not the trainer's any more
        report = await probe.check(
            replica_id=0, weight_version=4, engine="native", dtype="float32", sample=sample, score=score
        )
        assert not report.is_passed
        publisher.close()
