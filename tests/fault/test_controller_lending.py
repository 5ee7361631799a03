"""The trainer's device generates while the trainer waits: by cost and benefit, proven, and nothing is lost by it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from lending_faults import HoldsUntilLent, the
from rollbook.controller.lending import Lending
from rollbook.controller.lending_trial import LendingTrial
from rollbook.controller.loop import Controller
from rollbook.errors import ConfigError, SyncError
from run_oracles import NotedWeights, label_gaps, staleness_of_tokens, versions_of
from run_oracles import rows as rows_of
from tiny_run import RunResult, TinyRun, resume_tiny, tiny_config

LENT = {
    "run.schedule": "separate_async",
    "lending.is_on": True,
    "lending.margin": 0.0,
    "rollout.max_response_tokens": 20,
    "rollout.num_slots": 3,
    "rollout.kv_policy": "recompute",
}
"""Every wait lends; few slots, so that there is a queue to share."""
REPLICA = 1
"""The lent one: the only replica of its own is 0."""


def rows(run: RunResult) -> list[dict[str, Any]]:
    return list(rows_of(run))


def sampled_by_it(run: RunResult) -> list[dict[str, Any]]:
    return [row for row in rows(run) if row["replica_id"] == REPLICA]


def balance(metrics: dict[str, Any]) -> tuple[float, float]:
    states = ("running", "finished", "failed", "trained", "evicted")
    return metrics["buffer/num_admitted"], sum(metrics[f"buffer/num_{state}"] for state in states)


@pytest.mark.parametrize(
    ("staleness", "more"),
    [
        (0, {}),
        (2, {}),
        (2, {"sync.transport": "shm", "sync.delta": True}),
        (0, {"sync.staging": "direct"}),
        (2, {"rollout.mismatch": "bf16"}),
    ],
    ids=str,
)
def test_what_the_lent_engine_samples_is_of_the_version_it_says(
    tiny_run: TinyRun, staleness: int, more: dict[str, Any]
) -> None:
    """Each token's logprob is computed again from the weights of its label; no trained token is too old, and the
    account of groups balances."""
    weights = NotedWeights()
    faults = [weights, HoldsUntilLent()]
    run = tiny_run(num_steps=4, faults=faults, **LENT, **more, **{"buffer.max_staleness_steps": staleness})
    assert label_gaps(run, weights).max() < (2e-5 if not more.get("rollout.mismatch") else 0.1)
    assert sampled_by_it(run)
    ages = staleness_of_tokens(run)
    assert min(ages) >= 0 and max(ages) <= staleness
    lent, back = run.events_of("lent"), run.events_of("taken_back")
    assert lent and [e["step"] for e in lent] == [e["step"] for e in back]
    assert all(event["replica_id"] == REPLICA for event in lent)
    newest = {e["step"]: e["weight_version"] for e in run.events_of("publication") if "step" in e}
    assert [e["weight_version"] for e in lent] == [newest.get(e["step"] - 1, 0) for e in lent]
    for metrics in run.metrics:
        admitted, accounted = balance(metrics)
        assert admitted == accounted
        assert metrics["replica/num_serving"] == 1 and metrics["replica/num_quarantined"] == 0
    assert sum(m.get("lending/num_tokens", 0) for m in run.metrics) >= 10


def test_lending_changes_no_token_of_an_on_policy_run(tiny_run: TinyRun) -> None:
    """Who samples a response, and whether it moved in the middle, does not matter: (seed, trajectory, token index)
    decides."""
    exact = {**LENT, "rollout.batch_invariant": True, "trainer.lr": 1e-7}
    holds = HoldsUntilLent(num_tokens=5)
    lent = tiny_run(name="lent", num_steps=3, faults=[holds], **exact)
    alone = tiny_run(name="alone", num_steps=3, **{k: v for k, v in exact.items() if "lending" not in k})
    assert holds.num_lendings == 3 and sampled_by_it(lent)
    assert [row["token_ids"] for row in rows(lent)] == [row["token_ids"] for row in rows(alone)]
    assert lent.trained == alone.trained
    for one, other in zip(rows(lent), rows(alone), strict=True):
        np.testing.assert_allclose(one["behavior_logprobs"], other["behavior_logprobs"], atol=1e-4)


def test_a_response_taken_back_in_the_middle_is_one_response(tiny_run: TinyRun) -> None:
    """The trainer becomes ready while the lent engine decodes: the rest is sampled elsewhere."""
    weights = NotedWeights()

    def takes_early(controller: Controller) -> None:
        """The groups are there as soon as it has sampled a few tokens."""
        lending, plain = the(controller), controller.rollout.collect

        async def collect() -> Any:
            taken = await plain()
            while lending._serving_at_s is None and not lending.failed and lending.may_pay():
                await asyncio.sleep(0)
            return taken

        controller.rollout.collect = collect  # type: ignore[method-assign]
        put_away = lending._put_away

        async def nothing_stays_behind() -> None:
            await put_away()
            left.append((await lending.engine.stats()).waiting_requests)

        lending._put_away = nothing_stays_behind  # type: ignore[method-assign]

    left: list[tuple[str, ...]] = []
    holds = HoldsUntilLent(num_tokens=1)  # else its own engine has answered everything before, on a busy host
    run = tiny_run(
        num_steps=5, faults=[weights, holds, takes_early], **LENT, **{"buffer.max_staleness_steps": 2}
    )
    assert label_gaps(run, weights).max() < 2e-5
    assert sum(m.get("lending/num_returned", 0) for m in run.metrics) > 0
    assert left and not any(left), "a response waits in an engine that may never serve again"
    moved = [row for row in rows(run) if len(set(versions_of(row))) > 1]
    assert all(len(row["turns"]) == 1 for row in moved)
    assert max(len(versions_of(row)) for row in rows(run)) == 20


def test_a_trainer_that_is_ready_at_once_waits_for_no_lending(tiny_run: TinyRun) -> None:
    """The bring-up is cut short wherever it is; nothing serves half a version, and the next lending works."""
    seen: list[str] = []

    def slow_to_rise(controller: Controller) -> None:
        lending = the(controller)
        plain = lending._publisher.resync

        async def resync(replica_id: int) -> Any:
            if len(seen) < 2:  # never ends by itself
                seen.append("cut")
                await asyncio.Event().wait()
            return await plain(replica_id)

        lending._publisher.resync = resync  # type: ignore[method-assign]

    weights = NotedWeights()

    def begins_after_the_rehearsal(controller: Controller) -> None:
        plain = the(controller).rehearse

        async def rehearse() -> None:
            await plain()
            slow_to_rise(controller)

        the(controller).rehearse = rehearse  # type: ignore[method-assign]

    run = tiny_run(num_steps=4, faults=[begins_after_the_rehearsal, weights], **LENT)
    assert seen == ["cut", "cut"]
    assert len(run.events_of("lending_cut_short")) >= 2, "nothing is taken back that was not lent"
    assert all(e["lent_s"] > 0 for e in run.events_of("taken_back"))
    assert not run.events_of("lending_failed") and not run.events_of("quarantined")
    assert label_gaps(run, weights).max() < 2e-5


class Dies:
    """The lent engine's thread ends with an exception after so many of its steps since the rehearsal."""

    def __init__(self, after_steps: int) -> None:
        self.left = after_steps

    def __call__(self, controller: Controller) -> None:
        lending = the(controller)
        plain_serve, plain_step = lending._serve, lending.engine.step

        def step() -> bool:
            done = plain_step()
            if done:
                self.left -= 1
                if self.left == 0:
                    raise RuntimeError("device lost")
            return done

        async def serve() -> None:
            lending.engine.step = step  # type: ignore[method-assign]
            await plain_serve()

        lending._serve = serve  # type: ignore[method-assign]


@pytest.mark.parametrize("after_steps", [1, 9, 15])
def test_the_death_of_the_lent_engine_loses_nothing(tiny_run: TinyRun, after_steps: int) -> None:
    """In the probe, while it serves, in a later wait: its requests are made again, and the run says so once."""
    exact = {**LENT, "rollout.batch_invariant": True, "trainer.lr": 1e-7}
    run = tiny_run(
        name="dies", num_steps=4, faults=[Dies(after_steps), HoldsUntilLent(num_tokens=40)], **exact
    )
    alone = tiny_run(name="alone", num_steps=4, **{k: v for k, v in exact.items() if "lending" not in k})
    (failed,) = run.events_of("lending_failed")
    assert "device lost" in failed["why"]
    (finding,) = run.events_of("finding")
    assert finding["rule"] == "lending_failed" and "goes on without it" in finding["remedy"]
    assert run.trained == alone.trained
    assert [row["token_ids"] for row in rows(run)] == [row["token_ids"] for row in rows(alone)]
    assert [row["failure_kind"] for row in rows(run)] == [None] * len(rows(run))
    assert all(m["replica/num_quarantined"] == 0 for m in run.metrics)
    assert len(run.events_of("lent")) == len(run.events_of("taken_back"))


@pytest.mark.parametrize("call", ["wake", "resume", "pause", "sleep"])
def test_a_lent_engine_that_does_not_answer_is_not_waited_for(tiny_run: TinyRun, call: str) -> None:
    def stands_still(controller: Controller) -> None:
        lending = the(controller)
        plain = lending._serve

        async def never(*_: Any) -> None:
            await asyncio.Event().wait()

        async def serve() -> None:
            lending._deadline_s = 0.05
            setattr(lending.engine, call, never)
            await plain()

        lending._serve = serve  # type: ignore[method-assign]

    run = tiny_run(num_steps=3, faults=[stands_still], **LENT)
    (failed,) = run.events_of("lending_failed")
    assert f"was asked to {call} and did not within 0.05 s" in failed["why"]
    assert len(run.metrics) == 3


def test_weights_that_do_not_arrive_lend_nothing(tiny_run: TinyRun) -> None:
    """The transaction refuses them by name, and the run goes on without."""

    def corrupts(controller: Controller) -> None:
        lending = the(controller)
        plain = lending._serve

        async def serve() -> None:
            commit = lending._port.commit

            async def broken() -> Any:
                raise SyncError("tensor model.norm.weight has another digest", "send it again")

            lending._port.commit = broken  # type: ignore[method-assign]
            await plain()
            lending._port.commit = commit  # type: ignore[method-assign]

        lending._serve = serve  # type: ignore[method-assign]

    run = tiny_run(num_steps=3, faults=[corrupts], **LENT)
    (failed,) = run.events_of("lending_failed")
    assert "model.norm.weight" in failed["why"]
    assert not run.events_of("lent") and not sampled_by_it(run)
    assert len(run.metrics) == 3


def test_between_publications_moved_weights_are_lent_to_nobody(tiny_run: TinyRun) -> None:
    """Published every second step: after an odd number of steps the trainer's weights have no version."""
    holds = HoldsUntilLent()
    run = tiny_run(
        num_steps=4, faults=[holds], **LENT, **{"sync.every_steps": 2, "buffer.max_staleness_steps": 1}
    )
    assert {e["step"] for e in run.events_of("lent")} <= {0, 2}
    assert not run.events_of("lending_failed")


async def test_a_run_that_is_stopped_while_a_lending_is_taken_back_stops() -> None:
    lending = Lending.__new__(Lending)
    lending._clock = lambda: 0.0

    async def slow_to_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    serving = asyncio.create_task(slow_to_end())
    taking = asyncio.create_task(lending._take_back(serving, is_late=False))
    for _ in range(3):
        await asyncio.sleep(0)
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    serving.cancel()


def decides(expected_wait_s: float, up_s: float, back_s: float, share: float, margin: float) -> bool:
    lending = Lending.__new__(Lending)
    lending.config = tiny_config(**{"lending.is_on": True, "lending.margin": margin}).lending
    lending.expected_wait_s, lending.up_s, lending.back_s = expected_wait_s, up_s, back_s
    lending.share, lending.failed = share, ""
    return lending.may_pay()


@pytest.mark.parametrize(
    ("expected_wait_s", "up_s", "back_s", "share", "margin", "pays"),
    [
        (
            10.0,
            1.0,
            1.0,
            0.25,
            1.0,
            True,
        ),  # 9 s of serving at a quarter of the tokens save 2.25 s, at a cost of 2
        (8.0, 1.0, 1.0, 0.25, 1.0, False),  # 1.75 s
        (10.0, 1.0, 1.0, 0.25, 2.0, False),
        (10.0, 1.0, 1.0, 0.05, 1.0, False),  # it makes hardly a token
        (0.5, 1.0, 0.0, 1.0, 1.0, False),  # the wait ends before it serves
    ],
)
def test_it_lends_where_the_saving_exceeds_the_cost(
    expected_wait_s: float, up_s: float, back_s: float, share: float, margin: float, pays: bool
) -> None:
    assert decides(expected_wait_s, up_s, back_s, share, margin) is pays


class CountedClock:
    """The seconds of a wait by the tokens sampled in it: so many each while the lent engine serves, else one."""

    def __init__(self, lent_s: float) -> None:
        self.lent_s = lent_s
        self.now_s = 0.0
        self.then = 0

    def __call__(self, controller: Controller) -> None:
        lending = the(controller)
        engines = [lending.engine, *lending._own]

        def clock() -> float:
            counts = [engine._scheduler.counters.decode_tokens for engine in engines]  # type: ignore[attr-defined]
            num_tokens, self.then = sum(counts) - self.then, sum(counts)
            self.now_s += num_tokens * (1.0 if lending._serving_at_s is None else self.lent_s)
            return self.now_s

        lending._clock = clock


TRIED = {**LENT, "lending.margin": 1e-9}


@pytest.mark.parametrize("lent_s", [4.0, 0.25])
def test_a_lending_is_kept_only_where_waits_with_it_were_faster(tiny_run: TinyRun, lent_s: float) -> None:
    """Its account is negative where the engines slow each other, and the run says so and stops it."""
    holds = HoldsUntilLent(num_tokens=40)
    run = tiny_run(num_steps=12, faults=[CountedClock(lent_s), holds], **TRIED)
    judged = run.events_of("lending_judged")[0]
    assert judged["pays"] is (lent_s < 1)
    assert (judged["lent_tokens_per_s"] > judged["alone_tokens_per_s"]) is (lent_s < 1)
    saved = [e["saved_s"] for e in run.events_of("taken_back")]
    assert all((saved_s > 0) is (lent_s < 1) for saved_s in saved)
    lent_at = [e["step"] for e in run.events_of("lent")]
    after = [step for step in lent_at if step > judged["step"]]
    found = [e for e in run.events_of("finding") if e["rule"] == "lending_does_not_pay"]
    if lent_s > 1:
        (finding,) = found
        assert not after and "does not make the run faster: engines sampled" in finding["summary"]
        assert not run.events_of("lending_pays")
        assert "leave lending.is_on out" in finding["remedy"]
        assert lent_at == [2, 4], "the first wait is only measured, then two with it between waits without it"
    else:
        assert not found and after == list(range(judged["step"] + 1, 12))
        (said,) = run.events_of("lending_pays")
        assert "the trainer's device is lent while it waits: engines sampled" in said["says"]
    last = run.metrics[-1]
    assert not run.events_of("lending_failed") and balance(last)[0] == balance(last)[1]


def test_a_lending_on_trial_ends_where_waits_without_it_were_never_as_long(tiny_run: TinyRun) -> None:
    """The engines would never come to an end together; alone they do."""

    class Hangs(HoldsUntilLent):
        """The own replica stands still for as long as the lent one serves."""

        def __call__(self, controller: Controller) -> None:
            super().__call__(controller)
            lending, (own,) = the(controller), controller.router.engines
            serve, take_back = lending._serve, lending._take_back

            async def hanging() -> None:
                await serve()
                await own.pause("keep")

            async def resumed(*args: Any, **kwargs: Any) -> Any:
                try:
                    return await take_back(*args, **kwargs)
                finally:
                    await own.resume()

            lending._serve = hanging  # type: ignore[method-assign]
            lending._take_back = resumed  # type: ignore[method-assign]

    class Short(LendingTrial):
        longest_s = 0.5

    def short(controller: Controller) -> None:
        the(controller).trial = Short()

    run = tiny_run(num_steps=4, faults=[CountedClock(1.0), short, Hangs()], **TRIED)
    assert len(run.metrics) == 4
    ended = [*run.events_of("taken_back"), *run.events_of("lending_cut_short")]  # it may not have come as far
    assert [e["step"] for e in ended] == [2]
    assert all(e["is_late"] for e in run.events_of("taken_back"))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"run.schedule": "sync"}, "gives the engines the trainer's device in any case"),
        ({"run.schedule": "colocate_async", "buffer.max_staleness_steps": 1}, "in any case"),
        ({"rollout.engine": "vllm"}, "rollout.engine is 'vllm'"),
        ({"cluster.kind": "ray"}, "cluster.kind is 'ray'"),
        ({"sync.transport": "broadcast"}, "sync.transport is 'broadcast'"),
        ({"model.device": "cuda", "rollout.device": "cuda:0"}, "are both on cuda"),
    ],
)
def test_a_config_in_which_nothing_could_be_lent_is_refused(overrides: dict[str, Any], says: str) -> None:
    config = tiny_config(**{"run.schedule": "separate_async", "lending": {"is_on": True}, **overrides})
    with pytest.raises(ConfigError) as refused:
        config.check()
    assert says in str(refused.value)
    assert "leave [lending] out" in str(refused.value) or "use 'inproc'" in str(refused.value)


def test_options_of_a_lending_that_is_off_are_refused(tiny_run: TinyRun) -> None:
    with pytest.raises(ConfigError, match="lending.is_on is false"):
        tiny_run(**{"lending.margin": 2.0})


@pytest.mark.parametrize("kv_pool_tokens", [3, 24])
def test_a_pool_that_cannot_hold_the_longest_request_is_refused(
    tiny_run: TinyRun, kv_pool_tokens: int
) -> None:
    """Prompts of up to 6 tokens, responses of 20."""
    with pytest.raises(ConfigError, match=f"lending.kv_pool_tokens is {kv_pool_tokens}, .* takes 2[0-9]"):
        tiny_run(**LENT, **{"lending.kv_pool_tokens": kv_pool_tokens})


def test_a_run_that_was_taken_up_again_lends_as_before(tiny_run: TinyRun) -> None:
    exact = {**LENT, "rollout.batch_invariant": True, "trainer.lr": 1e-7, "checkpoint.every_steps": 1}
    whole = tiny_run(name="whole", num_steps=4, faults=[HoldsUntilLent()], **exact)
    half = tiny_run(name="half", num_steps=2, faults=[HoldsUntilLent()], **exact)
    resumed = resume_tiny(half, faults=[HoldsUntilLent()], **{"run.num_steps": 4})
    assert resumed.trained == whole.trained
    assert [r["token_ids"] for r in rows(resumed)] == [r["token_ids"] for r in rows(whole)]
    assert {e["step"] for e in resumed.events_of("lent")} == {0, 1, 2, 3}
    admitted, accounted = balance(resumed.metrics[-1])
    assert admitted == accounted
