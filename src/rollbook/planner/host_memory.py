"""What a search makes of training state in host memory (`offload.py`), where less on the device shortens a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from rollbook.ledger.workload import Mode
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import Candidate, OffloadResult, rollout_s
from rollbook.planner.offload import offloads_of

if TYPE_CHECKING:
    from rollbook.planner.search import Search

OFFLOAD_GAIN_FRAC = 0.05
"""Share of a step that state in host memory must save where it would fit on the device: it is one more moving part."""
_LEAST_OF_TRAINING = 0.8
"""GPU seconds of a trainer without limits of memory, of the best that was found with them: it recomputes less."""


def with_host_memory(search: Search, found: list[Candidate], limits: Mapping[Mode, float]) -> list[Candidate]:
    """`found`, each with what its step would be with its state in host memory, and those added that are below the
    limit of their mode.

    Host memory is asked about where the device's kept a layout from fitting, and where the engines, and a trainer
    that is as efficient as the best of all, would leave room for such a gain.
    """
    places = offloads_of(search.request)[1:]
    if not places:
        return [replace(c, offloads=(OffloadResult.of(c),)) for c in found]
    sides = [search.trainers.best(num_train_gpus).side for _, _, num_train_gpus in search.topologies()]
    gpu_s = min(side.num_gpus * side.total_s for side in sides)
    if all(side.why_not for side in sides):
        gpu_s = 0.0  # none of them is what a trainer with room would be
    told, added, limits = [], [], dict(limits)
    for c in found:
        limit, others = limits[c.mode], list[Candidate]()
        engines, _ = search.engines.best(c.split[0], c.mode)
        least_s = max(rollout_s(engines, c.mode), _LEAST_OF_TRAINING * gpu_s / c.train.side.num_gpus)
        for place in places if c.train.is_limited and least_s < limit else ():
            other = search.candidate(c.mode, *c.split, place, below_s=limit)
            others.append(other)
            if other.fits and not other.train.is_limited:
                break  # nothing is left to gain
        told.append(replace(c, offloads=tuple(OffloadResult.of(each) for each in (c, *others))))
        for other in others:
            if other.fits and other.step_s < limit:
                added.append(replace(other, offloads=told[-1].offloads))
                limit = (1 - OFFLOAD_GAIN_FRAC) * other.step_s  # for what keeps more on the hosts
                if search.is_brief:  # the others are only worth telling of where they beat this one
                    limits[c.mode] = min(limits[c.mode], other.step_s)
    return told + added


def told_of_odd_sizes(found: list[Candidate]) -> list[Candidate]:
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
