"""Attention over tiles against the plain definition with one mask, for any layout."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import ConfigError
from rollbook.modeling import attention
from rollbook.modeling.attention import PackedLayout, Segment, packed_attention, packed_layout


def _naive(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layout: PackedLayout,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("ihd,jhd->hij", query, key) * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    sees = torch.zeros(layout.num_tokens, layout.num_tokens, dtype=torch.bool)
    for segment in layout.segments:
        visible = []
        if segment.prefix is not None:
            prompt = layout.segments[segment.prefix]
            visible += range(prompt.start, prompt.start + prompt.num_tokens)
        for token in range(segment.start, segment.start + segment.num_tokens):
            visible.append(token)
            sees[token, visible if window is None else visible[-window:]] = True
    probs = torch.softmax(scores.masked_fill(~sees, -math.inf), -1)
    return torch.einsum("hij,jhd->ihd", probs, value)


@st.composite
def layouts(draw: st.DrawFn) -> PackedLayout:
    segments: list[Segment] = []
    start = 0
    for _ in range(draw(st.integers(1, 4))):
        prompt = draw(st.integers(1, 9))
        shares = draw(st.booleans())
        prefix = len(segments) if shares else None
        segments.append(Segment(start, prompt))
        start += prompt
        for _ in range(draw(st.integers(0, 4))):
            own = draw(st.integers(1, 12))
            segments.append(Segment(start, own, prefix))
            start += own
    return PackedLayout(segments, start, torch.device("cpu"))


@settings(max_examples=60, deadline=None)
@given(
    layout=layouts(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]),
    window=st.sampled_from([None, 1, 3, 7]),
    softcap=st.sampled_from([None, 1.5]),
    block_tokens=st.sampled_from([1, 4, 128]),
    tile_cells=st.sampled_from([1, 300, 200_000]),
)
def test_tiles_give_the_plain_definition_forward_and_backward(
    layout: PackedLayout,
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    block_tokens: int,
    tile_cells: int,
) -> None:
    generator = torch.Generator().manual_seed(layout.num_tokens)
    query, key, value = (
        torch.randn(layout.num_tokens, h, 6, generator=generator, dtype=torch.float64, requires_grad=True)
        for h in (heads[0], heads[1], heads[1])
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "BLOCK_TOKENS", block_tokens)
        patch.setattr(attention, "TILE_CELLS", tile_cells)
        out, _ = packed_attention(
            None,
            *(x.transpose(0, 1)[None] for x in (query, key, value)),
            None,
            scaling=0.4,
            packed=layout,
            sliding_window=window,
            softcap=softcap,
        )
    expected = _naive(query, key, value, layout, window, softcap)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-12)
    weights = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    ours = torch.autograd.grad(out[0], (query, key, value), weights)
    theirs = torch.autograd.grad(expected, (query, key, value), weights)
    for mine, plain in zip(ours, theirs):
        torch.testing.assert_close(mine, plain, rtol=0, atol=1e-11)


def test_a_sequence_computes_bit_for_bit_the_same_beside_equally_long_ones() -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 20, 8) for _ in range(3))
    both, _ = packed_attention(None, query, key, value, None, scaling=1.0, packed=packed_layout([0, 10, 20]))
    alone, _ = packed_attention(
        None,
        query[:, :, 10:],
        key[:, :, 10:],
        value[:, :, 10:],
        None,
        scaling=1.0,
        packed=packed_layout([0, 10]),
    )
    assert torch.equal(both[:, 10:], alone)


def test_sinks_dropout_and_a_lost_layout_are_refused() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ConfigError, match="attention sinks"):
        packed_attention(None, x, x, x, None, scaling=1.0, packed=packed_layout([0, 2]), s_aux=torch.zeros(1))
    with pytest.raises(ConfigError, match=r"dropout 0\.1"):
        packed_attention(None, x, x, x, None, scaling=1.0, packed=packed_layout([0, 2]), dropout=0.1)
    with pytest.raises(ConfigError, match="packed layout"):
        packed_attention(None, x, x, x, None, scaling=1.0)
