"""Laws that hold for every scenario: nothing is lost, the staleness bound is strict, no time is made up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.ledger.lengths import LengthDistribution
from rollbook.planner.sim_draws import constant, lengths
from rollbook.planner.sim_scenario import DecodeTable, Scenario
from rollbook.planner.simulate import simulate

scenarios = st.fixed_dictionaries(
    {
        "mode": st.sampled_from(["sync", "colocate_async", "separate_sync", "separate_async"]),
        "num_replicas": st.integers(1, 4),
        "slots_per_replica": st.integers(1, 8),
        "groups_per_step": st.sampled_from([4, 8]),
        "group_size": st.integers(1, 5),
        "prompt_tokens": st.sampled_from([0.0, 50.0]),
        "prefill_token_s": st.sampled_from([0.0, 1e-3]),
        "num_turns": st.sampled_from([None, constant(3)]),
        "env_s": st.sampled_from([None, constant(0.5)]),
        "holds_slot_in_env": st.booleans(),
        "reward_s": st.sampled_from([None, constant(0.3)]),
        "train_s": st.sampled_from([0.0, 2.0]),
        "sync_pause_s": st.sampled_from([0.0, 0.5]),
        "sync_every": st.sampled_from([1, 2, 4]),
        "max_staleness_steps": st.integers(1, 3),
        "take": st.sampled_from(["admission", "arrival"]),
        "on_stale": st.sampled_from(["drop", "wait"]),
        "on_publish": st.sampled_from(["keep", "drain", "abort"]),
        "recomputes_kv": st.booleans(),
        "trajectory_failure_frac": st.sampled_from([0.0, 0.2]),
        "replica_mtbf_s": st.sampled_from([math.inf, 20.0]),
        "replica_recovery_s": st.sampled_from([0.0, 1.0]),
        "keeps_tokens_of_lost_replica": st.booleans(),
        "num_lent_replicas": st.sampled_from([0, 2]),
        "lend_switch_s": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(0, 1000),
    }
)


@given(scenarios)
@settings(max_examples=150, deadline=None)
@pytest.mark.timeout(20)
def test_admitted_is_trained_failed_evicted_or_running_and_no_version_is_too_old(
    values: dict[str, object],
) -> None:
    result = simulate(
        Scenario(
            **values,  # type: ignore[arg-type]
            decode=DecodeTable.of(lambda n, c: 0.01 + n * c * 1e-6, num_slots=8, context_tokens=500),
            response_tokens=lengths(LengthDistribution(200, 60, 0.7)),
            num_steps=5,
        )
    )
    assert result.num_running >= 0
    assert (
        result.num_trained + result.num_failed + result.num_evicted + result.num_running
        == result.num_admitted
    )
    assert sum(result.staleness.values()) == result.num_trained
    assert max(result.staleness, default=0) <= result.scenario.staleness_bound
    for step in result.steps:
        assert step.wait_s + step.work_s + step.overhead_s == pytest.approx(step.step_s)
        assert 0 <= step.rollout_idle_frac <= 1 + 1e-9
        assert 0 <= step.occupancy_frac <= 1 + 1e-9
