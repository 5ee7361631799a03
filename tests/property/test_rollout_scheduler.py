"""Laws of the native engine's books, under random requests, cancellations, weight changes and pool sizes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from engine_books import EOS, FakePool, Run, expected_response, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.errors import EngineError
from rollbook.rollout.engine import KVPolicy
from rollbook.rollout.native.pages import (
    CopyPages,
    PageOperation,
    PagePool,
    PrefixCache,
    ZeroPages,
    merged,
)
from rollbook.rollout.native.scheduler import Scheduler
from rollbook.types import FinishReason, KVStart

prompts = st.lists(st.integers(1, 3), min_size=1, max_size=14)


@st.composite
def schedulers(draw: st.DrawFn) -> Scheduler:
    num_slots = draw(st.integers(1, 6))
    page_tokens = draw(st.integers(1, 5))
    return Scheduler(
        num_slots=num_slots,
        num_pages=-(-26 // page_tokens) + draw(st.integers(0, 12)),
        page_tokens=page_tokens,
        max_prefill_tokens=draw(st.integers(1, 20)),
        max_context_tokens=100,
        use_prefix_cache=draw(st.booleans()),
        most_rows=draw(st.sampled_from([None, num_slots])),
        eos_token_ids=(EOS,),
    )


events = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), prompts, st.integers(1, 12), st.integers(1, 4)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.tuples(st.just("adopt"), st.sampled_from(["keep", "recompute"])),
        st.tuples(st.just("next turn"), st.integers(0, 30), prompts),
        st.tuples(st.just("reset cache")),
        st.tuples(st.just("sleep")),
    ),
    max_size=30,
)


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedulers(), events)
def test_books_balance_and_every_row_sees_its_own_prefix(scheduler: Scheduler, script: list) -> None:
    run, submitted, cancelled = Run(scheduler), {}, set()

    def submit(prompt_ids: list[int], max_response_tokens: int) -> None:
        new = request(str(len(submitted)), prompt_ids, max_response_tokens)
        submitted[new.request_id] = new
        scheduler.submit(new)

    for event, *args in script:
        if event == "submit":
            for _ in range(args[2]):  # the members of a group
                submit(args[0], args[1])
        elif event == "step":
            for _ in range(args[0]):
                run.step()
        elif event == "cancel" and str(args[0]) in submitted:
            if str(args[0]) not in run.responses:
                cancelled.add(str(args[0]))
            scheduler.cancel(str(args[0]))
        elif event == "adopt":
            scheduler.adopt_version(scheduler.weight_version + 1, args[0])
        elif event == "next turn" and str(args[0]) in run.responses:
            before = submitted[str(args[0])].prompt_ids.tolist()
            before += run.responses[str(args[0])].response_ids.tolist()
            if len(before) + len(args[1]) <= 20:
                submit(before + args[1], 4)
        elif event == "reset cache":
            scheduler.reset_cache()
        elif event == "sleep":
            scheduler.drop_kv()
            run.pool = FakePool(scheduler)
        run.check_books()
    while run.step():
        assert run.num_steps < 10_000
    assert set(run.responses) == set(submitted) - cancelled  # nothing lost, nothing twice, nobody starves
    for request_id, response in run.responses.items():
        wanted = expected_response(submitted[request_id])
        assert response.response_ids.tolist() == wanted
        ended_by = FinishReason.STOP if wanted[-1] == EOS else FinishReason.LENGTH
        assert response.finish_reason is ended_by
        assert sum(run_.num_tokens for run_ in response.version_runs) == len(wanted)
        versions = [run_.weight_version for run_ in response.version_runs]
        assert versions == sorted(set(versions))
        if len(versions) == 1:  # whatever the policy: a response of one version read that version's keys only
            assert run.versions_read[request_id] == set(versions)
    assert scheduler.num_running == scheduler.num_waiting == 0
    cached = len(scheduler.cache) if scheduler.cache else 0
    assert scheduler.pool.num_free + cached == scheduler.pool.num_pages


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedulers(), st.lists(prompts, min_size=1, max_size=5), st.sampled_from(["keep", "recompute"]))
def test_nothing_computed_before_a_publication_serves_a_request_admitted_after_it(
    scheduler: Scheduler, prompt_list: list[list[int]], kv_policy: KVPolicy
) -> None:
    """BR-026, in the books: with the same prompts running and cached, later requests read new keys only."""
    run = Run(scheduler)
    for idx, prompt_ids in enumerate(prompt_list * 2):
        scheduler.submit(request(f"old {idx}", prompt_ids, 6))
    for _ in range(4):
        run.step()
    scheduler.adopt_version(1, kv_policy)
    for idx, prompt_ids in enumerate(prompt_list * 2):
        scheduler.submit(request(f"new {idx}", prompt_ids, 6))
    run.versions_read.clear()
    while run.step():
        pass
    for request_id, response in run.responses.items():
        has_begun = response.version_runs[0].weight_version == 0
        if not has_begun or (kv_policy == "recompute" and response.version_runs[-1].weight_version == 1):
            assert run.versions_read[request_id] == {1}


def test_group_computes_its_prompt_once() -> None:
    """8 members of a 13-token prompt: 12 tokens of prefill, the 13th runs once per member as its first decode row."""
    scheduler = Scheduler(
        num_slots=8, num_pages=64, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    for member in range(8):
        scheduler.submit(request(str(member), [1] * 13, 3))
    while run.step():
        pass
    assert scheduler.counters.prefill_tokens == 12
    assert scheduler.counters.cached_prompt_tokens == 7 * 12
    assert [run.responses[str(m)].num_cached_prompt_tokens for m in range(8)] == [0] + [12] * 7


def test_next_turn_computes_only_what_is_new() -> None:
    """Turn 1: 9 prompt tokens and 6 sampled. Of these 15, 14 are in the pool when it ends; turn 2 adds 3 tokens."""
    scheduler = Scheduler(
        num_slots=2, num_pages=32, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    scheduler.submit(request("first", [2] * 9, 6))
    while run.step():
        pass
    history = [2] * 9 + run.responses["first"].response_ids.tolist()
    scheduler.submit(request("second", [*history, 5, 5, 5], 4))
    while run.step():
        pass
    assert run.responses["second"].num_cached_prompt_tokens == 14
    assert scheduler.counters.prefill_tokens == 8 + (18 - 1 - 14)


def test_of_a_last_turn_only_the_prompt_is_kept() -> None:
    """9 prompt tokens are 3 pages of 4; the 20 sampled after them nobody asks for again. A member that starts later
    computes no token of the prompt."""
    scheduler = Scheduler(
        num_slots=1, num_pages=32, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    for name in ("first", "second"):
        scheduler.submit(replace(request(name, [2] * 9, 20), is_last_turn=True))
    while run.step():
        pass
    assert scheduler.cache is not None and len(scheduler.cache) == 3
    assert run.responses["second"].num_cached_prompt_tokens == 8
    assert scheduler.counters.prefill_tokens == 8


def test_a_last_turn_that_was_cut_is_kept_whole() -> None:
    """It goes on from its own tokens: of 9 + 4 known, 12 are in the pool."""
    scheduler = Scheduler(
        num_slots=1, num_pages=32, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    asked = replace(request("cut", [2] * 9, 20), is_last_turn=True)
    scheduler.submit(asked)
    for _ in range(5):
        run.step()
    (cut,) = scheduler.abort_all()
    assert len(cut.response_ids) == 4
    scheduler.submit(replace(asked, prompt_ids=np.concatenate([asked.prompt_ids, cut.response_ids])))
    while run.step():
        pass
    assert run.responses["cut"].num_cached_prompt_tokens == 12


def test_the_cache_gives_up_its_last_page_for_a_request_that_needs_the_whole_pool() -> None:
    """8 pages of 2: the first request leaves 4 of them cached, the second takes all 8 and waits for nobody."""
    scheduler = Scheduler(
        num_slots=2, num_pages=8, page_tokens=2, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    scheduler.submit(request("first", [1] * 6, 3))
    while run.step():
        pass
    assert scheduler.cache is not None and len(scheduler.cache) == scheduler.pool.num_free == 4
    scheduler.submit(request("second", [3] * 15, 2))
    while run.step():
        pass
    assert list(run.responses) == ["first", "second"]


def test_a_newcomer_leaves_room_for_those_that_run_to_grow() -> None:
    """A page for every four of them: the last free page goes to no fifth, and there is nobody to put off later."""
    scheduler = Scheduler(
        num_slots=8, num_pages=5, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    for idx in range(5):
        scheduler.submit(request(str(idx), [idx + 1] * 3, 3 if idx == 0 else 2))
    run.step()
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.pool.num_free) == (4, 1, 1)
    while run.step():
        pass
    assert len(run.responses) == 5 and scheduler.counters.num_preemptions == 0


@pytest.mark.parametrize(
    ("asked", "given_back"),
    [(0, []), (1, ["2"]), (2, ["1", "2"]), (3, ["0", "1", "2"]), (4, ["0", "1", "2"])],
)
def test_those_whose_turn_comes_last_are_given_back_and_no_more_than_there_are(
    asked: int, given_back: list[str]
) -> None:
    """Some may have ended since they were counted."""
    scheduler = Scheduler(
        num_slots=2, num_pages=8, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    for idx in range(3):
        scheduler.submit(request(str(idx), [idx + 1] * 3, 3))
    Run(scheduler).step()
    assert [response.request_id for response in scheduler.abort_last(asked)] == given_back


def test_youngest_is_put_off_and_the_oldest_never_is() -> None:
    scheduler = Scheduler(
        num_slots=4, num_pages=8, page_tokens=2, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    for idx in range(4):
        scheduler.submit(request(str(idx), [idx + 1, 1], 12))
    while run.step():
        pass
    preemptions = [run.responses[str(idx)].num_preemptions for idx in range(4)]
    assert preemptions[0] == 0 and sum(preemptions) == scheduler.counters.num_preemptions > 0


def test_pages_in_use_stay_at_the_start_of_the_pool() -> None:
    """After most of 32 sequences ended, attention reads about as many pages as the survivors own."""
    scheduler = Scheduler(
        num_slots=32, num_pages=256, page_tokens=2, max_prefill_tokens=1000, max_context_tokens=200
    )
    run = Run(scheduler)
    for idx in range(32):
        scheduler.submit(request(str(idx), [1 + idx % 3, 2], 100 if idx == 31 else 3))
    for _ in range(20):
        run.step()
    plan = scheduler.plan()
    assert plan is not None and plan.num_decode == 1
    assert len(plan.page_owner) <= len(plan.page_lists) + len(plan.page_lists) // 4 + 8


def test_a_full_cache_does_not_push_what_runs_away_from_the_start() -> None:
    """200 sequences of 6 pages through 4 slots of a pool of 64 pages: the cache holds all that is free, and attention
    still reads only the first pages."""
    scheduler = Scheduler(
        num_slots=4, num_pages=64, page_tokens=2, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    for idx in range(200):
        scheduler.submit(request(str(idx), [1 + (idx >> bit) % 3 for bit in range(8)], 4))
    widest = 0
    while True:
        plan = scheduler.plan()
        run.pool.carry_out()
        if plan is None:
            break
        run.pool.run(plan)
        widest = max(widest, len(plan.page_owner))
        scheduler.commit(plan, np.full(plan.num_decode, 5), np.zeros(plan.num_decode, np.float32))
        run.check_books()
    assert scheduler.cache is not None and len(scheduler.cache) > 50
    assert widest <= 4 * 6 + 4 * 6 // 4 + 8


def test_a_request_that_can_never_fit_is_refused_with_its_size() -> None:
    scheduler = Scheduler(
        num_slots=4, num_pages=8, page_tokens=2, max_prefill_tokens=100, max_context_tokens=64
    )
    for bad, words in (
        (request("a", [1] * 10, 30), "10 + 30 tokens of keys and values and the pool holds 16"),
        (request("b", [1] * 64, 1), "64 tokens, the model's context is 64"),
        (request("c", [], 1), "0 prompt tokens"),
    ):
        try:
            scheduler.submit(bad)
        except EngineError as error:
            assert words in str(error)
        else:
            raise AssertionError("not refused")
    scheduler.submit(request("d", [1] * 10, 7))  # 16 tokens are written: it just fits


def test_members_go_on_when_the_one_that_computes_their_prompt_is_cancelled() -> None:
    """The first of 4 is cancelled in the middle of a prefill in chunks; the second takes over for the others."""
    scheduler = Scheduler(
        num_slots=4, num_pages=64, page_tokens=4, max_prefill_tokens=5, max_context_tokens=64
    )
    run = Run(scheduler)
    for member in range(4):
        scheduler.submit(request(str(member), [1] * 13, 3))
    run.step()
    scheduler.cancel("0")
    while run.step():
        pass
    assert set(run.responses) == {"1", "2", "3"}
    assert scheduler.counters.prefill_tokens == 5 + 12


pages = st.integers(0, 9)
operations = st.lists(
    st.one_of(
        st.lists(pages, unique=True, max_size=3).map(lambda p: ZeroPages(tuple(p))),
        st.lists(pages, unique=True, min_size=2, max_size=6).map(
            lambda p: CopyPages(tuple(p[: len(p) // 2]), tuple(p[len(p) // 2 : len(p) // 2 * 2]))
        ),
    ),
    max_size=8,
)


@given(operations)
def test_merged_page_operations_do_what_the_single_ones_do(script: list[PageOperation]) -> None:
    def carried_out(steps: list[PageOperation]) -> list[str]:
        held = list("abcdefghij")
        for step in steps:
            if isinstance(step, CopyPages):
                taken = [held[page] for page in step.sources]  # all are read before any is written
                for page, content in zip(step.targets, taken, strict=True):
                    held[page] = content
            else:
                for page in step.pages:
                    held[page] = "-"
        return held

    assert carried_out(merged(script)) == carried_out(script)
    assert len(merged(script)) <= len(script)


def test_an_admission_of_many_sequences_is_one_clearing_and_one_copy() -> None:
    """Each sequence clears its own pages and copies a prompt into them; no sequence touches another's."""
    script: list[PageOperation] = []
    for first in range(10, 1000, 3):
        script += [ZeroPages((first, first + 1)), CopyPages((0, 1), (first, first + 1))]
    cleared, copied = merged(script)
    assert isinstance(cleared, ZeroPages) and len(cleared.pages) == 2 * 330
    assert isinstance(copied, CopyPages) and copied.sources == (0, 1) * 330


def test_the_cache_gives_up_the_end_of_a_sequence_before_its_beginning() -> None:
    """A page without the page before it would be found by nobody."""
    pool = PagePool(8)
    cache = PrefixCache(pool, page_tokens=2)
    tokens = np.arange(6, dtype=np.int32)
    cache.keep(tokens, [pool.take_lowest() for _ in range(3)])
    for num_left in (2, 1, 0):
        assert cache.evict(1)
        assert cache.find(tokens).num_tokens == 2 * num_left


def test_what_runs_takes_the_start_of_the_pool_and_leaves_cached_pages_where_they_are() -> None:
    """The first request's two pages are cached at the far end: the second gets the two that are free at the start."""
    scheduler = Scheduler(
        num_slots=2, num_pages=16, page_tokens=4, max_prefill_tokens=100, max_context_tokens=64
    )
    run = Run(scheduler)
    scheduler.submit(request("first", [1] * 6, 2))
    while run.step():
        pass
    scheduler.submit(request("second", [2] * 6, 2))
    run.step()
    assert [sequence.pages for sequence in scheduler.running()] == [[0, 1]]
    assert scheduler.cache is not None and set(scheduler.cache._key_of) == {14, 15}


def test_free_and_cached_pages_are_remembered_once_however_often_they_come_back() -> None:
    pool = PagePool(40)
    cache = PrefixCache(pool, page_tokens=2)
    for turn in range(100):
        held = [cache.make_way(pool.take_lowest()) for _ in range(4)]
        while pool.num_free < 4:
            cache.evict(1)
        cache.keep(np.arange(8, dtype=np.int32) + 8 * turn, held)
        pool.give_back(held)
        pool.operations.clear()
    assert len(cache) > 30
    assert max(len(pool._lowest), len(pool._highest), len(cache._lowest)) <= pool.num_pages


def small() -> Scheduler:
    return Scheduler(
        num_slots=2,
        num_pages=16,
        page_tokens=4,
        max_prefill_tokens=8,
        max_context_tokens=64,
        eos_token_ids=(EOS,),
    )


def test_a_drain_starts_nothing_although_a_slot_is_free() -> None:
    scheduler = small()
    run = Run(scheduler)
    scheduler.submit(request("first", [1, 2, 3], 4))
    run.step()
    scheduler.submit(request("second", [4, 5, 6], 4))
    while run.step(starts_new=False):
        pass
    assert list(run.responses) == ["first"] and scheduler.num_waiting == 1
    while run.step():
        pass
    assert list(run.responses) == ["first", "second"]


def test_weights_written_again_under_the_same_version_void_what_they_made() -> None:
    """A repaired replica: whatever the policy, keys and values of the broken weights are computed anew."""
    scheduler = small()
    run = Run(scheduler)
    scheduler.submit(request("r", [1, 2, 3], 8))
    while scheduler.by_request["r"].slot < 0 or scheduler._num_response(scheduler.by_request["r"]) < 2:
        run.step()
    scheduler.adopt_version(0, "keep")
    assert not scheduler.slots.is_ready.any()
    while run.step():
        pass
    assert run.responses["r"].kv_starts == (KVStart(0, 0), KVStart(2, 0))
