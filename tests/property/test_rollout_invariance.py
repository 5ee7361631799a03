"""With `batch_invariant`, a sequence's tokens and logprobs repeat bit for bit, whatever runs beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from rollout_tiny import AtStep, generate, random_ids, request, running, tiny_model

from rollbook.rollout.engine import GenerateRequest, Response

SLOTS = 32
REQUESTS = [
    request(
        random_ids(1 + (7 * (i // 2)) % 40, i // 2), f"{i // 2}/{i % 2}", max_response_tokens=8 + 11 * (i % 5)
    )
    for i in range(SLOTS)
]


def same_bits(found: list[Response], expected: dict[str, Response]) -> bool:
    return all(
        r.response_ids.tobytes() == expected[r.request_id].response_ids.tobytes()
        and r.logprobs.tobytes() == expected[r.request_id].logprobs.tobytes()
        for r in found
    )


async def batch_of_32() -> dict[str, Response]:
    async with running(
        tiny_model(), batch_invariant=True, num_slots=SLOTS, kv_pool_tokens=4096, num_threads=1
    ) as engine:
        return {r.request_id: r for r in await generate(engine, REQUESTS)}


async def test_alone_equals_in_a_batch_of_32() -> None:
    expected = await batch_of_32()
    model = tiny_model()
    async with running(model, batch_invariant=True, num_slots=SLOTS, num_threads=1) as engine:
        for idx in (0, 3, 9, 30):
            assert same_bits([await engine.generate(REQUESTS[idx])], expected)


async def test_arrival_order_and_preemption_change_nothing() -> None:
    """Reversed, in a pool so small that sequences are put off and recomputed, prefilled 7 tokens at a time."""
    expected = await batch_of_32()
    async with running(
        tiny_model(),
        batch_invariant=True,
        num_slots=SLOTS,
        kv_pool_tokens=400,
        max_prefill_tokens=7,
        prefix_cache=False,
        num_threads=1,
    ) as engine:
        found = await generate(engine, REQUESTS[::-1])
        assert (await engine.stats()).num_preemptions > 0
    assert same_bits(found, expected)


async def test_cached_prefixes_and_copies_change_nothing() -> None:
    """The same requests again, after others: prompts now come from the cache, and pages have other owners."""
    expected = await batch_of_32()
    async with running(
        tiny_model(), batch_invariant=True, num_slots=SLOTS, kv_pool_tokens=4096, num_threads=1
    ) as engine:
        for _ in range(2):
            found = await generate(engine, REQUESTS[5:27])
        assert sum(r.num_cached_prompt_tokens for r in found) > 200
    assert same_bits(found, expected)


async def test_keys_recomputed_after_a_pause_change_nothing() -> None:
    """The same weights published again in the middle: everything is recomputed and goes on bit for bit."""
    expected = await batch_of_32()
    async with running(
        tiny_model(), batch_invariant=True, num_slots=SLOTS, kv_pool_tokens=4096, num_threads=1
    ) as engine:
        AtStep(engine, 6, lambda: engine.adopt_version(1, "recompute"))
        found = await generate(engine, REQUESTS)
    assert same_bits(found, expected)
    assert max(len(r.version_runs) for r in found) == 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(64, 48), (768, 256), (256, 768)])
def test_a_row_of_a_product_does_not_depend_on_its_place_or_its_neighbors(
    dtype: str, shape: tuple[int, int]
) -> None:
    """What batch invariance stands on: at a fixed number of rows, the library computes every row alike."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(shape, generator=generator).to(getattr(torch, dtype))
    row = torch.randn(1, shape[1], generator=generator).to(weight.dtype)
    results = []
    for place in (0, 1, 13, 31):
        others = torch.randn(SLOTS, shape[1], generator=generator).to(weight.dtype)
        others[place] = row
        results.append(torch.nn.functional.linear(others, weight)[place])
    assert all(torch.equal(result, results[0]) for result in results)


async def test_without_it_logprobs_agree_to_rounding() -> None:
    expected = await batch_of_32()
    wanted: list[GenerateRequest] = REQUESTS[:6]
    async with running(tiny_model(), num_slots=6) as engine:
        found = await generate(engine, wanted)
    for response in found:
        assert response.response_ids.tolist() == expected[response.request_id].response_ids.tolist()
        np.testing.assert_allclose(response.logprobs, expected[response.request_id].logprobs, atol=1e-5)
