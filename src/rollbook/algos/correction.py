"""Importance weights and rejection: what staleness and engine mismatch do to the gradient, undone or left out.

The engine sampled from the behavior policy; the trust region stands around the proximal policy (the trainer's
numbers at the start of the step). Their ratio r = exp(proximal - behavior) corrects the expectation. Both are
constants of the step, so weights and masks are fixed *before* the first forward and backward: `correct` runs
over the whole batch, and only then are loss tokens counted. The denominator follows the mask by construction.

Behavior logprobs are those of the temperature-scaled softmax before top-k, top-p and min-p. Truncated sampling
draws from a renormalised subset S of it, so the true ratio is r x P_behavior(S) with P(S) <= 1: under top-p 0.9
the weights are up to 1/0.9 too large. It is the same factor for all tokens of one position's subset, and it is
never corrected here; train with top_p = 1, top_k = 0, min_p = 0 where it matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollbook.algos.config import CorrectionConfig, RejectConfig
from rollbook.algos.kl import KL_ESTIMATORS
from rollbook.algos.packed import (
    LOG_RATIO_LIMIT,
    log_ratios,
    per_token,
    require_finite,
    sequence_counts,
    sequence_maxima,
    sequence_sums,
)
from rollbook.errors import DataError
from rollbook.observe.values import Last, Low, Peak, Ratio, Values
from rollbook.types import Floats, TrainSequence


def importance_weights(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    *,
    level: str,
) -> Tensor:
    """[T] weights exp(proximal - behavior) before bounds, one a token; 1 outside `action_mask`.

    Args:
        proximal_logprobs, behavior_logprobs: [T]. Not read outside the mask.
        action_mask: [T] bool. A sequence's weight is taken over all tokens the policy sampled, also those that
            a filter took out of the loss.
        cu_seqlens: [B+1] int32.
        level: "none" (1), "token", "sequence" (product over the sequence), "geometric" (its n-th root).
    Log ratios are clamped to +-20 per token, and again after the sum.

    >>> prox, behave = torch.log(torch.tensor([0.5, 0.4])), torch.log(torch.tensor([0.25, 0.8]))
    >>> yes, cu = torch.tensor([True, True]), torch.tensor([0, 2])
    >>> [[round(w, 4) for w in importance_weights(prox, behave, yes, cu, level=level).tolist()]
    ...     for level in ("token", "sequence", "geometric")]
    [[2.0, 0.5], [1.0, 1.0], [1.0, 1.0]]
    """
    logs = log_ratios(proximal_logprobs, behavior_logprobs, action_mask)
    if level == "none":
        return torch.ones_like(logs)
    if level in ("sequence", "geometric"):
        sums = sequence_sums(logs, cu_seqlens)
        if level == "geometric":
            sums = sums / sequence_counts(action_mask, cu_seqlens).to(sums.dtype).clamp(min=1)
        logs = per_token(sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), cu_seqlens).where(action_mask, 0.0)
    return torch.exp(logs)


def bounded(weights: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] weights set to the nearer bound; for mode "truncate"."""
    return weights.clamp(config.lower, config.upper)


def kept_by_bounds(weights: Tensor, config: CorrectionConfig) -> Tensor:
    """[T] bool: weights within the bounds, both inclusive; for mode "mask"."""
    return (weights >= config.lower) & (weights <= config.upper)


def _per_sequence(
    reduce: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda values, mask, cu_seqlens: per_token(reduce(values, mask, cu_seqlens), cu_seqlens)


def _mean(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    return sequence_sums(values, cu_seqlens) / sequence_counts(mask, cu_seqlens).to(values.dtype).clamp(min=1)


REJECT_STATISTICS: Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "token": lambda values, mask, cu_seqlens: values,
    "sequence_sum": _per_sequence(lambda values, mask, cu: sequence_sums(values, cu)),
    "sequence_mean": _per_sequence(_mean),
    "sequence_max": _per_sequence(lambda values, mask, cu: sequence_maxima(values, cu)),
}


def kept_by_divergence(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    action_mask: Tensor,
    cu_seqlens: Tensor,
    config: RejectConfig,
) -> Tensor:
    """[T] bool: tokens whose statistic lies within the bounds, both inclusive (a sequence's stands for all its
    tokens). The statistic estimates KL(behavior || proximal), in nats."""
    if config.statistic == "none":
        return torch.ones_like(action_mask)
    divergence = KL_ESTIMATORS[config.estimator](behavior_logprobs, proximal_logprobs, action_mask)
    statistic = REJECT_STATISTICS[config.statistic](divergence, action_mask, cu_seqlens)
    kept = torch.ones_like(action_mask)
    if config.upper_nats is not None:
        kept &= statistic <= config.upper_nats
    if config.lower_nats is not None:
        kept &= statistic >= config.lower_nats
    return kept


@dataclass(frozen=True, slots=True)
class _Correction:
    """Of T tokens laid end to end."""

    weights: Tensor
    """[T] within the bounds."""
    loss_mask: Tensor
    """[T] bool, after rejection."""
    starts: list[int]
    """[B+1]."""
    values: Values


def correct(sequences: Sequence[TrainSequence], config: CorrectionConfig) -> Values:
    """Set each sequence's `importance_weights`, narrow its `loss_mask`, and report.

    Call it once a step, after `proximal_logprobs` are known and before loss tokens are counted. With the
    correction off it changes nothing and still reports the mismatch.

    Raises:
        DataError: a sequence has no proximal logprobs, or one under the action mask is not finite.
    """
    if not sequences:
        return {}
    made = _correction(sequences, config)
    for sequence, start, end in zip(sequences, made.starts, made.starts[1:]):
        if config.level != "none":
            sequence.importance_weights = made.weights[start:end].float().numpy()
        if config.changes_mask:
            sequence.loss_mask = made.loss_mask[start:end].numpy()
    return made.values


def mismatch(sequences: Sequence[TrainSequence], config: CorrectionConfig) -> Values:
    """What `correct` reports, of sequences that are trained already: nothing is written.

    Raises:
        DataError: as `correct`.
    """
    return _correction(sequences, config).values if sequences else {}


def _correction(sequences: Sequence[TrainSequence], config: CorrectionConfig) -> _Correction:
    cu_seqlens = torch.tensor(np.concatenate([[0], np.cumsum([s.num_tokens for s in sequences])]))
    action_mask = torch.from_numpy(np.concatenate([s.action_mask for s in sequences]))
    loss_mask = torch.from_numpy(np.concatenate([s.loss_mask for s in sequences]))
    behavior = torch.from_numpy(np.concatenate([s.behavior_logprobs for s in sequences])).double()
    proximal = torch.from_numpy(np.concatenate([_proximal(s) for s in sequences])).double()
    require_finite(action_mask, behavior=behavior, proximal=proximal)

    weights = importance_weights(proximal, behavior, action_mask, cu_seqlens, level=config.level)
    kept = kept_by_divergence(proximal, behavior, action_mask, cu_seqlens, config.reject)
    if config.mode == "mask":
        kept &= kept_by_bounds(weights, config)
    applied = bounded(weights, config) if config.level != "none" else weights
    trained = loss_mask & kept

    values = _mismatch_values(proximal, behavior, action_mask, cu_seqlens)
    if config.level != "none":
        values |= _weight_values(weights, applied, loss_mask, trained, config)
    if config.is_on:
        values |= _rejection_values(loss_mask, trained, cu_seqlens)
    return _Correction(applied, trained, cu_seqlens.tolist(), values)


def _proximal(sequence: TrainSequence) -> Floats:
    if sequence.proximal_logprobs is None:
        raise DataError(
            f"trajectory {sequence.group_id}/{sequence.member_idx} has no proximal logprobs to correct with",
            "score the batch with the trainer first, or set algorithm.proximal = 'behavior'",
        )
    return sequence.proximal_logprobs


def _mismatch_values(proximal: Tensor, behavior: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Values:
    """Divergence of the two policies over all action tokens; names and formulas are verl's."""
    num_tokens = int(mask.sum())
    if num_tokens == 0:
        return {}
    counts = sequence_counts(mask, cu_seqlens)
    has_tokens = counts > 0
    num_sequences = int(has_tokens.sum())
    logs = log_ratios(proximal, behavior, mask)
    sums = sequence_sums(logs, cu_seqlens)
    squared_sequence = torch.exp(2 * sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))[has_tokens]

    def mean_logprobs(logprobs: Tensor) -> Tensor:
        return (sequence_sums(logprobs.where(mask, 0.0), cu_seqlens) / counts.clamp(min=1))[has_tokens]

    training, rollout = mean_logprobs(proximal), mean_logprobs(behavior)
    squared_sum = float((torch.exp(2 * logs) * mask).sum())
    return {
        "rollout_corr/kl": Ratio(-float(logs.sum()), num_tokens),
        "rollout_corr/k3_kl": Ratio(float((logs.expm1() - logs).sum()), num_tokens),
        "rollout_corr/training_ppl": Ratio(float(torch.exp(-training).sum()), num_sequences),
        "rollout_corr/rollout_ppl": Ratio(float(torch.exp(-rollout).sum()), num_sequences),
        "rollout_corr/log_ppl_diff": Ratio(float((rollout - training).sum()), num_sequences),
        "rollout_corr/ppl_ratio": Ratio(float(torch.exp(rollout - training).sum()), num_sequences),
        "rollout_corr/chi2_token": Ratio(squared_sum - num_tokens, num_tokens),
        "rollout_corr/chi2_seq": Ratio(float(squared_sequence.sum()) - num_sequences, num_sequences),
    }


def _weight_values(
    raw: Tensor, applied: Tensor, loss_mask: Tensor, trained: Tensor, config: CorrectionConfig
) -> Values:
    """Raw weights over loss tokens before rejection; the effective sample size over what trains.

    The effective sample size is the share (sum w)^2 / (n sum w^2): 1 when all weights are equal.
    """
    weights, num_tokens = raw[loss_mask], int(loss_mask.sum())
    if num_tokens == 0:
        return {}
    used = applied[trained]
    square_sum = float(used.square().sum())
    effective = float(used.sum()) ** 2 / (len(used) * square_sum) if square_sum > 0 else math.nan
    return {
        "rollout_corr/rollout_is_mean": Ratio(float(weights.sum()), num_tokens),
        "rollout_corr/rollout_is_max": Peak(float(weights.max())),
        "rollout_corr/rollout_is_min": Low(float(weights.min())),
        "rollout_corr/rollout_is_std": Last(float(weights.std(correction=0))),
        "rollout_corr/rollout_is_p99": Last(float(np.quantile(weights.numpy(), 0.99))),
        "rollout_corr/rollout_is_ratio_fraction_high": Ratio(
            float((weights > config.upper).sum()), num_tokens
        ),
        "rollout_corr/rollout_is_ratio_fraction_low": Ratio(
            float((weights < config.lower).sum()), num_tokens
        ),
        "rollout_corr/rollout_is_eff_sample_size": Last(effective),
    }


def _rejection_values(loss_mask: Tensor, trained: Tensor, cu_seqlens: Tensor) -> Values:
    before, after = sequence_counts(loss_mask, cu_seqlens), sequence_counts(trained, cu_seqlens)
    num_whole = float(((before > 0) & (after == 0)).sum())
    return {
        "rollout_corr/rollout_rs_masked_fraction": Ratio(
            float(before.sum() - after.sum()), float(before.sum())
        ),
        "rollout_corr/rollout_rs_seq_masked_fraction": Ratio(num_whole, float((before > 0).sum())),
    }
