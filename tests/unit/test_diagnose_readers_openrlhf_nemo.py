"""OpenRLHF's and NeMo-RL's console logs become the same series as everybody's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollbook.diagnose.readers.table import detect, load


def _write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_openrlhf_prints_the_status_of_each_global_step(tmp_path: Path) -> None:
    log = _write(
        tmp_path / "train.log",
        "(LLMRayActor pid=7) INFO 06-20 01:36:37 executor_base.py:208] It took 2.0 seconds to fall asleep.\n"
        "(ActorModelRayActor pid=9) Train epoch [1/1]:  50%|##5  | 4/8 [00:12<00:12, 3.1s/it, pg=0.2, glen=9]\n"
        "(PPOTrainer pid=4) 2026-11-12 09:18:48 INFO     \u2728 Global step 1: {'policy_loss': 0.25, 'actor_lr': 1e-6, "
        "'ppo_clip_ratio': 0.125, 'kl': 0.5, 'vllm_kl': 0.001, 'response_length': 800.0, 'truncated': 0.0, "
        "'reward': 0.5, 'timing/generation': 40.0, 'timing/step_total': 64.0, 'dynamic_filtering_pass_rate': 62.5}\n"
        "(PPOTrainer pid=4) 2026-11-12 09:22:28 INFO     \u2728 Global step 2: {'policy_loss': nan, 'actor_lr': 1e-06, "
        "'kl': 0.25, 'vllm_kl': 0.002, 'response_length': 900.0, 'reward': 0.75, 'timing/generation': 42.0}\n",
    )
    run = load(log)
    assert (run.format, run.steps.tolist()) == ("openrlhf", [1, 2])
    for metric, values in {
        "critic/rewards/mean": [0.5, 0.75],
        "rollout_corr/kl": [0.001, 0.002],
        "actor/kl_loss": [0.5, 0.25],
        "response_length/mean": [800.0, 900.0],
        "timing_s/gen": [40.0, 42.0],
        "timing_s/step": [64.0, np.nan],
        "filter/kept_frac": [0.625, np.nan],
    }.items():
        np.testing.assert_array_equal(run.values[metric], values, err_msg=metric)
    assert run.non_finite == {"actor/pg_loss": [2]}


def test_of_openrlhfs_bars_the_last_state_of_each_step_counts(tmp_path: Path) -> None:
    """Two steps of two epochs of two batches: drawn anew eight times, with carriage returns between."""
    bars = [
        f"Train epoch [{epoch}/2]: {50 * i}%|##   | {i}/2 [00:0{i}<00:01,  1.2s/it, pg={i}e-3, rm={rm}, ret=0.1, "
        f"glen={glen}, tlen=900, kl=0.00{epoch}, act_lr=1e-6]"
        for rm, glen in ((0.4, 800), (0.6, 850))
        for epoch in (1, 2)
        for i in (1, 2)
    ]
    run = load(_write(tmp_path / "train.log", "\r".join(bars) + "\n"))
    assert (run.format, run.steps.tolist()) == ("openrlhf", [1, 2])
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.4, 0.6])
    np.testing.assert_array_equal(run.values["response_length/mean"], [800.0, 850.0])
    np.testing.assert_array_equal(run.values["actor/kl_loss"], [0.002, 0.002])


def test_openrlhfs_bars_of_episodes_say_more_than_those_of_epochs(tmp_path: Path) -> None:
    lines = []
    for i in range(1, 4):
        lines.append(f"Train epoch [1/1]: 100%|#####| 8/8 [00:09<00:00,  1.2s/it, pg=0.5, glen={700 + i}]")
        lines.append(
            f"Episode [1/1]:  {i}0%|#    | {i}/10 [01:00<09:00, 60.0s/it, policy_loss=0.25, reward=0.{i}, "
            f"response_length={700 + i}, kl=0.001]"
        )
    run = load(_write(tmp_path / "train.log", "\n".join(lines) + "\n"))
    assert run.steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.1, 0.2, 0.3])


def _nemo_step(step: int, of: int, reward: float, *, reward_name: str = "Avg Reward") -> str:
    return (
        f"\n========================= Step {step}/{of} =========================\n"
        "\u25b6 Generating responses for batch of size 512...\n\n"
        "\U0001f4ca Training Results:\n"
        "  \u2022 Loss: -0.0053\n  \u2022 Generation KL Error: 0.0004\n"
        f"  \u2022 {reward_name}: {reward:.4f}\n  \u2022 Mean Generation Length: 1789.4005\n\n"
        "\u23f1\ufe0f  Timing:\n  \u2022 Total step time: 153.66s\n  \u2022 generation: 94.00s (61.2%)\n"
        "  \u2022 policy_training: 41.34s (26.9%)\n  \u2022 prepare_for_generation/total: 4.46s (2.9%)\n"
        "  \u2022 prepare_for_generation/transfer_and_update_weights: 1.20s (0.8%)\n"
    )


def test_nemo_rl_prints_a_block_for_each_step(tmp_path: Path) -> None:
    blocks = [_nemo_step(i, 100, 0.25 * i) for i in (1, 2)]
    run = load(_write(tmp_path / "ray-driver.log", "".join(blocks)))
    assert (run.format, run.steps.tolist()) == ("nemo-rl", [1, 2])
    for metric, value in {
        "actor/loss": -0.0053,
        "rollout_corr/kl": 0.0004,
        "response_length/mean": 1789.4005,
        "timing_s/step": 153.66,
        "timing_s/gen": 94.0,
        "timing_s/update_actor": 41.34,
        "timing_s/update_weights": 4.46,
    }.items():
        np.testing.assert_array_equal(run.values[metric], [value, value], err_msg=metric)
    np.testing.assert_array_equal(run.values["critic/rewards/mean"], [0.25, 0.5])


def test_nemo_rl_counts_steps_anew_in_every_epoch(tmp_path: Path) -> None:
    """Three steps an epoch; then a validation, and a step that has only begun."""
    blocks = [_nemo_step(i, 3, 0.5, reward_name="Avg Filtered Reward") for i in (1, 2, 3, 1, 2)]
    tail = (
        "\n\U0001f4ca Validation Results:\n    \u2022 Accuracy: 0.2500\n"
        "    \u2022 Average response length: 850.0 tokens\n"
        "\n========================= Step 3/3 =========================\n\u25b6 Preparing batch...\n"
    )
    run = load(_write(tmp_path / "ray-driver.log", "".join(blocks) + tail))
    assert run.steps.tolist() == [1, 2, 3, 4, 5]
    assert run.seams == []
    np.testing.assert_array_equal(run.values["val/all/reward"], [np.nan] * 4 + [0.25])


def test_nemo_rl_that_goes_back_to_a_checkpoint_is_a_restart(tmp_path: Path) -> None:
    blocks = [_nemo_step(i, 100, 0.5) for i in (1, 2, 3, 4, 5)] + [
        _nemo_step(i, 100, 0.75) for i in (4, 5, 6)
    ]
    run = load(_write(tmp_path / "ray-driver.log", "".join(blocks)))
    assert run.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert [seam.step for seam in run.seams] == [4]


@pytest.mark.parametrize(
    "text",
    [
        "Global step 3 of the tutorial: {'a': 1}\nstep:1 - critic/rewards/mean:0.5 - actor/entropy:0.25\n",
        "Train epoch [1/3]:  50%|##   | 4/8 [00:12<00:12, loss=0.3]\n"
        "step:1 - critic/rewards/mean:0.5 - actor/entropy:0.25\n",
        "===== Step by step =====\nstep:1 - critic/rewards/mean:0.5 - actor/entropy:0.25\n",
    ],
    ids=["words of a global step", "another trainer's bar", "a heading"],
)
def test_words_alike_are_not_taken_for_their_formats(text: str, tmp_path: Path) -> None:
    assert detect(Path(_write(tmp_path / "run.log", text))) == "verl-console"


def test_nemo_rl_tells_how_old_its_trajectories_are(tmp_path: Path) -> None:
    blocks = [
        _nemo_step(i, 100, 0.5).replace("\n\n\u23f1", f"\n  \u2022 Avg Trajectory Age: 1.{i} steps\n\n\u23f1")
        for i in (1, 2)
    ]
    run = load(_write(tmp_path / "ray-driver.log", "".join(blocks)))
    assert run.values["training/off_policy/trajectory_staleness/mean"].tolist() == [1.1, 1.2]
