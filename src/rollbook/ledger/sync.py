"""Weight publication: which bytes cross which link, and how long it takes.

Buckets flow through gather (trainer shards to one full tensor), transfer and load (into the engine's layout).
The three overlap, so the slowest sets the pace and the first bucket pays all three:

    seconds = base + bytes / slowest rate + one bucket through the others + per tensor x tensors
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollbook.errors import PlanError
from rollbook.ledger.adapters import lora_params
from rollbook.ledger.assumptions import SyncAssumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import DTYPE_BYTES
from rollbook.ledger.model import ModelSpec

SyncMethod = Literal["in_process", "broadcast", "sharded", "disk", "delta"]
SYNC_METHODS: tuple[SyncMethod, ...] = ("in_process", "broadcast", "sharded", "disk", "delta")


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWork:
    """One publication."""

    method: SyncMethod
    num_train_gpus: int
    num_rollout_gpus: int
    replica_gpus: int
    weight_dtype: str = "bfloat16"
    """As the engine holds it; float8 carries a float32 scale for every 128 x 128 block."""
    changed_frac: float = 0.02
    """Share of the weights whose bits changed, for "delta"."""
    lora_rank: int = 0
    """Above 0: only adapters of this rank on all matrices are sent."""
    bucket_bytes: float = 1e9
    max_buckets: int = 2
    """Buckets that exist at a time, as `sync.max_buckets`."""
    splits_experts: bool = False
    """Every expert's matrices are tensors of their own, as Hugging Face checkpoints name them."""
    shares_devices: bool = False
    """Trainer and engines live on the same GPUs."""
    state_is_offloaded: bool = False
    """The trainer's weights lie in host memory when the publication starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAccount:
    """Bytes and seconds of one publication."""

    total_bytes: float
    """What the engine must end up with, one copy."""
    bytes_per_sender: float
    bytes_per_receiver: float
    num_tensors: int
    peak_bytes: float
    """Most extra device memory on a sender: buckets in flight and the largest gathered tensor."""
    seconds: float
    error_frac: float
    slowest: str
    """Stage that sets the pace: "gather", "transfer" or "load"."""


def published_bytes(model: ModelSpec, weight_dtype: str, lora_rank: int = 0) -> float:
    """Bytes of one full set of weights in the engine's dtype, or of LoRA adapters in bfloat16."""
    if lora_rank:
        return 2.0 * lora_params(model, lora_rank)
    ends = model.computed_params - model.body_params - model.routed_params
    matrices = model.body_params + model.routed_params
    dtype = DTYPE_BYTES[weight_dtype]
    scales = 4.0 / (128 * 128) if weight_dtype == "float8" else 0.0
    return matrices * (dtype + scales) + ends * max(dtype, 2.0)


def num_tensors(model: ModelSpec, *, splits_experts: bool) -> int:
    """Tensors of a checkpoint: about nine a layer, and the experts stacked or each apart."""
    per_layer = 9 * model.num_layers
    experts = model.num_moe_layers * model.mlp_matrices * (model.num_experts if splits_experts else 1)
    return per_layer + experts + 3


def sync_account(
    model: ModelSpec, cluster: Cluster, assumptions: SyncAssumptions, work: SyncWork
) -> SyncAccount:
    """Bytes and seconds of one publication.

    Raises:
        PlanError: an unknown method, or counts below 1.
    """
    if work.method not in SYNC_METHODS:
        raise PlanError(f"sync method is {work.method!r}", f"choose one of: {', '.join(SYNC_METHODS)}")
    if min(work.num_train_gpus, work.num_rollout_gpus, work.replica_gpus) < 1:
        raise PlanError("a publication has no sender or no receiver", "give each side at least one GPU")
    total = published_bytes(model, work.weight_dtype, work.lora_rank)
    if cluster.accelerator.is_cpu and work.method == "in_process":
        return _within_process(model, cluster, assumptions, work)
    crosses = _crosses_nodes(cluster, work)
    per_sender = total / work.num_train_gpus
    per_receiver = total / work.replica_gpus
    tensors = num_tensors(model, splits_experts=work.splits_experts)
    if work.method == "delta":
        return _delta(assumptions, work, total, tensors)
    rates = _rates(cluster, assumptions, work, total, crosses=crosses)
    slowest = min(rates, key=lambda stage: rates[stage])
    bucket = min(work.bucket_bytes, total)
    others = sum(bucket / rate for stage, rate in rates.items() if stage != slowest)
    base_s = assumptions.base_s if work.method == "broadcast" and crosses else assumptions.near_base_s
    seconds = base_s + total / rates[slowest] + others
    if work.method in ("broadcast", "in_process"):
        nodes = max(work.num_train_gpus / cluster.gpus_per_node, 1.0)
        seconds += tensors * assumptions.per_tensor_s * nodes**assumptions.per_tensor_growth
    if work.state_is_offloaded:
        seconds += per_sender / assumptions.offloaded_bytes_per_s
    return SyncAccount(
        total_bytes=total,
        bytes_per_sender=per_sender,
        bytes_per_receiver=per_receiver,
        num_tensors=tensors,
        peak_bytes=work.max_buckets * bucket + 2.0 * model.embedding_params,
        seconds=seconds,
        error_frac=assumptions.error_frac[work.method],
        slowest=slowest,
    )


def _within_process(
    model: ModelSpec, cluster: Cluster, assumptions: SyncAssumptions, work: SyncWork
) -> SyncAccount:
    """On a processor: digest and copy of float32 parameters, at the measured rate. Nothing crosses a link."""
    machine = cluster.accelerator
    total = 4.0 * (lora_params(model, work.lora_rank) if work.lora_rank else model.computed_params)
    rate = machine.publish_bytes_per_s or machine.hbm_bytes_per_s
    return SyncAccount(
        total_bytes=total,
        bytes_per_sender=total,
        bytes_per_receiver=total,
        num_tensors=num_tensors(model, splits_experts=work.splits_experts),
        peak_bytes=4.0 * model.embedding_params,
        seconds=machine.publish_base_s + total / rate,
        error_frac=assumptions.error_frac["in_process"],
        slowest="load",
    )


def _crosses_nodes(cluster: Cluster, work: SyncWork) -> bool:
    if work.shares_devices or work.method == "in_process":
        devices = max(work.num_train_gpus, work.num_rollout_gpus)
    else:
        devices = work.num_train_gpus + work.num_rollout_gpus
    return devices > cluster.accelerator.scale_up_gpus


def _rates(
    cluster: Cluster, assumptions: SyncAssumptions, work: SyncWork, total: float, *, crosses: bool
) -> dict[str, float]:
    """Bytes of the full weights per second through each stage."""
    accelerator = cluster.accelerator
    link = cluster.nic_bytes_per_s if crosses else accelerator.scale_up_bytes_per_s
    gather = min(assumptions.gather_bytes_per_s, 0.7 * link * max(work.num_train_gpus - 1, 1))
    load = assumptions.load_bytes_per_s * work.replica_gpus
    if work.method == "in_process":
        return {"gather": gather, "load": load}
    if work.method == "broadcast":
        return {"gather": gather, "transfer": min(assumptions.stream_bytes_per_s, 0.7 * link), "load": load}
    if work.method == "disk":
        write = assumptions.disk_bytes_per_s
        return {"gather": gather, "transfer": write, "load": load}
    receiver = assumptions.receiver_cross_bytes_per_s if crosses else assumptions.receiver_bytes_per_s
    receiver = min(receiver, 0.7 * link)
    senders = math.inf if crosses else 0.7 * link * work.num_train_gpus
    return {"transfer": min(receiver * work.replica_gpus, senders), "load": max(load, receiver)}


def _delta(assumptions: SyncAssumptions, work: SyncWork, total: float, tensors: int) -> SyncAccount:
    """Scan the local shards against the base version, send positions and values, write them into the engine.

    A changed number costs its position and value: 6 bytes for bfloat16.
    """
    local = total / work.num_train_gpus
    sent = total / DTYPE_BYTES[work.weight_dtype] * work.changed_frac * (4 + DTYPE_BYTES[work.weight_dtype])
    scan_s = local / assumptions.delta_scan_bytes_per_s
    if work.state_is_offloaded:
        scan_s += local / assumptions.offloaded_bytes_per_s
    apply_s = total / work.replica_gpus / assumptions.delta_apply_bytes_per_s
    send_s = sent / assumptions.stream_bytes_per_s
    parts = {"gather": scan_s, "transfer": send_s, "load": apply_s}
    return SyncAccount(
        total_bytes=sent,
        bytes_per_sender=sent / work.num_train_gpus,
        bytes_per_receiver=sent,
        num_tensors=tensors,
        peak_bytes=min(work.max_buckets * work.bucket_bytes, 2 * sent) + local,
        seconds=assumptions.delta_base_s + scan_s + send_s + apply_s,
        error_frac=assumptions.error_frac["delta"],
        slowest=max(parts, key=lambda stage: parts[stage]),
    )


def best_sync_every(publish_s: float, update_s: float, *, max_staleness_steps: int) -> int:
    """Updates between publications so that publishing takes at most a tenth of the time, within the bound.

    T_sync / (k T_update) <= 0.1, k at most the staleness bound (at least 1).
    """
    wanted = math.ceil(publish_s / (0.1 * update_s)) if update_s > 0 else 1
    return max(1, min(wanted, max(max_staleness_steps, 1)))
