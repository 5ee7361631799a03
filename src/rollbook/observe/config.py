"""What a run reports besides its run directory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollbook.section import Section


class ObserveConfig(Section):
    """`[observe]`: the terminal, trackers and the Prometheus endpoint."""

    terminal: Literal["auto", "lines", "off"] = "auto"
    """Progress on stderr: a live view where it is a terminal, one line a step elsewhere; or lines; or nothing."""
    trajectories_every_steps: int = Field(1, ge=0)
    """Steps between two that keep their trajectories in the run directory; 0 keeps none."""
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()
    """Trackers that also receive every metric; each needs the extra of its name."""
    project: str = "rollbook"
    """Project or experiment under which trackers file the run."""
    prometheus_port: int | None = Field(None, ge=0, le=65535)
    """Port of the Prometheus endpoint, 0 for any free one; not set: no endpoint."""
    prometheus_host: str = "127.0.0.1"
    """Address of the Prometheus endpoint. The default is reachable from this machine only."""
    strict_metrics: bool = False
    """Whether a metric that the catalogue does not know stops the run instead of being counted."""
