"""A real Prometheus scrapes a real endpoint and fires the rules of a run that is in trouble."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from rollbook.observe.alerts import to_rules
from rollbook.observe.prometheus import PrometheusSink
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Last, Ratio, Total

DEADLINE_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def firing(port: int) -> set[str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/alerts", timeout=5) as answer:
            found: dict[str, Any] = json.load(answer)
    except (urllib.error.URLError, OSError):
        return set()
    return {a["labels"]["alertname"] for a in found["data"]["alerts"] if a["state"] == "firing"}


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
def test_prometheus_fires_the_rules_of_a_run_in_trouble_and_no_other(tmp_path: Path) -> None:
    sink = PrometheusSink("demo")
    port = free_port()
    target = sink.url.split("/")[2]
    (tmp_path / "rules.yml").write_text(to_rules())
    (tmp_path / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"rule_files: [{tmp_path / 'rules.yml'}]\n"
        f"scrape_configs: [{{job_name: rollbook, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    with Recorder(tmp_path / "run", [sink]) as recorder:
        with recorder.step(0):
            recorder.metrics(
                {
                    "training/logprob_gap/mean": Ratio(40.0, 100),  # engine mismatch
                    "sync/num_failed": Total(1),
                    "training/off_policy/trajectory_staleness_worst/max": Last(1.0),  # within the bound
                    "actor/loss": float("nan"),
                    "failures/frac": Ratio(0, 10),
                    "rollout/tail_s": 0.0,
                }
            )
        server = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={tmp_path / 'prometheus.yml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            expected = {"EngineMismatch", "PublicationFailed", "NotANumber"}
            ends_at = time.monotonic() + DEADLINE_S
            while not expected <= firing(port) and time.monotonic() < ends_at:
                time.sleep(0.2)  # another program's clock
            assert firing(port) == expected
        finally:
            server.terminate()
            server.wait(timeout=20)
