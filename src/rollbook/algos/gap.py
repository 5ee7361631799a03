"""The logprob gap: trainer against engine on the same tokens.

At one weight version the two compute the same number, so the gap is their numeric mismatch; on stale tokens it
also holds the policy's own movement, which is why it is reported by version as well as over all. The geometric
mean of the ratio stands beside the arithmetic one because the latter's expectation is 1 for *any* pair of
policies: only the former shows a sampler that is not the one the trainer thinks it is.

In an asynchronous run every token of a batch may be older than the trainer's weights. Then responses that finished
under those weights, and will be trained later, are scored beside the batch: `fresh`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import DataError
from rollbook.observe.values import Last, Low, Peak, Ratio, Values
from rollbook.types import TrainSequence

Array = NDArray[np.float64]

PART_STATISTICS = ("mean", "p99", "max", "geometric_mean_ratio")
"""What is reported of each replica and each age; the whole batch has every statistic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobGap:
    """Statistics of |trainer - engine| logprobs over a set of sampled tokens."""

    num_tokens: int
    mean: float
    p95: float
    p99: float
    max: float
    geometric_mean_ratio: float
    """exp(mean(trainer - engine)); 1 on policy, below 1 when the engine samples from something sharper."""
    mean_ratio: float
    """mean(exp(trainer - engine))."""
    outside_clip_frac: float
    """Share of tokens whose ratio lies outside the clip band before any update was made."""
    pearson: float
    """Correlation of the two logprobs; NaN when one does not vary."""

    @classmethod
    def of(cls, trainer: Array, engine: Array, *, clip_eps_low: float, clip_eps_high: float) -> LogprobGap:
        """Of [n] logprobs each, n at least 1.

        >>> gap = LogprobGap.of(np.log([0.5, 0.4]), np.log([0.25, 0.8]), clip_eps_low=0.2, clip_eps_high=0.2)
        >>> round(gap.mean, 4), round(gap.geometric_mean_ratio, 4), gap.mean_ratio, gap.outside_clip_frac
        (0.6931, 1.0, 1.25, 1.0)
        """
        difference = trainer - engine
        size = np.abs(difference)
        ratios = np.exp(np.clip(difference, -20, 20))
        p95, p99 = np.quantile(size, [0.95, 0.99])
        outside = (ratios < 1 - clip_eps_low) | (ratios > 1 + clip_eps_high)
        return cls(
            num_tokens=len(trainer),
            mean=float(size.mean()),
            p95=float(p95),
            p99=float(p99),
            max=float(size.max()),
            geometric_mean_ratio=float(np.exp(difference.mean())),
            mean_ratio=float(ratios.mean()),
            outside_clip_frac=float(outside.mean()),
            pearson=_pearson(trainer, engine),
        )

    def values(self) -> Values:
        """Metrics by statistic."""
        n = self.num_tokens
        return {
            "mean": Ratio(self.mean * n, n),
            "p95": Last(self.p95),
            "p99": Last(self.p99),
            "max": Peak(self.max),
            "geometric_mean_ratio": Last(self.geometric_mean_ratio),
            "mean_ratio": Ratio(self.mean_ratio * n, n),
            "outside_clip_frac": Ratio(self.outside_clip_frac * n, n),
            "pearson": Last(self.pearson),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GapReport:
    """The gap over a step's tokens, and in parts."""

    total: LogprobGap
    by_replica: dict[int, LogprobGap]
    by_staleness: dict[int, LogprobGap]
    """By the age in steps of the sequence's oldest token."""
    fresh: LogprobGap | None
    """Of sequences outside the batch, sampled wholly under the trainer's weights."""
    probs_diff: Array
    """[n] |p_trainer - p_engine| per token: what verl's `rollout_probs_diff` is made of."""
    probs_pearson: float
    """Correlation of the two probabilities; NaN when one does not vary."""

    @property
    def on_policy(self) -> LogprobGap | None:
        """Over sequences sampled wholly under the trainer's weights: numerics alone."""
        return self.by_staleness.get(0, self.fresh)

    def values(self) -> Values:
        """Metrics. Means merge over batches; quantiles and correlations are of this batch alone."""
        whole = {"training/logprob_gap_all": self.total}
        if self.on_policy is not None:
            whole["training/logprob_gap"] = self.on_policy
        parts = {f"training/logprob_gap_by_replica/{key}": gap for key, gap in self.by_replica.items()}
        # By age, not by version: a run has thousands of versions and a handful of ages.
        parts |= {f"training/logprob_gap_by_staleness/{age}": gap for age, gap in self.by_staleness.items()}
        values: Values = {}
        for prefix, gap in whole.items():
            values |= {f"{prefix}/{statistic}": value for statistic, value in gap.values().items()}
        for prefix, gap in parts.items():
            held = gap.values()
            values |= {f"{prefix}/{statistic}": held[statistic] for statistic in PART_STATISTICS}
        return values | {
            "training/rollout_probs_diff_valid": Low(1.0),
            "training/rollout_probs_diff_mean": Ratio(float(self.probs_diff.sum()), len(self.probs_diff)),
            "training/rollout_probs_diff_max": Peak(float(self.probs_diff.max())),
            "training/rollout_probs_diff_std": Last(float(self.probs_diff.std())),
            "training/rollout_actor_probs_pearson_corr": Last(self.probs_pearson),
        }


def logprob_gap(
    sequences: Sequence[TrainSequence],
    *,
    staleness: Callable[[int], int],
    clip_eps_low: float,
    clip_eps_high: float,
    fresh: Sequence[TrainSequence] = (),
) -> GapReport | None:
    """Compare `proximal_logprobs` with `behavior_logprobs` on action tokens; None when there are none.

    Args:
        sequences: a batch, scored by the trainer before its first update.
        staleness: steps that a weight version is older than the trainer's weights; 0: they are its weights.
        clip_eps_low, clip_eps_high: the clip band that `outside_clip_frac` counts against.
        fresh: sequences outside the batch, sampled under the trainer's weights and scored by them.
    Raises:
        DataError: a sequence was not scored, or a logprob is not finite.
    """
    num_batch = len(sequences)
    sequences = [*sequences, *fresh]
    pairs = [_pair(sequence) for sequence in sequences]
    if not sum(len(trainer) for trainer, _ in pairs[:num_batch]):
        return None
    by_replica: dict[int, list[int]] = defaultdict(list)
    by_staleness: dict[int, list[int]] = defaultdict(list)
    for idx, sequence in enumerate(sequences[:num_batch]):
        if len(pairs[idx][0]):
            by_replica[sequence.replica_id].append(idx)
            by_staleness[staleness(sequence.oldest_version)].append(idx)
    beside = [idx for idx in range(num_batch, len(pairs)) if len(pairs[idx][0])]

    def gap(indices: Sequence[int]) -> LogprobGap:
        trainer, engine = (np.concatenate([pairs[i][side] for i in indices]) for side in (0, 1))
        return LogprobGap.of(trainer, engine, clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)

    trainer, engine = (np.concatenate([pair[side] for pair in pairs[:num_batch]]) for side in (0, 1))
    return GapReport(
        total=gap(range(num_batch)),
        by_replica={replica: gap(indices) for replica, indices in sorted(by_replica.items())},
        by_staleness={age: gap(indices) for age, indices in sorted(by_staleness.items())},
        fresh=gap(beside) if beside else None,
        probs_diff=np.abs(np.exp(trainer) - np.exp(engine)),
        probs_pearson=_pearson(np.exp(trainer), np.exp(engine)),
    )


def _pearson(one: Array, other: Array) -> float:
    if len(one) < 2 or one.std() == 0 or other.std() == 0:
        return math.nan
    return float(np.corrcoef(one, other)[0, 1])


def _pair(sequence: TrainSequence) -> tuple[Array, Array]:
    who = f"trajectory {sequence.group_id}/{sequence.member_idx}"
    if sequence.proximal_logprobs is None:
        raise DataError(
            f"{who} was not scored by the trainer", "compute proximal logprobs of the batch first"
        )
    trainer = sequence.proximal_logprobs[sequence.action_mask].astype(np.float64)
    engine = sequence.behavior_logprobs[sequence.action_mask].astype(np.float64)
    if not (np.isfinite(trainer).all() and np.isfinite(engine).all()):
        raise DataError(
            f"{who} has logprobs that are not finite", "look at the engine and the weights of this version"
        )
    return trainer, engine
