"""A KV pool that fills up: who is preempted, when it goes on, and what that costs; worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.errors import PlanError
from rollbook.planner.sim_draws import constant, lognormal
from rollbook.planner.sim_scenario import DecodeTable, Scenario
from rollbook.planner.simulate import simulate

SECOND = DecodeTable.of(lambda n, context: 1.0, num_slots=2, context_tokens=0)
TWO = Scenario(
    mode="sync", num_replicas=1, slots_per_replica=2, decode=SECOND, groups_per_step=1, group_size=2,
    response_tokens=constant(10), prompt_tokens=10, prefill_token_s=0.1, train_s=1.0, num_steps=1, num_warmup_steps=0,
)  # fmt: skip


def test_the_youngest_waits_for_the_older_and_is_prefilled_again() -> None:
    """Prompt of 10 prefilled once: 1 s. Both hold 20 of 30 tokens and grow by 2 a step: full after 5 s, at 6 s. The
    younger leaves with 15; the older ends at 11 s, the younger is prefilled (1.5 s) and decodes 5 more: 17.5 s."""
    result = simulate(replace(TWO, kv_pool_tokens=30))
    assert result.num_preemptions == 1
    assert result.steps[0].wait_s == pytest.approx(17.5)
    assert result.steps[0].num_tokens == 20 and result.lost_tokens == 0


def test_a_pool_that_holds_both_preempts_nobody() -> None:
    result = simulate(replace(TWO, kv_pool_tokens=40))
    assert result.num_preemptions == 0 and result.steps[0].wait_s == pytest.approx(11)


def test_what_was_preempted_goes_on_where_there_is_room() -> None:
    """Pools of 30 hold one grown sequence each. Three prompts of their own on two replicas: two go to the emptier one,
    whose younger is pushed out when the pool is full; the other replica, alone with one, takes it once that ended."""
    three = replace(
        TWO, num_replicas=2, groups_per_step=3, group_size=1, prefill_token_s=0.0, kv_pool_tokens=30
    )
    result = simulate(three)
    assert result.num_preemptions == 1
    assert result.steps[0].wait_s == pytest.approx(15)  # 5 s together, 5 s alone, then the last 5 tokens


def test_one_sequence_always_goes_on() -> None:
    result = simulate(replace(TWO, kv_pool_tokens=12))
    assert result.steps[0].num_tokens == 20 and result.num_trained == 2


def test_a_pool_of_nothing_is_refused() -> None:
    for tokens in (0.0, -1.0, float("nan")):
        with pytest.raises(PlanError, match="kv_pool_tokens"):
            replace(TWO, kv_pool_tokens=tokens)


@settings(max_examples=40, deadline=None)
@given(
    pool=st.integers(1, 4000), seed=st.integers(0, 9), turns=st.integers(1, 3), holds=st.booleans(),
    mode=st.sampled_from(["sync", "colocate_async", "separate_async"]),
)  # fmt: skip
def test_a_small_pool_costs_time_and_loses_no_trajectory(
    pool: int, seed: int, turns: int, holds: bool, mode: str
) -> None:
    ample = Scenario(
        mode=mode, num_replicas=2, slots_per_replica=8,  # type: ignore[arg-type]
        decode=DecodeTable.of(lambda n, context: 0.01, num_slots=8, context_tokens=0), groups_per_step=6, group_size=4,
        response_tokens=lognormal(50, 200), prompt_tokens=20, prefill_token_s=1e-4, num_turns=constant(turns),
        env_s=constant(0.1), observation_tokens=5, holds_slot_in_env=holds, train_s=0.5, num_steps=4, seed=seed,
        max_staleness_steps=1,
    )  # fmt: skip
    small = simulate(replace(ample, kv_pool_tokens=pool))
    assert small.num_trained == 4 * 6 * 4
    assert small.num_admitted == small.num_trained + small.num_running
    endless = simulate(replace(ample, kv_pool_tokens=1e6))
    assert endless.num_preemptions == 0
    assert endless.step_s == pytest.approx(simulate(ample).step_s)
