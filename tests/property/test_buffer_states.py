"""The buffer's laws under random interleavings: every group in one state, no token staler than the bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollbook.buffer.buffer import GroupBuffer, GroupState, StarvedError
from rollbook.buffer.config import BufferConfig
from rollbook.errors import DataError
from rollbook.types import FinishReason, Group, Prompt, Trajectory, Turn, VersionRun


def prompt(prompt_idx: int) -> Prompt:
    return Prompt(prompt_id=f"p{prompt_idx}", prompt_ids=np.array([1, 2], np.int32), source="test")


def group(group_id: int, *, version: int, newest: int | None = None, num_tokens: int = 2) -> Group:
    newest = version if newest is None else newest
    runs = (VersionRun(version, num_tokens - 1), VersionRun(newest, 1))
    turn = Turn(
        response_ids=np.arange(num_tokens, dtype=np.int32),
        behavior_logprobs=np.zeros(num_tokens, np.float32),
        version_runs=runs,
        finish_reason=FinishReason.STOP,
    )
    trajectory = Trajectory(
        group_id=group_id, member_idx=0, prompt=prompt(group_id), turns=(turn,), reward=1.0
    )
    return Group(group_id=group_id, prompt=prompt(group_id), trajectories=(trajectory,))


class BufferMachine(RuleBasedStateMachine):
    """Random admissions, endings, takes, publications and kills against a model that counts and ages by itself."""

    @initialize(
        staleness=st.integers(0, 3),
        taking=st.sampled_from([("admission", "wait"), ("arrival", "wait"), ("arrival", "drop")]),
        groups_per_step=st.integers(1, 3),
        refill_failed=st.booleans(),
        num_steps=st.none() | st.integers(0, 4),
    )
    def start(
        self,
        staleness: int,
        taking: tuple[str, str],
        groups_per_step: int,
        refill_failed: bool,
        num_steps: int | None,
    ) -> None:
        order, when_stale = taking
        config = BufferConfig(
            max_staleness_steps=staleness,
            order=order,  # type: ignore[arg-type]
            when_stale=when_stale,  # type: ignore[arg-type]
            refill_failed=refill_failed,
            max_refills_per_step=10**6,
        )
        self.buffer = GroupBuffer(config, groups_per_step, num_steps)
        self.admitted_under: dict[int, int] = {}
        self.ended: set[int] = set()
        self.trained: list[int] = []
        self.version = 0
        self.step_of = {0: 0}
        """Version -> steps whose updates it contains."""
        self.oldest: dict[int, int] = {}
        """Group -> the version that sampled its first token."""
        self.ended_prompts: list[str] = []
        """Told to the stream as not to be asked again."""
        self.save()

    @precondition(lambda self: self.buffer.capacity() > 0)
    @rule()
    def admit(self) -> None:
        group_id = self.buffer.admit(prompt(self.next_prompt()), now_s=0.0)
        self.admitted_under[group_id] = self.version

    def next_prompt(self) -> int:
        """The first that is neither under way nor ended."""
        under_way = {entry.prompt.prompt_id for entry in self.buffer._entries.values()}
        left_early = {p.prompt_id for p in self.buffer._prompts_done}
        asked = under_way | left_early | set(self.ended_prompts)
        return next(n for n in range(10**6) if f"p{n}" not in asked)

    def some_running(self, data: st.DataObject) -> int | None:
        running = [g for g in self.admitted_under if g not in self.ended]
        return data.draw(st.sampled_from(running)) if running else None

    @rule(data=st.data(), is_flat=st.booleans(), refill=st.booleans())
    def finish(self, data: st.DataObject, is_flat: bool, refill: bool) -> None:
        group_id = self.some_running(data)
        if group_id is None:
            return
        first = data.draw(st.integers(self.admitted_under[group_id], self.version))
        reason = "flat" if is_flat else None
        self.oldest[group_id] = first
        finished = group(group_id, version=first, newest=self.version)
        finished.prompt = self.buffer._entries[group_id].prompt
        self.buffer.finish(finished, drop_reason=reason, refill=refill)
        self.ended.add(group_id)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        group_id = self.some_running(data)
        if group_id is not None:
            self.buffer.fail(group_id, "engine")
            self.ended.add(group_id)

    @precondition(lambda self: self.buffer.is_ready())
    @rule(publish=st.booleans())
    def take(self, publish: bool) -> None:
        step = self.buffer.step
        taken = self.buffer.take()
        assert all(0 <= s <= self.buffer.config.max_staleness_steps for s in taken.staleness_steps)
        ids = [g.group_id for g in taken.groups]
        ages = [step - self.step_of[self.oldest[group_id]] for group_id in ids]
        assert taken.staleness_steps == ages
        done = [p.prompt_id for p in taken.prompts_done]
        assert {g.prompt.prompt_id for g in [*taken.groups, *taken.dropped]} <= set(done)
        self.ended_prompts += done
        assert len(set(self.ended_prompts)) == len(self.ended_prompts), "a prompt ended twice"
        assert not set(ids) & set(self.trained)
        if self.buffer.config.order == "admission":
            assert ids == sorted(ids)
        self.trained += ids
        if publish or self.buffer.config.max_staleness_steps == 0:
            self.publish_step(step + 1)
        self.save()

    def publish_step(self, step: int) -> None:
        self.version += 1
        self.step_of[self.version] = step
        self.buffer.published(self.version, step)

    @rule()
    def save(self) -> None:
        """A checkpoint: between the take of a step and its writing groups go on ending."""
        self.saved = (self.buffer.state(), [*self.trained], [*self.ended_prompts])

    @rule()
    def kill_and_resume(self) -> None:
        """What was under way is forgotten, and its prompts are asked again; what ended stays ended."""
        state, self.trained, self.ended_prompts = self.saved[0], [*self.saved[1]], [*self.saved[2]]
        held = self.buffer
        self.buffer = GroupBuffer(held.config, held.groups_per_step, held.num_steps)
        self.buffer.restore(state)
        self.admitted_under, self.ended, self.oldest = {}, set(), {}
        self.publish_step(self.buffer.step)

    @precondition(lambda self: self.buffer.step > self.buffer.serving_step)
    @rule()
    def publish(self) -> None:
        self.publish_step(self.buffer.step)

    @invariant()
    def every_group_is_in_one_state(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.check()
            assert self.buffer.num_running == len(self.admitted_under) - len(self.ended)
            assert self.buffer.counts[GroupState.TRAINED] == len(self.trained)
            ended = [
                self.buffer.counts[s] for s in (GroupState.FAILED, GroupState.TRAINED, GroupState.EVICTED)
            ]
            assert sum(ended) == len(self.ended_prompts) + len(self.buffer._prompts_done)
            assert self.buffer.failures.total() == self.buffer.counts[GroupState.FAILED]

    @invariant()
    def no_group_is_for_a_step_after_the_last(self) -> None:
        if hasattr(self, "buffer") and self.buffer.num_steps is not None:
            under_way = self.buffer.num_running + self.buffer.num_finished
            assert self.buffer.step <= self.buffer.num_steps
            assert under_way <= (self.buffer.num_steps - self.buffer.step) * self.buffer.groups_per_step


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBufferMachine = BufferMachine.TestCase


def make(groups_per_step: int = 2, **fields: object) -> GroupBuffer:
    return GroupBuffer(BufferConfig(**fields), groups_per_step)  # type: ignore[arg-type]


def test_on_policy_admits_nothing_while_a_step_trains() -> None:
    buffer = make(groups_per_step=2)
    for _ in range(2):
        buffer.finish(group(buffer.admit(prompt(0), now_s=0.0), version=0))
    buffer.take()
    assert buffer.capacity() == 0
    buffer.published(1, 1)
    assert buffer.capacity() == 2


def test_a_bound_beyond_the_end_of_the_run_admits_what_its_steps_take() -> None:
    """A bound of a million versions, three steps of two groups: six, whatever is published meanwhile."""
    config = BufferConfig(max_staleness_steps=10**6)
    buffer = GroupBuffer(config, groups_per_step=2, num_steps=3)
    assert buffer.capacity() == 6
    for idx in range(6):
        buffer.finish(group(buffer.admit(prompt(idx), now_s=0.0), version=0))
    for step in range(3):
        assert (buffer.capacity(), len(buffer.take().groups)) == (0, 2)
        buffer.published(step + 1, step + 1)
    assert (buffer.capacity(), buffer.num_running + buffer.num_finished) == (0, 0)


def test_a_version_on_its_way_admits_nothing_before_every_replica_holds_it() -> None:
    buffer = make(groups_per_step=1)
    first = buffer.admit(prompt(0), now_s=0.0)
    buffer.finish(group(first, version=0))
    buffer.take()
    buffer.offered(1, 1)
    assert (buffer.capacity(), buffer.serving_step) == (0, 0)
    buffer.published(1, 1)
    assert (buffer.capacity(), buffer.serving_step) == (1, 1)


def test_admission_order_takes_the_first_admitted_although_a_later_one_finished_first() -> None:
    buffer = make(groups_per_step=1, max_staleness_steps=1)
    first, second = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    buffer.finish(group(second, version=0))
    assert not buffer.is_ready()
    buffer.finish(group(first, version=0))
    assert [g.group_id for g in buffer.take().groups] == [first]


def test_arrival_order_waits_for_a_group_about_to_expire_and_takes_it_first() -> None:
    buffer = make(groups_per_step=1, max_staleness_steps=1, order="arrival", when_stale="wait")
    slow, quick = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    buffer.finish(group(quick, version=0))
    assert [g.group_id for g in buffer.take().groups] == [quick]
    buffer.published(1, 1)
    third = buffer.admit(prompt(2), now_s=0.0)
    buffer.finish(group(third, version=1))
    assert not buffer.is_ready()  # `slow` may be used at step 1 and at no later one
    buffer.finish(group(slow, version=0))
    assert [g.group_id for g in buffer.take().groups] == [slow]


def test_arrival_order_takes_the_first_to_finish() -> None:
    buffer = make(groups_per_step=1, max_staleness_steps=1, order="arrival", when_stale="wait")
    first, second = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    for group_id in (second, first):
        buffer.finish(group(group_id, version=0))
    assert [g.group_id for g in buffer.take().groups] == [second]


def test_a_group_admitted_while_a_step_trains_expires_with_the_version_that_serves_meanwhile() -> None:
    buffer = make(groups_per_step=1, max_staleness_steps=1, order="arrival", when_stale="wait")
    buffer.finish(group(buffer.admit(prompt(0), now_s=0.0), version=0))
    buffer.take()
    between = buffer.admit(prompt(1), now_s=0.0)  # version 0 still serves
    buffer.published(1, 1)
    buffer.finish(group(buffer.admit(prompt(2), now_s=0.0), version=1))
    assert not buffer.is_ready()
    buffer.finish(group(between, version=0))
    assert [g.group_id for g in buffer.take().groups] == [between]


def test_arrival_order_drops_what_is_too_old_and_says_how_long_it_was() -> None:
    buffer = make(groups_per_step=1, max_staleness_steps=1, order="arrival", when_stale="drop")
    slow, quick = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    for step, version in ((1, 0), (2, 1)):
        buffer.finish(group(quick, version=version))
        buffer.take()
        buffer.published(step, step)
        quick = buffer.admit(prompt(step + 1), now_s=0.0)
    buffer.finish(group(slow, version=0, num_tokens=50))
    buffer.finish(group(quick, version=2))
    taken = buffer.take()
    assert [(e.group_id, e.reason, e.staleness_steps, e.num_response_tokens) for e in taken.evictions] == [
        (slow, "stale", 2, 50)
    ]
    assert [g.group_id for g in taken.groups] == [quick]


def test_a_flat_group_that_is_too_old_leaves_as_flat_with_its_step() -> None:
    """It gave nothing to train in any case: nothing was lost to its age, and no prompt takes its place."""
    buffer = make(groups_per_step=1, max_staleness_steps=1, order="arrival", when_stale="drop")
    slow = buffer.admit(prompt(0), now_s=0.0)
    for step in range(2):
        buffer.finish(group(buffer.admit(prompt(1 + step), now_s=0.0), version=step))
        buffer.take()
        buffer.published(step + 1, step + 1)
    buffer.finish(group(slow, version=0), drop_reason="flat")
    assert buffer.num_refills == 0
    assert [(e.group_id, e.reason) for e in buffer.take().evictions] == [(slow, "flat")]


def test_what_finished_in_time_and_was_not_taken_is_dropped_when_the_step_that_could_use_it_is_over() -> None:
    """Two slow groups end together, at the last step that may train either of them, and it takes one."""
    buffer = make(groups_per_step=1, max_staleness_steps=2, order="arrival", when_stale="drop")
    slow = [buffer.admit(prompt(i), now_s=0.0) for i in range(2)]
    for step in range(2):
        quick = buffer.admit(prompt(2 + step), now_s=0.0)
        buffer.finish(group(quick, version=step))
        assert [g.group_id for g in buffer.take().groups] == [quick]
        buffer.published(step + 1, step + 1)
    for group_id in slow:
        buffer.finish(group(group_id, version=0))
    assert [g.group_id for g in buffer.take().groups] == slow[:1]
    assert not buffer.finished()
    buffer.published(3, 3)
    buffer.finish(group(buffer.admit(prompt(4), now_s=0.0), version=3))
    assert [(e.group_id, e.reason, e.staleness_steps) for e in buffer.take().evictions] == [
        (slow[1], "stale", 3)
    ]


def test_a_flat_group_is_replaced_or_leaves_with_its_step() -> None:
    buffer = make(groups_per_step=2)
    first, second = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    buffer.finish(group(first, version=0), drop_reason="flat", refill=True)
    assert buffer.capacity() == 1
    third = buffer.admit(prompt(2), now_s=0.0)
    buffer.finish(group(second, version=0), drop_reason="flat")
    buffer.finish(group(third, version=0))
    taken = buffer.take()
    assert [g.group_id for g in taken.groups] == [third]
    assert [e.reason for e in taken.evictions] == ["flat", "flat"]


def test_starvation_stops_with_the_counts_or_trains_what_there_is() -> None:
    for on_starvation in ("stop", "train_partial"):
        buffer = make(groups_per_step=2, max_refills_per_step=1, on_starvation=on_starvation)
        buffer.finish(group(buffer.admit(prompt(9), now_s=0.0), version=0))
        for i in range(2):
            buffer.fail(buffer.admit(prompt(i), now_s=0.0), "reward")
        assert buffer.is_ready()
        assert buffer.capacity() == 0, "what was lost is not sampled again, for the step to lose it once more"
        if on_starvation == "stop":
            with pytest.raises(
                StarvedError,
                match="has 1 of 2 groups and lost 2 .*: 2 failed as reward; 3 groups were admitted",
            ):
                buffer.take()
        else:
            taken = buffer.take()
            assert len(taken.groups) == 1
            assert taken.starved is not None and "has 1 of 2 groups and lost 2" in taken.starved.what
            assert "'train_partial', the step trains these 1 and the run goes on" in taken.starved.what
            assert buffer.failures == {"reward": 2}


def test_a_large_step_may_lose_half_of_its_groups_without_being_starved() -> None:
    """Dynamic sampling on a task that is half learned; what is left to 64 losses would end it in its first step."""
    buffer = make(groups_per_step=256)
    for n in range(511):
        group_id = buffer.admit(prompt(n), now_s=0.0)
        buffer.finish(group(group_id, version=0), drop_reason="flat" if n % 2 else None, refill=True)
    assert buffer.num_refills == 255 and not buffer.is_starved
    assert len(buffer.take().groups) == 256


def test_a_starved_step_uses_up_the_places_of_a_whole_one_and_its_losses_are_its_own() -> None:
    buffer = make(groups_per_step=2, max_refills_per_step=0, on_starvation="train_partial")
    for step, reason in enumerate(("reward", "timeout")):
        buffer.finish(group(buffer.admit(prompt(2 * step), now_s=0.0), version=step))
        buffer.fail(buffer.admit(prompt(2 * step + 1), now_s=0.0), reason)
        taken = buffer.take()
        assert len(taken.groups) == 1
        assert taken.starved is not None and f"): 1 failed as {reason}; " in taken.starved.what
        buffer.published(step + 1, step + 1)
        assert buffer.capacity() == 2


def test_a_failed_group_that_is_not_replaced_keeps_its_place_until_its_step_is_taken() -> None:
    buffer = make(groups_per_step=2, refill_failed=False)
    first, second = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    buffer.fail(first, "engine")
    assert buffer.capacity() == 0 and not buffer.is_ready()
    buffer.finish(group(second, version=0))
    assert [g.group_id for g in buffer.take().groups] == [second]


def test_no_more_groups_run_than_the_config_says() -> None:
    buffer = make(groups_per_step=4, max_running_groups=2)
    first, _ = (buffer.admit(prompt(i), now_s=0.0) for i in range(2))
    assert buffer.capacity() == 0
    buffer.finish(group(first, version=0))
    assert buffer.capacity() == 1


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    """Sampled under version 0 and finished under 2, it is two steps old at step 2."""
    buffer = make(groups_per_step=1, max_staleness_steps=2)
    ids = [buffer.admit(prompt(i), now_s=0.0) for i in range(3)]
    for step in (0, 1):
        buffer.finish(group(ids[step], version=0))
        assert buffer.take().staleness_steps == [step]
        buffer.published(step + 1, step + 1)
    buffer.finish(group(ids[2], version=0, newest=2))
    assert buffer.take().staleness_steps == [2]


def test_a_group_is_as_old_as_its_oldest_member() -> None:
    buffer = make(groups_per_step=1, max_staleness_steps=1)
    ids = [buffer.admit(prompt(i), now_s=0.0) for i in range(2)]
    buffer.finish(group(ids[0], version=0))
    buffer.take()
    buffer.published(1, 1)
    young, old = group(ids[1], version=1), group(ids[1], version=0, newest=1)
    members = (*young.trajectories, *old.trajectories)
    buffer.finish(Group(group_id=ids[1], prompt=prompt(1), trajectories=members))
    assert buffer.take().staleness_steps == [1]


def test_a_label_older_than_the_bound_stops_the_step_although_admission_forbids_it() -> None:
    """A replica that fell behind: the group was admitted under version 1 and says that version 0 sampled it."""
    buffer = make(groups_per_step=1, max_staleness_steps=1)
    ids = [buffer.admit(prompt(i), now_s=0.0) for i in range(2)]
    for step in (0, 1):
        buffer.finish(group(ids[step], version=0))
        buffer.take()
        buffer.published(step + 1, step + 1)
        if step == 0:
            third = buffer.admit(prompt(2), now_s=0.0)
    buffer._version_step[0] = 0  # still known: another group might carry it
    buffer.finish(group(third, version=0, newest=1))
    with pytest.raises(DataError, match="would be trained 2 steps stale at step 2; .* is 1"):
        buffer.take()


def test_a_version_that_was_offered_twice_is_as_old_as_the_first_time() -> None:
    """The first publication may have reached a replica that never answered."""
    buffer = make(groups_per_step=1, max_staleness_steps=2)
    ids = [buffer.admit(prompt(i), now_s=0.0) for i in range(3)]
    for step in (0, 1):
        buffer.finish(group(ids[step], version=0))
        buffer.take()
        buffer.offered(1, step)
    buffer.finish(group(ids[2], version=1))
    assert buffer.take().staleness_steps == [2]


def test_what_a_step_is_given_says_how_old_each_version_is_in_steps() -> None:
    """Published every second step: version 1 holds the updates of two steps."""
    buffer = make(groups_per_step=1, max_staleness_steps=2)
    ids = [buffer.admit(prompt(i), now_s=0.0) for i in range(3)]
    for group_id in ids[:2]:
        buffer.finish(group(group_id, version=0))
        buffer.take()
    buffer.published(1, 2)
    buffer.finish(group(ids[2], version=0, newest=1))
    taken = buffer.take()
    assert [taken.staleness(version) for version in (0, 1)] == [2, 0]


def test_the_last_step_is_made_of_the_groups_there_are() -> None:
    buffer = make(groups_per_step=2)
    buffer.finish(group(buffer.admit(prompt(0), now_s=0.0), version=0))
    assert not buffer.is_ready()
    buffer.is_last_step = True
    assert len(buffer.take().groups) == 1


def test_publications_move_forward_in_versions_and_in_steps() -> None:
    buffer = make()
    buffer.published(2, 1)
    for version, step in ((1, 2), (3, 0)):
        with pytest.raises(
            DataError, match=f"version {version} of step {step} was published after version 2"
        ):
            buffer.published(version, step)


def test_versions_that_no_group_can_carry_are_forgotten() -> None:
    buffer = make(groups_per_step=1)
    for step in range(20):
        buffer.finish(group(buffer.admit(prompt(step), now_s=0.0), version=step))
        assert len(buffer.take().version_steps) <= 2
        buffer.published(step + 1, step + 1)


def test_a_version_nobody_published_is_refused_with_its_number() -> None:
    buffer = make()
    group_id = buffer.admit(prompt(0), now_s=0.0)
    with pytest.raises(DataError, match="weight version 7"):
        buffer.finish(group(group_id, version=0, newest=7))


def test_places_of_steps_before_a_resume_stay_taken() -> None:
    buffer = make(groups_per_step=2)
    for i in range(2):
        buffer.finish(group(buffer.admit(prompt(i), now_s=0.0), version=0))
    buffer.take()
    buffer.published(1, 1)
    resumed = make(groups_per_step=2)
    resumed.restore(buffer.state())
    assert resumed.capacity() == buffer.capacity() == 2


@pytest.mark.parametrize("refill_failed", [True, False])
def test_what_ended_counts_as_ended_in_a_checkpoint_once_the_stream_was_told(refill_failed: bool) -> None:
    """Until then its prompt is asked again after a resume, and would be counted twice."""
    buffer = make(groups_per_step=1, max_staleness_steps=2, refill_failed=refill_failed)
    first, second, third = (buffer.admit(prompt(i), now_s=0.0) for i in range(3))
    buffer.fail(second, "engine")
    buffer.finish(group(third, version=0), drop_reason="flat", refill=True)
    assert buffer.state()["counts"] == {} and buffer.state()["failures"] == {}
    buffer.finish(group(first, version=0))
    assert [p.prompt_id for p in buffer.take().prompts_done] == ["p1", "p2", "p0"]
    assert buffer.state()["counts"] == {"failed": 1, "evicted": 1, "trained": 1}
    assert buffer.state()["failures"] == {"engine": 1}


def test_a_group_ends_once() -> None:
    buffer = make()
    group_id = buffer.admit(prompt(0), now_s=0.0)
    buffer.fail(group_id, "timeout")
    with pytest.raises(DataError, match="ended twice"):
        buffer.finish(group(group_id, version=0))
    second = buffer.admit(prompt(1), now_s=0.0)
    buffer.finish(group(second, version=0))
    with pytest.raises(DataError, match="group 1 ended twice: it is finished"):
        buffer.finish(group(second, version=0))
    with pytest.raises(DataError, match="group 1 ended twice: it is finished"):
        buffer.fail(second, "timeout")


def test_nothing_is_admitted_without_a_place() -> None:
    buffer = make(groups_per_step=1)
    buffer.admit(prompt(0), now_s=0.0)
    with pytest.raises(DataError, match="no place for prompt p1: 1 groups hold places"):
        buffer.admit(prompt(1), now_s=0.0)


def test_a_group_that_is_in_no_state_stops_the_run_at_the_next_transition() -> None:
    buffer = make(groups_per_step=2)
    buffer.admit(prompt(0), now_s=0.0)
    buffer.counts[GroupState.RUNNING] -= 1
    with pytest.raises(AssertionError, match="2 groups admitted, but .* accounted for"):
        buffer.admit(prompt(1), now_s=0.0)


def test_a_group_that_ended_twice_is_not_made_up_for_by_one_that_did_not() -> None:
    buffer = make(groups_per_step=2)
    buffer.counts.update({GroupState.FAILED: 1, GroupState.TRAINED: -1})
    with pytest.raises(AssertionError, match="accounted for"):
        buffer.admit(prompt(0), now_s=0.0)


def test_a_groups_tokens_are_looked_at_a_few_times_however_many_others_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The buffer is asked after each group that ends: with thousands under way it must not look at all of them."""
    looks = 0
    staleness_steps = GroupBuffer.staleness_steps

    def counted(self: GroupBuffer, group: Group) -> int:
        nonlocal looks
        looks += 1
        return staleness_steps(self, group)

    monkeypatch.setattr(GroupBuffer, "staleness_steps", counted)
    config = BufferConfig(max_staleness_steps=3, order="arrival", when_stale="drop")
    buffer = GroupBuffer(config, 100)
    ids = [buffer.admit(prompt(n), now_s=0.0) for n in range(buffer.capacity())]
    assert len(ids) == 400
    for group_id in reversed(ids):
        buffer.finish(group(group_id, version=0))
        if buffer.is_ready():
            buffer.take()
    assert buffer.step == 4
    assert looks <= 10 * len(ids)
