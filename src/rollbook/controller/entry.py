"""Starting and resuming a run: the run directory, the event loop, Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rollbook.config.effects import unused_options
from rollbook.config.loading import config_to_toml, load_config
from rollbook.config.paths import missing_files, with_whole_paths
from rollbook.config.run_config import RunConfig
from rollbook.controller.interrupts import Interrupts
from rollbook.controller.startable import device_problem, unstartable
from rollbook.errors import ConfigError, RunError, SyncError, TrainerDownError
from rollbook.ledger.hardware import MachineSpec
from rollbook.observe.opening import open_recorder
from rollbook.observe.recorder import Recorder
from rollbook.observe.run_dir import is_in_use

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

OnBuilt = Callable[["Controller"], None]
"""Called with the parts of a run before anything of it begins."""


def start_run(config_path: Path, overrides: Sequence[str], *, on_built: OnBuilt | None = None) -> Path:
    """Run a job to its end; returns the run directory.

    Args:
        on_built: for drills and replays, which wrap a part from outside.
    Raises:
        RunError: of any kind. A run that could not begin leaves no run directory; any other a whole, resumable one.
    """
    config = _load(config_path, overrides)
    return _run(config, Path(config.run.dir) / config.run.name, resume=False, on_built=on_built)


def resume_run(folder: Path, overrides: Sequence[str], *, on_built: OnBuilt | None = None) -> Path:
    """Continue the run in `folder` from its newest checkpoint; `overrides` change fields of its config.

    Raises:
        RunError: of any kind; before the checkpoint is taken up, nothing in `folder` is changed.
    """
    path = folder / "config.toml"
    if not path.is_file():
        if holder := is_in_use(folder):
            raise ConfigError(
                f"run directory {folder} is in use by {holder}, which has not begun its run yet",
                "wait for that run or stop it, or choose another run directory",
            )
        raise ConfigError(f"{folder} is no run directory: it has no config.toml", "give the folder of a run")
    return _run(_load(path, overrides), folder, resume=True, on_built=on_built)


def _load(path: Path, overrides: Sequence[str]) -> RunConfig:
    """The config, with every reason against starting it in one error."""
    config = with_whole_paths(load_config(path, overrides, RunConfig), path.parent)
    config = _with_search_path(config, path.parent)
    config.check([*unstartable(config), *missing_files(config, path.parent)])
    return config


def _with_search_path(config: RunConfig, folder: Path) -> RunConfig:
    """Own reward functions are found beside the config and in the current folder, also by a resume from elsewhere."""
    if config.reward.search_path or not any(":" in term.function for term in config.reward.terms):
        return config
    folders = tuple(dict.fromkeys(str(place.resolve()) for place in (folder, Path.cwd())))
    return config.model_copy(update={"reward": config.reward.model_copy(update={"search_path": folders})})


def _run(config: RunConfig, folder: Path, *, resume: bool, on_built: OnBuilt | None) -> Path:
    """To the end; after the loss of a trainer's process, again from the last checkpoint."""
    for left in reversed(range(config.cluster.max_restarts + 1)):
        try:
            return _attempt(config, folder, resume=resume, on_built=on_built)
        except TrainerDownError as error:
            from rollbook.checkpoint.checkpoint import list_checkpoints

            if not left or not list_checkpoints(folder / "checkpoints"):
                raise
            print(f"{error.what}; the run goes on from its last checkpoint", file=sys.stderr)
            resume = True
    raise AssertionError("the last attempt returns or raises")


def _attempt(config: RunConfig, folder: Path, *, resume: bool, on_built: OnBuilt | None) -> Path:
    with Interrupts() as interrupts:
        recorder = open_recorder(
            folder,
            config.observe,
            resolved=config.model_dump(mode="json"),
            num_steps=config.run.num_steps,
            resume=resume,
            num_gpus=0 if config.model.device == "cpu" else config.pools.num_devices,
            config_toml=config_to_toml(config),
            is_held=on_built is None,  # how a drill's run fails is its result, also before the first step
        )
        interrupts.recorder = recorder
        try:
            asyncio.run(_main(config, recorder, interrupts, resume=resume, on_built=on_built))
        finally:
            recorder.close()
    if interrupts.is_interrupted:
        if recorder.is_accepted:
            raise KeyboardInterrupt(f"`rollbook train --resume {folder}` continues")
        raise KeyboardInterrupt("before the run began; nothing was written")
    return folder


def free_name(folder: Path, name: str) -> str:
    """`name`, or `name-2`, `name-3`, ... : the first that no run in `folder` has."""
    number = 1
    while (folder / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    return name if number == 1 else f"{name}-{number}"


def calibrate(config_path: Path | None, overrides: Sequence[str], *, device: str) -> MachineSpec:
    """Ceilings of this machine and, with a config, the coefficients of its model.

    Raises:
        RunError: of any kind; a device that is not there, a config that cannot run.
    """
    import torch

    from rollbook.trainer.ceilings import measure_machine

    if config_path is None:
        if problem := device_problem("--device", device):
            raise ConfigError(*problem)
        return measure_machine(torch.device(device))
    config = _load(config_path, [*overrides, "observe.terminal=off", "plan.hardware=''"])
    with Interrupts() as interrupts, tempfile.TemporaryDirectory() as folder:
        recorder = open_recorder(Path(folder) / "calibrate", config.observe, resolved={})
        try:
            machine = asyncio.run(_calibrate(config, recorder, interrupts))
        finally:
            recorder.close()
    if machine is None:
        raise KeyboardInterrupt("nothing was written")
    return machine


async def _calibrate(config: RunConfig, recorder: Recorder, interrupts: Interrupts) -> MachineSpec | None:
    """What was measured; None where it was interrupted."""
    from rollbook.controller.build import build
    from rollbook.controller.expectation import make_plan

    if not config.plan.is_on:
        raise ConfigError("this config asks for no calibration: plan.is_on is false", "set plan.is_on = true")
    try:
        with interrupts.attached():
            async with build(config, recorder) as controller:
                await controller.publish(controller.weight_version)
                return (await make_plan(controller)).machine
    except asyncio.CancelledError:
        if not interrupts.is_stopping:
            raise
        return None


async def _main(
    config: RunConfig, recorder: Recorder, interrupts: Interrupts, *, resume: bool, on_built: OnBuilt | None
) -> None:
    """The run, from its parts to its end. Ends quietly where it was interrupted: `interrupts` knows."""
    try:
        with interrupts.attached():
            await asyncio.sleep(0)  # a signal that came before the loop ends it here
            for unused in unused_options(config):
                recorder.event("no_effect", says=unused.says, **unused._asdict())
            with recorder.span("import"):
                from rollbook.controller.begin import begin
                from rollbook.controller.build import build

                if config.observe.trajectories_every_steps:
                    importlib.import_module("rollbook.observe.trajectories")  # not within the first step

            async with build(config, recorder) as controller:
                if on_built is not None:
                    on_built(controller)
                interrupts.controller = controller
                interrupts.take()
                try:
                    await begin(controller, resume=resume)
                    if resume and controller.is_complete:
                        done = f"{controller.num_steps_done} of {config.run.num_steps} steps"
                        print(
                            f"{recorder.path} is already complete: {done}; nothing was trained",
                            file=sys.stderr,
                        )
                    await controller.run()
                finally:
                    interrupts.is_closing = True
    except asyncio.CancelledError:
        if not interrupts.is_stopping:
            raise
    except RunError as error:
        # A publication that fails is the machinery's fault, not the user's: what led to it is worth keeping.
        if isinstance(error, SyncError):
            with contextlib.suppress(RunError):
                recorder.accept()
        recorder.event("run_failed", error=error.what, remedy=error.remedy)
        raise
