"""Three schedules, one loop: what may differ between them and what may not."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollbook.controller.loop import Controller
from rollbook.sync.report import PublicationReport
from run_oracles import NotedWeights, label_gaps, rows, staleness_of_tokens, steps_of_versions, versions_of
from tiny_run import TinyRun

SPANNING = {
    "rollout.max_response_tokens": 20,
    "rollout.num_slots": 3,
    "rollout.kv_policy": "recompute",
    "rollout.num_replicas": 2,
}
"""Few slots and long responses: publications fall into the middle of them."""


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"trainer.num_mini_batches": 2, "trainer.num_epochs": 2},
        {"algorithm.name": "dapo", "algorithm.kl.placement": "loss", "algorithm.kl.coef": 0.1},
    ],
    ids=["one_update", "four_updates", "dapo_with_reference"],
)
def test_at_staleness_0_separate_async_trains_the_same_parameters_as_sync(
    tiny_run: TinyRun, overrides: dict[str, Any]
) -> None:
    exact = {"rollout.batch_invariant": True, **overrides}
    sync = tiny_run(name="sync", num_steps=3, **exact)
    apart = tiny_run(name="apart", num_steps=3, **{"run.schedule": "separate_async"}, **exact)
    assert sync.trained == apart.trained
    for left, right in zip(sync.metrics, apart.metrics, strict=True):
        assert ("timing_s/old_log_prob" in left) == ("timing_s/old_log_prob" in right)
    for name, tensor in sync.parameters.items():
        assert tensor.equal(apart.parameters[name]), name
    moved = [m["actor/grad_norm"] for m in sync.metrics]
    assert min(moved) > 0, "a test that moves nothing proves nothing"


CASES = [
    ("sync", 0, 1, {}),
    ("colocate_async", 1, 1, {}),
    ("colocate_async", 2, 2, {}),
    ("colocate_async", 2, 1, {"buffer.order": "arrival", "buffer.when_stale": "drop"}),
    ("separate_async", 0, 1, {}),
    ("separate_async", 1, 1, {}),
    ("separate_async", 1, 2, {}),
    ("separate_async", 2, 2, {"buffer.order": "arrival", "buffer.when_stale": "wait"}),
    ("separate_async", 2, 1, {"buffer.order": "arrival", "buffer.when_stale": "drop"}),
    ("separate_async", 2, 1, {"sync.staging": "direct"}),
    ("separate_async", 2, 1, {"sync.commit_order": "rolling"}),
    ("colocate_async", 1, 1, {"rollout.pause_mode": "abort"}),
    ("colocate_async", 1, 1, {"rollout.pause_mode": "drain"}),
]


@pytest.mark.parametrize(
    ("schedule", "staleness", "every", "more"),
    CASES,
    ids=[f"{s}-stale{n}-every{e}-{'-'.join(map(str, m.values())) or 'admission'}" for s, n, e, m in CASES],
)
def test_every_token_carries_the_version_that_sampled_it_and_none_is_trained_too_old(
    tiny_run: TinyRun, schedule: str, staleness: int, every: int, more: dict[str, Any]
) -> None:
    """Each token's logprob is computed again from the weights of the version it is labeled with."""
    weights = NotedWeights()
    run = tiny_run(
        num_steps=5,
        faults=[weights],
        **{
            "run.schedule": schedule,
            "buffer.max_staleness_steps": staleness,
            "sync.every_steps": every,
            **SPANNING,
            **more,
        },
    )
    assert label_gaps(run, weights).max() < 2e-5
    assert np.quantile(label_gaps(run, weights, shift=1), 0.9) > 1e-2  # a label off by one would show
    ages = staleness_of_tokens(run)
    assert min(ages) >= 0 and max(ages) <= staleness
    if staleness:
        assert max(ages) > 0
    if (
        schedule == "colocate_async" and more.get("rollout.pause_mode") != "drain"
    ):  # elsewhere it depends on how fast the engine is
        assert any(len(set(versions_of(row))) > 1 for row in rows(run)), "no response spanned a publication"
    hist = Counter[int]()
    for m in run.metrics:
        of_step = {n: int(m.get(f"training/off_policy/staleness_hist/{n}", 0)) for n in range(10)}
        hist.update(of_step)
        worst = max(n for n, count in of_step.items() if count)  # in steps, however many a publication holds
        assert m["training/off_policy/trajectory_staleness_worst/max"] == worst <= staleness
        busiest = sum(m.get(f"replica/{i}/tokens_per_s", 0.0) for i in range(2))
        if schedule != "sync":  # a wait of microseconds is not the time that engines had
            # A decode step counts where it ends, so that a step may hold the seconds of one that began before it.
            assert m["perf/tokens_per_s/gen"] <= busiest * 1.25
        assert (
            m.get("training/logprob_gap/max", 0.0) < 2e-5
        )  # numerics alone: no token of other weights is in it
        assert m["batch/num_groups"] == 4
    assert sum(hist.values()) == sum(m["batch/num_sequences"] for m in run.metrics)
    assert max(n for n, count in hist.items() if count) <= staleness
    assert sorted(steps_of_versions(run).values()) == sorted({0, *range(every, 5, every), 5})


def test_the_gap_at_one_version_is_measured_also_where_every_batch_is_stale(tiny_run: TinyRun) -> None:
    """Engines ahead of the trainer: each batch is a step old, and what they finish meanwhile is compared instead."""

    def wait_for_the_engines(controller: Controller) -> None:
        plain = controller.trainer.update

        def update(*args: Any, **kwargs: Any) -> Any:
            while not controller.is_complete and len(controller.rollout.buffer.finished()) < 2:
                pass  # the event loop and the engine's thread are at work
            return plain(*args, **kwargs)

        controller.trainer.update = update  # type: ignore[method-assign]

    run = tiny_run(
        num_steps=5,
        faults=[wait_for_the_engines],
        **{
            "run.schedule": "separate_async",
            "buffer.max_staleness_steps": 1,
            "rollout.kv_policy": "recompute",
        },
    )
    stale = [m for m in run.metrics if "training/off_policy/staleness_hist/0" not in m]
    assert len(stale) >= 3
    for m in stale:
        assert m["training/logprob_gap/max"] < 2e-5 < m["training/logprob_gap_all/max"]


def test_admission_order_trains_the_prompts_in_the_order_of_the_data(tiny_run: TinyRun) -> None:
    """Whatever finishes first: three replicas' worth of timing changes no batch member."""
    asynchronous = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 2, **SPANNING}
    ahead = tiny_run(name="ahead", num_steps=4, **asynchronous)
    sync = tiny_run(name="sync", num_steps=4)
    assert ahead.trained == sync.trained


def test_generation_goes_on_beside_the_training_only_where_the_schedule_says_so(tiny_run: TinyRun) -> None:
    """Tokens sampled between the end of collecting and the publication, by the engines' own counters."""
    sampled: dict[str, int] = {}

    class Counts:
        def __init__(self, name: str) -> None:
            self.name = name

        def __call__(self, controller: Any) -> None:
            plain = controller.trainer.update

            def update(*args: Any, **kwargs: Any) -> Any:
                engine = controller.router.engines[0]
                counters = engine._scheduler.counters
                before = counters.decode_tokens
                result = plain(*args, **kwargs)
                while not engine._pauses.is_on and engine._pending and counters.decode_tokens == before:
                    pass  # the engine's thread is at work: wait for its next token, not for the clock
                sampled[self.name] = sampled.get(self.name, 0) + counters.decode_tokens - before
                return result

            controller.trainer.update = update

    for schedule, staleness in (("sync", 0), ("colocate_async", 2), ("separate_async", 2)):
        tiny_run(
            name=schedule,
            num_steps=2,
            faults=[Counts(schedule)],
            **{
                "run.schedule": schedule,
                "buffer.max_staleness_steps": staleness,
                "rollout.max_response_tokens": 20,
                "rollout.num_slots": 3,
            },
        )
    assert sampled["sync"] == sampled["colocate_async"] == 0 < sampled["separate_async"]


def test_a_group_that_ends_while_its_version_is_being_published_is_known(tiny_run: TinyRun) -> None:
    """The replica serves version 1 before the publisher has said so to anybody else."""

    def lets_groups_end_first(controller: Controller) -> None:
        plain = controller.publisher.publish

        async def publish(weight_version: int, *, moved: bool = True) -> PublicationReport:
            report = await plain(weight_version, moved=moved)
            while controller.rollout.buffer.num_running and controller.rollout._error is None:
                await asyncio.sleep(0)
            return report

        controller.publisher.publish = publish  # type: ignore[method-assign]

    asynchronous = {"run.schedule": "separate_async", "buffer.max_staleness_steps": 2, **SPANNING}
    run = tiny_run(num_steps=3, faults=[lets_groups_end_first], **asynchronous)
    assert run.num_steps == 3
