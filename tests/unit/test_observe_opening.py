"""A recorder opened from its config: which sinks it gets, and what a bad one leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.errors import ConfigError
from rollbook.observe.clock import ManualClock
from rollbook.observe.config import ObserveConfig
from rollbook.observe.opening import open_recorder
from rollbook.observe.prometheus import PrometheusSink
from rollbook.observe.recorder import Recorder
from rollbook.observe.terminal import TerminalView


def test_the_config_names_the_sinks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = ObserveConfig(prometheus_port=0, terminal="lines")
    with open_recorder(tmp_path / "run", config, resolved={}, clock=ManualClock()) as recorder:
        assert [type(sink) for sink in recorder.sinks] == [TerminalView, PrometheusSink]
    assert "metrics for Prometheus at http://127.0.0.1:" in capsys.readouterr().err


def test_off_means_silent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (
        open_recorder(tmp_path / "run", ObserveConfig(terminal="off"), resolved={}) as recorder,
        recorder.step(0),
    ):
        pass
    assert capsys.readouterr() == ("", "")


def test_a_sink_that_cannot_open_leaves_the_directory_free(tmp_path: Path) -> None:
    with open_recorder(
        tmp_path / "first", ObserveConfig(prometheus_port=0, terminal="off"), resolved={}
    ) as first:
        (endpoint,) = first.sinks
        assert isinstance(endpoint, PrometheusSink)
        taken = ObserveConfig(prometheus_port=int(endpoint.url.split(":")[2].split("/")[0]), terminal="off")
        with pytest.raises(ConfigError, match=r"observe\.prometheus_port"):
            open_recorder(tmp_path / "run", taken, resolved={})
    Recorder(tmp_path / "run").close()


def test_a_start_that_came_to_nothing_may_be_repeated(tmp_path: Path) -> None:
    """No step, no checkpoint: there is nothing to resume and nothing to lose."""
    for _ in range(2):
        Recorder(tmp_path / "run").close()
    assert (tmp_path / "run" / "events.jsonl").read_text().count("run_started") == 2
