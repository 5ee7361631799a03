"""From a step's rewards to an advantage for every action token.

Runs once a step on the host, in float64, over the whole batch. Members of a group that failed are not in the
input (a failure is not a reward of zero), and groups are told apart by `group_id`, never by their text. Token
estimators step over *action tokens only*: an observation of a tool between two of them takes no discount, holds
no reward, and its values are not read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algos.config import AlgorithmConfig, KLConfig
from rollbook.algos.kl import KL_ESTIMATORS
from rollbook.errors import DataError
from rollbook.observe.values import Low, Peak, Ratio, Values
from rollbook.types import Floats, TrainSequence

Array = NDArray[np.float64]
Index = NDArray[np.int64]

STD_EPS = 1e-6
"""Added to a standard deviation before dividing, in reward units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """What an estimator reads. A = action tokens of the batch, sequence after sequence; B sequences."""

    rewards: Array
    """[B] reward of each trajectory, reward units; without the per-token part."""
    group_ids: Index
    """[B]."""
    lengths: Index
    """[B] action tokens of each sequence; they sum to A."""
    token_rewards: Array
    """[A] per-token part of the reward (a KL penalty is negative); zeros without one."""
    values: Array | None
    """[A] the critic's value before each action token, reward units."""
    is_truncated: NDArray[np.bool_]
    """[B]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What an estimator gives."""

    advantages: Array
    """[A] reward units."""
    returns: Array | None = None
    """[A] the critic's target, reward units."""


AdvantageEstimator = Callable[[Credit, AlgorithmConfig], Estimate]


def group_mean_advantages(rewards: Array, group_ids: Index, *, divide_by_std: bool) -> Array:
    """[B] reward minus the mean of its group (GRPO; without the division Dr.GRPO).

    Args:
        rewards: [B] reward units, of scored members only.
        group_ids: [B].
        divide_by_std: divide by the group's sample standard deviation (n - 1) plus STD_EPS.
    A flat group, and a group of one, gives exactly 0.

    >>> group_mean_advantages(np.array([1.0, 0, 0, 0]), np.array([7, 7, 7, 7]), divide_by_std=False).tolist()
    [0.75, -0.25, -0.25, -0.25]
    """
    groups = _Groups.of(rewards, group_ids)
    centred = np.where(groups.is_flat, 0.0, rewards - groups.means)
    if not divide_by_std:
        return centred
    square_sums = np.bincount(groups.index, weights=centred**2, minlength=groups.num_groups)
    counts = np.bincount(groups.index, minlength=groups.num_groups)
    return centred / (np.sqrt(square_sums / np.maximum(counts - 1, 1))[groups.index] + STD_EPS)


def leave_one_out_advantages(rewards: Array, group_ids: Index) -> Array:
    """[B] reward minus the mean of the *other* members of its group (RLOO); 0 for a group of one.

    >>> leave_one_out_advantages(np.array([1.0, 0, 0, 0]), np.array([7, 7, 7, 7])).round(4).tolist()
    [1.0, -0.3333, -0.3333, -0.3333]
    """
    groups = _Groups.of(rewards, group_ids)
    centred = np.where(groups.is_flat, 0.0, rewards - groups.means)
    return centred * groups.counts / np.maximum(groups.counts - 1, 1)


def discounted_sums(token_rewards: Array, lengths: Index, *, gamma: float) -> Array:
    """[A] reward-to-go over action tokens; the value of zero at every token and lambda 1."""
    zeros = np.zeros_like(token_rewards)
    return gae(token_rewards, zeros, lengths, np.zeros(len(lengths)), gamma=gamma, gae_lambda=1.0)


def gae(
    token_rewards: Array,
    values: Array,
    lengths: Index,
    last_values: Array,
    *,
    gamma: float,
    gae_lambda: float,
) -> Array:
    """[A] generalised advantage estimates over action tokens.

    Args:
        token_rewards: [A] reward of each action token, the trajectory's reward on its last one included.
        values: [A] critic before each action token.
        lengths: [B] action tokens a sequence.
        last_values: [B] value after the last action token: 0 where the episode ended.
        gamma, gae_lambda: per action token.
    Source: arXiv:1506.02438, eq. 16.

    >>> two = np.array([0.2, 0.4])
    >>> gae(np.array([0.0, 1.0]), two, np.array([2]), np.zeros(1), gamma=1.0, gae_lambda=0.5).round(4).tolist()
    [0.5, 0.6]
    """
    advantages = np.zeros_like(token_rewards)
    # All sequences step backwards together, the longest first, so that those still running are a prefix.
    order = np.argsort(-lengths, kind="stable")
    last_idx = (np.cumsum(lengths) - 1)[order]
    next_values, carried = last_values[order].astype(np.float64), np.zeros(len(lengths))
    num_running = len(lengths)
    ordered = lengths[order]
    for back in range(int(lengths.max(initial=0))):
        while ordered[num_running - 1] <= back:
            num_running -= 1
        at = last_idx[:num_running] - back
        delta = token_rewards[at] + gamma * next_values[:num_running] - values[at]
        carried[:num_running] = delta + gamma * gae_lambda * carried[:num_running]
        next_values[:num_running] = values[at]
        advantages[at] = carried[:num_running]
    return advantages


def group_mean(credit: Credit, config: AlgorithmConfig) -> Estimate:
    totals = _total_rewards(credit)
    sequence = group_mean_advantages(totals, credit.group_ids, divide_by_std=config.scale == "group_std")
    return Estimate(advantages=np.repeat(sequence, credit.lengths))


def leave_one_out(credit: Credit, config: AlgorithmConfig) -> Estimate:
    totals = _total_rewards(credit)
    sequence = leave_one_out_advantages(totals, credit.group_ids)
    if config.scale == "group_std":
        scaled = group_mean_advantages(totals, credit.group_ids, divide_by_std=True)
        counts = _Groups.of(totals, credit.group_ids).counts
        sequence = scaled * counts / np.maximum(counts - 1, 1)
    return Estimate(advantages=np.repeat(sequence, credit.lengths))


def returns(credit: Credit, config: AlgorithmConfig) -> Estimate:
    return Estimate(
        advantages=discounted_sums(_rewards_on_last_token(credit), credit.lengths, gamma=config.gamma)
    )


def actor_critic(credit: Credit, config: AlgorithmConfig) -> Estimate:
    """GAE. A truncated response ends at value 0, or at the critic's value before its last action token."""
    if credit.values is None:
        raise DataError(
            "algorithm.estimator is 'gae' and the batch has no values",
            "train a critic ([critic] in the config) or choose another estimator",
        )
    last_values = np.zeros(len(credit.lengths))
    if config.truncation == "last_value":
        has_tokens = credit.lengths > 0
        last_idx = np.cumsum(credit.lengths) - 1
        cut = credit.is_truncated & has_tokens
        last_values[cut] = credit.values[last_idx[cut]]
    advantages = gae(
        _rewards_on_last_token(credit),
        credit.values,
        credit.lengths,
        last_values,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
    )
    return Estimate(advantages=advantages, returns=advantages + credit.values)


def no_advantage(credit: Credit, config: AlgorithmConfig) -> Estimate:
    return Estimate(advantages=np.zeros_like(credit.token_rewards))


ESTIMATORS: Mapping[str, AdvantageEstimator] = {
    "group_mean": group_mean,
    "leave_one_out": leave_one_out,
    "returns": returns,
    "gae": actor_critic,
    "none": no_advantage,
}


def estimate_advantages(sequences: Sequence[TrainSequence], config: AlgorithmConfig) -> Values:
    """Set `advantages` (and `returns`) of every sequence, 0 outside its action tokens, and report.

    Call it once a step, after filters and corrections have settled the loss masks: `scale = "batch_std"` whitens
    over loss tokens. `sequence.reward` is the shaped reward.

    Raises:
        DataError: a reward is not finite; values, or logprobs for a KL or teacher term, are missing.
    """
    if not sequences:
        return {}
    credit = _credit(sequences, config)
    estimate = ESTIMATORS[config.estimator](credit, config)
    advantages = estimate.advantages
    trained = np.concatenate([s.loss_mask[s.action_mask] for s in sequences])
    if config.scale == "batch_std":
        advantages = _whitened(advantages, trained, centre=config.estimator in ("returns", "gae"))
    if config.distill.placement == "advantage":
        gains = [
            _on_actions(s, s.teacher_logprobs, "teacher logprobs") - _anchor(s, config) for s in sequences
        ]
        advantages = advantages + config.distill.coef * np.concatenate(gains)
    ends = np.cumsum(credit.lengths)
    for sequence, start, end in zip(sequences, ends - credit.lengths, ends):
        sequence.advantages = _spread(sequence, advantages[start:end])
        if estimate.returns is not None:
            sequence.returns = _spread(sequence, estimate.returns[start:end])
    return _values(credit, advantages, estimate.returns, trained)


@dataclass(frozen=True, slots=True)
class _Groups:
    index: Index
    num_groups: int
    counts: Index
    """[B] members of the sequence's group."""
    means: Array
    """[B] mean reward of the sequence's group."""
    is_flat: NDArray[np.bool_]
    """[B] whether all members have one reward; rounding of a mean must not make a signal of it."""

    @classmethod
    def of(cls, rewards: Array, group_ids: Index) -> _Groups:
        _, first, index = np.unique(group_ids, return_index=True, return_inverse=True)
        counts = np.bincount(index)
        means = np.bincount(index, weights=rewards) / counts
        num_unlike_first = np.bincount(index, weights=rewards != rewards[first][index])
        return cls(index, len(counts), counts[index], means[index], (num_unlike_first == 0)[index])


def _credit(sequences: Sequence[TrainSequence], config: AlgorithmConfig) -> Credit:
    rewards = np.array([s.reward for s in sequences], np.float64)
    for sequence, reward in zip(sequences, rewards):
        if not math.isfinite(reward):
            raise DataError(
                f"trajectory {sequence.group_id}/{sequence.member_idx} has reward {reward}",
                "a trajectory without a reward is a failure and must not reach the trainer",
            )
    lengths = np.array([int(s.action_mask.sum()) for s in sequences], np.int64)
    if config.kl.placement == "reward":
        penalties = [_kl_penalty(s, config.kl, _anchor(s, config)) for s in sequences]
        token_rewards = -np.concatenate(penalties)
    else:
        token_rewards = np.zeros(int(lengths.sum()))
    values = None
    if config.estimator == "gae":
        values = np.concatenate([_on_actions(s, s.values, "values") for s in sequences])
    return Credit(
        rewards=rewards,
        group_ids=np.array([s.group_id for s in sequences], np.int64),
        lengths=lengths,
        token_rewards=token_rewards,
        values=values,
        is_truncated=np.array([s.is_truncated for s in sequences]),
    )


def _kl_penalty(sequence: TrainSequence, kl: KLConfig, logprobs: Array) -> Array:
    """[A of the sequence] coef x estimate of KL(policy at the start of the step || reference)."""
    ours = torch.from_numpy(logprobs)
    reference = torch.from_numpy(_on_actions(sequence, sequence.reference_logprobs, "reference logprobs"))
    estimate = KL_ESTIMATORS[kl.estimator](ours, reference, torch.ones(len(ours), dtype=torch.bool))
    return np.asarray(kl.coef * estimate.numpy(), np.float64)


def _anchor(sequence: TrainSequence, config: AlgorithmConfig) -> Array:
    if config.proximal == "behavior":
        return _on_actions(sequence, sequence.behavior_logprobs, "behavior logprobs")
    return _on_actions(sequence, sequence.proximal_logprobs, "proximal logprobs")


def _on_actions(sequence: TrainSequence, held: Floats | None, name: str) -> Array:
    """[A of the sequence] float64 of the per-token array that is called `name`."""
    if held is None:
        raise DataError(
            f"trajectory {sequence.group_id}/{sequence.member_idx} has no {name}, which the algorithm needs",
            f"compute {name} for the batch before its advantages",
        )
    values: Array = held[sequence.action_mask].astype(np.float64)
    if not np.isfinite(values).all():
        raise DataError(
            f"trajectory {sequence.group_id}/{sequence.member_idx} has {name} that are not finite",
            "the step is not applied; look at the model that computed them",
        )
    return values


def _spread(sequence: TrainSequence, values: Array) -> Floats:
    spread = np.zeros(sequence.num_tokens, np.float32)
    spread[sequence.action_mask] = values
    return spread


def _total_rewards(credit: Credit) -> Array:
    """[B] trajectory reward plus its per-token part: a group estimator compares whole trajectories."""
    ends = np.cumsum(credit.lengths)
    sums = np.concatenate([[0.0], np.cumsum(credit.token_rewards)])
    per_token: Array = sums[ends] - sums[ends - credit.lengths]
    return credit.rewards + per_token


def _rewards_on_last_token(credit: Credit) -> Array:
    rewards = credit.token_rewards.copy()
    has_tokens = credit.lengths > 0
    rewards[(np.cumsum(credit.lengths) - 1)[has_tokens]] += credit.rewards[has_tokens]
    return rewards


def _whitened(advantages: Array, trained: NDArray[np.bool_], *, centre: bool) -> Array:
    used = advantages[trained]
    if len(used) < 2:
        return advantages
    whitened: Array = (advantages - (used.mean() if centre else 0.0)) / (used.std(ddof=1) + STD_EPS)
    return whitened


def _values(credit: Credit, advantages: Array, returns: Array | None, trained: NDArray[np.bool_]) -> Values:
    """Over loss tokens; names are verl's."""
    named: dict[str, Array] = {"critic/advantages": advantages[trained]}
    if returns is not None and credit.values is not None:
        named |= {"critic/returns": returns[trained], "critic/values": credit.values[trained]}
    values: Values = {}
    for name, array in named.items():
        if len(array):
            values |= {
                f"{name}/mean": Ratio(float(array.sum()), len(array)),
                f"{name}/max": Peak(float(array.max())),
                f"{name}/min": Low(float(array.min())),
            }
    if returns is not None and credit.values is not None and trained.any():
        # Share of the returns' variance that the critic leaves unexplained, as a mergeable ratio.
        errors, target = (returns - credit.values)[trained], returns[trained]
        total = float(((target - target.mean()) ** 2).sum())
        unexplained = float(((errors - errors.mean()) ** 2).sum())
        values["critic/vf_explained_var"] = Ratio(total - unexplained, total)
    return values
