"""The digest of `digest.py` as one Triton launch over many tensors: each parameter is read once.

A program takes TILE columns of one chunk, keeps the two column sums in registers while it walks down the rows,
mixes, weighs and adds its share to the tensor's two sums. Integer additions commute, so atomics stay exact.
Imported only where Triton is installed and the tensors lie on a CUDA device.
"""

# The kernel's body is Triton's language, not Python: the type checker has nothing to say about it.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from rollbook.sync.digest import CHUNK_WORDS, COLUMNS, MIX_FACTOR, ROWS, odd_numbers

TILE = 256
STEP_ROWS = 4
NUM_WARPS = 2


def sums(flat: Sequence[Tensor]) -> Tensor:
    """[n, 2] int64 on the device of `flat`, not waited for. Tensors are contiguous, 8-byte aligned, on one device."""
    device = flat[0].device
    plan = _plan(tuple((t.data_ptr(), t.numel() * t.element_size()) for t in flat), TILE, device)
    out = torch.zeros(len(flat), 2, dtype=torch.int64, device=device)
    if plan.grid[0]:
        with torch.cuda.device(device):
            plan.rows.record_stream(torch.cuda.current_stream(device))
            _chunk_sums[plan.grid](
                plan.rows,
                *plan.weights,
                out,
                ROWS=ROWS,
                COLUMNS=COLUMNS,
                TILE=TILE,
                STEP_ROWS=STEP_ROWS,
                MIX_FACTOR=MIX_FACTOR,
                IS_ALIGNED=plan.is_aligned,
                num_warps=NUM_WARPS,
            )
    return out


@dataclass(frozen=True, slots=True)
class _Plan:
    rows: Tensor
    """[chunks, 4] int64 on the device: address, bytes, tensor index, chunk index."""
    weights: tuple[Tensor, ...]
    grid: tuple[int]
    is_aligned: bool


@lru_cache(maxsize=1024)
def _plan(places: tuple[tuple[int, int], ...], tile: int, device: torch.device) -> _Plan:
    """What each program reads. A run digests the same places over and over: their plan stays on the device (32 bytes
    for each 2 MiB), for a copy to it would wait for everything that is queued before it."""
    addresses, num_bytes = np.array(places, np.int64).T
    num_chunks = -(-num_bytes // (8 * CHUNK_WORDS))
    tensor_of = np.repeat(np.arange(len(places)), num_chunks)
    chunk_of = np.arange(len(tensor_of)) - (np.cumsum(num_chunks) - num_chunks)[tensor_of]
    rows = np.stack([addresses[tensor_of], num_bytes[tensor_of], tensor_of, chunk_of], axis=1)
    most = int(num_chunks.max())
    counts = (ROWS, ROWS, COLUMNS, COLUMNS, most, most)
    return _Plan(
        rows=torch.from_numpy(rows).to(device),
        weights=tuple(odd_numbers(count, stream, device) for stream, count in enumerate(counts)),
        grid=(len(rows) * (COLUMNS // tile),),
        is_aligned=bool((addresses % 16 == 0).all()),
    )


@triton.jit
def _mix(x, MIX_FACTOR: tl.constexpr):
    x = (x ^ ((x >> 32) & 0xFFFFFFFF)) * MIX_FACTOR
    return x ^ ((x >> 32) & 0xFFFFFFFF)


@triton.jit
def _chunk_sums(
    plan,  # [programs / tiles, 4] int64: address, bytes, tensor index, chunk index
    row_a,
    row_c,
    column_b,
    column_d,
    chunk_e,
    chunk_f,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    MIX_FACTOR: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    num_tiles: tl.constexpr = COLUMNS // TILE
    entry = plan + (tl.program_id(0) // num_tiles) * 4
    address = tl.load(entry)
    num_bytes = tl.load(entry + 1)
    tensor_idx = tl.load(entry + 2)
    chunk = tl.load(entry + 3)
    first = chunk * (ROWS * COLUMNS)
    # whole words from here to the tensor's end, as far as they lie in this chunk
    num_whole = tl.minimum(num_bytes // 8 - first, ROWS * COLUMNS).to(tl.int32)
    words = address.to(tl.pointer_type(tl.int64)) + first
    if IS_ALIGNED:
        words = tl.multiple_of(words, 16)
    columns = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, STEP_ROWS)
    s = tl.zeros([STEP_ROWS, TILE], tl.int64)
    t = tl.zeros([STEP_ROWS, TILE], tl.int64)
    if num_whole == ROWS * COLUMNS:
        for row in range(0, ROWS, STEP_ROWS):
            w = tl.load(words + (row + steps)[:, None] * COLUMNS + columns[None, :])
            s += w * tl.load(row_a + row + steps)[:, None]
            t += (w >> 32) * tl.load(row_c + row + steps)[:, None]
    else:
        num_rows = (num_whole + COLUMNS - 1) // COLUMNS
        for top in range(0, num_rows, STEP_ROWS):
            at = (top + steps)[:, None] * COLUMNS + columns[None, :]
            w = tl.load(words + at, mask=at < num_whole, other=0)
            s += w * tl.load(row_a + top + steps)[:, None]
            t += (w >> 32) * tl.load(row_c + top + steps)[:, None]
    s_sum = tl.sum(s, axis=0)
    t_sum = tl.sum(t, axis=0)
    num_tail = num_bytes % 8
    if (num_tail > 0) & (num_whole < ROWS * COLUMNS):  # the last word, padded with zeros
        byte = tl.arange(0, 8)
        tail = tl.load(
            words.to(tl.pointer_type(tl.uint8)) + num_whole * 8 + byte, mask=byte < num_tail, other=0
        )
        word = tl.sum(tail.to(tl.int64) << (8 * byte).to(tl.int64), axis=0)
        is_here = columns == num_whole % COLUMNS
        s_sum += tl.where(is_here, word * tl.load(row_a + num_whole // COLUMNS), 0)
        t_sum += tl.where(is_here, (word >> 32) * tl.load(row_c + num_whole // COLUMNS), 0)
    m = _mix(s_sum, MIX_FACTOR)
    n = _mix(t_sum + m, MIX_FACTOR)
    high = tl.sum(m * tl.load(column_b + columns), axis=0) * tl.load(chunk_e + chunk)
    low = tl.sum(n * tl.load(column_d + columns), axis=0) * tl.load(chunk_f + chunk)
    tl.atomic_add(out + tensor_idx * 2, high)
    tl.atomic_add(out + tensor_idx * 2 + 1, low)
