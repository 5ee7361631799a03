"""Rules on signals that only our own logs have: speed by replica, gap by replica, failures by class, digests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

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


def asynchronous(waits: Any, busy: Any, **more: Any) -> dict[str, Any]:
    """A run of an asynchronous schedule with such waits for samples, and seconds of everything else."""
    columns = {"buffer/num_finished": np.full(N, 4.0), "timing_s/gen": waits, "timing_s/step": waits + busy}
    length = {"response_length/mean": RNG.normal(10, 1, N), "response_length/max": np.full(N, 24.0)}
    return {**columns, **length, "timing_s/update_actor": 0.3 * busy, **more}


@pytest.mark.parametrize("period", [1, 2, 3])
def test_waits_that_were_near_zero_are_judged_against_the_seconds_of_the_steps(
    tmp_path: Path, period: int
) -> None:
    step = np.arange(N)
    hardly = np.where(step % 2, 0.0, RNG.uniform(0, 0.005, N))
    long = np.where(step % period, RNG.uniform(0, 0.03, N), RNG.uniform(0.2, 0.26, N)) * period / 2
    busy = RNG.uniform(0.05, 0.07, N)
    finding = run(tmp_path, asynchronous(np.where(step >= AT, long, hardly), busy)).findings[0]
    assert finding.rule == "buffer_never_fills"
    assert abs(finding.step - AT) <= 2


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_waits_that_stay_a_small_part_of_the_steps_are_none(tmp_path: Path, share: float) -> None:
    step = np.arange(N)
    waits = np.where((step >= AT) & (step % 2 == 0), share * 0.12, 0.0) + RNG.uniform(0, 1, N) ** 4 * 0.02
    assert run(tmp_path, asynchronous(waits, RNG.uniform(0.05, 0.07, N))).findings == ()


def test_bytes_that_were_never_spilled_before_need_no_noise_to_stand_out_of(tmp_path: Path) -> None:
    is_on = np.arange(N) >= AT
    moving = np.where(is_on, RNG.uniform(0.06, 0.08, N), RNG.uniform(4e-4, 6e-4, N))
    busy = RNG.uniform(0.06, 0.12, N) + moving
    spilled = {"host/object_store_spilled_bytes": np.where(is_on, RNG.uniform(1e8, 5e8, N), 0.0)}
    found = run(tmp_path, asynchronous(np.zeros(N), busy, **spilled, **{"timing_s/pack": moving})).findings[0]
    assert (found.rule, found.step) == ("object_store_spill", AT)


def test_what_never_ends_before_its_deadline_is_no_long_response(tmp_path: Path) -> None:
    is_on = np.arange(N) >= AT
    waits = np.where(is_on, RNG.uniform(0.1, 0.6, N), RNG.uniform(0, 1e-3, N))
    tail = {"rollout/tail_s": 0.8 * waits}
    failed = np.where(is_on, RNG.choice([0.14, 0.25, 0.4], N), 0.0)
    failures = {"failures/frac": failed, "failures/timeout/num": np.where(is_on, 28 * failed, np.nan)}
    found = run(tmp_path, asynchronous(waits, RNG.uniform(0.08, 0.12, N), **tail, **failures)).findings[0]
    assert (found.rule, found.step) == ("buffer_never_fills", AT)
    tmp_path = tmp_path / "without"
    tmp_path.mkdir()
    without = run(tmp_path, asynchronous(waits, RNG.uniform(0.08, 0.12, N), **tail))
    assert without.findings[0].rule in ("tail_burst", "buffer_never_fills")


def test_a_host_that_is_slow_in_decoding_too_has_no_slow_link(tmp_path: Path) -> None:
    columns = asynchronous(np.zeros(N), after(0.1, 0.8, 0.1))
    columns |= {
        "timing_s/update_weights": after(0.03, 0.3, 0.1),
        "rollout/decode_step_s": after(2e-3, 0.02, 0.1),
    }
    assert "collective_hang" not in [f.rule for f in run(tmp_path, columns).findings]
    (tmp_path / "link").mkdir()
    columns |= {"rollout/decode_step_s": after(2e-3, 2e-3, 0.1)}
    assert run(tmp_path / "link", columns).verdict == "collective_hang"


def test_tokens_far_beyond_all_before_begin_whatever_the_host_does_to_the_seconds(tmp_path: Path) -> None:
    is_long = (np.arange(N) >= AT) & (np.arange(N) % 3 == 0)
    seconds = np.where(is_long, 0.06, 0.025) * np.exp(RNG.normal(0, 0.35, N))
    columns = {
        "timing_s/gen": seconds,
        "timing_s/step": seconds + 0.05,
        "response_length/mean": np.where(is_long, 3.8, 2.9) + RNG.normal(0, 0.1, N),
        "generated/response_length/max": np.where(is_long, 24.0, 3.0),
    }
    found = run(tmp_path, columns).findings[0]
    assert (found.rule, found.step) == ("tail_burst", AT)


def test_a_run_of_ours_without_a_device_lacks_no_memory_of_it(tmp_path: Path) -> None:
    assert "device memory" not in {missing.lacks for missing in run(tmp_path, {}).not_judged}
