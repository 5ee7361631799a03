"""Checkpoints: bytes, seconds, and what they take from the step."""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.errors import PlanError
from rollbook.ledger.account import Range
from rollbook.ledger.adapters import trained_params
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.workload import Workload

_SAVED_BYTES_PER_PARAM = 14.0
"""bfloat16 weights, float32 master weights and two moments; gradients are not saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAccount:
    """One checkpoint of what trains: policy and critic, or adapters without their frozen base."""

    total_bytes: float
    bytes_per_gpu: float
    stall_s: float
    """Seconds that training stands still."""
    write_s: float
    """Seconds until the files are whole."""
    step_frac: float
    """Stall over the steps between two checkpoints."""
    pinned_bytes_per_node: float
    """Host memory of an asynchronous checkpoint."""
    error_frac: float = 0.0
    """Of its seconds."""

    @property
    def write_range(self) -> Range:
        """`write_s` with its range."""
        return Range.within(self.write_s, self.error_frac)


def checkpoint_account(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    *,
    num_train_gpus: int,
    storage_bytes_per_s: float,
    step_s: float,
    every_steps: int,
    is_async: bool,
    error_frac: float = 0.0,
) -> CheckpointAccount:
    """Bytes and seconds of one checkpoint.

    A synchronous one stalls until the storage has all bytes; an asynchronous one only until the state has been
    copied to pinned host memory.

    Args:
        storage_bytes_per_s: of the whole job together.
        every_steps: steps between two checkpoints.
        error_frac: of its seconds; its bytes are counted.
    Raises:
        PlanError: a rate, step time or interval that is not positive.
    """
    if error_frac < 0:
        raise PlanError(f"error_frac is {error_frac}", "give 0 (no range) or more")
    if storage_bytes_per_s <= 0 or step_s <= 0 or every_steps < 1:
        raise PlanError(
            f"checkpoint with {storage_bytes_per_s} B/s, a step of {step_s} s, every {every_steps} steps",
            "give positive numbers",
        )
    total = _SAVED_BYTES_PER_PARAM * trained_params(model, workload) * workload.num_trained_models
    per_gpu = total / num_train_gpus
    write_s = total / storage_bytes_per_s
    stall_s = write_s
    if is_async:  # the next one waits for the last one's files
        stall_s = per_gpu / cluster.accelerator.host_link_bytes_per_s
        stall_s += max(write_s - every_steps * step_s, 0.0)
    return CheckpointAccount(
        total_bytes=total,
        bytes_per_gpu=per_gpu,
        stall_s=stall_s,
        write_s=write_s,
        step_frac=stall_s / (every_steps * step_s + stall_s),
        pinned_bytes_per_node=per_gpu * min(cluster.gpus_per_node, num_train_gpus) if is_async else 0.0,
        error_frac=error_frac,
    )
