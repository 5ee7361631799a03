"""Attention of decoding rows over pages as one Triton launch: each page is read once, and only where it lies.

What `paged_attention.attend_pages` computes in a dozen operations over all pages, with the same arguments. A
program takes one row's queries of one key head, walks down the row's page list and keeps the softmax running in
registers. Where rows are few, a row's list is cut into parts of its own programs, which a second launch puts together.
Imported only where Triton is installed and the pool lies on a CUDA device.
"""

# The kernels' bodies are Triton's language, not Python: the type checker has nothing to say about them.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

if TYPE_CHECKING:
    from rollbook.rollout.native.paged_attention import PageBatch

PROGRAMS = 1024
"""About as many keep a device busy; a launch with fewer cuts its rows' lists."""
MOST_PARTS = 16
PART_PAGES = 4
"""A part has at least so many pages, where they are one row's."""
BLOCK_TOKENS = 64
LEAST_QUERIES = 16
"""Rows of the smallest matrix product."""


def attend(
    batch: PageBatch,
    queries: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, H, D] queries -> [B, H, Dv]. A row without pages gets zeros."""
    num_rows, num_heads, dim = queries.shape
    _, num_kv_heads, page_tokens, value_dim = value_pool.shape
    per_kv = num_heads // num_kv_heads
    if queries.stride(2) != 1:
        queries = queries.contiguous()
    parts = num_parts(num_rows * num_kv_heads, len(batch.lists))
    out = queries.new_empty(num_rows, num_heads, value_dim)
    partial = out if parts == 1 else out.new_empty(parts, *out.shape, dtype=torch.float32)
    peaks = torch.empty(2, parts, num_rows, num_heads, dtype=torch.float32, device=queries.device)
    sizes = {
        "PER_KV": per_kv,
        "VALUE_DIM": value_dim,
        "BLOCK_QUERIES": max(LEAST_QUERIES, triton.next_power_of_2(per_kv)),
        "BLOCK_VALUES": max(LEAST_QUERIES, triton.next_power_of_2(value_dim)),
        "HAS_SINKS": sinks is not None,
        "PARTS": parts,
    }
    unused = batch.lists
    _attend[num_rows, num_kv_heads, parts](
        queries,
        key_pool,
        value_pool,
        partial,
        peaks,
        batch.lists,
        batch.list_starts,
        batch.start,
        batch.position,
        unused if batch.gather is None else batch.gather,
        unused if sinks is None else sinks,
        num_rows,
        len(batch.lists),
        scale,
        softcap or 1.0,
        window,
        queries.stride(0),
        queries.stride(1),
        HAS_GATHER=batch.gather is not None,
        HAS_WINDOW=window > 0,
        HAS_SOFTCAP=softcap is not None,
        DIM=dim,
        PAGE_TOKENS=page_tokens,
        BLOCK_DIM=max(LEAST_QUERIES, triton.next_power_of_2(dim)),
        BLOCK_TOKENS=BLOCK_TOKENS,
        PRECISION="ieee" if queries.dtype == torch.float32 else "tf32",
        num_warps=2,
        num_stages=2,
        **sizes,
    )
    if parts > 1:
        _join[num_rows, num_kv_heads](
            partial, peaks, out, unused if sinks is None else sinks, num_rows, **sizes
        )
    return out


def num_parts(num_programs: int, num_pages: int) -> int:
    """Parts of a row's list, a power of two: enough programs, none with too few pages."""
    parts = min(MOST_PARTS, triton.cdiv(PROGRAMS, num_programs), max(num_pages // PART_PAGES, 1))
    return 1 << (int(parts).bit_length() - 1)


@triton.jit
def _attend(
    queries,
    keys,
    values,
    out,
    peaks,
    lists,
    list_starts,
    starts,
    positions,
    gather,
    sinks,
    num_rows,
    num_listed,
    scale,
    softcap,
    window,
    row_stride,
    head_stride,
    HAS_GATHER: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PER_KV: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PAGE_TOKENS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads = tl.num_programs(1)
    first = tl.load(list_starts + row)
    end = tl.load(list_starts + row + 1, mask=row + 1 < num_rows, other=num_listed)
    position = tl.load(positions + row)
    # What is left of the lists belongs to the last row, which may be padding: it has its position's pages, not all.
    num_pages = tl.minimum(end - first, position // PAGE_TOKENS + 1)
    part_pages = tl.cdiv(num_pages, PARTS)
    first_token = part * part_pages * PAGE_TOKENS
    end_token = tl.minimum((part + 1) * part_pages, num_pages) * PAGE_TOKENS

    query = tl.arange(0, BLOCK_QUERIES)
    dim = tl.arange(0, BLOCK_DIM)
    value_dim = tl.arange(0, BLOCK_VALUES)
    head = kv_head * PER_KV + query
    is_query = query < PER_KV
    asked = tl.load(
        queries + row * row_stride + head[:, None] * head_stride + dim[None, :],
        mask=is_query[:, None] & (dim < DIM)[None, :],
        other=0.0,
    )
    peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    summed = tl.zeros([BLOCK_QUERIES, BLOCK_VALUES], tl.float32)
    for block in range(first_token, end_token, BLOCK_TOKENS):
        token = block + tl.arange(0, BLOCK_TOKENS)
        is_listed = token < end_token
        page = tl.load(lists + first + token // PAGE_TOKENS, mask=is_listed, other=0)
        offset = token % PAGE_TOKENS
        at = tl.load(starts + page, mask=is_listed, other=0) + offset
        is_seen = is_listed & (at <= position)
        if HAS_WINDOW:
            is_seen = is_seen & (at > position - window)
        if HAS_GATHER:
            page = tl.load(gather + page, mask=is_listed, other=0)
        line = (page * num_kv_heads + kv_head) * PAGE_TOKENS + offset
        key = tl.load(
            keys + line[None, :] * DIM + dim[:, None],
            mask=is_seen[None, :] & (dim < DIM)[:, None],
            other=0.0,
        )
        scores = tl.dot(asked, key, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)  # tanh
        scores = tl.where(is_seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk = tl.exp(peak - base)
        weights = tl.exp(scores - base[:, None])
        total = total * shrunk + tl.sum(weights, 1)
        value = tl.load(
            values + line[:, None] * VALUE_DIM + value_dim[None, :],
            mask=is_seen[:, None] & (value_dim < VALUE_DIM)[None, :],
            other=0.0,
        )
        added = tl.dot(weights.to(value.dtype), value, input_precision=PRECISION)
        summed = summed * shrunk[:, None] + added
        peak = higher

    is_out = is_query[:, None] & (value_dim < VALUE_DIM)[None, :]
    num_heads = num_kv_heads * PER_KV
    line_out = (part * num_rows + row) * num_heads + head
    if PARTS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
            higher = tl.maximum(peak, sink)
            total = total * tl.exp(peak - higher) + tl.exp(sink - higher)
            summed = summed * tl.exp(peak - higher)[:, None]
        summed = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    else:
        tl.store(peaks + line_out, peak, mask=is_query)
        tl.store(peaks + PARTS * num_rows * num_heads + line_out, total, mask=is_query)
    tl.store(
        out + line_out[:, None] * VALUE_DIM + value_dim[None, :],
        summed.to(out.dtype.element_ty),
        mask=is_out,
    )


@triton.jit
def _join(
    partial,
    peaks,
    out,
    sinks,
    num_rows,
    HAS_SINKS: tl.constexpr,
    PER_KV: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
):
    """Put the parts of a row's list together: sums of weights e^(s - peak), and of values by them."""
    row, kv_head = tl.program_id(0), tl.program_id(1)
    query = tl.arange(0, BLOCK_QUERIES)
    value_dim = tl.arange(0, BLOCK_VALUES)
    head = kv_head * PER_KV + query
    is_query = query < PER_KV
    is_out = is_query[:, None] & (value_dim < VALUE_DIM)[None, :]
    num_heads = tl.num_programs(1) * PER_KV
    peak = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_QUERIES], tl.float32)
    summed = tl.zeros([BLOCK_QUERIES, BLOCK_VALUES], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32)
        total += 1.0
    for part in range(PARTS):
        line = (part * num_rows + row) * num_heads + head
        part_peak = tl.load(peaks + line, mask=is_query, other=float("-inf"))
        part_total = tl.load(peaks + PARTS * num_rows * num_heads + line, mask=is_query, other=0.0)
        part_sum = tl.load(partial + line[:, None] * VALUE_DIM + value_dim[None, :], mask=is_out, other=0.0)
        higher = tl.maximum(peak, part_peak)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        shrunk, kept = tl.exp(peak - base), tl.exp(part_peak - base)
        total = total * shrunk + part_total * kept
        summed = summed * shrunk[:, None] + part_sum * kept[:, None]
        peak = higher
    summed = summed / tl.where(total == 0.0, 1.0, total)[:, None]
    line_out = row * num_heads + head
    tl.store(
        out + line_out[:, None] * VALUE_DIM + value_dim[None, :],
        summed.to(out.dtype.element_ty),
        mask=is_out,
    )
