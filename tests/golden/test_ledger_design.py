"""Every figure that the books must agree with under `--assume paper`, one test a figure, named by it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from rollbook.ledger.account import StepAccount
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.step import step_account
from rollbook.ledger.workload import Workload
from rollbook.planner.candidate import Candidate
from rollbook.planner.plan import Plan, make_plan
from rollbook.planner.request import PlanRequest

PAPER = load_assumptions("paper")
H100 = load_accelerator("H100")

CASES = {
    "Llama-3-8B, 512x8, P 300, L 1024, 16 GPUs": ("Llama-3-8B", 8, 300, 1024, 4096, 16, 1),
    "Llama-3-8B, 512x16, P 500, L 8192, 64 GPUs": ("Llama-3-8B", 16, 500, 8192, 32768, 64, 1),
    "Qwen3-32B, 512x16, P 500, L 8192, 64 GPUs, TP 2": ("Qwen3-32B", 16, 500, 8192, 32768, 64, 2),
}
FIGURES: dict[str, tuple[Callable[[StepAccount], float], float, tuple[float, float, float]]] = {
    # name: how it is read, half of its last digit, and the three cases
    "step s": (lambda a: a.seconds.total, 0.05, (111.3, 810.1, 2407.3)),
    "whole-step MFU, %": (lambda a: 100 * a.mfu_frac, 0.05, (28.7, 13.3, 18.2)),
    "slots a replica": (lambda a: a.rollout.slots_per_replica, 0, (256, 92, 65)),
    "decode step, ms": (lambda a: 1e3 * a.rollout.decode_step_s, 0.05, (21.5, 35.6, 35.8)),
    "generation s": (
        lambda a: a.seconds.generate_throughput + a.seconds.generate_tail, 0.05, (46.6, 601.7, 1556.1),
    ),
    "tail s": (lambda a: a.seconds.generate_tail, 0.05, (24.5, 196.4, 401.0)),
    "forward s": (lambda a: a.seconds.forward, 0.05, (22.0, 72.3, 295.2)),
    "train s": (lambda a: a.seconds.train, 0.05, (41.3, 135.5, 553.5)),
}  # fmt: skip
INPUTS: dict[str, tuple[float, float]] = {
    "bytes of a bf16 weight": (PAPER.weight_bytes_per_param, 2),
    "training state, bytes a parameter": (PAPER.train_state_bytes_per_param, 16),
    "train MFU": (PAPER.train_mfu_frac, 0.40),
    "forward and prefill MFU": (PAPER.forward_mfu_frac, 0.50),
    "decode share of HBM bandwidth": (PAPER.decode_hbm_frac, 0.60),
    "device memory lost": (PAPER.memory_overhead_frac, 0.10),
    "offload, bytes a parameter": (PAPER.offload_bytes_per_param, 18),
    "offload, bytes a second and GPU": (PAPER.offload_bytes_per_s, 25e9),
    "sync, bytes a second": (PAPER.sync_bytes_per_s, 50e9),
    "H100 bf16 FLOP/s": (H100.peak("bfloat16"), 989e12),
    "H100 memory, bytes": (H100.hbm_bytes, 80e9),
    "H100 memory, bytes a second": (H100.hbm_bytes_per_s, 3.35e12),
}


@cache
def account(case: str) -> StepAccount:
    model, group, prompt, response, limit, gpus, tp = CASES[case]
    work = Workload(
        num_prompts=512,
        group_size=group,
        prompt_tokens=prompt,
        response_tokens=response,
        max_response_tokens=limit,
    )
    return step_account(
        load_model(model), work, Cluster(accelerator=H100, num_gpus=gpus), PAPER, rollout_tp=tp
    )


@pytest.mark.parametrize("name", INPUTS)
def test_the_plain_account_assumes(name: str) -> None:
    value, expected = INPUTS[name]
    assert value == expected


@pytest.mark.parametrize("figure", FIGURES)
@pytest.mark.parametrize("case", CASES)
def test_the_plain_account_says(case: str, figure: str) -> None:
    read, half_digit, expected = FIGURES[figure]
    assert read(account(case)) == pytest.approx(expected[list(CASES).index(case)], abs=half_digit * 1.001)


@cache
def plan(model: str, num_gpus: int, prompt: int, assume: str = "paper", rollout_tp: int = 0) -> Plan:
    work = Workload(
        num_prompts=512,
        group_size=16,
        prompt_tokens=prompt,
        response_tokens=8192,
        max_response_tokens=32768,
    )
    request = PlanRequest(
        model=load_model(model),
        workload=work,
        cluster=Cluster(accelerator=H100, num_gpus=num_gpus),
        assumptions=load_assumptions(assume),
        rollout_tp=rollout_tp,
    )
    return make_plan(request, is_brief=assume == "default")


def split(of: Plan, rollout: int, train: int) -> Candidate:
    return next(c for c in of.candidates if c.mode == "separate_async" and c.split == (rollout, train))


ROUGHLY: dict[str, tuple[Callable[[], float], float, float]] = {
    # name: how it is read, the figure, and how far "about" goes
    "8B, 64 GPUs, 42:22 separated: step s": (
        lambda: split(plan("Llama-3-8B", 64, 500), 42, 22).step_s, 617, 0.01,
    ),
    "8B, 64 GPUs, 42:22 separated: MFU, %": (
        lambda: 100 * split(plan("Llama-3-8B", 64, 500), 42, 22).account.mfu_frac, 17, 0.03,
    ),
    "32B, 128 GPUs, colocated: step s": (
        lambda: plan("Qwen3-32B", 128, 1024, rollout_tp=2).base.step_s, 1500, 0.01,
    ),
    "32B, 128 GPUs, colocated: tail of generation, %": (
        lambda: 100 * plan("Qwen3-32B", 128, 1024, rollout_tp=2).base.account.tail_frac, 38, 0.02,
    ),
    # 1,170 s are those of 32.0 B parameters; with all 32.8 B the trainer takes 1,200 s.
    "32B, 128 GPUs, 80:48 separated: step s": (
        lambda: split(plan("Qwen3-32B", 128, 1024, rollout_tp=2), 80, 48).step_s, 1170, 0.03,
    ),
    "32B, 128 GPUs, 80:48 separated: MFU, %": (
        lambda: 100 * split(plan("Qwen3-32B", 128, 1024, rollout_tp=2), 80, 48).account.mfu_frac, 20, 0.05,
    ),
    "671B, 512 GPUs: training state, TB": (
        lambda: plan("DeepSeek-V3", 512, 1024).base.account.memory["train_state_bytes"] / 1e12, 10.7, 0.005,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROUGHLY)
def test_topologies_come_out_at_about(name: str) -> None:
    read, expected, within = ROUGHLY[name]
    assert read() == pytest.approx(expected, rel=max(within, 1e-9))


@pytest.mark.parametrize("assume", ["paper", "default"])
def test_671b_384_to_128_is_refused_for_its_training_state(assume: str) -> None:
    refused = split(plan("DeepSeek-V3", 512, 1024, assume), 384, 128)
    assert not refused.fits and "training state" in refused.why_not[0]


@pytest.mark.parametrize(
    ("model", "num_gpus", "assume"), [("Qwen3-32B", 128, "paper"), ("DeepSeek-V3", 512, "default")]
)
def test_the_derivation_has_six_reasoned_steps(model: str, num_gpus: int, assume: str) -> None:
    steps = plan(model, num_gpus, 1024, assume).derivation
    assert [step.step for step in steps] == [1, 2, 3, 4, 5, 6]
    assert all(step.inputs and step.outputs and step.because.endswith(".") for step in steps)
    # What does not fit goes back, visibly: to whole nodes, and to what holds the training state.
    assert "sent_back" in steps[4].outputs
