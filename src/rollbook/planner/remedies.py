"""What would make a plan fit that fits nowhere: single changes of the question, the least disruptive first."""

from __future__ import annotations

import math
from dataclasses import replace

from rollbook.errors import PlanError
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import host_bytes_per_gpu
from rollbook.planner.offload import Offload
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.splits import node_unit

MOST_GPUS = 4096
_STATE: dict[Offload, str] = {"optimizer": "the optimizer state", "weights": "all of the training state"}
_MOST_LOOKED_AT = 32


def smallest_changes(request: PlanRequest) -> list[str]:
    """Single changes after which something fits, the least disruptive first."""
    changes = []
    if request.rollout_tp and _fits(replace(request, rollout_tp=0)):
        changes.append("leave --rollout-tp to the planner")
    chunk = request.workload.prefill_chunk_tokens
    if chunk and _fits(replace(request, workload=replace(request.workload, prefill_chunk_tokens=0))):
        changes.append("give a step a larger budget of tokens, or prefill prompts whole (--prefill-chunk 0)")
    if request.assumptions.method != "paper":
        on_hosts = _least_offload(replace(request, offload="auto")) if request.offload == "none" else None
        if on_hosts:
            changes.append(f"keep {_STATE[on_hosts]} in host memory (--offload auto)")
        if request.offload in ("optimizer", "weights") and _fits(replace(request, offload="auto")):
            changes.append("leave the place of the training state to the planner (--offload auto)")
        if request.idle_state != "auto" and _fits(replace(request, idle_state="auto")):
            changes.append(
                "leave to the planner where the state is while engines generate (--idle-state auto)"
            )
        if request.sleep_level is not None and _fits(replace(request, sleep_level=None)):
            changes.append("leave to the planner whether engines sleep (--sleep-level auto)")
        if enough_gb := _enough_host_gb(request):
            changes.append(f"give training state more host memory (--host-gb-per-gpu {enough_gb})")
        if request.rollout_dtype == "bfloat16" and _fits(replace(request, rollout_dtype="auto")):
            changes.append("let the engines hold float8 weights (--rollout-dtype auto)")
    enough = _smallest_cluster(request)
    if enough:
        offload = _least_offload(on_gpus(request, enough)) if request.offload == "auto" else None
        where = f", with {_STATE[offload]} in host memory" if offload and offload != "none" else ""
        changes.append(
            f"use {counted(enough, 'GPU')} instead of {request.cluster.num_gpus}{where} (--num-gpus {enough})"
        )
    work = request.workload
    for factor in (2, 4, 8):
        longest = work.max_response_tokens // factor
        if longest <= work.response_tokens:
            break
        if _fits(replace(request, workload=replace(work, max_response_tokens=longest))):
            changes.append(f"limit responses to {longest} tokens (--max-response-tokens {longest})")
            break
    return changes


def _fits(request: PlanRequest) -> bool:
    return _least_offload(request) is not None


def _least_offload(request: PlanRequest) -> Offload | None:
    """What has to be in host memory for something to fit, as little as possible; None where nothing fits."""
    try:
        request.check()
    except PlanError:
        return None
    found = next(Search(request, is_brief=True).fitting(), None)
    if found is None and may_offload_all(request):
        return _least_offload(replace(request, offload="optimizer"))
    return found.train.offload if found else None


def _enough_host_gb(request: PlanRequest) -> int | None:
    """Of a GPU, with which something fits; None where no host memory is enough."""
    roomy = replace(request, host_bytes_per_gpu=math.inf)
    needed = [host_bytes_per_gpu(request, c) for c in Search(roomy, is_brief=True).run() if c.fits]
    return math.ceil(min(needed) / 1e9) if needed else None


def may_offload_all(request: PlanRequest) -> bool:
    """The paper account asks for the optimizer state in host memory only where no topology fits without."""
    return request.offload == "auto" and request.assumptions.method == "paper"


def _smallest_cluster(request: PlanRequest) -> int | None:
    unit = node_unit(request)
    size = request.cluster.num_gpus
    while size < MOST_GPUS:
        size *= 2
        if unit == 1 and size > request.cluster.gpus_per_node:
            unit = request.cluster.gpus_per_node
            size = -(-size // unit) * unit
        if _fits(on_gpus(request, size)):
            low, high = size // 2 // unit, size // unit
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if _fits(on_gpus(request, middle * unit)) else (middle, high)
            # Degrees divide some counts and not others, so a smaller one may fit that was passed over.
            least = request.cluster.num_gpus // unit + 1
            looked_at = range(least, high, max((high - least) // _MOST_LOOKED_AT, 1))
            return unit * next((n for n in looked_at if _fits(on_gpus(request, n * unit))), high)
    return None


def on_gpus(request: PlanRequest, num_gpus: int) -> PlanRequest:
    """The same question on so many GPUs."""
    return replace(request, cluster=replace(request.cluster, num_gpus=num_gpus), split=None)
