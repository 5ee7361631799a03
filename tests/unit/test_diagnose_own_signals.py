"""Rules on signals that only our own logs have: speed by replica, gap by replica, failures by class, digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

RNG = np.random.default_rng(0)
N, AT = 40, 15


def run(tmp_path: Path, columns: dict[str, Any], events: list[dict[str, Any]] | None = None) -> Diagnosis:
    folder = tmp_path / "run"
    folder.mkdir()
    score = 0.4 + 0.1 * np.arange(N) / N + RNG.normal(0, 0.02, N)
    columns = {"critic/score/mean": score, "timing_s/gen": RNG.normal(30, 1, N), **columns}
    rows = [{"step": i, "data": {k: float(v[i]) for k, v in columns.items()}} for i in range(N)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [{"at_s": float(i), "mono_s": float(i), **event} for i, event in enumerate(events or [])]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return diagnose(load(str(folder)))


def after(before: float, late: float, noise: float) -> Any:
    return np.where(np.arange(N) >= AT, late, before) * np.exp(RNG.normal(0, noise, N))


def test_one_replica_slower_than_the_others_is_named(tmp_path: Path) -> None:
    speeds = {f"replica/{i}/tokens_per_s": after(900, 900 if i else 110, 0.3) for i in range(3)}
    finding = run(tmp_path, speeds).findings[0]
    assert (finding.rule, finding.title[:9]) == ("slow_replica", "replica 0")
    assert abs(finding.step - AT) <= 1


def test_replicas_that_all_become_slow_are_no_slow_replica(tmp_path: Path) -> None:
    speeds = {f"replica/{i}/tokens_per_s": after(900, 300, 0.3) for i in range(3)}
    assert "slow_replica" not in [f.rule for f in run(tmp_path, speeds).findings]


def test_a_replica_whose_gap_grows_alone_has_old_weights_whatever_its_label_says(tmp_path: Path) -> None:
    age = np.clip(np.arange(N) - AT, 0, None)
    gaps = {f"training/logprob_gap_by_replica/{i}/mean": RNG.normal(0.01, 0.001, N) for i in range(2)}
    gaps["training/logprob_gap_by_replica/1/mean"] += 0.008 * age
    mean = {"training/logprob_gap/mean": sum(gaps.values()) / 2}
    versions = {f"replica/{i}/weight_version": np.arange(N) for i in range(2)}
    diagnosis = run(tmp_path, {**gaps, **mean, **versions, "training/weight_version": np.arange(N)})
    assert diagnosis.verdict == "version_drift"


def test_failures_of_the_scorer_are_not_those_of_sandboxes(tmp_path: Path) -> None:
    frac = np.where(np.arange(N) >= AT, 0.3, 0.0)
    columns = {"failures/frac": frac, "failures/num": frac * 100, "failures/reward/num": frac * 100}
    assert run(tmp_path, columns).verdict == "dead_scorer"


def test_time_outs_of_trajectories_are_a_wait_for_samples(tmp_path: Path) -> None:
    frac = np.where(np.arange(N) >= AT, 0.12, 0.0)
    columns = {"failures/frac": frac, "failures/num": frac * 100, "failures/timeout/num": frac * 100}
    assert run(tmp_path, columns).verdict == "buffer_never_fills"


def test_other_weights_after_a_restart_are_told_by_their_digest(tmp_path: Path) -> None:
    events = [
        {"kind": "run_started"},
        {"kind": "publication", "step": AT - 1, "weight_version": AT, "digest": "a" * 32},
        {"kind": "run_resumed"},
        {"kind": "publication", "weight_version": AT, "digest": "b" * 32},
    ]
    assert run(tmp_path, {}, events).verdict == "discontinuity_after_resume"


def test_the_rounding_of_float32_is_no_gap_that_changed(tmp_path: Path) -> None:
    gap = {"training/logprob_gap/mean": after(1e-7, 6e-7, 0.05)}
    assert run(tmp_path, gap).is_well
