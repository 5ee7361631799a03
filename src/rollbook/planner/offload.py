"""What of the training state lives in host memory, and what that costs.

    none        weights, gradients, master weights and moments on the device
    optimizer   master weights and moments in host memory; at each update they cross the host link, both ways
    weights     all of it in host memory (FSDP2's CPU offload): besides, each pass fetches its shards for every micro
                batch, each backward returns its gradients, and a publication begins with a fetch

Optimizer state crosses as a hand-over moves it, at the same measured rate. Shards are fetched while the layers before
them compute, so only what takes longer than computing shows.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from rollbook.ledger.account import TrainSide
from rollbook.ledger.adapters import trained_params
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.layout import TrainLayout
from rollbook.ledger.quantity import format_bytes
from rollbook.observe.numbers import counted
from rollbook.planner.request import PlanRequest

Offload = Literal["none", "optimizer", "weights"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "weights")

HELD: dict[Offload, str] = {
    "none": "",
    "optimizer": "master weights and moments",
    "weights": "weights, gradients, master weights and moments",
}
"""In words, what is in host memory."""
IN_SHORT: dict[Offload, str] = {
    "none": "",
    "optimizer": ", optimizer on hosts",
    "weights": ", state on hosts",
}
"""Behind a topology's mode, in a table."""
_HOST_BYTES_PER_PARAM: dict[Offload, float] = {"none": 0.0, "optimizer": 12.0, "weights": 16.0}
"""Master weights and two moments in float32; weights and gradients in bfloat16."""
_NOTHING = 1e-15
"""Bytes of a parameter on the device: what assumptions take for none, and less than a byte of any model. Gathered
layers are counted apart."""
_ERROR_FACTOR = 1.5
"""On the range of training: no published measurement has its state in host memory."""


def offloads_of(request: PlanRequest) -> tuple[Offload, ...]:
    """Those worth asking about, what stays on the device first."""
    if request.offload != "auto":
        return (request.offload,)
    stack = request.assumptions.stacks.get(request.assumptions.stack)
    if request.assumptions.method == "paper" or request.cluster.accelerator.is_cpu or stack is None:
        return ("none",)
    # Only a trainer that shards its weights, and trains them all, fetches them layer by layer.
    fetches = stack.gather_passes > 0 and not request.workload.lora_rank
    return OFFLOADS if fetches else ("none", "optimizer")


def on_device(assumptions: Assumptions, offload: Offload) -> Assumptions:
    """With the bytes of a trained parameter that stay on the device."""
    if offload == "none":
        return assumptions
    left = assumptions.train_state_bytes_per_param - _HOST_BYTES_PER_PARAM[offload]
    least = assumptions.weight_bytes_per_param if offload == "optimizer" else _NOTHING
    return replace(assumptions, train_state_bytes_per_param=max(left, least))


def keeps_state(assumptions: Assumptions, stack: str, offload: Offload) -> bool:
    """Whether a trainer made of `stack` can have its state there: only one that shards its weights fetches them."""
    return (
        offload != "weights" or stack not in assumptions.stacks or assumptions.stacks[stack].gather_passes > 0
    )


def host_state_bytes(request: PlanRequest, offload: Offload) -> float:
    """Of everything that trains, what is kept on the hosts."""
    work = request.workload
    return _HOST_BYTES_PER_PARAM[offload] * work.num_trained_models * trained_params(request.model, work)


def offloaded_side(request: PlanRequest, side: TrainSide, layout: TrainLayout, offload: Offload) -> TrainSide:
    """`side`, computed with `on_device`'s assumptions, with what the host link takes of its seconds."""
    if offload == "none":
        return side
    work, num_gpus = request.workload, side.num_gpus
    accelerator, switch = request.cluster.accelerator, request.assumptions.switch
    trained = work.num_trained_models * trained_params(request.model, work) / num_gpus
    updates = work.num_epochs * work.num_mini_batches
    moved = 2 * _HOST_BYTES_PER_PARAM["optimizer"] * trained
    train_s = side.train_s + updates * moved / min(
        switch.state_bytes_per_s, accelerator.host_link_bytes_per_s
    )
    forward_s = side.forward_s
    if offload == "weights":
        fetch_s = request.assumptions.weight_bytes_per_param * trained / accelerator.host_link_bytes_per_s
        per_update = _micro_batches(request, layout, num_gpus)
        # Forward and backward fetch, and gradients go back.
        train_s += max(3 * fetch_s * per_update * updates - side.train_s, 0.0)
        forwards = int(work.uses_reference) + int(work.uses_proximal) + int(work.algorithm == "ppo")
        passes = forwards * per_update * work.num_mini_batches
        forward_s = max(forward_s, passes * fetch_s)
    held = HELD[offload]
    why_not = tuple(f"{why}, with {held} in host memory" for why in side.why_not)
    needed, room = host_state_bytes(request, offload) / num_gpus, request.host_bytes_per_gpu
    if needed > room:
        enough = (
            f": it takes about {counted(math.ceil(num_gpus * needed / room), 'training GPU')}" if room else ""
        )
        why_not += (
            f"{held} take {format_bytes(needed)} of host memory a GPU of {format_bytes(room)} (--host-gb-per-gpu)"
            f"{enough}",
        )
    note = f"no published measurement of training with {held} in host memory: a range {_ERROR_FACTOR:g} times as wide"
    return replace(
        side,
        train_s=train_s,
        forward_s=forward_s,
        mfu_frac=side.mfu_frac * side.train_s / train_s,
        error_frac=_ERROR_FACTOR * side.error_frac,
        why_not=why_not,
        notes=(*side.notes, note),
    )


def _micro_batches(request: PlanRequest, layout: TrainLayout, num_gpus: int) -> int:
    """Of one update, one after the other on a GPU."""
    work = request.workload
    tokens = work.trained_tokens / work.num_mini_batches / (num_gpus / layout.model_parallel_size)
    return max(math.ceil(tokens / max(request.assumptions.micro_batch_tokens, work.sequence_tokens)), 1)
