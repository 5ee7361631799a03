"""`rollbook reconcile` on a run that ended badly says what its own events say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.cli.main import main

STARTED = {"kind": "run_started"}
STARVED = {
    "kind": "step_failed",
    "step": 0,
    "error": "StarvedError: 300 groups in a row were dropped",
    "metrics": {},
}
FAILED = {"kind": "run_failed", "error": "300 groups in a row were dropped", "remedy": "keep flat groups"}
OPEN = {"kind": "span_open", "name": "rollout", "span_id": 3, "step": 0}


def folder_of(path: Path, *events: dict[str, Any], num_steps: int = 0) -> Path:
    path.mkdir(exist_ok=True)
    (path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    stage = {"seconds": 1.0, "low": 0.9, "high": 1.1}
    (path / "plan.json").write_text(json.dumps({"stages": {"rollout": stage}}))
    rows = [{"step": s, "data": {"timing_s/step": 1.0, "timing_s/gen": 1.0}} for s in range(num_steps)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def reconciled(capsys: pytest.CaptureFixture[str], folder: Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["reconcile", str(folder)])
    captured = capsys.readouterr()
    return (ended.value.code if isinstance(ended.value.code, int) else 0), captured.out, captured.err


@pytest.mark.parametrize(
    ("events", "what", "hint"),
    [
        ([STARTED, STARVED, FAILED], "it failed in step 0: StarvedError: 300 groups", "keep flat groups"),
        ([STARTED, FAILED], "it failed: 300 groups in a row", "keep flat groups"),
        ([STARTED, OPEN], "killed in 'rollout'", "events.jsonl"),
        ([STARTED], "its process was killed, and left no word", "events.jsonl"),
        ([STARTED, {"kind": "run_ended"}], "it ended in order before its first step", "events.jsonl"),
        ([STARTED, STARVED, FAILED, {"kind": "run_resumed"}, OPEN], "killed in 'rollout'", "events.jsonl"),
    ],
)
def test_a_run_without_a_step_says_why(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, events: list[dict[str, Any]], what: str, hint: str
) -> None:
    code, out, err = reconciled(capsys, folder_of(tmp_path / "run", *events))
    assert (code, out) == (2, "")
    error, remedy = err.split("\nhint: ")
    assert "finished, so there is nothing to compare" in error and what in error
    assert hint in remedy


def test_a_run_that_failed_later_is_reconciled_and_says_so(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    late = STARVED | {"step": 2}
    code, out, _ = reconciled(capsys, folder_of(tmp_path / "run", STARTED, late, FAILED, num_steps=2))
    assert code == 0 and "2 steps finished; it failed in step 2: StarvedError" in out


def test_a_step_that_was_repeated_and_went_well_is_no_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    repeated: dict[str, Any] = {"kind": "span", "name": "step", "step": 0, "span_id": 9}
    events: list[dict[str, Any]] = [STARTED, STARVED, repeated, {"kind": "run_ended"}]
    code, out, _ = reconciled(capsys, folder_of(tmp_path / "run", *events, num_steps=1))
    assert code == 0 and "failed" not in out
