"""A replica that died is said to have died: a finding where it costs, a line where it hardly did, and never the old
weight version that its last label shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 60
DIED = "its process is gone: The actor died unexpectedly before finishing this task."


def died(step: int, *, why: str = DIED, replica: int = 1) -> dict[str, Any]:
    return {"kind": "quarantined", "step": step, "replica_id": replica, "why": why, "at_s": 1e9 + 10.0 * step}


def back(step: int, *, replica: int = 1) -> dict[str, Any]:
    return {"kind": "back_in_service", "step": step, "replica_id": replica, "at_s": 1e9 + 10.0 * step}


def judge(
    tmp_path: Path, events: list[dict[str, Any]], slow: dict[int, float], *, stands_from: int = N
) -> Diagnosis:
    """Steps of 10 s, but for `slow`; replica 1 keeps its version from `stands_from` on."""
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(N):
            data = {
                "timing_s/step": slow.get(step, 10.0),
                "timing_s/gen": slow.get(step, 10.0) - 4.0,
                "critic/score/mean": 0.4 + 0.001 * (step % 7),
                "training/logprob_gap/mean": 0.003 + 1e-4 * (step % 5),
                "training/weight_version": step + 1,
                "replica/0/weight_version": step + 1,
                "replica/1/weight_version": min(step + 1, stands_from),
            }
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    lines = [{"kind": "run_started"}, *sorted(events, key=lambda event: event.get("step", N))]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return diagnose(load(str(folder)))


def test_a_death_that_costs_is_a_finding_with_its_seconds_and_its_return(tmp_path: Path) -> None:
    diagnosis = judge(tmp_path, [died(40), back(42)], {40: 45.0, 41: 20.0, 42: 15.0})
    [finding] = diagnosis.findings
    assert (finding.rule, finding.step, finding.until_step) == ("replica_died", 40, 42)
    assert finding.title == "replica 1 died and came back"
    assert finding.cost_s == pytest.approx(35.0 + 10.0 + 5.0)
    assert "back at step 42, after 20 s" in finding.evidence[0].says


def test_a_death_that_costs_next_to_nothing_is_a_line_and_no_alarm(tmp_path: Path) -> None:
    diagnosis = judge(tmp_path, [died(20), back(21)], {20: 14.0, 21: 11.0})
    assert diagnosis.verdict == "well"
    [note] = [note for note in diagnosis.notes if "died" in note]
    assert note == "replica 1 died and came back (step 20); it cost 5 s, the run lost nothing else"


def test_deaths_again_and_again_are_a_finding_however_cheap(tmp_path: Path) -> None:
    events = [event for at in (10, 20, 30) for event in (died(at), back(at + 1))]
    [finding] = judge(tmp_path, events, {}).findings
    assert finding.title == "replica 1 died 3 times and came back"


def test_a_replica_that_is_gone_is_not_one_that_stands_at_an_old_version(tmp_path: Path) -> None:
    diagnosis = judge(tmp_path, [died(30)], {}, stands_from=31)
    assert [f.rule for f in (*diagnosis.findings, *diagnosis.consequences)] == ["replica_died"]
    assert diagnosis.findings[0].title == "replica 1 died and did not come back"
    assert "1 of 2 replicas advances" in diagnosis.signals[1].says


def test_a_resumed_run_has_all_its_replicas_back(tmp_path: Path) -> None:
    resumed = {"kind": "run_resumed", "step": 50, "at_s": 1e9 + 500.0}
    assert judge(tmp_path, [died(48), resumed], {}).verdict == "well"


def test_a_replica_taken_out_alive_still_stands_at_its_version(tmp_path: Path) -> None:
    why = "replica 1 did not answer to commit of version 31 within 30 s"
    assert judge(tmp_path, [died(30, why=why)], {}, stands_from=31).verdict == "version_drift"
