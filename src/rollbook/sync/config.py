"""How trained weights reach the engines, and how long each part of it may take."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollbook.section import Section

MIB = 1 << 20


class SyncConfig(Section):
    """The `[sync]` table. Digests are always on: a version is proven, not assumed."""

    every_steps: int = Field(1, ge=1)
    """Steps between publications. More than 1 needs a staleness bound that allows it."""
    transport: Literal["inproc", "shm", "ipc", "broadcast", "disk"] = "inproc"
    """"inproc": engine and trainer in one process, tensors by reference; "shm": shared memory of one host; "ipc": CUDA
    memory of one host; "broadcast": NCCL or gloo to other devices and hosts; "disk": safetensors on a shared disk."""
    bucket_bytes: int = Field(256 * MIB, ge=4096)
    """Bytes of one transfer."""
    max_buckets: int = Field(2, ge=2, le=8)
    """Buckets that exist at a time: with 2, one is filled while the other travels. Over a link that carries a bucket
    faster than a message and its answer take (NVLink), 3 keep it busy."""
    staging: Literal["staged", "direct"] = "staged"
    """"staged": new weights wait beside the live ones until all are proven, so that a fault changes nothing; costs one
    copy of the weights during the publication. "direct": written in place while the engine is paused; a fault takes
    the replica out of service until it is re-synced."""
    delta: bool = False
    """Send only what changed against the last acknowledged version; costs the trainer one copy of the weights."""
    quantize: Literal["none", "int8", "fp8_block"] = "none"
    """Send the layers' matrices as codes and scales, half the bytes of bfloat16: the engines then sample from the
    rounded weights, and the logprob gap shows by how much they differ. "int8": one scale a row; "fp8_block": one for
    128 x 128. The engines keep the codes too, about a byte a parameter."""
    commit_order: Literal["together", "rolling"] = "together"
    """Which replicas swap at the same time: all, or one after the other, so that at most one stands still. While it
    rolls they differ by one version, every token says which one sampled it, and admission counts on the older."""
    on_replica_failure: Literal["quarantine", "abort"] = "quarantine"
    """When some replicas fail a publication: go on with the others and re-sync the failed ones in full next time, or
    leave every replica at the old version."""
    shm_dir: str = "/dev/shm"
    """Folder for the files of the "shm" transport; it should lie in memory."""
    disk_dir: str = ""
    """Folder for the "disk" transport, the same on trainer and engines."""
    export_deadline_s: float = Field(300.0, gt=0)
    """Longest wait for the trainer to gather one bucket."""
    open_deadline_s: float = Field(60.0, gt=0)
    """Longest wait for a replica to accept a manifest (and to prove its base version)."""
    receive_deadline_s: float = Field(120.0, gt=0)
    """Longest wait for one bucket to arrive at a replica."""
    prove_deadline_s: float = Field(60.0, gt=0)
    """Longest wait for a replica's digests."""
    commit_deadline_s: float = Field(120.0, gt=0)
    """Longest wait for a replica to reach a step boundary, swap, and prove its live weights."""
    abort_deadline_s: float = Field(30.0, gt=0)
    """Longest wait for a replica to drop a publication."""
    probe: bool = True
    """After each commit compare the engine's logprobs on one short prompt with the trainer's."""
    probe_prompt_tokens: int = Field(16, ge=1)
    """Tokens of the probe's prompt."""
    probe_response_tokens: int = Field(8, ge=1)
    """Tokens the probe samples."""
    probe_factor: float = Field(4.0, ge=1.0)
    """The probe fails when its gap exceeds the engine's baseline by this factor (and the floor of the dtype)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.delta and self.transport == "inproc":
            raise ValueError("sync.delta saves nothing within one process: set it to false")
        if self.commit_order == "rolling" and self.staging == "direct":
            raise ValueError(
                "sync.commit_order 'rolling' saves nothing with staging 'direct', which holds every replica for the "
                "whole publication: use staged"
            )
        if self.transport == "disk" and not self.disk_dir:
            raise ValueError(
                "sync.transport is 'disk' and sync.disk_dir is empty; name a folder that trainer and engines share"
            )
        return self
