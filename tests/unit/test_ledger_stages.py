"""Publication, hand-over, agents, checkpoints and asynchrony: figures worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rollbook.errors import ConfigError, PlanError
from rollbook.ledger.agents import agent_account, sandboxes_needed
from rollbook.ledger.assumptions import Assumptions, SwitchAssumptions, load_assumptions
from rollbook.ledger.asynchrony import async_account
from rollbook.ledger.checkpoint import checkpoint_account
from rollbook.ledger.decode import decode_step, experts_touched, replica_weight_bytes
from rollbook.ledger.flops import turn_prefill_flops
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.mapping import Trainer, sync_mapping
from rollbook.ledger.memory import activation_bytes, logits_bytes, memory_items, train_memory
from rollbook.ledger.model import load_model
from rollbook.ledger.quantity import parse_count
from rollbook.ledger.residence import Residence
from rollbook.ledger.step import Layouts, step_account
from rollbook.ledger.switch import SleepChoice, hand_over, pinned_bytes
from rollbook.ledger.sync import BUCKET_BYTES, SyncWork, best_sync_every, published_bytes, sync_account
from rollbook.ledger.train import bubble_frac, gather_s, token_s
from rollbook.ledger.workload import AgentWork, Workload

DEFAULT = load_assumptions("default")
H100 = load_accelerator("H100")
CLUSTER = Cluster(accelerator=H100, num_gpus=64)
LLAMA = load_model("Llama-3.1-8B")
QWEN_MOE = load_model("Qwen3-30B-A3B")
WORK = Workload(
    num_prompts=64, group_size=16, prompt_tokens=500, response_tokens=2000, max_response_tokens=8192
)
SYNC = SyncWork(method="broadcast", num_train_gpus=32, num_rollout_gpus=32, replica_gpus=1)


@pytest.mark.parametrize(
    ("text", "value"), [("8k", 8192), ("32K", 32768), ("671b", 671 * 10**9), ("1_000", 1000), (7, 7)]
)
def test_counts_as_people_write_them(text: str | int, value: int) -> None:
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "many", "0", "-4", "1.5", "8kk", "nan", "inf"])
def test_what_is_no_count_is_refused_with_its_name(text: str) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        parse_count(text, what="prompts")


def test_published_bytes() -> None:
    """bfloat16: 2 per parameter; float8: 1 and a float32 scale per 128 x 128 block, ends and norms in bfloat16."""
    assert published_bytes(LLAMA, "bfloat16") == 2 * LLAMA.computed_params
    ends = 2 * 128_256 * 4096 + 65 * 4096
    matrices = LLAMA.computed_params - ends
    assert published_bytes(LLAMA, "float8") == pytest.approx(matrices * (1 + 4 / 16384) + 2 * ends)


def test_lora_publishes_adapters_only() -> None:
    """Rank 16 on seven matrices of 32 layers: q, k, v, o and three of the feed-forward."""
    per_layer = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert published_bytes(LLAMA, "bfloat16", lora_rank=16) == 2 * 16 * 32 * per_layer


def test_broadcast_is_paced_by_its_slowest_stage() -> None:
    sync = replace(DEFAULT.for_framework("verl").sync, overlap_frac=1.0)
    account = sync_account(LLAMA, CLUSTER, sync, SYNC)
    assert account.slowest == "gather"
    assert account.seconds > account.total_bytes / sync.far_gather_bytes_per_s + sync.base_s
    slowest_s = account.stages_s["gather"]
    others_s = (account.stages_s["transfer"] + account.stages_s["load"]) * BUCKET_BYTES / account.total_bytes
    assert account.seconds == pytest.approx(account.fixed_s + slowest_s + others_s)
    assert account.num_buckets == math.ceil(2 * LLAMA.computed_params / BUCKET_BYTES) == 60


def test_receivers_that_take_their_shard_are_faster_than_one_stream() -> None:
    big = load_model("DeepSeek-V3")
    work = replace(SYNC, num_train_gpus=256, num_rollout_gpus=32, replica_gpus=32)
    seconds = {
        method: sync_account(big, CLUSTER, DEFAULT.sync, replace(work, method=method)).seconds
        for method in ("broadcast", "sharded", "delta")
    }
    assert seconds["sharded"] < seconds["broadcast"] / 10
    # Two per cent of 671 billion numbers through one rank take longer than a broadcast in buckets, but not than a
    # tensor-by-tensor one.
    by_tensor = sync_account(
        big, CLUSTER, DEFAULT.for_framework("verl").sync, replace(work, splits_experts=True)
    )
    assert seconds["broadcast"] < seconds["delta"] < by_tensor.seconds


def test_slices_wait_for_the_ports_that_send_them() -> None:
    """Kimi K2 for four replicas: 4 x 2.05 TB out of 32 ports of 45 GB/s, one of eight stages at a time, take 5.7 s."""
    big = load_model("Kimi-K2")
    cluster = Cluster(accelerator=H100, num_gpus=384)
    work = replace(
        SYNC,
        method="sharded",
        num_train_gpus=256,
        num_rollout_gpus=128,
        replica_gpus=32,
        pp_size=8,
        ep_size=32,
    )
    in_turn = replace(DEFAULT.sync, stages_in_turn=1.0)
    turns_s = sync_account(big, cluster, in_turn, work).stages_s["transfer"]
    assert turns_s == pytest.approx(4 * published_bytes(big, "bfloat16") / (32 * 45e9), rel=0.01)
    # All stages at once are held up by the 32 ports of each replica, not by the 256 that send.
    at_once_s = sync_account(big, cluster, DEFAULT.sync, work).stages_s["transfer"]
    assert at_once_s == pytest.approx(published_bytes(big, "bfloat16") / (32 * 45e9), rel=0.01)
    assert DEFAULT.for_framework("skyrl").sync.stages_in_turn == 1.0


def test_delta_sends_positions_and_values_of_what_changed() -> None:
    """2 % of 8.03e9 numbers at 4 + 2 bytes."""
    account = sync_account(LLAMA, CLUSTER, DEFAULT.sync, replace(SYNC, method="delta", changed_frac=0.02))
    assert account.total_bytes == pytest.approx(0.02 * LLAMA.computed_params * 6)


def test_a_delta_takes_as_long_as_what_changed_not_as_its_shards() -> None:
    """It goes through one rank: twice the trainers, or four times the engine, save only the comparison."""
    delta = replace(SYNC, method="delta", num_train_gpus=16, num_rollout_gpus=16, changed_frac=0.02)
    alone = sync_account(LLAMA, CLUSTER, DEFAULT.sync, delta)
    for other in (replace(delta, num_train_gpus=32), replace(delta, replica_gpus=8)):
        assert sync_account(LLAMA, CLUSTER, DEFAULT.sync, other).seconds == pytest.approx(
            alone.seconds, rel=0.05
        )
    fewer = sync_account(LLAMA, CLUSTER, DEFAULT.sync, replace(delta, changed_frac=0.01))
    saved = 0.01 * LLAMA.computed_params * 6 / DEFAULT.sync.delta_bytes_per_s
    assert alone.seconds - fewer.seconds == pytest.approx(saved)


def test_experts_apart_cost_a_fixed_time_each() -> None:
    stacked = sync_account(QWEN_MOE, CLUSTER, DEFAULT.sync, SYNC)
    apart = sync_account(QWEN_MOE, CLUSTER, DEFAULT.sync, replace(SYNC, splits_experts=True))
    assert apart.num_tensors - stacked.num_tensors == 48 * 3 * 127
    assert apart.seconds > stacked.seconds


def test_unknown_sync_method_is_refused() -> None:
    with pytest.raises(PlanError, match="choose one of"):
        sync_account(LLAMA, CLUSTER, DEFAULT.sync, replace(SYNC, method="pigeon"))  # type: ignore[arg-type]


def test_sync_every_keeps_publication_below_a_tenth_within_the_bound() -> None:
    assert best_sync_every(3.0, 60.0, max_staleness_steps=4) == 1
    assert best_sync_every(12.0, 60.0, max_staleness_steps=4) == 2
    assert best_sync_every(60.0, 60.0, max_staleness_steps=4) == 4


def test_hand_over_moves_the_training_state_both_ways() -> None:
    """16 B x 8.03e9 over 64 GPUs = 2.0 GB each way; level 1 adds the engine's 16 GB each way."""
    moves = hand_over(
        LLAMA,
        CLUSTER,
        DEFAULT.switch,
        num_gpus=64,
        rollout_weights_bytes_per_gpu=16e9,
        state_bytes_per_param=16.0,
    )
    state = [move.bytes for move in moves if move.name.startswith("training state")]
    assert state == [pytest.approx(16 * 8.03e9 / 64)] * 2
    level_1 = hand_over(
        LLAMA,
        CLUSTER,
        DEFAULT.switch,
        num_gpus=64,
        rollout_weights_bytes_per_gpu=16e9,
        state_bytes_per_param=16.0,
        choice=SleepChoice(sleep_level=1),
    )
    assert sum(m.bytes for m in level_1) - sum(m.bytes for m in moves) == 2 * 16e9
    assert pinned_bytes(level_1) == pytest.approx(16e9 + 16 * 8.03e9 / 64)


def test_state_travels_faster_where_the_device_shares_its_hosts_memory() -> None:
    """Over a link of 450 GB/s seven times as fast as over PCIe, and never faster than the link."""
    grace = Cluster(accelerator=load_accelerator("GB200"), num_gpus=64)
    slow = replace(DEFAULT.switch, state_bytes_per_s=1.2e9)

    def state_s(cluster: Cluster, switch: SwitchAssumptions) -> float:
        moves = hand_over(
            LLAMA, cluster, switch, num_gpus=64, rollout_weights_bytes_per_gpu=0.0, state_bytes_per_param=16.0
        )
        return sum(move.seconds for move in moves if move.name.startswith("training state"))

    assert state_s(CLUSTER, slow) == pytest.approx(2 * 16 * 8.03e9 / 64 / 1.2e9)
    assert state_s(CLUSTER, slow) / state_s(grace, slow) == pytest.approx(450 / 64)
    pinned = replace(DEFAULT.switch, state_bytes_per_s=1e12)
    assert state_s(grace, pinned) == pytest.approx(2 * 16 * 8.03e9 / 64 / 450e9)


def test_hand_over_moves_the_critics_state_too_and_frozen_models_one_way() -> None:
    """PPO on 64 GPUs: 2 x 16 B both ways; reference and reward model, 2 x 2 B, to the device only."""
    moves = hand_over(
        LLAMA, CLUSTER, DEFAULT.switch, num_gpus=64, rollout_weights_bytes_per_gpu=16e9,
        state_bytes_per_param=32.0, frozen_bytes_per_param=4.0,
    )  # fmt: skip
    assert sum(m.bytes for m in moves) == pytest.approx((2 * 32 + 4) * 8.03e9 / 64)
    assert pinned_bytes(moves) == pytest.approx(36 * 8.03e9 / 64)


def test_agent_prefill_is_linear_with_the_prefix_and_quadratic_without() -> None:
    """10 turns of 100 observation tokens: 900 tokens, or 9 prompts and 9 x 10 / 2 turns of 300 tokens."""
    agent = AgentWork(num_turns=10, observation_tokens=100, env_s=2.0)
    kept = agent_account(replace(WORK, agent=agent))
    lost = agent_account(replace(WORK, agent=replace(agent, keeps_prefix=False)))
    assert kept.prefilled_tokens == 64 * 500 + 1024 * 900
    assert lost.prefilled_tokens == 64 * 500 + 1024 * (9 * 500 + 45 * 300)
    assert turn_prefill_flops(LLAMA, replace(WORK, agent=agent)) < turn_prefill_flops(
        LLAMA, replace(WORK, agent=replace(agent, keeps_prefix=False))
    )


def test_agent_environment_hours() -> None:
    """1,024 trajectories x the 9 calls between 10 turns x 2 s on one core each."""
    account = agent_account(replace(WORK, agent=AgentWork(num_turns=10, env_s=2.0)))
    assert (account.num_calls, account.env_busy_s) == (9_216, 18_432)
    assert account.cpu_core_hours == pytest.approx(1024 * 18 / 3600)
    assert account.slowest_env_s == account.trajectory_env_s == account.gpu_idle_s == 18.0  # no spread given
    spread = agent_account(
        replace(WORK, agent=AgentWork(num_turns=10, env_s=2.0, env_p50_s=1.0, env_p99_s=20.0))
    )
    assert spread.slowest_env_s > 36


def test_account_and_decode_books_count_the_same_calls() -> None:
    """A call is between two turns: one turn has none, and half a turn more is half a call more."""
    for turns in (1.0, 2.0, 3.5, 20.0):
        work = replace(WORK, agent=AgentWork(num_turns=turns, env_s=2.0, observation_tokens=10))
        account = agent_account(work)
        rows = np.ones(1)
        assert account.trajectory_env_s == Residence(workload=work, rows=rows, step_s=rows).env_s
        assert account.trajectory_env_s == 2.0 * (turns - 1)
        assert account.num_calls * 10 == work.observation_tokens * work.num_sequences


def test_sandboxes_for_a_target_time() -> None:
    work = replace(WORK, agent=AgentWork(num_turns=10, env_s=2.0, sandbox_start_s=5.0))
    assert sandboxes_needed(work, target_s=100.0) == 236  # 1,024 x 23 s / 100 s
    with pytest.raises(PlanError, match="one trajectory"):
        sandboxes_needed(work, target_s=20.0)


def test_asynchronous_checkpoint_stalls_for_the_copy_only() -> None:
    """14 B x 8.03e9 = 112 GB: 56 s at 2 GB/s, or 1.76 GB a GPU over 63 GB/s to the host."""
    stalls = {
        is_async: checkpoint_account(
            LLAMA,
            WORK,
            CLUSTER,
            num_train_gpus=64,
            storage_bytes_per_s=2e9,
            step_s=100,
            every_steps=10,
            is_async=is_async,
        )
        for is_async in (False, True)
    }
    assert stalls[False].stall_s == pytest.approx(14 * 8.03e9 / 2e9)
    assert stalls[True].stall_s == pytest.approx(14 * 8.03e9 / 64 / 63e9)
    assert stalls[True].pinned_bytes_per_node == pytest.approx(14 * 8.03e9 / 8)
    assert stalls[False].step_frac == pytest.approx(56.21 / 1056.21, rel=1e-3)


def test_staleness_of_a_steady_stream() -> None:
    """2,000 tokens x 20 ms = 40 s = 0.8 updates of 50 s, and half an update until the batch is taken."""
    lengths = LengthDistribution(8192, 2000.0)
    account = async_account(lengths, num_sequences=1024, token_s=0.02, update_s=50.0, publish_s=5.0)
    assert account.mean_staleness_steps == pytest.approx(1.3)
    assert account.sync_frac == pytest.approx(5 / 55)
    assert account.max_in_flight == 2048
    assert account.over_bound_frac == pytest.approx(float(lengths.survival(3750.0)))
    looser = async_account(
        lengths, num_sequences=1024, token_s=0.02, update_s=50.0, publish_s=5.0, max_staleness_steps=4
    )
    assert looser.over_bound_frac < account.over_bound_frac


@pytest.mark.parametrize("bound", [1, 2, 8])
def test_no_mean_age_is_beyond_its_bound(bound: int) -> None:
    """Without a bound 2,000 tokens of 0.1 s are 4 updates of 50 s old, and half of one more."""
    account = async_account(
        LengthDistribution(8192, 2000.0), num_sequences=1024, token_s=0.1, update_s=50.0, publish_s=5.0,
        max_staleness_steps=bound,
    )  # fmt: skip
    assert account.mean_staleness_steps == pytest.approx(4.5)
    assert account.bounded_staleness_steps <= min(bound, account.mean_staleness_steps)
    if bound == 1:  # nearly all wait for it
        assert account.bounded_staleness_steps == pytest.approx(1.0, abs=0.01)


def test_kv_of_all_sequences_counts_windows_and_states() -> None:
    """P + L / 2 = 1,500 tokens: Gemma's 52 windowed layers hold 1,024 of them, and linear layers their state."""
    sequences = WORK.num_sequences
    gemma = load_model("Gemma-3-27B")
    memory = step_account(gemma, WORK, CLUSTER, DEFAULT).memory
    assert memory["kv_total_bytes"] == pytest.approx(sequences * 8192 * (10 * 1500 + 52 * 1024))
    hybrid = load_model("Qwen3-Next-80B-A3B")
    memory = step_account(hybrid, WORK, CLUSTER, DEFAULT).memory
    state = 36 * 32 * 128 * 128 * 4
    assert memory["kv_total_bytes"] == pytest.approx(sequences * (24_576 * 1500 + state))


def test_experts_touched_by_a_batch() -> None:
    """8 of 128 experts: one token touches 8, two touch 8 + 8 x 120/128, many touch all."""
    assert float(experts_touched(QWEN_MOE, 1.0)) == pytest.approx(8.0)
    assert float(experts_touched(QWEN_MOE, 2.0)) == pytest.approx(15.5)
    assert float(experts_touched(QWEN_MOE, 1000.0)) == pytest.approx(128.0)


def test_single_stream_decode_reads_what_it_should() -> None:
    """Weights without the embedding, and the KV of 1,000 tokens."""
    step = decode_step(LLAMA, CLUSTER, DEFAULT.decode, ReplicaLayout(), num_rows=1.0, context_tokens=1000.0)
    expected = 2 * (LLAMA.computed_params - LLAMA.embedding_params) + 1000 * 131_072
    assert float(step.bytes_per_gpu) == pytest.approx(expected)
    assert float(step.exchange_s) == 0.0


def test_replica_weights_are_split_over_its_gpus() -> None:
    whole = replica_weight_bytes(LLAMA, ReplicaLayout())
    assert whole == pytest.approx(2 * LLAMA.computed_params)
    norms = 2 * 65 * LLAMA.hidden_size  # which every GPU holds
    of_four = replica_weight_bytes(LLAMA, ReplicaLayout(tp_size=4))
    assert of_four == pytest.approx((whole - norms) / 4 + norms)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("Qwen3-32B", ReplicaLayout(tp_size=16)),  # more GPUs than KV heads
        ("DeepSeek-V3", ReplicaLayout(tp_size=8, ep_size=64)),  # a latent that every GPU holds
        ("Qwen3-235B-A22B", ReplicaLayout(tp_size=4, ep_size=16, weight_dtype="float8")),
    ],
)
def test_an_engine_gpu_holds_what_a_publication_brings_it(name: str, layout: ReplicaLayout) -> None:
    model = load_model(name)
    mapping = sync_mapping(
        model, CLUSTER, Trainer(num_gpus=64), layout, num_rollout_gpus=64, shares_devices=False
    )
    assert replica_weight_bytes(model, layout) == pytest.approx(mapping.landed_bytes)


def test_activations_by_recompute_mode() -> None:
    """Per layer 34 bytes a token and hidden unit; full recomputation keeps 2, and one layer's 34."""
    unit = 1000 * 4096
    assert activation_bytes(LLAMA, 1000, TrainLayout(recompute="selective")) == 32 * 34 * unit
    assert activation_bytes(LLAMA, 1000, TrainLayout(recompute="full")) == (32 * 2 + 34) * unit
    assert logits_bytes(LLAMA, 1024, TrainLayout()) == 10 * 1024 * 128_256


def test_train_memory_shards_state_and_keeps_activations() -> None:
    small = train_memory(LLAMA, WORK, DEFAULT, num_gpus=8, layout=TrainLayout())
    large = train_memory(LLAMA, WORK, DEFAULT, num_gpus=64, layout=TrainLayout())
    assert small.policy_state == pytest.approx(16 * 8.03e9 / 8)
    assert small.policy_state == pytest.approx(8 * large.policy_state)
    assert small.activations == large.activations


def test_ppo_with_a_reward_model_holds_two_states_and_two_frozen_models() -> None:
    """Policy and critic 16 B each, reference and reward model 2 B each: 36 B x 8.03e9 over 8 GPUs."""
    work = replace(WORK, algorithm="ppo", reward="model", uses_reference=True)
    memory = train_memory(LLAMA, work, DEFAULT, num_gpus=8, layout=TrainLayout())
    assert memory.state + memory.frozen == pytest.approx(36 * 8.03e9 / 8)
    plain = train_memory(LLAMA, replace(WORK, uses_reference=True), DEFAULT, num_gpus=8, layout=TrainLayout())
    assert memory.total - plain.total == pytest.approx(18 * 8.03e9 / 8)


def test_pipeline_bubble() -> None:
    """(p - 1) / (v m + p - 1) with p = 8, v = 4, m = 16."""
    layout = TrainLayout(pp_size=8, virtual_stages=4, micro_batches_per_step=16)
    assert bubble_frac(layout) == pytest.approx(7 / 71)


def test_recomputation_costs_a_third_of_the_matrices() -> None:
    stack = replace(DEFAULT.stacks["fsdp"], dense_bytes=0.0, least_s_per_width=0.0)
    seconds = {
        recompute: token_s(
            LLAMA, H100, stack, TrainLayout(recompute=recompute), sequence_tokens=16.0, backward=True
        )
        for recompute in ("none", "full")
    }
    assert seconds["full"] / seconds["none"] == pytest.approx(4 / 3, rel=0.01)


def test_default_account_of_the_worked_case_is_near_the_paper_account() -> None:
    """The better model must not be in another world: within a factor of 1.6 on a dense 8B model."""
    workload = replace(WORK, num_prompts=512, group_size=16, response_tokens=8192, max_response_tokens=32768)
    paper = step_account(LLAMA, workload, CLUSTER, load_assumptions("paper"))
    better = step_account(LLAMA, workload, CLUSTER, DEFAULT)
    assert 1 / 1.6 < better.seconds.total / paper.seconds.total < 1.6
    assert better.step_s.low < better.seconds.total < better.step_s.high


def test_default_refuses_what_does_not_fit_and_says_what_would() -> None:
    account = step_account(
        load_model("Llama-3.1-70B"), WORK, Cluster(accelerator=H100, num_gpus=8), DEFAULT, rollout_tp=4
    )
    assert not account.fits
    assert "it takes about" in " ".join(account.why_not)


def test_impossible_splits_are_refused() -> None:
    with pytest.raises(PlanError, match="40 rollout"):
        step_account(
            LLAMA,
            WORK,
            CLUSTER,
            DEFAULT,
            mode="separate_async",
            num_rollout_gpus=40,
            num_train_gpus=40,
        )
    with pytest.raises(PlanError, match="mode"):
        step_account(LLAMA, WORK, CLUSTER, DEFAULT, mode="both")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"num_prompts": 0},
        {"group_size": -1},
        {"prompt_tokens": 0},
        {"response_tokens": 9000},
        {"algorithm": "sarsa"},
        {"reward": "vibes"},
    ],
)
def test_impossible_workloads_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(PlanError):
        replace(WORK, **change)  # type: ignore[arg-type]


def test_workload_warns_of_context_and_of_groups_of_one() -> None:
    warnings = replace(WORK, group_size=1).warnings(max_context_tokens=4096)
    assert "group_size is 1" in warnings[0]
    assert "3596" in warnings[1]  # 4096 - 500


def test_assumptions_file_changes_single_numbers_and_keeps_their_source(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'base = "paper"\ntrain_mfu_frac = { value = 0.3, source = "our run" }\n'
        '[decode.hbm_frac]\n"H100 SXM" = 0.6\n[stacks.fsdp]\ndense_bytes = 10\n'
    )
    mine = load_assumptions(str(path))
    assert (mine.train_mfu_frac, mine.sources["train_mfu_frac"]) == (0.3, "our run")
    assert mine.decode.hbm_frac["H100 SXM"] == 0.6
    assert mine.decode.hbm_frac["default"] == DEFAULT.decode.hbm_frac["default"]
    assert mine.stacks["fsdp"].dense_bytes == 10
    assert mine.method == "paper"


@pytest.mark.parametrize(
    "text",
    [
        "trainmfu = 1", 'train_mfu_frac = "x"', "train_mfu_frac = 1.5", "decode = 3", "[decode]\nx = 1", "= =",
        "max_slots = 1.5", "max_slots = 0", "micro_batch_tokens = 0.5", "most_step_gpus = -1", "max_slots = true",
        "[decode]\ngemm_frac = 1.2", "[decode.hbm_frac]\nH100 = 80", "[stacks.fsdp.gemm_frac]\nbfloat16 = 55",
    ],
)  # fmt: skip
def test_broken_assumptions_are_config_errors(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(ConfigError):
        load_assumptions(str(path))


def test_a_small_model_waits_for_the_host_that_prepares_its_steps() -> None:
    """4.0 ms of 64 rows and 9.0 of 256 on an H200, whatever a device of twice the bandwidth would do."""
    small, cluster = load_model("Qwen3-0.6B"), Cluster(accelerator=load_accelerator("H200 SXM"), num_gpus=1)
    rows = np.asarray([1.0, 64.0, 256.0])
    step = decode_step(
        small, cluster, DEFAULT.decode, ReplicaLayout(), num_rows=rows, context_tokens=140.0
    ).seconds  # fmt: skip
    assert step == pytest.approx([2.4e-3, 4.0e-3, 8.8e-3], rel=0.02)
    large = decode_step(
        LLAMA, cluster, DEFAULT.decode, ReplicaLayout(), num_rows=rows, context_tokens=140.0
    )  # fmt: skip
    assert (large.seconds > large.host_s).all()


def test_every_assumption_has_a_source() -> None:
    numbers = {k: v for k, v in DEFAULT.as_json().items() if isinstance(v, dict)}
    assert [name for name, entry in numbers.items() if not entry["source"]] == []
    assert len(numbers) > 60


def test_memory_items_add_up_to_the_sides() -> None:
    """State items are 16 B per parameter; the engine's items stay within the device."""
    account = step_account(LLAMA, WORK, CLUSTER, DEFAULT)
    items = memory_items(
        LLAMA,
        WORK,
        CLUSTER,
        DEFAULT,
        rollout=account.rollout,
        train=account.train,
        layout=TrainLayout(),
        waits_on_host=True,
    )
    state = ("weights", "gradients", "master weights", "optimizer moments")
    assert sum(i.bytes for i in items if i.name in state) == pytest.approx(16 * 8.03e9 / 64)
    assert sum(i.bytes for i in items if i.place == "rollout device") < H100.hbm_bytes
    assert any(i.place == "train host" for i in items)


def test_a_generative_reward_reads_every_trajectory() -> None:
    plain = step_account(LLAMA, WORK, CLUSTER, DEFAULT)
    judged = step_account(
        LLAMA, replace(WORK, reward="generative", reward_response_tokens=500), CLUSTER, DEFAULT
    )
    assert plain.seconds.reward == 0
    assert judged.seconds.total == pytest.approx(plain.seconds.total + judged.seconds.reward)
    assert judged.flops.reward_model > plain.flops.reference


def test_fully_sharded_training_moves_its_weights_thrice_a_micro_batch() -> None:
    """3 x 16 GB x 63/64 over 70 % of 50 GB/s; nothing moves on one GPU, and experts in place stay."""
    stack = DEFAULT.stacks["fsdp"]
    seconds = gather_s(LLAMA, CLUSTER, DEFAULT, stack, TrainLayout(), num_gpus=64, backward=True)
    assert seconds == pytest.approx(3 * 2 * LLAMA.computed_params * 63 / 64 / 35e9)
    assert gather_s(LLAMA, CLUSTER, DEFAULT, stack, TrainLayout(), num_gpus=1, backward=True) == 0.0
    whole = gather_s(QWEN_MOE, CLUSTER, DEFAULT, stack, TrainLayout(), num_gpus=64, backward=True)
    placed = gather_s(QWEN_MOE, CLUSTER, DEFAULT, stack, TrainLayout(ep_size=8), num_gpus=64, backward=True)
    assert placed < whole / 4


def test_a_micro_batch_too_large_for_any_number_of_gpus_says_so() -> None:
    long = replace(WORK, max_response_tokens=120_000)
    layouts = Layouts(replica=ReplicaLayout(tp_size=8), train=TrainLayout(recompute="selective"))
    account = step_account(
        load_model("Llama-3.1-70B"), long, Cluster(accelerator=H100, num_gpus=512), DEFAULT, layouts=layouts
    )
    assert "whatever the number of GPUs" in " ".join(account.why_not)


def test_megatrons_ranks_hold_weights_and_gradients_whole() -> None:
    """Qwen3-32B on 64 GPUs: 2 + 2 B of a rank's parameters and 2 B of the reference's, 12 B of N / 64; FSDP shards all.
    With 8 stages the first holds 8 of 64 layers and the embedding, over TP 2."""
    model = load_model("Qwen3-32B")
    work = replace(WORK, uses_reference=True)
    megatron = replace(DEFAULT, stack="megatron")

    def held(assumptions: Assumptions, **degrees: int) -> float:
        layout = TrainLayout(**degrees)  # type: ignore[arg-type]
        found = train_memory(model, work, assumptions, num_gpus=64, layout=layout)
        return found.state + found.frozen + found.whole

    n = model.params
    assert held(megatron) == pytest.approx(6 * n + 12 * n / 64)  # 203 GB on a GPU of 80
    of_rank = (model.body_params / 8 + 151_936 * 5120) / 2
    assert held(megatron, tp_size=2, pp_size=8, cp_size=4) == pytest.approx(6 * of_rank + 12 * n / 64)
    assert held(DEFAULT) == held(DEFAULT, tp_size=2, pp_size=8) == pytest.approx(18 * n / 64)


def test_experts_of_megatron_lie_over_their_own_ranks() -> None:
    """Qwen3-30B-A3B over EP 8 and PP 4: an eighth of the experts of a stage, and all of its attention."""
    model = load_model("Qwen3-30B-A3B")
    layout = TrainLayout(pp_size=4, ep_size=8)
    work = replace(WORK, uses_reference=False)
    found = train_memory(model, work, replace(DEFAULT, stack="megatron"), num_gpus=32, layout=layout)
    of_rank = model.body_params / 4 + model.embedding_params + model.routed_params / 32
    assert found.whole == pytest.approx(4 * (of_rank - model.params / 32))
    uneven = train_memory(
        model, work, replace(DEFAULT, stack="megatron"), num_gpus=80, layout=replace(layout, pp_size=5)
    )
    of_rank = (model.body_params + model.routed_params / 8) * 10 / 48 + model.embedding_params
    assert uneven.whole == pytest.approx(4 * (of_rank - model.params / 80))  # 10 of 48 layers on a stage
