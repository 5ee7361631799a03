"""Which groups and tokens are trained, and the count of what was left out, by cause.

Runs on finished groups before they become a batch. Failed members take part in nothing; a group is judged flat
on the raw task score unless the config names another metric, so that a length penalty cannot make a signal of a
group whose answers are all wrong.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rollbook.algos.config import FilterConfig
from rollbook.algos.shaping import RAW_SCORE
from rollbook.errors import DataError
from rollbook.observe.values import Ratio, Total, Values
from rollbook.types import FailureKind, Group, TrainSequence, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What `keep_groups` did. kept + flat + failed is the input, in its order."""

    metric: str
    """What flatness was judged by."""
    kept: list[Group]
    flat: list[Group] = field(default_factory=list)
    failed: list[Group] = field(default_factory=list)
    """Groups with too few scored members."""
    num_trajectories: int = 0
    failures: Counter[FailureKind] = field(default_factory=Counter)
    """Failed trajectories by cause, over all groups."""
    num_truncated: int = 0
    """Scored trajectories that hit the token limit."""

    def values(self) -> Values:
        """Metrics; the two names that end in samples count trajectories."""
        num_groups = len(self.kept) + len(self.flat) + len(self.failed)
        return {
            "filter/flat/num_groups": Total(len(self.flat)),
            "filter/failed/num_groups": Total(len(self.failed)),
            "filter/kept_frac": Ratio(len(self.kept), num_groups),
            "training/filter_groups/evicted_samples": Total(sum(len(g.scored) for g in self.flat)),
            "training/rollout_failure/evicted_samples": Total(sum(len(g.trajectories) for g in self.failed)),
        }


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


def keep_groups(groups: Sequence[Group], config: FilterConfig) -> FilterReport:
    """Sort groups into kept, flat (only with `drop_flat`) and failed."""
    sorted_by: dict[str | None, list[Group]] = {None: [], "flat": [], "failed": []}
    for group in groups:
        sorted_by[drop_reason(group, config)].append(group)
    trajectories = [t for group in groups for t in group.trajectories]
    return FilterReport(
        metric=config.metric,
        kept=sorted_by[None],
        flat=sorted_by["flat"],
        failed=sorted_by["failed"],
        num_trajectories=len(trajectories),
        failures=Counter(t.failure.kind for t in trajectories if t.failure is not None),
        num_truncated=sum(t.is_truncated for group in groups for t in group.scored),
    )


def train_sequences(groups: Sequence[Group], config: FilterConfig) -> list[TrainSequence]:
    """The scored members of kept groups as the trainer sees them, tokens exactly as sampled.

    With `mask_truncated` a response that hit the token limit has an empty loss mask; its reward still counts in
    the group's baseline.
    """
    sequences = []
    for group in groups:
        for trajectory in group.scored:
            assert trajectory.reward is not None
            action_mask = trajectory.action_mask()
            trains = not (config.mask_truncated and trajectory.is_truncated)
            sequences.append(
                TrainSequence(
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
            )
    return sequences
