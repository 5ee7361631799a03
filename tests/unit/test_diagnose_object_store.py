"""An object store that spills: told by counters under any name, or by all that moves the batch at once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

Array = NDArray[np.float64]
N, SINCE = 80, 40
RNG = np.random.default_rng(3)
SECONDS = {
    "gen": 100.0, "reward": 2.0, "old_log_prob": 15.0, "ref": 15.0, "adv": 0.08, "update_actor": 50.0,
    "update_weights": 3.0,
}  # fmt: skip
SLOW = {"reward": 1.5, "old_log_prob": 1.7, "ref": 1.7, "adv": 40.0, "update_actor": 1.15}


def _verdict(
    tmp_path: Path,
    *,
    slow: dict[str, float],
    tokens: float = 1.0,
    extra: dict[str, Array] | None = None,
    of_no_stage: Array | None = None,
) -> str:
    log = tmp_path / "run.jsonl"
    rows = []
    for i in range(N):
        is_late = i >= SINCE
        data = {
            f"timing_s/{stage}": seconds * RNG.normal(1.0, 0.03) * (slow.get(stage, 1.0) if is_late else 1.0)
            for stage, seconds in SECONDS.items()
        }
        data["timing_s/step"] = sum(data.values()) + (1.0 if of_no_stage is None else of_no_stage[i])
        data["response_length/mean"] = 2800.0 * RNG.normal(1.0, 0.02) * (tokens if is_late else 1.0)
        data["critic/rewards/mean"] = 0.3 + 0.002 * i + RNG.normal(0.0, 0.01)
        data |= {name: float(values[i]) for name, values in (extra or {}).items()}
        rows.append(json.dumps({"step": i + 1, "data": data}))
    log.write_text("\n".join(rows) + "\n")
    return diagnose(load(str(log))).verdict


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("ray/object_store_spilled_gb_total", 2.0**30),
        ("ray_spilled_bytes", 1.0),
        ("node0/plasma/spill_mib", 2.0**20),
    ],
)
def test_counters_of_any_name_and_unit_tell(name: str, unit: float, tmp_path: Path) -> None:
    by_the_step = np.where(np.arange(N) >= SINCE, RNG.uniform(3e9, 5e9, N), 0.0) / unit
    spilled = np.cumsum(by_the_step) if "total" in name else by_the_step
    assert (
        _verdict(tmp_path, slow={"adv": 40.0, "reward": 1.5}, extra={name: spilled}) == "object_store_spill"
    )


def test_all_that_moves_the_batch_at_once_tells_without_a_counter(tmp_path: Path) -> None:
    assert _verdict(tmp_path, slow=SLOW) == "object_store_spill"


@pytest.mark.parametrize(
    ("slow", "tokens"),
    [
        ({"old_log_prob": 1.7, "ref": 1.7, "update_actor": 1.3}, 1.0),
        (dict.fromkeys(SLOW, 1.7), 1.7),
        ({"adv": 40.0}, 1.0),
    ],
    ids=["a slower device", "longer answers", "an estimator that computes"],
)
def test_computing_longer_is_no_spilling(slow: dict[str, float], tokens: float, tmp_path: Path) -> None:
    assert _verdict(tmp_path, slow=slow, tokens=tokens) != "object_store_spill"


def test_a_little_that_was_spilled_at_the_start_is_none(tmp_path: Path) -> None:
    once = np.where(np.arange(N) >= 1, 2.2, 0.0)
    verdict = _verdict(
        tmp_path,
        slow={},
        extra={
            "ray/object_store_spilled_gb_total": once,
            "ray/object_store_restored_gb_total": once,
            "ray/used_gb": 40.0 + once,
        },
    )
    assert verdict in ("well", "not_judged")


@pytest.mark.parametrize(("lost_s", "verdict"), [(3.0, "object_store_spill"), (0.0, "well")])
def test_spilling_that_is_counted_tells_by_a_few_seconds_of_no_stage(
    lost_s: float, verdict: str, tmp_path: Path
) -> None:
    """A step has seconds of no stage anyway: they are half again as many, growing with what is spilled."""
    late = np.clip(np.arange(N) - SINCE + 1, 0, None) / (N - SINCE)
    seconds = 12.0 + 2.0 * lost_s * late + RNG.normal(0.0, 0.3, N)
    spilled = {"ray/spilled_gb_total": np.cumsum(4.0 * late)}
    found = _verdict(tmp_path, slow={}, extra=spilled, of_no_stage=seconds)
    assert found in (verdict, "not_judged" if verdict == "well" else verdict)


@pytest.mark.parametrize(
    ("gib_a_step", "slow", "tokens", "verdict"),
    [
        (80.0, {"gen": 1.3}, 1.0, "object_store_spill"),
        (80.0, {"gen": 1.3, "update_actor": 1.3}, 1.1, "object_store_spill"),
        (80.0, {}, 1.0, "well"),
        (80.0, dict.fromkeys(SECONDS, 1.25), 1.25, "well"),
        (0.5, {"gen": 1.3}, 1.0, "well"),
    ],
    ids=["slower", "slower and longer answers", "as fast", "longer answers", "hardly any"],
)
def test_much_that_is_spilled_step_by_step_tells_by_computing_that_waits(
    gib_a_step: float, slow: dict[str, float], tokens: float, verdict: str, tmp_path: Path
) -> None:
    """What is spilled is a level that swings, the seconds of no stage are what they were."""
    by_the_step = np.where(np.arange(N) >= SINCE, gib_a_step * RNG.uniform(0.6, 1.4, N), 0.0)
    found = _verdict(tmp_path, slow=slow, tokens=tokens, extra={"ray/object_store_spilled_gb": by_the_step})
    assert (found == "object_store_spill") == (verdict == "object_store_spill")
