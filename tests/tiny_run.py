"""The real loop on a model of ten thousand parameters: a config, a run through the public entry, what a user sees.

    result = tiny_run(num_steps=3, faults=[FailPublication(version=2)], **{"buffer.max_staleness_steps": 1})

A fault is called with the built controller before the run begins and may wrap any of its parts.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pyarrow.parquet
from torch import Tensor

import rollbook.controller.build as build_module
from rollbook.checkpoint.checkpoint import list_checkpoints, load_checkpoint
from rollbook.config.loading import to_toml
from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import resume_run, start_run
from rollbook.controller.loop import Controller
from rollbook.observe.recorder import Recorder

Fault = Callable[[Controller], None]

TINY: dict[str, Any] = {
    "run": {"num_steps": 2, "groups_per_step": 4},
    "model": {
        "new": {
            "hidden_size": 32,
            "num_layers": 1,
            "num_heads": 2,
            "intermediate_size": 64,
            "initializer_range": 0.3,
            "max_position": 32,
            "alphabet": "0123456789+=",
        }
    },
    "data": {"sources": [{"task": "addition", "num_prompts": 40}]},
    "reward": {"terms": [{"function": "tiny_rewards:low_digits", "isolation": "inline", "is_tested": False}]},
    "rollout": {
        "group_size": 2,
        "max_response_tokens": 6,
        "num_slots": 16,
        "kv_pool_tokens": 512,
        "page_tokens": 8,
    },
    "trainer": {"lr": 1e-2, "num_threads": 1},
    "plan": {"is_on": False},
    "observe": {"terminal": "off", "strict_metrics": True},
}


@dataclass(frozen=True)
class RunResult:
    """What a run left on disk."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Readings of each step, the later ones where a step was repeated; `val/` lines merged in."""
        steps: dict[int, dict[str, Any]] = {}
        for line in _json_lines(self.folder / "metrics.jsonl"):
            steps.setdefault(line["step"], {}).update(line["data"])
        return [steps[step] for step in sorted(steps)]

    @property
    def events(self) -> list[dict[str, Any]]:
        return list(_json_lines(self.folder / "events.jsonl"))

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def trajectories(self, step: int) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(
            self.folder / "trajectories" / f"step_{step}.parquet"
        ).to_pylist()
        return rows

    @property
    def num_steps(self) -> int:
        """Steps with a file of trajectories."""
        return len(list((self.folder / "trajectories").glob("step_*.parquet")))

    @property
    def trained(self) -> list[list[str]]:
        """Prompt ids that each step trained, one a group, in the order of their groups."""
        return [
            list(
                {
                    row["group_id"]: row["prompt_id"]
                    for row in sorted(self.trajectories(step), key=lambda row: row["group_id"])
                    if row["loss_mask"] is not None
                }.values()
            )
            for step in range(self.num_steps)
        ]

    @property
    def state(self) -> dict[str, Any]:
        """The newest checkpoint."""
        folder = self.folder / "checkpoints"
        return load_checkpoint(folder / f"step_{list_checkpoints(folder)[-1]}")

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Master weights of the newest checkpoint."""
        masters: dict[str, Tensor] = self.state["trainer"]["policy"]["masters"]
        return masters


class TinyRun(Protocol):
    """The fixture `tiny_run`."""

    def __call__(
        self,
        *,
        num_steps: int = 2,
        name: str = "run",
        faults: Sequence[Fault] = (),
        config: Mapping[str, Any] | None = None,
        **overrides: Any,
    ) -> RunResult:
        """Run to the end. `config` replaces whole sections of TINY; overrides are dotted names, as in `--set`."""


def run_tiny(
    folder: Path,
    *,
    num_steps: int = 2,
    name: str = "run",
    faults: Sequence[Fault] = (),
    config: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> RunResult:
    path = write_tiny(folder, name=name, num_steps=num_steps, config=config)
    with injected(faults):
        return RunResult(start_run(path, as_set(overrides)))


def resume_tiny(run: RunResult | Path, *, faults: Sequence[Fault] = (), **overrides: Any) -> RunResult:
    folder = run.folder if isinstance(run, RunResult) else run
    with injected(faults):
        return RunResult(resume_run(folder, as_set(overrides)))


def write_tiny(
    folder: Path, *, name: str = "run", num_steps: int = 2, config: Mapping[str, Any] | None = None
) -> Path:
    """A config file whose run directory is `folder`/`name`."""
    whole = {**TINY, **(config or {})}
    whole["run"] = {**whole["run"], "name": name, "dir": str(folder), "num_steps": num_steps}
    path = folder / f"{name}.toml"
    path.write_text(to_toml(whole), encoding="utf-8")
    return path


def tiny_config(**overrides: Any) -> RunConfig:
    """The same config as an object."""
    data = json.loads(json.dumps(TINY))
    for name, value in overrides.items():
        *tables, key = name.split(".")
        table = data
        for part in tables:
            table = table.setdefault(part, {})
        table[key] = value
    return RunConfig.model_validate(data)


def as_set(overrides: Mapping[str, Any]) -> list[str]:
    """Overrides as `--set` takes them."""
    return [f"{name}={_toml_value(value)}" for name, value in overrides.items()]


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml_value(inner) for inner in value) + "]"
    return to_toml({"value": value}).partition("=")[2].strip()


@contextmanager
def injected(faults: Sequence[Fault]) -> Iterator[None]:
    """Every controller built inside gets the faults."""
    plain = build_module.build

    @asynccontextmanager
    async def build(config: RunConfig, recorder: Recorder) -> AsyncIterator[Controller]:
        async with plain(config, recorder) as controller:
            for fault in faults:
                fault(controller)
            yield controller

    build_module.build = build
    try:
        yield
    finally:
        build_module.build = plain


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(encoding="utf-8").splitlines():
        yield json.loads(line)
