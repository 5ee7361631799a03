"""What the driver, the ranks of the trainer and the replicas tell each other when they are made."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rollbook.config.environment import environment
from rollbook.config.run_config import RunConfig
from rollbook.modeling.load import LoadedModel, ModelFacts
from rollbook.sync.broadcast import WATCHDOG, BroadcastGroup
from rollbook.weights import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaAddress:
    """Where a replica takes publications."""

    replica_id: int
    host: str
    port: int
    token: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a replica must know of the trainer's model before it starts its engine."""

    dtype: str
    eos_ids: tuple[int, ...]
    base_digest: str
    config_json: str
    """As in `RemoteFacts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFacts:
    """What the driver must know of a model that lives elsewhere."""

    facts: ModelFacts
    source: str
    dtype: torch.dtype
    hf_config: dict[str, Any]
    specs: tuple[TensorSpec, ...]
    num_trained_params: int
    base_digest: str
    """Of what adapters stand on, where they are published alone; else empty."""
    config_json: str
    """What an engine that starts from a config alone reads; empty where none does."""


def config_json(model: LoadedModel, dtype: str) -> str:
    """The text of a config.json for engines that get their weights by publications."""
    with tempfile.TemporaryDirectory(prefix="rollbook-config-") as folder:
        model.save_config(Path(folder), dtype)
        return (Path(folder) / "config.json").read_text(encoding="utf-8")


def join_broadcast(config: RunConfig, meeting: str, *, rank: int) -> BroadcastGroup:
    """The group of publications: trainer rank 0, and every replica behind it. Between GPUs by NCCL, else by gloo.

    Args:
        meeting: path of a file, or host:port of rank 0.
    """
    devices = (config.model.device, config.rollout.device)
    is_nccl = all(name.startswith("cuda") for name in devices) and config.run.schedule == "separate_async"
    host, _, port = meeting.rpartition(":")
    with environment(**WATCHDOG):  # a replica's death must not end the trainer's process
        return BroadcastGroup.create(
            "nccl" if is_nccl else "gloo",
            rank=rank,
            size=config.rollout.num_replicas + 1,
            device=torch.device(devices[min(rank, 1)]) if is_nccl else torch.device("cpu"),
            deadline_s=config.cluster.start_deadline_s,
            **({"file": meeting} if meeting.startswith("/") else {"host": host, "port": int(port)}),
        )
