"""When checkpoints are written and how many are kept."""

from __future__ import annotations

from pydantic import Field

from rollbook.section import Section


class CheckpointConfig(Section):
    """The whole RL state, written aside and renamed when whole."""

    every_steps: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk."""
    save_model: bool = True
    """Write the final weights and tokenizer as a Hugging Face folder, `model/` in the run directory."""
