"""Recorded decode steps against the same padded steps computed eagerly: equal bit for bit, also after new weights and
after a sleep."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from rollout_tiny import generate, random_ids, request, running, tiny_model, write_weights

from rollbook.rollout.engine import Response
from rollbook.rollout.native.engine import NativeEngine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def requests(tag: str) -> list[Any]:
    return [
        request(random_ids(1 + 5 * (i // 2), i // 2), f"{i // 2}/{i % 2}#{tag}", max_response_tokens=40)
        for i in range(16)
    ]


async def rounds(engine: NativeEngine) -> list[Response]:
    """Two rounds, so that sizes come again; two under other weights; two after a sleep."""
    found = [*await generate(engine, requests("a")), *await generate(engine, requests("b"))]
    await write_weights(engine, tiny_model(seed=1))
    await engine.adopt_version(1)
    found += [*await generate(engine, requests("c")), *await generate(engine, requests("d"))]
    await engine.sleep(1)
    await engine.wake()
    return [*found, *await generate(engine, requests("e")), *await generate(engine, requests("f"))]


async def run(*, records: bool, dtype: str) -> tuple[list[Response], int, int]:
    async with running(tiny_model(), device="cuda", dtype=dtype) as engine:
        assert engine._runner is not None and engine._runner.graphs is not None
        graphs = engine._runner.graphs
        graphs.records = records
        found = await rounds(engine)
        return found, graphs.num_recorded, graphs.num_replayed


def assert_equal(found: Sequence[Response], expected: Sequence[Response]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.response_ids.tolist() == theirs.response_ids.tolist(), ours.request_id
        np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_replayed_step_is_the_eager_one_bit_for_bit(dtype: str) -> None:
    expected, none_recorded, none_replayed = asyncio.run(run(records=False, dtype=dtype))
    found, num_recorded, num_replayed = asyncio.run(run(records=True, dtype=dtype))
    assert (none_recorded, none_replayed) == (0, 0)
    assert num_replayed > num_recorded > 3
    assert_equal(found, expected)


def test_other_weights_reach_a_recorded_step() -> None:
    """Graphs are kept over a publication: they read the parameters where they lie."""
    found, _, _ = asyncio.run(run(records=True, dtype="float32"))
    before, after = found[:16], found[32:48]
    assert any(a.response_ids.tolist() != b.response_ids.tolist() for a, b in zip(before, after, strict=True))


def test_padding_does_not_change_what_is_sampled() -> None:
    """Beside the same engine without graphs: float32, so rounding differs by the shapes of products alone."""

    async def plain() -> list[Response]:
        async with running(tiny_model(), device="cuda", cuda_graphs=False) as engine:
            assert engine._runner is not None and engine._runner.graphs is None
            return await rounds(engine)

    torch.backends.cuda.matmul.allow_tf32 = False
    expected = asyncio.run(plain())
    found, _, _ = asyncio.run(run(records=True, dtype="float32"))
    same = [a.response_ids.tolist() == b.response_ids.tolist() for a, b in zip(found, expected, strict=True)]
    assert sum(same) >= len(same) - 4  # a draw within rounding of an edge may fall beside it
    for ours, theirs, is_same in zip(found, expected, same, strict=True):
        if is_same:
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)
