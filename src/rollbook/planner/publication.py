"""How the trained weights reach the engines, and how often."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace

from rollbook.ledger.account import Range
from rollbook.ledger.mapping import RouteLoad, SyncMapping, Trainer, sync_mapping
from rollbook.ledger.paper import paper_sync_s
from rollbook.ledger.step import is_colocated
from rollbook.ledger.sync import (
    BUCKET_BYTES,
    SyncAccount,
    SyncMethod,
    best_sync_every,
    sync_account,
)
from rollbook.planner.candidate import Candidate, sync_work_of
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import format_bytes, percent, seconds, seconds_range

MAX_BUCKETS = 2
"""Written into the config as `sync.max_buckets`: one is filled while the other travels."""
_METHOD_TITLES: dict[SyncMethod, str] = {
    "in_process": "reference within one process",
    "ipc": "CUDA IPC on the shared devices",
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
    """Of every method that the placement allows."""
    accounts: dict[SyncMethod, SyncAccount]
    mapping: SyncMapping
    because: str

    @property
    def route(self) -> RouteLoad:
        """Loads of the chosen method."""
        return self.mapping.route(self.method)

    @property
    def title(self) -> str:
        return _METHOD_TITLES[self.method]

    def as_json(self) -> dict[str, object]:
        return {
            "method": self.method,
            "seconds": self.seconds,
            "seconds_range": _range(self.seconds, self.account.error_frac),
            "bytes": self.account.total_bytes,
            "bytes_per_sender": self.account.bytes_per_sender,
            "bytes_per_receiver": self.account.bytes_per_receiver,
            "num_tensors": self.account.num_tensors,
            "bucket_peak_bytes": self.route.sender_peak_bytes,
            "slowest": self.account.slowest,
            "sync_every": self.sync_every,
            "options_s": dict(self.options_s),
            "because": self.because,
            "stages_s": dict(self.account.stages_s),
            "fixed_s": self.account.fixed_s,
            "num_buckets": self.account.num_buckets,
            "mapping": self._mapping_json(),
        }

    def _mapping_json(self) -> dict[str, object]:
        return {
            "trainer": self.mapping.trainer,
            "engine": self.mapping.engine,
            "tensors": [asdict(kind) for kind in self.mapping.kinds],
            "routes": [
                {
                    **asdict(route),
                    "stages_s": dict(self.accounts[route.route].stages_s),
                    "fixed_s": self.accounts[route.route].fixed_s,
                    "num_buckets": self.accounts[route.route].num_buckets,
                    "seconds": self.options_s.get(route.route),
                    "seconds_range": _range(
                        self.options_s.get(route.route), self.accounts[route.route].error_frac
                    ),
                }
                for route in self.mapping.routes
            ],
        }

    def kind_rows(self) -> list[tuple[str, str, str, str, str]]:
        """Kind, how the trainer and the engine hold it, its bytes, and those of one engine GPU."""
        return [
            (
                f"{kind.name} ({kind.num_tensors})",
                kind.trainer_cut,
                kind.engine_cut,
                format_bytes(kind.bytes),
                format_bytes(kind.landed_bytes),
            )
            for kind in self.mapping.kinds
        ]

    @property
    def sides(self) -> str:
        """Both layouts in a line."""
        return f"From {self.mapping.trainer} to {self.mapping.engine}."

    def link_rows(self) -> list[tuple[str, str, str]]:
        """Stage and link, what travels, and how many bytes with the seconds of the link alone."""
        rows = [
            (
                f"{load.stage}, {load.link}",
                load.what,
                format_bytes(load.bytes)
                + (f", {seconds(load.seconds_at_rate)}" if load.seconds_at_rate else ""),
            )
            for load in self.route.links
        ]
        peaks = (
            ("trainer GPU", self.route.sender_peak_bytes),
            ("engine GPU", self.route.receiver_peak_bytes),
        )
        rows += [
            (f"bucket memory, {where}", "beyond weights and pool", format_bytes(peak))
            for where, peak in peaks
            if peak
        ]
        stages = ", ".join(f"{name} {seconds(value)}" for name, value in self.account.stages_s.items())
        span = Range.within(self.seconds, self.account.error_frac)
        rows.append(
            (
                "expected",
                f"{_count(self.account.num_buckets, 'bucket')}; alone {stages}; fixed {seconds(self.account.fixed_s)}",
                f"{seconds(self.seconds)} ({seconds_range(span.low, span.high)})",
            )
        )
        return rows


def _range(value: float | None, error_frac: float) -> list[float] | None:
    if value is None:
        return None
    found = Range.within(value, error_frac)
    return [found.low, found.high]


def _count(number: int, noun: str) -> str:
    return f"one {noun}" if number == 1 else f"{number} {noun}s"


def _title(request: PlanRequest, method: SyncMethod) -> str:
    if method == "in_process" and request.cluster.accelerator.is_cpu:
        return "copy within the process"
    return _METHOD_TITLES[method]


def choose_publication(request: PlanRequest, chosen: Candidate) -> Publication:
    """The method the search settled on, beside what the others would take."""
    colocated = is_colocated(chosen.mode)
    work = sync_work_of(request, chosen)
    mapping = _mapping(request, chosen, splits_experts=work.splits_experts)
    methods = tuple(route.route for route in mapping.routes)
    accounts = {
        m: sync_account(request.model, request.cluster, request.assumptions.sync, replace(work, method=m))
        for m in methods
    }
    method: SyncMethod = chosen.sync_method
    plain: SyncMethod = "ipc" if "ipc" in methods else methods[0]
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
        because += f"; engine and trainer share their devices, so {_crosses(mapping, method)}"
    elif method_s <= 0.05 * chosen.step_s:
        because += "; little enough that the plainest transport is the right one"
    elif "delta" in options_s:
        because += f"; {_METHOD_TITLES['delta']} would take {seconds(options_s['delta'])}"
    if not colocated and method_s > 0.05 * chosen.step_s:
        because += _why_no_faster(options_s, method)
    return Publication(
        method=method,
        account=accounts[method],
        seconds=method_s,
        sync_every=every,
        options_s=options_s,
        accounts=accounts,
        mapping=mapping,
        because=because,
    )


def _crosses(mapping: SyncMapping, method: SyncMethod) -> str:
    """How far bytes go between roles that share their devices: as far as the trainer's shards are apart."""
    route = next(route for route in mapping.routes if route.route == method)
    if route.bytes_over("network"):
        return "no byte crosses a network but the gather's"
    return (
        "the gather stays on the scale-up link" if route.bytes_over("scale-up") else "no byte leaves its GPU"
    )


_WHY_NOT_TAKEN: dict[SyncMethod, str] = {
    "sharded": "needs a loop that knows both layouts, as slime's does (--assume slime)",
    "disk": "needs a file system that all hosts see, at the rate that is assumed of it",
}
"""Transports that are priced beside those which every framework has, and are left to the reader."""


def _why_no_faster(options_s: dict[str, float], method: SyncMethod) -> str:
    """Of a publication that shows in the step: what would be faster, and why it is not taken unasked."""
    return "".join(
        f"; {_METHOD_TITLES[other]} would take {seconds(options_s[other])}, but {why}"
        for other, why in _WHY_NOT_TAKEN.items()
        if options_s.get(other, math.inf) < options_s[method]
    )


def _mapping(request: PlanRequest, chosen: Candidate, *, splits_experts: bool) -> SyncMapping:
    """Of the chosen trainer and layouts."""
    is_cpu = request.cluster.accelerator.is_cpu
    engine = replace(chosen.rollout_layout, weight_dtype="float32") if is_cpu else chosen.rollout_layout
    return sync_mapping(
        request.model,
        request.cluster,
        Trainer(
            num_gpus=chosen.account.train.num_gpus,
            layout=chosen.train.layout,
            is_sharded=chosen.train.backend == "fsdp2",
        ),
        engine,
        num_rollout_gpus=chosen.account.rollout.num_gpus,
        shares_devices=is_colocated(chosen.mode),
        trainer_dtype="float32" if is_cpu else "bfloat16",
        lora_rank=request.workload.lora_rank if request.workload.publishes_adapters else 0,
        changed_frac=request.changed_frac,
        bucket_bytes=BUCKET_BYTES,
        max_buckets=MAX_BUCKETS,
        splits_experts=splits_experts,
    )
