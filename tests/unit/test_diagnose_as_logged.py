"""Evidence calls a metric what the log calls it: who reads it looks for it there."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rollbook.diagnose.readers import names
from rollbook.diagnose.readers.renamer import Renamer
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.report import to_text
from rollbook.diagnose.series import Row
from rollbook.diagnose.tree import diagnose

NUM_STEPS, ONSET = 80, 40
METRIC = re.compile(r"[A-Za-z_][\w@+\-]*(?:/[\w@+\-.]*[\w@+\-])+")


def _values() -> list[dict[str, float]]:
    """In the catalogue's names: the gap steps to thirty times its level while everything else goes on."""
    rng = np.random.default_rng(5)
    rows = []
    for step in range(NUM_STEPS):
        wobble = rng.normal(1.0, 0.05, 9)
        gap = 0.003 * (30.0 if step >= ONSET else 1.0) * wobble[0]
        rows.append(
            {
                "reward": 0.4 * wobble[1],
                "length": 900.0 * wobble[2],
                "gap": gap,
                "staleness": 1.0 * wobble[3],
                "grad_norm": 0.3 * wobble[4],
                "gen_s": 60.0 * wobble[5],
                "train_s": 40.0 * wobble[6],
                "sync_s": 5.0 * wobble[7],
            }
        )
    return rows


def _write(format: str, folder: Path) -> Path:
    called = {
        "slime": {
            "reward": "rollout/raw_reward",
            "length": "rollout/response_len/mean",
            "gap": "train/train_rollout_logprob_abs_diff",
            "staleness": "rollout/fully_async/avg_staleness",
            "grad_norm": "train/grad_norm",
            "gen_s": "perf/rollout_time",
            "train_s": "perf/actor_train_time",
            "sync_s": "perf/update_weights_time",
        },
        "areal": {
            "reward": "ppo_actor/task_reward/avg",
            "length": "ppo_actor/seq_len/avg",
            "gap": "ppo_actor/update/logp_abs_diff/avg",
            "staleness": "ppo_actor/update/version_stats/sample_staleness_proximal_avg",
            "grad_norm": "ppo_actor/update/grad_norm",
            "gen_s": "timeperf/rollout",
            "train_s": "timeperf/train_step",
            "sync_s": "timeperf/update_weights",
        },
        "verl-console": {
            "reward": "critic/rewards/mean",
            "length": "response_length/mean",
            "gap": "training/rollout_probs_diff/mean",  # an earlier verl's
            "staleness": "fully_async/staleness/mean",
            "grad_norm": "actor/grad_norm",
            "gen_s": "timing_s/generate_sequences",
            "train_s": "timing_s/update_policy",
            "sync_s": "timing_s/param_sync",
        },
    }[format]
    lines = []
    for step, row in enumerate(_values(), 1):
        data = {called[name]: value for name, value in row.items()}
        if format == "slime":
            lines += [f"(Actor pid=8) rollout {step}: {data!r}"]
        elif format == "areal":
            lines += [f"INFO: Epoch 1/9 Step {step}/99 Train step {step}/999 done."]
            lines += [f"│ {name} │ {value:.4e} │" for name, value in data.items()]
        else:
            lines += [f"step:{step} - " + " - ".join(f"{name}:{value}" for name, value in data.items())]
    path = folder / "run.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("format", ["slime", "areal", "verl-console"])
def test_every_metric_named_in_the_verdict_stands_in_the_log(format: str, tmp_path: Path) -> None:
    path = _write(format, tmp_path)
    diagnosis = diagnose(load(str(path)))
    assert (diagnosis.format, diagnosis.verdict) == (format, "engine_mismatch")
    above = to_text(diagnosis, width=10_000).split("could not be judged")[0].split("\n", 1)[1]
    named = METRIC.findall(above)
    text = path.read_text(encoding="utf-8")
    assert len(named) >= 2
    assert [name for name in named if name not in text] == []


def test_json_keeps_the_name_of_the_catalogue_beside_the_name_in_the_log(tmp_path: Path) -> None:
    evidence = diagnose(load(str(_write("slime", tmp_path)))).to_json()["findings"][0]["evidence"][0]
    assert evidence["metric"] == "training/logprob_gap/mean"
    assert evidence["in_log"] == "train/train_rollout_logprob_abs_diff"


def test_a_share_logged_the_other_way_round_says_so_and_a_family_is_named_by_its_first() -> None:
    renamer = Renamer((names.TRL, names.SLIME))
    row = {
        "frac_reward_zero_std": 0.25,
        "rollout/dynamic_filter/drop_zero_std_0.0": 3.0,
        "rollout/dynamic_filter/drop_zero_std_1.0": 4.0,
        "kl": 0.1,
        "actor/kl_loss": 0.1,  # the catalogue's own name stands in the log as well
    }
    [got] = renamer.rows([Row(step=1, data=row)])
    assert isinstance(got, Row)
    assert got.data["batch/effective_frac"] == 0.75
    assert got.data["training/filter_groups/evicted_samples"] == 7.0
    assert renamer.in_log() == {
        "batch/effective_frac": "1 - frac_reward_zero_std",
        "training/filter_groups/evicted_samples": "rollout/dynamic_filter/drop_zero_std_0.0 and 1 more",
    }
