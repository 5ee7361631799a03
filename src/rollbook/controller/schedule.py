"""The three modes, as data for one control flow. Choosing one is one config line (`run.schedule`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What differs between the modes; everything else is the same code."""

    name: str
    is_on_policy: bool
    """No generation while training: `buffer.max_staleness_steps` must be 0."""
    pauses_for_training: bool
    """The trainer has the device alone: running responses are kept as they are and continue under the new
    version."""
    shares_device: bool
    """Engine and trainer own the device in turn, so weights and pools may be moved aside between them."""


SCHEDULES = {
    "sync": Schedule(name="sync", is_on_policy=True, pauses_for_training=True, shares_device=True),
    "colocate_async": Schedule(
        name="colocate_async", is_on_policy=False, pauses_for_training=True, shares_device=True
    ),
    "separate_async": Schedule(
        name="separate_async", is_on_policy=False, pauses_for_training=False, shares_device=False
    ),
}
