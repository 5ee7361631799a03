"""When the loop publishes, what it says of the weights then, and who serves afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollbook.controller.loop import Controller
from rollbook.rollout.engine import Engine
from rollbook.sync.probe import ProbeReport
from rollbook.sync.report import PublicationReport
from rollbook.weights import Manifest
from tiny_run import TinyRun

TWO = {"rollout.num_replicas": 2}


class Unlike:
    """The probe finds that replica 1 gives other logprobs, from one version on; notes whom it asks under which."""

    def __init__(self, *versions: int) -> None:
        self.versions = versions
        self.asked: list[tuple[int, int]] = []

    def __call__(self, controller: Controller) -> None:
        check = controller.prober.check

        async def noted(engine: Engine, weight_version: int, compute: Any) -> ProbeReport | None:
            self.asked.append((weight_version, engine.replica_id))
            report = await check(engine, weight_version, compute)
            if report is not None and engine.replica_id == 1 and weight_version in self.versions:
                return replace(report, why="replica 1: its logprobs are others")
            return report

        controller.prober.check = noted  # type: ignore[method-assign]


def test_what_the_probe_took_out_is_brought_in_anew_and_the_others_go_on(tiny_run: TinyRun) -> None:
    """What it holds is not to be trusted: nothing may be laid upon it."""
    anew: dict[int, set[int]] = {0: set(), 1: set()}

    def notes(controller: Controller) -> None:
        for replica_id, port in controller.publisher.ports.items():
            port.open = _noted(port.open, anew[replica_id])  # type: ignore[method-assign]

    run = tiny_run(num_steps=4, faults=[Unlike(2), notes], **TWO, **{"run.schedule": "separate_async"})
    assert anew == {0: {0}, 1: {0, 3}}
    assert {row["replica_id"] for row in run.trajectories(3)} == {0, 1}


def _noted(open_port: Any, anew: set[int]) -> Any:
    async def opened(manifest: Manifest) -> None:
        if manifest.is_resync:
            anew.add(manifest.weight_version)
        await open_port(manifest)

    return opened


def test_who_is_out_of_service_is_not_probed(tiny_run: TinyRun) -> None:
    """It may hold an older version, or nothing, and is no reason against the others."""
    probe = Unlike()

    def loses(controller: Controller) -> None:
        publish = controller.publisher.publish

        async def lossy(weight_version: int, *, moved: bool = True) -> PublicationReport:
            report = await publish(weight_version, moved=moved)
            if weight_version == 2:
                controller.publisher.quarantined[1] = "its process is gone"
                report = replace(report, quarantined={1: "its process is gone"})
            return report

        controller.publisher.publish = lossy  # type: ignore[method-assign]

    run = tiny_run(num_steps=3, faults=[loses, probe], **TWO)
    assert sorted(probe.asked) == [(v, i) for v in range(4) for i in (0, 1) if (v, i) != (2, 1)]
    # It committed that version before it was gone, and serves nothing of it all the same.
    assert [{row["replica_id"] for row in run.trajectories(step)} for step in range(3)] == [
        {0, 1},
        {0, 1},
        {0},
    ]
    assert [e["replica_id"] for e in run.events_of("quarantined")] == [1]


class MovesOnly:
    """Updates of other steps have a learning rate of 0."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, controller: Controller) -> None:
        plain = controller.trainer.update

        def update(batch: Any, *args: Any, **keywords: Any) -> Any:
            return plain(batch, *args, **keywords, lr=None if batch.step in self.steps else 0.0)

        controller.trainer.update = update  # type: ignore[method-assign]


class LeavesNothingOf:
    """Every group of these steps is gone before it is packed."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps

    def __call__(self, controller: Controller) -> None:
        plain = controller._pack

        def pack(taken: Any, step: int, group_filter: Any) -> Any:
            return None if step in self.steps else plain(taken, step, group_filter)

        controller._pack = pack  # type: ignore[method-assign]


@pytest.mark.parametrize("fault", [MovesOnly(0, 2), LeavesNothingOf(1, 3)], ids=["flat", "empty"])
def test_with_a_version_every_other_step_what_the_first_of_two_moved_is_published_after_the_second(
    tiny_run: TinyRun, fault: MovesOnly | LeavesNothingOf
) -> None:
    every = {"run.schedule": "separate_async", "sync.every_steps": 2, "buffer.max_staleness_steps": 2}
    run = tiny_run(num_steps=4, faults=[fault], **every)
    published = [(e["weight_version"], e.get("step")) for e in run.events_of("publication")]
    assert published == [(0, None), (1, 1), (2, 3)]
    assert all(e["changed_frac"] > 0 for e in run.events_of("publication"))


def test_a_step_without_a_batch_gives_out_no_new_version_where_the_newest_serves(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=3, faults=[LeavesNothingOf(1)], **{"run.schedule": "separate_async"})
    assert [(e["weight_version"], e.get("step")) for e in run.events_of("publication")] == [
        (0, None),
        (1, 0),
        (2, 2),
    ]


def test_the_last_step_is_published_out_of_its_turn(tiny_run: TinyRun) -> None:
    """What is saved, evaluated and handed on at the end is what was proven."""
    every = {"run.schedule": "separate_async", "sync.every_steps": 2, "buffer.max_staleness_steps": 2}
    run = tiny_run(num_steps=3, **every)
    assert [e.get("step") for e in run.events_of("publication")] == [None, 1, 2]
