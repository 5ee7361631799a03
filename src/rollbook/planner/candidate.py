"""One topology: who gets which GPUs, in which layouts, and what a step of it costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollbook.ledger.account import RolloutSide, StepAccount, TrainSide
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.step import Layouts, hand_over_moves, is_colocated, publication_work
from rollbook.ledger.switch import SleepChoice, pinned_bytes
from rollbook.ledger.sync import SyncMethod, SyncWork
from rollbook.ledger.workload import Mode
from rollbook.observe.numbers import counted
from rollbook.planner.layouts import degrees, train_degrees
from rollbook.planner.offload import HELD, IN_SHORT, Offload, host_state_bytes
from rollbook.planner.request import PlanRequest
from rollbook.planner.words import MODE_TITLES, seconds, seconds_within

ON_POLICY: tuple[Mode, ...] = ("sync", "separate_sync")
Backend = Literal["fsdp2", "megatron"]
BACKEND_TITLES: dict[Backend, str] = {"fsdp2": "FSDP2", "megatron": "Megatron"}
ENGINE_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainChoice:
    """A trainer with its layout, and what it costs."""

    side: TrainSide
    layout: TrainLayout
    assumptions: Assumptions
    """What it is priced under: the stack it is made of, and the bytes of a parameter that are left on the device."""
    offload: Offload = "none"
    """What of its state lives in host memory."""
    is_limited: bool = False
    """Some layout does not fit into the device's memory."""

    @property
    def is_offloaded(self) -> bool:
        """Some of it does."""
        return self.offload != "none"

    @property
    def backend(self) -> Backend:
        """The kind of software that trains."""
        return "megatron" if self.assumptions.is_megatron else "fsdp2"

    @property
    def fits(self) -> bool:
        return not self.side.why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadResult:
    """A topology's best step with this much of the training state in host memory."""

    offload: Offload
    step_s: float
    is_least: bool
    """As of the candidate."""
    why_not: tuple[str, ...]

    @classmethod
    def of(cls, candidate: Candidate) -> OffloadResult:
        return cls(
            offload=candidate.train.offload,
            step_s=candidate.step_s,
            is_least=candidate.is_least,
            why_not=candidate.why_not,
        )

    def as_json(self) -> dict[str, object]:
        return {
            "step_s": self.step_s,
            "is_least": self.is_least,
            "fits": not self.why_not,
            "why_not": list(self.why_not),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleResult:
    """A shared topology's best step where this much leaves its GPUs in turn."""

    sleep: SleepChoice
    step_s: float
    is_least: bool
    """As of the candidate."""
    why_not: tuple[str, ...]
    switch_s: float
    """Of it, hand-overs."""
    kv_pool_bytes: float
    """Of a replica."""
    num_slots: int

    @classmethod
    def of(cls, candidate: Candidate) -> IdleResult:
        account = candidate.account
        return cls(
            sleep=candidate.sleep,
            step_s=candidate.step_s,
            is_least=candidate.is_least,
            why_not=candidate.why_not,
            switch_s=account.seconds.switch,
            kv_pool_bytes=account.rollout.kv_pool_bytes,
            num_slots=account.rollout.slots_per_replica,
        )

    @property
    def step_words(self) -> str:
        return f"{'at least ' if self.is_least else ''}{seconds(self.step_s)}"

    def as_json(self) -> dict[str, object]:
        return {
            "idle_state": "host" if self.sleep.moves_state else "device",
            "sleep_level": self.sleep.sleep_level,
            "step_s": self.step_s,
            "is_least": self.is_least,
            "switch_s": self.switch_s,
            "kv_pool_bytes": self.kv_pool_bytes,
            "slots_per_replica": self.num_slots,
            "fits": not self.why_not,
            "why_not": list(self.why_not),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One topology: who gets which GPUs, in which layouts, and what a step costs."""

    account: StepAccount
    rollout_layout: ReplicaLayout
    train: TrainChoice
    sync_method: SyncMethod
    sleep: SleepChoice = field(default_factory=SleepChoice)
    """What leaves shared GPUs in turn; not read where each side has its own."""
    why_not: tuple[str, ...] = ()
    """All reasons against it; empty when it fits."""
    is_least: bool = False
    """Its seconds are the least that it may take: others take less, so it was not followed."""
    offloads: tuple[OffloadResult, ...] = ()
    """Places of the training state that were asked for in this topology."""
    idles: tuple[IdleResult, ...] = ()
    """What may leave its shared GPUs in turn; empty where nobody shares, or it is no question."""

    @property
    def mode(self) -> Mode:
        return self.account.mode

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def title(self) -> str:
        """Mode, and where the training state lives, or waits, if not on the device."""
        waits = ", state waits on hosts" if self.idles and self.sleep.moves_state else ""
        return MODE_TITLES[self.mode] + IN_SHORT[self.train.offload] + waits

    @property
    def software(self) -> str:
        """What trains and what generates, with the degrees of both."""
        replica = self.rollout_layout
        trainer = [BACKEND_TITLES[self.train.backend], counted(self.split[1], "GPU")]
        trainer += train_degrees(self.train.layout)
        engines = [ENGINE_TITLES[replica.engine], counted(self.account.rollout.num_replicas, "replica")]
        engines += degrees({"TP": replica.tp_size, "EP": replica.ep_size})
        return f"Trainer: {', '.join(trainer)}; engines: {', '.join(engines)}"

    @property
    def why_refused(self) -> str:
        """The first reason against it, and what its step would be with its state on the hosts, where that fits."""
        other = next((result for result in self.offloads if not result.why_not), None)
        if other is None or other.offload == "none":
            return self.why_not[0]
        least = "at least " if other.is_least else ""
        return f"{self.why_not[0]}; with {HELD[other.offload]} in host memory {least}{seconds(other.step_s)}"

    @property
    def step_s(self) -> float:
        return self.account.seconds.total

    @property
    def expected(self) -> str:
        """The seconds of its step, with their range."""
        span = self.account.step_s
        return seconds_within(self.step_s, span.low, span.high)

    @property
    def idle_state(self) -> str | None:
        """Where the training state is while engines generate on its GPUs; None where they have their own."""
        if not is_colocated(self.mode):
            return None
        return "host" if self.sleep.moves_state else "device"

    @property
    def is_on_policy(self) -> bool:
        return self.mode in ON_POLICY

    @property
    def split(self) -> tuple[int, int]:
        return self.account.rollout.num_gpus, self.account.train.num_gpus

    def as_json(self) -> dict[str, object]:
        """A row of "topologies"."""
        account = self.account
        return {
            "mode": self.mode,
            "num_rollout_gpus": account.rollout.num_gpus,
            "num_train_gpus": account.train.num_gpus,
            "step_s": account.seconds.total,
            "step_s_range": [account.step_s.low, account.step_s.high],
            "mfu_frac": account.mfu_frac,
            "tail_frac": account.tail_frac,
            "idle_frac": dict(account.idle_frac),
            "rollout_layout": rollout_layout_json(self.rollout_layout),
            "train_layout": train_layout_json(self.train, account.train.num_gpus),
            "offload": self.train.offload,
            "offloads": {result.offload: result.as_json() for result in self.offloads},
            "idle_state": self.idle_state,
            "sleep_level": self.sleep.sleep_level if is_colocated(self.mode) else None,
            "idle_choices": [result.as_json() for result in self.idles],
            "fits": self.fits,
            "why_not": list(self.why_not),
            "notes": list(account.notes),
        }


def rollout_layout_json(layout: ReplicaLayout) -> dict[str, object]:
    """Degrees and dtypes of an engine replica."""
    return {
        "engine": layout.engine,
        "tp_size": layout.tp_size,
        "ep_size": layout.ep_size,
        "num_gpus": layout.num_gpus,
        "weight_dtype": layout.weight_dtype,
        "kv_dtype": layout.kv_dtype,
    }


def train_layout_json(train: TrainChoice, num_gpus: int) -> dict[str, object]:
    """The trainer and its degrees; what they leave is data parallel, over which the state is sharded."""
    layout = train.layout
    return {
        "backend": train.backend,
        "tp_size": layout.tp_size,
        "pp_size": layout.pp_size,
        "cp_size": layout.cp_size,
        "ep_size": layout.ep_size,
        "dp_size": max(num_gpus // layout.model_parallel_size, 1),
        "recompute": layout.recompute,
    }


def rollout_s(side: RolloutSide, mode: Mode) -> float:
    """Seconds of a step that the engines work, judging included, with the tail where it waits for its last response."""
    beside_s = side.prefill_s + side.reward_s
    if mode in ON_POLICY:
        return beside_s + side.throughput_s + side.tail_s
    return beside_s + (side.steady_s or side.throughput_s)


def layouts_of(
    request: PlanRequest, layout: ReplicaLayout, train: TrainChoice, method: SyncMethod, sleep: SleepChoice
) -> Layouts:
    return Layouts(
        replica=layout,
        train=train.layout,
        sync_method=method,
        max_staleness_steps=max(request.max_staleness_steps, 1),
        sleep=sleep,
        changed_frac=request.changed_frac,
        state_is_offloaded=train.offload == "weights",
    )


def sync_work_of(request: PlanRequest, found: Candidate) -> SyncWork:
    """The publication that the step of `found` was priced with."""
    workload = request.workload
    return publication_work(
        layouts_of(request, found.rollout_layout, found.train, found.sync_method, found.sleep),
        found.train.assumptions,
        mode=found.mode,
        num_train_gpus=found.account.train.num_gpus,
        num_rollout_gpus=found.account.rollout.num_gpus,
        lora_rank=workload.lora_rank if workload.publishes_adapters else 0,
    )


def host_bytes_per_gpu(request: PlanRequest, found: Candidate) -> float:
    """Host memory of one GPU's training state: what lives there, and what waits there for a shared device."""
    train = found.train
    held = host_state_bytes(request, train.offload) / train.side.num_gpus
    if not is_colocated(found.mode):
        return held
    moves = hand_over_moves(
        request.model,
        request.workload,
        request.cluster,
        train.assumptions,
        rollout=found.account.rollout,
        train=train.side,
        sleep=found.sleep,
    )
    return held + pinned_bytes([move for move in moves if not move.name.startswith("engine")])


def host_bytes_per_node(request: PlanRequest, found: Candidate) -> float:
    """The same of all training GPUs of a node."""
    return host_bytes_per_gpu(request, found) * min(found.split[1], request.cluster.gpus_per_node)
