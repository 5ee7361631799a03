"""Which bytes of a publication cross which link: figures worked by hand from the shapes of the models."""

from __future__ import annotations

import tomllib
from importlib import resources

import pytest

from rollbook.errors import PlanError
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.mapping import KindMove, SyncMapping, Trainer, sync_mapping
from rollbook.ledger.model import load_model
from rollbook.ledger.tensors import tensor_kinds

H100 = load_accelerator("H100")
LLAMA = load_model("Llama-3.1-8B")
QWEN_MOE = load_model("Qwen3-30B-A3B")
NODE = Cluster(accelerator=H100, num_gpus=8)
LLAMA_BYTES = 2 * 8_030_261_248


def kind(mapping: SyncMapping, name: str) -> KindMove:
    return next(k for k in mapping.kinds if k.name == name)


def names() -> list[str]:
    text = (resources.files("rollbook.ledger") / "data" / "models.toml").read_text()
    rows = tomllib.loads(text)["model"]
    return [row["name"] for row in rows]


@pytest.mark.parametrize("name", names())
def test_the_kinds_of_tensors_are_every_parameter_once(name: str) -> None:
    model = load_model(name)
    assert sum(k.params for k in tensor_kinds(model)) == model.computed_params


@pytest.mark.parametrize(("name", "expected"), [("Llama-3.1-8B", 291), ("Qwen3-8B", 399)])
def test_as_many_tensors_as_the_checkpoint_holds(name: str, expected: int) -> None:
    """The index of the released safetensors: 9 a layer and 3; with q and k norms 11 a layer and 3."""
    assert sum(k.num_tensors for k in tensor_kinds(load_model(name))) == expected


def shared(engine_tp: int, **options: object) -> SyncMapping:
    """FSDP2 over the 8 GPUs of a node, engines on the same ones."""
    return sync_mapping(
        LLAMA, NODE, Trainer(num_gpus=8), ReplicaLayout(tp_size=engine_tp),
        num_rollout_gpus=8, shares_devices=True, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_fsdp_shards_to_tensor_parallel_slices_on_the_same_gpus() -> None:
    """q is 32 layers of 4096 x 4096: 1.07 GB, a GPU gathers 7 of 8 rows of it and keeps one half of all."""
    mapping = shared(2)
    q = kind(mapping, "attention q")
    assert (q.num_tensors, q.trainer_pieces, q.engine_cuts, q.engine_copies) == (32, 8, 2, 1)
    assert q.bytes == 32 * 4096 * 4096 * 2
    assert q.gathered_bytes == q.bytes * 7 / 8
    assert q.landed_bytes == q.bytes / 2
    # Norms, 65 of 4096, are whole on both GPUs of a replica; everything else is halved.
    norms = 65 * 4096 * 2
    assert mapping.total_bytes == LLAMA_BYTES
    assert mapping.landed_bytes == (LLAMA_BYTES - norms) / 2 + norms
    ipc = mapping.route("ipc")
    assert ipc.bytes_over("scale-up") == pytest.approx(LLAMA_BYTES * 7 / 8)
    assert ipc.bytes_over("network") == 0
    assert ipc.bytes_over("same GPU") == mapping.landed_bytes


def test_a_bucket_holds_memory_until_it_was_read() -> None:
    """Two buckets of 256 MiB in flight and the embedding of 128,256 x 4096, whole while it is copied into one."""
    embedding = 128_256 * 4096 * 2
    mapping = shared(1)
    assert mapping.route("ipc").sender_peak_bytes == 2 * 256 * 2**20 + embedding
    assert (
        mapping.route("in_process").sender_peak_bytes == embedding
    )  # larger than a bucket, passed by reference
    assert mapping.route("ipc").receiver_peak_bytes == 0
    small = shared(1, bucket_bytes=2**20, max_buckets=1)
    assert small.route("ipc").sender_peak_bytes == 2**20 + embedding


def test_stacked_experts_are_gathered_as_one_tensor() -> None:
    """Gate and up of 128 experts of one layer: 128 x 2 x 2048 x 768 numbers, beside an expert's own 2048 x 768."""

    def peak(*, splits: bool) -> float:
        mapping = sync_mapping(
            QWEN_MOE, NODE, Trainer(num_gpus=8), ReplicaLayout(), num_rollout_gpus=8, shares_devices=True,
            splits_experts=splits,
        )  # fmt: skip
        return mapping.route("in_process").sender_peak_bytes

    assert peak(splits=False) == 128 * 2 * 2048 * 768 * 2
    assert peak(splits=True) == 151_936 * 2048 * 2  # then the embedding is the largest


def test_kv_heads_are_repeated_beyond_their_number() -> None:
    """8 KV heads over 16 GPUs: every GPU holds one head, every head lies on two; q is cut 16 times."""
    model = load_model("Qwen3-32B")
    mapping = sync_mapping(
        model, Cluster(accelerator=H100, num_gpus=16), Trainer(num_gpus=16), ReplicaLayout(tp_size=16),
        num_rollout_gpus=16, shares_devices=True,
    )  # fmt: skip
    kv, q = kind(mapping, "attention k, v"), kind(mapping, "attention q")
    assert (kv.engine_cuts, kv.engine_copies, q.engine_cuts) == (8, 2, 16)
    assert kv.bytes == 64 * 2 * 5120 * 1024 * 2
    assert kv.landed_bytes == kv.bytes / 8


def test_gathering_over_two_nodes_takes_the_network_for_the_other_nodes_shards() -> None:
    """Of 16 shards 7 come from the own node and 8 from the other."""
    mapping = sync_mapping(
        LLAMA, Cluster(accelerator=H100, num_gpus=16), Trainer(num_gpus=16), ReplicaLayout(),
        num_rollout_gpus=16, shares_devices=True,
    )  # fmt: skip
    ipc = mapping.route("ipc")
    assert ipc.bytes_over("scale-up") == pytest.approx(LLAMA_BYTES * 7 / 16)
    assert ipc.bytes_over("network") == pytest.approx(LLAMA_BYTES * 8 / 16)


MEGATRON = Trainer(
    num_gpus=32, layout=TrainLayout(tp_size=4, pp_size=2, ep_size=8), is_sharded=False
)  # fmt: skip


def test_megatron_cuts_by_tensor_pipeline_and_experts_and_repeats_the_rest() -> None:
    """Two stages of 16 GPUs: q lies on 4 ranks of a stage, experts whole on 8, norms on each GPU of a stage."""
    mapping = sync_mapping(
        QWEN_MOE, Cluster(accelerator=H100, num_gpus=48), MEGATRON, ReplicaLayout(tp_size=4, ep_size=8),
        num_rollout_gpus=16, shares_devices=False,
    )  # fmt: skip
    q, experts, norms = (kind(mapping, name) for name in ("attention q", "experts", "norms"))
    assert (q.trainer_pieces, q.trainer_holders) == (4, 8)
    assert q.gathered_bytes == q.bytes / 2 * 3 / 4  # of its stage's half
    assert (experts.trainer_pieces, experts.trainer_holders) == (1, 16)
    assert experts.trainer_cut == "whole experts over EP 8"
    assert (norms.trainer_pieces, norms.trainer_holders) == (1, 2)
    # The engine: 128 experts, 16 on each of 8 GPUs; attention over TP 4, which are repeated twice.
    assert experts.bytes == 48 * 128 * 3 * 2048 * 768 * 2
    assert experts.landed_bytes == experts.bytes / 8
    assert (experts.engine_copies, q.engine_cuts, q.engine_copies) == (1, 4, 2)
    assert mapping.trainer == "Megatron on 32 GPUs, TP 4, PP 2, EP 8"


def test_fully_sharded_experts_are_cut_by_rows_within_an_expert_rank() -> None:
    """16 GPUs in 8 expert ranks: an expert's rows lie on 2 GPUs, one copy of all experts on all 16."""
    trainer = Trainer(num_gpus=16, layout=TrainLayout(ep_size=8))
    mapping = sync_mapping(
        QWEN_MOE, Cluster(accelerator=H100, num_gpus=24), trainer, ReplicaLayout(),
        num_rollout_gpus=8, shares_devices=False,
    )  # fmt: skip
    experts = kind(mapping, "experts")
    assert (experts.trainer_pieces, experts.trainer_holders) == (2, 16)
    assert experts.trainer_cut == "whole experts over EP 8, rows over 2"


def separated(**options: object) -> SyncMapping:
    """A node that trains beside a node of engines of TP 4."""
    return sync_mapping(
        LLAMA, Cluster(accelerator=H100, num_gpus=16), Trainer(num_gpus=8), ReplicaLayout(tp_size=4),
        num_rollout_gpus=8, shares_devices=False, **options,  # type: ignore[arg-type]
    )  # fmt: skip


def test_a_broadcast_brings_whole_tensors_and_shards_go_to_their_place() -> None:
    """Every engine GPU receives all 16.1 GB in a broadcast, and its quarter (and the norms) point to point."""
    mapping = separated()
    norms = 65 * 4096 * 2
    quarter = (LLAMA_BYTES - norms) / 4 + norms
    broadcast, sharded = mapping.route("broadcast"), mapping.route("sharded")
    assert broadcast.bytes_over("network") == LLAMA_BYTES
    assert broadcast.bytes_over("scale-up") == pytest.approx(LLAMA_BYTES * 7 / 8)  # the gather
    assert sharded.bytes_over("network") == quarter
    assert sharded.bytes_over("scale-up") == 0
    seconds = [load.seconds_at_rate for load in broadcast.links if load.link == "network"]
    assert seconds == [LLAMA_BYTES / H100.nic_bytes_per_s]


def test_a_file_is_written_once_and_read_by_every_host() -> None:
    mapping = separated()
    disk = mapping.route("disk")
    assert disk.bytes_over("storage") == 2 * LLAMA_BYTES
    assert disk.bytes_over("host link") == mapping.landed_bytes


def test_a_delta_sends_position_and_value_of_what_changed() -> None:
    """1 % of 8.03e9 numbers at 4 + 2 bytes; each trainer GPU compares its eighth of the bytes."""
    delta = separated(changed_frac=0.01).route("delta")
    assert delta.bytes_over("network") == pytest.approx(0.01 * 8_030_261_248 * 6)
    compared = next(load for load in delta.links if load.stage == "gather")
    assert compared.bytes == pytest.approx(LLAMA_BYTES / 8)
    assert separated(changed_frac=0.0).route("delta").bytes_over("network") == 0


def test_point_to_point_on_shared_gpus_moves_only_what_is_not_there() -> None:
    """TP 8 over the same 8 GPUs: rows are already in place; columns cross, all but an eighth of each slice."""
    mapping = shared(8)
    by_columns = sum(k.bytes for k in mapping.kinds if k.engine_cut.startswith("columns"))
    norms = 65 * 4096 * 2
    moved = by_columns / 8 * (7 / 8) + norms * 7 / 8
    assert mapping.route("sharded").bytes_over("scale-up") == pytest.approx(moved)


def test_float8_travels_with_its_scales() -> None:
    """A float32 scale for every block of 128 x 128; gathered in bfloat16, because the trainer quantizes it whole."""
    mapping = sync_mapping(
        LLAMA, NODE, Trainer(num_gpus=8), ReplicaLayout(weight_dtype="float8"),
        num_rollout_gpus=8, shares_devices=True,
    )  # fmt: skip
    q, embedding = kind(mapping, "attention q"), kind(mapping, "embedding")
    numbers = 32 * 4096 * 4096
    assert q.bytes == numbers + 32 * (4096 // 128) ** 2 * 4
    assert q.gathered_bytes == 2 * numbers * 7 / 8
    assert (embedding.bytes, embedding.engine_dtype) == (2 * 128_256 * 4096, "bfloat16")


def test_adapters_alone_are_all_that_travels() -> None:
    """Rank 16 on seven matrices of 32 layers: 41.9 M numbers in bfloat16, whole to every engine GPU."""
    mapping = separated(lora_rank=16)
    (adapters,) = mapping.kinds
    assert adapters.num_tensors == 2 * 7 * 32
    assert adapters.bytes == adapters.landed_bytes == 2 * 41_943_040
    assert mapping.route("broadcast").bytes_over("network") == adapters.bytes


def test_one_gpu_gathers_nothing() -> None:
    alone = Cluster(accelerator=H100, num_gpus=1)
    mapping = sync_mapping(
        LLAMA, alone, Trainer(num_gpus=1), ReplicaLayout(), num_rollout_gpus=1, shares_devices=True
    )
    assert [load.stage for load in mapping.route("in_process").links] == ["load"]


def test_what_cannot_be_mapped_is_refused_with_a_remedy() -> None:
    with pytest.raises(PlanError, match="no multiple of TP x PP"):
        Trainer(num_gpus=6, layout=TrainLayout(tp_size=4))
    with pytest.raises(PlanError, match="between 0 and 1"):
        separated(changed_frac=1.5)
    with pytest.raises(PlanError, match="use one of: broadcast, sharded, disk, delta"):
        separated().route("ipc")


def test_pipeline_stages_gather_what_they_hold_at_the_same_time() -> None:
    """Qwen3-30B-A3B, 128 experts of 48 layers in EP 16 and PP 4 on 64 GPUs: a stage's quarter of their 57 GB lies on
    two nodes, and a gathering GPU receives 7 of 16 parts from its own and 8 from the other."""
    layout = TrainLayout(ep_size=16, pp_size=4)
    mapping = sync_mapping(
        QWEN_MOE,
        Cluster(accelerator=H100, num_gpus=80),
        Trainer(num_gpus=64, layout=layout, is_sharded=False),
        ReplicaLayout(tp_size=2),
        num_rollout_gpus=16,
        shares_devices=False,
    )
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    assert kind(mapping, "experts").gathered_bytes == pytest.approx(experts / 4 * 15 / 16)
    gathers = {load.link: load.bytes for load in mapping.route("broadcast").links if load.stage == "gather"}
    assert gathers["scale-up"] == pytest.approx(experts / 4 * 7 / 16)
    assert gathers["network"] == pytest.approx(experts / 4 * 8 / 16)
