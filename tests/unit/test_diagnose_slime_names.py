"""What slime's console log says beside its records: memory that is held, and rewards by source."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.readers.words import sources_in
from rollbook.diagnose.series import RunSeries
from rollbook.diagnose.tree import diagnose

N = 80
T = np.arange(N)


def _log(
    tmp_path: Path, *, sources: dict[str, np.ndarray] | None = None, held: np.ndarray | None = None
) -> RunSeries:
    """A healthy run of slime with the rewards of some sources, and with lines on the memory held after training."""
    rng = np.random.default_rng(5)
    lines = []
    for i in range(N):
        rewards = {f"rollout/raw_reward/{name}": float(v[i]) for name, v in (sources or {}).items()}
        rollout = {"rollout/raw_reward": 0.4 + 0.1 * i / N + rng.normal(0, 0.01)} | rewards
        rollout |= {"rollout/response_lengths": rng.normal(800, 20), "rollout/truncated": 0.01}
        step = {"train/pg_loss": 0.001, "train/entropy_loss": rng.normal(0.4, 0.01), "train/ppo_kl": 3e-4}
        step |= {"train/grad_norm": rng.normal(0.2, 0.01), "train/pg_clipfrac": 2e-3}
        step |= {"train/train_rollout_logprob_abs_diff": rng.normal(0.01, 2e-4)}
        perf = {"perf/rollout_time": rng.normal(50, 1), "perf/actor_train_time": rng.normal(40, 0.5)}
        perf |= {"perf/step_time": rng.normal(100, 1), "perf/update_weights_time": rng.normal(4, 0.1)}
        lines.append(f"(RolloutManager pid=7) data.py:379 - rollout {i}: {rollout}")
        lines.append(f"(MegatronTrainRayActor pid=9) model.py:622 - step {i}: {step}")
        if held is not None:
            memory = {"gpu": "0", "total_GB": 79.11, "free_GB": 5.0, "used_GB": 74.11}
            memory |= {"allocated_GB": 45.0, "reserved_GB": round(float(held[i]), 2)}
            lines.append(f"(MegatronTrainRayActor pid=9) [Rank 0] Memory-Usage after train: {memory}")
        lines.append(f"(MegatronTrainRayActor pid=9) train_metric_utils.py:48 - perf {i}: {perf}")
    path = tmp_path / "run.log"
    path.write_text("\n".join(lines) + "\n")
    return load(str(path))


def test_memory_that_is_held_after_training_is_read_and_may_be_fragmented(tmp_path: Path) -> None:
    run = _log(tmp_path, held=np.where(T < 20, 52.0, 52.0 + (T - 20) * 0.4))
    assert run.values["perf/max_memory_allocated_gb"][-1] == 45.0
    assert run.values["perf/device_memory_gb"][-1] == 79.11
    assert diagnose(run).verdict == "fragmentation"


def test_memory_that_is_held_from_the_first_step_on_is_well(tmp_path: Path) -> None:
    assert diagnose(_log(tmp_path, held=np.full(N, 76.0))).verdict == "well"


@pytest.mark.parametrize(("dead", "verdict"), [(True, "one_source_all_zero"), (False, "well")])
def test_a_source_under_the_raw_reward_is_one(tmp_path: Path, dead: bool, verdict: str) -> None:
    rng = np.random.default_rng(6)
    sources = {name: rng.normal(0.5, 0.03, N) for name in ("math_dapo", "gpqa", "code")}
    if dead:
        sources["gpqa"] = np.where(T < 40, sources["gpqa"], 0.0)
    found = diagnose(_log(tmp_path, sources=sources))
    assert found.verdict == verdict
    if dead:
        assert found.findings[0].step == 40


def test_sources_stand_under_scores_and_before_rewards_of_any_kind() -> None:
    names = ["train/acc/gsm8k", "train/acc/math_hard", "rollout/gpqa/raw_reward", "rollout/code/task_reward"]
    assert sources_in(names) == {
        "train/acc/gsm8k": "gsm8k",
        "train/acc/math_hard": "math_hard",
        "rollout/gpqa/raw_reward": "gpqa",
        "rollout/code/task_reward": "code",
    }
    others = ["critic/score/mean", "critic/score/max", "policy_accuracy_mean", "rollout/raw_reward/std"]
    assert sources_in(others) == {}
