"""Trainer ranks and replicas as Ray actors of this machine, and what a run does when they die or hang.

One small Ray instance serves all tests; every run starts its own actors on it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster_faults import KillInGeneration, small_ray
from rollbook.cli.main import main
from rollbook.controller import calibrate, contention
from rollbook.controller.loop import Controller
from rollbook.controller.replay import replay_run
from rollbook.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    EngineDownError,
    EngineError,
    TrainerDownError,
)
from rollbook.modeling.load import load_model
from rollbook.modeling.lora import base_digest
from rollbook.sync.report import PublicationReport
from tiny_run import RunResult, run_tiny, tiny_config

ray = pytest.importorskip("ray", reason="Ray is not installed (extra `ray`)")

from rollbook.cluster.meeting import EngineFacts  # noqa: E402
from rollbook.cluster.rank import FinishedStream  # noqa: E402
from rollbook.cluster.replica import ReplicaActor  # noqa: E402
from rollbook.cluster.replicas import RayPool, RemoteEngine, RemotePublisher  # noqa: E402
from rollbook.cluster.trainer import RemoteTrainer  # noqa: E402

ON_RAY = {"cluster.kind": "ray", "rollout.num_replicas": 2, "rollout.batch_invariant": True}
"""Rounding in a batch must not depend on which replica a request went to."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with small_ray(num_cpus=16):
        yield


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """The same run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_tiny(folder, num_steps=3, **{**ON_RAY, "cluster.kind": "inproc"})


def assert_same_run(ours: RunResult, theirs: RunResult) -> None:
    assert ours.trained == theirs.trained
    for name, tensor in ours.parameters.items():
        torch.testing.assert_close(tensor, theirs.parameters[name], rtol=0, atol=2e-5)


def publications(run: RunResult) -> list[tuple[int, list[int]]]:
    return [(event["weight_version"], event["committed"]) for event in run.events_of("publication")]


@pytest.mark.parametrize("num_replicas", [2, 1])
def test_a_replica_killed_while_it_generates_is_replaced_and_only_its_requests_are_made_again(
    tmp_path: Path, undisturbed: RunResult, num_replicas: int
) -> None:
    """Another replica takes them; where there is none, they wait until it is back."""
    last = num_replicas - 1
    kill = KillInGeneration(last)
    run = run_tiny(tmp_path, num_steps=3, faults=[kill], **{**ON_RAY, "rollout.num_replicas": num_replicas})
    assert len(kill.pids) == 1
    assert_same_run(run, undisturbed)
    assert {event["replica_id"] for event in run.events_of("quarantined")} == {last}
    assert publications(run)[-1] == (3, list(range(num_replicas))), "all hold the last version, proven"


@dataclass
class KillInPublication:
    """The replica's process is killed as soon as version 2 is on its way."""

    replica_id: int
    pids: list[int] = field(default_factory=list)

    def __call__(self, controller: Controller) -> None:
        engine: Any = controller.router.engines[self.replica_id]
        publisher: Any = controller.publisher
        plain, each = publisher.publish, publisher.trainer.each

        def killing(calls: Any) -> Any:
            name, args = calls[0]
            if name == "publish" and args[0] == 2 and not self.pids:
                self.pids.append(engine.address.pid)
                os.kill(engine.address.pid, signal.SIGKILL)
            return each(calls)

        async def publish(weight_version: int, *, moved: bool = True) -> PublicationReport:
            if weight_version == 4 and engine.replica_id in engine._pool._restarts:
                await engine._pool.is_back(
                    engine
                )  # whenever the new process is there, it is before the last one
            return await plain(weight_version, moved=moved)

        publisher.publish, publisher.trainer.each = publish, killing


@pytest.mark.parametrize("transport", ["shm", "broadcast"])
def test_a_replica_killed_during_a_publication_misses_it_and_is_re_synced(
    tmp_path: Path, transport: str
) -> None:
    """Also where nobody asks it for a response any more, because it is out of service."""
    kill = KillInPublication(1)
    overrides = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 1, "rollout.num_threads": 1}
    overrides |= {"sync.transport": transport, "sync.receive_deadline_s": 20.0, "sync.every_steps": 1}
    run = run_tiny(tmp_path, num_steps=4, faults=[kill], **{**ON_RAY, **overrides})
    assert len(kill.pids) == 1
    told = publications(run)
    assert (2, [0]) in told
    assert told[-1] == (4, [0, 1]), "all hold the last version, proven"
    assert {event["replica_id"] for event in run.events_of("quarantined")} == {1}
    trained = [prompt for step in run.trained for prompt in step]
    assert len(trained) == len(set(trained)) == 4 * 4, "none lost, none twice"


def test_the_only_replica_killed_during_a_publication_is_started_again_and_the_step_goes_on(
    tmp_path: Path, undisturbed: RunResult
) -> None:
    kill = KillInPublication(0)
    run = run_tiny(tmp_path, num_steps=3, faults=[kill], **{**ON_RAY, "rollout.num_replicas": 1})
    assert len(kill.pids) == 1
    assert_same_run(run, undisturbed)
    assert [version for version, committed in publications(run) if committed == [0]][-2:] == [2, 3]


def test_a_killed_trainer_rank_sends_the_run_back_to_its_checkpoint_and_the_result_is_the_same(
    tmp_path: Path, undisturbed: RunResult
) -> None:
    killed: list[int] = []

    def kill_in_update(controller: Controller) -> None:
        trainer: Any = controller.trainer
        plain = trainer.update

        def update(batch: Any, objective: Any, **keywords: Any) -> Any:
            if batch.step == 2 and not killed:
                killed.append(ray.get(trainer.actors[1].pid.remote()))
                os.kill(killed[0], signal.SIGKILL)
            return plain(batch, objective, **keywords)

        trainer.update = update

    overrides = {"cluster.num_trainer_ranks": 2, "rollout.num_replicas": 1, "checkpoint.every_steps": 1}
    run = run_tiny(tmp_path, num_steps=3, faults=[kill_in_update], **{**ON_RAY, **overrides})
    assert len(killed) == 1
    assert_same_run(run, undisturbed)
    assert "rank 1" in run.events_of("run_failed")[0]["error"]


def test_adapters_alone_reach_replicas_that_hold_the_trainers_base(tmp_path: Path) -> None:
    """Ray's replicas load the base themselves, and prove it: the run is the one of a single process."""
    overrides = {**ON_RAY, "rollout.num_replicas": 1, "model.lora": {"publish": "adapter", "rank": 2}}
    alone = run_tiny(tmp_path, name="alone", num_steps=2, **{**overrides, "cluster.kind": "inproc"})
    run = run_tiny(tmp_path, name="ray", num_steps=2, **overrides)
    assert_same_run(run, alone)
    (event, *_) = run.events_of("publication")
    assert event["num_tensors"] == event["num_adapter_tensors"] > 0


def test_adapters_alone_are_not_served_on_another_base() -> None:
    config = tiny_config(**{"model.lora": {"publish": "adapter", "rank": 2}})
    other = tiny_config(**{"model.lora": {"publish": "adapter", "rank": 2}, "model.seed": 1})
    theirs = base_digest(load_model(config.model, dtype="float32", with_tokenizer=False))
    facts = EngineFacts(dtype="float32", eos_ids=(), base_digest=theirs, config_json="")
    same, foreign = (
        ReplicaActor(config, 0, host="127.0.0.1"),
        ReplicaActor(other, 3, host="127.0.0.1"),
    )
    same._facts = foreign._facts = facts
    same._load()
    with pytest.raises(EngineError, match="the base of replica 3 has the digest"):
        foreign._load()


@pytest.mark.parametrize(
    "how",
    [
        {"sync.transport": "shm"},
        {"sync.transport": "disk", "sync.disk_dir": "{}/w", "sync.quantize": "int8", "sync.delta": True},
        {"sync.transport": "broadcast", "sync.quantize": "fp8_block"},
    ],
    ids=["shm", "int8 deltas on a disk", "fp8 by broadcast"],
)
def test_a_run_on_ray_repeats_in_one_process(how: dict[str, Any], tmp_path: Path) -> None:
    """Codes and scales of quantized weights, and their digests, too."""
    how = {
        name: value.replace("{}", str(tmp_path)) if isinstance(value, str) else value
        for name, value in how.items()
    }
    more = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 1, **how}
    run = run_tiny(tmp_path, num_steps=2, **{**ON_RAY, **more})
    report = replay_run(run.folder)
    assert report.is_equal, report.differences
    assert (report.num_steps, report.num_digests) == (2, 3)


def test_codes_and_scales_are_made_of_the_gathered_rows_of_two_ranks(tmp_path: Path) -> None:
    ways = {"sync.quantize": "int8", "cluster.num_trainer_ranks": 2, "rollout.num_replicas": 1}
    run = run_tiny(tmp_path, num_steps=1, **{**ON_RAY, **ways})
    alone = run_tiny(
        tmp_path,
        name="alone",
        num_steps=1,
        **{**ON_RAY, **ways, "cluster.kind": "inproc", "cluster.num_trainer_ranks": 1},
    )
    (ours, *_), (theirs, *_) = run.events_of("publication"), alone.events_of("publication")
    assert publications(run) == [(0, [0]), (1, [0])]
    assert ours["num_tensors"] > len(run.parameters), "scales beside codes"
    assert (ours["num_tensors"], ours["digest"]) == (theirs["num_tensors"], theirs["digest"])


# ---- the plan


@pytest.fixture
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A calibration whose numbers nobody reads."""
    monkeypatch.setattr(calibrate, "ROUNDS_S", 0.1)
    monkeypatch.setattr(contention, "WINDOW_S", 0.05)
    monkeypatch.setattr(contention, "CONTENTION_ROUNDS", 1)


def test_a_run_on_ray_is_calibrated_in_its_actors_and_its_numbers_stay_the_same(
    tmp_path: Path,
    undisturbed: RunResult,
    short_windows: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does the trainer's state come here and go back: the ranks keep what trials change."""
    for method in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(RemoteTrainer, method, None)
    run = run_tiny(tmp_path, num_steps=3, **{**ON_RAY, "rollout.num_replicas": 1, "plan.is_on": True})
    assert_same_run(run, undisturbed)
    (event,) = run.events_of("plan")
    plan = json.loads((run.folder / "plan.json").read_text())
    measured = plan["machine"]["coefficients"]
    assert measured["call"]["base_s"] > 0, "the way to the actors is paid for"
    assert measured["decode"]["base_s"] + measured["decode"]["per_row_s"] > 0
    assert event["stages"]["rollout"] > 0 and event["stages"]["train"] > measured["call"]["base_s"]
    for step in run.metrics:
        assert_all_expected(step)
    with pytest.raises(SystemExit) as ended:
        main(["reconcile", str(run.folder), "--json"])
    assert ended.value.code == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert {"rollout", "train", "sync", "other"} <= {stage["stage"] for stage in stages}
    assert all(stage["expected_s"] > 0 and stage["measured_s"] > 0 for stage in stages)


def test_every_network_of_a_run_on_ray_is_expected_and_both_sides_are_measured_at_once(
    tmp_path: Path, short_windows: None
) -> None:
    """A critic and a reference, engines beside."""
    run = run_tiny(
        tmp_path,
        num_steps=2,
        **{
            **ON_RAY,
            "rollout.num_replicas": 1,
            "rollout.num_threads": 1,
            "plan.is_on": True,
            "run.schedule": "separate_async",
            "buffer.max_staleness_steps": 1,
            "algorithm.name": "ppo",
            "algorithm.kl.placement": "reward",
            "algorithm.kl.coef": 0.1,
        },
    )
    plan = json.loads((run.folder / "plan.json").read_text())
    assert min(plan["machine"]["coefficients"]["contention"].values()) >= 1
    assert {"values", "critic"} == plan["machine"]["coefficients"]["passes"].keys()
    for step in run.metrics:
        assert {"timing_s/ref", "timing_s/values", "timing_s/update_critic"} <= step.keys()
        assert_all_expected(step)


def assert_all_expected(step: dict[str, Any]) -> None:
    """Every stage that was timed has an expectation."""
    timed = {name.removeprefix("timing_s/") for name in step if name.startswith("timing_s/")}
    expected = {name.removeprefix("expected_s/") for name in step if name.startswith("expected_s/")}
    assert timed - expected <= {"other", "testing"}, "between the stages; no evaluation was due"


# ---- calls, without a run


def stand_in() -> Any:
    """An actor that answers what it is told to."""

    class StandIn:
        async def start(self, facts: Any = None) -> str:
            return "here"

        async def do(self, what: str, *args: Any) -> Any:
            import asyncio

            if what == "stats":
                await asyncio.sleep(3600)
            return len(args)

        def fail(self) -> None:
            raise DataError("a logprob is NaN", "look at the batch")

        def update(self, *args: Any) -> Any:
            return {}, {}

    return ray.remote(StandIn)


def remote_trainer(actors: list[Any], deadline_s: float) -> RemoteTrainer:
    trainer = RemoteTrainer.__new__(RemoteTrainer)
    trainer.actors, trainer.deadline_s, trainer._lost = actors, deadline_s, ""
    trainer._lock = threading.Lock()
    return trainer


def test_a_replica_that_dies_while_the_trainer_is_made_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process waits for the trainer's ranks, longer than it takes to start."""
    flag = tmp_path / "died"

    class DiesOnce(ReplicaActor):
        def warm_up(self) -> None:
            if not flag.exists():
                flag.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr("rollbook.cluster.ray.ReplicaActor", DiesOnce)
    run = run_tiny(tmp_path, num_steps=1, **{"cluster.kind": "ray"})
    assert flag.exists()
    assert publications(run)[-1] == (1, [0])


@pytest.mark.parametrize("num_read", [0, 1, 3])
def test_rank_0_goes_through_an_export_to_its_end_wherever_a_publication_ended(num_read: int) -> None:
    """The other ranks take part in all of its gathers."""
    exported: list[int] = []

    def export() -> Iterator[int]:
        for i in range(3):
            exported.append(i)
            yield i

    trainer: Any = SimpleNamespace(export_weights=export)
    stream = FinishedStream(trainer)
    for _ in range(2):
        exported.clear()
        stream.begin()
        if num_read:
            list(itertools.islice(stream.export_weights(), num_read))
        stream.finish()
        assert exported == [0, 1, 2]


def test_a_ray_that_does_not_start_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")  # as Ray raises it

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ConfigError, match="Ray does not start on this machine: The current node timed out"):
        run_tiny(tmp_path, **ON_RAY)


async def test_a_call_that_hangs_names_the_actor_the_call_and_the_deadline() -> None:
    config = tiny_config(**{"cluster.call_deadline_s": 0.5})
    pool = RayPool(config=config.cluster, recorder=None, publisher=None)  # type: ignore[arg-type]
    facts = EngineFacts(dtype="float32", eos_ids=(), base_digest="", config_json="")
    engine = RemoteEngine(7, config, lambda: stand_in().remote(), facts, pool)
    await engine.start()
    with pytest.raises(DeadlineError, match="replica 7 did not answer to stats within 0.5 s"):
        await engine.stats()
    await engine.close()
    with pytest.raises(EngineDownError, match="replica 7 is down"):
        await engine.pause()
    actors = [stand_in().remote() for _ in range(2)]
    await asyncio.to_thread(ray.get, [actor.start.remote() for actor in actors])
    trainer = remote_trainer(actors, 2.0)
    with pytest.raises(DeadlineError, match=r"rank 1 of the trainer \(stats\) did not answer within 2 s"):
        trainer.each([("do", ("other",)), ("do", ("stats",))])
    with pytest.raises(TrainerDownError, match=r"lost a rank: rank 1 of the trainer \(stats\)"):
        trainer.each([("do", ("other",)), ("do", ("other",))])


def test_what_a_rank_raises_arrives_as_it_was_raised() -> None:
    actor = stand_in().remote()
    with pytest.raises(DataError, match="a logprob is NaN"):
        remote_trainer([actor], 30.0).call("fail")
    ray.kill(actor)


def test_calls_leave_nothing_in_the_object_store() -> None:
    actor = stand_in().remote()
    trainer = remote_trainer([actor], 60.0)
    batch = tiny_batch()
    for _ in range(300):  # three times what the store holds
        trainer.update(batch, objective=None)  # type: ignore[arg-type]
    ends_at_s = time.monotonic() + 30
    text = ""
    while "Plasma memory usage 0 MiB, 0 objects" not in text and time.monotonic() < ends_at_s:
        text = store_usage()  # objects are freed in batches, a moment later
    assert "Plasma memory usage 0 MiB, 0 objects" in text
    ray.kill(actor)


def test_a_run_holds_no_more_in_the_object_store_as_it_goes_on(tmp_path: Path) -> None:
    """`bench/cluster.py` shows the same over 1,000 steps."""
    held: list[int] = []

    def num_objects() -> int:
        found = re.search(r"Plasma memory usage [0-9.]+ MiB, ([0-9]+) objects", store_usage())
        return int(found[1]) if found else 0

    def watch(controller: Controller) -> None:
        trainer: Any = controller.trainer
        plain = trainer.update

        def update(batch: Any, objective: Any, **keywords: Any) -> Any:
            ends_at_s = time.monotonic() + 30
            while len(held) == 19 and num_objects() > 4 and time.monotonic() < ends_at_s:
                pass  # objects are freed in batches, a moment later
            held.append(num_objects())
            return plain(batch, objective, **keywords)

        trainer.update = update

    run_tiny(tmp_path, num_steps=20, faults=[watch], **{**ON_RAY, "rollout.num_replicas": 1})
    assert len(held) == 20
    assert held[-1] <= 4, f"two objects a step are kept: {held}"


def store_usage() -> str:
    """Of the object store of this test's Ray: others may run on the machine."""
    from ray._private.internal_api import memory_summary

    return str(memory_summary(ray.get_runtime_context().gcs_address, stats_only=True))


def tiny_batch() -> Any:
    """Large enough for the object store: Ray keeps arguments under 100 KB out of it."""
    import numpy as np

    return np.zeros(1 << 18, np.float32)


def test_a_drill_that_wants_the_ports_is_told_where_they_are() -> None:
    with pytest.raises(ConfigError, match="in the process of trainer rank 0"):
        _ = RemotePublisher(remote_trainer([], 1.0)).ports
