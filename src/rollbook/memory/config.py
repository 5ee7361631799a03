"""What leaves a device that engine and trainer own in turn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollbook.section import Section


class MemoryConfig(Section):
    """The `[memory]` table. Nothing moves by default: what fits side by side need not change places."""

    sleep_level: Literal[0, 1, 2] = 0
    """What an engine gives back while the trainer computes: 0 nothing; 1 its KV pool, and its weights to host memory;
    2 both are dropped, and the step's publication brings the weights back. Running responses are kept as tokens."""
    offload: bool = False
    """While the engine generates, the trainer's master weights, moments, reference, critic and teacher wait in pinned
    host memory."""
    move_deadline_s: float = Field(300.0, gt=0)
    """Longest one move of a hand-over may take, a pause or a resume without any other move as well."""

    @property
    def moves_anything(self) -> bool:
        return self.sleep_level > 0 or self.offload
