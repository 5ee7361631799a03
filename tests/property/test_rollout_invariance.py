"""With `batch_invariant`, a sequence's tokens and logprobs repeat bit for bit, whatever runs beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from rollout_tiny import AtStep, generate, random_ids, request, running, tiny_model

from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import load_model
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


@pytest.mark.parametrize("shape", [(64, 48), (768, 256), (256, 768)])
def test_a_row_of_a_product_does_not_depend_on_its_place_or_its_neighbors(shape: tuple[int, int]) -> None:
    """What batch invariance stands on: at one number of rows, the library computes every row alike."""
    generator = torch.Generator().manual_seed(0)
    weight, row = torch.randn(shape, generator=generator), torch.randn(1, shape[1], generator=generator)
    results = []
    for place in (0, 1, 13, 31):
        others = torch.randn(SLOTS, shape[1], generator=generator)
        others[place] = row
        results.append(torch.nn.functional.linear(others, weight)[place])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("queries", "page_tokens", "width"), [(1, 32, 64), (2, 16, 64), (7, 32, 80), (4, 64, 128)]
)
def test_a_page_of_attention_does_not_depend_on_the_pages_beside_it(
    queries: int, page_tokens: int, width: int
) -> None:
    """The same for batched products of any number of pages, at least two."""
    generator = torch.Generator().manual_seed(0)
    query, weights = (torch.randn(200, queries, n, generator=generator) for n in (width, page_tokens))
    page, bias = torch.randn(200, page_tokens, width, generator=generator), torch.zeros(200, 1, page_tokens)
    scores = torch.baddbmm(bias, query, page.transpose(1, 2), alpha=0.3)
    values = torch.bmm(weights, page)
    for rows in (slice(0, 2), slice(198, 200), slice(17, 20), slice(3, 150)):
        part = torch.baddbmm(bias[rows], query[rows], page[rows].transpose(1, 2), alpha=0.3)
        assert torch.equal(part, scores[rows]) and torch.equal(
            torch.bmm(weights[rows], page[rows]), values[rows]
        )


async def test_short_sequences_alone_in_one_page_equal_a_batch() -> None:
    """One key head and one page: the smallest batch of products there is."""
    new = NewModelConfig(
        alphabet="01", vocab_size=40, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=1
    )
    model = load_model(ModelConfig(new=new))
    settings = {"batch_invariant": True, "num_slots": SLOTS, "page_tokens": 32, "kv_pool_tokens": 4096}
    async with running(model, **settings) as engine:
        expected = {r.request_id: r for r in await generate(engine, REQUESTS)}
    async with running(model, **settings) as engine:
        for asked in REQUESTS[:6]:
            assert same_bits([await engine.generate(asked)], expected)


async def test_few_sequences_run_few_rows() -> None:
    """3 sequences in 32 slots fill steps of 8 rows, not of 32: sizes at which rows have equal bits are found out."""
    async with running(tiny_model(), batch_invariant=True, num_slots=SLOTS) as engine:
        assert engine._runner is not None
        assert engine._runner._row_sizes == (8, 16, 32)


async def test_without_it_logprobs_agree_to_rounding() -> None:
    expected = await batch_of_32()
    wanted: list[GenerateRequest] = REQUESTS[:6]
    async with running(tiny_model(), num_slots=6) as engine:
        found = await generate(engine, wanted)
    for response in found:
        assert response.response_ids.tolist() == expected[response.request_id].response_ids.tolist()
        np.testing.assert_allclose(response.logprobs, expected[response.request_id].logprobs, atol=1e-5)
