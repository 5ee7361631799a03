"""The scalar that is differentiated: policy loss, KL, entropy and teacher terms of one packed micro batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollbook.algos.aggregate import AGGREGATIONS, LossCounts, aggregate, loss_counts
from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.correction import bounded, importance_weights
from rollbook.algos.kl import KL_ESTIMATORS
from rollbook.algos.loss import LOSSES, Clip, clipped_value_loss
from rollbook.algos.packed import log_ratios, require_finite
from rollbook.errors import DataError
from rollbook.observe.values import Low, Peak, Ratio, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTensors:
    """One packed micro batch as the policy's loss reads it. All [T] float32 unless said."""

    logprobs: Tensor
    """Current policy; with `entropy_nats` the only input with a gradient."""
    loss_mask: Tensor
    """[T] bool."""
    action_mask: Tensor
    """[T] bool: the tokens the policy sampled, of which the loss mask is a part."""
    cu_seqlens: Tensor
    """[B+1] int32."""
    advantages: Tensor
    behavior_logprobs: Tensor
    proximal_logprobs: Tensor | None = None
    """Needed with proximal = "recompute"."""
    importance_weights: Tensor | None = None
    """As `correction.correct` set them; None is 1. Not read with proximal = "behavior"."""
    reference_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    entropy_nats: Tensor | None = None
    """Of the current policy at each token; a metric, and with entropy_coef > 0 a term with a gradient."""


def policy_objective(
    tensors: PolicyTensors, config: AlgorithmConfig, counts: LossCounts
) -> tuple[Tensor, Values]:
    """This micro batch's share of the mini batch's loss, and its metrics.

    Args:
        tensors: one packed micro batch.
        config: chooses the loss from LOSSES, the aggregation, and the terms beside the policy loss.
        counts: loss tokens and sequences of the mini batch, over all micro batches and ranks.
    Returns:
        [] loss to sum over micro batches and ranks; metrics that merge over both by `+`.
    Raises:
        DataError: a logprob under the mask is not finite, or one that the config needs is missing.
    """
    mask, cu_seqlens = tensors.loss_mask, tensors.cu_seqlens
    anchor = _anchor(tensors, config)
    require_finite(
        mask,
        current=tensors.logprobs,
        proximal=anchor,
        behavior=tensors.behavior_logprobs,
        advantage=tensors.advantages,
        reference=tensors.reference_logprobs,
        teacher=tensors.teacher_logprobs,
    )
    policy = LOSSES[config.loss](
        tensors.logprobs,
        anchor,
        tensors.advantages,
        mask,
        importance_weights=_weights(tensors, config),
        cu_seqlens=cu_seqlens,
        clip=Clip(eps_low=config.clip_eps_low, eps_high=config.clip_eps_high, dual=config.dual_clip),
    )
    losses = policy.losses
    per_token: dict[str, Tensor] = {}
    if config.kl.placement == "loss":
        reference = _required(tensors.reference_logprobs, "reference", "kl.placement = 'loss'")
        per_token["actor/kl_loss"] = KL_ESTIMATORS[config.kl.estimator](tensors.logprobs, reference, mask)
        losses = losses + config.kl.coef * per_token["actor/kl_loss"]
    if config.distill.placement == "loss":
        teacher = _required(tensors.teacher_logprobs, "teacher", "distill.placement = 'loss'")
        per_token["actor/distill_loss"] = KL_ESTIMATORS[config.distill.estimator](
            tensors.logprobs, teacher, mask
        )
        losses = losses + config.distill.coef * per_token["actor/distill_loss"]
    if config.entropy_coef > 0:
        entropy = _required(tensors.entropy_nats, "entropy", "entropy_coef > 0")
        losses = losses - config.entropy_coef * entropy
    loss = aggregate(losses, mask, cu_seqlens, mode=config.aggregation, counts=counts)

    log_ratio = log_ratios(tensors.logprobs.detach(), anchor, mask)
    per_token |= {
        "actor/ppo_kl": -log_ratio,
        "actor/ratio/mean": log_ratio.exp(),
        "actor/pg_clipfrac": policy.is_clipped.to(losses.dtype),
        "actor/pg_clipfrac_lower": policy.is_clipped_lower.to(losses.dtype),
    }
    if tensors.entropy_nats is not None:
        per_token["actor/entropy"] = tensors.entropy_nats
    terms = {"actor/pg_loss": policy.losses, "actor/loss": losses}
    extremes = {"actor/ratio": log_ratio.exp()}
    local = loss_counts(mask, cu_seqlens, max_response_tokens=counts.max_response_tokens)
    return loss, _readings(terms, per_token, extremes, mask, cu_seqlens, config.aggregation, local)


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTensors:
    """One packed micro batch as the critic's loss reads it. All [T] float32 unless said."""

    values: Tensor
    """Critic now; the only input with a gradient."""
    old_values: Tensor
    """Critic at the start of the step."""
    returns: Tensor
    loss_mask: Tensor
    """[T] bool."""
    cu_seqlens: Tensor
    """[B+1] int32."""


def value_objective(
    tensors: ValueTensors, config: AlgorithmConfig, counts: LossCounts
) -> tuple[Tensor, Values]:
    """The critic's share of the mini batch's loss, and its metrics; arguments as for `policy_objective`."""
    mask = tensors.loss_mask
    require_finite(mask, value=tensors.values, old_value=tensors.old_values, **{"return": tensors.returns})
    critic = clipped_value_loss(
        tensors.values, tensors.old_values, tensors.returns, mask, clip_eps=config.value_clip_eps
    )
    loss = aggregate(critic.losses, mask, tensors.cu_seqlens, mode=config.aggregation, counts=counts)
    local = loss_counts(mask, tensors.cu_seqlens, max_response_tokens=counts.max_response_tokens)
    per_token = {
        "critic/vf_clipfrac": critic.is_clipped.to(critic.losses.dtype),
        "critic/vpred_mean": tensors.values,
    }
    terms = {"critic/vf_loss": critic.losses}
    return loss, _readings(terms, per_token, {}, mask, tensors.cu_seqlens, config.aggregation, local)


def _anchor(tensors: PolicyTensors, config: AlgorithmConfig) -> Tensor:
    if config.proximal == "behavior":
        return tensors.behavior_logprobs
    return _required(tensors.proximal_logprobs, "proximal", "proximal = 'recompute'")


def _weights(tensors: PolicyTensors, config: AlgorithmConfig) -> Tensor:
    if config.proximal == "behavior" and config.correction.level != "none":
        raw = importance_weights(
            tensors.logprobs.detach(),
            tensors.behavior_logprobs,
            tensors.action_mask,
            tensors.cu_seqlens,
            level=config.correction.level,
        )
        return bounded(raw, config.correction)
    if config.correction.level != "none":
        return _required(
            tensors.importance_weights, "importance weight", "correction.level other than 'none'"
        )
    return torch.ones_like(tensors.advantages)


def _required(tensor: Tensor | None, what: str, because: str) -> Tensor:
    if tensor is None:
        raise DataError(
            f"the micro batch has no {what} values, which algorithm.{because} needs",
            f"compute the {what} values of the batch before the update",
        )
    return tensor


def _readings(
    terms: Mapping[str, Tensor],
    per_token: Mapping[str, Tensor],
    extremes: Mapping[str, Tensor],
    mask: Tensor,
    cu_seqlens: Tensor,
    mode: str,
    local: LossCounts,
) -> Values:
    """Metrics of [T] values: terms reduced as the loss is, means over loss tokens whatever its aggregation, and the
    largest and smallest. One copy from the device for all of them."""
    aggregation = AGGREGATIONS[mode]
    held = {name: aggregation.numerator(values.detach(), mask, cu_seqlens) for name, values in terms.items()}
    held |= {name: values.detach().where(mask, 0.0).sum() for name, values in per_token.items()}
    for name, values in extremes.items():
        held[f"{name}/max"] = values.where(mask, -torch.inf).max()
        held[f"{name}/min"] = values.where(mask, torch.inf).min()
    read = dict(zip(held, torch.stack([value.double() for value in held.values()]).tolist()))
    made: Values = {name: Ratio(read[name], aggregation.denominator(local)) for name in terms}
    made |= {name: Ratio(read[name], local.num_loss_tokens) for name in per_token}
    for name in extremes if local.num_loss_tokens else ():
        made |= {f"{name}/max": Peak(read[f"{name}/max"]), f"{name}/min": Low(read[f"{name}/min"])}
    return made
