"""Every topology worth asking about: mode, split, engine layout, trainer layout, dtype, offload; best first.

A side depends on its own number of GPUs only, so each is computed once and a split only joins two of them. Of
large clusters not every split is joined: the crossing where both sides take equally long is found by bisection
(more rollout GPUs make generation faster and training slower), and the neighbourhood of it is searched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from rollbook.ledger.account import RolloutSide, StepAccount, TrainSide
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.memory import train_memory
from rollbook.ledger.quantity import format_bytes
from rollbook.ledger.step import (
    Layouts,
    hand_over_moves,
    is_colocated,
    join_sides,
    publication_work,
    rollout_side,
    smallest_rollout_tp,
    train_side,
)
from rollbook.ledger.switch import pinned_bytes
from rollbook.ledger.sync import SyncMethod, SyncWork
from rollbook.ledger.train import train_seconds
from rollbook.ledger.workload import MODES, Mode
from rollbook.observe.numbers import counted
from rollbook.planner.layouts import (
    degrees,
    replica_layouts,
    train_degrees,
    train_layouts,
    trainer_stacks,
)
from rollbook.planner.lending import with_lending
from rollbook.planner.offload import (
    HELD,
    IN_SHORT,
    Offload,
    host_state_bytes,
    keeps_state,
    offloaded_side,
    offloads_of,
    on_device,
)
from rollbook.planner.request import PlanRequest
from rollbook.planner.staleness import least_step_s, stretched, within_bound
from rollbook.planner.words import MODE_TITLES, seconds, seconds_within

_MOST_UNITS_LISTED = 64
"""Above this many nodes only a grid and the neighbourhood of the optimum are joined."""
_SLOWER_ENGINES_GAIN = 0.005
"""Share of a step that engines which generate more slowly must save: ties are theirs who generate faster."""
_ON_POLICY: tuple[Mode, ...] = ("sync", "separate_sync")
_VISIBLE_SYNC_FRAC = 0.05
"""Share of the step up to which a broadcast, the plainest transport, is not questioned."""
Backend = Literal["fsdp2", "megatron"]
BACKEND_TITLES: dict[Backend, str] = {"fsdp2": "FSDP2", "megatron": "Megatron"}
ENGINE_TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt_llm": "TensorRT-LLM"}
SPREAD_GAIN_FRAC = 0.2
"""Share of training's seconds that spreading experts must save where FSDP2, which gathers all of them for every micro
batch, fits. The two trainers are not priced more finely than that."""
OFFLOAD_GAIN_FRAC = 0.05
"""Share of a step that state in host memory must save where it would fit on the device: it is one more moving part."""


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
    instead: TrainChoice | None = None
    """The best of the trainer that was not chosen; None where there was no choice."""

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
    why_not: tuple[str, ...]

    @classmethod
    def of(cls, candidate: Candidate) -> OffloadResult:
        return cls(offload=candidate.train.offload, step_s=candidate.step_s, why_not=candidate.why_not)

    def as_json(self) -> dict[str, object]:
        return {"step_s": self.step_s, "fits": not self.why_not, "why_not": list(self.why_not)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One topology: who gets which GPUs, in which layouts, and what a step costs."""

    account: StepAccount
    rollout_layout: ReplicaLayout
    train: TrainChoice
    sync_method: SyncMethod
    why_not: tuple[str, ...] = ()
    """All reasons against it; empty when it fits."""
    offloads: tuple[OffloadResult, ...] = ()
    """Places of the training state that were asked for in this topology."""

    @property
    def mode(self) -> Mode:
        return self.account.mode

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def title(self) -> str:
        """Mode, and where the training state lives if not on the device."""
        return MODE_TITLES[self.mode] + IN_SHORT[self.train.offload]

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
        return f"{self.why_not[0]}; with {HELD[other.offload]} in host memory {seconds(other.step_s)}"

    @property
    def step_s(self) -> float:
        return self.account.seconds.total

    @property
    def expected(self) -> str:
        """The seconds of its step, with their range."""
        span = self.account.step_s
        return seconds_within(self.step_s, span.low, span.high)

    @property
    def is_on_policy(self) -> bool:
        return self.mode in _ON_POLICY

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


@dataclass(slots=True)
class Search:
    """The sides of one request, each computed once."""

    request: PlanRequest
    layouts: list[ReplicaLayout] = field(default_factory=list)
    """Engine layouts to try; empty: every sensible one."""
    is_brief: bool = False
    """Join only the splits next to the time optimum, and the one that was asked for."""
    _rollouts: dict[tuple[int, bool, ReplicaLayout], RolloutSide] = field(init=False, default_factory=dict)
    _trains: dict[tuple[int, Offload], TrainChoice] = field(init=False, default_factory=dict)
    _fastest_s: dict[Mode, float] = field(init=False, default_factory=dict)
    """Step of the best candidate so far."""

    def __post_init__(self) -> None:
        request = self.request
        if request.assumptions.method == "paper":
            tp = request.rollout_tp or smallest_rollout_tp(
                request.model, request.cluster, request.assumptions
            )
            self.layouts = [ReplicaLayout(tp_size=tp)]
        elif not self.layouts:
            self.layouts = self._shortlist(replica_layouts(request))

    def _shortlist(self, layouts: list[ReplicaLayout]) -> list[ReplicaLayout]:
        """Layouts that are among the three best of a colocated, a large or a small rollout side, or the best of their
        size: a split may leave room for no other."""
        gpus = self.request.cluster.num_gpus
        points: list[tuple[int, Mode]] = [
            (gpus, "sync"), (gpus, "colocate_async"), (max(3 * gpus // 4, 1), "separate_async"),
            (max(gpus // 4, 1), "separate_async"), (max(gpus // 2, 1), "separate_sync"),
        ]  # fmt: skip
        kept: dict[ReplicaLayout, None] = {}
        for num_gpus, mode in points:
            ranked = sorted(
                ((self._rollout(num_gpus, mode, layout), i) for i, layout in enumerate(layouts)),
                key=lambda pair: (bool(pair[0].why_not), rollout_s(pair[0], mode)),
            )
            kept |= {layouts[i]: None for _, i in ranked[:3]}
            best_of_size: dict[int, int] = {}
            for _, i in ranked:
                best_of_size.setdefault(layouts[i].num_gpus, i)
            kept |= {layouts[i]: None for i in best_of_size.values()}
        return [layout for layout in layouts if layout in kept]

    # -- sides

    def rollout(self, num_gpus: int, mode: Mode) -> tuple[RolloutSide, ReplicaLayout]:
        """The fastest engine layout that fits on `num_gpus`; the least bad one when none does."""
        sides = [(self._rollout(num_gpus, mode, layout), layout) for layout in self.layouts]
        return min(sides, key=lambda pair: (bool(pair[0].why_not), rollout_s(pair[0], mode)))

    def _rollout(self, num_gpus: int, mode: Mode, layout: ReplicaLayout) -> RolloutSide:
        key = (num_gpus, is_colocated(mode), layout)
        if key not in self._rollouts:
            r = self.request
            self._rollouts[key] = rollout_side(
                r.model, r.workload, r.cluster, r.assumptions,
                mode=mode, num_gpus=num_gpus,
                layouts=Layouts(replica=layout, max_staleness_steps=max(r.max_staleness_steps, 1)),
            )  # fmt: skip
        return self._rollouts[key]

    def train(self, num_gpus: int, offload: Offload | None = None) -> TrainChoice:
        """The trainer layout for `num_gpus`, with its state where `offload`, or else the request, wants it."""
        offload = offload or self._first_offload
        if (num_gpus, offload) not in self._trains:
            self._trains[num_gpus, offload] = self._best_train(num_gpus, offload)
        return self._trains[num_gpus, offload]

    @property
    def _first_offload(self) -> Offload:
        """What is asked about everywhere: on the device, unless the request says otherwise."""
        return offloads_of(self.request)[0]

    def _best_train(self, num_gpus: int, offload: Offload) -> TrainChoice:
        """FSDP2 where one of its layouts fits; Megatron for layouts that only it has, where they are needed."""
        stacks = trainer_stacks(self.request)
        able = [stack for stack in stacks if keeps_state(self.request.assumptions, stack, offload)]
        best, *others = (self._best_of_stack(num_gpus, offload, stack) for stack in able or stacks[:1])
        for other in others:
            if _must_divide(self.request, best, other):
                best, other = other, best
            best = replace(best, instead=other)
        return best

    def _best_of_stack(self, num_gpus: int, offload: Offload, stack: str) -> TrainChoice:
        r = self.request
        assumptions = on_device(replace(r.assumptions, stack=stack), offload)
        layouts, is_limited = fitting_layouts(replace(r, assumptions=assumptions), num_gpus)
        if assumptions.method != "paper":  # whose trainer has no layouts
            layouts = [
                min(
                    layouts,
                    key=lambda layout: sum(
                        train_seconds(
                            r.model, r.workload, r.cluster, assumptions, num_gpus=num_gpus, layout=layout
                        )
                    ),
                )
            ]
        layout = layouts[0]
        side = train_side(r.model, r.workload, r.cluster, assumptions, num_gpus=num_gpus, layout=layout)
        side = offloaded_side(r, side, layout, offload)
        return TrainChoice(
            side=side, layout=layout, assumptions=assumptions, offload=offload, is_limited=is_limited
        )

    # -- candidates

    def candidate(
        self,
        mode: Mode,
        num_rollout_gpus: int,
        num_train_gpus: int,
        offload: Offload | None = None,
        *,
        below_s: float = math.inf,
    ) -> Candidate:
        """The layouts of one mode and split with the shortest step: hand-over, publication and staleness bound ask for
        other engines than generation alone would.

        Args:
            below_s: a step that takes longer need not be followed under the staleness bound.
        """
        train = self.train(num_train_gpus, offload)
        sides = [(self._rollout(num_rollout_gpus, mode, layout), layout) for layout in self.layouts]
        best: Candidate | None = None
        for side, layout in sorted(sides, key=lambda pair: (bool(pair[0].why_not), rollout_s(pair[0], mode))):
            if best is not None and (side.why_not or train.side.why_not):
                break  # what does not fit is told of with its fastest layout
            if best is not None and best.fits and self._least_s(mode, side, train) >= best.step_s:
                break  # and every slower one after it
            joined = self._joined(mode, side, layout, train)
            if mode not in _ON_POLICY and self.request.assumptions.method != "paper":
                beaten_s = min(best.step_s if best is not None and best.fits else math.inf, below_s)
                if self.is_brief and (num_rollout_gpus, num_train_gpus) != self.request.split:
                    beaten_s = min(beaten_s, self._fastest_s.get(mode, math.inf))
                joined = self._bounded(joined, beaten_s)
            gain = best is None or joined.step_s < (1 - _SLOWER_ENGINES_GAIN) * best.step_s
            if best is None or (joined.fits, gain) > (best.fits, False):
                best = joined
        assert best is not None
        if best.fits:
            self._fastest_s[mode] = min(best.step_s, self._fastest_s.get(mode, math.inf))
        return best

    def _bounded(self, joined: Candidate, beaten_s: float) -> Candidate:
        """`joined` under the staleness bound: followed step by step where it fits and may be below `beaten_s`."""
        account, layout = joined.account, joined.rollout_layout
        least_s = least_step_s(self.request, account, layout)
        # With lent GPUs a step may be shorter than that.
        if account.fits and (self.request.lends(account.mode) or least_s < beaten_s):
            return replace(joined, account=within_bound(self.request, account, layout))
        return replace(joined, account=stretched(account, least_s))

    def _least_s(self, mode: Mode, rollout: RolloutSide, train: TrainChoice) -> float:
        """Below the step of these sides, whatever joins them."""
        if mode != "separate_async":
            return rollout_s(rollout, mode) + train.side.total_s
        return 0.0 if self.request.lends(mode) else max(rollout_s(rollout, mode), train.side.total_s)

    def _joined(
        self, mode: Mode, rollout: RolloutSide, layout: ReplicaLayout, train: TrainChoice
    ) -> Candidate:
        method: SyncMethod = "broadcast"
        if is_colocated(mode):  # on a processor one process, on GPUs one process each
            method = "in_process" if self.request.cluster.accelerator.is_cpu else "ipc"
        account = self._account(mode, rollout, layout, train, method)
        if method == "broadcast" and account.seconds.sync > _VISIBLE_SYNC_FRAC * account.seconds.total:
            for other in _other_methods(self.request):
                by_other = self._account(mode, rollout, layout, train, other)
                if by_other.seconds.total < account.seconds.total:
                    account, method = by_other, other
        found = Candidate(
            account=account,
            rollout_layout=layout,
            train=train,
            sync_method=method,
            why_not=account.why_not,
        )
        if is_colocated(mode):
            return replace(found, why_not=found.why_not + self._no_room_on_hosts(found))
        return replace(found, why_not=found.why_not + self._not_whole(rollout.num_gpus, train.side.num_gpus))

    def _no_room_on_hosts(self, found: Candidate) -> tuple[str, ...]:
        """What a trainer that gives its device to the engines leaves on the hosts. What lives there anyhow and lacks
        room is told of with the trainer."""
        held, room = (
            host_state_bytes(self.request, found.train.offload) / found.train.side.num_gpus,
            self.request.host_bytes_per_gpu,
        )
        needed = host_bytes_per_gpu(self.request, found)
        if needed <= room or held > room:
            return ()
        return (
            f"training state and frozen models wait in {format_bytes(needed)} of host memory a GPU while the engines "
            f"have the device, of {format_bytes(room)} (--host-gb-per-gpu)",
        )

    def _account(
        self, mode: Mode, rollout: RolloutSide, layout: ReplicaLayout, train: TrainChoice, method: SyncMethod
    ) -> StepAccount:
        r = self.request
        layouts = _layouts_of(r, layout, train, method)
        account = join_sides(
            r.model, r.workload, r.cluster, train.assumptions,
            mode=mode, layouts=layouts, rollout=rollout, train=train.side,
        )  # fmt: skip
        if r.lends(mode):
            lent = train.side.num_gpus // layout.num_gpus * layout.num_gpus
            together = self._rollout(rollout.num_gpus + lent, mode, layout)
            account = with_lending(account, together, switch_s=r.lend_switch_s)
        return account

    def _not_whole(self, num_rollout_gpus: int, num_train_gpus: int) -> tuple[str, ...]:
        unit = node_unit(self.request)
        if num_rollout_gpus % unit == 0 and num_train_gpus % unit == 0:
            return ()
        total = num_rollout_gpus + num_train_gpus
        down = num_rollout_gpus // unit * unit
        whole = [f"{r}:{total - r}" for r in (down, down + unit) if 0 < r < total]
        return (
            f"{num_rollout_gpus} and {num_train_gpus} GPUs are not whole nodes of {unit}: "
            f"{' or '.join(whole)} would be",
        )

    def colocated(self) -> Iterator[Candidate]:
        """Both colocated modes."""
        gpus = self.request.cluster.num_gpus
        for mode in _COLOCATED:
            yield self.candidate(mode, gpus, gpus)

    def separated(self, rollout_counts: list[int]) -> Iterator[Candidate]:
        """Both separated modes at each number of rollout GPUs."""
        gpus = self.request.cluster.num_gpus
        for num_rollout_gpus in rollout_counts:
            for mode in _SEPARATED:
                yield self.candidate(mode, num_rollout_gpus, gpus - num_rollout_gpus)

    def time_optimal_rollout_gpus(self) -> int | None:
        """Rollout GPUs at which both asynchronous sides take equally long; whole replicas, not whole nodes."""
        gpus = self.request.cluster.num_gpus
        step = min(layout.num_gpus for layout in self.layouts)
        low, high = 1, (gpus - 1) // step  # in replicas: low is too few for generation, high too many
        if high < 1:
            return None

        def sides_s(count: int) -> tuple[float, float]:
            side, _ = self.rollout(count * step, "separate_async")
            return rollout_s(side, "separate_async"), self.train(gpus - count * step).side.total_s

        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _rollout_is_slower(sides_s(middle)) else (low, middle)
        return min((low, high), key=lambda count: max(sides_s(count))) * step

    def rollout_counts(self, optimal: int | None) -> list[int]:
        """Splits to join: whole nodes, thinned on large clusters except around the optimum."""
        unit = node_unit(self.request)
        num_units = self.request.cluster.num_gpus // unit
        at = (optimal or 0) // unit
        if self.is_brief:
            beside = {u * unit for u in range(max(at - 1, 1), min(at + 3, num_units))}
            # Between whole replicas of the larger layouts some of a side's GPUs belong to none.
            sizes = {layout.num_gpus for layout in self.layouts}
            beside |= {(at * unit // size + more) * size for size in sizes for more in (0, 1)}
            whole = (n for n in beside if n % unit == 0 and 0 < n < num_units * unit)
            return sorted(
                whole, key=lambda n: abs(n - (optimal or 0))
            )  # the best first: it spares the others
        every = range(1, num_units)
        if num_units > _MOST_UNITS_LISTED:
            stride = num_units // (_MOST_UNITS_LISTED // 2)
            near = range(-2, 4)
            every_set = {*range(stride, num_units, stride), *(at + d for d in near), num_units // 2}
            counts = sorted(u for u in every_set if 0 < u < num_units)
        else:
            counts = list(every)
        return [u * unit for u in counts]

    def run(self) -> list[Candidate]:
        """All candidates: those that fit by step time, then those that do not."""
        optimal = self.time_optimal_rollout_gpus()
        found = list(self.colocated()) + list(self.separated(self.rollout_counts(optimal)))
        joined = {(c.mode, *c.split) for c in found}
        gpus, asked = self.request.cluster.num_gpus, self.request.split
        extra: list[tuple[Mode, int, int]] = [("separate_async", optimal, gpus - optimal)] if optimal else []
        extra += [(mode, *asked) for mode in _SEPARATED] if asked else []
        found += [self.candidate(*key) for key in dict.fromkeys(extra) if key not in joined]
        found = _told_of_odd_sizes(self._with_host_memory(found))
        return sorted(found, key=lambda c: (not c.fits, c.step_s, c.mode))

    def _with_host_memory(self, found: list[Candidate]) -> list[Candidate]:
        """`found`, each with what its step would be with its state in host memory, and those added that beat everything
        of their mode on the device by OFFLOAD_GAIN_FRAC.

        Host memory is asked about where the device's kept a layout from fitting, and where the engines, and a trainer
        that is as efficient as the best of `found`, would leave room for such a gain.
        """
        places = offloads_of(self.request)[1:]
        if not places:
            return [replace(c, offloads=(OffloadResult.of(c),)) for c in found]
        limits = {
            mode: (1 - OFFLOAD_GAIN_FRAC)
            * min((c.step_s for c in found if c.fits and c.mode == mode), default=math.inf)
            for mode in MODES
        }
        gpu_s = min(c.train.side.num_gpus * c.train.side.total_s for c in found)
        told, added = [], []
        for c in found:
            limit, others = limits[c.mode], list[Candidate]()
            least_s = max(
                rollout_s(c.account.rollout, c.mode), _LEAST_OF_TRAINING * gpu_s / c.train.side.num_gpus
            )
            for place in places if c.train.is_limited and least_s < limit else ():
                other = self.candidate(c.mode, *c.split, place, below_s=limit)
                others.append(other)
                if other.fits and not other.train.is_limited:
                    break  # nothing is left to gain
            told.append(replace(c, offloads=tuple(OffloadResult.of(each) for each in (c, *others))))
            for other in others:
                if other.fits and other.step_s < limit:
                    added.append(replace(other, offloads=told[-1].offloads))
                    limit = (1 - OFFLOAD_GAIN_FRAC) * other.step_s  # for what keeps more on the hosts
        return told + added


def _told_of_odd_sizes(found: list[Candidate]) -> list[Candidate]:
    """`found`, in which a trainer that does not fit where a smaller one does is told to lack a layout, not GPUs."""
    enough = min((c.split[1] for c in found if c.train.fits and not c.train.is_offloaded), default=0)
    if not enough:
        return found
    return [
        replace(
            c,
            why_not=(
                f"{counted(c.split[1], 'training GPU')} divide into no layout that fits, as {enough} do",
                *(why for why in c.why_not if why not in c.train.side.why_not),
            ),
        )
        if not c.train.fits and c.split[1] > enough
        else c
        for c in found
    ]


_LEAST_OF_TRAINING = 0.8
"""GPU seconds of a trainer without limits of memory, of the best that was found with them: it recomputes less."""
_COLOCATED: tuple[Mode, ...] = ("sync", "colocate_async")
_SEPARATED: tuple[Mode, ...] = ("separate_async", "separate_sync")


_LOOPS_WITH_SLICES = frozenset({"slime", "checkpoint_engine"})
"""Assumptions whose numbers of a publication from shard to shard are those of a loop that has it."""


def _other_methods(request: PlanRequest) -> tuple[SyncMethod, ...]:
    """Transports worth having where a broadcast shows in the step, and the loop has them."""
    return ("delta", "sharded") if request.assumptions.name in _LOOPS_WITH_SLICES else ("delta",)


def _layouts_of(
    request: PlanRequest, layout: ReplicaLayout, train: TrainChoice, method: SyncMethod
) -> Layouts:
    return Layouts(
        replica=layout,
        train=train.layout,
        sync_method=method,
        max_staleness_steps=max(request.max_staleness_steps, 1),
        sleep=request.sleep,
        changed_frac=request.changed_frac,
        state_is_offloaded=train.offload == "weights",
    )


def sync_work_of(request: PlanRequest, found: Candidate) -> SyncWork:
    """The publication that the step of `found` was priced with."""
    return publication_work(
        request.workload,
        _layouts_of(request, found.rollout_layout, found.train, found.sync_method),
        mode=found.mode,
        num_train_gpus=found.account.train.num_gpus,
        num_rollout_gpus=found.account.rollout.num_gpus,
    )


def with_split(request: PlanRequest, chosen: Candidate) -> PlanRequest:
    """`request`, whose search looks at the split of `chosen`, too."""
    return request if is_colocated(chosen.mode) else replace(request, split=chosen.split)


def node_unit(request: PlanRequest) -> int:
    """GPUs that a separated side is made of: whole nodes, or single GPUs inside one node."""
    return request.cluster.gpus_per_node if request.cluster.num_nodes > 1 else 1


def _must_divide(request: PlanRequest, plain: TrainChoice, other: TrainChoice) -> bool:
    """Whether it takes a trainer that divides tensors, layers or experts, and not one that shards alone."""
    if plain.fits and other.fits:
        gains = other.side.total_s < (1 - SPREAD_GAIN_FRAC) * plain.side.total_s
        return gains and other.layout.ep_size > 1
    if plain.fits or other.fits:
        return other.fits
    needed = [
        train_memory(
            request.model, request.workload, each.assumptions, num_gpus=each.side.num_gpus, layout=each.layout
        ).total
        for each in (plain, other)
    ]
    return needed[1] < needed[0]


def _rollout_is_slower(seconds: tuple[float, float]) -> bool:
    return seconds[0] > seconds[1]


def rollout_s(side: RolloutSide, mode: Mode) -> float:
    """Seconds of a step that the engines work, judging included, with the tail where it waits for its last response."""
    beside_s = side.prefill_s + side.reward_s
    if mode in _ON_POLICY:
        return beside_s + side.throughput_s + side.tail_s
    return beside_s + (side.steady_s or side.throughput_s)


def fitting_layouts(request: PlanRequest, num_gpus: int) -> tuple[list[TrainLayout], bool]:
    """The trainer layouts worth pricing, smallest model-parallel group first: all that fit, recomputing no more than
    they must. Where none fits, the one that lacks least. And whether memory kept any from fitting."""
    r = request
    usable = r.cluster.accelerator.hbm_bytes * (1 - r.assumptions.memory_overhead_frac)
    layouts = sorted(
        train_layouts(r, num_gpus),
        key=lambda la: (la.model_parallel_size, la.pp_size, la.tp_size, la.recompute == "full"),
    )
    best, least, is_limited = layouts[0], math.inf, False
    found: dict[tuple[int, int, int], TrainLayout] = {}
    for layout in layouts:
        degrees = (layout.tp_size, layout.pp_size, layout.cp_size)
        if degrees in found:
            continue
        total = train_memory(r.model, r.workload, r.assumptions, num_gpus=num_gpus, layout=layout).total
        if total <= usable:
            found[degrees] = layout
            continue
        is_limited = True
        if total < least:
            best, least = layout, total
    return list(found.values()) or [best], is_limited


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
        sleep=request.sleep,
    )
    return held + pinned_bytes([move for move in moves if not move.name.startswith("engine")])


def host_bytes_per_node(request: PlanRequest, found: Candidate) -> float:
    """The same of all training GPUs of a node."""
    return host_bytes_per_gpu(request, found) * min(found.split[1], request.cluster.gpus_per_node)
