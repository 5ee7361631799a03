"""Padding of decode steps to the sizes of recorded graphs: what is read of them is what it was without padding."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from rollout_tiny import generate, random_ids, request, running, tiny_model

from rollbook.rollout.native.decode_graphs import DecodeGraphs, Sizes, coarse, padded, sizes_of, step_of
from rollbook.rollout.native.engine import NativeEngine
from rollbook.rollout.native.paged_attention import KVPool, LayerShape
from rollbook.rollout.native.sequences import StepRows

CPU = torch.device("cpu")


def pool(num_pages: int = 20, page_tokens: int = 4) -> KVPool:
    layers = [LayerShape(2, 8, 8)]
    return KVPool(layers, num_pages=num_pages, page_tokens=page_tokens, dtype=torch.float32, device=CPU)


def column(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


PLAN = StepRows(
    token_ids=column(11, 12),
    positions=column(5, 2),
    write_pages=column(1, 2),
    write_offsets=column(1, 2),
    slots=column(0, 1),
    page_owner=column(0, 0, 1),
    page_start=column(0, 4, 0),
    page_lists=column(0, 1, 2),
    page_list_starts=column(0, 2),
    spans=(),
)
"""Row 0 has pages 0 and 1 and writes position 5 to page 1; row 1 has page 2."""


def test_a_plan_is_laid_out_with_its_padding() -> None:
    sizes = Sizes(num_rows=4, num_pages=5)
    inputs = np.full(sizes.num_inputs, -1, np.int64)
    padded(PLAN, sizes, pool(), inputs)
    rows, pages = inputs[:16].reshape(4, 4).tolist(), inputs[16:].reshape(3, 5).tolist()
    assert rows == [
        [11, 12, 0, 0],  # ids
        [5, 2, 0, 0],  # positions
        [5, 10, 80, 80],  # page * 4 + offset; padding writes to the scratch page after the pool's 20
        [0, 2, 3, 3],  # row 2 lists nothing, row 3 what is left
    ]
    assert pages == [[0, 0, 1, 0, 0], [0, 4, 0, 0, 0], [0, 1, 2, 0, 0]]


def test_the_step_reads_the_inputs_in_place() -> None:
    sizes = Sizes(num_rows=4, num_pages=5)
    inputs = torch.zeros(sizes.num_inputs, dtype=torch.int64)
    ids, positions, step = step_of(inputs, sizes, pool())
    padded(PLAN, sizes, pool(), inputs.numpy())  # what a replay does: new values at the same addresses
    assert ids.tolist() == [[11, 12, 0, 0]] and positions.tolist() == [[5, 2, 0, 0]]
    (batch,) = step.batches
    assert batch.lists.tolist() == [0, 1, 2, 0, 0] and batch.list_starts.tolist() == [0, 2, 3, 3]
    assert step.write_index.tolist() == [5, 10, 80, 80] and not step.spans


def test_sizes_leave_a_row_of_padding_and_stay_inside_the_pool() -> None:
    assert sizes_of(PLAN, pool_pages=20) == Sizes(8, 8)
    assert sizes_of(PLAN, pool_pages=3) == Sizes(8, 3)
    for number in range(1, 3000):
        size = coarse(number)
        assert number <= size <= max(8, number * 1.25 + 1)
    assert len({coarse(number) for number in range(8, 1025)}) == 1 + 4 * 7  # few: four to each doubling


@dataclass
class Checked:
    """Computes every decode step padded and without padding."""

    engine: NativeEngine
    num_steps: int = 0
    largest: float = 0.0

    def __post_init__(self) -> None:
        runner = self.engine._runner
        assert runner is not None
        graphs = DecodeGraphs(runner.compute, CPU, most_rows=8)
        graphs.records = False
        plain, padded_logits = runner._tensors, graphs.logits

        def logits(plan: StepRows, kv_pool: KVPool) -> torch.Tensor:
            wanted = runner.compute(*plain(plan, kv_pool))[: plan.num_decode]
            found = padded_logits(plan, kv_pool)
            assert torch.isfinite(found).all()
            self.num_steps += 1
            self.largest = max(self.largest, float((found - wanted).abs().max()))
            return found

        graphs.logits = logits  # type: ignore[method-assign]
        runner.graphs = graphs


@pytest.mark.parametrize("kv_pool_tokens", [512, 160])
async def test_padded_steps_give_the_rows_of_plain_ones(kv_pool_tokens: int) -> None:
    """Groups that share prompts, sequences that come and go, a pool that overflows, prefills in between."""
    requests = [
        request(random_ids(1 + 7 * (i // 2), i // 2), f"{i // 2}/{i % 2}", max_response_tokens=6 + 3 * i)
        for i in range(10)
    ]
    async with running(tiny_model(), kv_pool_tokens=kv_pool_tokens) as engine:
        expected = await generate(engine, requests)
    async with running(tiny_model(), kv_pool_tokens=kv_pool_tokens) as engine:
        checked = Checked(engine)
        found = await generate(engine, requests)
    assert checked.num_steps > 20
    assert checked.largest < 1e-4
    for ours, theirs in itertools.zip_longest(found, expected):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)


async def test_a_cpu_records_nothing() -> None:
    async with running(tiny_model()) as engine:
        assert engine._runner is not None and engine._runner.graphs is None
