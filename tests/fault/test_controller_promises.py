"""The promises of the design, held by the real loop: each test names the fault or the fact, and what a user sees."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollbook.buffer.buffer import StarvedError
from rollbook.controller.loop import Controller
from rollbook.controller.rollout import FailureRateError, Member
from rollbook.errors import ConfigError, DataError, DeadlineError, EngineError, SyncError
from rollbook.modeling.attention import packed_layout
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import load_model
from rollbook.observe.events import EVENT_KINDS
from rollbook.rollout.engine import EngineStats, GenerateRequest, Response
from rollbook.sync.digest import digest
from rollbook.sync.report import PublicationReport
from rollbook.types import Ids, SamplingParams, Trajectory
from run_oracles import NotedWeights, label_gaps, rows, versions_of
from tiny_run import Fault, TinyRun, resume_tiny, tiny_config

REPLICAS_APART = {"run.schedule": "separate_async", "rollout.num_replicas": 2}
"""Two engines with weights of their own."""
TENSOR = "model.layers.0.mlp.down_proj.weight"


# ---- 1. A version is proven, not assumed


class LosesWrites:
    """One replica's engine drops every write to one tensor: of one version, or from it on."""

    def __init__(self, *, replica_id: int = 0, version: int, once: bool) -> None:
        self.replica_id, self.version, self.once = replica_id, version, once
        self.num_lost = 0

    def __call__(self, controller: Controller) -> None:
        weights = controller.router.engines[self.replica_id]._runner.weights  # type: ignore[attr-defined]
        plain = weights.write

        def write(name: str, tensor: Tensor) -> None:
            is_hit = name == TENSOR and controller.publisher._under_way is not None
            if (
                is_hit
                and controller.publisher._under_way >= self.version
                and not (self.once and self.num_lost)
            ):
                self.num_lost += 1
                return
            plain(name, tensor)

        weights.write = write


def test_a_lost_write_fails_the_publication_by_name_and_its_repetition_is_proven(tiny_run: TinyRun) -> None:
    weights, fault = NotedWeights(), LosesWrites(version=2, once=True)
    run = tiny_run(num_steps=3, faults=[weights, fault], **{"run.schedule": "separate_async"})
    assert fault.num_lost == 1
    (failed,) = run.events_of("publication_failed")
    assert failed["weight_version"] == 2
    assert TENSOR in failed["error"]
    assert run.metrics[1]["sync/num_failed"] == 1
    assert [e["weight_version"] for e in run.events_of("publication")] == [0, 1, 2, 3]
    assert label_gaps(run, weights).max() < 2e-5


@pytest.mark.parametrize("probe", [True, False])
def test_a_replica_that_misses_a_version_serves_nothing_until_it_holds_one(
    tiny_run: TinyRun, probe: bool
) -> None:
    weights, fault = NotedWeights(), LosesWrites(replica_id=1, version=2, once=True)
    run = tiny_run(num_steps=4, faults=[weights, fault], **REPLICAS_APART, **{"sync.probe": probe})
    (quarantined,) = run.events_of("quarantined")
    assert quarantined["replica_id"] == 1
    assert TENSOR in quarantined["why"]
    replicas: dict[int, set[int]] = defaultdict(set)
    for row in rows(run):
        replicas[row["step"]].add(row["replica_id"])
    assert replicas == {0: {0, 1}, 1: {0, 1}, 2: {0}, 3: {0, 1}}
    assert [m["replica/num_serving"] for m in run.metrics] == [2, 1, 2, 2]
    assert label_gaps(run, weights).max() < 2e-5


def test_a_publication_that_keeps_failing_stops_a_run_that_goes_on_once_it_is_mended(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    apart = {"run.schedule": "separate_async", "rollout.batch_invariant": True, "checkpoint.every_steps": 1}
    whole = tiny_run(name="whole", num_steps=3, **apart)
    with pytest.raises(SyncError, match=TENSOR) as caught:
        tiny_run(num_steps=3, faults=[LosesWrites(version=2, once=False)], **apart)
    assert "version 2 was not published" in caught.value.what
    resumed = resume_tiny(tmp_path / "run")
    assert resumed.trained == whole.trained
    for name, tensor in whole.parameters.items():
        assert tensor.equal(resumed.parameters[name]), name


def test_weights_that_moved_and_arrive_unmoved_stop_the_run(tiny_run: TinyRun) -> None:
    """BR-005's kind: the export hands out a copy that nobody updates."""

    def stale_export(controller: Controller) -> None:
        held = {name: tensor.clone() for name, tensor in controller.trainer.export_weights()}
        controller.trainer.export_weights = lambda: iter(held.items())  # type: ignore[method-assign]

    with pytest.raises(
        SyncError, match="equal version 0 bit for bit, and the trainer says that it has moved"
    ):
        tiny_run(faults=[stale_export], **{"run.schedule": "separate_async"})


def test_an_update_below_what_the_type_resolves_is_no_fault(tiny_run: TinyRun) -> None:
    """The master weights keep it; in bfloat16 the same bits are published again."""
    run = tiny_run(num_steps=2, **{"model.dtype": "bfloat16", "trainer.lr": 1e-12})
    assert [m["training/weight_version"] for m in run.metrics] == [1, 2]
    assert all(m["trainer/actor_unmoved_updates"] == m["trainer/actor_updates"] >= 1 for m in run.metrics)


def test_steps_of_flat_rewards_move_nothing_and_are_no_fault(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=2, **{"reward.terms.0.function": "tiny_rewards:zero"})
    assert [m["training/weight_version"] for m in run.metrics] == [1, 2]
    assert [m["actor/grad_norm"] for m in run.metrics] == [0, 0]
    assert [e["changed_frac"] for e in run.events_of("publication")] == [1, 0, 0]


def test_an_update_that_moves_nothing_after_one_that_did_is_no_fault(tiny_run: TinyRun) -> None:
    """What was moved is forgotten with the publication that brought it."""

    def stands_still(controller: Controller) -> None:
        plain = controller.trainer.update

        def update(batch: Any, *args: Any, **keywords: Any) -> Any:
            return plain(batch, *args, **keywords, lr=0.0 if batch.step else None)

        controller.trainer.update = update  # type: ignore[method-assign]

    run = tiny_run(num_steps=3, faults=[stands_still])
    changed = [e["changed_frac"] for e in run.events_of("publication")]
    assert changed[1] > 0 and changed[2:] == [0, 0]


class ShiftsLogprobs:
    """An engine that holds the right bytes and computes something else with them, from one version on."""

    def __init__(self, *, replica_id: int, version: int, nats: float) -> None:
        self.replica_id, self.version, self.nats = replica_id, version, nats

    def __call__(self, controller: Controller) -> None:
        engine: Any = controller.router.engines[self.replica_id]
        plain = engine._runner.step

        def step(plan: Any, draws: Any) -> Any:
            token_ids, logprobs = plain(plan, draws)
            if engine._scheduler.weight_version >= self.version:
                logprobs = logprobs - np.float32(self.nats)
            return token_ids, logprobs

        engine._runner.step = step


def test_the_probe_takes_out_a_replica_whose_bytes_are_right_and_whose_logprobs_are_not(
    tiny_run: TinyRun,
) -> None:
    shifted = ShiftsLogprobs(replica_id=1, version=2, nats=0.05)
    run = tiny_run(num_steps=4, faults=[shifted], **{"rollout.num_replicas": 2})
    assert [e["weight_version"] for e in run.events_of("probe_failed")] == [2, 3, 4]
    assert (
        "replica 1: its logprobs are 0.05 nats from the trainer's" in run.events_of("probe_failed")[0]["why"]
    )
    assert [m["sync/probe_gap_max"] > 0.04 for m in run.metrics] == [False, True, True, True]
    assert {row["replica_id"] for step in (2, 3) for row in run.trajectories(step)} == {0}
    assert max(m["training/logprob_gap/max"] for m in run.metrics) < 1e-5


def test_a_replica_that_does_not_answer_the_probe_in_time_is_taken_out(tiny_run: TinyRun) -> None:
    def late(controller: Controller) -> None:
        engine = controller.router.engines[1]
        plain = engine.generate

        async def generate(request: GenerateRequest) -> Response:
            if request.request_id == "probe-1":
                raise DeadlineError("request probe-1 has no response after 5 s", "look at the replica")
            return await plain(request)

        engine.generate = generate  # type: ignore[method-assign]

    run = tiny_run(num_steps=2, faults=[late], **{"rollout.num_replicas": 2})
    (failed,) = run.events_of("probe_failed")
    assert (failed["replica_id"], failed["why"]) == (1, "request probe-1 has no response after 5 s")
    assert {row["replica_id"] for row in run.trajectories(1)} == {0}


def test_a_probe_that_fails_everywhere_stops_the_run(tiny_run: TinyRun) -> None:
    shifted = ShiftsLogprobs(replica_id=0, version=1, nats=0.05)
    with pytest.raises(
        SyncError, match="no replica gives the trainer's logprobs: replica 0: its logprobs are 0.05"
    ):
        tiny_run(faults=[shifted])
    run = tiny_run(name="regardless", faults=[shifted], **{"sync.probe": False})
    assert run.metrics[1]["training/logprob_gap/max"] == pytest.approx(0.05, abs=1e-4)


class Twins:
    """After every publication: the same bytes, the same version and the same greedy answer on both sides."""

    def __init__(self) -> None:
        self.digests: list[dict[str, str]] = []

    def __call__(self, controller: Controller) -> None:
        plain = controller.publisher.publish

        async def publish(weight_version: int, *, moved: bool = True) -> PublicationReport:
            report = await plain(weight_version, moved=moved)
            trainers = {name: digest(tensor) for name, tensor in controller.trainer.export_weights()}
            for engine in controller.router.engines:
                live = await engine.live_weights()  # type: ignore[attr-defined]

                def engines(live: Any = live) -> dict[str, str]:
                    return {name: digest(live.read(name)) for name in live.specs()}

                assert await engine.run_between_steps(engines) == trainers  # type: ignore[attr-defined]
                assert (await engine.stats()).weight_version == weight_version
            self.digests.append(trainers)
            return report

        controller.publisher.publish = publish  # type: ignore[method-assign]
        resume = controller.router.resume

        async def then_ask() -> None:
            await resume()
            prompt_ids = controller.train_prompts[0].prompt_ids
            for engine in controller.router.engines:
                request = GenerateRequest(
                    request_id=f"twin-{controller.weight_version}",
                    prompt_ids=prompt_ids,
                    sampling=SamplingParams(max_response_tokens=5, temperature=0, ignore_eos=True),
                    seed=0,
                    group_id=-(10**6),
                    member_idx=0,
                )
                response = await engine.generate(request)
                assert response.response_ids.tolist() == greedy(controller, prompt_ids, 5)

        controller.router.resume = then_ask  # type: ignore[method-assign]


def greedy(controller: Controller, prompt_ids: Ids, num_tokens: int) -> list[int]:
    """The trainer's own continuation, one forward a token."""
    model, ids = controller.trainer.model, prompt_ids.tolist()
    with torch.no_grad():
        for _ in range(num_tokens):
            positions = torch.arange(len(ids))[None]
            hidden = model.hidden_states(torch.tensor([ids]), positions, packed=packed_layout([0, len(ids)]))
            ids.append(int((hidden[0, -1] @ model.lm_head().weight.T).argmax()))
    return ids[len(prompt_ids) :]


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize("schedule", ["sync", "colocate_async"])
def test_br001_no_option_about_memory_switches_the_publication_off(
    tiny_run: TinyRun, schedule: str, staging: str, prefix_cache: bool, gradient_checkpointing: bool
) -> None:
    """Shared weights where staged, own ones where direct; three steps that move every tensor."""
    twins = Twins()
    run = tiny_run(
        num_steps=3,
        faults=[twins],
        **{
            "run.schedule": schedule,
            "run.groups_per_step": 2,
            "buffer.max_staleness_steps": 0 if schedule == "sync" else 1,
            "sync.staging": staging,
            "rollout.prefix_cache": prefix_cache,
            "trainer.gradient_checkpointing": gradient_checkpointing,
        },
    )
    assert len(twins.digests) == 4
    assert all(twins.digests[0][name] != twins.digests[3][name] for name in twins.digests[0])
    assert max(m.get("training/logprob_gap/max", 0) for m in run.metrics) < 1e-4


class Naps:
    """The engines sleep while the trainer works, and wake before the publication."""

    def __init__(self, level: int) -> None:
        self.level = level

    def __call__(self, controller: Controller) -> None:
        router, publish = controller.router, controller.publisher.publish
        pause = router.pause

        async def pause_and_sleep(mode: Any) -> None:
            await pause(mode)
            for engine in router.engines:
                await engine.sleep(self.level)

        async def wake_and_publish(weight_version: int, *, moved: bool = True) -> PublicationReport:
            for engine in router.engines:
                await engine.wake()
            return await publish(weight_version, moved=moved)

        router.pause = pause_and_sleep  # type: ignore[method-assign]
        controller.publisher.publish = wake_and_publish  # type: ignore[method-assign]


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("staging", ["staged", "direct"])
@pytest.mark.parametrize("schedule", ["sync", "colocate_async"])
def test_br002_sleep_between_phases_changes_no_token(
    tiny_run: TinyRun, schedule: str, staging: str, level: int
) -> None:
    options = {
        "run.schedule": schedule,
        "buffer.max_staleness_steps": 0 if schedule == "sync" else 1,
        "sync.staging": staging,
        "rollout.batch_invariant": True,
        "rollout.kv_policy": "recompute",
    }
    weights = NotedWeights()
    asleep = tiny_run(name="asleep", num_steps=3, faults=[weights, Naps(level)], **options)
    assert label_gaps(asleep, weights).max() < 2e-5
    if schedule == "sync":
        awake = tiny_run(name="awake", num_steps=3, **options)
        assert [r["token_ids"] for r in rows(asleep)] == [r["token_ids"] for r in rows(awake)]
        for name, tensor in awake.parameters.items():
            assert tensor.equal(asleep.parameters[name]), name
    assert max(m.get("training/logprob_gap/max", 0) for m in asleep.metrics) < 1e-4


def test_br026_prompts_that_come_again_are_never_answered_from_keys_of_older_weights(
    tiny_run: TinyRun,
) -> None:
    """The same four prompts in every step; members of a group share what the first of them computed."""
    weights = NotedWeights()
    run = tiny_run(
        num_steps=4,
        faults=[weights],
        **{"data.sources.0.num_prompts": 4, "rollout.page_tokens": 2, "rollout.kv_pool_tokens": 256},
    )
    assert {frozenset(step) for step in run.trained} == {frozenset(f"addition/{n}" for n in range(4))}
    assert label_gaps(run, weights).max() < 2e-5
    assert [m["rollout/prefix_hit_frac"] > 0 for m in run.metrics] == [True] * 4


# ---- 4. Nothing is lost or counted twice


def is_balanced(metrics: dict[str, Any]) -> bool:
    states = ("running", "finished", "failed", "trained", "evicted")
    return bool(metrics["buffer/num_admitted"] == sum(metrics[f"buffer/num_{state}"] for state in states))


class KillsEngine:
    """One replica's engine dies while it runs two sequences at once under `version`."""

    def __init__(self, *, replica_id: int, version: int) -> None:
        self.replica_id, self.version = replica_id, version

    def __call__(self, controller: Controller) -> None:
        engine: Any = controller.router.engines[self.replica_id]
        plain = engine._runner.step

        def step(plan: Any, draws: Any) -> Any:
            if engine._scheduler.weight_version == self.version and engine._scheduler.num_running > 1:
                raise RuntimeError("device-side assert")
            return plain(plan, draws)

        engine._runner.step = step


@pytest.mark.parametrize("schedule", ["sync", "separate_async"])
def test_a_replica_that_dies_hands_its_requests_on_and_changes_no_number(
    tiny_run: TinyRun, schedule: str
) -> None:
    apart = {"run.schedule": schedule, "rollout.num_replicas": 2, "rollout.batch_invariant": True}
    healthy = tiny_run(name="healthy", num_steps=3, **apart)
    run = tiny_run(num_steps=3, faults=[KillsEngine(replica_id=1, version=1)], **apart)
    assert (
        "the engine of replica 1 failed: RuntimeError: device-side assert"
        in run.events_of("quarantined")[0]["why"]
    )
    assert [m["replica/num_serving"] for m in run.metrics] == [2, 1, 1]
    assert {row["replica_id"] for row in run.trajectories(2)} == {0}
    assert [m["failures/num"] for m in run.metrics] == [0, 0, 0]
    assert run.trained == healthy.trained
    for name, tensor in healthy.parameters.items():
        assert tensor.equal(run.parameters[name]), name


def test_a_run_whose_last_replica_dies_stops_with_the_cause(tiny_run: TinyRun) -> None:
    with pytest.raises(FailureRateError, match="none of 1 replicas is in service.*device-side assert"):
        tiny_run(num_steps=3, faults=[KillsEngine(replica_id=0, version=0)])


def test_a_trajectory_that_never_ends_is_a_timeout_and_its_group_goes_on(tiny_run: TinyRun) -> None:
    def hangs(controller: Controller) -> None:
        plain = controller.rollout.produce

        async def produce(member: Member) -> Trajectory:
            if (member.group_id, member.member_idx) == (2, 1):
                await asyncio.Event().wait()
            return await plain(member)

        controller.rollout.produce = produce

    run = tiny_run(
        faults=[hangs],
        **{"rollout.group_size": 3, "buffer.group_deadline_s": 2.0, "run.max_failure_frac": 0.5},
    )
    assert run.metrics[0]["failures/timeout/num"] == 1
    (late,) = [row for row in run.trajectories(0) if row["failure_kind"]]
    assert late["failure_message"] == "not finished after 2 s, in turn 0 on no replica yet"
    assert len(run.trained[0]) == 4
    assert all(is_balanced(m) for m in run.metrics)


def test_a_response_that_never_comes_is_a_timeout_that_names_its_replica(tiny_run: TinyRun) -> None:
    """Two replicas; the second never answers one request."""

    def hangs(controller: Controller) -> None:
        engine: Any = controller.router.engines[1]
        plain = engine.generate
        hung: list[str] = []

        async def generate(request: GenerateRequest) -> Response:
            if request.group_id >= 0 and request.request_id.endswith("/1#0") and not hung:
                hung.append(request.request_id)
                await asyncio.Event().wait()
            response: Response = await plain(request)
            return response

        engine.generate = generate

    deadline = {"buffer.group_deadline_s": 3.0, "rollout.num_replicas": 2, "run.max_failure_frac": 0.5}
    run = tiny_run(faults=[hangs], **deadline, **{"rollout.group_size": 3})
    (late,) = [row for step in range(2) for row in run.trajectories(step) if row["failure_kind"]]
    assert (late["member_idx"], late["failure_kind"]) == (1, "timeout")
    assert late["failure_message"] == "not finished after 3 s, in turn 0 on replica 1"


def test_an_answer_that_comes_too_late_fails_by_itself_and_not_the_run(tiny_run: TinyRun) -> None:
    """The engine's own deadline passes for one held-out prompt and for one trajectory."""

    def late(controller: Controller) -> None:
        (engine,) = controller.router.engines
        plain = engine.generate

        async def generate(request: GenerateRequest) -> Response:
            if (request.group_id, request.member_idx) in ((-2, 0), (1, 0)):
                raise DeadlineError("no response after 5 s", "raise rollout.response_deadline_s")
            return await plain(request)

        engine.generate = generate  # type: ignore[method-assign]

    evaluates = {"data.held_out_frac": 0.2, "eval.num_prompts": 4, "eval.every_steps": 1}
    run = tiny_run(faults=[late], **evaluates, **{"rollout.group_size": 3, "run.max_failure_frac": 0.5})
    assert [m["val/addition/failed_frac"] for m in run.metrics] == [0.25, 0.25]
    assert [m.get("failures/timeout/num", 0) for m in run.metrics] == [1, 0]


def test_data_that_ends_in_failures_ends_the_run_and_not_in_a_wait(tiny_run: TinyRun) -> None:
    """Eight prompts, four a step; all four of the second step fail."""

    def fails_later(controller: Controller) -> None:
        plain = controller.rollout.produce

        async def produce(member: Member) -> Trajectory:
            if member.group_id >= 4:
                raise EngineError("out of memory", "fewer slots")
            return await plain(member)

        controller.rollout.produce = produce

    run = tiny_run(
        num_steps=10,
        faults=[fails_later],
        **{
            "data.sources.0.num_prompts": 8,
            "data.num_epochs": 1,
            "run.max_failure_frac": 1.0,
            "buffer.step_deadline_s": 20,
            "buffer.group_deadline_s": 10,
        },
    )
    assert [len(step) for step in run.trained] == [4, 0]
    assert run.metrics[1]["failures/engine/num"] == 8
    assert run.metrics[1]["buffer/num_failed"] == 4
    assert run.state["num_steps_done"] == 2
    assert run.state["stream"]["floor"] == 8
    assert (run.folder / "model").is_dir()


def test_a_replica_that_lies_about_its_version_stops_the_run(tiny_run: TinyRun) -> None:
    def lies(controller: Controller) -> None:
        controller.router.engines[0]._scheduler.weight_version = 7  # type: ignore[attr-defined]

    with pytest.raises((DataError, SyncError, EngineError), match="version 7"):
        tiny_run(faults=[lies])


# ---- 5. A failure is not a reward of zero

FAILING = {
    "reward.terms.0.function": "tiny_rewards:raises_on_even",
    "rollout.group_size": 4,
    "run.max_failure_frac": 1.0,
}


def test_br047_a_scorer_that_fails_on_some_responses_shifts_no_baseline(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=3, **FAILING)
    for step, metrics in enumerate(run.metrics):
        all_rows = run.trajectories(step)
        failed = [row for row in all_rows if row["failure_kind"] is not None]
        trained = [row for row in all_rows if row["loss_mask"] is not None]
        assert failed and trained
        assert {row["failure_kind"] for row in failed} == {"reward"}
        assert {row["reward"] for row in failed} == {None}
        assert not any(row["loss_mask"] for row in failed)
        assert metrics["failures/reward/num"] == metrics["failures/num"] == len(failed)
        assert metrics["critic/rewards/mean"] == pytest.approx(np.mean([row["reward"] for row in trained]))
        groups: dict[int, list[float]] = defaultdict(list)
        for row in trained:
            groups[row["group_id"]].append(row["reward"])
        assert all(len(rewards) >= 2 for rewards in groups.values())
        # Group-mean advantages over the scored members alone: their largest and smallest, by hand.
        by_hand = [(r - np.mean(g)) / (np.std(g, ddof=1) + 1e-6) for g in groups.values() for r in g]
        assert metrics["critic/advantages/max"] == pytest.approx(max(by_hand), rel=1e-3)
        assert metrics["critic/advantages/min"] == pytest.approx(min(by_hand), rel=1e-3)
        assert is_balanced(metrics)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("raises", "ZeroDivisionError: the grader divided by zero"),
        ("not_a_number", "nan"),
        ("words", "str"),
    ],
)
def test_a_scorer_that_always_fails_stops_the_run_with_its_own_words(
    tiny_run: TinyRun, function: str, cause: str, tmp_path: Path
) -> None:
    with pytest.raises((FailureRateError, ConfigError, DataError, Exception), match=cause) as caught:
        tiny_run(**{"reward.terms.0.function": f"tiny_rewards:{function}"})
    assert caught.value.args[1]
    assert not (tmp_path / "run").exists()


def test_br048_groups_are_judged_by_the_raw_score_not_by_the_length_penalty(tiny_run: TinyRun) -> None:
    """Every answer scores 0; the length penalty alone would tell them apart."""
    dapo = {
        "algorithm.name": "dapo",
        "algorithm.overlong.buffer_frac": 0.5,
        "reward.terms.0.function": "tiny_rewards:zero",
        "rollout.group_size": 4,
        "rollout.max_response_tokens": 12,
    }
    run = tiny_run(num_steps=1, **dapo, **{"algorithm.filter.refill": False})
    assert run.metrics[0]["evicted/flat/num_groups"] == 4
    assert len({row["reward"] for row in run.trajectories(0)}) > 1  # the penalty is there
    assert run.trained == [[]]
    assert run.events_of("empty_batch")
    with pytest.raises(StarvedError, match="lost 12 .*: 12 flat .score in all their members 0: 12"):
        tiny_run(name="refilled", num_steps=1, **dapo, **{"buffer.max_refills_per_step": 8})
    partial = {"buffer.max_refills_per_step": 8, "buffer.on_starvation": "train_partial"}
    run = tiny_run(name="partial", num_steps=1, **dapo, **partial)
    (found,) = [e for e in run.events_of("finding") if e["rule"] == "starved"]
    assert "has 0 of 4 groups and lost 12" in found["summary"] and "makes no update" in found["summary"]
    assert "max_refills_per_step" in found["remedy"]


def test_br085_equal_prompts_with_other_answers_are_groups_of_their_own(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Rewards are all 0 in one group and all 1 in the other: no advantage anywhere."""
    lines = [{"prompt": "11+22=", "answer": answer} for answer in ("right", "wrong")]
    (tmp_path / "twice.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = tiny_run(
        num_steps=2,
        **{
            "data.sources": [{"path": str(tmp_path / "twice.jsonl")}],
            "run.groups_per_step": 2,
            "rollout.group_size": 4,
            "reward.terms.0.function": "tiny_rewards:by_answer",
        },
    )
    for step, metrics in enumerate(run.metrics):
        assert sorted(run.trained[step]) == ["twice/0", "twice/1"]
        assert metrics["critic/advantages/max"] == metrics["critic/advantages/min"] == 0
        assert metrics["critic/rewards/mean"] == 0.5


# ---- 6. The sum is over the right tokens


@pytest.mark.parametrize(
    "aggregation",
    ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"],
)
def test_a_step_does_not_depend_on_how_it_is_split_into_micro_batches(
    tiny_run: TinyRun, aggregation: str
) -> None:
    """First moments after one update are the gradient, times a constant."""
    splits = {
        "whole": {},
        "single": {"trainer.micro_batch_tokens": 1, "trainer.share_prompts": False},
        "some": {"trainer.micro_batch_tokens": 40},
    }
    runs = {
        name: tiny_run(
            name=name,
            num_steps=1,
            **{"algorithm.aggregation": aggregation, "rollout.batch_invariant": True, **split},
        )
        for name, split in splits.items()
    }
    assert runs["single"].metrics[0]["trainer/actor_micro_batches"] == 8
    assert runs["whole"].metrics[0]["trainer/actor_micro_batches"] == 1
    means = {name: run.state["trainer"]["policy"]["means"] for name, run in runs.items()}
    for name, tensor in means["whole"].items():
        scale = tensor.abs().max().item()
        assert scale > 0
        for other in ("single", "some"):
            assert (means[other][name] - tensor).abs().max().item() < 1e-4 * scale, name
    for metric in ("actor/loss", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "critic/rewards/mean"):
        values = [run.metrics[0][metric] for run in runs.values()]
        assert values == pytest.approx([values[0]] * 3, rel=1e-4, abs=1e-7), metric


# ---- 7. Sampling is a function of seed, trajectory and token index


def test_a_run_repeats_bit_for_bit_and_another_seed_is_another_run(tiny_run: TinyRun) -> None:
    exact = {"rollout.batch_invariant": True}
    first, again = (tiny_run(name=name, **exact) for name in ("first", "again"))
    other = tiny_run(name="other", **exact, **{"run.seed": 1})
    assert all(tensor.equal(again.parameters[name]) for name, tensor in first.parameters.items())
    assert [r["token_ids"] for r in rows(first)] == [r["token_ids"] for r in rows(again)]
    assert [r["token_ids"] for r in rows(first)] != [r["token_ids"] for r in rows(other)]


@pytest.mark.parametrize(
    "crowd",
    [
        {"rollout.num_replicas": 3},
        {"rollout.num_slots": 1},
        {"rollout.kv_pool_tokens": 40},
        {"rollout.prefix_cache": False},
    ],
)
def test_what_is_sampled_does_not_depend_on_neighbors_replicas_or_memory(
    tiny_run: TinyRun, crowd: dict[str, Any]
) -> None:
    exact = {"rollout.batch_invariant": True}
    alone, crowded = tiny_run(name="alone", **exact), tiny_run(name="crowded", **exact, **crowd)
    assert [r["token_ids"] for r in rows(alone)] == [r["token_ids"] for r in rows(crowded)]
    assert all(tensor.equal(crowded.parameters[name]) for name, tensor in alone.parameters.items())


def test_another_seed_draws_other_tokens_for_the_same_prompts(tiny_run: TinyRun) -> None:
    same = {"data.shuffle": False, "model.seed": 3, "rollout.batch_invariant": True}
    runs = [tiny_run(name=f"seed-{seed}", num_steps=1, **same, **{"run.seed": seed}) for seed in (0, 1)]
    prompts, tokens = (
        [[row[name] for row in run.trajectories(0)] for run in runs] for name in ("prompt_id", "token_ids")
    )
    assert prompts[0] == prompts[1]
    assert tokens[0] != tokens[1]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_br061_engine_trainer_and_reference_divide_by_the_same_temperature(
    tiny_run: TinyRun, temperature: float
) -> None:
    run = tiny_run(
        num_steps=1,
        **{
            "rollout.temperature": temperature,
            "algorithm.kl.placement": "loss",
            "algorithm.kl.coef": 0.1,
            "algorithm.correction.level": "token",  # so that the proximal pass is made
            "run.schedule": "separate_async",
            "buffer.max_staleness_steps": 1,  # the first step is on policy all the same
            "trainer.lr": 1e-7,
        },
    )
    metrics = run.metrics[0]
    assert metrics["training/logprob_gap/max"] < 1e-5
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["actor/ratio/max"] == pytest.approx(1, abs=1e-5)
    assert metrics["actor/ratio/min"] == pytest.approx(1, abs=1e-5)
    assert metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-8)


def test_br063_sampling_settings_beside_a_checkpoint_reach_neither_training_nor_evaluation(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    model = load_model(ModelConfig(new=tiny_config().model.new))
    model.save(tmp_path / "model")
    poison = {"repetition_penalty": 1.3, "top_k": 1, "temperature": 0.1, "min_new_tokens": 5}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(poison))
    run = tiny_run(
        num_steps=1,
        config={"model": {"path": str(tmp_path / "model")}},
        **{
            "rollout.group_size": 16,
            "eval.num_prompts": 2,
            "eval.temperature": 1.0,
            "eval.samples_per_prompt": 8,
        }
        | {"data.held_out_frac": 0.2},
    )
    plain = tiny_run(name="plain", num_steps=1, **{"rollout.group_size": 16, "data.held_out_frac": 0.2})
    assert [r["token_ids"] for r in rows(run)] == [r["token_ids"] for r in rows(plain)]
    metrics = run.metrics[0]
    assert metrics["training/logprob_gap/geometric_mean_ratio"] == pytest.approx(1, abs=1e-4)
    assert metrics["training/logprob_gap/mean_ratio"] == pytest.approx(1, abs=1e-4)
    resolved = (run.folder / "config.toml").read_text().splitlines()
    for line in ("temperature = 1.0", "top_k = 0", "top_p = 1.0", "min_p = 0.0"):
        assert line in resolved


# ---- 9. Signals are checked before the run


def test_the_first_step_begins_after_a_proven_version_a_trial_and_the_scorers_own_answers(
    tiny_run: TinyRun,
) -> None:
    run = tiny_run(num_steps=1)
    kinds = [event["kind"] for event in run.events]
    first_step = next(i for i, e in enumerate(run.events) if e["kind"] == "span_open" and e["name"] == "step")
    assert kinds.index("publication") < kinds.index("preflight") < first_step
    (preflight,) = run.events_of("preflight")
    assert preflight["trial_response_tokens"] > 0
    reward, version, gap, sync = preflight["signals"]  # each with its first reading
    assert reward == f"reward by source: addition {preflight['trial_reward']:g}"
    assert version == "weight version per replica: 0 has 0"
    assert gap.startswith(f"logprob gap: {preflight['trial_response_tokens']} logprobs, mean -")
    assert float(sync.removeprefix("seconds of the weight sync: ")) > 0
    metrics = run.metrics[0]
    for signal in (
        "reward/addition/mean",
        "replica/0/weight_version",
        "training/logprob_gap/max",
        "timing_s/update_weights",
    ):
        assert signal in metrics
    assert set(kinds) <= EVENT_KINDS.keys()


def without_logprobs(controller: Controller) -> None:
    plain = controller.router.engines[0].generate

    async def generate(request: GenerateRequest) -> Response:
        response = await plain(request)
        return replace(response, logprobs=np.full_like(response.logprobs, np.nan))

    controller.router.engines[0].generate = generate  # type: ignore[method-assign]


def without_versions(controller: Controller) -> None:
    plain = controller.router.engines[0].stats

    async def stats() -> EngineStats:
        return replace(await plain(), weight_version=7)

    controller.router.engines[0].stats = stats  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            without_logprobs,
            "the signal 'logprob gap' is not wired: .* tokens of the trial came without a finite",
        ),
        (
            without_versions,
            "the signal 'weight version per replica' is not wired: {0: 7} reported where version 0",
        ),
    ],
)
def test_a_signal_that_nobody_reports_stops_the_run_before_its_first_step(
    tiny_run: TinyRun, tmp_path: Path, fault: Fault, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        tiny_run(faults=[fault])
    assert not (tmp_path / "run").exists()


def test_a_scorer_that_fails_its_own_reference_answer_is_refused_before_the_first_step(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="self-test.*gives the reference answer"):
        tiny_run(**{"reward.terms.0.function": "tiny_rewards:zero", "reward.terms.0.is_tested": True})
    assert not (tmp_path / "run").exists()


def test_versions_of_a_step_are_the_loops_own(tiny_run: TinyRun) -> None:
    run = tiny_run(num_steps=3)
    assert [{v for row in run.trajectories(s) for v in versions_of(row)} for s in range(3)] == [{0}, {1}, {2}]
    assert [m["replica/0/weight_version"] for m in run.metrics] == [1, 2, 3]
