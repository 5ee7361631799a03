"""The `[cluster]` section: in which processes trainer and engines run."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollbook.section import Section


class ClusterConfig(Section):
    """One process, or Ray actors: one for each rank of the trainer and one for each replica."""

    kind: Literal["inproc", "ray"] = "inproc"
    """"inproc": everything in this process. "ray": trainer ranks and replicas are Ray actors (extra `ray`); weights go
    by `sync.transport`, where "inproc" then means shared memory of the host ("shm")."""
    num_trainer_ranks: int = Field(default=1, ge=1)
    """Processes that divide the trainer's parameters and micro batches among themselves; needs kind = "ray"."""
    address: str = ""
    """Of a running Ray cluster, as `ray.init` takes it; empty: start one on this machine, without dashboard."""
    start_deadline_s: float = Field(default=300.0, gt=0)
    """Longest wait for an actor to start and load its model."""
    call_deadline_s: float = Field(default=120.0, gt=0)
    """Longest wait for an engine's answer to anything but a generation (`rollout.response_deadline_s`)."""
    step_deadline_s: float = Field(default=3600.0, gt=0)
    """Longest wait for one call of the trainer: all updates of a step, a forward over its batch, a publication."""
    max_restarts: int = Field(default=3, ge=0)
    """How often a run goes on from its last checkpoint after a trainer rank was lost, and how often each replica is
    started again."""
