"""Weights & Biases (extra `wandb`). Its own settings apply: WANDB_MODE=offline keeps everything local."""

from __future__ import annotations

from collections.abc import Mapping

from rollbook.observe.recorder import Event
from rollbook.observe.sinks.table import SinkTarget, needs_extra


class WandbSink:
    """Every reading under its name; findings as alerts."""

    def __init__(self, target: SinkTarget) -> None:
        with needs_extra("wandb"):
            import wandb
        self._run = wandb.init(
            project=target.project, name=target.name, config=dict(target.config), dir=str(target.run_dir)
        )

    def on_event(self, event: Event) -> None:
        if event["kind"] == "finding":
            self._run.alert(
                title=str(event.get("rule")), text=f"{event.get('summary')}\n{event.get('remedy')}"
            )

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        self._run.log(dict(data), step=step)

    def close(self) -> None:
        self._run.finish()
