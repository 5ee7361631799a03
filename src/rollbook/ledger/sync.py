"""Weight publication: which bytes cross which link, and how long it takes.

Buckets flow through gather (trainer shards to one full tensor), transfer and load (into the engine's layout).
The three overlap, so the slowest sets the pace and the first bucket pays all three:

    seconds = base + bytes / slowest rate + one bucket through the others + per tensor x tensors

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
"""Of a link's rate that gathers and slices reach: chosen on the open cases (bench/ledger_results.md)."""
_BROADCAST_FRAC = 0.75
"""The same where one sender fills a chain whose members only pass on."""


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
    shares_devices: bool = False
    """Trainer and engines live on the same GPUs."""
    quantizes_tensors: bool = False
    """The trainer holds bfloat16, and each tensor is quantised on its own on its way into the engine."""
    pp_size: int = 1
    """Pipeline stages of the trainer: each sends what it holds, at the same time."""
    ep_size: int = 1
    """Trainer ranks among which experts are spread: one gather brings a matrix of each."""
    is_sharded: bool = True
    """A trainer rank holds parts of the tensors beside the experts; False: whole ones, which nothing gathers."""
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
    """Each stage alone, all bytes; the pipeline takes the slowest, and one bucket through the others."""
    fixed_s: float
    """What no byte explains: opening and committing, a round trip per tensor, weights fetched from the host."""
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


def _num_gathers(model: ModelSpec, work: SyncWork) -> float:
    """Calls in which a trainer's ranks make whole tensors, all stages together."""
    if work.num_train_gpus == 1:
        return 0.0
    experts = num_tensors(model, splits_experts=True) - num_tensors(model, splits_experts=False)
    others = num_tensors(model, splits_experts=False) if work.is_sharded else 0
    return others + experts * work.splits_experts / work.ep_size


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
    per_sender = total / work.num_train_gpus
    per_receiver = total / work.replica_gpus
    tensors = num_tensors(model, splits_experts=work.splits_experts)
    error_frac = assumptions.error_frac[work.method]
    error_frac *= scale_factor(work.num_train_gpus + work.num_rollout_gpus, assumptions.most_gpus)
    if work.method == "delta":
        numbers = lora_params(model, work.lora_rank) if work.lora_rank else model.computed_params
        sent = work.changed_frac * (numbers * _POSITION_BYTES + total)
        return _delta(cluster, assumptions, work, total, sent, tensors, error_frac, crosses=crosses)
    num_gathers = _num_gathers(model, work)
    rates = _rates(cluster, assumptions, work, total, crosses=crosses, is_gathered=num_gathers > 0)
    slowest = min(rates, key=lambda stage: rates[stage])
    bucket = min(work.bucket_bytes, total)
    others = sum(bucket / rate for stage, rate in rates.items() if stage != slowest)
    fixed_s = assumptions.base_s if work.method == "broadcast" and crosses else assumptions.near_base_s
    if work.method == "in_process":
        fixed_s = assumptions.process_base_s
    elif work.method == "ipc" and work.num_train_gpus > 1:
        fixed_s = assumptions.handle_base_s
    elif work.method == "sharded":
        fixed_s = assumptions.slices_base_s
    if work.method in ("broadcast", "in_process", "ipc"):
        nodes = max(work.num_train_gpus / cluster.gpus_per_node, 1.0)
        tensor_s = assumptions.per_tensor_s if work.method == "broadcast" else assumptions.handle_tensor_s
        if work.num_train_gpus == 1:
            tensor_s = 0.0  # nothing is gathered
        named_s = tensors * tensor_s + num_gathers * assumptions.gather_call_s
        # Engines on the same devices are handed the tensors of all stages one after the other.
        stages = work.pp_size if work.method == "broadcast" else 1
        # A gather between nodes is a tree: each doubling adds a hop.
        fixed_s += named_s / stages * (1 + math.log2(nodes))
    if work.quantizes_tensors:
        # Slices are only scaled and shuffled where they arrive, a stream is quantised where it starts as well.
        fixed_s += tensors * assumptions.quantize_tensor_s * (0.5 if work.method == "sharded" else 1.0)
    if work.state_is_offloaded:
        fixed_s += per_sender / assumptions.host_copy_bytes_per_s
    return SyncAccount(
        total_bytes=total,
        bytes_per_sender=per_sender,
        bytes_per_receiver=per_receiver,
        num_tensors=tensors,
        seconds=fixed_s + total / rates[slowest] + others,
        error_frac=error_frac,
        slowest=slowest,
        stages_s={stage: total / rate for stage, rate in rates.items()},
        fixed_s=fixed_s,
        num_buckets=math.ceil(total / bucket),
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
    return devices > cluster.accelerator.scale_up_gpus


def _rates(
    cluster: Cluster,
    assumptions: SyncAssumptions,
    work: SyncWork,
    total: float,
    *,
    crosses: bool,
    is_gathered: bool,
) -> dict[str, float]:
    """Bytes of the full weights per second through each stage. `is_gathered`: no trainer GPU holds whole tensors."""
    accelerator = cluster.accelerator
    link = cluster.nic_bytes_per_s if crosses else accelerator.scale_up_bytes_per_s
    gathered = assumptions.gather_cross_bytes_per_s if crosses else assumptions.gather_bytes_per_s
    gather = min(gathered, _LINK_FRAC * link * max(work.num_train_gpus - 1, 1))
    load = assumptions.load_bytes_per_s * work.replica_gpus
    if work.method in ("in_process", "ipc"):
        return {"gather": gather, "load": load} if is_gathered else {"load": load}
    if work.method == "broadcast":
        assembly = (
            work.pp_size * _assembly(cluster, assumptions, work, crosses=crosses) if is_gathered else math.inf
        )
        return {"gather": assembly, "transfer": _BROADCAST_FRAC * link, "load": load}
    if work.method == "disk":
        write = assumptions.disk_bytes_per_s
        return {"gather": gather, "transfer": write, "load": load}
    receiver = assumptions.receiver_cross_bytes_per_s if crosses else assumptions.receiver_bytes_per_s
    receiver = min(receiver, _LINK_FRAC * link)
    senders = math.inf if crosses else _LINK_FRAC * link * work.num_train_gpus
    staged = work.pp_size * assumptions.shard_gather_bytes_per_s
    return {
        # The trainer holds bfloat16, whatever the engine is sent.
        "gather": staged * DTYPE_BYTES[work.weight_dtype] / DTYPE_BYTES["bfloat16"],
        "transfer": min(receiver * work.replica_gpus, senders),
        "load": max(load, receiver),
    }


def _assembly(cluster: Cluster, assumptions: SyncAssumptions, work: SyncWork, *, crosses: bool) -> float:
    """Bytes a second at which one trainer rank makes full tensors, which the stream waits for.

    What other nodes hold of its pipeline stage comes over that rank's own port, in some frameworks as the float32
    master weights that it is kept in. (Of the 24 s of a 72B model's broadcast its sender waits 0.5 to 1.8 s for the
    wire: verl issue 7060.)
    """
    nodes = max(work.num_train_gpus / work.pp_size / cluster.accelerator.scale_up_gpus, 1.0)
    far = (1 - 1 / nodes) * assumptions.far_bytes_per_param / DTYPE_BYTES["bfloat16"]
    packed = assumptions.assemble_cross_bytes_per_s if crosses else assumptions.assemble_bytes_per_s
    return 1 / (1 / packed + far / (_LINK_FRAC * cluster.nic_bytes_per_s))


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
        compare_s += local / assumptions.host_copy_bytes_per_s
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
