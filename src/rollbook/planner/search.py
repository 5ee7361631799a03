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
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from rollbook.ledger.account import RolloutSide, StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.quantity import format_bytes
from rollbook.ledger.step import hand_over_moves, is_colocated, join_sides
from rollbook.ledger.switch import SleepChoice
from rollbook.ledger.sync import SyncMethod
from rollbook.ledger.workload import MODES, Mode
from rollbook.planner.candidate import (
    ON_POLICY,
    Candidate,
    IdleResult,
    TrainChoice,
    host_bytes_per_gpu,
    layouts_of,
    rollout_s,
)
from rollbook.planner.floors import floor_step_s
from rollbook.planner.host_memory import OFFLOAD_GAIN_FRAC, told_of_odd_sizes, with_host_memory
from rollbook.planner.idling import has_choice, held_bytes, sleeps_of
from rollbook.planner.lending import with_lending
from rollbook.planner.offload import Offload, host_state_bytes, offloads_of
from rollbook.planner.request import PlanRequest
from rollbook.planner.sides import RolloutSides, TrainSides
from rollbook.planner.splits import node_unit, rollout_counts, time_optimum
from rollbook.planner.staleness import in_flight_slots, least_step_s, stretched, within_bound

_SLOWER_ENGINES_GAIN = 0.005
"""Share of a step that engines which generate more slowly, or have less room, must save."""
SAME_FRAC = 0.01
"""Share of a step within which two that were followed may be told apart by the width of their cells."""
_VISIBLE_SYNC_FRAC = 0.05
"""Share of the step up to which a broadcast, the plainest transport, is not questioned."""
_APART = SleepChoice()
"""Of sides that share nothing: neither holds anything of the other's GPUs."""
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
    _bounded: dict[tuple[Mode, int, ReplicaLayout, int, int], list[StepAccount]] = field(
        init=False, default_factory=dict
    )
    """Steps under the staleness bound by their engines, with the slots of these for one step and for more."""
    _without_switch_s: dict[tuple[Mode, int, ReplicaLayout, Offload], list[tuple[tuple[int, int], float]]] = (
        field(init=False, default_factory=dict)
    )
    """Slots and seconds of steps that were followed: whoever leaves shared GPUs, the rest takes the same."""
    _switches: dict[tuple[int, Offload, SleepChoice], float] = field(init=False, default_factory=dict)

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
        choices = sleeps_of(self.request) if sleep is None else (sleep,)
        best: Candidate | None = None
        told: list[IdleResult] = []
        # Where the fastest is first, the others need not be followed.
        for choice in sorted(choices, key=lambda choice: self._quick_s(topology, train, choice)):
            worth_s = math.inf
            if best is not None and best.fits:
                held, held_by_best = (held_bytes(self.request, train, each) for each in (choice, best.sleep))
                worth_s = (1 - _SLOWER_ENGINES_GAIN * (held > held_by_best)) * best.step_s
                saved_s = best.account.seconds.switch - self._switch_s(topology[0], train, choice)
                # What they have less room for takes the engines no less.
                if self.is_brief and held >= held_by_best and best.step_s - saved_s >= worth_s:
                    continue
            found = self._fastest_layouts(topology, train, choice, min(below_s, worth_s))
            told.append(IdleResult.of(found))
            reasons = len(found.why_not)
            if best is None or (reasons, found.step_s) < (len(best.why_not), min(worth_s, best.step_s)):
                best = found
        assert best is not None
        if not has_choice(self.request):
            return best
        return replace(best, idles=tuple(sorted(told, key=lambda idle: choices.index(idle.sleep))))

    def _quick_s(self, topology: Topology, train: TrainChoice, sleep: SleepChoice) -> float:
        """About what a step takes, without what follows from joining its sides."""
        mode, num_rollout_gpus, _ = topology
        if sleep.sleep_level == 0:
            return math.inf  # most often the slowest
        held = held_bytes(self.request, train, sleep)
        _, layout = self.engines.fastest_first(num_rollout_gpus, mode)[0]
        side = self.engines.of(num_rollout_gpus, mode, layout, held_bytes=held)
        if side.why_not:
            return math.inf
        return self._least_s(mode, side, train) + self._switch_s(mode, train, sleep)

    def _fastest_layouts(
        self, topology: Topology, train: TrainChoice, sleep: SleepChoice, below_s: float
    ) -> Candidate:
        mode, num_rollout_gpus, _ = topology
        held = held_bytes(self.request, train, sleep)
        switch_s = self._switch_s(mode, train, sleep)
        best: Candidate | None = None
        limit_s, is_raced = math.inf, False
        for side, layout in self.engines.fastest_first(num_rollout_gpus, mode):
            if best is not None and (side.why_not or train.side.why_not):
                break  # what does not fit is told of with its fastest layout
            if self._least_s(mode, side, train) + switch_s >= limit_s:
                break  # and every slower one after it
            if held:
                side = self.engines.of(num_rollout_gpus, mode, layout, held_bytes=held)
                if best is not None and (
                    side.why_not or self._least_s(mode, side, train) + switch_s >= limit_s
                ):
                    continue
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
        slots = _slots(self.request, rollout)
        engines = self._bounded.setdefault((mode, rollout.num_gpus, layout, *slots), [])
        shared = self._without_switch_s.setdefault((mode, rollout.num_gpus, layout, joined.train.offload), [])
        floor_s = self._known_step_s(joined.account, engines)
        if is_colocated(mode) and joined.fits:  # with fewer slots the rest takes no less
            rests = [rest_s for most, rest_s in shared if most[0] >= slots[0] and most[1] >= slots[1]]
            floor_s = max(floor_s, max(rests, default=0.0) + joined.account.seconds.switch)
        if floor_s < limit_s:
            floor_s = max(floor_s, floor_step_s(self.request, joined.account, layout))
        if floor_s >= limit_s:
            is_least = is_bounded or self.engines.has_environments
            return replace(joined, account=stretched(joined.account, floor_s), is_least=is_least), False
        held = held_bytes(self.request, joined.train, joined.sleep)
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
        if joined.fits:
            shared.append((slots, joined.step_s - joined.account.seconds.switch))
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
            return rollout_s(rollout, mode) + train.side.total_s + self._base_s
        if self.request.lends(mode):
            return 0.0
        return max(rollout_s(rollout, mode), train.side.total_s) + self._base_s

    @cached_property
    def _base_s(self) -> float:
        """Of every step, whatever its topology."""
        r = self.request
        return r.assumptions.base_s(r.workload.num_sequences) if has_choice(r) else 0.0

    def _switch_s(self, mode: Mode, train: TrainChoice, sleep: SleepChoice) -> float:
        """Of a step's hand-overs, those that no engine's layout changes."""
        if not is_colocated(mode) or not has_choice(self.request):
            return 0.0
        key = (train.side.num_gpus, train.offload, sleep)
        if key not in self._switches:
            r, (side, _) = self.request, self.engines.best(train.side.num_gpus, mode)
            of_all = (
                replace(sleep, sleep_level=2) if sleep.sleep_level == 1 else sleep
            )  # where no weights move
            moves = hand_over_moves(
                r.model,
                r.workload,
                r.cluster,
                train.assumptions,
                rollout=side,
                train=train.side,
                sleep=of_all,
            )
            self._switches[key] = sum(move.seconds for move in moves)
        return self._switches[key]

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
        return time_optimum(self.request, self.engines, self.trainers)

    def topologies(self) -> list[Topology]:
        """Both colocated modes, both separated ones at each split, the time optimum, and what was asked for."""
        gpus, asked = self.request.cluster.num_gpus, self.request.split
        optimal = self.time_optimal_rollout_gpus()
        found: list[Topology] = [(mode, gpus, gpus) for mode in _COLOCATED]
        counts = rollout_counts(self.request, self.layouts, optimal, is_brief=self.is_brief)
        found += [(mode, n, gpus - n) for n in counts for mode in _SEPARATED]
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
        found = told_of_odd_sizes(with_host_memory(self, found, limits))
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
            told = with_host_memory(self, raced, dict.fromkeys(MODES, least_s))
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


_LOOPS_WITH_SLICES = frozenset({"slime", "checkpoint_engine"})
"""Assumptions whose numbers of a publication from shard to shard are those of a loop that has it."""


def _other_methods(request: PlanRequest) -> tuple[SyncMethod, ...]:
    """Transports worth having where a broadcast shows in the step, and the loop has them."""
    return ("delta", "sharded") if request.assumptions.name in _LOOPS_WITH_SLICES else ("delta",)


def _slots(request: PlanRequest, engines: RolloutSide) -> tuple[int, int]:
    """Of a replica, for the sequences of one step and of all that are in flight: by them its seconds are told apart."""
    return engines.slots_per_replica, in_flight_slots(request, engines)


def _own_s(account: StepAccount) -> float:
    """In which the engines go on without the trainer, or wait for it."""
    return account.train.total_s + account.seconds.other + account.seconds.switch


def with_split(request: PlanRequest, chosen: Candidate) -> PlanRequest:
    """`request`, whose search looks at the split of `chosen`, too."""
    return request if is_colocated(chosen.mode) else replace(request, split=chosen.split)
