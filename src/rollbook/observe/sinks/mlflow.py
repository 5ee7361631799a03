"""MLflow (extra `mlflow`). The server is MLflow's own setting, MLFLOW_TRACKING_URI."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rollbook.observe.recorder import Event
from rollbook.observe.sinks.table import SinkTarget, needs_extra

MAX_PARAM_CHARS = 500


class MlflowSink:
    """Every reading as a metric, the config as parameters."""

    def __init__(self, target: SinkTarget) -> None:
        with needs_extra("mlflow"):
            import mlflow
        mlflow.set_experiment(target.project)
        self._mlflow = mlflow
        self._run = mlflow.start_run(run_name=target.name)
        params = {name: str(value)[:MAX_PARAM_CHARS] for name, value in flat(target.config).items()}
        mlflow.log_params(params)

    def on_event(self, event: Event) -> None:
        pass

    def on_step(self, step: int, data: Mapping[str, float]) -> None:
        # MLflow admits letters, digits and _-./: only: "pass@8" becomes "pass_at_8".
        named = {
            re.sub(r"[^\w\-./: ]", "_", name.replace("@", "_at_")): value for name, value in data.items()
        }
        self._mlflow.log_metrics(named, step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def flat(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Nested tables as dotted names.

    >>> flat({"seed": 1, "buffer": {"groups_per_step": 8}})
    {'seed': 1, 'buffer.groups_per_step': 8}
    """
    named: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            named |= flat(value, f"{prefix}{key}.")
        else:
            named[f"{prefix}{key}"] = value
    return named
