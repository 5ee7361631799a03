"""Reading a run directory while it is written, and what the page is told about it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from rollbook.cli import watch
from rollbook.errors import RunError
from rollbook.observe.clock import ManualClock
from rollbook.observe.history import RunHistory
from rollbook.observe.page import content
from rollbook.observe.page.server import open_socket, page_app
from rollbook.observe.recorder import Recorder
from rollbook.types import FinishReason, Prompt, Trajectory, Turn, VersionRun


def write_lines(path: Path, lines: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def history_of(folder: Path, rows: list[tuple[int, dict[str, Any]]]) -> RunHistory:
    write_lines(folder / "metrics.jsonl", [{"step": step, "data": data} for step, data in rows])
    history = RunHistory(folder)
    history.refresh_all()
    return history


def recorded_run(folder: Path, num_steps: int = 3) -> Recorder:
    clock = ManualClock()
    recorder = Recorder(folder, clock=clock, strict=True, decode=lambda ids: chr(97 + ids[0]))
    for step in range(num_steps):
        with recorder.step(step) as span:
            span.set(expected_s=3.0)
            with recorder.span("rollout", expected_s=2.0), recorder.span("decode", replica_id=0):
                clock.advance(2.5)
            recorder.metrics({"reward/add/mean": step / 10, "replica/0/weight_version": step})
            recorder.trajectories(step, [sampled(step)])
    return recorder


def sampled(step: int) -> Trajectory:
    turn = Turn(
        response_ids=np.array([2, 3, 4], np.int32),
        behavior_logprobs=np.array([-0.5, -0.25, -0.125], np.float32),
        version_runs=(VersionRun(step, 2), VersionRun(step + 1, 1)),
        finish_reason=FinishReason.STOP,
        observation_ids=np.array([5], np.int32),
    )
    prompt = Prompt(
        prompt_id="row-0", prompt_ids=np.array([0, 1], np.int32), source="add", task={"answer": "</script>"}
    )
    return Trajectory(group_id=step, member_idx=1, prompt=prompt, turns=(turn,), reward=0.5)


def test_appended_lines_are_taken_up_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0, "data": {"a": 1}}\n{"step": 1, "da')
    history = RunHistory(tmp_path)
    assert history.refresh()
    assert (history.num_steps, history.loaded_frac < 1) == (1, True)
    assert not history.refresh()
    with path.open("a") as file:
        file.write('ta": {"a": 3, "b": null, "c": NaN}}\n')
    assert history.refresh()
    assert history.readings(1) == {"a": 3.0}
    assert history.loaded_frac == 1.0


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(
        b'{"step": 0, "data": {"a": 1}}\n\x00\xff\n[]\n{"step": "x", "data": {}}\n{"step": 2, "data": {"a": "odd"}}\n'
    )
    history = RunHistory(tmp_path)
    history.refresh_all()
    assert history.steps.tolist() == [0, 2]
    assert history.readings(2) == {}


def test_a_repeated_step_counts_once_and_the_later_reading_stands(tmp_path: Path) -> None:
    history = history_of(
        tmp_path,
        [(0, {"a": 1.0, "b": 5.0}), (1, {"a": 2.0}), (0, {"a": 9.0}), (1, {"a": 3.0}), (2, {"a": 4.0})],
    )
    assert history.steps.tolist() == [0, 1, 2]
    assert history.readings(0) == {"a": 9.0, "b": 5.0}
    assert history.table(["a"]).columns["a"].mean.tolist() == [9.0, 3.0, 4.0]


def test_steps_out_of_order_are_shown_in_order(tmp_path: Path) -> None:
    history = history_of(tmp_path, [(5, {"a": 5.0}), (1, {"a": 1.0}), (3, {"a": 3.0})])
    table = history.table(["a"], first_step=2)
    assert table.steps.tolist() == [3, 5]
    assert table.columns["a"].mean.tolist() == [3.0, 5.0]


def test_buckets_keep_extremes_and_means(tmp_path: Path) -> None:
    rows = [(step, {"a": float(step % 10)} | ({"rare": 1.0} if step == 42 else {})) for step in range(100)]
    table = history_of(tmp_path, rows).table(["a", "rare", "unknown"], num_buckets=10)
    assert table.steps.tolist() == list(range(9, 100, 10))
    assert (table.columns["a"].min.tolist(), table.columns["a"].max.tolist()) == ([0.0] * 10, [9.0] * 10)
    assert table.columns["a"].mean.tolist() == [4.5] * 10
    assert [i for i, value in enumerate(table.columns["rare"].mean) if not math.isnan(value)] == [4]
    assert "unknown" not in table.columns


def test_growth_beyond_the_first_block_keeps_every_reading(tmp_path: Path) -> None:
    history = history_of(tmp_path, [(step, {"a": float(step)}) for step in range(3000)])
    assert history.table(["a"], num_buckets=0).columns["a"].mean.tolist() == [float(s) for s in range(3000)]
    assert history.latest("a") == 2999.0


def test_spans_of_one_step_and_what_is_open(tmp_path: Path) -> None:
    recorder = recorded_run(tmp_path / "run")
    with recorder.step(3), recorder.span("train"):
        history = RunHistory(tmp_path / "run")
        history.refresh_all()
        assert [span["name"] for span in history.open_spans()] == ["step", "train"]
    assert [span["name"] for span in history.spans(1)] == ["decode", "rollout", "step"]
    assert history.spans(7) == []
    recorder.close()


def test_a_lone_metrics_file_of_verl_will_do(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "demo.jsonl", [{"step": 1, "data": {"critic/rewards/mean": 0.5, "actor/lr": None}}]
    )
    history = RunHistory(tmp_path / "demo.jsonl")
    history.refresh_all()
    shown = content.overview(history, 0.0)
    assert (shown["state"], shown["last_step"], shown["names"]) == (
        "ended",
        1,
        ["actor/lr", "critic/rewards/mean"],
    )


@pytest.mark.parametrize("text", ["# notes\n", "step:1 - critic/rewards/mean:0.5\n", '[1]\n{"step": 1}\n'])
def test_a_file_without_a_step_is_refused_and_not_shown_empty(tmp_path: Path, text: str) -> None:
    path = tmp_path / "train.log"
    path.write_text(text)
    with pytest.raises(RunError, match="is not a metrics.jsonl") as refused:
        RunHistory(path)
    assert f"rollbook diagnose {path}" in refused.value.remedy


@pytest.mark.parametrize(
    "text", ["", '{"step": 1, "da', 'cut\n{"step": 1, "data": {"critic/rewards/mean": 0.5}}\n']
)
def test_a_file_that_begins_or_is_damaged_is_shown(tmp_path: Path, text: str) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_text(text)
    history = RunHistory(path)
    history.refresh_all()
    assert len(history.steps) == text.count("}}")


def test_watching_an_empty_file_says_that_it_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "exp.jsonl"
    path.touch()
    assert content.overview(RunHistory(path), 0.0)["state"] == "empty"
    monkeypatch.setattr("rollbook.observe.page.server.serve", lambda app, listener: listener.close())
    watch.command(path, port=0)
    assert f"{path} is empty: the page fills in as soon as a step is written" in capsys.readouterr().err
    path.write_text('{"step": 1, "data": {"critic/rewards/mean": 0.5}}\n')
    watch.command(path, port=0)
    assert "is empty" not in capsys.readouterr().err


def test_a_folder_that_is_no_run_names_the_runs_beside_it(tmp_path: Path) -> None:
    write_lines(tmp_path / "runs" / "demo" / "metrics.jsonl", [])
    for name in ("missing", "empty"):
        (tmp_path / "runs" / "empty").mkdir(exist_ok=True)
        with pytest.raises(RunError) as caught:
            RunHistory(tmp_path / "runs" / name)
        assert "demo" in caught.value.remedy


@pytest.mark.parametrize("ends", [True, False])
def test_the_overview_tells_live_from_ended_from_interrupted(tmp_path: Path, ends: bool) -> None:
    recorder = recorded_run(tmp_path / "run")
    (tmp_path / "run" / "config.toml").write_text("[train]\nnum_steps = 10\n")
    history = RunHistory(tmp_path / "run")
    history.refresh_all()
    live = content.overview(history, recorder.clock.unix_s())
    assert (live["state"], live["last_step"], live["planned_steps"]) == ("live", 2, 10)
    assert live["writer"].startswith("process ")
    if ends:
        recorder.close()
    else:
        recorder.run_dir.close()  # as if killed
    history.refresh_all()
    assert content.overview(history, 0.0)["state"] == ("ended" if ends else "interrupted")


def test_six_digits_are_kept() -> None:
    values = np.array([0.0, 1.0, 123456789.0, 1.23456789e-9, np.nan, -0.333333333333])
    assert content._rounded(np.array([1e-320, -5e-324, 1.7976931e308])) == [0.0, 0.0, 1.79769e308]
    assert content._rounded(values) == [0.0, 1.0, 123457000.0, 1.23457e-09, None, -0.333333]


def test_the_server_answers_from_the_run_directory_alone(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run").close()
    client = TestClient(page_app(tmp_path / "run", ManualClock()))
    assert "rollbook" in client.get("/").text
    assert client.get("/api/overview").json()["last_step"] == 2
    answer = client.get("/api/series", params={"names": "reward/add/mean,nope", "buckets": 2}).json()
    assert answer["steps"] == [0, 2]
    assert answer["series"] == {
        "reward/add/mean": {"mean": [0.0, 0.15], "min": [0.0, 0.1], "max": [0.0, 0.2]}
    }
    step = client.get("/api/step/1").json()
    assert step["readings"]["timing_s/gen"] == 2.5
    assert [span["name"] for span in step["spans"]] == ["decode", "rollout", "step"]
    listed = client.get("/api/trajectories/99").json()
    assert (listed["step"], listed["rows"][0]["id"]) == (2, "2/1")
    one = client.get("/api/trajectory/2/2/1").json()
    assert one["texts"] == ["a", "b", "c", "d", "e", "f"]
    assert one["versions"] == [None, None, 2, 2, 3, None]
    assert one["action"] == [False, False, True, True, True, False]
    assert one["turns"] == [{"start": 2, "response_end": 5, "end": 6, "finish_reason": "stop"}]
    assert client.get("/api/trajectory/2/9/9").status_code == 404
    assert client.get("/api/meanings").json()["timing_s/gen"]["unit"] == "s"


def test_a_page_of_another_host_may_not_read_a_run(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run").close()
    client = TestClient(page_app(tmp_path / "run"), base_url="http://evil.example")
    assert client.get("/api/overview").status_code == 400


def test_a_damaged_trajectory_file_is_an_answer_not_a_crash(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run").close()
    (tmp_path / "run" / "trajectories" / "step_2.parquet").write_bytes(b"cut short")
    answer = TestClient(page_app(tmp_path / "run")).get("/api/trajectories/2")
    assert (answer.status_code, "not a readable Parquet file" in answer.json()["error"]) == (422, True)


def test_a_taken_port_is_an_error_with_the_port() -> None:
    first = open_socket(0)
    port = first.getsockname()[1]
    first.listen()
    with pytest.raises(RunError, match=f"port {port} on 127.0.0.1"):
        open_socket(port)
    first.close()


def test_the_exported_page_holds_its_data_and_no_address(tmp_path: Path) -> None:
    recorded_run(tmp_path / "run", num_steps=5).close()
    history = RunHistory(tmp_path / "run")
    history.refresh_all()
    page = content.exported(history, 0.0, num_steps=3, num_trajectory_steps=2)
    data = page.split("const EMBEDDED = ", 1)[1].split(";\nconst STAGES", 1)[0]
    assert "</script>" not in data
    embedded = json.loads(data)
    assert (list(embedded["steps"]), list(embedded["trajectories"])) == (["0", "3", "4"], ["0", "4"])
    assert embedded["trajectories"]["4"]["details"]["4/1"]["task"]["answer"] == "</script>"
    for address in ("http://", "https://", "//cdn", "@import", "url("):
        assert address not in page.replace("http://www.w3.org/2000/svg", "")
