"""The three modes, as data for one control flow. Choosing one is one config line (`run.schedule`)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What differs between the modes; everything else is the same code."""

    is_on_policy: bool
    """No generation while training: `buffer.max_staleness_steps` must be 0."""
    pauses_for_training: bool
    """Engine and trainer own the device in turn. While the trainer has it, running responses are kept as they are, to
    continue under the new version, and weights and pools may be moved aside."""


SCHEDULES = {
    "sync": Schedule(is_on_policy=True, pauses_for_training=True),
    "colocate_async": Schedule(is_on_policy=False, pauses_for_training=True),
    "separate_async": Schedule(is_on_policy=False, pauses_for_training=False),
}
