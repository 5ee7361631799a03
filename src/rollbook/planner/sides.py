"""The two sides of a step, each computed once: engines on a number of GPUs, a trainer on a number of GPUs.

Neither side knows the other one, so a search over splits joins what stands here.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rollbook.ledger.account import RolloutSide
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.generation import kv_room
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.memory import train_memory
from rollbook.ledger.quantity import format_bytes
from rollbook.ledger.step import (
    Layouts,
    is_colocated,
    rollout_side,
    shared_memory_frac,
    smallest_rollout_tp,
    train_side,
)
from rollbook.ledger.train import TrainPrices
from rollbook.ledger.workload import Mode
from rollbook.planner.candidate import TrainChoice, rollout_s
from rollbook.planner.layouts import replica_layouts, train_layouts, trainer_stacks
from rollbook.planner.offload import Offload, keeps_state, offloaded_side, offloads_of, on_device
from rollbook.planner.request import PlanRequest

SPREAD_GAIN_FRAC = 0.2
"""Share of training's seconds that spreading experts must save where FSDP2, which gathers all of them for every micro
batch, fits. The two trainers are not priced more finely than that."""


_Key = tuple[int, float, ReplicaLayout, bool]
"""GPUs, share of a GPU's memory, layout, and whether environments are followed."""


class RolloutSides:
    """Generation of one request's step, by number of GPUs and engine layout."""

    def __init__(self, request: PlanRequest, layouts: list[ReplicaLayout]) -> None:
        """`layouts`: engine layouts to try; empty: every sensible one."""
        self._request = request
        self._found: dict[_Key, RolloutSide] = {}
        self._ranked: dict[tuple[int, Mode], list[tuple[RolloutSide, ReplicaLayout]]] = {}
        agent, is_paper = request.workload.agent, request.assumptions.method == "paper"
        self.has_environments = agent.env_s > 0 and agent.num_turns > 1 and not is_paper
        if is_paper:
            tp = request.rollout_tp or smallest_rollout_tp(
                request.model, request.cluster, request.assumptions
            )
            layouts = [ReplicaLayout(tp_size=tp)]
        self.layouts = layouts or self._shortlist(replica_layouts(request))

    def in_layouts(self, layouts: list[ReplicaLayout]) -> RolloutSides:
        """The same engines, of which only these layouts are asked for; what is computed serves both."""
        sides = RolloutSides(self._request, layouts)
        sides._found = self._found
        return sides

    def of(
        self,
        num_gpus: int,
        mode: Mode,
        layout: ReplicaLayout,
        *,
        held_bytes: float = 0.0,
        follows_environments: bool = False,
    ) -> RolloutSide:
        """One layout's. Following environments takes ten times as long as all the rest, and changes neither what
        fits nor `rollout_s`.

        Args:
            held_bytes: of each shared GPU, what the trainer keeps there while the engines are awake.
        """
        r = self._request
        follows = follows_environments and self.has_environments
        room = shared_memory_frac(r.cluster, r.assumptions, held_bytes) if is_colocated(mode) else 1.0
        key = (num_gpus, room, layout, follows)
        if key not in self._found and room < 1 and (same := self._in_less_room(key, mode)) is not None:
            self._found[key] = same
        if key not in self._found:
            self._found[key] = rollout_side(
                r.model, r.workload, r.cluster, r.assumptions,
                mode=mode, num_gpus=num_gpus,
                layouts=Layouts(replica=layout, max_staleness_steps=max(r.max_staleness_steps, 1)),
                held_bytes=held_bytes, follows_environments=follows,
            )  # fmt: skip
            if is_colocated(mode) and room < shared_memory_frac(r.cluster, r.assumptions):
                kept = f"beside {format_bytes(held_bytes)} of the trainer's on it"
                refused = tuple(f"{why}, {kept}" for why in self._found[key].why_not)
                self._found[key] = replace(self._found[key], why_not=refused)
        return self._found[key]

    def _in_less_room(self, key: _Key, mode: Mode) -> RolloutSide | None:
        """What engines do in all the room that they may take, where less changes nothing of it."""
        r, (num_gpus, room, layout, follows) = self._request, key
        if room >= shared_memory_frac(r.cluster, r.assumptions) or r.assumptions.method == "paper":
            return None
        whole = self.of(num_gpus, mode, layout, follows_environments=follows)
        if whole.why_not:  # what all of it is too little for, a part is
            return whole
        left = kv_room(
            r.model, r.workload, r.cluster, r.assumptions, layout,
            num_replicas=whole.num_replicas, memory_frac=room,
        )  # fmt: skip
        most = math.ceil(r.workload.num_sequences / whole.num_replicas) * (r.max_staleness_steps + 1)
        if left.slots < whole.slots_per_replica or left.most_slots < most:
            return None
        return replace(whole, kv_pool_bytes=left.pool_bytes)

    def followed(
        self, side: RolloutSide, mode: Mode, layout: ReplicaLayout, held_bytes: float = 0.0
    ) -> RolloutSide:
        """`side` with what its environments add."""
        if not self.has_environments:
            return side
        return self.of(side.num_gpus, mode, layout, held_bytes=held_bytes, follows_environments=True)

    def fastest_first(self, num_gpus: int, mode: Mode) -> list[tuple[RolloutSide, ReplicaLayout]]:
        """Every layout's, with all the room that it may take; those that fit before those that do not."""
        key = (num_gpus, mode)
        if key not in self._ranked:
            sides = [(self.of(num_gpus, mode, layout), layout) for layout in self.layouts]
            self._ranked[key] = sorted(
                sides, key=lambda pair: (bool(pair[0].why_not), rollout_s(pair[0], mode))
            )
        return self._ranked[key]

    def best(self, num_gpus: int, mode: Mode) -> tuple[RolloutSide, ReplicaLayout]:
        """The fastest that fits on `num_gpus`; the least bad one when none does."""
        return self.fastest_first(num_gpus, mode)[0]

    def _shortlist(self, layouts: list[ReplicaLayout]) -> list[ReplicaLayout]:
        """Layouts that are among the three best of a colocated, a large or a small rollout side, or the best of their
        size: a split may leave room for no other."""
        gpus = self._request.cluster.num_gpus
        points: list[tuple[int, Mode]] = [
            (gpus, "sync"), (gpus, "colocate_async"), (max(3 * gpus // 4, 1), "separate_async"),
            (max(gpus // 4, 1), "separate_async"), (max(gpus // 2, 1), "separate_sync"),
        ]  # fmt: skip
        self.layouts = layouts
        kept: set[ReplicaLayout] = set()
        for num_gpus, mode in points:
            ranked = [layout for _, layout in self.fastest_first(num_gpus, mode)]
            kept.update(ranked[:3])
            best_of_size: dict[int, ReplicaLayout] = {}
            for layout in ranked:
                best_of_size.setdefault(layout.num_gpus, layout)
            kept.update(best_of_size.values())
        self._ranked.clear()
        return [layout for layout in layouts if layout in kept]


class TrainSides:
    """Training of one request's step, by number of GPUs and the place of its state."""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request
        self._found: dict[tuple[int, Offload], TrainChoice] = {}
        self._prices: dict[str, TrainPrices] = {}
        self.first_offload: Offload = offloads_of(request)[0]
        """What is asked about everywhere: on the device, unless the request says otherwise."""

    def best(self, num_gpus: int, offload: Offload | None = None) -> TrainChoice:
        """The trainer and its layout for `num_gpus`, with its state where `offload`, or else the request, wants it."""
        offload = offload or self.first_offload
        if (num_gpus, offload) not in self._found:
            self._found[num_gpus, offload] = self._best_trainer(num_gpus, offload)
        return self._found[num_gpus, offload]

    def _best_trainer(self, num_gpus: int, offload: Offload) -> TrainChoice:
        """FSDP2 where one of its layouts fits; Megatron for layouts that only it has, where they are needed."""
        plain, *others = self._stacks(offload)
        best = self._best_of_stack(num_gpus, offload, plain)
        if best.fits and not self._request.model.num_experts:
            return best  # nothing to spread
        for stack in others:
            other = self._best_of_stack(num_gpus, offload, stack)
            best = other if _must_divide(self._request, best, other) else best
        return best

    def other(self, chosen: TrainChoice) -> TrainChoice | None:
        """The best of the trainer that was not chosen, on as many GPUs; None where there was no choice."""
        stacks = [stack for stack in self._stacks(chosen.offload) if stack != chosen.assumptions.stack]
        return self._best_of_stack(chosen.side.num_gpus, chosen.offload, stacks[0]) if stacks else None

    def _stacks(self, offload: Offload) -> tuple[str, ...]:
        """Those that can have their state there, the plainest first."""
        stacks = trainer_stacks(self._request)
        able = tuple(stack for stack in stacks if keeps_state(self._request.assumptions, stack, offload))
        return able or stacks[:1]

    def _best_of_stack(self, num_gpus: int, offload: Offload, stack: str) -> TrainChoice:
        r = self._request
        assumptions = on_device(replace(r.assumptions, stack=stack), offload)
        layouts, is_limited = fitting_layouts(replace(r, assumptions=assumptions), num_gpus)
        layout = layouts[0]
        if assumptions.method != "paper":  # whose trainer has no layouts
            prices = self._prices_of(assumptions)
            layout = min(layouts, key=lambda layout: sum(prices.seconds(num_gpus, layout)))
        side = train_side(r.model, r.workload, r.cluster, assumptions, num_gpus=num_gpus, layout=layout)
        side = offloaded_side(r, side, layout, offload)
        return TrainChoice(
            side=side, layout=layout, assumptions=assumptions, offload=offload, is_limited=is_limited
        )

    def _prices_of(self, assumptions: Assumptions) -> TrainPrices:
        """Seconds do not depend on where the state lives."""
        if assumptions.stack not in self._prices:
            r = self._request
            self._prices[assumptions.stack] = TrainPrices(r.model, r.workload, r.cluster, assumptions)
        return self._prices[assumptions.stack]


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
