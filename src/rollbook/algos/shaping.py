"""Reward shaping that belongs to the algorithm. The raw task score stays beside it, under the term "score"."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.algos.config import OverlongConfig
from rollbook.types import Group

RAW_SCORE = "score"
"""Name of the reward term that holds the task score before any shaping."""
OVERLONG = "overlong"
"""Name of the reward term that holds the length penalty, at most 0."""


def overlong_penalty(num_response_tokens: int, *, max_response_tokens: int, config: OverlongConfig) -> float:
    """Reward units to add, from 0 down to -penalty at the token limit. Source: arXiv:2503.14476, eq. 13.

    >>> config = OverlongConfig(buffer_frac=0.25, penalty=1.0)
    >>> [overlong_penalty(n, max_response_tokens=20, config=config) for n in (5, 15, 19, 20)]
    [0.0, 0.0, -0.8, -1.0]
    """
    buffer_tokens = config.buffer_frac * max_response_tokens
    if buffer_tokens == 0:
        return 0.0
    over = num_response_tokens - (max_response_tokens - buffer_tokens)
    return -config.penalty * min(max(over / buffer_tokens, 0.0), 1.0) + 0.0


def shape_rewards(groups: Iterable[Group], config: OverlongConfig, *, max_response_tokens: int) -> None:
    """Set each scored trajectory's reward to its raw score plus the length penalty. May run twice.

    A trajectory without the term "score" has its present reward taken as the raw score.
    """
    for group in groups:
        for trajectory in group.scored:
            assert trajectory.reward is not None
            score = trajectory.reward_terms.setdefault(RAW_SCORE, trajectory.reward)
            if config.buffer_frac:
                penalty = overlong_penalty(
                    trajectory.num_response_tokens, max_response_tokens=max_response_tokens, config=config
                )
                trajectory.reward_terms[OVERLONG] = penalty
                trajectory.reward = score + penalty
