"""Exact causal attention over packed sequences that never builds a mask of the whole micro batch.

A packed micro batch is a row of segments. A segment attends causally to itself and, where it has a prefix
segment (the prompt that a group shares), to all of that:

    tokens   | prompt A | member A0 | member A1 | ... | prompt B | member B0 | ...
    A1 sees  | ======== |           | ===>      |

`PackedLayout` cuts the segments into query blocks and collects blocks of similar size into tiles; a tile is
gathered to [n, heads, rows, head_dim], computed by three small matrix products, and scattered back. On CUDA in
bfloat16 the same layout goes to torch's variable-length flash attention.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollbook.errors import ConfigError

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]
"""(module, query [B,H,T,D], key, value [B,Hkv,T,D], mask, **keywords) -> ([B,T,H,D], None): transformers'
attention interface, which the built-in decoder shares."""

ATTENTIONS: dict[str, AttentionFunction] = {}
"""By name; `rollbook_packed` is the trainer's. An engine adds its own before it loads a model."""

BLOCK_TOKENS = 128
"""Most query rows of a block: later keys of a long segment are skipped block by block."""
TILE_CELLS = 200_000
"""Most scores of one tile over all heads: they stay in a core's cache."""
TILE_WASTE = 1.3
"""Padded scores of a tile over useful ones, at most."""
KEEP_PROBS = 4
"""Probabilities are kept for the backward pass while they are at most this many times the size of the queries."""
MASKED = -1e30
"""Added to scores that must not count: finite, so that a padding row stays finite too."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_tokens` packed tokens from `start`; `prefix` is the index of an earlier segment, or None."""

    start: int
    num_tokens: int
    prefix: int | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """n query blocks, padded at the front to [rows] queries and [keys] keys; indices are into [T * H] rows."""

    num_blocks: int
    rows: int
    keys: int
    query_rows: Tensor
    """[n * H * rows] int64: where queries are read."""
    out_rows: Tensor
    """The same, padding pointing at the row behind the last."""
    key_rows: Tensor
    """[n * Hkv * keys] int64."""
    padding: Tensor | None
    """Positions of padding in `query_rows`; None when there is none."""
    bias: Tensor
    """[1 or n, 1, 1, rows, keys], at least float32: 0 or MASKED."""


@dataclass(frozen=True, slots=True)
class _Block:
    """Query tokens [first, last) of a segment and the tokens they may see, in order of position."""

    queries: NDArray[np.int64]
    keys: NDArray[np.int64]


@dataclass(slots=True)
class PackedLayout:
    """Segments of one packed micro batch, with the tiles of each (heads, window) made on first use."""

    segments: Sequence[Segment]
    num_tokens: int
    device: torch.device
    _tiles: dict[tuple[int, int, int | None, torch.dtype], tuple[Tile, ...]] = field(default_factory=dict)
    _varlen: tuple[Tensor, Tensor, Tensor | None, int, int] | None = None

    @property
    def shares_keys(self) -> bool:
        return any(s.prefix is not None for s in self.segments)

    def tiles(
        self, num_heads: int, num_kv_heads: int, window: int | None, dtype: torch.dtype
    ) -> tuple[Tile, ...]:
        key = (num_heads, num_kv_heads, window, dtype)
        if key not in self._tiles:
            self._tiles[key] = _build_tiles(self, num_heads, num_kv_heads, window, dtype)
        return self._tiles[key]

    def varlen(self) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
        """cu_seqlens of queries and keys, the gather of keys (None: as they lie), and both maxima."""
        if self._varlen is None:
            self._varlen = _varlen_index(self)
        return self._varlen


def packed_layout(cu_seqlens: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
    """Layout of sequences that share nothing; `cu_seqlens` are their cumulative starts, [B+1]."""
    segments = [Segment(a, b - a) for a, b in itertools.pairwise(cu_seqlens) if b > a]
    return PackedLayout(segments, int(cu_seqlens[-1]), torch.device(device))


def packed_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    packed: PackedLayout | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of one packed micro batch, for the built-in decoder and for transformers' interface.

    Args:
        module: the layer's attention module; not read.
        query: [1, H, T, D].
        key, value: [1, Hkv, T, D].
        attention_mask: must be None: the layout says who sees whom.
        scaling: factor on the scores.
        packed: the micro batch's layout; the model's forward passes it through.
        dropout: must be 0: a forward pass is repeated bit for bit.
        sliding_window: a token sees itself and at most this many - 1 before it; None: all.
        softcap: scores become softcap * tanh(score / softcap); None: as they are.
        s_aux: attention sinks; refused.
    Returns:
        [1, T, H, D].
    Raises:
        ConfigError: the architecture needs what this attention does not have.
    """
    if packed is None:
        raise ConfigError(
            "the model does not pass the packed layout to its attention",
            "use an architecture of transformers that supports attention backends",
        )
    if s_aux is not None or dropout:
        what = "attention sinks" if s_aux is not None else f"attention dropout {dropout}"
        raise ConfigError(
            f"the model has {what}", "set the dropout to 0; sinks are not supported for training"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return _varlen_attention(q, k, v, packed, scaling, sliding_window)[None], None
    tiles = packed.tiles(q.shape[1], k.shape[1], sliding_window, q.dtype)
    shares = packed.shares_keys or any(s.num_tokens > BLOCK_TOKENS for s in packed.segments)
    out: Tensor = _TiledAttention.apply(q, k, v, tiles, scaling, softcap, shares)  # type: ignore[no-untyped-call]
    return out[None], None


ATTENTIONS["rollbook_packed"] = packed_attention


class _TiledAttention(torch.autograd.Function):
    """Keeps queries, keys and values for the backward pass; probabilities where they are small, otherwise they are
    computed again, tile by tile."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tiles: tuple[Tile, ...],
        scaling: float,
        softcap: float | None,
        shares_keys: bool,
    ) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        num_tokens, num_heads, width = query.shape
        out = query.new_empty(num_tokens * num_heads + 1, width)
        num_probs = sum(tile.query_rows.numel() * tile.keys for tile in tiles)
        keeps = any(ctx.needs_input_grad) and softcap is None and num_probs <= KEEP_PROBS * query.numel()
        kept = []
        for tile in tiles:
            q, k, v = _gather(tile, query, key, value)
            probs, _ = _probabilities(tile, q, k, scaling, softcap, num_heads // key.shape[1])
            out.index_copy_(0, tile.out_rows, torch.bmm(probs, v).view(-1, width))
            if keeps:
                kept.append(probs)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.plan = (tiles, scaling, softcap, shares_keys)
        return out[:-1].view(num_tokens, num_heads, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *kept = ctx.saved_tensors
        tiles, scaling, softcap, shares_keys = ctx.plan
        grad_out = grads[0].contiguous()
        num_tokens, num_heads, width = query.shape
        # Keys that several blocks read are summed in float32: bfloat16 would lose the small terms.
        sum_dtype = torch.promote_types(query.dtype, torch.float32) if shares_keys else query.dtype
        grad_query = query.new_empty(num_tokens * num_heads + 1, width)
        grad_key = torch.zeros_like(key, dtype=sum_dtype).view(-1, width)
        grad_value = torch.zeros_like(value, dtype=sum_dtype).view(-1, width)
        for i, tile in enumerate(tiles):
            q, k, v = _gather(tile, query, key, value)
            probs, capped = (
                (kept[i], None)
                if kept
                else _probabilities(tile, q, k, scaling, softcap, num_heads // key.shape[1])
            )
            grad = grad_out.view(-1, width).index_select(0, tile.query_rows)
            if tile.padding is not None:
                grad.index_fill_(0, tile.padding, 0.0)
            grad = grad.view(q.shape)
            grad_probs = torch.bmm(grad, v.transpose(1, 2))
            grad_scores = torch._softmax_backward_data(grad_probs, probs, -1, probs.dtype)
            if capped is not None:
                grad_scores = grad_scores * (1 - capped.square()).view(grad_scores.shape)
            for total, part in (
                (grad_key, torch.bmm(grad_scores.transpose(1, 2), q)),
                (grad_value, torch.bmm(probs.transpose(1, 2), grad)),
            ):
                total.index_add_(0, tile.key_rows, part.view(-1, width).to(sum_dtype))
            grad_query.index_copy_(0, tile.out_rows, torch.bmm(grad_scores, k).view(-1, width))
        return (
            grad_query[:-1].mul_(scaling).view(query.shape),
            grad_key.mul_(scaling).to(key.dtype).view(key.shape),
            grad_value.to(value.dtype).view(value.shape),
            None,
            None,
            None,
            None,
        )


def _gather(tile: Tile, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[n * Hkv, group * rows, D] queries and [n * Hkv, keys, D] keys and values; a group shares a KV head."""
    width = query.shape[-1]
    batch = tile.num_blocks * key.shape[1]
    q = query.view(-1, width).index_select(0, tile.query_rows).view(batch, -1, width)
    k = key.view(-1, width).index_select(0, tile.key_rows).view(batch, tile.keys, width)
    v = value.view(-1, width).index_select(0, tile.key_rows).view(batch, tile.keys, width)
    return q, k, v


def _probabilities(
    tile: Tile, q: Tensor, k: Tensor, scaling: float, softcap: float | None, group: int
) -> tuple[Tensor, Tensor | None]:
    """[n * Hkv, group * rows, keys] probabilities, and tanh(score / softcap) where there is a softcap."""
    scores = torch.bmm(q, k.transpose(1, 2))
    shape = scores.shape
    scores = scores.view(tile.num_blocks, -1, group, tile.rows, tile.keys)
    capped = None
    if softcap is not None:
        capped = torch.tanh(scores * (scaling / softcap)).view(shape)
        scores, scaling = capped.view(scores.shape), softcap
    # One pass from the products to biased scores in float32, which is also what the softmax runs on fastest.
    wide = torch.add(tile.bias, scores, alpha=scaling)
    return torch.softmax(wide, -1).to(q.dtype).view(shape), capped


def _blocks(layout: PackedLayout, window: int | None) -> list[_Block]:
    blocks = []
    for segment in layout.segments:
        own = np.arange(segment.start, segment.start + segment.num_tokens)
        prefix = own[:0]
        if segment.prefix is not None:
            shared = layout.segments[segment.prefix]
            prefix = np.arange(shared.start, shared.start + shared.num_tokens)
        visible = np.concatenate([prefix, own])
        for first in range(0, len(own), BLOCK_TOKENS):
            last = min(first + BLOCK_TOKENS, len(own))
            oldest = 0 if window is None else max(0, len(prefix) + first - window + 1)
            blocks.append(_Block(own[first:last], visible[oldest : len(prefix) + last]))
    return blocks


def _build_tiles(
    layout: PackedLayout, num_heads: int, num_kv_heads: int, window: int | None, dtype: torch.dtype
) -> tuple[Tile, ...]:
    """Blocks of similar size together, until a tile is full or would be mostly padding."""
    blocks = sorted(_blocks(layout, window), key=lambda b: (-len(b.queries), -len(b.keys)))
    tiles: list[Tile] = []
    members: list[_Block] = []
    useful = rows = keys = 0
    for block in blocks:
        size = len(block.queries) * len(block.keys)
        new_rows, new_keys = max(rows, len(block.queries)), max(keys, len(block.keys))
        padded = (len(members) + 1) * new_rows * new_keys
        if members and (padded * num_heads > TILE_CELLS or padded > TILE_WASTE * (useful + size)):
            tiles.append(_tile(members, layout, num_heads, num_kv_heads, window, dtype))
            members, useful = [], 0
            new_rows, new_keys = len(block.queries), len(block.keys)
        members.append(block)
        useful, rows, keys = useful + size, new_rows, new_keys
    if members:
        tiles.append(_tile(members, layout, num_heads, num_kv_heads, window, dtype))
    return tuple(tiles)


def _tile(
    blocks: Sequence[_Block],
    layout: PackedLayout,
    num_heads: int,
    num_kv_heads: int,
    window: int | None,
    dtype: torch.dtype,
) -> Tile:
    n = len(blocks)
    rows, keys = max(len(b.queries) for b in blocks), max(len(b.keys) for b in blocks)
    queries = np.full((n, rows), -1)
    visible = np.full((n, keys), -1)
    # Aligned at the end, so that query i sees key j when j <= i + keys - rows, in every block alike.
    for i, block in enumerate(blocks):
        queries[i, rows - len(block.queries) :] = block.queries
        visible[i, keys - len(block.keys) :] = block.keys
    distance = np.arange(rows)[:, None] + (keys - rows) - np.arange(keys)[None, :]
    sees = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    sees = sees[None]
    if (visible < 0).any():
        sees = sees & (visible >= 0)[:, None, :]
    bias = np.where(sees, 0.0, MASKED).astype(np.float32)[:, None, None]
    is_padding = _by_head(queries, num_heads) < 0
    query_rows = np.where(is_padding, 0, _by_head(queries, num_heads))
    out_rows = np.where(is_padding, layout.num_tokens * num_heads, query_rows)
    key_rows = np.maximum(_by_head(visible, num_kv_heads), 0)

    def to_device(x: NDArray[Any]) -> Tensor:
        return torch.from_numpy(x).to(layout.device)

    return Tile(
        num_blocks=n,
        rows=rows,
        keys=keys,
        query_rows=to_device(query_rows),
        out_rows=to_device(out_rows),
        key_rows=to_device(key_rows),
        padding=to_device(np.flatnonzero(is_padding)) if is_padding.any() else None,
        bias=to_device(bias).to(torch.promote_types(dtype, torch.float32)),
    )


def _by_head(tokens: NDArray[np.int64], num_heads: int) -> NDArray[np.int64]:
    """[n * H * rows] rows of a [T * H] table, from [n, rows] tokens; negative stays negative."""
    by_head = tokens[:, None, :] * num_heads + np.arange(num_heads)[None, :, None]
    return np.where(tokens[:, None, :] < 0, -1, by_head).reshape(-1)


def _varlen_index(layout: PackedLayout) -> tuple[Tensor, Tensor, Tensor | None, int, int]:
    lengths = [s.num_tokens for s in layout.segments]
    own = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=layout.device)
    if not layout.shares_keys:
        return own, own, None, max(lengths), max(lengths)
    index: list[NDArray[np.int64]] = []
    for segment in layout.segments:
        if segment.prefix is not None:
            shared = layout.segments[segment.prefix]
            index.append(np.arange(shared.start, shared.start + shared.num_tokens))
        index.append(np.arange(segment.start, segment.start + segment.num_tokens))
    prefixes = [0 if s.prefix is None else layout.segments[s.prefix].num_tokens for s in layout.segments]
    visible = [a + b for a, b in zip(lengths, prefixes)]
    seen = torch.tensor(np.cumsum([0, *visible]), dtype=torch.int32, device=layout.device)
    gather = torch.from_numpy(np.concatenate(index)).to(layout.device)
    return own, seen, gather, max(lengths), max(visible)


@cache
def _parameters_of(function: Callable[..., Any]) -> frozenset[str]:
    """Asked once: a layer's attention is launched in less time than a signature takes."""
    return frozenset(inspect.signature(function).parameters)


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float, window: int | None
) -> Tensor:
    """[T, H, D] by torch's variable-length flash attention; keys of a shared prefix are read once a member."""
    from torch.nn.attention.varlen import varlen_attn

    own, seen, gather, max_own, max_seen = layout.varlen()
    if gather is not None:
        key, value = key.index_select(0, gather), value.index_select(0, gather)
    left = -1 if window is None else window - 1
    grouped = query.shape[1] != key.shape[1]
    keywords: dict[str, Any] = {}
    if "enable_gqa" in _parameters_of(varlen_attn):  # torch 2.12 and later
        keywords["enable_gqa"] = grouped
    elif grouped:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = varlen_attn(
        query,
        key,
        value,
        own,
        seen,
        max_own,
        max_seen,
        scale=scaling,
        window_size=(left, 0),
        **keywords,
    )
    assert isinstance(out, Tensor)
    return out
