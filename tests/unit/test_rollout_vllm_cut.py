"""A response that vLLM was made to cut goes on as if it had not been: with a core that stands for vLLM's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from rollbook.rollout.agent_loop import _sample
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest
from rollbook.rollout.vllm.core import CoreOptions, CoreOutput, CoreRequest, CoreStep
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.types import FinishReason, SamplingParams

PROMPT = "ask"
SAID = "abXYcdXYZefgh"


class Letters:
    def decode(self, token_ids: list[int]) -> str:
        return "".join(chr(token) for token in token_ids)


class SpellingCore:
    """Samples the letters of `SAID` after `PROMPT`, one a step; at each cut it waits until it was asked to let go."""

    cuts: tuple[int, ...] = ()
    model_context_tokens = max_context_tokens = 64
    draws_by_position = True
    kv_pool_tokens = 256

    def __init__(self, options: CoreOptions) -> None:
        self.running: dict[str, CoreRequest] = {}
        self.sampled: dict[str, int] = {}
        self.left = list(type(self).cuts)
        self.is_at_cut = threading.Event()

    def add(self, request: CoreRequest) -> None:
        self.running[request.core_id] = request
        self.sampled[request.core_id] = 0

    def abort(self, core_ids: list[str]) -> None:
        for core_id in core_ids:
            self.running.pop(core_id, None)

    def step(self) -> CoreStep:
        outputs = []
        for core_id, request in list(self.running.items()):
            num_said = len(request.prompt_ids) - len(PROMPT) + self.sampled[core_id]
            if self.left and num_said == self.left[0]:
                self.is_at_cut.set()
                return CoreStep([], ran=False)
            self.sampled[core_id] += 1
            is_full = self.sampled[core_id] == request.max_tokens
            finish: Any = "length" if is_full else None
            num_cached = 0 if self.sampled[core_id] == 1 else None
            outputs.append(CoreOutput(core_id, [ord(SAID[num_said])], [-1.0], finish, num_cached, 0))
        return CoreStep(outputs, num_running=len(self.running))

    def freeze(self) -> list[CoreStep]:
        return []

    def label(self, weight_version: int) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("cuts", [(), (1,), (7,), (8,), (7, 8), (2, 4, 8)], ids=str)
async def test_a_stop_string_is_found_across_the_cuts_of_a_response(
    cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`XYZ` ends it after nine letters, wherever it was cut; `XY` before it does not."""
    monkeypatch.setattr(SpellingCore, "cuts", cuts)
    monkeypatch.setattr("rollbook.rollout.vllm.engine.VllmCore", SpellingCore)
    engine = VllmEngine("none", RolloutConfig(engine="vllm"), tokenizer=Letters())
    await engine.start()
    core: Any = engine._core
    request = GenerateRequest(
        request_id="0/0#0",
        prompt_ids=np.array([ord(letter) for letter in PROMPT], np.int32),
        sampling=SamplingParams(max_response_tokens=12, stop_strings=("XYZ", "skab")),
        seed=0,
        group_id=0,
        member_idx=0,
    )
    try:
        sampling = asyncio.ensure_future(_sample(engine.generate, request))
        for _ in cuts:
            await asyncio.to_thread(core.is_at_cut.wait, 20)
            await engine.pause("abort")
            core.is_at_cut.clear()
            core.left.pop(0)
            await engine.resume()
        response = await sampling
    finally:
        await engine.close()
    assert Letters().decode(response.response_ids.tolist()) == "abXYcdXYZ"
    assert response.finish_reason is FinishReason.STOP
    assert len(response.logprobs) == 9
