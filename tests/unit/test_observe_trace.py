"""One step as a trace: measured beside planned, events, trajectories; and as OpenTelemetry spans."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.cli.main import main
from rollbook.errors import RunError
from rollbook.observe.clock import ManualClock
from rollbook.observe.history import RunHistory
from rollbook.observe.recorder import Recorder
from rollbook.observe.trace import chrome_trace, otlp_trace
from rollbook.types import Failure, FailureKind, FinishReason, Prompt, Trajectory, Turn, VersionRun


def trajectory(member: int, start_s: float, end_s: float, *, failed: bool = False) -> Trajectory:
    turn = Turn(
        response_ids=np.array([1], np.int32),
        behavior_logprobs=np.array([-1.0], np.float32),
        version_runs=(VersionRun(3, 1),),
        finish_reason=FinishReason.STOP,
    )
    prompt = Prompt(prompt_id="row", prompt_ids=np.array([1], np.int32), source="add")
    failure = Failure(kind=FailureKind.TIMEOUT, message="no answer in 30 s") if failed else None
    return Trajectory(
        group_id=7, member_idx=member, prompt=prompt, turns=(turn,), reward=None if failed else 1.0,
        failure=failure, started_at_s=start_s, finished_at_s=end_s,
    )  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    clock = ManualClock(now_s=100.0)
    with Recorder(tmp_path / "demo", clock=clock, strict=True) as recorder, recorder.step(4) as step:
        step.set(expected_s=5.0)
        with recorder.span("rollout", expected_s=2.0) as span:
            clock.advance(3.0)
            span.set(tokens=90)
        recorder.event("publication", weight_version=5)
        with recorder.span("train"):
            clock.advance(1.0)
        members = [
            trajectory(0, 100.0, 101.0),
            trajectory(1, 100.5, 103.0),
            trajectory(2, 101.5, 102.0, failed=True),
        ]
        recorder.trajectories(4, members)
    yield tmp_path / "demo"


def history_of(path: Path) -> RunHistory:
    history = RunHistory(path)
    history.refresh_all()
    return history


def named(trace: dict[str, Any], pid: int, phase: str = "X") -> dict[str, Any]:
    return {e["name"]: e for e in trace["traceEvents"] if e["pid"] == pid and e["ph"] == phase}


def test_every_span_stands_beside_its_planned_length(run: Path) -> None:
    trace = chrome_trace(history_of(run), 4)
    measured, planned = named(trace, 1), named(trace, 2)
    assert {name: (e["ts"], e["dur"]) for name, e in measured.items()} == {
        "step": (0.0, 4e6), "rollout": (0.0, 3e6), "train": (3e6, 1e6),
    }  # fmt: skip
    assert {name: (e["ts"], e["dur"]) for name, e in planned.items()} == {
        "step": (0.0, 5e6),
        "rollout": (0.0, 2e6),
    }
    assert measured["rollout"]["args"] == {"step": 4, "tokens": 90, "expected_s": 2.0}
    assert planned["rollout"]["args"] == {"measured_s": 3.0, "ratio": 1.5}


def test_measured_seconds_are_those_of_the_metrics(tmp_path: Path) -> None:
    """A publication of 1 s and its probe of 2 s are one stage of which 2 s were expected; a validation of 4 s is none
    of the step's work."""
    clock = ManualClock(now_s=100.0)
    with Recorder(tmp_path / "demo", clock=clock, strict=True) as recorder, recorder.step(0) as step:
        step.set(expected_s=2.0)
        for name, seconds, expected in (
            ("sync", 1.0, {"expected_s": 2.0}),
            ("sync", 2.0, {}),
            ("eval", 4.0, {}),
        ):
            with recorder.span(name, **expected):
                clock.advance(seconds)
    metrics = json.loads((tmp_path / "demo" / "metrics.jsonl").read_text())["data"]
    traced = chrome_trace(history_of(tmp_path / "demo"), 0)["traceEvents"]
    planned = {e["name"]: e["args"] for e in traced if e["ph"] == "X" and e["pid"] == 2}
    assert planned["sync"] == {"measured_s": metrics["timing_s/update_weights"], "ratio": 1.5}
    assert planned["step"] == {"measured_s": metrics["timing_s/step"], "ratio": 1.5}


def test_events_and_trajectories_stand_where_they_happened(run: Path) -> None:
    trace = chrome_trace(history_of(run), 4)
    assert named(trace, 1, "i")["publication"]["ts"] == 3e6
    rows = {name: (e["ts"], e["dur"], e["tid"]) for name, e in named(trace, 3).items()}
    assert rows["7/1"][:2] == (5e5, 2.5e6)
    assert rows["7/0"][2] == rows["7/2"][2] != rows["7/1"][2]  # a slot is used again when it is free
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert names == {"MainThread", "step", "events", "slot 0", "slot 1"}


def test_trajectories_as_opentelemetry_spans(run: Path) -> None:
    (resource,) = otlp_trace(history_of(run), 4)["resourceSpans"]
    step, *spans = resource["scopeSpans"][0]["spans"]
    assert [s["parentSpanId"] for s in spans] == [step["spanId"]] * 3
    assert {len(s["traceId"]) for s in spans} == {32}
    assert len({s["spanId"] for s in [step, *spans]}) == 4
    assert int(spans[1]["startTimeUnixNano"]) == round((1_700_000_000.0 + 100.5) * 1e9)
    assert spans[2]["status"] == {"code": 2, "message": "timeout: no answer in 30 s"}
    attributes = {a["key"]: a["value"] for a in spans[0]["attributes"]}
    assert attributes["reward"] == {"doubleValue": 1.0}
    assert attributes["oldest_version"] == {"intValue": "3"}


def test_an_unknown_step_says_which_are_there(run: Path) -> None:
    with pytest.raises(RunError, match="no spans of step 9") as caught:
        chrome_trace(history_of(run), 9)
    assert caught.value.remedy == "steps 4 to 4 have spans"


def test_a_lone_metrics_file_has_nothing_to_trace(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["trace", str(run / "metrics.jsonl")])
    assert ended.value.code == 2
    assert "give the run directory" in capsys.readouterr().err


def test_the_command_writes_the_file_and_sends_it_to_a_collector(run: Path, tmp_path: Path) -> None:
    received: list[dict[str, Any]] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        out = tmp_path / "trace.json"
        command = [sys.executable, "-m", "rollbook.cli.main", "trace", str(run), "-o", str(out)]
        address = f"http://127.0.0.1:{server.server_port}/v1/traces"
        answer = subprocess.run([*command, "--endpoint", address], capture_output=True, text=True)
        server.shutdown()
    assert (answer.returncode, answer.stdout) == (0, f"{out}\n"), answer.stderr
    assert json.loads(out.read_text())["otherData"] == {"run": "demo", "step": 4}
    assert received == [otlp_trace(history_of(run), 4)]
    refused = subprocess.run([*command, "--endpoint", address], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "the collector at" in refused.stderr
