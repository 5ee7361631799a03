"""What happens to a run directory when a process dies, the disk fills, or a second writer comes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollbook.errors import RunError
from rollbook.observe import run_dir as run_dir_module
from rollbook.observe.clock import ManualClock
from rollbook.observe.recorder import Recorder
from rollbook.observe.run_dir import AppendFile, RunDir, is_in_use, read_json_lines, repair_last_line

WRITER = """
import os, sys
from rollbook.observe.recorder import Recorder
recorder = Recorder(sys.argv[1])
for step in range(2):
    with recorder.step(step):
        pass
os.write(recorder.run_dir.metrics._fd, b'{"step": 2, "data": {"actor/l')  # killed in the middle of a line
print("ready", flush=True)
sys.stdin.read()
"""


def start_writer(path: Path) -> subprocess.Popen[str]:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"
    return writer


def test_a_second_writer_is_refused_by_name_and_a_killed_one_leaves_a_resumable_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    writer = start_writer(path)
    try:
        with pytest.raises(RunError, match=f"is in use by process {writer.pid} on host"):
            Recorder(path, resume=True)
        assert is_in_use(path) == f"process {writer.pid} on host {os.uname().nodename}"
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.communicate()
    assert is_in_use(path) is None
    with Recorder(path, resume=True, clock=ManualClock()) as recorder, recorder.step(2):
        pass
    lines = (path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]
    (repair,) = [e for e in read_json_lines(path / "events.jsonl") if e["kind"] == "repair"]
    assert (repair["file"], repair["fragment"]) == ("metrics.jsonl", '{"step": 2, "data": {"actor/l')


def test_the_same_process_cannot_open_it_twice(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run"), pytest.raises(RunError, match=f"in use by process {os.getpid()}"):
        Recorder(tmp_path / "run", resume=True)


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run")
    (go, may_end), (started, has_started) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(may_end)
        os.write(has_started, b".")
        os.read(go, 1)  # outlive the parent's hold on the directory
        os._exit(0)
    try:
        os.read(started, 1)
        os.close(run._lock_fd)  # what the system does for a killed parent
        RunDir.open(tmp_path / "run").close()
    finally:
        os.close(may_end)
        os.waitpid(child, 0)


def test_a_directory_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run") as recorder, recorder.step(3):
        pass
    with pytest.raises(RunError, match="already holds a run \\(last finished step 3\\)") as caught:
        Recorder(tmp_path / "run")
    assert "--resume" in caught.value.remedy
    with Recorder(tmp_path / "run", resume=True):
        pass


@pytest.mark.parametrize("name", ["missing", "file"])
def test_nothing_to_resume(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError):
        Recorder(tmp_path / name, resume=True)


def test_disk_full_names_the_file_and_the_way_on(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    recorder.run_dir.metrics.close()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
    recorder.run_dir.metrics = AppendFile(tmp_path / "run" / "metrics.jsonl").open()
    with pytest.raises(RunError, match="no space left to write .*metrics.jsonl") as caught, recorder.step(0):
        pass
    assert f"rollbook train --resume {tmp_path / 'run'}" in caught.value.remedy
    recorder.close()


def test_a_line_that_fits_only_in_part_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = AppendFile(tmp_path / "events.jsonl").open()
    file.append('{"kind": "a"}')
    real_write = os.write

    def almost_full(fd: int, data: bytes) -> int:
        if len(data) > 5:
            return real_write(fd, data[:5])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_dir_module.os, "write", almost_full)
    with pytest.raises(RunError, match="no space left"):
        file.append('{"k": 1}')
    assert (tmp_path / "events.jsonl").read_text() == '{"kind": "a"}\n'


def test_disk_full_leaves_no_half_trajectory_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import rollbook.observe.trajectories as module

    def full(table: object, where: Path, **_: object) -> None:
        where.write_bytes(b"PAR1")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.pq, "write_table", full)
    with Recorder(tmp_path / "run") as recorder:
        with pytest.raises(RunError, match="step_0.parquet"):
            recorder.trajectories(0, [])
        assert list((recorder.path / "trajectories").iterdir()) == []


def test_an_interrupt_ends_the_step_with_whole_lines(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "run")
    with pytest.raises(KeyboardInterrupt), recorder.step(0), recorder.span("rollout"):
        raise KeyboardInterrupt
    recorder.close()
    recorder.close()  # a second close does nothing
    kinds = [
        json.loads(line)["kind"] for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    ]
    assert kinds == ["run_started", "span_open", "span_open", "span", "span", "step_failed", "run_ended"]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == ""


@pytest.mark.parametrize(
    ("content", "expected", "fragment"),
    [
        (b"", b"", ""),
        (b'{"a": 1}\n', b'{"a": 1}\n', ""),
        (b'{"a": 1}\n{"a": 2}', b'{"a": 1}\n{"a": 2}\n', ""),
        (b'{"a": 1}\n{"a"', b'{"a": 1}\n', '{"a"'),
        (b'{"a', b"", '{"a'),
        (b'{"a": 1}\n' + b"x" * 200_000, b'{"a": 1}\n', "x" * 200_000),
        (b'{"a": 1}\n\xff\xfe', b'{"a": 1}\n', "\ufffd\ufffd"),
    ],
)
def test_repair_of_the_last_line(tmp_path: Path, content: bytes, expected: bytes, fragment: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert repair_last_line(path) == fragment
    assert path.read_bytes() == expected


def test_a_reader_passes_over_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n\x00\x00\n[1]\n{"step": 1}\n{"st')
    assert [line["step"] for line in read_json_lines(path)] == [0, 1]


def test_a_changed_config_keeps_the_earlier_one(tmp_path: Path) -> None:
    run = RunDir.open(tmp_path / "run")
    for text in ("seed = 1\n", "seed = 1\n", "seed = 2\n"):
        run.write_config(text)
    run.write_plan({"step": {"seconds": {"total": 1.5}}})
    run.close()
    assert (run.path / "config.toml").read_text() == "seed = 2\n"
    assert (run.path / "config.1.toml").read_text() == "seed = 1\n"
    assert not (run.path / "config.2.toml").exists()
    assert json.loads((run.path / "plan.json").read_text())["step"]["seconds"]["total"] == 1.5
