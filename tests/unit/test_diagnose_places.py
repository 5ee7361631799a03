"""What there is to read at a path: a folder of many logs hides none, a text is judged by the error that it holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.diagnose.readers.table import HEAD_BYTES, load, places
from rollbook.diagnose.tree import diagnose
from rollbook.errors import DataError

STEP = "step:{0} - critic/score/mean:0.4{0} - timing_s/gen:41.2\n"
QUOTED = """\
Traceback (most recent call last):
  File "/opt/verl/workers/fsdp_workers.py", line 712, in update_weights
    self.rollout.load_weights(params)
ray.exceptions.RayTaskError(OutOfMemoryError): ray::WorkerDict.update_weights() (pid=81, ip=10.0.0.3)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
"""


def console(path: Path, steps: int, at_s: float, *, end: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(STEP.format(i) for i in range(1, steps + 1)) + end, encoding="utf-8")
    os.utime(path, (at_s, at_s))
    return path


def test_every_log_of_a_folder_is_found_the_newest_first(tmp_path: Path) -> None:
    old = console(tmp_path / "a" / "old.log", 12, 1e9)
    new = console(tmp_path / "b.log", 14, 1e9 + 9)
    run_dir = tmp_path / "runs" / "first"
    run_dir.mkdir(parents=True)
    for name, line in (
        ("metrics.jsonl", {"step": 0, "data": {"critic/score/mean": 0.4}}),
        ("events.jsonl", {"kind": "run_started"}),
    ):
        (run_dir / name).write_text(json.dumps(line) + "\n")
        os.utime(run_dir / name, (1e9 + 5, 1e9 + 5))
    (tmp_path / "notes.txt").write_text("nothing of a run\n")
    assert places(tmp_path) == [(new, "verl-console"), (run_dir, "rollbook"), (old, "verl-console")]
    assert places(tmp_path, "rollbook") == [(run_dir, "rollbook")]
    run = load(str(tmp_path))
    assert (run.source, run.num_steps) == (str(new), 14)
    assert f"{tmp_path} holds 3 logs: this is the newest" in run.notes


def test_the_other_logs_of_a_folder_are_judged_in_a_line_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    console(tmp_path / "new.log", 14, 1e9 + 9)
    console(tmp_path / "sick.log", 12, 1e9, end="Killed\n")
    for i in range(6):
        console(tmp_path / f"more{i}.log", 8, 1e9 - i)
    with pytest.raises(SystemExit):
        main(["diagnose", str(tmp_path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    others = {Path(other["log"]).name: other for other in answer["other_runs"]}
    assert answer["verdict"] in ("well", "not_judged")
    assert (others["sick.log"]["verdict"], others["sick.log"]["step"]) == ("run_stopped", 12)
    assert len(others) == 5
    assert any("not judged: " in note and "more5.log" in note for note in answer["notes"])


@pytest.mark.parametrize(
    "text",
    [
        f"Notes of Tuesday.\nSomeone saw this on the cluster and asked whether it is ours:\n\n{QUOTED}",
        f"{QUOTED}\nWe think it is the bucket size. To be discussed on Thursday.\n",
        QUOTED,
        "We start main_ppo by hand.\n(TaskRunner pid=81) torch.OutOfMemoryError: CUDA out of memory\n",
    ],
    ids=["before", "after", "bare", "prefix"],
)
def test_a_text_without_a_step_is_judged_by_the_error_that_it_holds_and_says_so(
    text: str, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(text, encoding="utf-8")
    diagnosis = diagnose(load(str(path)))
    assert diagnosis.verdict in ("oom_in_sync", "late_oom_with_length")
    assert any("OutOfMemoryError" in e.says for e in diagnosis.findings[0].evidence)
    assert any("holds no step" in note for note in diagnosis.notes)
    with pytest.raises(DataError, match="no log that is known"):
        load(str(tmp_path))  # beside logs it would be no more than a note


@pytest.mark.parametrize(
    "text",
    [
        "If you see CUDA out of memory, lower the batch size and try again.\n",
        "The job was Killed twice last week, and nobody knows why it was.\n",
        "Loading shards\nINFO 11-29 03:11:02 server started\n",
    ],
    ids=["advice", "story", "no error"],
)
def test_a_text_that_speaks_of_errors_is_no_log_and_what_was_looked_for_is_said(
    text: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"looked for .*step:N - name:value") as refused:
        load(str(tmp_path / "notes.txt"))
    assert "--format" in refused.value.args[1]


def test_a_job_that_died_before_its_first_step_is_a_log(tmp_path: Path) -> None:
    pre = "\x1b[36m(WorkerDict pid=81)\x1b[0m "
    lines = [
        "+ python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=8",
        "2026-11-29 03:11:02,114\tINFO worker.py:1821 -- Started a local Ray instance.",
        *(pre + line for line in QUOTED.splitlines()),
    ]
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert diagnose(load(str(path))).verdict == "oom_in_sync"


def test_a_log_whose_start_up_fills_megabytes_is_known_by_its_first_step(tmp_path: Path) -> None:
    path = console(tmp_path / "run.log", 12, 1e9)
    start = "(WorkerDict pid=81) INFO 11-29 03:11:02 loading safetensors checkpoint shards\n"
    path.write_text(
        start * (1 + HEAD_BYTES // len(start)) + path.read_text(encoding="utf-8"), encoding="utf-8"
    )
    assert places(path) == [(path, "verl-console")]
    assert load(str(path)).num_steps == 12


@pytest.mark.parametrize("format", ["trl", "slime", "tensorboard"])
def test_a_format_that_does_not_fit_is_told_the_one_that_does(format: str, tmp_path: Path) -> None:
    path = console(tmp_path / "run.log", 9, 1.0)
    with pytest.raises(
        DataError, match=r"holds no step\s+hint: it reads as verl-console: leave --format out"
    ):
        load(str(path), format=format)
    (tmp_path / "empty.log").write_text("hello\n")
    with pytest.raises(DataError, match="finished a step"):
        load(str(tmp_path / "empty.log"), format=format)
