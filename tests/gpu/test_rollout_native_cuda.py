"""The native engine on a CUDA device against the same weights on the CPU."""

from __future__ import annotations

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from rollout_tiny import AtStep, generate, random_ids, request, running, tiny_model, trainer_logprobs

from rollbook.types import VersionRun

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run_async(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """The GPU machines' pytest has no asyncio plugin."""

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        asyncio.run(test(**arguments))  # type: ignore[arg-type]

    return run


REQUESTS = [
    request(random_ids(1 + 5 * (i // 2), i // 2), f"{i // 2}/{i % 2}", max_response_tokens=30)
    for i in range(16)
]


@pytest.mark.parametrize("settings", [{}, {"kv_pool_tokens": 240, "max_prefill_tokens": 7}])
@run_async
async def test_tokens_and_logprobs_equal_the_cpus(settings: dict[str, Any]) -> None:
    """The draws are the same numbers on every device; float32 logprobs differ by rounding only."""
    torch.backends.cuda.matmul.allow_tf32 = False
    async with running(tiny_model()) as engine:
        expected = await generate(engine, REQUESTS)
    async with running(tiny_model(), device="cuda", **settings) as engine:
        found = await generate(engine, REQUESTS)
    same = [a.response_ids.tolist() == b.response_ids.tolist() for a, b in zip(found, expected)]
    assert sum(same) >= 15  # a draw within rounding of an edge may fall beside it
    for asked, response in zip(REQUESTS, found, strict=True):
        logprobs = trainer_logprobs(tiny_model(), asked.prompt_ids, response.response_ids)
        np.testing.assert_allclose(response.logprobs, logprobs, atol=1e-4)


@run_async
async def test_filters_and_greedy_on_the_device() -> None:
    model = tiny_model()
    asked = [
        request(random_ids(4), "0/0", top_k=3),
        request(random_ids(4), "0/1", top_p=0.5),
        request(random_ids(4), "0/2", min_p=0.3),
        request(random_ids(4), "0/3", temperature=0.0),
        request(random_ids(4), "0/4", temperature=0.7),
    ]
    async with running(model) as engine:
        expected = await generate(engine, asked)
    async with running(model, device="cuda") as engine:
        found = await generate(engine, asked)
    assert [r.response_ids.tolist() for r in found] == [r.response_ids.tolist() for r in expected]


@run_async
async def test_sleep_gives_the_memory_back_and_the_response_goes_on() -> None:
    model = tiny_model()
    async with running(model) as engine:
        whole = await engine.generate(request(random_ids(5)))
    async with running(model, device="cuda", kv_pool_tokens=65_536) as engine:
        await engine.generate(
            request(random_ids(5), "1/0")
        )  # what the libraries keep for themselves is there now
        awake_bytes = torch.cuda.memory_allocated()
        hook = AtStep(engine, 3, engine.pause)
        task = asyncio.create_task(engine.generate(request(random_ids(5))))
        while hook.answer is None:
            await asyncio.sleep(0)
        await hook.answer
        await engine.sleep(1)
        # 2 layers x keys and values x 2 heads x 8 x 4 bytes a token, and the weights.
        assert awake_bytes - torch.cuda.memory_allocated() >= 65_536 * 2 * 2 * 2 * 8 * 4
        await engine.wake()
        await engine.resume()
        found = await task
    assert found.response_ids.tolist() == whole.response_ids.tolist()
    assert found.version_runs == (VersionRun(0, 8),)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@run_async
async def test_half_precision_stays_near_the_float32_trainer(dtype: str) -> None:
    model, prompt = tiny_model(), random_ids(5)
    async with running(model, device="cuda", dtype=dtype) as engine:
        found = await engine.generate(request(prompt, max_response_tokens=20))
    gap = np.abs(found.logprobs - trainer_logprobs(model, prompt, found.response_ids))
    assert gap.mean() < 0.05
