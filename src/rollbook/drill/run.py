"""A drill: one run with one fault in it, and what the diagnosis makes of its log.

config + what the fault needs ──► run directory (with a `drill` event) ──► diagnosis of the whole log: which rule?
                                                                    ├──► of growing parts of it: from which step on?
                                                                    └──► of the steps before the fault: is it well?
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import free_name, resume_run, start_run
from rollbook.controller.loop import Controller
from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.series import RunSeries
from rollbook.diagnose.tree import diagnose
from rollbook.drill.fault import Fault, Site, wrap
from rollbook.drill.faults import FAULTS
from rollbook.errors import ConfigError, RunError, nearest_name
from rollbook.observe.numbers import counted

LEAST_STEPS = 12
"""Steps of a drill below which neither what was before the fault nor what came after can be judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillReport:
    """Whether, when and by which rule a fault was found."""

    fault: str
    says: str
    run_dir: str
    changed: dict[str, Any]
    """Config fields that the drill set."""
    at_step: int
    """The fault is there from this step on."""
    last_step: int
    ended_with: str | None
    """The error that ended the run, if one did."""
    expects: tuple[str, ...]
    verdict: str
    """Of the whole log: a rule's name, or "well"."""
    is_found: bool
    onset_step: int | None
    """Where the finding says that it began."""
    found_at_step: int | None
    """The first step with which the log named the fault and kept naming it."""
    control_verdict: str
    """Of the steps before the fault."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find_fault(name: str) -> Fault:
    """The fault of that name. Raises ConfigError with the nearest ones."""
    if name not in FAULTS:
        raise ConfigError(f"there is no fault {name!r}", nearest_name(name, FAULTS))
    return FAULTS[name]


def run_drill(
    fault: Fault, config_path: Path, overrides: Sequence[str], *, num_steps: int, at_step: int | None
) -> DrillReport:
    """Run the job of a config with one fault in it and diagnose what it logged.

    Raises:
        ConfigError: the config cannot run, or lacks what the fault needs.
    """
    at_step = num_steps // 3 if at_step is None else at_step
    if num_steps < LEAST_STEPS or not 4 <= at_step <= num_steps - 4:
        raise ConfigError(
            f"a drill of {counted(num_steps, 'step')} with its fault at step {at_step}",
            f"use at least {LEAST_STEPS} steps, and leave 4 or more on either side of the fault",
        )
    plain = load_config(config_path, overrides, RunConfig)
    changed = _changed(fault, plain, num_steps)
    name = free_name(Path(plain.run.dir), f"{plain.run.name}-drill-{fault.name}")
    sets = [*overrides, *(f"{key}={_toml(value)}" for key, value in changed.items()), f"run.name={name}"]
    error = _run(fault, config_path, sets, at_step)
    folder = Path(plain.run.dir) / name
    if not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").stat().st_size:
        raise error or RunError(f"the drill left no step in {folder}", "look at its events.jsonl")
    return _report(fault, folder, changed, at_step, error)


def _changed(fault: Fault, config: RunConfig, num_steps: int) -> dict[str, Any]:
    num_sources = len(config.data.sources)
    if num_sources < fault.least_sources:
        raise ConfigError(
            f"fault {fault.name!r} needs {fault.least_sources} data sources and the config has {num_sources}",
            "drill a config with more sources: the drill cannot make one up",
        )
    changed: dict[str, Any] = {
        key: value for key, value in fault.needs.items() if _value(config, key) != value
    }
    changed |= {key: value for key, value in fault.least.items() if _value(config, key) < value}
    if config.run.num_steps != num_steps:
        changed["run.num_steps"] = num_steps
    if config.checkpoint.save_model:
        changed["checkpoint.save_model"] = False
    return changed


def _run(fault: Fault, config_path: Path, sets: Sequence[str], at_step: int) -> RunError | None:
    """The run, to its end or to the error that ends it."""

    def inject(controller: Controller) -> None:
        controller.recorder.event("drill", fault=fault.name, at_step=at_step, says=fault.says)
        fault.inject(Site(controller, at_step))

    try:
        if not fault.takes_up_again:
            start_run(config_path, sets, on_built=inject)
            return None
        config = load_config(config_path, sets, RunConfig)
        with contextlib.suppress(KeyboardInterrupt):  # how a run that was asked to stop ends
            start_run(config_path, sets, on_built=lambda controller: _stop_after(controller, at_step))
        resume_run(Path(config.run.dir) / config.run.name, [], on_built=inject)
    except RunError as error:
        return error
    except (MemoryError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
        return RunError(f"{type(error).__name__}: {error}", "it is the fault's own")
    return None


def _stop_after(controller: Controller, num_steps: int) -> None:
    """End the run after so many steps, with a checkpoint, as Ctrl-C does."""

    def around(save: Any) -> Any:
        async def stop_and_save(step: int) -> None:
            controller.is_stop_requested |= step + 1 >= num_steps
            await save(step)

        return stop_and_save

    wrap(controller, "_save", around)


def _report(
    fault: Fault, folder: Path, changed: Mapping[str, Any], at_step: int, error: RunError | None
) -> DrillReport:
    series = load(str(folder))
    whole = diagnose(series)
    control = until(series, at_step)
    finding = whole.findings[0] if whole.findings else None
    is_found = _names(fault, whole) and (not fault.notes or any(fault.notes in note for note in whole.notes))
    return DrillReport(
        fault=fault.name,
        says=fault.says,
        run_dir=str(folder),
        changed=dict(changed),
        at_step=at_step,
        last_step=int(series.steps[-1]),
        ended_with=None if error is None else error.what,
        expects=fault.expects,
        verdict=whole.verdict,
        is_found=is_found,
        onset_step=None if finding is None else finding.step,
        found_at_step=max(_found_at(fault, series, at_step), at_step) if is_found else None,
        control_verdict="not_judged" if control is None else diagnose(control).verdict,
    )


def _found_at(fault: Fault, series: RunSeries, at_step: int) -> int:
    """Walk back from the whole log for as long as it still names the fault."""
    found = int(series.steps[-1])
    for step in sorted((int(s) for s in series.steps if s >= at_step), reverse=True)[1:]:
        part = until(series, step + 1)
        if part is None or not _names(fault, diagnose(part)):
            break
        found = step
    return found


def _names(fault: Fault, diagnosis: Diagnosis) -> bool:
    return diagnosis.verdict in fault.expects


def until(series: RunSeries, step: int) -> RunSeries | None:
    """The part of a run before a step; None when there is nothing of it."""
    n = int(np.searchsorted(series.steps, step))
    if n == 0:
        return None
    values = {name: column[:n] for name, column in series.values.items()}
    return replace(
        series,
        steps=series.steps[:n],
        values={name: column for name, column in values.items() if np.isfinite(column).any()},
        at_s=series.at_s[:n],
        non_finite={
            name: kept for name, at in series.non_finite.items() if (kept := [s for s in at if s < step])
        },
        events=[event for event in series.events if event.step is not None and event.step < step],
        seams=[seam for seam in series.seams if seam.step < step],
        notes=[],
    )


def _value(config: RunConfig, dotted: str) -> Any:
    value: Any = config
    for part in dotted.split("."):
        value = getattr(value, part)
    return value


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
