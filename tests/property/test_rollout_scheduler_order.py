"""Whose turn it is, what is computed once, what is counted: promises of the native engine's books, one case each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_books import FakePool, Run, request, scheduler_of

from rollbook.rollout.native.pages import CopyPages
from rollbook.rollout.native.scheduler import MAX_MOVES_PER_STEP
from rollbook.types import FinishReason, KVStart


def test_older_groups_come_first_whenever_they_arrive() -> None:
    """A response that came back from another replica, or an agent's next turn, is not put behind later groups."""
    scheduler = scheduler_of(num_slots=1)
    run = Run(scheduler)
    for group_id in (5, 3, 4):
        scheduler.submit(replace(request(str(group_id), [1, 2], 2), group_id=group_id))
    while run.step():
        pass
    assert list(run.responses) == ["3", "4", "5"]


def full_pool() -> Run:
    """Two sequences of 12 tokens grow in 5 pages of 4: the younger is put off."""
    run = Run(scheduler_of(num_slots=2, num_pages=5))
    for name, token in (("old", 1), ("young", 2)):
        run.scheduler.submit(request(name, [token] * 4, 12))
    while not run.scheduler.counters.num_preemptions:
        assert run.step()
    assert [s.request.request_id for s in run.scheduler.running()] == ["old"]
    return run


def test_a_drain_finishes_what_was_put_off_and_counts_it_as_begun_meanwhile() -> None:
    run = full_pool()
    run.scheduler.submit(request("new", [3], 2))
    while run.step(starts_new=False):
        # What was put off waits without a slot at first, and is no less begun.
        assert run.scheduler.has_started() is ("young" not in run.responses)
    assert sorted(run.responses) == ["old", "young"]
    assert not run.scheduler.has_started() and run.scheduler.num_waiting == 1


def test_one_that_is_alone_put_off_is_still_waited_for() -> None:
    run = full_pool()
    run.scheduler.cancel("old")
    assert run.scheduler.num_running == 0 and run.scheduler.has_started()


def test_what_was_read_from_the_cache_once_stays_in_the_account_of_a_response_that_was_put_off() -> None:
    """It reads 8 tokens of a prompt that another request left; computed anew, it finds the cache emptied."""
    scheduler = scheduler_of()
    run = Run(scheduler)
    scheduler.submit(request("before", [1] * 9, 1))
    while run.step():
        pass
    scheduler.submit(request("asked", [1] * 9, 6))
    run.step()
    scheduler.reset_cache()
    scheduler._preempt(scheduler.running()[0])
    while run.step():
        pass
    assert run.responses["asked"].num_cached_prompt_tokens == 8
    assert run.responses["asked"].num_preemptions == 1


def test_a_member_that_comes_when_the_prompt_is_computed_and_nothing_sampled_computes_none_of_it() -> None:
    scheduler = scheduler_of(use_prefix_cache=False)
    run = Run(scheduler)
    scheduler.submit(request("first", [1] * 9, 4))
    run.step()  # 8 tokens of prefill: it samples from the next step on
    for name in ("second", "third"):
        scheduler.submit(request(name, [1] * 9, 4))
    while run.step():
        pass
    assert scheduler.counters.prefill_tokens == 8
    assert scheduler.counters.cached_prompt_tokens == 16


def test_after_a_take_over_any_member_may_still_be_cancelled() -> None:
    """The one that computes the prompt for 4 is cancelled, and then one that waited for it."""
    scheduler = scheduler_of(max_prefill_tokens=2)
    run = Run(scheduler)
    for idx in range(4):
        scheduler.submit(request(str(idx), [1] * 9, 3))
    run.step()
    for idx in (0, 2):
        scheduler.cancel(str(idx))
        run.check_books()
    while run.step():
        pass
    assert sorted(run.responses) == ["1", "3"]
    assert [run.responses[name].num_cached_prompt_tokens for name in ("1", "3")] == [0, 8]


@pytest.mark.parametrize("loses_slot", [False, True])
def test_of_keys_computed_anew_twice_before_a_token_only_the_last_time_is_told(loses_slot: bool) -> None:
    """Nothing was sampled from those in between: a replay that followed them would go astray."""
    scheduler = scheduler_of()
    run = Run(scheduler)
    scheduler.submit(request("one", [1] * 5, 6))
    for _ in range(3):
        run.step()
    for version in (1, 2):
        if loses_slot:
            scheduler._preempt(scheduler.running()[0])
        scheduler.adopt_version(version, "recompute")
        scheduler.plan()  # which admits it again
        run.pool.carry_out()
    while run.step():
        pass
    assert run.responses["one"].kv_starts == (KVStart(0, 0), KVStart(2, 2))


def test_what_a_newcomer_is_about_to_read_is_not_what_makes_way_for_it() -> None:
    """12 pages of 4. The prompt that was cached first is asked for again, and 2 pages must go: the other prompt's."""
    scheduler = scheduler_of(num_pages=12)
    run = Run(scheduler)
    for name, token in (("early", 1), ("late", 2)):
        scheduler.submit(request(name, [token] * 16, 1))
        while run.step():
            pass
    scheduler.submit(request("again", [1] * 16 + [3] * 8, 1))
    while run.step():
        pass
    assert run.responses["again"].num_cached_prompt_tokens == 16


def test_nothing_cached_outlives_the_pool() -> None:
    """Put to sleep, the pool comes back empty: the same prompt is computed anew."""
    scheduler = scheduler_of()
    run = Run(scheduler)
    scheduler.submit(request("before", [1] * 9, 2))
    while run.step():
        pass
    assert scheduler.cache is not None and len(scheduler.cache) > 0
    scheduler.drop_kv()
    run.pool = FakePool(scheduler)
    scheduler.submit(request("after", [1] * 9, 2))
    while run.step():
        pass
    assert run.responses["after"].num_cached_prompt_tokens == 0


def test_counters_are_those_of_sampled_tokens_and_of_pages_held() -> None:
    """3 prompt tokens (2 of prefill) and 5 sampled, alone: 3 + i tokens are known before token i, in pages of 4."""
    scheduler = scheduler_of()
    run = Run(scheduler)
    scheduler.submit(request("one", [1, 2, 3], 5))
    assert scheduler.used_tokens == 0
    held = []
    while run.step():
        held.append(scheduler.used_tokens)
    counters = scheduler.counters
    assert held == [4, 4, 4, 8, 8, 0]  # a prefill, then five tokens; after the last nothing is held
    assert (counters.prefill_tokens, counters.decode_tokens, counters.decode_steps) == (2, 5, 5)
    assert counters.active_slots_sum == 5
    assert counters.kv_used_tokens_sum == 4 + 4 + 8 + 8 + 8


def test_counters_of_decoding_leave_out_the_prefill_beside_it() -> None:
    scheduler = scheduler_of()
    run = Run(scheduler)
    scheduler.submit(request("one", [1], 3))
    scheduler.submit(request("two", [2] * 9, 1))
    while run.step():
        pass
    assert scheduler.counters.decode_tokens == 4


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf")])
def test_a_logprob_that_is_not_finite_fails_its_request_and_no_other(logprob: float) -> None:
    scheduler = scheduler_of()
    pool = FakePool(scheduler)
    for name in ("sound", "broken"):
        scheduler.submit(request(name, [1], 2))
    plan = scheduler.plan()
    assert plan is not None
    pool.carry_out()
    names = [scheduler.slots.sequences[slot].request.request_id for slot in plan.slots]  # type: ignore[union-attr]
    logprobs = np.array([logprob if name == "broken" else -1.0 for name in names], np.float32)
    finished, failed = scheduler.commit(plan, np.array([4, 5]), logprobs)
    assert [each.request_id for each in failed] == ["broken"] and not finished
    assert list(scheduler.by_request) == ["sound"]


def test_a_response_names_its_replica_and_one_without_tokens_no_version() -> None:
    scheduler = scheduler_of(replica_id=3, num_slots=1, weight_version=7)
    run = Run(scheduler)
    scheduler.submit(request("whole", [1], 2))
    while run.step():
        pass
    scheduler.submit(request("waiting", [1], 2))
    (aborted,) = scheduler.abort_all()
    assert run.responses["whole"].replica_id == aborted.replica_id == 3
    assert [r.weight_version for r in run.responses["whole"].version_runs] == [7]
    assert aborted.version_runs == () and aborted.finish_reason is FinishReason.ABORTED


@pytest.mark.parametrize(("num_sequences", "one_stays_of"), [(300, 2), (40, 4)])
def test_pages_only_move_towards_the_start_and_few_at_a_time(num_sequences: int, one_stays_of: int) -> None:
    """Most sequences of a page each end; those that stay lie scattered, and come home."""
    scheduler = scheduler_of(num_slots=num_sequences, num_pages=600, page_tokens=16, use_prefix_cache=False)
    run = Run(scheduler)
    for idx in range(num_sequences):
        scheduler.submit(request(str(idx), [1 + idx], 1 if idx % one_stays_of else 8))
    num_moves = []
    while (plan := scheduler.plan()) is not None:
        # No two prompts are alike: every copy is a move.
        moves = [op for op in scheduler.pool.operations if isinstance(op, CopyPages)]
        assert all(to < page for op in moves for page, to in zip(op.sources, op.targets, strict=True))
        num_moves.append(sum(len(op.sources) for op in moves))
        run.pool.carry_out()
        run.pool.run(plan)
        scheduler.commit(plan, np.full(plan.num_decode, 5), np.zeros(plan.num_decode, np.float32))
    assert 0 < max(num_moves) <= MAX_MOVES_PER_STEP
