"""The Prometheus endpoint, the alert rules over it, and the Grafana dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollbook.errors import ConfigError
from rollbook.observe import grafana
from rollbook.observe.alerts import ALERTS, Thresholds, to_rules
from rollbook.observe.catalogue import ELSEWHERE, catalogue, lookup
from rollbook.observe.clock import ManualClock
from rollbook.observe.prometheus import PrometheusSink, exported_name
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Ratio, Total

SELF_MADE = {
    "rollbook_last_step_time_seconds",
    "rollbook_run_start_time_seconds",
    "rollbook_run_num_steps",
    "rollbook_events_total",
}


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    clock = ManualClock()
    sink = PrometheusSink("demo", num_steps=120, clock=clock)
    with Recorder(tmp_path / "run", [sink], clock=clock, strict=True) as opened:
        yield opened


def scrape(recorder: Recorder) -> str:
    (sink,) = recorder.sinks
    assert isinstance(sink, PrometheusSink)
    with urllib.request.urlopen(sink.url, timeout=10) as answer:
        return str(answer.read().decode())


def test_the_endpoint_serves_the_last_readings_with_their_labels(recorder: Recorder) -> None:
    for step in range(2):
        with recorder.step(step):
            recorder.metrics({"reward/openai/gsm8k/mean": Ratio(step + 1, 4), "replica/3/weight_version": 7})
    recorder.finding("rule", "odd", remedy="look")
    lines = scrape(recorder).splitlines()
    for line in (
        'rollbook_reward_by_source_mean{metric="reward/openai/gsm8k/mean",run="demo",source="openai/gsm8k"} 0.5',
        "rollbook_replica_by_replica_id_weight_version"
        '{metric="replica/3/weight_version",replica_id="3",run="demo"} 7.0',
        'rollbook_training_global_step{metric="training/global_step",run="demo"} 1.0',
        'rollbook_last_step_time_seconds{run="demo"} 1.7e+09',
        'rollbook_run_num_steps{run="demo"} 120.0',
        'rollbook_events_total{kind="finding",run="demo"} 1.0',
        "# HELP rollbook_reward_by_source_mean Reward of one data source. [reward]",
    ):
        assert line in lines


def test_before_the_first_step_nothing_claims_to_have_finished(recorder: Recorder) -> None:
    text = scrape(recorder)
    assert "rollbook_last_step_time_seconds" not in text
    assert 'rollbook_run_start_time_seconds{run="demo"}' in text


def test_what_one_step_counted_is_gone_with_the_next_and_what_became_nan_at_once(recorder: Recorder) -> None:
    """A failed publication that was repeated, a validation of every tenth step, a loss that is NaN from step 1 on."""
    for step in range(3):
        with recorder.step(step):
            recorder.metrics({"actor/loss": Ratio(float("nan") if step == 1 else 3.0, 4)})
            if step == 0:
                shares = {"waterfall/checkpoint": Ratio(1, 9)}  # the step that saved
                recorder.metrics({"sync/num_failed": Total(1), "val/add/reward": Ratio(1, 2)} | shares)
        served = {line.partition("{")[0] for line in scrape(recorder).splitlines() if line[0] != "#"}
        assert "rollbook_val_by_source_reward" in served
        assert ("rollbook_sync_num_failed" in served) is (step == 0)
        assert ("rollbook_waterfall_by_loss" in served) is (step == 0)
        assert ("rollbook_observe_nonfinite_metrics" in served) is (step == 1)
        assert ("rollbook_actor_loss" in served) is (step != 1)


def test_a_port_in_use_is_an_error_with_the_port() -> None:
    first = PrometheusSink("a")
    port = int(re.findall(r":(\d+)/", first.url)[0])
    try:
        with pytest.raises(ConfigError, match=f"observe.prometheus_port {port} on 127.0.0.1"):
            PrometheusSink("b", port=port)
    finally:
        first.close()


def test_exported_names_do_not_collide() -> None:
    names = [exported_name(metric.name) for metric in catalogue()]
    assert len(names) == len(set(names))


def test_every_alert_reads_metrics_that_exist() -> None:
    """And that a run serves: what only other systems log would leave an alert that never fires."""
    known = {exported_name(metric.name) for metric in catalogue() if metric.owner != ELSEWHERE} | SELF_MADE
    for alert in ALERTS:
        used = set(re.findall(r"rollbook_\w+", alert.expr(Thresholds())))
        assert used, alert.name
        assert used <= known, alert.name


def test_vectors_of_two_metrics_are_matched_on_shared_labels() -> None:
    """Series differ in their label `metric`: without on(...) such a rule would never fire."""
    for alert in ALERTS:
        expr = alert.expr(Thresholds())
        if len(set(re.findall(r"rollbook_\w+", expr))) > 1:
            assert "on(run" in expr, alert.name


def test_every_alert_says_what_to_do_and_what_to_check_next() -> None:
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for alert in ALERTS:
        assert alert.summary.endswith(".")
        assert alert.action.endswith(".")
        assert alert.next_check.endswith(".")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(to_rules(Thresholds(max_staleness_steps=4)))
    checked = subprocess.run(
        ["promtool", "check", "rules", str(tmp_path / "rules.yml")], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_every_panel_shows_metrics_that_exist() -> None:
    shown = [metric for _, row in grafana.ROWS for panel in row for metric in panel.metrics]
    assert [name for name in shown if lookup(name) is None] == []


def test_the_first_row_is_the_one_screen() -> None:
    panels = grafana.dashboard()["panels"]
    assert isinstance(panels, list)
    first = [
        panel["title"] for panel in panels if panel["type"] == "timeseries" and panel["gridPos"]["y"] == 1
    ]
    assert first == [
        "Reward by source", "Weight version per replica", "Logprob gap", "Staleness", "Length", "Sync",
    ]  # fmt: skip


def test_panels_do_not_overlap() -> None:
    panels = grafana.dashboard()["panels"]
    assert isinstance(panels, list)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafanas_own_models_accept_the_dashboard() -> None:
    pytest.importorskip("grafana_foundation_sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    parsed = Dashboard.from_json(json.loads(grafana.to_json()))
    back = json.loads(JSONEncoder().encode(parsed))
    assert back["title"] == "rollbook"
    panels = grafana.dashboard()["panels"]
    assert isinstance(panels, list)
    assert [panel["title"] for panel in back["panels"]] == [panel["title"] for panel in panels]
    targets = [t["expr"] for panel in back["panels"] for t in panel.get("targets", [])]
    assert 'rollbook_reward_by_source_mean{run="$run"}' in targets
