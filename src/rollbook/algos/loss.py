"""Policy and value losses per token. `aggregate` reduces them; `policy.py` puts the terms together.

Every policy loss has one signature, so that an algorithm is one function and one line in LOSSES:

    current ──ratio──► proximal ──importance weight──► behavior
       the gradient      clipped         bounded, constant

All logprobs are float32 ln p of the sampled tokens under the temperature that sampled them (the sampler divides
logits by it, so must everyone who scores). Every loss is linear in the importance weights, which are 1 when
nothing is corrected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollbook.algos.packed import log_ratios, per_token, sequence_counts, sequence_sums


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """Numbers of a policy loss."""

    eps_low: float
    """The ratio is clipped below at 1 - eps_low."""
    eps_high: float
    """The ratio is clipped above at 1 + eps_high."""
    dual: float = 0.0
    """Bound of the loss for negative advantages, as a multiple; 0 is off."""


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """[T] losses with what happened to each token; the booleans are False outside the loss mask."""

    losses: Tensor
    """[T] with a gradient; 0 outside the loss mask."""
    is_clipped: Tensor
    """[T] bool: a bound of the ratio holds the loss (its gradient is 0, for cispo: capped)."""
    is_clipped_lower: Tensor
    """[T] bool: the dual clip holds it."""


class PolicyLoss(Protocol):
    """A policy loss of one packed micro batch.

    Args:
        logprobs: [T] float32. Current policy; the only input with a gradient.
        proximal_logprobs: [T] float32. Trust-region anchor, fixed during the step.
        advantages: [T] float32, reward units; not read where `loss_mask` is False.
        loss_mask: [T] bool. True on the sampled tokens that train.
        importance_weights: [T] float32. exp(proximal - behavior), bounded; a constant.
        cu_seqlens: [B+1] int32. Starts of the sequences; none is split.
        clip: bounds of the ratio.
    """

    def __call__(
        self,
        logprobs: Tensor,
        proximal_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        *,
        importance_weights: Tensor,
        cu_seqlens: Tensor,
        clip: Clip,
    ) -> TokenLosses: ...


def clipped_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    importance_weights: Tensor,
    cu_seqlens: Tensor,
    clip: Clip,
) -> TokenLosses:
    """Clipped policy loss (PPO), corrected for stale data (decoupled). Arguments: see PolicyLoss.

    Source: arXiv:1707.06347; decoupled objective, Hilton et al., arXiv:2110.00641; dual clip, arXiv:1912.09729.

    >>> now, anchor = (torch.log(torch.tensor([p])) for p in (0.6, 0.5))
    >>> token = clipped_loss(now, anchor, torch.ones(1), torch.tensor([True]),
    ...     importance_weights=torch.tensor([2.0]), cu_seqlens=torch.tensor([0, 1]),
    ...     clip=Clip(eps_low=0.1, eps_high=0.1))
    >>> round(token.losses.item(), 4), token.is_clipped.item()  # weight 2.0 x clipped ratio 1.1
    (-2.2, True)
    """
    ratios = torch.exp(log_ratios(logprobs, proximal_logprobs, loss_mask))
    return _clip_surrogate(ratios, advantages, loss_mask, importance_weights, clip)


def gspo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    importance_weights: Tensor,
    cu_seqlens: Tensor,
    clip: Clip,
) -> TokenLosses:
    """Clipped loss with one ratio a sequence: the geometric mean over its loss tokens. See PolicyLoss.

    With `sequence_mean_token_mean` the batch's loss is the mean over sequences of ratio x advantage, and each
    token of a sequence of n gets 1/n of its gradient. Source: arXiv:2507.18071, eq. 5 to 7.
    """
    sums = sequence_sums(log_ratios(logprobs, proximal_logprobs, loss_mask), cu_seqlens)
    counts = sequence_counts(loss_mask, cu_seqlens).to(sums.dtype)
    ratios = per_token(torch.exp(sums / counts.clamp(min=1)), cu_seqlens)
    return _clip_surrogate(ratios, advantages, loss_mask, importance_weights, clip)


def cispo_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    importance_weights: Tensor,
    cu_seqlens: Tensor,
    clip: Clip,
) -> TokenLosses:
    """REINFORCE weighted by the clipped ratio, which is a constant: no token loses its gradient.

    See PolicyLoss. Source: arXiv:2506.13585, eq. 4.
    """
    ratios = torch.exp(log_ratios(logprobs, proximal_logprobs, loss_mask)).detach()
    bounded = ratios.clamp(1 - clip.eps_low, 1 + clip.eps_high)
    gains = _masked_gains(advantages, importance_weights, loss_mask)
    losses = -bounded * gains * logprobs.where(loss_mask, 0.0)
    return TokenLosses(losses, (bounded != ratios) & loss_mask, torch.zeros_like(loss_mask))


def reinforce_loss(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    importance_weights: Tensor,
    cu_seqlens: Tensor,
    clip: Clip,
) -> TokenLosses:
    """- weight x advantage x ln p: no ratio and no clip. See PolicyLoss.

    Exact for one update on fresh tokens; otherwise give weights current / behavior (proximal = "behavior").
    """
    gains = _masked_gains(advantages, importance_weights, loss_mask)
    none = torch.zeros_like(loss_mask)
    return TokenLosses(-gains * logprobs.where(loss_mask, 0.0), none, none)


LOSSES: Mapping[str, PolicyLoss] = {
    "clip": clipped_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
}


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip_eps: float
) -> TokenLosses:
    """[T] half squared error of the critic, pessimistic outside +-clip_eps of its value before the step.

    Args:
        values: [T] float32. Critic now; the only input with a gradient.
        old_values: [T] float32. Critic at the start of the step.
        returns: [T] float32, reward units.
        loss_mask: [T] bool.
        clip_eps: reward units; 0 is no clip.
    """
    now, target = values.where(loss_mask, 0.0), returns.where(loss_mask, 0.0)
    errors = (now - target).square()
    none = torch.zeros_like(loss_mask)
    if clip_eps == 0:
        return TokenLosses(0.5 * errors, none, none)
    before = old_values.where(loss_mask, 0.0)
    clipped_errors = (before + (now - before).clamp(-clip_eps, clip_eps) - target).square()
    is_clipped = (clipped_errors > errors) & loss_mask
    return TokenLosses(0.5 * torch.maximum(errors, clipped_errors), is_clipped, none)


def _masked_gains(advantages: Tensor, importance_weights: Tensor, loss_mask: Tensor) -> Tensor:
    return (advantages.where(loss_mask, 0.0) * importance_weights.where(loss_mask, 0.0)).detach()


def _clip_surrogate(
    ratios: Tensor, advantages: Tensor, loss_mask: Tensor, importance_weights: Tensor, clip: Clip
) -> TokenLosses:
    gains = advantages.where(loss_mask, 0.0).detach()
    free = -ratios * gains
    held = -ratios.clamp(1 - clip.eps_low, 1 + clip.eps_high) * gains
    losses = torch.maximum(free, held)
    is_clipped = (held > free) & loss_mask
    is_clipped_lower = torch.zeros_like(loss_mask)
    if clip.dual:
        bound = -clip.dual * gains
        is_clipped_lower = (gains < 0) & (losses > bound) & loss_mask
        losses = torch.where(is_clipped_lower, bound, losses)
    weights = importance_weights.where(loss_mask, 0.0).detach()
    return TokenLosses(weights * losses, is_clipped, is_clipped_lower)
