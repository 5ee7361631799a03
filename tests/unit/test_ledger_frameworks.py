"""Published implementations differ by factors: what each one's numbers change, and the mechanisms behind them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rollbook.errors import ConfigError
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.decode import decode_step, prefill_call_s
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.model import load_model
from rollbook.ledger.step import step_account
from rollbook.ledger.sync import SyncWork, sync_account
from rollbook.ledger.train import exchange_s, token_s, update_exchange_s
from rollbook.ledger.workload import Workload

DEFAULT = load_assumptions("default")
H100 = Cluster(accelerator=load_accelerator("H100"), num_gpus=64)
EXPERTS = load_model("Qwen3-235B-A22B")
SMALL = load_model("Qwen2.5-0.5B")
PUBLISHED = SyncWork(
    method="broadcast",
    num_train_gpus=64,
    num_rollout_gpus=64,
    replica_gpus=32,
    splits_experts=True,
    ep_size=16,
)


def test_a_framework_changes_its_own_numbers_and_no_others() -> None:
    verl = DEFAULT.for_framework("verl")
    assert verl.sync.per_tensor_s > 10 * DEFAULT.sync.per_tensor_s
    assert verl.sync.load_bytes_per_s == DEFAULT.sync.load_bytes_per_s
    assert verl.sync.error_frac["broadcast"] < DEFAULT.sync.error_frac["broadcast"]
    assert verl.sync.error_frac["disk"] == DEFAULT.sync.error_frac["disk"]
    assert verl.decode == DEFAULT.decode and verl.stacks == DEFAULT.stacks
    assert load_assumptions("verl").sync == verl.sync and load_assumptions("verl").name == "verl"


@pytest.mark.parametrize("base", ['"nix"', '["verl"]', "3"])
def test_a_file_may_stand_on_a_framework(tmp_path: Path, base: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text('base = "verl"\nmicro_batch_tokens = 4096\n')
    own = load_assumptions(str(path))
    assert (own.micro_batch_tokens, own.sync) == (4096, load_assumptions("verl").sync)
    path.write_text(f"base = {base}\n")
    with pytest.raises(ConfigError, match="base is") as error:
        load_assumptions(str(path))
    assert "verl" in error.value.remedy


def test_a_framework_that_nobody_measured_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="framework 'verly' has no numbers") as error:
        DEFAULT.for_framework("verly")
    assert "verl" in str(error.value.remedy)


@pytest.mark.parametrize("name", sorted(DEFAULT.frameworks))
def test_every_framework_has_a_source(name: str) -> None:
    assert any(path.startswith(f"frameworks.{name}") for path in DEFAULT.sources)


def test_36000_expert_matrices_by_name_take_as_long_as_eight_broadcasts_in_buckets() -> None:
    """The engine's GPUs load their own experts; tensor by tensor, all trainers take part in each."""
    buckets, names = (
        sync_account(EXPERTS, H100, assumptions.sync, replace(PUBLISHED, engine_ep_size=32)).seconds
        for assumptions in (DEFAULT, DEFAULT.for_framework("verl"))
    )
    assert 8 < buckets < 25 and names > 8 * buckets


def test_a_gather_brings_a_matrix_of_every_rank_that_holds_experts() -> None:
    """36,096 expert matrices out of 16 ranks take a sixteenth of the calls, and hop twice where those of 64 hop four
    times."""
    alone, spread = (
        sync_account(EXPERTS, H100, DEFAULT.sync, replace(PUBLISHED, ep_size=n)).stages_s["gather"]
        for n in (1, 16)
    )
    experts = 94 * 128 * 3 - 94 * 3
    assert alone - spread == pytest.approx(experts * (4 - 2 / 16) * DEFAULT.sync.gather_call_s)


def test_a_group_inside_a_node_gathers_without_a_network() -> None:
    """Megatron cuts tensors over groups of four, whatever its nodes; torch FSDP cuts them over all."""
    fsdp, megatron = (
        sync_account(SMALL, H100, DEFAULT.sync, replace(PUBLISHED, shard_gpus=n)).stages_s["gather"]
        for n in (0, 4)
    )
    tensors = sync_account(SMALL, H100, DEFAULT.sync, PUBLISHED).num_tensors
    assert fsdp - megatron == pytest.approx(3 * tensors * DEFAULT.sync.gather_call_s)


@pytest.mark.parametrize(
    ("model", "dtype", "gpus", "seconds"),
    [("GLM-4.5-Air", "bfloat16", 8, 3.5), ("Qwen3-235B-A22B", "bfloat16", 8, 6.2), ("DeepSeek-V3", "float8", 16, 10.2),
     ("Kimi-K2", "float8", 16, 14.4), ("DeepSeek-V3", "bfloat16", 32, 10.9)],
)  # fmt: skip
def test_an_engine_that_loads_experts_by_name_takes_a_quarter_of_a_millisecond_for_each(
    model: str, dtype: str, gpus: int, seconds: float
) -> None:
    """Checkpoint engines of Moonshot and of NeMo RL: 215 GB to 1.3 TB, and the seconds go with 17 to 70 thousand
    matrices."""
    sync = DEFAULT.for_framework("checkpoint_engine").sync
    work = replace(
        PUBLISHED,
        method="sharded",
        num_train_gpus=gpus,
        num_rollout_gpus=gpus,
        replica_gpus=gpus,
        weight_dtype=dtype,
    )
    account = sync_account(load_model(model), H100, sync, work)
    assert account.slowest == "load" and account.seconds == pytest.approx(seconds, rel=0.5)
    # Each GPU of a replica that spreads its experts loads its own, and slices that are written into place load none.
    spread = sync_account(load_model(model), H100, sync, replace(work, engine_ep_size=gpus))
    experts = sync_account(load_model(model), H100, sync, work).num_tensors
    experts -= sync_account(load_model(model), H100, sync, replace(work, splits_experts=False)).num_tensors
    saved_s = experts * (1 - 1 / gpus) * sync.expert_load_s
    assert account.stages_s["load"] - spread.stages_s["load"] == pytest.approx(saved_s)
    assert sync_account(load_model(model), H100, DEFAULT.sync, work).stages_s["load"] < 0.1 * seconds


def test_two_buffers_let_the_stages_overlap() -> None:
    one = sync_account(EXPERTS, H100, DEFAULT.sync, PUBLISHED)
    two = sync_account(EXPERTS, H100, replace(DEFAULT.sync, overlap_frac=1.0), PUBLISHED)
    assert one.seconds == pytest.approx(one.fixed_s + sum(one.stages_s.values()))
    first = PUBLISHED.bucket_bytes / two.total_bytes
    others = sum(two.stages_s.values()) - two.stages_s[two.slowest]
    assert two.seconds == pytest.approx(two.fixed_s + two.stages_s[two.slowest] + first * others)


def test_an_engine_of_data_parallel_attention_receives_all_but_the_experts_on_every_gpu() -> None:
    """82.5 GB a GPU of 1.49 TB over 32 of them (prime-rl pull 3341) are more than a 32nd."""
    work = replace(PUBLISHED, method="sharded")
    divided, repeated = (
        sync_account(EXPERTS, H100, DEFAULT.sync, replace(work, dense_copies=n)) for n in (1, 32)
    )
    dense = 2 * (EXPERTS.computed_params - EXPERTS.routed_params)
    more = dense * (1 - 1 / 32)
    assert repeated.bytes_per_receiver - divided.bytes_per_receiver == pytest.approx(more)
    assert repeated.stages_s["transfer"] - divided.stages_s["transfer"] == pytest.approx(more / 45e9)


def test_weights_that_pass_through_the_host_are_copied_there_and_back() -> None:
    """Shards of 64 trainers in, of 32 receivers out; a stream is staged whole."""
    rate = DEFAULT.sync.host_copy_bytes_per_s

    def staged_s(method: str) -> float:
        direct, staged = (
            sync_account(EXPERTS, H100, DEFAULT.sync, replace(PUBLISHED, method=method, passes_host=p))
            for p in (False, True)
        )  # type: ignore[arg-type]
        return staged.seconds - direct.seconds

    total = 2 * EXPERTS.computed_params
    assert staged_s("sharded") == pytest.approx((total / 64 + total / 32) / rate)
    assert staged_s("broadcast") == pytest.approx(total / rate)


def test_a_pair_of_gpus_on_two_nodes_meets_over_the_network() -> None:
    pair = replace(PUBLISHED, num_train_gpus=1, num_rollout_gpus=1, replica_gpus=1)
    near, far = (sync_account(SMALL, H100, DEFAULT.sync, replace(pair, is_apart=a)) for a in (False, True))
    assert far.stages_s["transfer"] == pytest.approx(near.stages_s["transfer"] * 450 / 50)


def test_a_trainer_whose_ranks_hold_whole_tensors_gathers_nothing() -> None:
    """Megatron with TP 1, dense: neither calls nor bytes; the wire is all that a broadcast waits for."""
    work = replace(PUBLISHED, num_train_gpus=8, num_rollout_gpus=8, replica_gpus=1)
    whole = sync_account(SMALL, H100, DEFAULT.sync, replace(work, shard_gpus=1))
    sharded = sync_account(SMALL, H100, DEFAULT.sync, work)
    assert whole.stages_s["gather"] == 0 and whole.slowest == "transfer"
    gathered_s = whole.num_tensors * DEFAULT.sync.gather_call_s
    gathered_s += sharded.total_bytes / DEFAULT.sync.far_gather_bytes_per_s
    assert sharded.stages_s["gather"] == pytest.approx(gathered_s)
    shared = replace(work, method="ipc", shares_devices=True, shard_gpus=1)
    assert set(sync_account(SMALL, H100, DEFAULT.sync, shared).stages_s) == {"load"}


def test_slices_are_bound_by_the_ports_that_receive_them() -> None:
    """Qwen3-30B-A3B to a replica of two H100 in 1.36 s (NeMo RL pull 2971): 30.5 GB a port at 0.9 of 50 GB/s."""
    model = load_model("Qwen3-30B-A3B")
    work = replace(PUBLISHED, method="sharded", num_train_gpus=16, num_rollout_gpus=16, replica_gpus=2)
    account = sync_account(model, H100, DEFAULT.sync, work)
    assert account.slowest == "transfer"
    assert account.stages_s["transfer"] == pytest.approx(account.bytes_per_receiver / 45e9)
    assert account.seconds == pytest.approx(1.36, rel=0.1)


def test_engines_of_the_trainers_node_do_not_wait_for_its_slow_assembly() -> None:
    """7B from two GPUs of a node to two others in 0.87 s, to another node in seconds (verl, open cases)."""
    verl, model = DEFAULT.for_framework("verl").sync, load_model("Qwen2.5-7B")
    near = replace(PUBLISHED, num_train_gpus=2, num_rollout_gpus=2, replica_gpus=1)
    far = replace(near, num_train_gpus=8, num_rollout_gpus=8)
    assert sync_account(model, H100, verl, near).seconds == pytest.approx(0.87, rel=0.25)
    assert sync_account(model, H100, verl, far).stages_s["gather"] == pytest.approx(
        2 * model.computed_params / verl.far_gather_bytes_per_s + 339 * verl.gather_call_s
    )


def test_pipeline_stages_send_what_they_hold_at_the_same_time() -> None:
    one, four = (sync_account(EXPERTS, H100, DEFAULT.sync, replace(PUBLISHED, pp_size=pp)) for pp in (1, 4))
    assert four.stages_s["gather"] < one.stages_s["gather"] / 4
    named_s = one.num_tensors * DEFAULT.sync.per_tensor_s * 4  # 64 trainers on eight nodes hop four times
    assert one.stages_s["transfer"] - four.stages_s["transfer"] == pytest.approx(named_s * 3 / 4)


def test_slices_wait_for_whole_tensors_where_a_trainer_makes_those_first() -> None:
    work = replace(PUBLISHED, method="sharded", pp_size=4)
    slices = sync_account(EXPERTS, H100, DEFAULT.sync, work)
    slime = DEFAULT.for_framework("slime").sync
    whole = sync_account(EXPERTS, H100, slime, work)
    assert slices.slowest == "transfer" and whole.slowest == "gather"
    gathered = 2 * EXPERTS.computed_params / 4 / slime.shard_gather_bytes_per_s
    assert whole.stages_s["gather"] == pytest.approx(gathered)
    eight_bits = sync_account(EXPERTS, H100, slime, replace(work, weight_dtype="float8"))
    assert eight_bits.stages_s["gather"] == pytest.approx(gathered, rel=0.03)  # the trainer holds bfloat16


def test_a_host_that_works_between_steps_adds_to_them() -> None:
    def step_s(engine: str, rows: float) -> float:
        layout = ReplicaLayout(engine=engine)
        step = decode_step(SMALL, H100, DEFAULT.decode, layout, num_rows=rows, context_tokens=500.0)
        return float(step.seconds)

    host_s, row_s = DEFAULT.decode.host_s_of("vllm_v0")
    beside, between = replace(DEFAULT.decode, waiting_frac={"default": 0.0}), DEFAULT.decode
    layout = ReplicaLayout(engine="vllm_v0")
    found = [
        float(decode_step(SMALL, H100, d, layout, num_rows=8.0, context_tokens=500.0).seconds)
        for d in (beside, between)
    ]
    assert found[1] - found[0] == pytest.approx(host_s + 8 * row_s)
    launches_s = DEFAULT.decode.launch_layer_s["vllm_eager"] * SMALL.num_layers
    host_s, row_s = DEFAULT.decode.host_s_of("vllm_eager")
    assert step_s("vllm_eager", 8.0) == pytest.approx(launches_s + host_s + 8 * row_s)
    assert step_s("vllm_eager", 8.0) > 3 * step_s("vllm", 8.0)


def test_operators_are_launched_beside_a_device_that_is_slower() -> None:
    """72B on two A100: of 64 ms of launches all but 16 pass while the device reads weights. Experts have more operators
    to launch than a dense layer."""
    model = load_model("Qwen2.5-72B")
    a100 = Cluster(accelerator=load_accelerator("A100"), num_gpus=2)

    def step(of, gpus: Cluster, engine: str):  # type: ignore[no-untyped-def]
        layout = ReplicaLayout(tp_size=gpus.num_gpus, engine=engine)
        return decode_step(of, gpus, DEFAULT.decode, layout, num_rows=1.0, context_tokens=1000.0)

    graph, eager = (step(model, a100, engine) for engine in ("vllm", "vllm_eager"))
    assert graph.launch_s == 0 < eager.launch_s
    assert float(eager.seconds - graph.seconds) < 0.25 * eager.launch_s
    one = Cluster(accelerator=load_accelerator("H100"), num_gpus=1)
    dense, experts = (step(load_model(n), one, "vllm_eager").launch_s for n in ("Qwen3-8B", "Qwen3-30B-A3B"))
    assert experts / 48 == pytest.approx(2.3 * dense / 36)


def test_weights_that_change_processes_cost_handles_and_those_that_stay_their_bytes() -> None:
    work = replace(PUBLISHED, num_train_gpus=8, num_rollout_gpus=8, replica_gpus=8, shares_devices=True)
    sync = DEFAULT.sync
    inside, between = (
        sync_account(EXPERTS, H100, sync, replace(work, method=way)) for way in ("in_process", "ipc")
    )
    handles_s = inside.num_tensors * sync.handle_tensor_s
    assert between.seconds - inside.seconds == pytest.approx(
        sync.handle_base_s - sync.process_base_s + handles_s
    )
    experts = 94 * 128 * 3 - 94 * 3
    calls = inside.num_tensors - experts * (1 - 1 / work.ep_size)
    total = inside.total_bytes
    # Over the 16 ranks of expert parallelism, two nodes, a call hops twice.
    hops = calls + experts / work.ep_size
    assert inside.stages_s["gather"] == pytest.approx(
        total / sync.gather_bytes_per_s + hops * sync.gather_call_s
    )
    loaded_s = experts * sync.expert_load_s + total / (8 * sync.load_bytes_per_s)
    assert inside.stages_s["load"] == pytest.approx(loaded_s)
    assert inside.fixed_s == sync.process_base_s
    # On one GPU nothing is gathered, and processes are told all the same: 2.6 s of verl's 0.6B and 1.7B there.
    one = replace(work, method="ipc", num_train_gpus=1, num_rollout_gpus=1, replica_gpus=1)
    alone = sync_account(SMALL, H100, sync, one)
    assert alone.fixed_s == sync.handle_base_s and set(alone.stages_s) == {"load"}
    verl = sync_account(SMALL, H100, DEFAULT.for_framework("verl").sync, one)
    assert verl.seconds == pytest.approx(2.6, rel=0.1)


def test_one_trainer_gathers_nothing_for_its_broadcast() -> None:
    verl = DEFAULT.for_framework("verl").sync
    alone, four = (
        sync_account(
            SMALL, H100, verl, replace(PUBLISHED, num_train_gpus=n, num_rollout_gpus=4, replica_gpus=4)
        )
        for n in (1, 4)
    )
    assert alone.stages_s["gather"] == 0 < four.stages_s["gather"]
    named_s = four.stages_s["transfer"] - alone.stages_s["transfer"]
    assert named_s == pytest.approx(four.num_tensors * verl.per_tensor_s)


def test_kernels_that_are_not_at_home_on_a_device_are_slower_but_for_float4() -> None:
    def step_s(engine: str, gpu: str, dtype: str) -> float:
        cluster = Cluster(accelerator=load_accelerator(gpu), num_gpus=8)
        layout = ReplicaLayout(tp_size=8, engine=engine, weight_dtype=dtype)
        step = decode_step(EXPERTS, cluster, DEFAULT.decode, layout, num_rows=8.0, context_tokens=1000.0)
        return float(step.seconds)

    young = DEFAULT.decode.young_factor["sglang/B200"]
    assert step_s("sglang", "B200", "float8") == pytest.approx(young * step_s("vllm", "B200", "float8"))
    assert step_s("sglang", "B200", "float4") == step_s("vllm", "B200", "float4")
    assert step_s("sglang", "H100", "float8") == step_s("vllm", "H100", "float8")
    extra_s = DEFAULT.decode.moe_layer_s["MI300X"] - DEFAULT.decode.moe_layer_s["default"]
    assert step_s("vllm", "MI300X", "float8") > EXPERTS.num_moe_layers * extra_s + step_s(
        "vllm", "H200", "float8"
    )


def test_linear_layers_from_elsewhere_are_computed_whole_on_every_rank() -> None:
    hybrid, dense = load_model("Qwen3.5-9B"), load_model("Qwen3-8B")
    whole = DEFAULT.stacks["megatron"]

    def seconds(model, repeats: float, tp_size: int) -> float:  # type: ignore[no-untyped-def]
        stack = replace(whole, repeats_linear=repeats)
        layout = TrainLayout(tp_size=tp_size)
        return token_s(model, H100.accelerator, stack, layout, sequence_tokens=4096.0, backward=True)

    assert whole.repeats_linear == 1
    assert seconds(dense, 1.0, 4) == seconds(dense, 1.0, 1)
    assert seconds(hybrid, 1.0, 1) == seconds(hybrid, 0.0, 4)
    # Three more times 24 layers of 67 million parameters, four passes of 2 FLOPs, and their traffic.
    rate = H100.accelerator.peak("bfloat16") * whole.gemm_frac["bfloat16"]
    matrices_s = 3 * 24 * hybrid.linear_params_per_layer * 8 / rate
    assert matrices_s < seconds(hybrid, 1.0, 4) - seconds(hybrid, 0.0, 4) < 1.5 * matrices_s


def test_a_call_of_prefill_costs_launches_whatever_its_tokens() -> None:
    assert prefill_call_s(SMALL, H100, DEFAULT.decode) == DEFAULT.decode.prefill_layer_s * 24


def test_matrices_reach_no_more_of_a_peak_than_the_best_of_their_device() -> None:
    """668 of 1,307 TFLOPS are the best GEMM of an MI300X: 0.64 of the share that an H100's reaches."""
    stack, amd = DEFAULT.stacks["megatron_tuned"], load_accelerator("MI300X")
    frac = stack.gemm_frac_of(amd, "bfloat16")
    assert frac == pytest.approx(stack.gemm_frac["bfloat16"] * (668.4 / 1307) / 0.8, rel=1e-3)
    assert frac * amd.peak("bfloat16") < amd.achieved_flops_per_s["bfloat16"]
    assert stack.gemm_frac_of(H100.accelerator, "bfloat16") == stack.gemm_frac["bfloat16"]


def test_tokens_travel_to_experts_of_other_nodes_only() -> None:
    stack = DEFAULT.stacks["megatron_overlap"]
    rack = Cluster(accelerator=load_accelerator("GB200"), num_gpus=64)

    def seconds(cluster: Cluster, ep_size: int) -> float:
        return exchange_s(EXPERTS, cluster, stack, TrainLayout(ep_size=ep_size), backward=True)

    assert seconds(H100, 8) == 0 == seconds(rack, 64)
    # Four nodes, three of them far, each visited by all but (3/4)^8 of the tokens; 2 bytes, there and back, twice.
    far = 3 * (1 - 0.75**8)
    assert seconds(H100, 32) == pytest.approx(stack.expert_exchange_frac * 94 * 4096 * 8 * far / 50e9)
    assert seconds(H100, 16) < seconds(H100, 32) < seconds(H100, 64)


def test_what_a_step_costs_beside_its_stages_grows_with_its_sequences() -> None:
    work = Workload(
        num_prompts=8, group_size=8, prompt_tokens=100, response_tokens=200, max_response_tokens=512
    )
    few, many = (
        step_account(SMALL, replace(work, num_prompts=n), H100, DEFAULT).seconds.other for n in (8, 512)
    )
    assert few < 1 and many - few == pytest.approx(504 * 8 * DEFAULT.step_sequence_s)


def test_tensors_that_are_quantised_one_by_one_cost_time_each() -> None:
    """Eight bits are half the bytes, and 36,945 tensors of their own, scaled and shuffled where they arrive."""
    eight = replace(PUBLISHED, weight_dtype="float8")
    plain, each = (
        sync_account(EXPERTS, H100, DEFAULT.sync, replace(eight, quantizes_tensors=q)).seconds
        for q in (False, True)
    )
    assert each - plain == pytest.approx(36_945 * DEFAULT.sync.quantize_tensor_s)
    slices = [
        sync_account(
            EXPERTS, H100, DEFAULT.sync, replace(eight, method="sharded", quantizes_tensors=q)
        ).seconds
        for q in (False, True)
    ]
    assert slices[1] - slices[0] == pytest.approx(each - plain)


def test_an_update_of_few_tokens_waits_for_gradients_and_weights() -> None:
    """6 bytes a parameter between copies; experts that are spread over eight GPUs have 32 copies of 256."""
    stack, small = DEFAULT.stacks["megatron_tuned"], load_model("Qwen3-30B-A3B")
    layout = TrainLayout(ep_size=8)
    dense = small.computed_params - small.routed_params
    moved = 6 * (dense * 255 / 256 + small.routed_params / 8 * 31 / 32)
    seconds = update_exchange_s(small, H100, stack, layout, num_gpus=256)
    assert seconds == pytest.approx(stack.exposed_frac * moved / (stack.link_frac * 50e9))
    assert update_exchange_s(small, H100, stack, TrainLayout(), num_gpus=1) == 0.0


def test_micro_batches_of_few_tokens_cost_their_launches() -> None:
    one = load_model("Llama-3.2-1B")
    work = Workload(
        num_prompts=1024, group_size=5, prompt_tokens=107, response_tokens=183, max_response_tokens=1024
    )
    cluster = Cluster(accelerator=load_accelerator("H100"), num_gpus=8)

    def train_s(tokens: int) -> float:
        return step_account(one, work, cluster, replace(DEFAULT, micro_batch_tokens=tokens)).seconds.train

    few = DEFAULT.stacks["fsdp"].micro_batch_layer_s * 16 * (5120 / 8 / 4)  # four sequences each
    assert train_s(4 * 290) == pytest.approx(few, rel=0.02) and train_s(16384) < few / 3
