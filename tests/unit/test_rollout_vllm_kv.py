"""Keys and values of other weights never serve under a version's label: with a core that remembers who made them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rollbook.errors import EngineError
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest, KVPolicy, Response
from rollbook.rollout.vllm.core import CoreOptions, CoreOutput, CoreRequest, CoreStep
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.types import SamplingParams

PROMPT = [1, 2]


@dataclass
class Held:
    """A sequence in the core. `made_by` are the weights of each key, one step computing one."""

    request: CoreRequest
    sampled: list[int] = field(default_factory=list)
    made_by: list[int] = field(default_factory=list)
    has_reported: bool = False

    @property
    def num_known(self) -> int:
        return len(self.request.prompt_ids) + len(self.sampled)


class RememberingCore:
    """One key a step and sequence. A token says which weights made the keys that it read: 10 x oldest + newest."""

    model_context_tokens = max_context_tokens = 64
    draws_by_position = True
    kv_pool_tokens = 256

    def __init__(self, options: CoreOptions) -> None:
        self.weights = 1
        self.held: dict[str, Held] = {}
        self.steps_left = threading.Semaphore(0)
        self.steps_done = threading.Semaphore(0)
        self.is_on_its_way = False

    def add(self, request: CoreRequest) -> None:
        self.held[request.core_id] = Held(request)

    def abort(self, core_ids: list[str]) -> None:
        for core_id in core_ids:
            self.held.pop(core_id, None)

    def recompute_running(self) -> None:
        for held in self.held.values():
            held.made_by.clear()

    def drop_prefixes(self) -> None: ...

    def step(self) -> CoreStep:
        if not self.steps_left.acquire(timeout=0.01):
            return CoreStep([], ran=False)
        step = self.run()
        self.steps_done.release()
        return step

    def run(self) -> CoreStep:
        outputs = []
        for core_id, held in list(self.held.items()):
            held.made_by.append(self.weights)
            if len(held.made_by) < held.num_known:
                continue  # still in its prefill
            token = 10 * min(held.made_by) + max(held.made_by)
            held.sampled.append(token)
            finish: Any = "length" if len(held.sampled) == held.request.max_tokens else None
            num_cached = None if held.has_reported else 0
            held.has_reported = True
            outputs.append(CoreOutput(core_id, [token], [-1.0], finish, num_cached, 0))
            if finish:
                del self.held[core_id]
        return CoreStep(outputs, num_running=len(self.held))

    def freeze(self) -> list[CoreStep]:
        """What was on its way: a step that nobody waited for."""
        is_on_its_way, self.is_on_its_way = self.is_on_its_way, False
        return [self.run()] if is_on_its_way else []

    def label(self, weight_version: int) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake(self) -> list[CoreStep]:
        return []

    def close(self) -> None: ...


async def steps(core: RememberingCore, count: int) -> None:
    for _ in range(count):
        core.steps_left.release()
        await asyncio.to_thread(core.steps_done.acquire)


async def interrupted(
    monkeypatch: pytest.MonkeyPatch,
    kv_policy: KVPolicy,
    num_steps_before: int,
    change: Callable[[VllmEngine, RememberingCore], Any],
) -> Response:
    """A response of five tokens with `change` after some steps; its prompt takes two steps, the first token among
    them."""
    monkeypatch.setattr("rollbook.rollout.vllm.engine.VllmCore", RememberingCore)
    config = RolloutConfig(engine="vllm", kv_policy=kv_policy)
    engine = VllmEngine("none", config, weight_version=1)
    await engine.start()
    core: Any = engine._core
    request = GenerateRequest(
        request_id="0/0#0",
        prompt_ids=np.array(PROMPT, np.int32),
        sampling=SamplingParams(max_response_tokens=5),
        seed=0,
        group_id=0,
        member_idx=0,
    )
    try:
        response = asyncio.ensure_future(engine.generate(request))
        await steps(core, num_steps_before)
        await change(engine, core)
        core.steps_left.release(20)
        return await asyncio.wait_for(response, 20)
    finally:
        await engine.close()


def rewrite(weight_version: int) -> Callable[[VllmEngine, RememberingCore], Any]:
    async def change(engine: VllmEngine, core: RememberingCore) -> None:
        def write() -> None:
            core.weights = 2

        await engine.run_between_steps(write)
        await engine.adopt_version(weight_version)

    return change


@pytest.mark.parametrize("kv_policy", ["keep", "recompute"])
async def test_weights_written_again_under_the_same_version_void_what_they_made(
    kv_policy: KVPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A repaired replica. Three steps sample two tokens; the later ones read no key of what was there before."""
    response = await interrupted(monkeypatch, kv_policy, 3, rewrite(1))
    assert response.response_ids.tolist() == [11, 11, 22, 22, 22]
    assert [(run.weight_version, run.num_tokens) for run in response.version_runs] == [(1, 5)]


async def test_a_new_version_keeps_what_is_between_two_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    response = await interrupted(monkeypatch, "keep", 3, rewrite(2))
    assert response.response_ids.tolist() == [11, 11, 12, 12, 12]
    assert [(run.weight_version, run.num_tokens) for run in response.version_runs] == [(1, 2), (2, 3)]


async def test_a_prefill_that_a_new_version_interrupts_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prefill, and the one after a sleep that gave the sequence back with two tokens."""
    response = await interrupted(monkeypatch, "keep", 1, rewrite(2))
    assert response.response_ids.tolist() == [22] * 5

    async def sleep_and_rewrite(engine: VllmEngine, core: RememberingCore) -> None:
        await engine.sleep(2)
        await engine.wake()
        await engine.adopt_version(1)
        await steps(core, 2)
        await rewrite(2)(engine, core)

    response = await interrupted(monkeypatch, "keep", 3, sleep_and_rewrite)
    assert response.response_ids.tolist() == [11, 11, 22, 22, 22]


@pytest.mark.parametrize(("num_steps_before", "num_old"), [(1, 1), (3, 3), (5, 5)])
async def test_a_token_on_its_way_when_the_version_changes_is_of_the_weights_that_sampled_it(
    num_steps_before: int, num_old: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BR-031 in vLLM: before the first token, after some, and the last one, whose reply comes after the change."""

    async def change(engine: VllmEngine, core: RememberingCore) -> None:
        core.is_on_its_way = True
        await rewrite(2)(engine, core)

    response = await interrupted(monkeypatch, "recompute", num_steps_before, change)
    assert response.response_ids.tolist() == [11] * num_old + [22] * (5 - num_old)
    runs = [(run.weight_version, run.num_tokens) for run in response.version_runs]
    assert runs == [(version, n) for version, n in ((1, num_old), (2, 5 - num_old)) if n]


async def test_a_reset_that_cannot_be_done_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """BR-026: the version is not adopted, so no token is labeled with it."""
    versions = []

    async def change(engine: VllmEngine, core: RememberingCore) -> None:
        def refuse() -> None:
            raise EngineError("vLLM did not reset the prefix cache", "restart it")

        monkeypatch.setattr(core, "recompute_running", refuse)
        with pytest.raises(EngineError, match="did not reset"):
            await engine.adopt_version(2)
        versions.append(await engine.weight_version())

    response = await interrupted(monkeypatch, "recompute", 3, change)
    assert versions == [1] and {run.weight_version for run in response.version_runs} == {1}


async def test_a_light_sleep_after_a_deep_one_does_not_stand_for_the_publication(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []

    async def change(engine: VllmEngine, core: RememberingCore) -> None:
        for level in (2, 1):
            await engine.sleep(level)
            await engine.wake()
        for _ in range(3):
            await engine.run_between_steps(
                lambda: held.append(len(core.held))
            )  # a turn of the engine's thread
        await rewrite(2)(engine, core)

    response = await interrupted(monkeypatch, "keep", 3, change)
    assert held == [0, 0, 0]
    assert response.response_ids.tolist() == [11, 11, 22, 22, 22]
