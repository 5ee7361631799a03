"""The table of trackers, and what each is told when it opens."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rollbook.errors import ConfigError, nearest_name
from rollbook.observe.recorder import Sink

SINKS: dict[str, str] = {
    # name in the config -> class, in the file that bears the name
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "mlflow": "MlflowSink",
    "trackio": "TrackioSink",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkTarget:
    """Where a tracker files this run."""

    run_dir: Path
    project: str
    name: str
    config: Mapping[str, object]
    """The resolved config as plain tables."""


def open_sink(name: str, target: SinkTarget) -> Sink:
    """Raises ConfigError for an unknown tracker or one whose package is not installed."""
    if name not in SINKS:
        raise ConfigError(f"observe.trackers names {name!r}", nearest_name(name, SINKS))
    module = importlib.import_module(f"rollbook.observe.sinks.{name}")
    sink: Sink = getattr(module, SINKS[name])(target)
    return sink


@contextlib.contextmanager
def needs_extra(extra: str) -> Iterator[None]:
    """Around the import of an optional package: its absence is an error that names the extra."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"observe.trackers names {extra!r}, but {error.name or extra} is not installed",
            f"pip install 'rollbook[{extra}]', or remove it from observe.trackers",
        ) from error
