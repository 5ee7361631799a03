"""Weight publication: which bytes cross which link, and how long it takes.

Buckets flow through gather (trainer shards to one full tensor), transfer and load (into the engine's layout). Each
stage takes its bytes at its rate, and its calls: gathers, a name announced, an expert's matrix found among all names.
Most frameworks send a bucket when the one before is in place; two buffers let the stages overlap, so that the slowest
sets the pace and the first bucket pays all three:

    seconds = base + slowest stage + (1 - overlap) x the others

Which bytes of which tensor cross which link, and the memory of a bucket, are `mapping.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rollbook.errors import PlanError
from rollbook.ledger.adapters import lora_params
from rollbook.ledger.assumptions import SyncAssumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import DTYPE_BYTES
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.reliability import scale_factor
from rollbook.ledger.tensors import tensor_kinds

SyncMethod = Literal["in_process", "ipc", "broadcast", "sharded", "disk", "delta"]
SYNC_METHODS: tuple[SyncMethod, ...] = ("in_process", "ipc", "broadcast", "sharded", "disk", "delta")
BUCKET_BYTES = 256 * 2**20
_POSITION_BYTES = 4.0
CHANGED_FRAC = 0.02
"""Of the weights' bits in one step, where nobody measured it: open weight_sync cases give 0.0005 to 0.05."""
_LINK_FRAC = 0.7
"""Of a link's rate that gathers reach: chosen on the open cases (bench/ledger_results.md)."""
_STREAM_FRAC = 0.9
"""The same of a port that a stream or slices fill: 44 of 50 GB/s in 214 and 470 GB of miles' broadcasts, in prime-rl's
82 GB and in NeMo RL's slices to two and to eight GPUs."""
_MOST_SHARD_GPUS = 512
"""Ranks over which torch FSDP cuts a tensor, at most: larger jobs keep copies (hybrid sharding), as nobody published a
gather over more."""
_MASTER_FACTOR = 2.0
"""Bytes of the float32 weights that a trainer fetches from the host over those of the bfloat16 that it sends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncWork:
    """One publication."""

    method: SyncMethod
    num_train_gpus: int
    num_rollout_gpus: int
    replica_gpus: int
    weight_dtype: str = "bfloat16"
    """As the engine holds it; float8 carries a float32 scale for every 128 x 128 block."""
    changed_frac: float = CHANGED_FRAC
    """Share of the weights whose bits changed, for "delta"."""
    lora_rank: int = 0
    """Above 0: only adapters of this rank on all matrices are sent."""
    bucket_bytes: float = BUCKET_BYTES
    splits_experts: bool = False
    """Every expert's matrices are tensors of their own, as Hugging Face checkpoints name them."""
    is_apart: bool = False
    """Trainer and engines have nodes of their own, however few they are."""
    shares_devices: bool = False
    """Trainer and engines live on the same GPUs."""
    quantizes_tensors: bool = False
    """The trainer holds bfloat16, and each tensor is quantised on its own on its way into the engine."""
    pp_size: int = 1
    """Pipeline stages of the trainer: each sends what it holds, at the same time."""
    ep_size: int = 1
    """Trainer ranks among which experts are spread: one gather brings a matrix of each."""
    engine_ep_size: int = 1
    """Engine GPUs among which experts are spread: each loads its own."""
    dense_copies: int = 1
    """Copies within a replica of everything beside the experts, as where attention is data parallel."""
    shard_gpus: int = 0
    """Trainer ranks that hold the parts of one tensor beside the experts; 1: each holds whole ones, 0: all ranks."""
    passes_host: bool = False
    """Weights pass through pageable host memory on their way: a store of shards, or a stream that is staged there."""
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
    seconds: float
    error_frac: float
    slowest: str
    """Stage that sets the pace: "gather", "transfer" or "load"."""
    stages_s: Mapping[str, float]
    """Each stage alone: all bytes and calls."""
    fixed_s: float
    """Before and after the stream: opening and committing, tensors quantised, weights fetched from the host."""
    num_buckets: int


def published_bytes(model: ModelSpec, weight_dtype: str, lora_rank: int = 0) -> float:
    """Bytes of one full set of weights in the engine's dtype, or of LoRA adapters in bfloat16."""
    if lora_rank:
        return 2.0 * lora_params(model, lora_rank)
    return sum(kind.bytes_in(weight_dtype) for kind in tensor_kinds(model))


def num_tensors(model: ModelSpec, *, splits_experts: bool) -> int:
    """Tensors of a checkpoint, the experts of a layer stacked or each apart."""
    stacked = model.num_experts if model.num_experts and not splits_experts else 1
    return sum(kind.num_tensors // (stacked if kind.cut == "experts" else 1) for kind in tensor_kinds(model))


@dataclass(frozen=True, slots=True)
class _Gathers:
    """Calls in which a trainer's ranks make whole tensors, all stages together."""

    calls: float
    hops: float
    """The calls, each as often as its tree between nodes is deep: every doubling of nodes adds a hop."""


def _gathers(model: ModelSpec, cluster: Cluster, work: SyncWork) -> _Gathers:
    shard_gpus = work.shard_gpus or min(max(work.num_train_gpus // work.pp_size, 1), _MOST_SHARD_GPUS)
    others, experts = _num_apart(model, work)
    parts = (
        (others, shard_gpus),
        (experts / work.ep_size, work.ep_size if work.ep_size > 1 else shard_gpus),
    )
    found = [(calls, _depth(cluster, group)) for calls, group in parts if group > 1]
    return _Gathers(sum(calls for calls, _ in found), sum(calls * depth for calls, depth in found))


def _num_apart(model: ModelSpec, work: SyncWork) -> tuple[int, int]:
    """Tensors that each layer has once, and those that it has once more for every further expert."""
    once = num_tensors(model, splits_experts=False)
    return once, num_tensors(model, splits_experts=work.splits_experts) - once


def _depth(cluster: Cluster, num_gpus: int) -> float:
    return 1 + math.log2(max(num_gpus / cluster.gpus_per_node, 1.0))


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
    if cluster.accelerator.is_cpu and work.method in ("in_process", "ipc"):
        return _within_process(model, cluster, assumptions, work)
    crosses = _crosses_nodes(cluster, work)
    dense = total * (1 - model.routed_params / model.computed_params)
    per_receiver = (total + dense * (work.dense_copies - 1)) / work.replica_gpus
    tensors = num_tensors(model, splits_experts=work.splits_experts)
    error_frac = assumptions.error_frac[work.method]
    error_frac *= scale_factor(work.num_train_gpus + work.num_rollout_gpus, assumptions.most_gpus)
    if work.method == "delta":
        numbers = lora_params(model, work.lora_rank) if work.lora_rank else model.computed_params
        sent = work.changed_frac * (numbers * _POSITION_BYTES + total)
        return _delta(cluster, assumptions, work, total, sent, tensors, error_frac, crosses=crosses)
    stages = _stages(model, cluster, assumptions, work, total, per_receiver, crosses=crosses)
    slowest = max(stages, key=lambda stage: stages[stage])
    bucket = min(work.bucket_bytes, total)
    # Beside the slowest, but for the first bucket, which pays all of them.
    waited = max(1 - assumptions.overlap_frac, bucket / total)
    others = sum(
        # While one pipeline stage gathers, another sends.
        seconds / (work.pp_size if stage == "gather" else 1)
        for stage, seconds in stages.items()
        if stage != slowest
    )
    fixed_s = _fixed_s(
        assumptions, work, total, per_receiver, tensors, crosses=crosses, has_experts=model.num_experts > 0
    )
    return SyncAccount(
        total_bytes=total,
        bytes_per_sender=total / work.num_train_gpus,
        bytes_per_receiver=per_receiver,
        num_tensors=tensors,
        seconds=fixed_s + stages[slowest] + waited * others,
        error_frac=error_frac,
        slowest=slowest,
        stages_s=stages,
        fixed_s=fixed_s,
        num_buckets=math.ceil(total / bucket),
    )


def _fixed_s(
    assumptions: SyncAssumptions,
    work: SyncWork,
    total: float,
    per_receiver: float,
    tensors: int,
    *,
    crosses: bool,
    has_experts: bool,
) -> float:
    base_s = {
        "in_process": assumptions.process_base_s,
        "ipc": assumptions.handle_base_s,
        "sharded": assumptions.slices_base_s,
    }
    seconds = base_s.get(work.method, assumptions.base_s if crosses else assumptions.near_base_s)
    if work.method == "sharded" and has_experts:
        seconds += assumptions.slices_experts_s
    if work.quantizes_tensors and not work.lora_rank:
        seconds += tensors * assumptions.quantize_tensor_s
    share = total / work.num_train_gpus
    if work.passes_host:
        staged = share + per_receiver if work.method == "sharded" else total
        seconds += staged / assumptions.host_copy_bytes_per_s
    elif work.state_is_offloaded:
        seconds += _MASTER_FACTOR * share / assumptions.host_copy_bytes_per_s
    return seconds


def _stages(
    model: ModelSpec,
    cluster: Cluster,
    assumptions: SyncAssumptions,
    work: SyncWork,
    total: float,
    per_receiver: float,
    *,
    crosses: bool,
) -> dict[str, float]:
    """Seconds of every stage alone: its bytes at its rate, and its calls."""
    gathers = _gathers(model, cluster, work)
    bytes_of = dict.fromkeys(("gather", "transfer", "load"), total)
    if work.method == "sharded":
        bytes_of["transfer"] = per_receiver * work.replica_gpus
    rates = _rates(cluster, assumptions, work, gathers, crosses=crosses)
    stages = {stage: bytes_of[stage] / rate for stage, rate in rates.items()}
    once, experts = _num_apart(model, work)
    named_s = experts / work.engine_ep_size * assumptions.expert_load_s
    if work.method == "sharded":
        stages["load"] += assumptions.slices_loaded_frac * named_s
    if work.method not in ("broadcast", "in_process", "ipc"):
        return stages
    stages["load"] += named_s
    # Engines on the same devices are handed the tensors of all stages one after the other.
    pp_size = work.pp_size if work.method == "broadcast" else 1
    if gathers.calls:
        stages["gather"] += gathers.hops * assumptions.gather_call_s / pp_size
    if work.method == "ipc":
        stages["load"] += (once + experts) * assumptions.handle_tensor_s
    elif work.method == "broadcast" and work.num_train_gpus > 1:
        # All ranks take part in naming a tensor.
        each_s = assumptions.per_tensor_s * _depth(cluster, work.num_train_gpus)
        stages["transfer"] += (once + experts) * each_s / pp_size
    return stages


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
        seconds=machine.publish_base_s + total / rate,
        error_frac=assumptions.error_frac["in_process"],
        slowest="load",
        stages_s={"load": total / rate},
        fixed_s=machine.publish_base_s,
        num_buckets=1,
    )


def _crosses_nodes(cluster: Cluster, work: SyncWork) -> bool:
    if work.shares_devices or work.method in ("in_process", "ipc"):
        devices = max(work.num_train_gpus, work.num_rollout_gpus)
    else:
        devices = work.num_train_gpus + work.num_rollout_gpus
    return work.is_apart or devices > cluster.accelerator.scale_up_gpus


def _rates(
    cluster: Cluster, assumptions: SyncAssumptions, work: SyncWork, gathers: _Gathers, *, crosses: bool
) -> dict[str, float]:
    """Bytes of the full weights per second through each stage."""
    accelerator = cluster.accelerator
    link = cluster.nic_bytes_per_s if crosses else accelerator.scale_up_bytes_per_s
    gather = min(assumptions.gather_bytes_per_s, _LINK_FRAC * link * max(work.num_train_gpus - 1, 1))
    load = assumptions.load_bytes_per_s * work.replica_gpus
    if work.method in ("in_process", "ipc"):
        return {"gather": gather, "load": load} if gathers.calls else {"load": load}
    if work.method == "broadcast":
        # Its sender waits for whole tensors, not for the wire: 23.5 of the 24 s of a 72B model (verl issue 7060).
        packed = assumptions.far_gather_bytes_per_s if crosses else assumptions.gather_bytes_per_s
        packed = min(packed, _LINK_FRAC * accelerator.scale_up_bytes_per_s)
        gather = work.pp_size * packed if gathers.calls else math.inf
        return {"gather": gather, "transfer": _STREAM_FRAC * link, "load": load}
    if work.method == "disk":
        return {"gather": gather, "transfer": assumptions.disk_bytes_per_s, "load": load}
    port = _STREAM_FRAC * link
    # Every replica is sent its own slices, by the GPUs of one pipeline stage at a time where stages take turns.
    copies = max(work.num_rollout_gpus // work.replica_gpus, 1) if crosses else 1
    turns = work.pp_size if assumptions.stages_in_turn else 1
    senders = (port if crosses else _LINK_FRAC * link) * work.num_train_gpus / copies / turns
    staged = work.pp_size * assumptions.shard_gather_bytes_per_s
    return {
        # The trainer holds bfloat16, whatever the engine is sent.
        "gather": staged * DTYPE_BYTES[work.weight_dtype] / DTYPE_BYTES["bfloat16"],
        "transfer": min(port * work.replica_gpus, senders),
        "load": load,
    }


def _delta(
    cluster: Cluster,
    assumptions: SyncAssumptions,
    work: SyncWork,
    total: float,
    sent: float,
    tensors: int,
    error_frac: float,
    *,
    crosses: bool,
) -> SyncAccount:
    """Compare the local shards with the base version, gather what changed on one rank, send it, write it into place.

    `sent`: a position and a value of every changed number, 6 bytes for bfloat16. They go through one rank and one
    stream, and every tensor is counted, named and written on its own: that is where the seconds are, not in the
    weights, so more trainers or wider replicas make a delta no faster (verl pull requests 6974, 7085; issue 7060).
    """
    local = total / work.num_train_gpus
    # The base version lies in pinned host memory: read for the comparison, and written anew.
    compare_s = 2 * local / cluster.accelerator.host_link_bytes_per_s
    if work.state_is_offloaded:
        compare_s += _MASTER_FACTOR * local / assumptions.host_copy_bytes_per_s
    parts = {"gather": compare_s, "transfer": sent / assumptions.delta_bytes_per_s}
    fixed_s = assumptions.base_s if crosses else assumptions.near_base_s
    fixed_s += tensors * assumptions.delta_tensor_s
    return SyncAccount(
        total_bytes=sent,
        bytes_per_sender=sent / work.num_train_gpus,
        bytes_per_receiver=sent,
        num_tensors=tensors,
        seconds=fixed_s + sum(parts.values()),
        error_frac=error_frac,
        slowest=max(parts, key=lambda stage: parts[stage]),
        stages_s=parts,
        fixed_s=fixed_s,
        num_buckets=max(math.ceil(sent / work.bucket_bytes), 1),
    )


def best_sync_every(publish_s: float, update_s: float, *, max_staleness_steps: int) -> int:
    """Updates between publications so that publishing takes at most a tenth of the time, within the bound.

    T_sync / (k T_update) <= 0.1, k at most the staleness bound (at least 1).
    """
    wanted = math.ceil(publish_s / (0.1 * update_s)) if update_s > 0 else 1
    return max(1, min(wanted, max(max_staleness_steps, 1)))
