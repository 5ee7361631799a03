"""Sandboxes that fill up or die in other ways than at once, and logs in which only the whole step is timed."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, Array, noisy, run_of
from rollbook.diagnose.readers.names import SLIME
from rollbook.diagnose.readers.renamer import Renamer
from rollbook.diagnose.series import Event, Row
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)
STAGES = [f"timing_s/{s}" for s in ("gen", "update_actor", "old_log_prob", "update_weights")]
HOST = "perf/cpu_memory_used_gb"


def _agents(**changed: Array) -> dict[str, Array]:
    values = {
        "num_turns/mean": noisy(9.0, 30, 0.02),
        "env/turn_s/mean": noisy(4.0, 31, 0.05),
        "env/turn_s/max": noisy(17.0, 32, 0.08),
        HOST: noisy(575.0, 33, 0.003),
    }
    return values | {name.replace("__", "/"): series for name, series in changed.items()}


@pytest.mark.parametrize(("since", "over"), [(100, 20), (60, 15)])
def test_a_pool_that_fills_late_or_in_a_few_steps_leaks(since: int, over: int) -> None:
    """Calls take twenty times as long and the host holds a third more, in the last steps, or for good."""
    up = np.clip((T - since) / over, 0, 1)
    leak = _agents(
        env__turn_s__mean=noisy(4.0 * 20**up, 31, 0.05), env__turn_s__max=noisy(17.0 * 18**up, 32, 0.08)
    )
    assert (
        diagnose(run_of(leak | {HOST: noisy(575.0 * (1 + 0.35 * up), 33, 0.003)})).verdict == "sandbox_leak"
    )


def test_slower_calls_that_cost_no_step_anything_are_no_leak() -> None:
    up = np.clip((T - 60) / 15, 0, 1)
    slow = _agents(
        env__turn_s__mean=noisy(4.0 * 20**up, 31, 0.05), env__turn_s__max=noisy(17.0 * 18**up, 32, 0.08)
    )
    assert "sandbox_leak" not in [f.rule for f in diagnose(run_of(slow)).findings]


def _waited_for(calls_s: Array) -> dict[str, Array]:
    """Calls of so many seconds on average, nine a trajectory, eight trajectories at a time."""
    more_s = 9 * (calls_s - 4.0)
    return _agents(env__turn_s__mean=noisy(calls_s, 31, 0.05)) | {
        "timing_s/gen": noisy(50.0 + more_s, 10),
        "timing_s/step": noisy(105.0 + more_s, 14),
    }


def test_calls_that_take_ever_longer_while_nothing_else_moves_leak() -> None:
    """The pool runs on hosts of its own, of which the log says nothing: seconds a call are all there is."""
    found = diagnose(run_of(_waited_for(4.0 + 0.3 * np.clip(T - 40, 0, None)))).findings
    assert [f.rule for f in found] == ["sandbox_leak"]
    assert abs(found[0].step - 41) <= 6
    calm = _waited_for(4.0 + 0.3 * np.clip(T - 40, 0, None)) | {"timing_s/gen": noisy(50.0, 10)}
    assert not diagnose(run_of(calm | {"timing_s/step": noisy(105.0, 14)})).findings, "nobody waits for them"


@pytest.mark.parametrize("end", [N, 90])
def test_calls_that_become_slow_at_one_step_are_named_so(end: int) -> None:
    found = diagnose(run_of(_waited_for(np.where((T >= 60) & (end > T), 20.0, 4.0)))).findings
    assert [f.rule for f in found] == ["slow_environment"]
    assert (abs(found[0].step - 61) <= 1, found[0].until_step) == (True, None if end == N else end + 1)
    assert found[0].cost_s == pytest.approx(9 * 16 * (end - 60), rel=0.15)


def test_slow_calls_beside_a_slow_trainer_are_the_hosts() -> None:
    slow = 1.0 + 3.0 * (T >= 60)
    every = {stage: noisy(level * slow, i) for i, (stage, level) in enumerate(zip(STAGES, (50, 40, 10, 4)))}
    run = _waited_for(4.0 * slow) | every | {"timing_s/step": noisy(105.0 * slow, 14)}
    assert "slow_environment" not in [f.rule for f in diagnose(run_of(run)).findings]


def test_a_pool_of_which_ever_more_refuses_dies_in_part() -> None:
    """Turns 9 to 3, calls and answers with them, the reward to a tenth, the policy as it was."""
    left = 1.0 - 0.65 * np.clip((T - 20) / 80, 0, 1)
    dies = _agents(num_turns__mean=noisy(9.0 * left, 30, 0.02), env__turn_s__mean=noisy(4.0 * left, 31, 0.05))
    dies |= {
        "response_length/mean": noisy(2000.0 * left, 8, 0.03),
        "critic/score/mean": 0.5 * np.clip((left - 0.3) / 0.7, 0, 1)
        + np.random.default_rng(1).normal(0, 0.02, N),
    }
    assert diagnose(run_of(dies)).verdict == "dead_sandbox_pool"
    runs_away = dies | {"actor/entropy": noisy(0.4 * (1 + 2 * T / N), 5, 0.02)}
    assert "dead_sandbox_pool" not in [f.rule for f in diagnose(run_of(runs_away)).findings]


def test_half_a_pool_gone_shows_in_turns_and_lengths_though_the_reward_is_noisy() -> None:
    gone = np.where(T >= 60, 0.7, 1.0)
    dies = _agents(
        num_turns__mean=noisy(9.0 * gone, 30, 0.02), env__turn_s__mean=noisy(4.0 * gone**1.2, 31, 0.05)
    )
    dies |= {
        "response_length/mean": noisy(2000.0 * gone, 8, 0.01),
        "critic/score/mean": 0.62 * np.where(T >= 60, 0.66, 1.0)
        + np.random.default_rng(1).normal(0, 0.08, N),
    }
    assert diagnose(run_of(dies)).verdict == "dead_sandbox_pool"


def _only_steps(seconds: Array, **changed: Array) -> dict[str, Array]:
    return dict.fromkeys(STAGES, np.full(N, np.nan)) | {"timing_s/step": seconds} | changed


def test_bursts_show_in_the_step_where_no_stage_is_timed() -> None:
    hit = (T >= 60) & (T % 3 == 0)
    longest = {"response_length/max": np.where(hit, 16384.0, noisy(3000.0, 9))}
    burst = _only_steps(noisy(np.where(hit, 430.0, 200.0), 14, 0.02), **longest)
    assert diagnose(run_of(burst, format="trl")).verdict == "tail_burst"


def test_stalls_show_in_the_step_where_no_stage_is_timed() -> None:
    """Four steps of ten times their seconds, a quarter of the run's; one is an accident."""
    for hit, verdict in ((np.isin(T, (50, 71, 72, 101)), "collective_hang"), (T == 71, "well")):
        stalls = _only_steps(noisy(np.where(hit, 2050.0, 220.0), 14, 0.02))
        assert diagnose(run_of(stalls, format="trl")).verdict == verdict


def test_the_share_of_cut_off_answers_of_an_evaluation_is_no_source() -> None:
    [row] = Renamer((SLIME,)).rows([Row(step=1, data={"eval/aime": 0.3, "eval/aime-truncated_ratio": 0.0})])
    assert isinstance(row, Row)
    assert row.data == {"val/aime/reward": 0.3, "val/aime/clip_ratio": 0.0}


def test_a_source_that_fades_under_a_policy_that_runs_away_is_not_its_scorers_fault() -> None:
    fades = np.clip(0.5 - 0.5 * (T - 40) / 60, 0, 1) * (1 + 0.1 * np.sin(T))
    sources = {"reward/a/mean": np.round(fades, 2), "reward/b/mean": noisy(0.9, 40, 0.01)}
    grows = {
        "actor/entropy": noisy(0.5 * (1 + 1.6 * T / N), 5, 0.02),
        "critic/score/mean": 0.5 * (fades + 0.9),
    }
    assert "one_source_all_zero" not in [f.rule for f in diagnose(run_of(sources | grows)).findings]


def test_step_kl_that_goes_with_the_gap_alone_is_the_gap() -> None:
    """Old logprobs are the engine's: step KL and clip fraction jump with the gap, gradients and entropy stay."""
    far = np.where(T >= 60, 5.0, 1.0)
    jumps = {
        DIFF: noisy(0.006 * far, 2),
        KL: np.full(N, np.nan),
        PEARSON: 1 - noisy(0.002 * far**2, 3),
        "actor/ppo_kl": noisy(8e-4 * far**2, 6, 0.1),
        "actor/pg_clipfrac": noisy(8e-3 * far, 7, 0.1),
    }
    assert diagnose(run_of(jumps)).verdict == "engine_mismatch"


def test_a_gap_far_beyond_any_engine_is_one_though_the_sides_are_correlated() -> None:
    """Another temperature: 0.07 apart from the first step, correlation 0.991."""
    hot = {DIFF: noisy(0.07, 2, 0.03), KL: np.full(N, np.nan), PEARSON: 1 - noisy(0.009, 3, 0.03)}
    assert diagnose(run_of(hot)).verdict == "engine_mismatch"


def test_a_gap_that_led_by_far_is_the_cause_however_much_the_policy_moves_in_the_end() -> None:
    """Twenty times by step 100; gradients and step KL break there, and step 119 is NaN."""
    gap = 1 + 19 * np.clip((T - 70) / 35, 0, 1) ** 2
    late = np.clip((T - 100) / 18, 0, 1)
    ends = {
        DIFF: noisy(0.007 * gap, 2),
        KL: noisy(0.001 * gap**1.5, 3, 0.1),
        "actor/ppo_kl": np.where(T < 100, noisy(4e-7, 6, 0.3), 4e-7 * 1e5**late),
        "actor/grad_norm": noisy(0.5 * 60**late, 4, 0.1),
        "actor/pg_loss": np.where(T >= 118, np.nan, noisy(0.01, 40)),
    }
    run = run_of(ends)
    run.non_finite["actor/pg_loss"] = [119, 120]
    assert diagnose(run).verdict == "mismatch_to_nan"


def test_a_rate_that_warms_up_a_second_time_is_a_restart_without_any_mark() -> None:
    lr = np.where(T < 60, 1e-6, 5e-8 * np.minimum(T - 59, 20))
    assert diagnose(run_of({"actor/lr": lr})).verdict == "discontinuity_after_resume"
    cycles = 1e-6 * np.where(T % 30 < 1, 0.05, np.minimum((T % 30) / 20, 1))
    assert diagnose(run_of({"actor/lr": cycles})).verdict == "well"


def test_a_loaded_checkpoint_in_the_log_is_a_restart_whose_shake_calms_down() -> None:
    """slime's line; step KL nine times, gradients twice, gone within fifteen steps."""
    calm = np.where(T >= 80, np.exp(-(T - 80) / 6), 0.0)
    shaken = {
        "actor/ppo_kl": noisy(6e-4 * (1 + 9 * calm), 6, 0.2),
        "actor/grad_norm": noisy(0.3 * (1 + 1.6 * calm), 4, 0.1),
    }
    run = run_of(shaken, format="slime")
    run.events.append(
        Event(kind="resumed", step=80, text="successfully loaded checkpoint from /ckpt at iteration 80")
    )
    assert diagnose(run).verdict == "discontinuity_after_resume"


@pytest.mark.parametrize("trained_s", [40.0, None])
def test_steps_of_hours_that_no_timed_stage_explains_stall_at_something_outside(
    trained_s: float | None,
) -> None:
    """A hosted service: the trainer's seconds may be logged, those of sampling are not. The first step warms up."""
    stalls = np.where(np.isin(T, (35, 61, 62, 84, 103)), 3600.0, 0.0)
    stalls[84] = 36_000.0
    run: dict[str, Array] = dict.fromkeys(STAGES, np.full(N, np.nan))
    run |= {"timing_s/step": noisy(280.0, 14) + stalls}
    if trained_s is not None:
        run["timing_s/update_actor"] = noisy(np.where(T == 0, 6400.0, trained_s), 11)
    found = diagnose(run_of(run)).findings
    assert [(f.rule, f.step) for f in found] == [("collective_hang", 36)]
    assert "a rank, a service or the host" in found[0].title
    assert found[0].cost_s == pytest.approx(4 * 3600 + 36_000, rel=0.05)


def test_samples_that_wait_ever_longer_outside_of_generation_leak() -> None:
    """slime tells no seconds a call: those of a sample in which nothing is generated grow, step by step and then by a
    leap, and the steps wait for them."""
    waits = 11.0 + 0.25 * np.clip(T - 36, 0, None) + 24.0 * (T >= 76)
    slow = {
        "perf/non_generation_time/mean": noisy(waits, 31, 0.05),
        "timing_s/gen": noisy(100.0 + 2.0 * (waits - 11.0), 10),
        "timing_s/step": noisy(150.0 + 2.0 * (waits - 11.0), 14),
    }
    finding = diagnose(run_of(slow, format="slime")).findings[0]
    assert finding.rule == "sandbox_leak"
    assert 37 <= finding.step <= 60  # long before the leap
    assert diagnose(run_of({"perf/non_generation_time/mean": noisy(11.0, 31, 0.05)}, format="slime")).is_well


@pytest.mark.parametrize("num_after", [3, 6, 40])
def test_a_pool_that_dies_is_dated_at_its_step_however_soon_the_log_ends(num_after: int) -> None:
    n = 60 + num_after
    dead = np.arange(n) >= 60
    broken = {
        "env/turn_s/mean": noisy(np.where(dead, 29.4, 2.96), 31, 0.05, n=n),
        "num_turns/mean": noisy(np.where(dead, 2.1, 5.2), 32, 0.05, n=n),
        "critic/score/mean": noisy(np.where(dead, 0.07, 0.46), 33, 0.05, n=n),
    }
    finding = diagnose(run_of(broken, n=n)).findings[0]
    assert (finding.rule, finding.step) == ("dead_sandbox_pool", 61)
