"""Parameters of asynchronous training: how old tokens get, and what a bound on their age costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollbook.errors import PlanError
from rollbook.ledger.lengths import LengthDistribution

_NUM_AGES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncAccount:
    """Steady state of `separate_async` or `colocate_async`."""

    sync_frac: float
    """Publication over the time between two: T_sync / (k T_update)."""
    mean_staleness_steps: float
    """Versions between a trajectory's first token and its use, if nothing bounded them."""
    bounded_staleness_steps: float
    """The same where the trainer waits for what the bound would forbid."""
    max_generation_steps: float
    """Updates that the longest response spans."""
    over_bound_frac: float
    """Trajectories older than the bound at use, to be dropped or waited for in arrival order."""
    max_in_flight: int
    """Trajectories admitted and not yet trained that keep every token within the bound."""


def async_account(
    lengths: LengthDistribution,
    *,
    num_sequences: int,
    token_s: float,
    update_s: float,
    publish_s: float,
    sync_every: int = 1,
    max_staleness_steps: int = 1,
    partial_rollout: bool = True,
) -> AsyncAccount:
    """Staleness of a steady stream of trajectories.

    A response of l tokens takes l x token_s, that is l x token_s / update_s updates; on average half an update
    more passes until the batch it falls into is taken. With `sync_every` k, versions count publications.

    Args:
        token_s: seconds of a decode step with full slots.
        update_s: seconds of one optimizer step of the trainer (the step time when training sets the pace).
        partial_rollout: a response goes on under new weights; its first token still counts its age.
    Raises:
        PlanError: times that are not positive, or a negative bound.
    """
    if min(token_s, update_s) <= 0 or publish_s < 0 or sync_every < 1 or max_staleness_steps < 0:
        raise PlanError("asynchronous parameters are not positive", "give positive seconds and counts")
    version_s = sync_every * update_s
    waits = 0.5
    mean = lengths.mean_tokens * token_s / version_s + waits
    longest = lengths.max_tokens * token_s / version_s
    allowed_tokens = max(max_staleness_steps + 1 - waits, 0.0) * version_s / token_s
    # Without partial rollout a running response is restarted or finished before the weights change.
    over = float(lengths.survival(allowed_tokens)) if partial_rollout else 0.0
    ages = np.minimum(lengths.spread(_NUM_AGES) * token_s / version_s + waits, max_staleness_steps)
    bounded = float(ages.mean())
    return AsyncAccount(
        sync_frac=publish_s / (version_s + publish_s),
        mean_staleness_steps=mean if partial_rollout else min(mean, 1.0),
        bounded_staleness_steps=bounded if partial_rollout else min(bounded, 1.0),
        max_generation_steps=longest,
        over_bound_frac=over,
        max_in_flight=num_sequences * (max_staleness_steps + 1),
    )
