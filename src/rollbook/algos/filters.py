"""Which groups and tokens are trained, and the count of what was left out, by cause.

Runs on finished groups before they become a batch. Failed members take part in nothing; a group is judged flat
on the raw task score unless the config names another metric, so that a length penalty cannot make a signal of a
group whose answers are all wrong.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from rollbook.algos.config import FilterConfig
from rollbook.algos.shaping import RAW_SCORE
from rollbook.errors import DataError
from rollbook.types import Group, TrainSequence, Trajectory


def metric_of(trajectory: Trajectory, metric: str) -> float:
    """The reward, the raw score, or a reward term by its name."""
    assert trajectory.reward is not None
    if metric == "reward":
        return trajectory.reward
    if metric in trajectory.reward_terms:
        return trajectory.reward_terms[metric]
    if metric == RAW_SCORE:
        return trajectory.reward
    raise DataError(
        f"trajectory {trajectory.trajectory_id} has no reward term {metric!r} (algorithm.filter.metric)",
        "choose 'score', 'reward' or one of: " + ", ".join(sorted(trajectory.reward_terms)),
    )


def is_flat(group: Group, metric: str) -> bool:
    """Whether all scored members have one value; a group of one has nothing to be compared with."""
    return len({metric_of(trajectory, metric) for trajectory in group.scored}) < 2


def drop_reason(group: Group, config: FilterConfig) -> Literal["failed", "flat"] | None:
    """Why a finished group is not worth training, or None."""
    if len(group.scored) < config.min_scored:
        return "failed"
    if config.drop_flat and is_flat(group, config.metric):
        return "flat"
    return None


def train_sequences(groups: Sequence[Group], config: FilterConfig) -> list[TrainSequence]:
    """The scored members of kept groups as the trainer sees them, tokens exactly as sampled.

    With `mask_truncated` a trajectory that a limit ended has an empty loss mask; its reward still counts in the
    group's baseline.
    """
    return [_train_sequence(group, trajectory, config) for group in groups for trajectory in group.scored]


def fresh_sequences(
    groups: Iterable[Group], config: FilterConfig, *, weight_version: int, most: int
) -> list[TrainSequence]:
    """As `train_sequences`, of the first members that were sampled under `weight_version` from their first token on."""
    fresh = (
        _train_sequence(group, trajectory, config)
        for group in groups
        for trajectory in group.scored
        if trajectory.oldest_version == weight_version
    )
    return list(itertools.islice(fresh, most))


def _train_sequence(group: Group, trajectory: Trajectory, config: FilterConfig) -> TrainSequence:
    assert trajectory.reward is not None
    action_mask = trajectory.action_mask()
    trains = not (config.mask_truncated and trajectory.is_truncated)
    return TrainSequence(
        group_id=group.group_id,
        member_idx=trajectory.member_idx,
        source=trajectory.prompt.source,
        token_ids=trajectory.token_ids(),
        action_mask=action_mask,
        loss_mask=action_mask.copy() if trains else np.zeros_like(action_mask),
        behavior_logprobs=trajectory.behavior_logprobs(),
        reward=trajectory.reward,
        oldest_version=trajectory.oldest_version,
        is_truncated=trajectory.is_truncated,
        replica_id=trajectory.replica_id,
    )
