"""Signals at every moment of a run: one clean message and exit code each, never a traceback."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rollbook.controller.entry as entry
from fresh_process import in_fresh_process
from rollbook.cli import main as cli
from rollbook.controller.loop import Controller
from tiny_run import RunResult, as_set, injected, write_tiny

SELF_INTERRUPTING = """
import os, signal
for _ in range({times}):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(1000):  # a signal is taken between two instructions
        pass

def score(response, task):
    return 0.0
"""


def train(path: Path, *overrides: str) -> None:
    cli.main(["train", str(path), *(part for one in overrides for part in ("--set", one))])


def said(log: Path) -> str:
    text = log.read_text()
    for trouble in (
        "Traceback",
        "never awaited",
        "Exception ignored",
        "CancelledError",
        "Task was destroyed",
    ):
        assert trouble not in text, text
    return text


@pytest.mark.parametrize(
    ("times", "says"),
    [
        (1, "interrupted: before the run began; nothing was written\n"),
        (2, "interrupted again: left without closing the parts; nothing was written\n"),
    ],
)
def test_signals_during_the_start_leave_nothing_but_a_message(tmp_path: Path, times: int, says: str) -> None:
    """They come while a reward module is imported; the run directory was claimed by then."""
    (tmp_path / "interrupting_rewards.py").write_text(SELF_INTERRUPTING.format(times=times))
    path, log = write_tiny(tmp_path), tmp_path / "log"
    overrides = as_set({"reward.terms.0.function": "interrupting_rewards:score"})
    assert in_fresh_process(train, path, *overrides, log=log) == 130
    assert said(log) == says
    assert not (tmp_path / "run").exists()


def train_interrupted_before_the_loop(path: Path) -> None:
    plain = entry.asyncio.run

    def run(main: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return plain(main)

    entry.asyncio.run = run
    train(path)


def test_a_signal_before_the_event_loop_runs_is_taken_by_it(tmp_path: Path) -> None:
    path, log = write_tiny(tmp_path), tmp_path / "log"
    assert in_fresh_process(train_interrupted_before_the_loop, path, log=log) == 130
    assert said(log) == (
        "interrupted: stopping before the first step\nhint: again to leave without closing the parts\n"
        "interrupted: before the run began; nothing was written\n"
    )
    assert not (tmp_path / "run").exists()


class WhileClosing:
    """Signals while the parts are taken down, after the last step."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self, controller: Controller) -> None:
        plain: Callable[..., None] = controller._thread.shutdown

        def shutdown(wait: bool = True) -> None:
            for number in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
                while len(RunResult(controller.recorder.path).events_of("interrupted")) <= number:
                    pass
            plain(wait)

        controller._thread.shutdown = shutdown  # type: ignore[method-assign]


def train_interrupted(path: Path, times: int) -> None:
    with injected([WhileClosing(times)]):
        train(path)


@pytest.mark.parametrize(("times", "exit_code"), [(1, 0), (2, 130)])
def test_signals_while_the_parts_are_closed_lose_nothing(tmp_path: Path, times: int, exit_code: int) -> None:
    path, log = write_tiny(tmp_path), tmp_path / "log"
    assert in_fresh_process(train_interrupted, path, times, log=log) == exit_code
    run = RunResult(tmp_path / "run")
    assert run.events_of("interrupted")[0]["effect"] == "closing the parts of the run"
    if times == 2:
        assert said(log) == (
            "interrupted again: left without closing the parts; "
            f"`rollbook train --resume {run.folder}` continues from its newest checkpoint\n"
        )
    else:
        assert said(log) == f"{run.folder}\n"
    assert run.state["num_steps_done"] == 2
    assert len(run.metrics) == 2


def test_a_signal_while_the_command_is_imported_is_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "x.toml"])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "interrupted\n")


SELF_INTERRUPTING_CALIBRATION = """
import os, signal
signals = [signal.SIGINT]  # one: a second one ends the process at once
def score(response, task):
    if signals:
        os.kill(os.getpid(), signals.pop())
    return 0.0
"""


def test_an_interrupted_calibration_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "calibration_rewards.py").write_text(SELF_INTERRUPTING_CALIBRATION)
    monkeypatch.setattr("sys.path", [*sys.path, str(tmp_path)])
    term = {"function": "calibration_rewards:score", "isolation": "inline", "is_tested": False}
    overrides = as_set({"reward.terms.0": term, "plan.is_on": True})
    arguments = [str(write_tiny(tmp_path)), "-o", str(tmp_path / "hardware.toml")]
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate", *arguments, *(part for one in overrides for part in ("--set", one))])
    assert ended.value.code == 130
    assert capsys.readouterr() == ("", "interrupted: nothing was written\n")
    assert not (tmp_path / "hardware.toml").exists()


@pytest.mark.parametrize("device", ["gpu", "cuda:x", "cuda:99"])
def test_a_device_that_is_not_there_cannot_be_calibrated(
    device: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["calibrate", "--device", device, "-o", str(tmp_path / "hardware.toml")])
    assert ended.value.code == 2
    assert f"--device is '{device}'" in capsys.readouterr().err
