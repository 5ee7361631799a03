"""Rows with pages of random keys and values, and what attention over them is, computed row by row in float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollbook.rollout.native.paged_attention import PageBatch

PAGE_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Case:
    """What attention of decoding rows may meet."""

    lengths: tuple[int, ...] = (1, 40, 32, 70, 129)
    """Tokens that each row sees, itself included."""
    num_heads: int = 6
    num_kv_heads: int = 2
    dim: int = 24
    value_dim: int = 40
    window: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    gathers: bool = False
    """Pages lie anywhere in the pool; else they are its first ones, in another order."""
    forgets: int = 0
    """Pages at the front of each row that left its window and are not listed."""
    num_padding: int = 0
    """Rows without pages, and as many pages that nobody sees."""


CASES = {
    "plain": Case(),
    "a head for each query": Case(num_heads=4, num_kv_heads=4, dim=16, value_dim=16),
    "many queries a head": Case(num_heads=40, num_kv_heads=2, dim=64, value_dim=64),
    "wide": Case(dim=192, value_dim=128),
    "window": Case(window=48),
    "window, old pages gone": Case(lengths=(200, 130, 170), window=48, forgets=2),
    "softcap": Case(softcap=0.7),
    "sinks": Case(has_sinks=True),
    "sinks, window, softcap, anywhere": Case(has_sinks=True, window=33, softcap=1.5, gathers=True),
    "anywhere": Case(gathers=True),
    "padding": Case(num_padding=3),
    "padding, one long row": Case(lengths=(700,), num_padding=7),
    "many rows": Case(lengths=tuple(range(1, 600, 2)), num_padding=4),
}


@dataclass(frozen=True)
class Rows:
    """Arguments of `attend_pages`, and the real rows among the padded ones."""

    batch: PageBatch
    queries: Tensor
    key_pool: Tensor
    value_pool: Tensor
    sinks: Tensor | None
    num_real: int

    def arguments(self, case: Case) -> tuple[object, ...]:
        scale = 1.3 * case.dim**-0.5
        return (
            self.batch,
            self.queries,
            self.key_pool,
            self.value_pool,
            scale,
            case.window,
            case.softcap,
            self.sinks,
        )


def make(case: Case, *, dtype: torch.dtype, device: str) -> Rows:
    rng = np.random.default_rng(len(case.lengths) + case.dim)
    generator = torch.Generator().manual_seed(case.dim)
    pages = [
        (row, page * PAGE_TOKENS)
        for row, length in enumerate(case.lengths)
        for page in range(case.forgets, -(-length // PAGE_TOKENS))
    ]
    order = rng.permutation(len(pages))  # of the batch: rows' pages do not lie one after the other
    num_rows, num_pages = len(case.lengths) + case.num_padding, len(pages) + case.num_padding
    owner, start = np.zeros(num_pages, np.int64), np.zeros(num_pages, np.int64)
    lists = np.full(num_pages, order[0], np.int64)
    for place, (row, at) in zip(order, pages, strict=True):
        owner[place], start[place] = row, at
    lists[: len(pages)] = order
    counts = np.bincount([row for row, _ in pages], minlength=num_rows)
    starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
    position = np.zeros(num_rows, np.int64)
    position[: len(case.lengths)] = np.array(case.lengths) - 1
    pool_pages = num_pages + 5
    gather = rng.permutation(pool_pages)[:num_pages] if case.gathers else None

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    def indices(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    return Rows(
        PageBatch(
            num_rows,
            indices(owner),
            indices(start),
            indices(position),
            indices(lists),
            indices(starts),
            None if gather is None else indices(gather),
            has_padding=case.num_padding > 0,
        ),
        # As a model gives them: [H, T, D], seen by rows.
        numbers(case.num_heads, num_rows, case.dim).transpose(0, 1),
        numbers(pool_pages, case.num_kv_heads, PAGE_TOKENS, case.dim),
        numbers(pool_pages, case.num_kv_heads, PAGE_TOKENS, case.value_dim),
        numbers(case.num_heads) if case.has_sinks else None,
        len(case.lengths),
    )


def expected(case: Case, rows: Rows) -> Tensor:
    """[num_real, H, Dv] float64, row by row."""
    batch, found = rows.batch, []
    per_kv = case.num_heads // case.num_kv_heads
    ends = [*batch.list_starts[1:].tolist(), len(batch.lists)]
    for row in range(rows.num_real):
        listed = batch.lists[int(batch.list_starts[row]) : ends[row]]
        at = (batch.start[listed][:, None] + torch.arange(PAGE_TOKENS, device=listed.device)).flatten()
        pages = listed if batch.gather is None else batch.gather[listed]
        keys, values = (
            pool[pages].transpose(0, 1).flatten(1, 2).double().repeat_interleave(per_kv, 0)
            for pool in (rows.key_pool, rows.value_pool)
        )
        scores = torch.einsum("hd,htd->ht", rows.queries[row].double(), keys) * 1.3 * case.dim**-0.5
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        last = batch.position[row]
        is_hidden = at > last
        if case.window:
            is_hidden |= at <= last - case.window
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if rows.sinks is not None:
            scores = torch.cat([scores, rows.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : len(at)]
        found.append(torch.einsum("ht,htd->hd", weights, values))
    return torch.stack(found)
