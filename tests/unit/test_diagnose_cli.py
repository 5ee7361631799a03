"""`rollbook diagnose` as a user meets it: verdict first, 80 columns, JSON, a page, mistakes named."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from rollbook.cli.main import main
from rollbook.diagnose.readers import prometheus as prometheus_reader
from rollbook.diagnose.readers.table import READERS
from rollbook.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import described_runs


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command line."""
    with pytest.raises(SystemExit) as ended:
        main(["diagnose", *args])
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


@pytest.fixture
def sick(tmp_path: Path) -> str:
    return str(described_runs.write_jsonl("missed_weight_sync", 1, tmp_path / "exp.jsonl"))


def test_the_verdict_comes_first_on_one_screen_of_80_columns(
    sick: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, sick)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert max(len(line) for line in lines) <= 80
    assert lines[2].startswith("FOUND: engines sample with old weights")
    screen = "\n".join(lines[:24])
    assert "do:" in screen
    assert "next:" in screen
    assert "could not be judged" in out


def test_what_could_not_be_judged_is_folded_to_names_by_what_the_log_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer that logs a reward and a length alone leaves nearly every rule without its signals."""
    log = tmp_path / "log.jsonl"
    rows = ({"step": step, "mean_reward": 0.4 + step % 7 / 50, "len": 300.0} for step in range(60))
    log.write_text("\n".join(map(json.dumps, rows)) + "\n")
    _, out, _ = run(capsys, str(log))
    told = json.loads(run(capsys, str(log), "--json")[1])["not_judged"]
    folded = out.partition("could not be judged (--all")[2].partition("\n\n")[0]
    text = " ".join(folded.split())
    assert "no device memory: oom_in_sync, late_oom_with_length, fragmentation" in text
    assert len(told) > 10 and all(item["rule"] in text for item in told)
    assert len(folded.splitlines()) <= 8
    _, in_full, _ = run(capsys, str(log), "--all")
    assert all(item["collect"] in " ".join(in_full.split()) for item in told)


def test_a_run_that_is_well_says_so_with_the_four_signals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = described_runs.write_jsonl("plateau", 1, tmp_path / "exp.jsonl")
    _, out, _ = run(capsys, str(log))
    assert "NONE OF THESE: the system is well; what limits the run: the reward stands still" in " ".join(
        out.split()
    )
    assert out.count("  well ") == 4


def test_json_is_one_object_without_nan(sick: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, sick, "--json")
    answer: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert answer["verdict"] == "missed_weight_sync"
    assert {"rule", "confidence", "step", "evidence", "action", "next_check", "cost_s"} <= set(
        answer["findings"][0]
    )
    assert answer["steps"]["count"] > 0


def test_the_page_is_self_contained_and_draws_the_evidence(
    sick: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    run(capsys, sick, "--html", str(page))
    text = page.read_text()
    assert text.count("<svg") >= 3
    assert not re.search(r"(?:src|href)=|https?://|<script", text)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["/no/such/log"], "there is no /no/such/log"),
        (["{log}", "--format", "verl"], "unknown log format 'verl'"),
        (["{log}", "--run", "7"], "holds one run, and run 7 was asked for"),
        (["{log}", "--run", "-2"], "--run is -2"),
        (["http://127.0.0.1:9", "--hours", "0"], "--hours is 0.0"),
        (["http://127.0.0.1:9", "--hours", "nan"], "--hours is nan"),
        (["{log}", "--html", "/no/such/folder/page.html"], "cannot write"),
        (["http://127.0.0.1:9"], "no answer of a Prometheus server"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    args: list[str], says: str, sick: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *[arg.format(log=sick) for arg in args])
    assert code == 2
    assert says in err
    assert "hint: " in err
    assert "Traceback" not in err


@pytest.fixture
def prometheus() -> Iterator[str]:
    """A server that answers `query_range` as Prometheus 2 does, from a run of 30 steps of 60 seconds."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            end = float(query["end"][0])
            times = [end - 60.0 * (30 - step) for step in range(30)]
            series = {
                "training/global_step": [float(step) for step in range(30)],
                "critic/rewards/mean": [0.5] * 15 + [0.1] * 15,
                "num_turns/mean": [6.0] * 15 + [2.5] * 15,
                "failures/frac": [0.01] * 15 + [0.6] * 15,
            }
            result = [
                {
                    "metric": {"__name__": "rollbook_x", "metric": name, "run": "demo"},
                    "values": [[t, str(v)] for t, v in zip(times, values, strict=True)],
                }
                for name, values in series.items()
            ]
            body = json.dumps(
                {"status": "success", "data": {"resultType": "matrix", "result": result}}
            ).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_prometheus_server_is_read_by_its_url(prometheus: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, prometheus, "--json")
    answer = json.loads(out)
    assert answer["format"] == "prometheus"
    assert answer["steps"] == {"first": 0, "last": 29, "count": 30}
    assert answer["verdict"] == "dead_sandbox_pool"


def test_errors_that_a_log_repeats_since_the_fault_stand_in_its_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pool dies; the tool's own line names the host. A line that was there before says nothing."""
    lines = []
    for step in range(1, 61):
        dead = step >= 37
        lines += (
            ["ERROR:tools.sandbox_fusion:executing code: http://10.0.9.14:8080 did not connect"] * 8 * dead
        )
        lines += ["ERROR:data:one row left out"] * 9
        turns, score, calls = (2.1, 0.07, 29.0) if dead else (5.2, 0.45, 3.0)
        wobble = 1 + step % 5 / 100
        lines.append(
            f"step:{step} - critic/score/mean:{score * wobble} - num_turns/mean:{turns * wobble} - "
            f"timing_s/agent_loop/tool_calls/mean:{calls * wobble} - timing_s/gen:{100 * wobble} - actor/entropy:0.4"
        )
    (tmp_path / "dead.log").write_text("\n".join(lines) + "\n")
    found = json.loads(run(capsys, str(tmp_path / "dead.log"), "--json")[1])["findings"][0]
    assert (found["rule"], found["step"]) == ("dead_sandbox_pool", 37)
    words = next(item for item in found["evidence"] if item["metric"] == "log")
    assert words["step"] == 37
    assert "192 lines since step 37 and none before" in words["says"]
    assert "10.0.9.14:8080" in words["says"]


@pytest.mark.parametrize("where", ["train.log", "localhost:9090"])
def test_a_server_that_is_no_url_is_told_apart_from_a_file(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, where, "--format", "prometheus")
    assert code != 0
    assert f"reads a server, and '{where}' is no URL" in err
    assert "http://localhost:9090" in err


class FastRun(BaseHTTPRequestHandler):
    """A server with a run of forty steps of five seconds an hour ago, read at the times that a query asks for."""

    ended_s = 1.7e9

    def do_GET(self) -> None:
        query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
        begin, end, stride = (float(query[key]) for key in ("start", "end", "step"))
        times = [begin + i * stride for i in range(int((end - begin) / stride) + 1)]
        steps = {t: int((t - self.ended_s + 200) // 5) for t in times if 0 <= t - self.ended_s + 200 < 200}
        series = {
            "training/global_step": [[t, str(step)] for t, step in steps.items()],
            "critic/rewards/mean": [[t, str(0.5 + step / 1000)] for t, step in steps.items()],
        }
        result = [
            {"metric": {"__name__": "rollbook_x", "metric": m, "run": 'a "b"'}, "values": v}
            for m, v in series.items()
        ]
        body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


class OwnEndpoint(BaseHTTPRequestHandler):
    """What a run itself exports, which is no API."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"rollbook_critic_rewards_mean 0.5\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_a_runs_own_endpoint_is_no_server_to_ask() -> None:
    server = HTTPServer(("127.0.0.1", 0), OwnEndpoint)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(DataError, match="is no Prometheus server") as refused:
            list(prometheus_reader.read(f"http://127.0.0.1:{server.server_port}"))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert "the run directory" in refused.value.args[1]


def test_a_run_much_shorter_than_the_hours_asked_for_keeps_its_steps() -> None:
    server = HTTPServer(("127.0.0.1", 0), FastRun)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        rows = list(prometheus_reader.read(url, hours=24.0, now_s=FastRun.ended_s + 3600))
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert [row.step for row in rows] == list(range(40))


def test_the_help_names_every_format_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--help")
    assert {
        name for name in (*READERS, "prometheus") if name not in out.split("--format")[1].split("--run")[0]
    } == set()
