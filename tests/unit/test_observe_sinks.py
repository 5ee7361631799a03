"""Trackers: what each receives, and what a missing one says. Trackers that are not installed are skipped."""

from __future__ import annotations

import builtins
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import ConfigError
from rollbook.observe.clock import ManualClock
from rollbook.observe.recorder import Recorder
from rollbook.observe.sinks.table import SINKS, SinkTarget, open_sink


def target(tmp_path: Path) -> SinkTarget:
    return SinkTarget(
        run_dir=tmp_path, project="rollbook", name="demo", config={"buffer": {"groups_per_step": 8}}
    )


def record_two_steps(tmp_path: Path, sink_name: str) -> None:
    sink = open_sink(sink_name, target(tmp_path))
    with Recorder(tmp_path / "run", [sink], clock=ManualClock()) as recorder:
        for step in range(2):
            with recorder.step(step):
                recorder.metrics({"actor/lr": 0.5 * step, "val/add/pass@8": 1.0})
        assert sink in recorder.sinks  # never failed


@pytest.mark.parametrize("name", SINKS)
def test_a_missing_package_names_the_extra(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_import = builtins.__import__

    def without(module: str, *args: Any, **kwargs: Any) -> Any:
        if module.split(".")[0] == name:
            raise ModuleNotFoundError(f"No module named {module!r}", name=name)
        return real_import(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=f"{name} is not installed") as caught:
        open_sink(name, target(tmp_path))
    assert f"pip install 'rollbook[{name}]'" in caught.value.remedy


def test_an_unknown_tracker_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        open_sink("tensorbord", target(tmp_path))
    assert caught.value.remedy == "did you mean 'tensorboard'?"


def test_importing_the_table_loads_no_tracker() -> None:
    code = "import sys, rollbook.observe.sinks.table; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not set(loaded) & {"wandb", "mlflow", "trackio", "tensorboard", "torch", "rich", "pyarrow"}


def test_tensorboard_reads_back_what_was_recorded(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    record_two_steps(tmp_path, "tensorboard")
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tag = "actor/lr"
    values = [(e.step, float(e.tensor_proto.float_val[0])) for e in events.Tensors(tag)]
    assert values == [(0, 0.0), (1, 0.5)]


def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    record_two_steps(tmp_path, "wandb")
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


def test_mlflow_reads_back_what_was_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'mlruns'}")
    record_two_steps(tmp_path, "mlflow")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("rollbook")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "actor/lr")
    assert [(m.step, m.value) for m in history] == [(0, 0.0), (1, 0.5)]
    assert run.data.params["buffer.groups_per_step"] == "8"
    assert run.data.metrics["val/add/pass_at_8"] == 1.0


def test_trackio_keeps_a_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    record_two_steps(tmp_path, "trackio")
    assert [path for path in (tmp_path / "trackio").rglob("*") if path.is_file()]
