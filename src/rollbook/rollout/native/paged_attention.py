"""Keys and values in pages, and attention that reads each page once.

Decoding treats *pages as the batch*: the queries of a page's owner (the G query heads of a key head stand as G
query positions) meet the page in one batched product over all pages in use. Each page yields an unnormalized output
and weight, which are added up per sequence. Nothing is copied, padded to the longest row, or read twice.

With m the largest score of a row over all its pages, out = sum_pages exp(s - m) V / sum_pages exp(s - m): the same
softmax, summed page by page. On CUDA one Triton kernel does it (`paged_triton.py`).

The function stands in `modeling.attention.ATTENTIONS` under `ATTENTION_NAME`: the built-in decoder and every
transformers model whose attention goes through AttentionInterface can use it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollbook.errors import EngineError
from rollbook.kernels import runs_triton
from rollbook.modeling.attention import ATTENTIONS
from rollbook.rollout.native.pages import CopyPages, PageOperation, merged

ATTENTION_NAME = "rollbook_paged"

_SUM, _MAX = 0, 2  # modes of torch.embedding_bag
TINY = 1e-30
COPY_BYTES = 64 << 20
"""Most that is held of pages while they are copied."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


class KVPool:
    """The keys and values of `num_pages` pages for every layer, and one scratch page after them for padding rows.

    keys[layer] is [num_pages + 1, num_kv_heads, page_tokens, key_dim]; values[layer] likewise.
    """

    def __init__(
        self,
        layers: Items[LayerShape],
        *,
        num_pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_pages = num_pages
        self.page_tokens = page_tokens
        self.scratch_page = num_pages
        # Layers of one shape share a tensor, so that one copy moves a page of all of them.
        planes: dict[tuple[int, int], list[tuple[int, bool]]] = {}
        for idx, layer in enumerate(layers):
            planes.setdefault((layer.num_kv_heads, layer.key_dim), []).append((idx, True))
            planes.setdefault((layer.num_kv_heads, layer.value_dim), []).append((idx, False))
        self._planes: list[Tensor] = []
        keys: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for (num_heads, dim), members in planes.items():
            shape = (len(members), num_pages + 1, num_heads, page_tokens, dim)
            plane = _lazy_zeros(shape, dtype, device)
            self._planes.append(plane)
            for row, (idx, is_key) in enumerate(members):
                (keys if is_key else values)[idx] = plane[row]
        self.keys = [keys[idx] for idx in range(len(layers))]
        self.values = [values[idx] for idx in range(len(layers))]

    @property
    def num_bytes(self) -> int:
        return sum(plane.numel() * plane.element_size() for plane in self._planes)

    def tensors(self) -> list[Tensor]:
        return list(self._planes)

    def carry_out(self, operations: Items[PageOperation]) -> None:
        """Apply page operations in order."""
        device = self._planes[0].device
        for operation in merged(operations):
            if isinstance(operation, CopyPages):
                sources = torch.tensor(operation.sources, device=device)
                targets = torch.tensor(operation.targets, device=device)
                for plane in self._planes:
                    page_bytes = plane[:, 0].numel() * plane.element_size()
                    # In parts, as many copies may be one operation: no page of one is both source and target.
                    num_pages = max(1, COPY_BYTES // page_bytes)
                    for read, written in zip(
                        torch.split(sources, num_pages), torch.split(targets, num_pages)
                    ):
                        plane.index_copy_(1, written, plane.index_select(1, read))
            else:
                pages = torch.tensor(operation.pages, device=device)
                for plane in self._planes:
                    plane.index_fill_(1, pages, 0)


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros become resident only where they are written: a roomy pool costs what is used of it.
    width = torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * width), np.uint8)).view(dtype)


@dataclass(slots=True)
class PageBatch:
    """Rows that each attend to a list of pages."""

    num_rows: int
    owner: Tensor
    """[N] row whose queries meet page i of the batch."""
    start: Tensor
    """[N] position of the page's first token in the row's sequence."""
    position: Tensor
    """[num_rows] position of the row's token; it sees itself and what is before."""
    lists: Tensor
    """[M] pages of row 0, then of row 1, ...; as indices into the batch."""
    list_starts: Tensor
    """[num_rows]."""
    gather: Tensor | None = None
    """[N] pool page of each page of the batch; None when the batch is the first N pages of the pool, in place."""
    has_padding: bool = False
    """Some rows list no page; what attention gives them is not read, but must be finite."""
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, num_kv_heads: int, page_tokens: int, window: int, dtype: torch.dtype) -> Tensor:
        """[N * num_kv_heads, 1, page_tokens]: 0 where the row sees the token, else -inf. `window` 0: unlimited."""
        held = self._masks.get((num_kv_heads, window))
        if held is None:
            last = (self.position[self.owner] - self.start)[:, None]
            offsets = torch.arange(page_tokens, device=last.device)[None, :]
            is_hidden = offsets > last
            if window:
                is_hidden |= offsets <= last - window
            held = torch.zeros(is_hidden.shape, dtype=dtype, device=last.device)
            held.masked_fill_(is_hidden, -torch.inf)
            held = held.repeat_interleave(num_kv_heads, 0)[:, None, :]
            self._masks[num_kv_heads, window] = held
        return held


@dataclass(frozen=True, slots=True)
class SpanRows:
    """Rows of one sequence's prefill."""

    first_row: int
    num_rows: int
    start: int
    pages: Tensor | None
    """[n] pages that hold positions 0 to start + num_rows; None when start is 0 and nothing before must be read."""
    _seen: dict[int, Tensor] = field(default_factory=dict)

    def seen(self, window: int, device: torch.device) -> Tensor:
        """[num_rows, start + num_rows] which positions each row attends to; made once for all layers of a window."""
        held = self._seen.get(window)
        if held is None:
            length = self.start + self.num_rows
            row_position = torch.arange(self.start, length, device=device)[:, None]
            position = torch.arange(length, device=device)[None, :]
            held = position <= row_position
            if window:
                held &= position > row_position - window
            self._seen[window] = held
        return held


@dataclass(slots=True)
class StepTensors:
    """What attention needs to know about the step that runs."""

    pool: KVPool
    write_index: Tensor
    """[T] page * page_tokens + offset of each row's token."""
    batches: list[PageBatch]
    """Rows that attend page by page, from row 0 on."""
    spans: list[SpanRows]
    """Rows that attend as whole prefill spans, after them."""
    _write_rows: dict[int, Tensor] = field(default_factory=dict)

    def write_rows(self, num_heads: int) -> Tensor:
        """[T * num_heads] rows of a layer's pool seen as [rows, dim]."""
        held = self._write_rows.get(num_heads)
        if held is None:
            size = self.pool.page_tokens
            page, offset = self.write_index // size, self.write_index % size
            heads = torch.arange(num_heads, device=page.device)
            held = ((page[:, None] * num_heads + heads) * size + offset[:, None]).reshape(-1)
            self._write_rows[num_heads] = held
        return held


LayerShapes = list[LayerShape]


class _Current(threading.local):
    step: StepTensors | dict[int, LayerShape] | None = None


_current = _Current()


class running_step:
    """Within this context, attention of this thread works on `step`.

    Given a dict, each row attends to itself alone and each layer's shape is recorded there: the engine's first look
    at a model, before there is a pool.
    """

    def __init__(self, step: StepTensors | dict[int, LayerShape]) -> None:
        self.step = step

    def __enter__(self) -> None:
        _current.step = self.step

    def __exit__(self, *_: object) -> None:
        _current.step = None


def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer for the rows of the running step.

    Args:
        query: [1, H, T, D]. key, value: [1, Hkv, T, D], of the same rows; they are written to the pool first.
        scaling: of the scores; D ** -0.5 when None.
        sliding_window: a row sees this many tokens, itself included.
        softcap: scores become softcap * tanh(scores / softcap).
        s_aux: [H] an extra score per head that takes weight and gives no value (attention sinks).
    Returns:
        [1, T, H, Dv].
    """
    step = _current.step
    if step is None:
        raise EngineError(
            "paged attention ran outside a step of the native engine",
            "call the engine, not its model; a model of your own needs another attn_implementation",
        )
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    queries, keys, values = (states[0].transpose(0, 1) for states in (query, key, value))
    num_rows, num_heads, _ = queries.shape
    num_kv_heads, value_dim = values.shape[1], values.shape[2]
    if isinstance(step, dict):
        step[layer] = LayerShape(num_kv_heads, keys.shape[2], value_dim)
        return values.repeat_interleave(num_heads // num_kv_heads, 1)[None], None
    key_pool, value_pool = step.pool.keys[layer], step.pool.values[layer]
    rows = step.write_rows(num_kv_heads)
    for pool, states in ((key_pool, keys), (value_pool, values)):
        pool.view(-1, pool.shape[-1]).index_copy_(0, rows, states.reshape(-1, states.shape[-1]))
    scale = queries.shape[2] ** -0.5 if scaling is None else scaling
    parts: list[Tensor] = []
    first = 0
    for batch in step.batches:
        part = queries[first : first + batch.num_rows]
        parts.append(
            attend_pages(batch, part, key_pool, value_pool, scale, sliding_window or 0, softcap, s_aux)
        )
        first += batch.num_rows
    for span in step.spans:
        parts.append(
            attend_span(
                span, queries, keys, values, key_pool, value_pool, scale, sliding_window or 0, softcap, s_aux
            )
        )
        first += span.num_rows
    if first < num_rows:
        parts.append(queries.new_zeros(num_rows - first, num_heads, value_dim))  # padding rows
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out[None], None


ATTENTIONS[ATTENTION_NAME] = paged_attention


def attend_pages(
    batch: PageBatch,
    queries: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, H, D] queries -> [B, H, Dv]."""
    if runs_triton(queries.device):
        from rollbook.rollout.native import paged_triton

        return paged_triton.attend(batch, queries, key_pool, value_pool, scale, window, softcap, sinks)
    num_rows, num_heads, dim = queries.shape
    num_batch = len(batch.owner)
    if batch.gather is None:
        key_pages, value_pages = key_pool[:num_batch], value_pool[:num_batch]
    else:
        key_pages, value_pages = key_pool[batch.gather], value_pool[batch.gather]
    _, num_kv_heads, page_tokens, value_dim = value_pages.shape
    per_kv = num_heads // num_kv_heads
    flat = num_batch * num_kv_heads
    mask = batch.mask(num_kv_heads, page_tokens, window, queries.dtype)

    owned = queries.reshape(num_rows, -1).index_select(0, batch.owner).view(flat, per_kv, dim)
    transposed_keys = key_pages.reshape(flat, page_tokens, dim).transpose(1, 2)
    if softcap is None:
        scores = torch.baddbmm(mask, owned, transposed_keys, alpha=scale)
    else:
        scores = torch.bmm(owned, transposed_keys).mul_(scale / softcap).tanh_().mul_(softcap)
        scores = scores.add_(mask)
    scores = scores.float().view(num_batch, num_heads, page_tokens)

    page_max = scores.amax(-1)
    row_max = torch.embedding_bag(page_max, batch.lists, batch.list_starts, False, _MAX)[0]
    if sinks is not None:
        row_max = torch.maximum(row_max, sinks.float())
    weights = scores.sub_(row_max.index_select(0, batch.owner)[:, :, None]).exp_()
    page_weight = weights.sum(-1)
    page_out = torch.bmm(
        weights.to(queries.dtype).view(flat, per_kv, page_tokens), value_pages.reshape(flat, page_tokens, -1)
    )
    out = torch.embedding_bag(page_out.view(num_batch, -1), batch.lists, batch.list_starts, False, _SUM)[0]
    total = torch.embedding_bag(page_weight, batch.lists, batch.list_starts, False, _SUM)[0]
    if sinks is not None:
        total = total + torch.exp(sinks.float() - row_max)
    if batch.has_padding:
        total = total.clamp_min(TINY)  # a real row's is at least the 1 of its largest score
    return (out.view(num_rows, num_heads, value_dim) / total[:, :, None]).to(queries.dtype)


def attend_span(
    span: SpanRows,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    key_pool: Tensor,
    value_pool: Tensor,
    scale: float,
    window: int,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[n, H, Dv] for the rows of one prefill span: causal, over what the pool holds before it and itself."""
    rows = slice(span.first_row, span.first_row + span.num_rows)
    query = queries[rows].transpose(0, 1)
    length = span.start + span.num_rows
    if span.pages is None:
        key, value = keys[rows].transpose(0, 1), values[rows].transpose(0, 1)
    else:
        key, value = (
            pool[span.pages].transpose(0, 1).flatten(1, 2)[:, :length] for pool in (key_pool, value_pool)
        )
    is_plain = softcap is None and sinks is None
    if is_plain and span.pages is None and (window == 0 or length <= window):
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], is_causal=True, scale=scale, enable_gqa=True
        )[0]
        return out.transpose(0, 1)
    is_seen = span.seen(window, query.device)
    if is_plain:
        out = F.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=is_seen, scale=scale, enable_gqa=True
        )[0]
        return out.transpose(0, 1)
    num_kv_heads = key.shape[0]
    grouped = query.reshape(num_kv_heads, -1, *query.shape[1:])
    scores = (grouped @ key[:, None].transpose(2, 3)).float() * scale
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        extra = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, extra], -1)
    weights = scores.softmax(-1)[..., :length].to(query.dtype)
    out = weights @ value[:, None]
    return out.flatten(0, 1).transpose(0, 1)
