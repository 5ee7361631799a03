"""What is derived for an own job before it has begun: our loop on the named devices, not another framework's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.foresight import derive
from rollbook.errors import PlanError
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.switch import SleepChoice, hand_over

ROOT = Path(__file__).parents[2]


def config_of(path: str, *overrides: str) -> RunConfig:
    return load_config(ROOT / path, overrides, RunConfig)


def test_a_small_job_on_a_gpu_pays_no_base_costs_of_other_frameworks() -> None:
    """Half a million parameters and five tokens a response: a second, not the 19 s that a step of a job on many nodes
    takes beside its work."""
    found = derive(config_of("examples/addition.toml"), gpu="H100")
    assert 0.1 < found.step_s < 1.5
    assert sum(seconds for seconds, _, _ in found.stages.values()) == pytest.approx(found.step_s, rel=0.05)


def test_a_mistake_of_a_config_is_told_by_its_keys() -> None:
    """Not by the options of `rollbook plan`, which nobody typed."""
    config = config_of("examples/addition.toml", "rollout.max_response_tokens=5000")
    with pytest.raises(PlanError) as caught:
        derive(config, gpu="H100")
    assert "rollout.max_response_tokens" in caught.value.remedy and "--" not in str(caught.value)


VLLM = ("rollout.engine=vllm", "memory.sleep_level=2", "memory.offload=true")


@pytest.mark.parametrize(
    ("overrides", "measured"),
    [
        ((), {"rollout": 2.3, "train": 0.861, "sync": 0.119, "step": 3.3}),
        (VLLM, {"rollout": 2.6, "train": 0.963, "sync": 0.143, "step": 4.3}),
    ],
    ids=["native", "vllm"],
)
def test_a_measured_job_is_foreseen_within_a_quarter(
    overrides: tuple[str, ...], measured: dict[str, float]
) -> None:
    """bench/README.md, one H200; a step without the checkpoint. Its engines wait for their hosts."""
    config = config_of("bench/gpu/grpo_qwen05b.toml", "plan.response_tokens=256", *overrides)
    found = derive(config, gpu="H200")
    assert "proximal" not in found.stages  # one update on policy needs no forward of its own
    foreseen = {"step": found.step_s} | {name: s for name, (s, _, _) in found.stages.items()}
    for stage, seconds in measured.items():
        assert foreseen[stage] == pytest.approx(seconds, rel=0.25), stage


def test_what_is_moved_every_step_is_paid_for_and_nothing_else() -> None:
    """5.9 GB of training state each way at 45 GB/s, and the release of cached memory."""
    config = config_of("bench/gpu/grpo_qwen05b.toml", "plan.response_tokens=256")
    still = derive(config, gpu="H200")
    memory = ("memory.offload=true", "memory.sleep_level=2")
    moved = derive(config_of("bench/gpu/grpo_qwen05b.toml", "plan.response_tokens=256", *memory), gpu="H200")
    assert 0.3 < moved.step_s - still.step_s < 1.5


def moves(**choice: Any) -> dict[str, float]:
    found = hand_over(
        load_model("qwen3-8b"),
        Cluster(accelerator=load_accelerator("H100"), num_gpus=8),
        load_assumptions("default").switch,
        num_gpus=8,
        rollout_weights_bytes_per_gpu=2e9,
        state_bytes_per_param=16.0,
        choice=SleepChoice(**choice),
    )
    return {move.name: move.seconds for move in found}


def test_a_hand_over_in_which_nothing_moves_takes_no_time() -> None:
    base_s = load_assumptions("default").switch.base_s
    assert sum(moves(sleep_level=0, moves_state=False).values()) == 0
    assert moves(sleep_level=0)["training state to host"] > 0
    assert moves(sleep_level=0)["caches, pools, processes"] == base_s
    assert moves(sleep_level=2, moves_state=False)["training state to host"] == 0
    assert moves(sleep_level=2, moves_state=False)["caches, pools, processes"] == base_s


def test_the_own_account_says_where_each_of_its_numbers_was_measured() -> None:
    own, default = load_assumptions("rollbook"), load_assumptions("default")
    assert own.name == "rollbook" and own.method == "default"
    assert own.base_s(2048) < default.base_s(2048) / 5
    assert "bench/switch.py" in own.sources["switch.base_s"]
    assert own.decode.layer_s_of("vllm") == default.decode.layer_s_of("vllm")
    assert own.train_mfu_frac == default.train_mfu_frac
