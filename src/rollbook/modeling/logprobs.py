"""Logprobs and entropies from hidden states, in chunks, so that logits never exist for all tokens at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollbook.errors import ConfigError

CACHE_LOGITS = 1 << 18
"""Logits of one softmax on a CPU: 1 MiB in float32."""


@dataclass(frozen=True, slots=True)
class LmHead:
    """What turns a hidden state into logits: softcap * tanh(scale * (h W' + bias) / softcap)."""

    weight: Tensor
    """[V, hidden]."""
    bias: Tensor | None = None
    """[V]."""
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """[T, V] in the dtype of `hidden` [T, hidden]."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def token_logprobs(
    hidden: Tensor,
    head: LmHead,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
    keep_bytes: int = 0,
    with_entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """ln p(target | hidden) under logits / temperature, and the entropy of that distribution.

    Args:
        hidden: [S, hidden]. The state that predicts each target: that of the token before it.
        head: weights of the output layer; gradients reach `hidden`, `head.weight` and `head.bias`.
        targets: [S] int64 token ids.
        temperature: divides the logits (never the logprobs), as the engine's sampler does.
        chunk_tokens: rows whose logits exist at a time, forward and backward.
        keep_bytes: logits of at most this many bytes are kept for the backward pass; more are computed again.
        with_entropy: also give entropies, with a gradient.
    Returns:
        [S] logprobs and [S] entropies in nats (or None), float32 (float64 for a float64 model).
    Raises:
        ConfigError: temperature is not positive: a greedy policy has no logprobs to train on.

    >>> head = LmHead(torch.tensor([[2.0], [0.0]]))
    >>> logprobs, _ = token_logprobs(torch.ones(1, 1), head, torch.tensor([0]), temperature=0.5)
    >>> round(logprobs.item(), 5)  # log softmax of [4, 0]
    -0.01815
    """
    if not temperature > 0:
        raise ConfigError(
            f"logprobs at temperature {temperature}",
            "train on samples of a positive temperature; 0 (greedy) is for evaluation",
        )
    logprobs, entropies = _TokenLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden,
        head.weight,
        head.bias,
        targets,
        (head.softcap, head.scale, temperature, chunk_tokens, keep_bytes, with_entropy),
    )
    return logprobs, (entropies if with_entropy else None)


class _TokenLogprobs(torch.autograd.Function):
    """Logits of one chunk at a time; all rows are one chunk where their logits may be kept."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        options: tuple[Any, ...],
    ) -> tuple[Tensor, Tensor]:
        softcap, scale, temperature, chunk_tokens, keep_bytes, with_entropy = options
        head = LmHead(weight, bias, softcap, scale)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        num_rows = hidden.shape[0]
        needs_grad = any(ctx.needs_input_grad)
        keeps = needs_grad and num_rows * weight.shape[0] * weight.element_size() <= keep_bytes
        logprobs = torch.empty(num_rows, dtype=wide, device=hidden.device)
        entropies = torch.empty(num_rows if with_entropy else 0, dtype=wide, device=hidden.device)
        kept = None
        for chunk in _slices(num_rows, num_rows if keeps else chunk_tokens):
            logits = head.logits(hidden[chunk])
            for rows in _cache_slices(logits):
                log_probs = _log_softmax(logits[rows], temperature, wide)
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                logprobs[at] = log_probs.gather(1, targets[at, None]).squeeze(1)
                if with_entropy:
                    entropies[at] = -torch.linalg.vecdot(log_probs.exp(), log_probs)
            if keeps:
                kept = logits
        ctx.save_for_backward(hidden, weight, bias, targets, logprobs, entropies)
        ctx.options, ctx.kept = options, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, weight, bias, targets, logprobs, entropies = ctx.saved_tensors
        softcap, scale, temperature, chunk_tokens, _, with_entropy = ctx.options
        if grad_logprobs is None:
            grad_logprobs = torch.zeros_like(logprobs)
        if not with_entropy:
            grad_entropies = None
        head = LmHead(weight, bias, softcap, scale)
        num_rows = hidden.shape[0]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = grad_bias = None
        for chunk in _slices(num_rows, chunk_tokens if ctx.kept is None else num_rows):
            logits = head.logits(hidden[chunk]) if ctx.kept is None else ctx.kept
            for rows in _cache_slices(logits):
                at = slice(chunk.start + rows.start, chunk.start + rows.stop)
                grad = _grad_logits(
                    logits[rows],
                    targets[at],
                    grad_logprobs[at],
                    None if grad_entropies is None else (grad_entropies[at], entropies[at]),
                    temperature,
                )
                if softcap is not None:
                    grad *= 1 - (logits[rows] / softcap).square()
                logits[rows] = grad  # the logits are not needed any more
            if scale != 1.0:
                logits *= scale
            torch.mm(logits, weight, out=grad_hidden[chunk])
            part = logits.t() @ hidden[chunk]
            if chunk.stop - chunk.start < num_rows:
                # Summed over many chunks: bfloat16 would lose the small terms.
                part = part.to(logprobs.dtype)
            grad_weight = part if grad_weight is None else grad_weight.add_(part)
            if bias is not None:
                part = logits.sum(0)
                grad_bias = part if grad_bias is None else grad_bias + part
        if grad_weight is None:
            grad_weight = torch.zeros_like(weight)
        ctx.kept = None
        return grad_hidden, grad_weight.to(weight.dtype), grad_bias, None, None


def _slices(num_rows: int, step: int) -> list[slice]:
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, max(step, 1))]


def _cache_slices(logits: Tensor) -> list[slice]:
    """Rows whose float32 logits stay in a core's cache; on other devices all of them."""
    num_rows, vocab_size = logits.shape
    return _slices(num_rows, max(1, CACHE_LOGITS // vocab_size) if logits.device.type == "cpu" else num_rows)


def _log_softmax(logits: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    if temperature != 1.0:
        logits = logits.to(dtype, copy=True).div_(temperature)
    return torch.log_softmax(logits, -1, dtype=dtype)


def _grad_logits(
    logits: Tensor,
    targets: Tensor,
    grad_logprobs: Tensor,
    entropy: tuple[Tensor, Tensor] | None,
    temperature: float,
) -> Tensor:
    """[c, V] gradient of the logits, in their dtype.

    d logprob / d logit_j = (1[j = target] - p_j) / T; d entropy / d logit_j = -p_j (ln p_j + entropy) / T.
    """
    wide = grad_logprobs.dtype
    if entropy is None and temperature == 1.0:
        probs = torch.softmax(logits, -1)
    elif entropy is None:
        probs = torch.softmax(logits.to(wide, copy=True).div_(temperature), -1).to(logits.dtype)
    else:
        log_probs = _log_softmax(logits, temperature, wide)
        probs = log_probs.exp()
        grad_entropy, entropies = entropy
        slope = (log_probs + entropies[:, None]).mul_(grad_entropy[:, None]).add_(grad_logprobs[:, None])
        grad = probs.mul_(slope).mul_(-1 / temperature).to(logits.dtype)
        return _add_targets(grad, targets, grad_logprobs / temperature)
    grad = probs.mul_((grad_logprobs * (-1 / temperature)).to(probs.dtype)[:, None])
    return _add_targets(grad, targets, grad_logprobs / temperature)


def _add_targets(grad: Tensor, targets: Tensor, amounts: Tensor) -> Tensor:
    at = targets[:, None]
    return grad.scatter_(1, at, grad.gather(1, at) + amounts.to(grad.dtype)[:, None])
