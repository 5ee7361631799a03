"""What a checkpoint of a run holds, and how a run takes it up again.

Trainer (weights, optimizer, schedule), prompt stream (what was consumed), counters of the buffer. Groups that were
under way or finished and not yet trained are not saved: their prompts were never acknowledged, so the resumed
stream hands them out again and they are sampled afresh. None is lost, none counts twice.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rollbook.checkpoint.checkpoint import (
    Written,
    commit_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prepare_checkpoint,
    take_place,
    write_aside,
)
from rollbook.checkpoint.config import CheckpointConfig
from rollbook.observe.run_dir import read_json_lines

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller
    from rollbook.trainer.trainer import Trainer


class StateSource(Protocol):
    """Who writes the trainer's state as it is now."""

    def write_state(self, folder: Path) -> Written: ...


class Saver:
    """Writes and reads `checkpoints/` of one run directory."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        self.folder = folder
        self.config = config
        self.newest_step: int | None = None
        """Steps done of the checkpoint written or taken up last."""
        self.last_write_s: float | None = None
        """Seconds that writing the newest checkpoint took, in this process or an earlier one; None: not known."""
        self.last_write_bytes = 0
        """Of that checkpoint; 0: not known."""
        self._prepared: int | None = None

    @property
    def is_prepared(self) -> bool:
        """A checkpoint was written aside and waits for `commit`."""
        return self._prepared is not None

    def is_due(self, num_steps_done: int, *, is_last: bool) -> bool:
        every = self.config.every_steps
        return is_last or (every > 0 and num_steps_done % every == 0)

    def counters(self, controller: Controller, num_steps_done: int) -> dict[str, Any]:
        """Everything but the trainer, copied at one moment of the event loop."""
        return {
            "num_steps_done": num_steps_done,
            "weight_version": controller.weight_version,
            "stream": controller.rollout.stream.state(),
            "buffer": controller.rollout.buffer.state(),
        }

    def write(self, counters: dict[str, Any], trainer: StateSource) -> None:
        """Write `checkpoints/step_N` aside. Called on the trainer's thread, at the end of a step."""
        self.last_write_bytes = prepare_checkpoint(
            self.folder, counters["num_steps_done"], counters, {"trainer": trainer.write_state}
        )
        self._prepared = counters["num_steps_done"]

    def commit(self) -> Path | None:
        """Make what was written aside the newest checkpoint: only once the step's line of metrics is on disk, so that
        no resumed run begins after a step that left none. Returns its folder; None where nothing was written."""
        if self._prepared is None:
            return None
        path = commit_checkpoint(self.folder, self._prepared, keep=self.config.keep)
        self.newest_step, self._prepared = self._prepared, None
        return path

    def take_up_last_write(self, events: Path) -> None:
        """Know of a resumed run what writing its newest checkpoint took."""
        newest = last_span(events, "checkpoint")
        self.last_write_s, self.last_write_bytes = newest.get("duration_s"), newest.get("bytes", 0)

    def write_model(self, trainer: Trainer) -> Path:
        """Write `model/` beside the checkpoints: the published weights as a Hugging Face folder, whole or not at all.

        Raises:
            CheckpointError: it could not be written.
        """
        final = self.folder.parent / "model"
        write_aside(final, trainer.save_model)
        return take_place(final)

    def load(self, controller: Controller) -> int | None:
        """Take up the newest checkpoint; returns its step, or None where there is none."""
        steps = list_checkpoints(self.folder)
        if not steps:
            return None
        newest = self.folder / f"step_{steps[-1]}"
        state = load_checkpoint(newest)
        controller.trainer.read_state(newest)
        controller.rollout.stream.restore(state["stream"])
        controller.rollout.buffer.restore(state["buffer"])
        controller.weight_version = state["weight_version"]
        controller.num_steps_done = self.newest_step = state["num_steps_done"]
        return self.newest_step


def last_span(events: Path, name: str) -> dict[str, Any]:
    """The newest whole span of this name in a run's events; empty where there is none."""
    newest: dict[str, Any] = {}
    for line in read_json_lines(events):
        if line.get("kind") == "span" and line.get("name") == name and "error" not in line:
            newest = line
    return newest
