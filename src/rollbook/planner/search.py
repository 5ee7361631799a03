"""Every topology worth asking about: mode, split, engine layout, trainer layout, dtype, offload, and who leaves shared
GPUs in turn; best first.

A side depends on its own number of GPUs only, so each is computed once and a split only joins two of them. Of
large clusters not every split is joined: the crossing where both sides take equally long is found by bisection
(more rollout GPUs make generation faster and training slower), and the neighbourhood of it is searched.

What costs time is to follow a topology: agents through their calls, an asynchronous step under its staleness bound.
Both only add to the seconds of its joined sides, so what is beaten by those already is not followed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from rollbook.ledger.account import RolloutSide, StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.quantity import format_bytes
from rollbook.ledger.step import is_colocated, join_sides
from rollbook.ledger.switch import SleepChoice
from rollbook.ledger.sync import SyncMethod
from rollbook.ledger.workload import MODES, Mode
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import (
    ON_POLICY,
    Candidate,
    IdleResult,
    OffloadResult,
    TrainChoice,
    host_bytes_per_gpu,
    layouts_of,
    rollout_s,
)
from rollbook.planner.floors import floor_step_s
from rollbook.planner.idling import has_choice, held_bytes, sleeps_of
from rollbook.planner.lending import with_lending
from rollbook.planner.offload import Offload, host_state_bytes, offloads_of
from rollbook.planner.request import PlanRequest
from rollbook.planner.sides import RolloutSides, TrainSides
from rollbook.planner.staleness import least_step_s, stretched, within_bound

_MOST_UNITS_LISTED = 64
"""Above this many nodes only a grid and the neighbourhood of the optimum are joined."""
_SLOWER_ENGINES_GAIN = 0.005
"""Share of a step that engines which generate more slowly must save: ties are theirs who generate faster."""
SAME_FRAC = 0.01
"""Share of a step within which two that were followed may be told apart by the width of their cells."""
_VISIBLE_SYNC_FRAC = 0.05
"""Share of the step up to which a broadcast, the plainest transport, is not questioned."""
OFFLOAD_GAIN_FRAC = 0.05
"""Share of a step that state in host memory must save where it would fit on the device: it is one more moving part."""
_APART = SleepChoice()
"""Of sides that share nothing: not read."""
_COLOCATED: tuple[Mode, ...] = ("sync", "colocate_async")
_SEPARATED: tuple[Mode, ...] = ("separate_async", "separate_sync")

Topology = tuple[Mode, int, int]
"""Mode, and GPUs of generation and of training."""


@dataclass
class Search:
    """The topologies of one request."""

    request: PlanRequest
    layouts: list[ReplicaLayout] = field(default_factory=list)
    """Engine layouts to try; empty: every sensible one."""
    is_brief: bool = False
    """Join only the splits next to the time optimum, and the one that was asked for."""
    engines: RolloutSides = field(init=False)
    """Those of another search may be put here, where both ask the same of generation."""
    trainers: TrainSides = field(init=False)
    """The same of training."""
    _followed: dict[tuple[Topology, Offload, SleepChoice | None], Candidate] = field(
        init=False, default_factory=dict
    )
    _bounded: dict[tuple[Mode, int, ReplicaLayout, float], list[StepAccount]] = field(
        init=False, default_factory=dict
    )
    """Steps under the staleness bound by their engines, with the KV pool of these."""

    def __post_init__(self) -> None:
        self.engines, self.trainers = RolloutSides(self.request, self.layouts), TrainSides(self.request)
        self.layouts = self.engines.layouts

    def candidate(
        self,
        mode: Mode,
        num_rollout_gpus: int,
        num_train_gpus: int,
        offload: Offload | None = None,
        sleep: SleepChoice | None = None,
        *,
        below_s: float = math.inf,
    ) -> Candidate:
        """The layouts of one mode and split with the shortest step: hand-over, publication and staleness bound ask for
        other engines than generation alone would.

        Args:
            sleep: what leaves shared GPUs in turn; None: as is fastest.
            below_s: a step that takes longer need not be followed: it is told with at least so many seconds, and at
                most those that it takes.
        """
        topology = (mode, num_rollout_gpus, num_train_gpus)
        key = (topology, offload or self.trainers.first_offload, sleep)
        if key not in self._followed:
            train = self.trainers.best(num_train_gpus, key[1])
            if is_colocated(mode):
                found = self._fastest_sharing(topology, train, sleep, below_s)
            else:
                found = self._fastest_layouts(topology, train, _APART, below_s)
            if below_s < math.inf:
                return found
            self._followed[key] = found
        return self._followed[key]

    def _fastest_sharing(
        self, topology: Topology, train: TrainChoice, sleep: SleepChoice | None, below_s: float
    ) -> Candidate:
        """By what leaves the GPUs in turn; what does not fit is told of with the fewest reasons."""
        found: list[Candidate] = []
        limit_s = below_s
        for choice in sleeps_of(self.request) if sleep is None else (sleep,):
            found.append(self._fastest_layouts(topology, train, choice, limit_s))
            if found[-1].fits:
                limit_s = min(limit_s, found[-1].step_s)
        best = min(found, key=lambda c: (len(c.why_not), c.step_s))
        told = tuple(IdleResult.of(c) for c in found) if has_choice(self.request) else ()
        return replace(best, idles=told)

    def _fastest_layouts(
        self, topology: Topology, train: TrainChoice, sleep: SleepChoice, below_s: float
    ) -> Candidate:
        mode, num_rollout_gpus, _ = topology
        held = held_bytes(self.request, train, sleep) if is_colocated(mode) else 0.0
        best: Candidate | None = None
        limit_s, is_raced = math.inf, False
        for side, layout in self.engines.fastest_first(num_rollout_gpus, mode, held):
            if best is not None and (side.why_not or train.side.why_not):
                break  # what does not fit is told of with its fastest layout
            if self._least_s(mode, side, train) >= limit_s:
                break  # and every slower one after it
            joined = self._joined(mode, side, layout, train, sleep)
            if joined.step_s >= limit_s:
                continue
            joined, is_followed = self._follow(joined, min(limit_s, below_s))
            races = joined.fits and is_followed and joined.step_s < below_s
            gain = best is None or joined.step_s < (1 - _SLOWER_ENGINES_GAIN) * best.step_s
            if best is None or (joined.fits, races, gain) > (best.fits, is_raced, False):
                best, is_raced = joined, races
            if best.fits:
                limit_s = (1 - _SLOWER_ENGINES_GAIN) * best.step_s
                if not is_raced:
                    limit_s = max(limit_s, below_s)
        assert best is not None
        return best

    def _follow(self, joined: Candidate, limit_s: float) -> tuple[Candidate, bool]:
        """`joined` with what its environments and the staleness bound add, and whether it was followed for that, as
        what is not below `limit_s` without is not."""
        mode, layout, rollout = joined.mode, joined.rollout_layout, joined.account.rollout
        is_bounded = mode not in ON_POLICY and self.request.assumptions.method != "paper"
        engines = self._bounded.setdefault((mode, rollout.num_gpus, layout, rollout.kv_pool_bytes), [])
        floor_s = self._known_step_s(joined.account, engines)
        if floor_s < limit_s:
            floor_s = max(floor_s, floor_step_s(self.request, joined.account, layout))
        if floor_s >= limit_s:
            is_least = is_bounded or self.engines.has_environments
            return replace(joined, account=stretched(joined.account, floor_s), is_least=is_least), False
        held = held_bytes(self.request, joined.train, joined.sleep) if is_colocated(mode) else 0.0
        side = self.engines.followed(rollout, mode, layout, held)
        if side is not rollout:
            joined = self._joined(mode, side, layout, joined.train, joined.sleep)
        if is_bounded:
            account = joined.account
            if account.fits:
                account = within_bound(self.request, account, layout)
                engines.append(account)
            else:  # nobody will run it: the least that the bound allows is told of it
                account = stretched(account, least_step_s(self.request, account, layout))
            joined = replace(joined, account=account)
        return joined, True

    def _known_step_s(self, account: StepAccount, engines: list[StepAccount]) -> float:
        """What `account` does not take less than, as a trainer that is as fast or faster behind the same engines takes
        that. A search that tells every step follows it all the same."""
        if not self.is_brief or self.request.lends(account.mode):
            return account.seconds.total
        known_s = [
            found.seconds.total
            for found in engines
            if _own_s(found) <= _own_s(account) and found.seconds.sync <= account.seconds.sync
        ]
        return max([account.seconds.total, *((1 - SAME_FRAC) * step_s for step_s in known_s)])

    def _least_s(self, mode: Mode, rollout: RolloutSide, train: TrainChoice) -> float:
        """Below the step of these sides, whatever joins them."""
        if mode != "separate_async":
            return rollout_s(rollout, mode) + train.side.total_s
        return 0.0 if self.request.lends(mode) else max(rollout_s(rollout, mode), train.side.total_s)

    def _joined(
        self,
        mode: Mode,
        rollout: RolloutSide,
        layout: ReplicaLayout,
        train: TrainChoice,
        sleep: SleepChoice = _APART,
    ) -> Candidate:
        method: SyncMethod = "broadcast"
        if is_colocated(mode):  # on a processor one process, on GPUs one process each
            method = "in_process" if self.request.cluster.accelerator.is_cpu else "ipc"
        account = self._account(mode, rollout, layout, train, method, sleep)
        if method == "broadcast" and account.seconds.sync > _VISIBLE_SYNC_FRAC * account.seconds.total:
            for other in _other_methods(self.request):
                by_other = self._account(mode, rollout, layout, train, other, sleep)
                if by_other.seconds.total < account.seconds.total:
                    account, method = by_other, other
        found = Candidate(
            account=account,
            rollout_layout=layout,
            train=train,
            sync_method=method,
            sleep=sleep,
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
        self,
        mode: Mode,
        rollout: RolloutSide,
        layout: ReplicaLayout,
        train: TrainChoice,
        method: SyncMethod,
        sleep: SleepChoice,
    ) -> StepAccount:
        r = self.request
        layouts = layouts_of(r, layout, train, method, sleep)
        account = join_sides(
            r.model, r.workload, r.cluster, train.assumptions,
            mode=mode, layouts=layouts, rollout=rollout, train=train.side,
        )  # fmt: skip
        if r.lends(mode):
            lent = train.side.num_gpus // layout.num_gpus * layout.num_gpus
            together = self.engines.of(rollout.num_gpus + lent, mode, layout)
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

    # -- which topologies

    def time_optimal_rollout_gpus(self) -> int | None:
        """Rollout GPUs at which both asynchronous sides take equally long; whole replicas, not whole nodes."""
        return self._time_optimum

    @cached_property
    def _time_optimum(self) -> int | None:
        gpus = self.request.cluster.num_gpus
        step = min(layout.num_gpus for layout in self.layouts)
        low, high = 1, (gpus - 1) // step  # in replicas: low is too few for generation, high too many
        if high < 1:
            return None

        def sides_s(count: int) -> tuple[float, float]:
            side, _ = self.engines.best(count * step, "separate_async")
            return rollout_s(side, "separate_async"), self.trainers.best(gpus - count * step).side.total_s

        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if _rollout_is_slower(sides_s(middle)) else (low, middle)
        return min((low, high), key=lambda count: max(sides_s(count))) * step

    def _rollout_counts(self, optimal: int | None) -> list[int]:
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

    def topologies(self) -> list[Topology]:
        """Both colocated modes, both separated ones at each split, the time optimum, and what was asked for."""
        gpus, asked = self.request.cluster.num_gpus, self.request.split
        optimal = self.time_optimal_rollout_gpus()
        found: list[Topology] = [(mode, gpus, gpus) for mode in _COLOCATED]
        found += [(mode, n, gpus - n) for n in self._rollout_counts(optimal) for mode in _SEPARATED]
        found += [("separate_async", optimal, gpus - optimal)] if optimal else []
        found += [(mode, *asked) for mode in _SEPARATED] if asked else []
        return list(dict.fromkeys(found))

    def run(self) -> list[Candidate]:
        """All candidates: those that fit by step time, then those that do not. A brief search finds the best of each
        mode; what that beats it tells with the least that it takes."""
        fastest_s = dict.fromkeys(MODES, math.inf)
        found: list[Candidate] = []
        for topology in self.topologies():
            mode, *split = topology
            is_raced = self.is_brief and tuple(split) != self.request.split
            one = self.candidate(*topology, below_s=fastest_s[mode] if is_raced else math.inf)
            found.append(one)
            if one.fits:
                fastest_s[mode] = min(fastest_s[mode], one.step_s)
        limits = {mode: (1 - OFFLOAD_GAIN_FRAC) * least_s for mode, least_s in fastest_s.items()}
        found = _told_of_odd_sizes(self._with_host_memory(found, limits))
        return sorted(found, key=lambda c: (not c.fits, c.step_s, c.mode))

    def contenders(self, async_gain_frac: float) -> list[Candidate]:
        """Of the topologies of `run` those between which a choice is made, the fastest first: the best on-policy ones,
        and the best of the asynchronous ones that may save `async_gain_frac` of their step."""
        topologies, limit_s = self.topologies(), math.inf
        kept: list[Candidate] = []
        for are_on_policy in (True, False):
            # State on hosts has to be so much faster: what it has to beat is followed that far.
            fastest_s = limit_s / (1 - OFFLOAD_GAIN_FRAC)
            raced: list[Candidate] = []
            ours = (t for t in topologies if (t[0] in ON_POLICY) == are_on_policy)
            for topology in sorted(ours, key=self._pace_s):
                raced.append(self.candidate(*topology, below_s=fastest_s))
                if raced[-1].fits:
                    fastest_s = min(fastest_s, raced[-1].step_s)
            least_s = (1 - OFFLOAD_GAIN_FRAC) * fastest_s
            told = self._with_host_memory(raced, dict.fromkeys(MODES, least_s))
            kept += [c for c in told if c.fits and c.step_s <= fastest_s]
            limit_s = (1 - async_gain_frac) * min((c.step_s for c in kept), default=math.inf)
        return sorted(kept, key=lambda c: c.step_s)

    def _pace_s(self, topology: Topology) -> float:
        mode, num_rollout_gpus, num_train_gpus = topology
        return self._least_s(
            mode, self.engines.best(num_rollout_gpus, mode)[0], self.trainers.best(num_train_gpus)
        )

    def fitting(self) -> Iterator[Candidate]:
        """Those that fit, none of them followed: as soon as one is found."""
        topologies = self.topologies()
        for offload in offloads_of(self.request):
            for topology in topologies:
                found = self.candidate(*topology, offload, below_s=0.0)
                if found.fits:
                    yield found

    def _with_host_memory(self, found: list[Candidate], limits: Mapping[Mode, float]) -> list[Candidate]:
        """`found`, each with what its step would be with its state in host memory, and those added that are below the
        limit of their mode.

        Host memory is asked about where the device's kept a layout from fitting, and where the engines, and a trainer
        that is as efficient as the best of all, would leave room for such a gain.
        """
        places = offloads_of(self.request)[1:]
        if not places:
            return [replace(c, offloads=(OffloadResult.of(c),)) for c in found]
        sides = [self.trainers.best(num_train_gpus).side for _, _, num_train_gpus in self.topologies()]
        gpu_s = min(side.num_gpus * side.total_s for side in sides)
        if all(side.why_not for side in sides):
            gpu_s = 0.0  # none of them is what a trainer with room would be
        told, added, limits = [], [], dict(limits)
        for c in found:
            limit, others = limits[c.mode], list[Candidate]()
            engines, _ = self.engines.best(c.split[0], c.mode)
            least_s = max(rollout_s(engines, c.mode), _LEAST_OF_TRAINING * gpu_s / c.train.side.num_gpus)
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
                    if self.is_brief:  # the others are only worth telling of where they beat this one
                        limits[c.mode] = min(limits[c.mode], other.step_s)
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
_LOOPS_WITH_SLICES = frozenset({"slime", "checkpoint_engine"})
"""Assumptions whose numbers of a publication from shard to shard are those of a loop that has it."""


def _other_methods(request: PlanRequest) -> tuple[SyncMethod, ...]:
    """Transports worth having where a broadcast shows in the step, and the loop has them."""
    return ("delta", "sharded") if request.assumptions.name in _LOOPS_WITH_SLICES else ("delta",)


def _own_s(account: StepAccount) -> float:
    """In which the engines go on without the trainer, or wait for it."""
    return account.train.total_s + account.seconds.other + account.seconds.switch


def with_split(request: PlanRequest, chosen: Candidate) -> PlanRequest:
    """`request`, whose search looks at the split of `chosen`, too."""
    return request if is_colocated(chosen.mode) else replace(request, split=chosen.split)


def node_unit(request: PlanRequest) -> int:
    """GPUs that a separated side is made of: whole nodes, or single GPUs inside one node."""
    return request.cluster.gpus_per_node if request.cluster.num_nodes > 1 else 1


def _rollout_is_slower(seconds: tuple[float, float]) -> bool:
    return seconds[0] > seconds[1]
