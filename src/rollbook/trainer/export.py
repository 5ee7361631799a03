"""Whole tensors from the rows that each rank holds, one bucket at a time.

    rank 0: rows of a, b, c ─┐
    rank 1: rows of a, b, c ─┴─ one gather ──► bucket ──► a, b, c joined one by one ──► publisher
                                               (used again for the next one)

The whole model never exists: beside the bucket and this rank's rows of it there is only what the reader still holds of
the tensors joined from it. A tensor larger than a bucket is gathered into its own memory, where its rows divide evenly.
Every rank takes part and sees the same stream; rank 0 publishes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rollbook.trainer.parallel import Ranks, row_bounds


def gathered(
    tensors: Mapping[str, Tensor], ranks: Ranks, dtype: torch.dtype, bucket_bytes: int
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `tensors`, whole and in `dtype`, in their order.

    Args:
        tensors: by name; those that are divided among the ranks, and others.
        bucket_bytes: of the buffers of one gather. A larger tensor has one of its own if its rows do not divide
            evenly, else none.
    """
    own_share = bucket_bytes * ranks.size // (ranks.size + 1)  # this rank's rows need a buffer too
    groups: list[list[tuple[str, Tensor]]] = [[]]
    group_bytes = 0
    for name, tensor in tensors.items():
        num_bytes = 0
        if ranks.is_sharded(tensor):
            num_bytes = ranks.size * _most_elements(tensor.shape, ranks.size) * dtype.itemsize
        if groups[-1] and group_bytes + num_bytes > own_share:
            groups.append([])
            group_bytes = 0
        groups[-1].append((name, tensor))
        group_bytes += num_bytes
    is_whole = [_is_gathered_in_place(group, ranks, dtype, own_share) for group in groups]
    widest = max(
        (sum(_widths(group, ranks)) for group, alone in zip(groups, is_whole) if not alone), default=0
    )
    rows = allocate((widest,), dtype, ranks.device)
    bucket = allocate((ranks.size * widest,), dtype, ranks.device)
    for group, alone in zip(groups, is_whole):
        if alone:
            [(name, tensor)] = group
            yield name, _gather_in_place(tensor, ranks, dtype)
            continue
        width = sum(_widths(group, ranks))
        yield from _gather(group, ranks, rows[:width], bucket[: ranks.size * width].view(ranks.size, width))


def _is_gathered_in_place(
    group: list[tuple[str, Tensor]], ranks: Ranks, dtype: torch.dtype, own_share: int
) -> bool:
    """One tensor that is larger than a bucket, with as many rows on every rank: the ranks' rows one after the other
    are the tensor."""
    (_, first), *others = group
    is_large = ranks.is_sharded(first) and first.numel() * dtype.itemsize > own_share
    return is_large and not others and first.shape[0] % ranks.size == 0


def _gather_in_place(tensor: Tensor, ranks: Ranks, dtype: torch.dtype) -> Tensor:
    mine = _own_rows(tensor, ranks)
    if mine.dtype != dtype:
        mine = allocate((mine.numel(),), dtype, ranks.device).copy_(mine)
    whole = allocate((tensor.numel(),), dtype, ranks.device)
    ranks.gather_into(whole, mine)
    return whole.view(tensor.shape)


def _gather(
    group: list[tuple[str, Tensor]], ranks: Ranks, rows: Tensor, bucket: Tensor
) -> Iterator[tuple[str, Tensor]]:
    widths = _widths(group, ranks)
    start = 0
    for (_, tensor), width in zip(group, widths):
        if width:
            local = _own_rows(tensor, ranks)
            rows[start : start + local.numel()].copy_(local)
            start += width
    if start:
        ranks.gather_into(bucket.view(-1), rows)
    start = 0
    for (name, tensor), width in zip(group, widths):
        if not width:
            yield name, tensor.detach().to(rows.dtype)
            continue
        row_elements = math.prod(tensor.shape[1:])
        whole = allocate((tensor.numel(),), rows.dtype, ranks.device)
        bounds = row_bounds(tensor.shape[0], ranks.size)
        parts = [bucket[r, start : start + (b - a) * row_elements] for r, (a, b) in enumerate(bounds)]
        torch.cat(parts, out=whole)
        start += width
        yield name, whole.view(tensor.shape)
        del whole


@torch.no_grad()
def _own_rows(tensor: Tensor, ranks: Ranks) -> Tensor:
    """This rank's, flat. Without gradients no new tensor is made around them: one costs as much as a launch."""
    return ranks.local(tensor).reshape(-1)


def _widths(group: list[tuple[str, Tensor]], ranks: Ranks) -> list[int]:
    """Elements of each tensor in a rank's rows; 0 for one that is not divided."""
    return [_most_elements(t.shape, ranks.size) if ranks.is_sharded(t) else 0 for _, t in group]


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every byte that an export takes is taken here."""
    return torch.empty(shape, dtype=dtype, device=device)


def _most_elements(shape: torch.Size, num_ranks: int) -> int:
    """Elements of the largest share."""
    return -(-shape[0] // num_ranks) * math.prod(shape[1:])
