"""Host memory of a process tree, from /proc as Linux writes it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from rollbook.observe.catalogue import lookup
from rollbook.observe.host_memory import tree_bytes
from rollbook.observe.recorder import Recorder


def process(proc: Path, pid: int, parent: int, resident: int, mapped: int, *, name: str = "python") -> None:
    folder = proc / str(pid)
    folder.mkdir(parents=True)
    (folder / "stat").write_text(f"{pid} ({name}) S {parent} 1 1 0 -1\n")
    (folder / "statm").write_text(f"9999999 {resident} {mapped} 1 0 1 0\n")


def test_a_tree_is_what_each_holds_alone_and_what_is_shared_once(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 1000, 400)
    process(tmp_path, 11, 10, 700, 300)
    process(tmp_path, 12, 11, 60, 10, name="a) b (c")  # a grandchild with a name that could be misread
    process(tmp_path, 20, 1, 5000, 0)  # not of the tree
    (tmp_path / "self").mkdir()
    pages = (1000 - 400) + (700 - 300) + (60 - 10) + 400
    assert tree_bytes(10, proc=tmp_path) == pages * os.sysconf("SC_PAGE_SIZE")


def test_a_process_that_ended_meanwhile_is_left_out_and_without_proc_nothing_is_said(tmp_path: Path) -> None:
    process(tmp_path, 10, 1, 1000, 400)
    process(tmp_path, 11, 10, 700, 300)
    (tmp_path / "11" / "statm").unlink()
    assert tree_bytes(10, proc=tmp_path) == 1000 * os.sysconf("SC_PAGE_SIZE")
    assert tree_bytes(10, proc=tmp_path / "none") is None


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_every_step_writes_it_in_gib(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder, recorder.step(0):
        pass
    data = json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["data"]
    written = data["perf/cpu_memory_used_gb"]
    assert 0.01 < written < 100
    assert data["host/disk_free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.5)
    metric = lookup("perf/cpu_memory_used_gb")
    assert metric is not None
    assert (metric.unit, metric.owner) == ("GiB", "observe")
