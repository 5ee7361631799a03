"""Whole tensors from the rows that each rank holds, one bucket at a time.

    rank 0: rows of a, b, c ─┐
    rank 1: rows of a, b, c ─┴─ one gather ──► bucket ──► a, b, c joined one by one ──► publisher
                                               (used again for the next one)

The whole model never exists: beside the bucket there is only what the reader still holds of the tensors joined from it.
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
        bucket_bytes: of the buffers of one gather; a larger tensor has one of its own.
    """
    own_share = bucket_bytes * ranks.size // (ranks.size + 1)  # this rank's rows need a buffer too
    waiting: list[tuple[str, Tensor]] = []
    waiting_bytes = 0
    for name, tensor in tensors.items():
        if not ranks.is_sharded(tensor):
            yield from _gather(waiting, ranks, dtype)
            waiting, waiting_bytes = [], 0
            yield name, tensor.detach().to(dtype)
            continue
        num_bytes = ranks.size * _most_elements(tensor.shape, ranks.size) * dtype.itemsize
        if waiting and waiting_bytes + num_bytes > own_share:
            yield from _gather(waiting, ranks, dtype)
            waiting, waiting_bytes = [], 0
        waiting.append((name, tensor))
        waiting_bytes += num_bytes
    yield from _gather(waiting, ranks, dtype)


def _gather(
    tensors: list[tuple[str, Tensor]], ranks: Ranks, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    if not tensors:
        return
    import torch.distributed as dist

    most = [_most_elements(tensor.shape, ranks.size) for _, tensor in tensors]
    rows = allocate((sum(most),), dtype, ranks.device)
    start = 0
    for (_, tensor), width in zip(tensors, most):
        local = ranks.local(tensor.detach()).reshape(-1)
        rows[start : start + local.numel()].copy_(local)
        start += width
    bucket = allocate((ranks.size, sum(most)), dtype, ranks.device)
    dist.all_gather_into_tensor(
        bucket.view(-1).view(torch.uint8), rows.view(torch.uint8), group=ranks.group
    )  # bytes: some backends lack some dtypes
    del rows
    start = 0
    for (name, tensor), width in zip(tensors, most):
        row_elements = math.prod(tensor.shape[1:])
        whole = allocate((tensor.numel(),), dtype, ranks.device)
        bounds = row_bounds(tensor.shape[0], ranks.size)
        parts = [bucket[r, start : start + (b - a) * row_elements] for r, (a, b) in enumerate(bounds)]
        torch.cat(parts, out=whole)
        start += width
        yield name, whole.view(tensor.shape)
        del whole


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Every byte that an export takes is taken here."""
    return torch.empty(shape, dtype=dtype, device=device)


def _most_elements(shape: torch.Size, num_ranks: int) -> int:
    """Elements of the largest share."""
    return -(-shape[0] // num_ranks) * math.prod(shape[1:])
