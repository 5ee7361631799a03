"""Laws of the digest: it sees every change and nothing but the bytes, shape and dtype."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.sync.digest import COLUMNS, ROWS, digest, digests


@given(num_bytes=st.integers(1, 300), bit=st.integers(0, 1 << 20), seed=st.integers(0, 1 << 30))
def test_every_flipped_bit_is_seen(num_bytes: int, bit: int, seed: int) -> None:
    data = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    flipped = data.clone()
    flipped[bit // 8 % num_bytes] ^= 1 << bit % 8
    before, after = digest(data), digest(flipped)
    assert before[:16] != after[:16]  # the upper half alone: not luck, an odd factor is a unit


def test_flipped_bits_in_a_large_tensor_are_seen() -> None:
    data = torch.randint(0, 256, (8 * ROWS * COLUMNS + 80_003,), dtype=torch.uint8)
    before = digest(data)
    draw = random.Random(0)
    for _ in range(12):
        at, bit = draw.randrange(data.numel()), draw.randrange(8)
        data[at] ^= 1 << bit
        assert digest(data) != before
        data[at] ^= 1 << bit
    assert digest(data) == before


@pytest.mark.parametrize("distance", [4, 8, 2 * COLUMNS, 4 * COLUMNS, 8 * COLUMNS])
def test_two_flipped_sign_bits_do_not_cancel(distance: int) -> None:
    """2^63 + 2^63 = 0 modulo 2^64: the sum over whole words alone would miss two of them in one column."""
    weights = torch.randn(16 * COLUMNS, dtype=torch.float32)
    before = digest(weights)
    for first in range(16):
        changed = weights.clone()
        changed[[first, first + distance]] *= -1
        assert digest(changed) != before


def test_all_signs_flipped_is_seen() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weights = torch.randn(2 * COLUMNS + 3).to(dtype)
        assert digest(-weights) != digest(weights)


@settings(max_examples=30)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(2, 40), more=st.integers(1, 40))
def test_moved_data_is_seen(seed: int, rows: int, more: int) -> None:
    columns = rows + more
    weights = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    moved = [
        weights.roll(1, 0),
        weights.roll(1, 1),
        weights.flip(0),
        weights.reshape(columns, rows),
        weights.t().contiguous(),
        weights.t().contiguous().reshape(rows, columns),
    ]
    assert digest(weights) not in digests(moved)


def test_shape_and_dtype_are_bound_in() -> None:
    zeros = torch.zeros(4, dtype=torch.float32)
    others = [
        zeros.reshape(2, 2),
        zeros.to(torch.int32),
        torch.zeros(8, dtype=torch.bfloat16),
        torch.zeros(5),
    ]
    assert len({digest(t) for t in [zeros, *others]}) == 5


def test_nan_infinities_and_negative_zero_count_as_bytes() -> None:
    values = torch.tensor([float("nan"), float("inf"), -0.0, 0.0])
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(torch.tensor([float("nan"), float("inf"), 0.0, 0.0]))


def test_memory_layout_does_not_count() -> None:
    base = torch.randn(37, 53)
    padded = torch.zeros(64, 64)
    padded[:37, :53] = base
    odd_start = torch.zeros(37 * 53 + 1, dtype=torch.bfloat16)
    odd_start[1:] = base.flatten().to(torch.bfloat16)
    assert digest(padded[:37, :53]) == digest(base)
    assert digest(base.t().contiguous().t()) == digest(base)
    assert digest(odd_start[1:]) == digest(base.flatten().to(torch.bfloat16))
    assert digest(torch.nn.Parameter(base)) == digest(base)


def test_a_list_gives_what_each_tensor_gives() -> None:
    tensors = [torch.randn(n) for n in (0, 1, 3, 17_000, 2 * COLUMNS, 600_000)] + [torch.tensor(2.5)]
    assert digests(tensors) == [digest(t) for t in tensors]


def test_tensors_of_two_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="one device"):
        digests([torch.zeros(1), torch.zeros(1, device="meta")])
