"""Which configs this installation and machine can start: every reason against it, without building anything."""

from __future__ import annotations

from collections.abc import Iterator

from rollbook.config.run_config import RunConfig
from rollbook.errors import ConfigError

Problem = tuple[str, str]
"""(what is wrong, with values; what the reader can do)."""


def unstartable(config: RunConfig) -> list[Problem]:
    """Everything that stands in the way of building the run's parts: packages, devices, combinations that no part can
    serve. Empty for a run that can start. Loads torch only where a device other than the CPU is asked for."""
    return [*_engine_problems(config), *_device_problems(config)]


def require_startable(config: RunConfig) -> None:
    """Refuse what cannot be put together, instead of running something else.

    Raises:
        ConfigError: all problems at once.
    """
    problems = unstartable(config)
    if len(problems) == 1:
        raise ConfigError(*problems[0])
    if problems:
        lines = [f"  {what} ({remedy})" for what, remedy in problems]
        raise ConfigError(f"{len(problems)} problems:\n" + "\n".join(lines), "mend each of them")


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.engine != "native":
        yield (
            f"rollout.engine is '{config.rollout.engine}', which `rollbook train` does not start",
            "use rollout.engine = 'native'",
        )
    if config.sync.transport != "inproc":
        yield (
            f"sync.transport is '{config.sync.transport}', and engines and trainer of this run share one process",
            "use sync.transport = 'inproc'",
        )


def _device_problems(config: RunConfig) -> Iterator[Problem]:
    asked = {"model.device": config.model.device, "rollout.device": config.rollout.device}
    if all(device == "cpu" for device in asked.values()):
        return
    import torch

    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for name, device in asked.items():
        kind, _, index = device.partition(":")
        if kind != "cuda":
            continue
        if not num_gpus:
            yield f"{name} is '{device}' and torch sees no CUDA device", f"use {name} = 'cpu'"
        elif index and int(index) >= num_gpus:
            yield (
                f"{name} is '{device}' and torch sees {num_gpus} CUDA device(s)",
                f"use an index below {num_gpus}, or set CUDA_VISIBLE_DEVICES",
            )
