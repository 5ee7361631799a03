"""Faults of the rollout: stuck prompts, sandboxes, leases, samples that come late, bounds and filters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from rollbook.drill.fault import Site, wrap
from rollbook.errors import EnvError
from rollbook.observe.values import Last, Ratio, Values
from rollbook.types import Group, Trajectory

Produce = Callable[[Any], Awaitable[Trajectory]]


def stuck_prompt(site: Site) -> None:
    """One prompt of every step never ends; its group's deadline does, after ten times what a group usually takes."""
    rollout = site.controller.rollout
    took_s: list[float] = []

    def around(produce: Produce) -> Produce:
        async def stuck(member: Any) -> Trajectory:
            if site.is_on and member.group_id % site.controller.config.run.groups_per_step == 0:
                await asyncio.Event().wait()
            started_at_s = time.monotonic()
            trajectory = await produce(member)
            took_s.append(time.monotonic() - started_at_s)
            return trajectory

        return stuck

    def around_admit(admit: Callable[[], None]) -> Callable[[], None]:
        def with_deadline() -> None:
            if site.is_on and site.age == 0:
                deadline = {"group_deadline_s": max(10 * float(np.median(took_s)), 0.2)}
                rollout.buffer.config = rollout.buffer.config.model_copy(update=deadline)
            admit()

        return with_deadline

    wrap(rollout, "produce", around)
    wrap(rollout, "admit", around_admit)


def sandboxes_gone(site: Site) -> None:
    """Every second trajectory finds its sandbox gone."""

    def around(produce: Produce) -> Produce:
        async def alone(member: Any) -> Trajectory:
            if site.is_on and member.member_idx % 2:
                raise EnvError("the sandbox is gone (a drill)", "end the drill")
            return await produce(member)

        return alone

    wrap(site.controller.rollout, "produce", around)


def leaked_leases(site: Site) -> None:
    """Trajectories need a lease of a pool that the drill brings along, and some leases are not given back: the wait
    for one grows."""
    controller = site.controller
    capacity = 2 * controller.num_sequences
    leased, leaked, waits = [0], [0], list[float]()

    def around(produce: Produce) -> Produce:
        async def with_lease(member: Any) -> Trajectory:
            leased[0] += 1
            started_at_s = time.monotonic()
            crowding = leaked[0] / capacity
            await asyncio.sleep(0.004 * (1 + 10 * crowding))  # a fuller host answers more slowly
            waits.append(time.monotonic() - started_at_s)
            try:
                return await produce(member)
            finally:
                if site.is_on and member.member_idx == 0:
                    leaked[0] += 1
                else:
                    leased[0] -= 1

        return with_lease

    def around_report(scorer_values: Callable[[], Values]) -> Callable[[], Values]:
        def reported() -> Values:
            values = scorer_values() | {"env/num_leased": Last(leased[0])}
            if waits:
                values["env/turn_s/mean"] = Ratio(sum(waits), len(waits))
                waits.clear()
            return values

        return reported

    wrap(controller.rollout, "produce", around)
    wrap(controller.scorer, "values", around_report)


def samples_held_back(site: Site) -> None:
    """Finished trajectories reach the buffer late, by eight times what it takes to produce one."""
    took_s: list[float] = []

    def around(produce: Produce) -> Produce:
        async def late(member: Any) -> Trajectory:
            started_at_s = time.monotonic()
            trajectory = await produce(member)
            if site.is_on:
                await asyncio.sleep(8 * float(np.median(took_s)))
            else:
                took_s.append(time.monotonic() - started_at_s)
            return trajectory

        return late

    wrap(site.controller.rollout, "produce", around)


def loose_bound(site: Site) -> None:
    """The buffer forgets its staleness bound: prompts are admitted eight steps ahead."""
    buffer = site.controller.rollout.buffer

    def around(admit: Callable[[], None]) -> Callable[[], None]:
        def ahead() -> None:
            if site.is_on:
                buffer.config = buffer.config.model_copy(update={"max_staleness_steps": 8})
            admit()

        return ahead

    wrap(site.controller.rollout, "admit", around)


def skewed_filter(site: Site) -> None:
    """The filter takes four groups of five for flat."""

    def around(drop_reason: Callable[[Group], str | None]) -> Callable[[Group], str | None]:
        def skewed(group: Group) -> str | None:
            return "flat" if site.is_on and group.group_id % 5 else drop_reason(group)

        return skewed

    wrap(site.controller.rollout, "drop_reason", around)
