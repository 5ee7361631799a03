"""Starting and resuming a run: the run directory, the event loop, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.config.loading import config_to_toml, load_config
from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError, RunError
from rollbook.ledger.hardware import MachineSpec
from rollbook.observe.opening import open_recorder
from rollbook.observe.recorder import Recorder

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

OnBuilt = Callable[["Controller"], None]
"""Called with the parts of a run before anything of it begins."""


def start_run(config_path: Path, overrides: Sequence[str], *, on_built: OnBuilt | None = None) -> Path:
    """Run a job to its end; returns the run directory.

    Args:
        on_built: for drills and replays, which wrap a part from outside.
    Raises:
        RunError: of any kind; the run directory, if it was made, is whole and resumable.
    """
    config = load_config(config_path, overrides, RunConfig)
    config.check()
    folder = Path(config.run.dir) / config.run.name
    return _run(config, folder, resume=False, on_built=on_built)


def resume_run(folder: Path, overrides: Sequence[str], *, on_built: OnBuilt | None = None) -> Path:
    """Continue the run in `folder` from its newest checkpoint; `overrides` change fields of its config."""
    path = folder / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no run directory: it has no config.toml", "give the folder of a run")
    config = load_config(path, overrides, RunConfig)
    config.check()
    return _run(config, folder, resume=True, on_built=on_built)


def _run(config: RunConfig, folder: Path, *, resume: bool, on_built: OnBuilt | None = None) -> Path:
    recorder = open_recorder(
        folder,
        config.observe,
        resolved=config.model_dump(mode="json"),
        num_steps=config.run.num_steps,
        resume=resume,
        num_gpus=0 if config.model.device == "cpu" else 1,
    )
    try:
        recorder.run_dir.write_config(config_to_toml(config))
        asyncio.run(_main(config, recorder, resume=resume, on_built=on_built))
    finally:
        recorder.close()
    return folder


def free_name(folder: Path, name: str) -> str:
    """`name`, or `name-2`, `name-3`, ... : the first that no run in `folder` has."""
    number = 1
    while (folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


def calibrate(config_path: Path | None, overrides: Sequence[str], *, device: str) -> MachineSpec:
    """Ceilings of this machine and, with a config, the coefficients of its model."""
    import torch

    from rollbook.controller.calibrate import measure_machine

    if config_path is None:
        return measure_machine(torch.device(device))
    config = load_config(config_path, [*overrides, "observe.terminal=off", "plan.hardware=''"], RunConfig)
    config.check()
    with tempfile.TemporaryDirectory() as folder:
        recorder = open_recorder(Path(folder) / "calibrate", config.observe, resolved={})
        try:
            return asyncio.run(_calibrate(config, recorder))
        finally:
            recorder.close()


async def _calibrate(config: RunConfig, recorder: Recorder) -> MachineSpec:
    from rollbook.controller.build import build
    from rollbook.controller.expectation import make_plan

    async with build(config, recorder) as controller:
        await controller.publish(controller.weight_version)
        plan = await make_plan(controller)
        if plan is None:
            raise ConfigError(
                "this config cannot be calibrated: plan.is_on is false, or its engine is not the native one",
                "set plan.is_on = true and rollout.engine = 'native'",
            )
        return plan.machine


async def _main(config: RunConfig, recorder: Recorder, *, resume: bool, on_built: OnBuilt | None) -> None:
    from rollbook.controller.build import build

    async with build(config, recorder) as controller:
        if on_built is not None:
            on_built(controller)
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()

        def interrupt() -> None:
            """First Ctrl-C: end after this step, with a checkpoint. Second, or before the first step: at once; resume
            repeats the step."""
            if controller.is_stop_requested or not controller.is_stepping:
                task.cancel()
            controller.is_stop_requested = True
            recorder.event("interrupted", remedy="again to stop at once; `rollbook train --resume` continues")

        with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):  # not on the main thread
            loop.add_signal_handler(signal.SIGINT, interrupt)
            loop.add_signal_handler(signal.SIGTERM, interrupt)
        try:
            await controller.begin(resume=resume)
            if resume and controller.is_complete:
                done = f"{controller.num_steps_done} of {config.run.num_steps} steps"
                print(f"{recorder.path} is already complete: {done}; nothing was trained", file=sys.stderr)
            await controller.run()
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
        except RunError as error:
            recorder.event("run_failed", error=error.what, remedy=error.remedy)
            raise
        if controller.is_stop_requested:
            raise KeyboardInterrupt
