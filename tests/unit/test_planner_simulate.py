"""The simulator against closed forms where they are exact, and against a token-by-token loop where they are not."""

from __future__ import annotations

import numpy as np
import pytest

from rollbook.errors import PlanError
from rollbook.ledger.lengths import LengthDistribution
from rollbook.planner.sim_draws import constant, empirical, lengths, lognormal
from rollbook.planner.sim_result import SimResult
from rollbook.planner.sim_scenario import DecodeTable, Scenario
from rollbook.planner.simulate import simulate

BASE_S, CONTEXT_S = 0.020, 1e-6


def table(num_slots: int = 8) -> DecodeTable:
    return DecodeTable.of(lambda n, c: BASE_S + n * c * CONTEXT_S, num_slots=num_slots, context_tokens=1000)


def scenario(**changes: object) -> Scenario:
    values: dict[str, object] = {
        "mode": "sync",
        "num_replicas": 2,
        "slots_per_replica": 8,
        "decode": table(),
        "groups_per_step": 8,
        "group_size": 4,
        "prompt_tokens": 100.0,
        "response_tokens": constant(50),
        "train_s": 3.0,
        "num_steps": 6,
    }
    return Scenario(**(values | changes))  # type: ignore[arg-type]


def wave_s(num_live: int, prompt: float, response: float) -> float:
    """`response` decode steps of `num_live` sequences whose context runs from `prompt` to their sum."""
    return response * (BASE_S + num_live * CONTEXT_S * (prompt + response / 2))


def test_two_exact_waves_cost_twice_one_wave() -> None:
    """32 sequences in 16 slots: two waves of 50 steps with 8 live sequences and a mean context of 125 tokens."""
    result = simulate(scenario())
    assert result.step_s == pytest.approx(2 * wave_s(8, 100, 50) + 3.0)
    assert result.occupancy_frac == pytest.approx(1.0)
    assert result.rollout_idle_frac == pytest.approx(0.0, abs=1e-12)
    assert result.tail_s == pytest.approx(0.0, abs=1e-9)


def test_a_quarter_wave_costs_a_quarter_of_the_slots_and_no_less_time() -> None:
    """Four sequences on two replicas of eight slots; the closed form with waves = ceil(4 / 16) = 1."""
    result = simulate(scenario(groups_per_step=1))
    assert result.step_s == pytest.approx(wave_s(4, 100, 50) + 3.0)  # a group stays on one replica
    assert result.rollout_idle_frac == pytest.approx(wave_s(4, 100, 50) / 2 / result.step_s)


def test_separated_async_runs_at_the_pace_of_the_slower_side() -> None:
    rollout_s = 2 * wave_s(8, 100, 50)
    slow_train = simulate(scenario(mode="separate_async", train_s=7.0, max_staleness_steps=1, num_steps=20))
    assert slow_train.step_s == pytest.approx(7.0, rel=0.02)
    assert slow_train.train_idle_frac == pytest.approx(0.0, abs=0.02)
    slow_rollout = simulate(scenario(mode="separate_async", train_s=1.0, max_staleness_steps=1, num_steps=20))
    assert slow_rollout.step_s == pytest.approx(rollout_s, rel=0.02)
    assert slow_rollout.train_idle_frac == pytest.approx(1 - 1.0 / rollout_s, rel=0.02)


def test_at_staleness_zero_separate_async_takes_as_long_as_separate_sync() -> None:
    draw = lengths(LengthDistribution(400, 120, 0.8))
    asynchronous = simulate(scenario(mode="separate_async", max_staleness_steps=0, response_tokens=draw))
    synchronous = simulate(scenario(mode="separate_sync", response_tokens=draw))
    assert asynchronous.step_s == pytest.approx(synchronous.step_s)
    assert set(asynchronous.staleness) == {0}


def token_by_token(response_tokens: list[float], num_slots: int, prompt: float) -> float:
    """Seconds until the last of a queue has left one replica, one decode step at a time."""
    queue, live, now_s = list(response_tokens), [], 0.0
    while queue or live:
        while queue and len(live) < num_slots:
            live.append([queue.pop(0), prompt])
        context = sum(held for _, held in live) + len(live) / 2  # the middle of the step
        now_s += BASE_S + CONTEXT_S * context
        live = [[left - 1, held + 1] for left, held in live if left > 1]
    return now_s


def test_random_lengths_agree_with_a_loop_over_tokens() -> None:
    drawn = np.random.default_rng(3).integers(1, 200, 40).astype(float)
    taken = iter(drawn.tolist())
    result = simulate(
        scenario(
            num_replicas=1,
            groups_per_step=10,
            num_steps=1,
            num_warmup_steps=0,
            response_tokens=lambda rng, n: np.array([next(taken) for _ in range(n)]),
        )
    )
    assert result.step_s == pytest.approx(token_by_token(drawn.tolist(), 8, 100) + 3.0, rel=1e-9)


def test_the_closed_form_of_waves_understates_a_long_tail() -> None:
    """Mean length x waves is exact for equal lengths only: the longest response of the last wave sets the end."""
    closed_form_s = 2 * wave_s(8, 100, 120) + 3.0
    result = simulate(scenario(response_tokens=lengths(LengthDistribution(2000, 120, 1.0)), num_steps=40))
    assert result.step_s > 1.2 * closed_form_s
    assert result.tail_s > 0.2 * result.step_s


def test_a_group_on_one_replica_prefills_its_prompt_once() -> None:
    """Eight groups, 100 prompt tokens at 1 ms each, four groups a replica over two waves: 0.4 s more."""
    without, with_prefill = simulate(scenario()), simulate(scenario(prefill_token_s=1e-3))
    assert with_prefill.step_s - without.step_s == pytest.approx(0.4)


def test_partial_responses_are_kept_while_the_colocated_trainer_works() -> None:
    draw = lengths(LengthDistribution(1000, 120, 1.0))
    result = simulate(
        scenario(mode="colocate_async", max_staleness_steps=1, response_tokens=draw, num_steps=30)
    )
    synchronous = simulate(scenario(response_tokens=draw, num_steps=30))
    assert result.lost_tokens == 0
    assert result.step_s < 0.85 * synchronous.step_s
    assert max(result.staleness) == 1


def test_draining_at_a_publication_costs_time_and_aborting_costs_tokens() -> None:
    draw = lengths(LengthDistribution(1000, 120, 1.0))

    def run(on_publish: str) -> SimResult:
        return simulate(
            scenario(
                mode="separate_async", max_staleness_steps=2, response_tokens=draw, num_steps=30, train_s=6.0,
                on_publish=on_publish,
            )
        )  # fmt: skip

    keep, drain, abort = run("keep"), run("drain"), run("abort")
    assert drain.step_s > keep.step_s and drain.lost_tokens == 0
    assert abort.lost_tokens > 0 and keep.lost_tokens == 0


def test_recomputing_kv_after_a_publication_stalls_decoding_by_the_live_context() -> None:
    same = {"mode": "separate_async", "max_staleness_steps": 1, "train_s": 1.0, "num_steps": 20}
    keep = simulate(scenario(**same, prefill_token_s=1e-4))
    recompute = simulate(scenario(**same, prefill_token_s=1e-4, recomputes_kv=True))
    assert recompute.step_s > keep.step_s


def test_an_environment_with_a_held_slot_leaves_its_gpu_idle() -> None:
    """One turn of 25 tokens, 10 s of environment, one more turn: the whole wave waits with its slots held."""
    result = simulate(
        scenario(groups_per_step=4, num_turns=constant(2), env_s=constant(10.0), observation_tokens=10.0)
    )
    first = wave_s(8, 100, 25)
    second = wave_s(8, 135, 25)
    assert result.step_s == pytest.approx(first + 10.0 + second + 3.0)
    assert result.rollout_idle_frac == pytest.approx(10.0 / result.step_s)


def test_a_slot_given_up_during_the_environment_serves_another_trajectory() -> None:
    same = {"num_replicas": 1, "groups_per_step": 4, "num_turns": constant(2), "env_s": constant(1.1)}
    held = simulate(scenario(**same))
    given_up = simulate(scenario(**same, holds_slot_in_env=False))
    assert given_up.step_s < held.step_s


def test_rewards_that_take_long_hold_up_the_trainer_not_the_engine() -> None:
    assert simulate(scenario(reward_s=constant(5.0))).step_s == pytest.approx(
        simulate(scenario()).step_s + 5.0
    )


def test_a_lost_replica_loses_no_trajectory() -> None:
    result = simulate(
        scenario(
            num_replicas=4, replica_mtbf_s=4.0, replica_recovery_s=2.0, num_steps=30, mode="separate_async",
            max_staleness_steps=1, response_tokens=lengths(LengthDistribution(500, 120, 0.6)),
            keeps_tokens_of_lost_replica=False,
        )
    )  # fmt: skip
    assert result.num_trained == 30 * 32
    assert result.num_admitted == result.num_trained + result.num_running
    assert result.lost_tokens > 0


def test_a_failed_trajectory_leaves_its_siblings_to_train() -> None:
    result = simulate(scenario(trajectory_failure_frac=0.25, num_steps=20))
    assert 0.15 < result.num_failed / result.num_admitted < 0.35
    assert result.num_trained + result.num_failed + result.num_running == result.num_admitted


def test_arrival_order_drops_what_is_too_old_and_waiting_does_not() -> None:
    draw = lengths(LengthDistribution(4000, 120, 1.2))
    same = {"mode": "separate_async", "max_staleness_steps": 2, "train_s": 1.0, "num_steps": 60}
    drop = simulate(scenario(**same, response_tokens=draw, take="arrival", slots_per_replica=4))
    wait = simulate(
        scenario(**same, response_tokens=draw, take="arrival", on_stale="wait", slots_per_replica=4)
    )
    assert drop.num_evicted > 0 and max(drop.staleness) <= 2
    assert drop.evicted_mean_tokens > 1.2 * drop.trained_mean_tokens  # what is dropped is long
    assert wait.num_evicted == 0 and max(wait.staleness) <= 2


def test_lending_idle_training_gpus_shortens_a_rollout_bound_step() -> None:
    same = {
        "mode": "separate_async",
        "max_staleness_steps": 1,
        "train_s": 1.0,
        "num_steps": 20,
        "group_size": 16,
    }
    alone = simulate(scenario(**same))
    lent = simulate(scenario(**same, num_lent_replicas=2, lend_switch_s=0.1))
    assert lent.step_s < 0.8 * alone.step_s
    assert lent.train_idle_frac < alone.train_idle_frac


def test_growing_lengths_grow_the_step() -> None:
    steps = simulate(scenario(length_growth_frac=0.05, num_steps=20)).steps
    assert steps[-1].step_s - 3.0 > 2 * (steps[0].step_s - 3.0)


def test_an_event_ends_a_turn_not_a_token() -> None:
    """512 GPUs and 8,192 sequences a step stay a matter of one event per turn: speed without a clock."""
    result = simulate(
        scenario(
            num_replicas=128, slots_per_replica=64, decode=table(64), groups_per_step=512, group_size=16,
            response_tokens=lengths(LengthDistribution(32768, 8192, 0.7)), num_steps=2, num_warmup_steps=0,
        )
    )  # fmt: skip
    assert result.num_events == 2 * 8192


def test_a_bad_scenario_says_what_to_change() -> None:
    for change in (
        {"num_replicas": 0},
        {"train_s": -1.0},
        {"slots_per_replica": 9},
        {"sync_every": 3},
        {"mode": "colocated"},
        {"take": "fifo"},
        {"on_publish": "ignore"},
        {"num_warmup_steps": 6},
    ):
        with pytest.raises(PlanError):
            scenario(**change)
    with pytest.raises(PlanError):
        empirical([])


def test_a_log_normal_environment_has_the_mean_and_percentile_it_was_given() -> None:
    drawn = lognormal(4.0, 20.0)(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(4.0, rel=0.02)
    assert np.quantile(drawn, 0.99) == pytest.approx(20.0, rel=0.03)


def test_a_judge_on_the_engines_stops_decoding_for_every_trajectory() -> None:
    """One wave of eight that end together: eight verdicts of 0.5 s, one after the other, before the step goes on."""
    judged = simulate(scenario(num_replicas=1, groups_per_step=2, judge_s=0.5))
    plain = simulate(scenario(num_replicas=1, groups_per_step=2))
    assert judged.step_s == pytest.approx(plain.step_s + 8 * 0.5)
    assert judged.rollout_idle_frac == pytest.approx(plain.rollout_idle_frac, abs=1e-9)
