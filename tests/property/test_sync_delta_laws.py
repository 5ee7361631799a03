"""A delta is exact and as small as it can be, whatever changed, however a part lies in its tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.delta import INTEGERS, POSITION_BYTES, AcknowledgedWeights, apply, bitmask_bytes, encode


@settings(max_examples=300, deadline=None)
@given(
    num=st.integers(1, 700),
    offset=st.integers(0, 9),
    itemsize=st.sampled_from(sorted(INTEGERS)),
    changed_frac=st.sampled_from([0.0, 0.002, 0.01, 0.03, 0.1, 0.5, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_a_delta_ends_in_the_new_bits_and_takes_the_smallest_form(
    num: int, offset: int, itemsize: int, changed_frac: float, seed: int
) -> None:
    draws = torch.Generator().manual_seed(seed)
    dtype = INTEGERS[itemsize]
    held = torch.randint(0, 100, (offset + num,), generator=draws).to(dtype)
    base = held[offset:]
    current = held.clone()[offset:]
    changes = torch.rand(num, generator=draws) < changed_frac
    current[changes] += 1
    encoded = encode(current, base)
    num_changed = int(changes.sum())
    assert encoded.num_changed == num_changed
    values = num_changed * itemsize
    sizes = [num_changed * POSITION_BYTES + values, bitmask_bytes(num) + values, num * itemsize]
    assert encoded.payload.numel() == (min(sizes) if num_changed else 0)
    target = base.clone()
    apply(encoded.encoding, encoded.payload, target)
    assert target.equal(current)
    if encoded.where is not None:
        assert encoded.where.tolist() == changes.nonzero().squeeze(1).tolist()


@pytest.mark.parametrize("changed_frac", [0.0, 0.004, 0.2, 1.0])
def test_the_trainers_copy_follows_every_publication(changed_frac: float) -> None:
    """Else the next delta would leave out what this one changed."""
    draws = torch.Generator().manual_seed(0)
    tensor = torch.randn(997, generator=draws).to(torch.bfloat16)
    acknowledged = AcknowledgedWeights()
    engine = torch.zeros(997, dtype=torch.int16)
    for version in range(4):
        acknowledged.begin(version - 1 if version else None)
        for part in (slice(0, 301), slice(301, 997)):
            encoded = acknowledged.encode("w", tensor, part)
            apply(encoded.encoding, encoded.payload, engine[part])
        acknowledged.acknowledge(version)
        assert engine.equal(tensor.view(torch.int16))
        changes = torch.rand(997, generator=draws) < changed_frac
        tensor.view(torch.int16)[changes] ^= 1


def positions(*numbers: int) -> Tensor:
    """Positions, and a new value of 5 for each, as they travel."""
    values = torch.full((len(numbers),), 5, dtype=torch.int16)
    where = torch.tensor(numbers, dtype=torch.int32)
    return torch.cat([where.view(torch.uint8), values.view(torch.uint8)])


def bitmask(mask: int, num_values: int) -> Tensor:
    """The mask of ten elements as one 8-byte word, and so many values."""
    word = torch.tensor([mask], dtype=torch.int64).view(torch.uint8)
    return torch.cat([word, torch.full((num_values,), 5, dtype=torch.int16).view(torch.uint8)])


NO_BYTES = torch.zeros(0, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("encoding", "payload"),
    [
        ("dense", torch.zeros(19, dtype=torch.uint8)),
        ("dense", torch.zeros(22, dtype=torch.uint8)),
        ("unchanged", torch.zeros(1, dtype=torch.uint8)),
        ("delta_positions", positions(10)),
        ("delta_positions", positions(3, -1)),
        ("delta_positions", positions(3)[:-1]),
        ("delta_positions", positions(*range(10), 0)),
        ("delta_bitmask", bitmask(0b11, 1)),
        ("delta_bitmask", bitmask(0b11, 3)),
        ("delta_bitmask", bitmask(0b11, 2)[:7]),
        ("delta_bitmask", NO_BYTES),
        ("xor", NO_BYTES),
    ],
)
def test_a_part_that_does_not_fit_its_elements_is_refused_and_writes_nothing(
    encoding: str, payload: Tensor
) -> None:
    """Ten elements of two bytes. What fits is taken: the same forms, whole."""
    target = torch.arange(10, dtype=torch.int16)
    before = target.clone()
    with pytest.raises(SyncError, match="does not fit 10 elements of 2 bytes|unknown encoding"):
        apply(encoding, payload, target)
    assert target.equal(before)
    for fits in (("delta_positions", positions(0, 1)), ("delta_bitmask", bitmask(0b11, 2))):
        apply(*fits, target)
        assert target.tolist() == [5, 5, *range(2, 10)]
