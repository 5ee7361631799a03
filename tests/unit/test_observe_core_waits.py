"""What a thread waited for a core, read as Linux writes it, and put beside the seconds of the stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.observe.clock import ManualClock
from rollbook.observe.core_waits import CoreWaits, longest_wait_s
from rollbook.observe.recorder import Recorder
from rollbook.observe.run_dir import METRICS, read_json_lines


def told(proc: Path, **waited_s: float) -> None:
    for thread, seconds in waited_s.items():
        folder = proc / "self" / "task" / thread
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "schedstat").write_text(f"123456 {round(seconds * 1e9)} 7\n")


def test_the_thread_that_waited_most_counts(tmp_path: Path) -> None:
    """Threads that wait at once hold a stage up once; one that began later is not known before the next look."""
    waits = CoreWaits(tmp_path)
    told(tmp_path, **{"10": 1.0, "11": 5.0})
    waits.look()
    before = waits.read()
    told(tmp_path, **{"10": 3.5, "11": 6.0, "12": 99.0})
    assert longest_wait_s(before, waits.read()) == pytest.approx(2.5)
    waits.look()
    assert waits.read()["12"] == 99.0
    waits.close()


def test_a_system_that_does_not_count_says_nothing(tmp_path: Path) -> None:
    waits = CoreWaits(tmp_path)
    waits.look()
    assert longest_wait_s(waits.read(), waits.read()) is None


def test_a_stage_carries_what_it_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, clock = tmp_path / "proc", ManualClock()
    told(proc, **{"10": 0.0})
    monkeypatch.setattr("rollbook.observe.recorder.CoreWaits", lambda: CoreWaits(proc))
    with Recorder(tmp_path / "run", clock=clock) as recorder, recorder.step(1):
        with recorder.span("train"):
            clock.advance(4.0)
            told(proc, **{"10": 1.5})
        clock.advance(1.0)
        told(proc, **{"10": 1.75})
    (line,) = read_json_lines(tmp_path / "run" / METRICS)
    assert line["data"]["core_wait_s/update_actor"] == pytest.approx(1.5)
    assert line["data"]["core_wait_s/step"] == pytest.approx(1.75)
    assert line["data"]["host/own_core_frac"] >= 0
