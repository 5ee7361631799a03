"""Names that no table has are understood by their words, whatever the format of the log."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.readers.words import IN_WORDS, meant
from rollbook.diagnose.tree import diagnose

NEMO = {
    "train/gen_kl_error": "rollout_corr/kl",
    "train/token_mult_prob_error": "training/logprob_gap/mean",
    "train/mean_gen_tokens_per_sample": "response_length/mean",
    "train/max_gen_tokens_per_sample": "response_length/max",
    "train/approx_entropy": "actor/entropy",
    "timing/train/generation": "timing_s/gen",
    "timing/train/policy_training": "timing_s/update_actor",
    "timing/train/policy_and_reference_logprobs": "timing_s/old_log_prob",
    "timing/train/prepare_for_generation/transfer_and_update_weights": "timing_s/update_weights",
    "timing/train/reward_calculation": "timing_s/reward",
    "timing/train/checkpointing": "timing_s/save_checkpoint",
}


OTHERS = {
    "time/old_log_probs": "timing_s/old_log_prob",
    "time/ref_log_probs": "timing_s/ref",
    "time/generate_completions": "timing_s/gen",
    "time/forward_backward": "timing_s/update_actor",
    "time/broadcast_weights": "timing_s/update_weights",
    "param_sync_time": "timing_s/update_weights",
    "weight_sync_latency": "timing_s/update_weights",
    "is_truncated/mean": "response_length/clip_ratio",
    "generator/mean_output_tokens": "response_length/mean",
    "cuda/max_reserved_gib": "perf/max_memory_reserved_gb",
    "perf/memory_reserved_gb": "perf/max_memory_reserved_gb",
    "gpu_memory/allocated_gib": "perf/max_memory_allocated_gb",
    "allocatedMemoryGB": "perf/max_memory_allocated_gb",
    "mismatch_kl/all/mean": "rollout_corr/kl",
    "train_infer_kl": "rollout_corr/kl",
    "off_policy_level/all/mean": "training/off_policy/trajectory_staleness/mean",
    "off_policy_level/all/max": "training/off_policy/trajectory_staleness/max",
}
"""ROLL's, prime-rl's, torchforge's and anybody's."""


@pytest.mark.parametrize(("name", "metric"), (NEMO | OTHERS).items())
def test_trackers_names_of_frameworks_are_understood(name: str, metric: str) -> None:
    found = meant(name)
    assert found is not None
    assert found[0] == metric
    assert metric in IN_WORDS


@pytest.mark.parametrize(
    "name",
    [
        "masked_mismatch_kl/mean",
        "param_update_time",
        "time/wait_for_batch",
        "log_ratio/mean",
        "train/probs_ratio",
        "train/policy_kl_error",
        "timing/train/training_prep",
        "train/total_num_tokens",
        "num_samples",
    ],
)
def test_what_means_something_else_is_left_alone(name: str) -> None:
    assert meant(name) is None


def test_the_mean_of_an_exponential_is_shown_as_the_gap_that_it_is(tmp_path: Path) -> None:
    log = tmp_path / "history.jsonl"
    rows = (
        {"_step": i, "_timestamp": 60.0 * i, "train/reward": 0.5, "train/token_mult_prob_error": np.exp(0.02)}
        for i in range(1, 30)
    )
    log.write_text("\n".join(map(json.dumps, rows)) + "\n")
    run = load(str(log))
    assert run.values["training/logprob_gap/mean"] == pytest.approx(0.02)
    assert run.in_log["training/logprob_gap/mean"] == "log train/token_mult_prob_error"


@pytest.mark.parametrize("actor", ["ppo_actor", "grpo_actor", "gspo_actor"])
def test_an_actor_of_areal_is_one_whatever_its_algorithm_is_called(actor: str, tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    log.write_text(
        "\n".join(
            f"20260101-10:{i:02d}:00.000 StatsLogger INFO: Epoch 1/1 Step {i}/40 Train step {i}/40 done.\n"
            f"│ {actor}/task_reward/avg │ 4.0e-01 │ {actor}/update/behave_approx_kl/avg │ 1.0e-03 │"
            for i in range(1, 41)
        )
    )
    assert {"critic/rewards/mean", "rollout_corr/kl"} <= set(load(str(log)).values)


def _of_sources(path: Path, rewards: dict[str, np.ndarray], *, late: str = "", format: str = "verl") -> Path:
    """A log of 60 steps whose rewards by source have names of its own; that of `late` is 0 from step 31 on."""
    rng = np.random.default_rng(5)
    lines = []
    for i in range(1, 61):
        data = {
            name: 0.0 if name == late and i > 30 else float(rng.binomial(64, 0.5)) / 64 for name in rewards
        }
        data |= {
            name: float(values[i - 1]) for name, values in rewards.items() if not np.isnan(values[i - 1])
        }
        data |= {"critic/rewards/mean": float(np.mean(list(data.values()))), "response_length/mean": 800.0}
        lines.append(json.dumps({"step": i, "data": data}))
    path.write_text("\n".join(lines) + "\n")
    return path


ANY = np.full(60, np.nan)


@pytest.mark.parametrize(
    "names",
    [
        ("rollout/reward_livecodebench", "rollout/reward_numina_math", "rollout/reward_hotpotqa"),
        ("train/code_reward", "train/math_reward"),
        ("reward/deep_math", "reward/live_code_bench"),
        ("rollout/critic/score/deep_math/mean", "rollout/critic/score/code/mean"),
    ],
)
def test_sources_with_names_of_their_own_are_judged(names: tuple[str, ...], tmp_path: Path) -> None:
    log = _of_sources(tmp_path / "run.jsonl", dict.fromkeys(names, ANY), late=names[0])
    diagnosis = diagnose(load(str(log)))
    assert diagnosis.verdict == "one_source_all_zero"
    assert abs(diagnosis.findings[0].step - 31) <= 1
    assert names[0] in str(diagnosis.findings[0].evidence)


@pytest.mark.parametrize(
    "extra", ["reward/parse_failures", "reward/empty_answer_timeouts", "reward/hack_calls"]
)
def test_what_is_counted_beside_a_reward_is_no_source(extra: str, tmp_path: Path) -> None:
    names = {"reward/deep_math": ANY, "reward/live_code_bench": ANY, extra: np.zeros(60)}
    log = _of_sources(tmp_path / "run.jsonl", names)
    assert diagnose(load(str(log))).findings == ()
