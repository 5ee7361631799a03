"""How the trained weights reach the engines, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollbook.ledger.paper import paper_sync_s
from rollbook.ledger.step import is_colocated
from rollbook.ledger.sync import SyncAccount, SyncMethod, SyncWork, best_sync_every, sync_account
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Candidate
from rollbook.planner.words import format_bytes, percent, seconds

MAX_BUCKETS = 2
"""Written into the config as `sync.max_buckets`: one is filled while the other travels."""
_METHOD_TITLES: dict[SyncMethod, str] = {
    "in_process": "CUDA IPC on the shared devices",
    "broadcast": "NCCL broadcast in buckets",
    "sharded": "point to point between shards",
    "disk": "safetensors on a shared disk",
    "delta": "bitwise difference to the last version",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """The chosen method, with every method's seconds."""

    method: SyncMethod
    account: SyncAccount
    seconds: float
    sync_every: int
    """Updates between publications."""
    options_s: dict[str, float]
    because: str

    @property
    def title(self) -> str:
        return _METHOD_TITLES[self.method]

    def as_json(self) -> dict[str, object]:
        return {
            "method": self.method,
            "seconds": self.seconds,
            "bytes": self.account.total_bytes,
            "bytes_per_sender": self.account.bytes_per_sender,
            "bytes_per_receiver": self.account.bytes_per_receiver,
            "num_tensors": self.account.num_tensors,
            "bucket_peak_bytes": self.account.peak_bytes,
            "slowest": self.account.slowest,
            "sync_every": self.sync_every,
            "options_s": dict(self.options_s),
            "because": self.because,
        }


def _title(request: PlanRequest, method: SyncMethod) -> str:
    if method == "in_process" and request.cluster.accelerator.is_cpu:
        return "copy within the process"
    return _METHOD_TITLES[method]


def choose_publication(request: PlanRequest, chosen: Candidate) -> Publication:
    """The method the search settled on, beside what the others would take."""
    colocated = is_colocated(chosen.mode)
    work = SyncWork(
        method="in_process",
        num_train_gpus=chosen.account.train.num_gpus,
        num_rollout_gpus=chosen.account.rollout.num_gpus,
        replica_gpus=chosen.rollout_layout.num_gpus,
        weight_dtype=chosen.rollout_layout.weight_dtype,
        max_buckets=MAX_BUCKETS,
        lora_rank=request.workload.lora_rank if request.workload.publishes_adapters else 0,
    )
    methods: tuple[SyncMethod, ...] = ("in_process",) if colocated else ("broadcast", "delta", "disk")
    accounts = {
        m: sync_account(request.model, request.cluster, request.assumptions.sync, replace(work, method=m))
        for m in methods
    }
    method, plain = chosen.sync_method, methods[0]
    options_s: dict[str, float] = {m: a.seconds for m, a in accounts.items()}
    if request.assumptions.method == "paper":
        options_s = {plain: paper_sync_s(request.model, request.assumptions)}
    method_s = options_s[method]
    update_s = chosen.step_s / request.workload.num_mini_batches
    every = 1
    if chosen.mode == "separate_async":
        every = best_sync_every(method_s, update_s, max_staleness_steps=request.max_staleness_steps)
        every = min(every, request.workload.num_mini_batches)
    because = (
        f"{format_bytes(accounts[method].total_bytes)} by {_title(request, method)} take {seconds(method_s)}, "
        f"{percent(method_s / chosen.step_s)} of the step"
    )
    if method != plain:
        because += f"; {_METHOD_TITLES[plain]} would take {seconds(options_s[plain])}"
    elif request.cluster.accelerator.is_cpu:
        because += "; engine and trainer are one process, so no byte crosses a link"
    elif colocated:
        because += "; engine and trainer share their devices, so no byte crosses a network but the gather"
    elif method_s <= 0.05 * chosen.step_s:
        because += "; little enough that the plainest transport is the right one"
    else:
        because += "; no other transport was asked to do better"
    return Publication(
        method=method,
        account=accounts[method],
        seconds=method_s,
        sync_every=every,
        options_s=options_s,
        because=because,
    )
