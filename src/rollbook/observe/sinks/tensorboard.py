"""TensorBoard: event files under `RUN/tensorboard` (extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Mapping

from rollbook.observe.recorder import Event
from rollbook.observe.sinks.table import SinkTarget, needs_extra


class TensorBoardSink:
    """Every reading as a scalar."""

    def __init__(self, target: SinkTarget) -> None:
        with needs_extra("tensorboard"):
            from tensorboard.summary import Writer
        self._writer = Writer(str(target.run_dir / "tensorboard"))

    def on_event(self, event: Event) -> None:
        pass

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        for name, value in data.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
