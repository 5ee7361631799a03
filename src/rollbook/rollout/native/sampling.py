"""One token per row from logits, and the logprob a trainer will recompute for it.

The logprob is of the temperature-scaled distribution over the whole vocabulary, in float32, whatever top-k, top-p or
min-p then leave out. A temperature of 0 takes the largest logit and reports its logprob at temperature 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_LOGITS_AT_ONCE = 16_000_000
"""Elements converted to float32 at a time, so that a large vocabulary does not need several copies of all rows."""

_BLOCK = 128
"""Tokens summed into one block before the search for the drawn token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """How each row is drawn. All arrays are [B]."""

    temperature: NDArray[np.float32]
    top_p: NDArray[np.float32]
    top_k: NDArray[np.int64]
    min_p: NDArray[np.float32]
    uniform: NDArray[np.float64]
    """In [0, 1): the row's place in the cumulative distribution over token ids."""


def sample(logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Draw one token per row.

    Args:
        logits: [B, V] of any float dtype, on any device.
    Returns:
        token ids [B] int64 and logprobs [B] float32, on the logits' device. A row whose logits are not finite gets
        a logprob that is not finite.
    """
    num_rows, num_tokens = logits.shape
    at_once = max(1, MAX_LOGITS_AT_ONCE // num_tokens)
    if num_rows <= at_once:
        return _sample(logits, draws, slice(0, num_rows))
    parts = [
        _sample(logits[first : first + at_once], draws, slice(first, first + at_once))
        for first in range(0, num_rows, at_once)
    ]
    return torch.cat([tokens for tokens, _ in parts]), torch.cat([logprobs for _, logprobs in parts])


def _sample(logits: Tensor, draws: Draws, rows: slice) -> tuple[Tensor, Tensor]:
    device = logits.device
    temperature = draws.temperature[rows]
    is_greedy = temperature == 0
    divisor = np.where(is_greedy, np.float32(1), temperature)
    scaled = logits.float()
    if (divisor != 1).any():
        scaled = scaled / torch.from_numpy(divisor).to(device)[:, None]
    peak = scaled.amax(-1, keepdim=True)
    weights = torch.exp(scaled - peak)
    uniform = torch.from_numpy(draws.uniform[rows]).to(device)
    tokens, total = _draw(weights, uniform)
    needs_filter = _needs_filter(draws, rows) & ~is_greedy
    if needs_filter.any():
        chosen = torch.from_numpy(np.flatnonzero(needs_filter)).to(device)
        kept = _filter(weights[chosen], draws, np.flatnonzero(needs_filter) + rows.start)
        tokens[chosen] = _draw(kept, uniform[chosen])[0]
    if is_greedy.any():
        tokens = torch.where(torch.from_numpy(is_greedy).to(device), scaled.argmax(-1), tokens)
    picked = scaled.gather(1, tokens[:, None])[:, 0] - peak[:, 0]
    return tokens, (picked.double() - total.log()).float()


def _draw(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The first token whose cumulative weight exceeds uniform * total: ([B] int64, [B] float64 totals).

    Block sums are searched before the block, so that only B x (V / 128 + 128) elements are accumulated in float64.
    """
    num_tokens = weights.shape[1]
    if num_tokens <= 4 * _BLOCK:
        cumulative = weights.cumsum(-1, dtype=torch.float64)
        return _first_above(cumulative, uniform * cumulative[:, -1]), cumulative[:, -1]
    num_whole = num_tokens // _BLOCK
    whole = weights[:, : num_whole * _BLOCK].reshape(-1, num_whole, _BLOCK)
    sums = [whole.sum(-1), weights[:, num_whole * _BLOCK :].sum(-1, keepdim=True)]
    cumulative = torch.cat(sums, 1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = uniform * total
    block = _first_above(cumulative, target)
    before = cumulative.gather(1, (block - 1).clamp_(min=0)[:, None])[:, 0].where(block > 0, 0.0)
    columns = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    inside = weights.gather(1, columns.clamp(max=num_tokens - 1)).where(columns < num_tokens, 0.0)
    offset = _first_above(inside.cumsum(-1, dtype=torch.float64), target - before)
    return block * _BLOCK + offset, total


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[B] first column above the target; the last column with weight where rounding leaves none above."""
    above = (cumulative <= target[:, None]).sum(-1)
    last = (cumulative < cumulative[:, -1:]).sum(-1)
    return torch.minimum(above, last)


def _needs_filter(draws: Draws, rows: slice) -> NDArray[np.bool_]:
    return (draws.top_k[rows] > 0) | (draws.top_p[rows] < 1) | (draws.min_p[rows] > 0)


def _filter(weights: Tensor, draws: Draws, rows: NDArray[np.int64]) -> Tensor:
    """[b, V] weights with the tokens zeroed that top-k, then top-p of what is left, or min-p exclude."""
    device, num_tokens = weights.device, weights.shape[1]
    top_k = np.where(draws.top_k[rows] > 0, draws.top_k[rows], num_tokens)
    most = int(min(top_k.max(), num_tokens))
    if most < num_tokens:
        ordered, order = weights.topk(most, dim=-1)
    else:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(most, device=device)[None, :]
    is_kept = rank < torch.from_numpy(top_k).to(device)[:, None]
    ordered = ordered.double().where(is_kept, 0.0)
    cumulative = ordered.cumsum(-1)
    top_p = torch.from_numpy(draws.top_p[rows].astype(np.float64)).to(device)[:, None]
    # A token stays while what is before it has not reached top-p, so the first always stays.
    is_kept &= (cumulative - ordered) < top_p * cumulative[:, -1:]
    min_p = torch.from_numpy(draws.min_p[rows].astype(np.float64)).to(device)[:, None]
    is_kept &= ordered >= min_p * ordered[:, :1]
    mask = torch.zeros(weights.shape, dtype=torch.bool, device=device).scatter_(1, order, is_kept)
    return weights.where(mask, 0.0)
