"""Shapes of real public logs: what printed them, what they hold, and what must not be made of them. Values of the runs
are cited where they stand for a fact."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)


def _entry(step: int) -> dict[str, float]:
    return {
        "loss": 0.067,
        "grad_norm": 0.5,
        "completions/clipped_ratio": 0.8,
        "reward": 0.1 * step,
        "step": step,
    }


def _write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_history_that_is_a_list_is_read(tmp_path: Path) -> None:
    """`json.dump(trainer.state.log_history)`, indented or not."""
    history = [_entry(step) for step in range(1, 9)]
    for indent in (None, 4):
        run = load(_write(tmp_path / "log.json", json.dumps(history, indent=indent)))
        assert (run.format, run.num_steps) == ("trl", 8)
        assert run.values["critic/rewards/mean"][-1] == pytest.approx(0.8)


def test_printed_dicts_are_told_whatever_comes_first(tmp_path: Path) -> None:
    """transformers 5 prints strings, and a trainer of one's own in another order; a bracket begins the file's words."""
    lines = [
        f"{{'reward': '0.{i}', 'frac_reward_zero_std': '0', 'loss': '1e-05', 'kl': '0.0006'}}"
        for i in range(1, 6)
    ]
    run = load(_write(tmp_path / "log.txt", "[train_grpo] dataset: a.jsonl\n" + "\n".join(lines) + "\n"))
    assert (run.format, run.num_steps) == ("trl", 5)


def test_ms_swifts_step_is_read(tmp_path: Path) -> None:
    rows = [
        {
            "loss": 0.0,
            "grad_norm": 0.0,
            "reward": 0.7,
            "completions/mean_length": 2302.4,
            "global_step/max_steps": f"{i}/547",
        }
        for i in (5, 10, 15)
    ]
    run = load(_write(tmp_path / "logging.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert (run.format, run.steps.tolist()) == ("trl", [5, 10, 15])
    run = load(_write(tmp_path / "console.txt", "".join(f"{row}\n" for row in rows)))
    assert run.steps.tolist() == [5, 10, 15]


def test_a_notebooks_table_is_read(tmp_path: Path) -> None:
    """As it is pasted into an issue (huggingface/open-r1#704): the KL is NaN from step 1 on."""
    table = "Step | Training Loss | reward | reward_std | kl | entropy\n-- | -- | -- | -- | -- | --\n"
    table += "1 | -0.283600 | 13.437500 | 21.810942 | nan | 0\n2 | -0.149100 | 6.931818 | 14.526671 | nan | No Log\n"
    run = load(_write(tmp_path / "console.txt", table))
    assert run.values["critic/rewards/mean"].tolist() == [13.4375, 6.931818]
    found = diagnose(run).findings
    assert [(f.rule, f.step) for f in found] == [("not_finite", 1)]


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (
            "[rank7]:[E419 10:42:28.858931807 ProcessGroupNCCL.cpp:616] [Rank 7] Watchdog caught collective operation "
            "timeout: WorkNCCL(SeqNum=4486, OpType=ALLTOALL, Timeout(ms)=600000) ran for 600013 milliseconds\n",
            "collective_hang",
        ),
        (
            "[rank6]:[E429 13:55:49.384372190 ProcessGroupNCCL.cpp:1743] [PG ID 0 PG GUID 0(default_pg) Rank 6] "
            "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress\n",
            "collective_hang",
        ),
    ],
)
def test_ranks_that_wrote_nothing_but_their_end_are_a_log(text: str, rule: str, tmp_path: Path) -> None:
    """verl-project/verl#1158, om-ai-lab/VLM-R1#257."""
    assert diagnose(load(_write(tmp_path / "console.txt", text))).verdict == rule


def test_one_line_with_nan_is_a_finding_and_one_with_nothing_wrong_is_none(tmp_path: Path) -> None:
    """verl-project/verl#1037: the gradient of step 2 is NaN, loss and KL are finite."""
    line = (
        "step:2 - actor/kl_loss:0.000 - actor/pg_loss:0.006 - actor/grad_norm:{} - critic/score/mean:0.903\n"
    )
    bad = diagnose(load(_write(tmp_path / "bad.log", line.format("nan"))))
    assert [(f.rule, f.step) for f in bad.findings] == [("not_finite", 2)]
    assert "actor/grad_norm" in bad.findings[0].title
    assert not diagnose(load(_write(tmp_path / "good.log", line.format("0.21")))).findings


def test_losses_that_stay_nan_are_a_finding_and_one_lost_value_is_none() -> None:
    run = run_of({"actor/pg_loss": noisy(0.01, 40)})
    run.values["actor/pg_loss"][100:] = np.nan
    run.non_finite["actor/pg_loss"] = list(range(101, 121))
    assert diagnose(run).verdict == "not_finite"
    run = run_of({"actor/pg_loss": noisy(0.01, 40)})
    run.values["actor/pg_loss"][-1] = np.nan
    run.non_finite["actor/pg_loss"] = [120]
    assert diagnose(run).verdict == "well"


def test_answers_that_are_cut_off_all_along_are_a_state() -> None:
    """Three of four public TRL runs with limits of 64 to 512 tokens end 50 to 100 % of their answers at the limit."""
    run = run_of(
        {
            "response_length/clip_ratio": np.clip(noisy(0.85, 41, 0.05), 0, 1),
            "response_length/max": np.full(N, 128.0),
        }
    )
    diagnosis = diagnose(run)
    assert diagnosis.verdict == "well"
    assert "answers_cut_off" in [state.name for state in diagnosis.states]


def test_steps_without_a_gradient_are_a_state() -> None:
    """Groups of two: their answers are scored alike in half of the steps, and the gradient is 0 there."""
    run = run_of({"actor/grad_norm": np.where(T % 2 == 0, 0.0, noisy(0.3, 4, 0.2))})
    assert "no_signal" in [state.name for state in diagnose(run).states]
    assert "no_signal" not in [state.name for state in diagnose(run_of({})).states]


def test_a_reward_that_is_a_sum_of_parts_has_no_known_top() -> None:
    summed = {"critic/score/mean": np.full(N, np.nan), "critic/rewards/mean": 1.8 + noisy(0.05, 42)}
    assert "reward_saturates" not in [state.name for state in diagnose(run_of(summed)).states]


def test_prime_rls_lines_of_both_processes_complete_each_other(tmp_path: Path) -> None:
    text = "".join(
        f"09:0{i}:17 SUCCESS Step {i} | Time: 96.42s | Reward: 0.5179 | Seq. Length: 4816.7 tokens/sample | "
        f"Async Level: 0 | Max. Off-Policy Level: 1\n09:0{i}:18    INFO Starting orchestrator step {i + 1}\n"
        f"09:0{i}:20 SUCCESS Step {i} | Time: 91.01s | Loss: -0.0078 | Mismatch KL: 0.0486 | Grad. Norm: 2.0312 | "
        f"Throughput: 5211 tokens/s | MFU: 18.5% | Peak Mem.: 81.1 GiB\n"
        for i in range(6)
    )
    run = load(_write(tmp_path / "run.log", text))
    assert (run.format, run.num_steps, run.seams) == ("prime-rl", 6, [])
    assert {name: float(values[0]) for name, values in run.values.items()} == {
        "timing_s/step": 96.42,
        "critic/rewards/mean": 0.5179,
        "response_length/mean": 4816.7,
        "training/off_policy/trajectory_staleness/max": 1.0,
        "actor/pg_loss": -0.0078,
        "rollout_corr/kl": 0.0486,
        "actor/grad_norm": 2.0312,
        "perf/max_memory_reserved_gb": 81.1,
    }


def test_the_tinker_cookbooks_names_are_read(tmp_path: Path) -> None:
    row = {
        "env/all/reward/total": 0.62,
        "optim/kl_sample_train_v1": 0.001,
        "time/total": 300.0,
        "optim/lr": 4e-5,
    }
    text = "".join(json.dumps({"step": i, **row}) + "\n" for i in range(5))
    run = load(_write(tmp_path / "metrics.jsonl", text))
    assert {"critic/rewards/mean", "rollout_corr/kl", "timing_s/step", "actor/lr"} <= set(run.values)
