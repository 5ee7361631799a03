"""Whatever a trajectory does (raise, vanish, hang, lie), its group ends once and the step goes on or says why not."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from rollbook.buffer.buffer import MAX_RUNNING_GROUPS, GroupBuffer, GroupState
from rollbook.buffer.config import BufferConfig
from rollbook.controller.rollout import (
    ADMITTED_AT_ONCE,
    FailureRateError,
    Member,
    ProduceMember,
    Rollout,
)
from rollbook.errors import DataError, DeadlineError, EngineError, EnvError, RewardError
from rollbook.types import Failure, FailureKind, FinishReason, Prompt, Trajectory, Turn, VersionRun


class Prompts:
    """An endless stream that remembers what was acknowledged."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.acknowledged: list[str] = []

    def take_one(self) -> Prompt | None:
        return Prompt(prompt_id=f"p{next(self.numbers)}", prompt_ids=np.array([1], np.int32), source="test")

    def acknowledge(self, prompt: Prompt) -> None:
        self.acknowledged.append(prompt.prompt_id)


def trajectory(member: Member, *, reward: float = 1.0, version: int = 0) -> Trajectory:
    turn = Turn(
        response_ids=np.array([5], np.int32),
        behavior_logprobs=np.zeros(1, np.float32),
        version_runs=(VersionRun(version, 1),),
        finish_reason=FinishReason.STOP,
    )
    return Trajectory(
        group_id=member.group_id,
        member_idx=member.member_idx,
        prompt=member.prompt,
        turns=(turn,),
        reward=reward,
    )


def make_rollout(
    produce: ProduceMember, *, groups_per_step: int = 4, group_size: int = 1, **config: object
) -> Rollout:
    return Rollout(
        buffer=GroupBuffer(BufferConfig(**config), groups_per_step),  # type: ignore[arg-type]
        stream=Prompts(),
        produce=produce,
        shape=lambda group: None,
        drop_reason=lambda group: None,
        group_size=group_size,
        refill_dropped=False,
        min_scored=1,
        max_failure_frac=0.25,
        clock=lambda: 0.0,
        warn=lambda summary, remedy: None,
    )


async def test_br037_four_lost_results_of_128_are_replaced_and_the_step_completes() -> None:
    """One returns nothing, one raises, one is cancelled, one never ends; 124 are good. (BR-037.)"""

    async def produce(member: Member) -> Trajectory:
        if member.group_id == 3:
            return None  # type: ignore[return-value]
        if member.group_id == 40:
            raise ZeroDivisionError("lost")
        if member.group_id == 77:
            raise asyncio.CancelledError
        if member.group_id == 127:
            await asyncio.Event().wait()
        return trajectory(member)

    rollout = make_rollout(produce, groups_per_step=128, group_deadline_s=0.2)
    taken = await rollout.collect()
    assert len(taken.groups) == 128
    assert rollout.buffer.num_admitted == 132
    assert rollout.buffer.counts[GroupState.FAILED] == 4
    assert rollout.buffer.failures == {"engine": 2, "cancelled": 1, "timeout": 1}
    assert len(taken.prompts_done) == 132


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RewardError("grader raised", "mend it"), FailureKind.REWARD),
        (EnvError("sandbox lost", "restart it"), FailureKind.ENVIRONMENT),
        (EngineError("500", "look"), FailureKind.ENGINE),
        (DeadlineError("no response after 5 s", "raise it"), FailureKind.TIMEOUT),
        (MemoryError("no memory"), FailureKind.OUT_OF_MEMORY),
    ],
)
async def test_a_failed_member_leaves_its_siblings_and_has_no_reward(
    error: Exception, kind: FailureKind
) -> None:
    async def produce(member: Member) -> Trajectory:
        if (member.group_id, member.member_idx) == (0, 3):
            raise error
        return trajectory(member)

    rollout = make_rollout(produce, groups_per_step=2, group_size=4)
    taken = await rollout.collect()
    failed = taken.groups[0].trajectories[3]
    assert failed.failure is not None
    assert failed.failure.kind is kind
    assert failed.reward is None
    assert [t.reward for t in taken.groups[0].scored] == [1.0, 1.0, 1.0]


async def test_a_failure_with_a_number_beside_it_is_still_no_reward() -> None:
    """A scorer that says both: the member takes part in nothing, and is no zero."""

    async def produce(member: Member) -> Trajectory:
        made = trajectory(member, reward=0.0 if member.member_idx == 3 else 1.0)
        if member.member_idx == 3:
            made.failure = Failure(kind=FailureKind.REWARD, message="no score found")
        return made

    rollout = make_rollout(produce, groups_per_step=1, group_size=4, max_running_groups=1)
    taken = await rollout.collect()
    assert [t.reward for t in taken.groups[0].scored] == [1.0, 1.0, 1.0]
    assert rollout.num_failures == {FailureKind.REWARD: 1}


async def test_a_step_that_waits_too_long_names_trajectory_age_turn_and_replica() -> None:
    """Of three members one is finished, one is sampled and one is scored: the two that are stuck are named."""
    now_s = iter([10.0, 13.5])

    async def produce(member: Member) -> Trajectory:
        if member.member_idx == 0:
            return trajectory(member)
        member.progress.turn_idx, member.progress.replica_id = 2, 7
        member.progress.has_response = member.member_idx == 2
        await asyncio.Event().wait()
        raise AssertionError

    rollout = make_rollout(produce, groups_per_step=1, group_size=3, step_deadline_s=0.05)
    rollout.clock = lambda: next(now_s)
    with pytest.raises(DeadlineError) as stopped:
        await rollout.collect()
    assert stopped.value.what == (
        "step 0 waited 0.05 s for its groups; under way: trajectory 0/1 (age 3.5 s, turn 2, replica 7), "
        "trajectory 0/2 (age 3.5 s, turn 2, its environment or scorer, after replica 7)"
    )
    await rollout.stop()
    assert rollout.stream.acknowledged == []  # type: ignore[attr-defined]


async def test_a_run_whose_trajectories_fail_stops_with_the_cause() -> None:
    async def produce(member: Member) -> Trajectory:
        if member.group_id % 2:
            raise EnvError("no sandbox left", "restart the pool")
        return trajectory(member)

    rollout = make_rollout(produce, groups_per_step=8)
    with pytest.raises(FailureRateError, match="no sandbox left"):
        for step in range(20):
            await rollout.collect()
            rollout.buffer.published(step + 1, step + 1)


async def test_failures_count_among_all_trajectories_however_many_have_failed_in_all() -> None:
    """One of eight fails: a run of any length bears that, where a quarter is too much."""

    async def produce(member: Member) -> Trajectory:
        if member.group_id % 8 == 7:
            raise EngineError("500", "look")
        return trajectory(member, version=rollout.buffer.serving_step)

    rollout = make_rollout(produce, groups_per_step=4)
    for step in range(1, 13):
        await rollout.collect()
        rollout.buffer.published(step, step)
    assert rollout.num_failures[FailureKind.ENGINE] >= 6


async def test_a_failure_that_comes_first_is_no_rate_yet() -> None:
    others_may_end = asyncio.Event()

    async def produce(member: Member) -> Trajectory:
        if member.group_id == 0:
            raise EngineError("500", "look")
        await others_may_end.wait()
        return trajectory(member)

    rollout = make_rollout(produce, groups_per_step=4)
    collecting = asyncio.create_task(rollout.collect())
    while not rollout.num_failures:
        await asyncio.sleep(0)
    others_may_end.set()
    assert len((await collecting).groups) == 4


async def test_a_replica_that_claims_an_unpublished_version_stops_the_run() -> None:
    async def produce(member: Member) -> Trajectory:
        return trajectory(member, version=9)

    with pytest.raises(DataError, match="weight version 9"):
        await make_rollout(produce).collect()


async def test_a_bound_without_end_neither_blocks_the_event_loop_nor_starts_groups_without_end() -> None:
    """A staleness bound of a million steps admits all at once; others have their turn between, and no more are started
    than engines could ever hold."""
    turns: list[int] = []

    async def produce(member: Member) -> Trajectory:
        await asyncio.Event().wait()
        raise AssertionError

    rollout = make_rollout(produce, groups_per_step=2, group_size=1, max_staleness_steps=1_000_000)
    rollout.admit()
    while not turns or rollout.buffer.num_running > turns[-1]:
        turns.append(rollout.buffer.num_running)
        await asyncio.sleep(0)
    assert max(later - former for former, later in itertools.pairwise(turns)) <= ADMITTED_AT_ONCE
    assert rollout.buffer.num_running == MAX_RUNNING_GROUPS and rollout.buffer.capacity() == 0
    await rollout.stop()


async def test_prompts_that_fail_in_a_later_turn_end_the_collection() -> None:
    async def produce(member: Member) -> Trajectory:
        await asyncio.Event().wait()
        raise AssertionError

    rollout = make_rollout(produce, groups_per_step=2 * ADMITTED_AT_ONCE, group_size=1)
    take_one, num_taken = rollout.stream.take_one, 0

    def unreadable() -> Any:
        nonlocal num_taken
        num_taken += 1
        if num_taken > ADMITTED_AT_ONCE:
            raise DataError("line 257 holds no prompt", "mend the file")
        return take_one()

    rollout.stream.take_one = unreadable  # type: ignore[method-assign]
    with pytest.raises(DataError, match="line 257"):
        await rollout.collect()
    await rollout.stop()


async def test_stop_cancels_what_runs_and_acknowledges_nothing() -> None:
    async def produce(member: Member) -> Trajectory:
        await asyncio.Event().wait()
        raise AssertionError

    rollout = make_rollout(produce)
    rollout.admit()
    await asyncio.sleep(0)
    await rollout.stop()
    assert rollout.buffer.num_running == 4
    assert rollout.stream.acknowledged == []  # type: ignore[attr-defined]


async def test_what_was_still_to_be_admitted_is_not_begun_after_a_stop() -> None:
    async def produce(member: Member) -> Trajectory:
        await asyncio.Event().wait()
        return trajectory(member)

    rollout = make_rollout(produce, groups_per_step=2 * ADMITTED_AT_ONCE)
    rollout.admit()
    await rollout.stop()
    await asyncio.sleep(0)
    assert rollout.buffer.num_admitted == ADMITTED_AT_ONCE
