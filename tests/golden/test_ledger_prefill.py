"""Prefill in chunks and with shared prompts, engines asleep, reward models of their own size: worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollbook.errors import PlanError
from rollbook.ledger.account import PrefillAccount
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.decode import decode_step
from rollbook.ledger.flops import attention_flops, default_flops
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.memory import train_memory
from rollbook.ledger.model import load_model
from rollbook.ledger.step import Layouts, step_account
from rollbook.ledger.switch import SleepChoice
from rollbook.ledger.workload import Workload

DEFAULT, PAPER = load_assumptions("default"), load_assumptions("paper")
H100 = load_accelerator("H100")
CLUSTER = Cluster(accelerator=H100, num_gpus=8)
LLAMA = load_model("Llama-3.1-8B")
WORK = Workload(
    num_prompts=32, group_size=16, prompt_tokens=1000, response_tokens=2000, max_response_tokens=8192
)


def prefill(work: Workload) -> PrefillAccount:
    account = step_account(LLAMA, work, CLUSTER, DEFAULT, rollout_tp=1)
    assert account.rollout.prefill is not None
    assert account.seconds.prefill == account.rollout.prefill.seconds
    return account.rollout.prefill


def test_a_group_prefills_its_prompt_once() -> None:
    """32 prompts of 1000 tokens; apart, all 512 trajectories prefill theirs: 16 times the tokens and seconds."""
    shared, apart = prefill(WORK), prefill(replace(WORK, shares_prompt=False))
    assert (shared.tokens, shared.shared_tokens) == (32_000, 480_000)
    assert (apart.tokens, apart.shared_tokens) == (512_000, 0)
    assert apart.seconds == pytest.approx(16 * shared.seconds)
    assert default_flops(LLAMA, replace(WORK, shares_prompt=False)).prefill == pytest.approx(
        16 * default_flops(LLAMA, WORK).prefill
    )


def test_a_chunk_fills_what_running_sequences_leave_of_a_steps_budget() -> None:
    """8 replicas of 64 sequences: 2048 - 64 tokens of prompts a step, so 4000 tokens in 2.02 steps."""
    chunked = prefill(replace(WORK, prefill_chunk_tokens=2048))
    account = step_account(LLAMA, WORK, CLUSTER, DEFAULT, rollout_tp=1)
    assert account.rollout.slots_per_replica == 64
    assert chunked.chunk_tokens == 1984
    assert chunked.num_mixed_steps == pytest.approx(4000 / 1984)
    assert chunked.seconds == pytest.approx(
        chunked.num_mixed_steps * (chunked.mixed_step_s - chunked.plain_step_s)
    )


def test_a_mixed_step_reads_the_weights_once_and_computes_both() -> None:
    """FLOPs of the chunk and of 64 rows at one rate, or the weights' bytes; and the chunk's memory traffic."""
    layout, rows, context, chunk = ReplicaLayout(), 64.0, 2000.0, 1984.0
    plain = decode_step(LLAMA, CLUSTER, DEFAULT.decode, layout, num_rows=rows, context_tokens=context)
    mixed = decode_step(
        LLAMA, CLUSTER, DEFAULT.decode, layout, num_rows=rows, context_tokens=context, prompt_tokens=chunk
    )
    peak = H100.peak("bfloat16")
    rows_s = 2 * (LLAMA.body_params + LLAMA.head_params) * rows / (peak * DEFAULT.decode.gemm_frac)
    chunk_s = 2 * LLAMA.body_params * chunk / (peak * DEFAULT.decode.gemm_frac)
    # 32 layers of 4,096 hidden units.
    chunk_s += DEFAULT.decode.prefill_bytes["dense"] * 32 * 4096 * chunk / H100.hbm_bytes_per_s
    assert float(mixed.weights_s) == pytest.approx(rows_s + chunk_s)
    read_s = 2 * (LLAMA.body_params + LLAMA.head_params) / (
        H100.hbm_bytes_per_s * DEFAULT.decode.hbm_frac["default"]
    )  # fmt: skip
    assert float(plain.weights_s) == pytest.approx(read_s)  # memory alone: part of the chunk is free
    assert float(mixed.seconds - plain.seconds) == pytest.approx(rows_s + chunk_s - read_s)


def test_chunks_cost_less_than_whole_prompts_because_weights_are_read_anyway() -> None:
    whole, chunked = prefill(WORK), prefill(replace(WORK, prefill_chunk_tokens=2048))
    assert 0 < chunked.seconds < whole.seconds
    assert whole.stretch == 1.0 and chunked.stretch > 3  # what a running response feels while prompts come in
    # Attention of the prompts stays: all of it in the bfloat16 peak.
    pairs = 4 * float(attention_flops(LLAMA, 1000)) / (H100.peak("bfloat16") * 0.5)
    assert chunked.seconds > pairs


def test_a_budget_that_running_sequences_use_up_does_not_fit() -> None:
    account = step_account(LLAMA, replace(WORK, prefill_chunk_tokens=64), CLUSTER, DEFAULT, rollout_tp=1)
    assert account.why_not == (
        "64 running sequences leave nothing of a step's 64 tokens for prompts: more than 64 would",
    )


def test_a_reward_model_of_its_own_size_costs_its_own_flops_and_memory() -> None:
    small = load_model("Qwen3-0.6B")
    own = replace(WORK, reward="model", reward_model=small)
    as_policy = replace(WORK, reward="model")
    ratio = default_flops(LLAMA, own).reward_model / default_flops(LLAMA, as_policy).reward_model
    assert ratio == pytest.approx(small.matmul_params / LLAMA.matmul_params, rel=0.35)  # and attention
    memory = train_memory(LLAMA, own, DEFAULT, num_gpus=8, layout=TrainLayout())
    assert memory.reward_model == 2 * small.params / 8
    plain, with_small, with_policy = (
        step_account(LLAMA, work, CLUSTER, DEFAULT, rollout_tp=1).seconds.forward
        for work in (WORK, own, as_policy)
    )
    assert plain < with_small < plain + (with_policy - plain) / 3
    # A reward model that is the policy's shape by name is the policy's size.
    named = step_account(LLAMA, replace(as_policy, reward_model=LLAMA), CLUSTER, DEFAULT, rollout_tp=1)
    assert named.seconds.forward == with_policy


def test_the_plain_account_takes_any_reward_model_as_large_as_the_policy() -> None:
    own = replace(WORK, reward="model", reward_model=load_model("Qwen3-0.6B"))
    paper = step_account(LLAMA, own, CLUSTER, PAPER, rollout_tp=1)
    assert paper.flops.reward_model == 2 * LLAMA.active_params * WORK.trained_tokens


def test_a_generative_judge_shares_the_engines_memory_and_writes_its_verdicts() -> None:
    judged = replace(WORK, reward="generative", reward_response_tokens=256)
    small = replace(judged, reward_model=load_model("Qwen3-0.6B"))
    by_policy, by_small = (
        step_account(LLAMA, work, CLUSTER, DEFAULT, rollout_tp=1) for work in (judged, small)
    )
    assert by_small.seconds.reward < by_policy.seconds.reward / 2
    assert by_small.rollout.weights_bytes_per_gpu < by_policy.rollout.weights_bytes_per_gpu
    silent = step_account(LLAMA, replace(judged, reward_response_tokens=0), CLUSTER, DEFAULT, rollout_tp=1)
    assert silent.seconds.reward < by_policy.seconds.reward


def test_a_reward_model_without_a_reward_that_uses_it_is_refused() -> None:
    with pytest.raises(PlanError, match="beside a reward by rule"):
        replace(WORK, reward_model=LLAMA)


@pytest.mark.parametrize(
    ("choice", "more_s"),
    [
        (SleepChoice(), 0.0),
        # 15 GB of weights both ways at 18 GB/s.
        (SleepChoice(sleep_level=1), 2 * 16.06e9 / 18e9),
        (SleepChoice(rebuilds_engine=True), 13.0),
    ],
)
def test_what_an_engine_keeps_asleep_costs_at_the_hand_over(choice: SleepChoice, more_s: float) -> None:
    layouts = Layouts(replica=ReplicaLayout(), sleep=choice)
    plain = step_account(LLAMA, WORK, CLUSTER, DEFAULT, rollout_tp=1).seconds.switch
    assert step_account(LLAMA, WORK, CLUSTER, DEFAULT, layouts=layouts).seconds.switch == pytest.approx(
        plain + more_s, rel=1e-3
    )


def test_other_sleep_levels_are_refused() -> None:
    with pytest.raises(PlanError, match="sleep level is 3"):
        SleepChoice(sleep_level=3)
