"""What a run directory says of the run that a replay repeats: steps, publications, trajectories, threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rollbook.errors import ConfigError
from rollbook.observe.numbers import counted
from rollbook.observe.run_dir import read_json_lines
from rollbook.observe.trajectories import read_loss_masks, read_trajectories
from rollbook.types import Bools, Trajectory


@dataclass(frozen=True, slots=True)
class Publication:
    """A version as the log has it."""

    after_steps: int
    """Steps whose updates it contains."""
    weight_version: int
    digest: str | None
    """Of all tensors; None in logs of before it was written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threads:
    """With how many threads each side computed: another number adds floats up in another order."""

    trainer: int
    engine: int

    def __str__(self) -> str:
        return f"{counted(self.trainer, 'thread')} for the trainer and {self.engine} for an engine"


@dataclass(slots=True)
class RunLog:
    """What a run directory says of its steps."""

    folder: Path
    publications: list[Publication]
    num_steps: int
    threads: list[Threads]
    """Of the run's processes, in their order, each number once; none in logs of before it was written."""

    def trajectories(self, step: int) -> list[Trajectory]:
        return read_trajectories(self._path(step))

    def loss_masks(self, step: int) -> dict[str, Bools]:
        return read_loss_masks(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / "trajectories" / f"step_{step}.parquet"


def read_log(folder: Path) -> RunLog:
    """Raises ConfigError: the folder has no log, or no finished step."""
    publications: list[Publication] = []
    threads: list[Threads] = []
    is_resumed, num_steps = False, 0
    path = folder / "events.jsonl"
    if not path.is_file():
        raise ConfigError(f"there is no {path}", "a replay reads versions and steps from it")
    for event in read_json_lines(path):
        step = event.get("step")
        if event.get("kind") == "run_resumed":
            is_resumed = True
        elif event.get("kind") == "span_open" and event.get("name") == "step" and isinstance(step, int):
            if is_resumed:  # what came after the checkpoint was taken back
                publications = [p for p in publications if p.after_steps <= step]
                is_resumed = False
        elif event.get("kind") == "span" and event.get("name") == "step" and isinstance(step, int):
            num_steps = step + 1 if "error" not in event else num_steps
        elif event.get("kind") == "publication":
            after = step + 1 if isinstance(step, int) else num_steps
            publications.append(Publication(after, int(event["weight_version"]), event.get("digest")))
        elif event.get("kind") == "threads":
            threads.append(Threads(trainer=int(event["trainer"]), engine=int(event["engine"])))
    if not num_steps:
        raise ConfigError(f"{folder} has no finished step", "a replay repeats steps: run one")
    return RunLog(folder, publications, num_steps, list(dict.fromkeys(threads)))
