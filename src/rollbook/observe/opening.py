"""Opening a run's recorder from its config: the terminal, Prometheus, trackers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollbook.observe.clock import Clock, SystemClock
from rollbook.observe.config import ObserveConfig
from rollbook.observe.recorder import Recorder, Sink
from rollbook.observe.sinks.table import SinkTarget, open_sink


def open_recorder(
    run_dir: Path,
    config: ObserveConfig,
    *,
    resolved: Mapping[str, object],
    num_steps: int | None = None,
    resume: bool = False,
    num_gpus: int = 0,
    decode: Callable[[Sequence[int]], str] | None = None,
    clock: Clock | None = None,
    config_toml: str = "",
    is_held: bool = False,
) -> Recorder:
    """The recorder of a run with every sink that its config asks for.

    Args:
        resolved: the whole config as plain tables, for trackers.
        num_steps, resume, num_gpus, decode, config_toml, is_held: see `TerminalView` and `Recorder`.
    Raises:
        RunError: the run directory cannot be taken (see `RunDir.open`).
        ConfigError: a tracker is not installed, or the Prometheus port is taken.
    """
    clock = clock or SystemClock()

    def sinks(path: Path) -> list[Sink]:
        made: list[Sink] = []
        try:
            if config.prometheus_port is not None:
                from rollbook.observe.prometheus import PrometheusSink

                endpoint = PrometheusSink(
                    path.name,
                    host=config.prometheus_host,
                    port=config.prometheus_port,
                    num_steps=num_steps,
                    clock=clock,
                )
                made.append(endpoint)
                print(f"metrics for Prometheus at {endpoint.url}", file=sys.stderr)
            target = SinkTarget(run_dir=path, project=config.project, name=path.name, config=resolved)
            made += [open_sink(tracker, target) for tracker in config.trackers]
        except BaseException:
            for sink in made:
                sink.close()
            raise
        return made

    view: Sink | None = None
    if config.terminal != "off":
        from rollbook.observe.terminal import TerminalView

        view = TerminalView(run_dir, num_steps=num_steps, clock=clock, is_live=config.terminal == "auto")
    return Recorder(
        run_dir,
        sinks,
        clock=clock,
        resume=resume,
        strict=config.strict_metrics,
        num_gpus=num_gpus,
        decode=decode,
        view=view,
        config_toml=config_toml,
        is_held=is_held,
    )
