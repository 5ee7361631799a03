"""trackio, a local dashboard with W&B's calls (extra `trackio`)."""

from __future__ import annotations

from collections.abc import Mapping

from rollbook.observe.recorder import Event
from rollbook.observe.sinks.table import SinkTarget, needs_extra


class TrackioSink:
    """Every reading under its name."""

    def __init__(self, target: SinkTarget) -> None:
        with needs_extra("trackio"):
            import trackio
        self._trackio = trackio
        trackio.init(project=target.project, name=target.name, config=dict(target.config))

    def on_event(self, event: Event) -> None:
        pass

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        self._trackio.log(dict(data), step=step)

    def close(self) -> None:
        self._trackio.finish()
