"""How many groups may be under way, and how stale a trained token may be."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollbook.section import Section

REFILLS_PER_GROUP = 10
"""Where nine of ten groups are flat, a step still gets its own."""
MIN_REFILLS = 64
"""Of a small step: that few prompts in a row may be flat by chance."""


class BufferConfig(Section):
    """The buffer between generation and training."""

    max_staleness_steps: int = Field(default=0, ge=0)
    """Steps the trainer may be ahead of the oldest token it trains on. 0 is on-policy (and all that `sync` can
    do, and what `separate_async` does without a bound of its own: the same parameters as `sync`); 1, the default under
    `colocate_async`, already brings most of the throughput of asynchrony."""
    order: Literal["admission", "arrival"] = "admission"
    """Which finished groups a step takes. `admission`: in the order of their prompts, so that the batch does not
    depend on timing and long responses are not disfavoured. `arrival`: the first to finish."""
    when_stale: Literal["drop", "wait"] = "wait"
    """`arrival` order only: a group that would become too stale is evicted (`drop`), or the trainer waits for
    it and takes it first (`wait`)."""
    refill_failed: bool = True
    """A group that failed is replaced by a new prompt, so that every step trains `groups_per_step` groups."""
    max_refills_per_step: int | None = Field(default=None, ge=0)
    """Groups that may be replaced (failed, flat, stale) while one step is collected. Beyond it the run is starved.
    Empty: ten times as many as a step has, and at least 64."""
    on_starvation: Literal["stop", "train_partial"] = "stop"
    """When refills run out: end the run with a finding, or train the groups there are."""
    max_running_groups: int = Field(default=0, ge=0)
    """Groups generated at once; 0: as many as staleness admits, up to 4,096 (or one step's, where that is more)."""
    group_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds from admission after which a group's unfinished trajectories are failed as timeouts."""
    step_deadline_s: float = Field(default=3600.0, gt=0)
    """Seconds a step may wait for its groups; then the run stops and names the trajectories it waited for."""

    def max_refills(self, groups_per_step: int) -> int:
        """`max_refills_per_step`, or what stands for it.

        >>> BufferConfig().max_refills(256), BufferConfig(max_refills_per_step=5).max_refills(256)
        (2560, 5)
        """
        if self.max_refills_per_step is not None:
            return self.max_refills_per_step
        return max(REFILLS_PER_GROUP * groups_per_step, MIN_REFILLS)

    @model_validator(mode="after")
    def _has_effect(self) -> Self:
        if self.when_stale == "drop" and self.order == "admission":
            raise ValueError(
                "buffer.when_stale is 'drop' and buffer.order 'admission', in which nothing goes stale: use order = "
                "'arrival', or leave when_stale out"
            )
        return self
