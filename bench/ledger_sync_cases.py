"""Adapters of published weight publications."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ledger_words import (
    Case,
    NotCovered,
    accelerator_of,
    as_published,
    count_of,
    dtype_of,
    find_model,
    framework_of,
    middle,
    within,
)
from rollbook.ledger.account import Range
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Accelerator, Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.step import (
    Layouts,
    publication_work,
    smallest_rollout_tp,
)
from rollbook.ledger.sync import SyncMethod, SyncWork, sync_account

TCP_BYTES_PER_S = 6e9
"""Of a stream over sockets whose rate is not printed: 3 to 10 GB/s between nodes of clouds."""

_SYNC_METRICS: tuple[tuple[str, SyncMethod], ...] = (
    ("nccl_full_broadcast_s", "broadcast"),
    ("delta_sharded_s", "delta"),
    ("update_broadcast_s", "sharded"),
    ("update_p2p_s", "sharded"),
    ("async_nixl_s", "sharded"),
    ("async_nccl_s", "sharded"),
    ("sync_nixl_s", "sharded"),
    ("sync_nccl_s", "sharded"),
)


_SYNC_SECONDS = (
    "weight_sync_s", "weight_update_s", "update_weights_s", "update_s", "sync_s", "refit_s", "broadcast_s",
    "transfer_s",
)  # fmt: skip
"""Names of a publication's seconds that do not say by which method."""


def _sync_method(config: dict[str, Any]) -> SyncMethod:
    """By the words of a case whose sides are apart: slices or files where it says so, else a stream."""
    text = " ".join(
        str(config.get(key, "")) for key in ("framework", "backend", "placement", "note", "method")
    )
    text = re.sub(r"gpudirect rdma", "", text, flags=re.IGNORECASE)  # how a stream leaves the device
    if re.search(r"rdma|p2p|nixl|mooncake|reshard", text, re.IGNORECASE):
        return "sharded"
    if re.search(r"\bipc\b", text, re.IGNORECASE):
        return "ipc"
    if re.search(r"delta|sparse|lora|adapter", text, re.IGNORECASE):
        raise NotCovered("parts of the weights, and how large they are was not published")
    return (
        "disk" if re.search(r"disk|file ?system|nfs|lustre|\bfiles?\b", text, re.IGNORECASE) else "broadcast"
    )


def sync_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Seconds of one publication, by method."""
    config, measured = case["config"], case["measured"]
    assumptions = as_published(case, assumptions)
    model = find_model(config["model"])
    device = " ".join(str(config.get(key, "")) for key in ("gpu", "hardware", "device", "nodes"))
    if "910" in device or "ascend" in device.lower():
        raise NotCovered("Ascend links and rates are not in the table")
    try:
        accelerator = accelerator_of(device)
    except NotCovered:
        accelerator = load_accelerator("H100")  # the rates below depend little on the device
    if "fsdp1" in str(config.get("placement", "")).lower():
        raise NotCovered("FSDP1's flat parameters: the ledger maps shards of tensors, FSDP2 or Megatron")
    work = published_work(config, model, accelerator, assumptions, device, framework_of(case))
    cluster = Cluster(
        accelerator=accelerator,
        num_gpus=work.num_train_gpus + work.num_rollout_gpus,
        nic_bytes_per_s=_network_bytes_per_s(config),
    )
    nic_unknown = any("differs between rows" in str(text) for text in case.get("missing") or ())
    for key, method in _SYNC_METRICS:
        if key not in measured:
            continue
        if (
            method == "delta"
            and "sparse delta over" in str(config.get("framework", ""))
            and "changed_fraction" not in config
        ):
            continue  # it gathers whole tensors first, and what changed was not published
        if method == "broadcast" and nic_unknown and cluster.num_nodes > 1:
            continue
        # miles writes slices first and lets the engine quantise them all at once.
        slow = work.quantizes_tensors and not (method == "sharded" and framework_of(case) == "slime")
        way = replace(work, method=method, quantizes_tensors=slow)
        account = sync_account(model, cluster, assumptions.sync, way)
        yield key, middle(measured[key]), within(account.seconds, account.error_frac)
    if not any(key in measured for key, _ in _SYNC_METRICS) and (
        _is_counted(config) or not work.shares_devices
    ):
        method = _colocated_method(config) if work.shares_devices else _sync_method(config)
        account = sync_account(model, cluster, assumptions.sync, replace(work, method=method))
        for key in _SYNC_SECONDS:
            if key in measured:
                alone = re.search(
                    r"only the (broadcast|loop)", str(case.get("notes", "")), re.IGNORECASE
                ) or re.search(r"pause and resume .{0,20}not inside", str(case.get("missing", "")))
                seconds = account.seconds - account.fixed_s * (alone is not None)
                yield key, middle(measured[key]), within(seconds, account.error_frac)
                return
    if "time_s" in measured and "receive only" in str(config.get("note", "")):
        account = sync_account(model, cluster, assumptions.sync, replace(work, method="broadcast"))
        seconds = account.total_bytes / assumptions.sync.far_gather_bytes_per_s
        yield "time_s", middle(measured["time_s"]), within(seconds, account.error_frac)


def published_work(
    config: dict[str, Any],
    model: ModelSpec,
    accelerator: Accelerator,
    assumptions: Assumptions,
    device: str,
    framework_name: str,
) -> SyncWork:
    """A case's publication, as a plan would describe one, with what only measurements have."""
    per_node = 8
    placement = " ".join(str(config.get(key, "")) for key in ("placement", "nodes", "device", "hardware"))
    placement += "".join(
        f" {role} {config[key]}"
        for role, key in (("trainer", "train_layout"), ("engine, rollout", "rollout_layout"))
        if key in config
    )
    sides = re.search(r"(\d+)\s*\+\s*(\d+)\s*node", placement)
    counted = _is_counted(config)
    named = re.search(r"(\d+)\s*policy.*?\+\s*(\d+)\s*rollout", placement)
    devices = re.search(r"(\d+)\s*x\s*(?:H|A|B|G|M)", device)
    if counted:
        train, rollout = count_of(config["train_gpus"]), count_of(config["rollout_gpus"])
    elif sides or named:
        train, rollout = (per_node * int(n) for n in (sides or named).groups())  # type: ignore[union-attr]
    elif devices:
        train = rollout = int(devices[1])
    else:
        train = rollout = per_node // 2
    trainer = f"{config.get('framework', '')} " + re.split(r"generation|vLLM|SGLang|engine", placement)[0]
    cluster = Cluster(accelerator=accelerator, num_gpus=train + rollout)
    usual_tp = min(smallest_rollout_tp(model, cluster, assumptions), rollout)
    framework = str(config.get("framework", ""))
    offloads = "verl separate_async" in framework and "offload off" not in placement
    replica = _published_replica(config, placement, device, usual_tp)
    work = publication_work(
        Layouts(
            replica=replica,
            train=_publishing_layout(trainer, placement, model, train),
            sync_method="broadcast",
            changed_frac=float(config.get("changed_fraction", _changed_frac(model))),
            state_is_offloaded=(offloads and "veomni" not in placement) or bool(config.get("param_offload")),
        ),
        replace(assumptions, stack="megatron" if _is_megatron(trainer) else "fsdp"),
        mode="sync" if _is_colocated(config) or not (sides or named or counted) else "separate_sync",
        num_train_gpus=train,
        num_rollout_gpus=rollout,
        lora_rank=int(config.get("lora_rank", 0)) if "only the adapter" in placement else 0,
    )
    return replace(
        work,
        is_apart=(
            _network_bytes_per_s(config) > 0 and train + rollout > count_of(config.get("gpus_per_node", 8))
        )
        or sides is not None
        or re.search(r"(another|other|different) node|\btwo .{0,6}nodes", placement) is not None,
        quantizes_tensors=work.quantizes_tensors and not re.search(r"batched|prequant", framework),
        # verl merges adapters into the base in host memory.
        passes_host=(framework_name == "verl" and _trains_adapters(config, placement))
        or re.search(
            r"through (the )?(host memory|cpu)|via (the )?(host|cpu)|object store", framework, re.IGNORECASE
        )
        is not None,
    )


def _published_replica(config: dict[str, Any], placement: str, device: str, usual_tp: int) -> ReplicaLayout:
    """ "generation TP16", "vLLM TP32" or a lone "TP8" of the engine; a trainer's TP stands before its PP or EP."""
    tp_size = re.search(r"(?:generation|vLLM|SGLang|rollout)[^+]*?(TP|EP)\s*(\d+)", placement) or re.search(
        r"(?:H\d+|A\d+)\s+(TP)(\d+)", device
    )
    ep_size = re.search(r"(?:generation|vLLM|SGLang|rollout|engine).*EP\s*(\d+)", placement)
    engines = placement[ep_size.start() :] if ep_size else ""
    # "DP16 TP1 EP16", or an EP without any TP: every GPU computes attention for its own sequences.
    repeats_dense = ep_size is not None and not re.search(r"TP(?!\s*1\b)", engines)
    return ReplicaLayout(
        tp_size=1 if repeats_dense else int(tp_size[2]) if tp_size else usual_tp,
        ep_size=int(ep_size[1]) if ep_size else 1,
        weight_dtype=dtype_of(str(config.get("rollout_precision", config["model"]))),
    )


def _publishing_layout(trainer: str, placement: str, model: ModelSpec, num_gpus: int) -> TrainLayout:
    """Megatron of one tensor group cuts over a node, and spreads experts over its usual eight, where no degree is
    printed."""
    tp_size, ep_size = (re.search(rf"\b{name}\s*(\d+)", trainer) for name in ("TP", "EP"))
    pp_size = re.search(r"\bPP\s*(\d+)", placement)
    is_spread = model.num_experts and _is_megatron(trainer)
    return TrainLayout(
        tp_size=int(tp_size[1]) if tp_size else 8 if _is_megatron(trainer) else 1,
        pp_size=int(pp_size[1]) if pp_size else 1,
        ep_size=int(ep_size[1]) if ep_size else math.gcd(num_gpus, 8) if is_spread else 1,
    )


def _is_megatron(trainer: str) -> bool:
    """Where neither is named, a tensor group is Megatron's."""
    if re.search(r"fsdp|hsdp|dtensor|zero", trainer, re.IGNORECASE):
        return False
    return re.search(r"megatron|slime|miles|nemo|\bTP\s*\d", trainer, re.IGNORECASE) is not None


def _trains_adapters(config: dict[str, Any], placement: str) -> bool:
    """LoRA whose adapters are merged: where they alone are sent, the case says so."""
    text = f"{config.get('framework', '')} {placement}"
    return ("lora_rank" in config or "lora" in text.lower()) and "only the adapter" not in text


def _is_counted(config: dict[str, Any]) -> bool:
    return "train_gpus" in config and "rollout_gpus" in config


def _is_colocated(config: dict[str, Any]) -> bool:
    text = " ".join(str(config.get(key, "")) for key in ("framework", "placement", "mode", "backend")).lower()
    return re.search(r"(?<!non-)(?<!not )coloc", text) is not None


def _colocated_method(config: dict[str, Any]) -> SyncMethod:
    """Engines in the trainer's own processes, or processes of their own that are given handles."""
    text = " ".join(str(config.get(key, "")) for key in ("framework", "placement", "note")).lower()
    return (
        "in_process"
        if re.search(r"same process|in[- ]process|hybrid engine|sharding manager", text)
        else "ipc"
    )


def _network_bytes_per_s(config: dict[str, Any]) -> float:
    """Of one GPU over TCP, at the rate that the case prints, else at a usual one; 0: over the node's ports."""
    text = " ".join(str(config.get(key, "")) for key in ("network", "framework", "backend"))
    if not re.search(r"TCP|ethernet|socket", text, re.IGNORECASE):
        return 0.0
    found = re.search(r"(\d+(?:\.\d+)?)\s*G(?:bps|b/s|bit/s|bit)", text)
    return float(found[1]) * 1e9 / 8 if found else TCP_BYTES_PER_S


def _changed_frac(model: ModelSpec) -> float:
    """As the sources of the deltas say: 1 to 3 % of dense models, 0.8 to 1.1 % of the 30B experts (verl pull
    request 6974), 0.02 to 0.05 % of the 235B ones in their first steps."""
    if not model.num_experts:
        return 0.02
    return 0.0005 if model.params > 100e9 else 0.01
