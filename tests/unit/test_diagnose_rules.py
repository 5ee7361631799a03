"""The relations that tell faults apart, each on the smallest series that shows it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.series import Event, Row, RunSeries, Seam
from rollbook.diagnose.signs.seconds import lost_in_steps
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N, AT = 120, 60
T = np.arange(N, dtype=np.float64)
GAP = "training/rollout_probs_diff_mean"
STALENESS = "training/off_policy/trajectory_staleness"


def _noisy(level: float | NDArray[np.float64], seed: int, size: float = 0.04) -> NDArray[np.float64]:
    return np.asarray(level * np.exp(np.random.default_rng(seed).normal(0, size, N)))


def _run(events: tuple[Event, ...] = (), **changed: NDArray[np.float64]) -> RunSeries:
    """A healthy run with some series replaced; names are given with "/" as "__"."""
    values = {
        "critic/rewards/mean": np.clip(0.3 + 0.2 * T / N + np.random.default_rng(1).normal(0, 0.01, N), 0, 1),
        GAP: _noisy(0.006, 2),
        "rollout_corr/kl": _noisy(0.001, 3, 0.1),
        "actor/grad_norm": _noisy(0.2, 4, 0.1),
        "actor/entropy": _noisy(0.4, 5, 0.02),
        "actor/ppo_kl": _noisy(2e-4, 6, 0.1),
        "actor/pg_clipfrac": _noisy(2e-3, 7, 0.1),
        "response_length/mean": _noisy(800.0, 8),
        "response_length/max": _noisy(3000.0, 9),
        "timing_s/gen": _noisy(50.0, 10),
        "timing_s/update_actor": _noisy(40.0, 11),
        "timing_s/old_log_prob": _noisy(10.0, 12),
        "timing_s/update_weights": _noisy(4.0, 13),
        "timing_s/step": _noisy(105.0, 14),
        "perf/max_memory_allocated_gb": _noisy(50.0, 15, 0.002),
        "perf/max_memory_reserved_gb": _noisy(60.0, 16, 0.002),
    }
    values.update({name.replace("__", "/"): series for name, series in changed.items()})
    rows = [
        Row(step=i + 1, data={k: float(v[i]) for k, v in values.items() if np.isfinite(v[i])})
        for i in range(N)
    ]
    return assemble([*rows[:AT], *events, *rows[AT:]], source="log", format="test")


def _grow(base: NDArray[np.float64], factor: float, over: int = N - AT) -> NDArray[np.float64]:
    return base * (1 + (factor - 1) * np.clip((T - AT) / over, 0, 1))


def _step(base: NDArray[np.float64], factor: float) -> NDArray[np.float64]:
    return np.where(T >= AT, base * factor, base)


def test_the_base_run_is_well_with_four_signals_as_proof() -> None:
    diagnosis = diagnose(_run())
    assert diagnosis.verdict == "well"
    assert [signal.verdict for signal in diagnosis.signals] == ["well"] * 4


def test_a_gap_that_grows_is_a_missed_sync_and_one_that_steps_is_a_mismatch() -> None:
    ramp = _run(**{GAP: _grow(_noisy(0.006, 2), 6), "rollout_corr/kl": _grow(_noisy(0.001, 3, 0.1), 30)})
    step = _run(**{GAP: _step(_noisy(0.006, 2), 6), "rollout_corr/kl": _step(_noisy(0.001, 3, 0.1), 30)})
    assert diagnose(ramp).verdict == "missed_weight_sync"
    assert diagnose(step).verdict == "engine_mismatch"


def test_a_gap_that_follows_staleness_is_stale_samples() -> None:
    stale = {
        f"{STALENESS}/mean": _step(_noisy(0.8, 20), 6),
        f"{STALENESS}/max": np.round(_step(_noisy(2.0, 21), 3)),
        f"{STALENESS}/min": np.zeros(N),
        GAP: _step(_noisy(0.006, 2), 1.8),
        "rollout_corr/kl": _step(_noisy(0.001, 3, 0.1), 3.5),
    }
    diagnosis = diagnose(_run(**stale))
    assert diagnosis.verdict == "stale_samples"


def test_samples_that_age_by_one_version_a_step_tell_who_stands_still() -> None:
    """All of them: a missed sync. Only the oldest: a part of the replicas."""
    age = np.clip(T - AT, 0, None)
    all_stand = {f"{STALENESS}/{stat}": age + 0.5 * (stat == "mean") for stat in ("mean", "max", "min")}
    some_stand = {
        f"{STALENESS}/mean": 0.5 + age / 4,
        f"{STALENESS}/max": 1 + age,
        f"{STALENESS}/min": np.zeros(N),
    }
    assert diagnose(_run(**all_stand)).verdict == "missed_weight_sync"
    assert diagnose(_run(**some_stand)).verdict == "version_drift"


def test_replicas_that_keep_their_version_are_named() -> None:
    versions = {f"replica/{i}/weight_version": T.copy() for i in range(4)}
    versions["replica/2/weight_version"] = np.minimum(T, AT)
    finding = diagnose(_run(**versions, **{"training/weight_version": T})).findings[0]
    assert finding.rule == "version_drift"
    assert "replicas 2 of 4" in finding.evidence[0].says


def test_a_policy_that_moves_too_fast_explains_a_gap_that_follows_it() -> None:
    """Gradient norm, step KL, clip fraction and entropy blow up; the gap only doubles: no fault of the system."""
    fast = {
        "actor/grad_norm": _grow(_noisy(0.2, 4, 0.1), 20, 30),
        "actor/ppo_kl": _grow(_noisy(2e-4, 6, 0.1), 100, 30),
        "actor/pg_clipfrac": _grow(_noisy(2e-3, 7, 0.1), 15, 30),
        "actor/entropy": _grow(_noisy(0.4, 5, 0.02), 4, 30),
        "critic/rewards/mean": _grow(_noisy(0.4, 1), 0.2, 40),
        GAP: _grow(_noisy(0.006, 2), 2.2, 40),
        "rollout_corr/kl": _grow(_noisy(0.001, 3, 0.1), 5, 40),
    }
    diagnosis = diagnose(_run(**fast))
    assert diagnosis.is_well
    assert [state.name for state in diagnosis.states] == ["learning_rate_too_high"]


def test_nan_after_a_growing_gap_is_the_mismatch_and_after_a_blow_up_is_not() -> None:
    nan = np.where(T >= N - 4, np.nan, 1.0)
    rows = _run(**{GAP: _grow(_noisy(0.006, 2), 15), "rollout_corr/kl": _grow(_noisy(0.001, 3, 0.1), 200)})
    rows.values["actor/grad_norm"] = _grow(_noisy(0.2, 4, 0.1), 20) * nan
    rows.non_finite = {"actor/grad_norm": [int(s) for s in rows.steps[-4:]]}
    assert diagnose(rows).verdict == "mismatch_to_nan"
    rows = _run(
        **{
            "actor/ppo_kl": _grow(_noisy(2e-4, 6, 0.1), 200, 40),
            "actor/entropy": _grow(_noisy(0.4, 5, 0.02), 4, 40),
            "actor/pg_clipfrac": _grow(_noisy(2e-3, 7, 0.1), 20, 40),
        }
    )
    rows.values["actor/grad_norm"] = _grow(_noisy(0.2, 4, 0.1), 40, 40) * nan
    rows.non_finite = {"actor/grad_norm": [int(s) for s in rows.steps[-4:]]}
    assert diagnose(rows).is_well


def test_a_publication_that_is_no_longer_logged_is_a_missed_one() -> None:
    gone = np.where(T >= AT, np.nan, _noisy(4.0, 13))
    series = {"timing_s/update_weights": gone, GAP: _grow(_noisy(0.006, 2), 4)}
    assert diagnose(_run(**series)).verdict == "missed_weight_sync"


def test_rewards_that_fall_with_the_environments_signals_are_dead_sandboxes() -> None:
    dead = {
        "critic/rewards/mean": _step(_noisy(0.4, 1), 0.3),
        "num_turns/mean": _step(_noisy(6.0, 20), 0.5),
        "response/aborted_ratio": _step(_noisy(0.004, 21), 80),
    }
    finding = diagnose(_run(**dead)).findings[0]
    assert finding.rule == "dead_sandbox_pool"
    assert finding.cost_reward is not None
    assert 0.2 < finding.cost_reward < 0.35


def test_br110_sandboxes_that_are_not_given_back_are_found_by_their_load() -> None:
    leak = {
        "num_turns/mean": _noisy(6.0, 20),
        "env/num_leased": _grow(_noisy(60.0, 21), 4),
        "env/queue_depth": _grow(_noisy(3.0, 22), 20),
        "env/turn_s/mean": _grow(_noisy(2.0, 23), 5),
    }
    assert diagnose(_run(**leak)).verdict == "sandbox_leak"


def test_one_source_at_exactly_zero_is_its_scorer_and_all_of_them_is_not() -> None:
    one = {"reward/math/mean": _noisy(0.5, 20), "reward/code/mean": _step(_noisy(0.4, 21), 0.0)}
    finding = diagnose(_run(**one)).findings[0]
    assert (finding.rule, finding.step) == ("one_source_all_zero", AT + 1)
    assert "'code'" in finding.title
    fading = {
        "reward/math/mean": _grow(_noisy(0.5, 20), 0.1),
        "reward/code/mean": _grow(_noisy(0.4, 21), 0.0, 50),
    }
    assert diagnose(_run(**fading)).verdict != "one_source_all_zero"


def test_waiting_is_told_by_what_did_not_change() -> None:
    """The same seconds: with longer responses nothing is wrong, without them samples do not come."""
    slow = _step(_noisy(50.0, 10), 4)
    waits = {"timing_s/gen": slow, f"{STALENESS}/mean": _noisy(0.8, 20)}
    assert diagnose(_run(**waits)).verdict == "buffer_never_fills"
    longer = {
        "response_length/mean": _step(_noisy(800.0, 8), 4),
        "response_length/max": _step(_noisy(3000.0, 9), 4),
    }
    assert diagnose(_run(**waits, **longer)).is_well
    filtered = {"training/filter_groups/evicted_samples": _step(_noisy(60.0, 21), 12)}
    assert diagnose(_run(**waits, **filtered)).verdict == "filter_starvation"


def test_a_stall_at_the_end_is_a_hang_and_the_log_in_words_makes_it_sure() -> None:
    stalled = _noisy(40.0, 11)
    stalled[-1] = 1840.0
    silent = diagnose(_run(**{"timing_s/update_actor": stalled})).findings[0]
    assert silent.rule == "collective_hang"
    event = Event(kind="collective_timeout", step=N, text="Watchdog caught collective operation timeout")
    said = diagnose(_run(events=(event,), **{"timing_s/update_actor": stalled})).findings[0]
    assert said.rule == "collective_hang"
    assert said.confidence > silent.confidence
    assert silent.cost_s is not None
    assert 1700 < silent.cost_s < 1900


def test_memory_that_follows_length_is_not_fragmentation_and_the_reverse() -> None:
    length = _noisy(800.0, 8) * (1 + 2.5 * T / N)
    follows = {
        "response_length/mean": length,
        "timing_s/gen": _noisy(50.0, 10) * (1 + 2.5 * T / N),
        "perf/max_memory_allocated_gb": np.maximum.accumulate(45 + 32 * T / N),
        "perf/max_memory_reserved_gb": np.maximum.accumulate(49 + 30 * T / N),
    }
    assert diagnose(_run(**follows)).verdict == "late_oom_with_length"
    held = {"perf/max_memory_reserved_gb": np.maximum.accumulate(56 + 23 * T / N)}
    assert diagnose(_run(**held)).verdict == "fragmentation"


def test_fragmentation_that_slows_down_is_found_though_the_first_steps_take_most() -> None:
    """The first three steps take half as much as all that come after the first sixth of the run."""
    held = {"perf/max_memory_reserved_gb": 50 + 28 * (T / N) ** 0.4}
    assert diagnose(_run(**held)).verdict == "fragmentation"


def test_an_allocator_that_warms_up_or_jumps_once_is_well() -> None:
    warm = {"perf/max_memory_reserved_gb": 56 + 12 * (1 - np.exp(-T / 8))}
    once = {"perf/max_memory_reserved_gb": np.where(T >= 70, 70.0, 60.0)}
    assert diagnose(_run(**warm)).is_well
    assert diagnose(_run(**once)).is_well


def test_what_was_not_logged_is_said_with_how_to_collect_it() -> None:
    run = _run()
    run.format = "verl-file"
    for name in [n for n in run.values if n.startswith(("training/", "rollout_corr/"))]:
        del run.values[name]
    missing = {judged.rule: judged.collect for judged in diagnose(run).not_judged}
    assert "calculate_log_probs" in missing["engine_mismatch"]
    assert "missed_weight_sync" in missing


def test_smooth_curves_without_noise_are_well() -> None:
    """The noise is zero: relations must hold the rules back, not scores."""
    curves = {
        "critic/rewards/mean": 0.2 + 0.5 * T / N,
        GAP: 0.006 * (1 + 0.3 * T / N),
        "rollout_corr/kl": 0.001 * (1 + 0.5 * T / N),
        "actor/entropy": 0.5 * np.exp(-T / N),
        "response_length/mean": 500 * (1 + T / N),
        "response_length/max": 2000 * (1 + T / N),
        "timing_s/gen": 50 * (1 + T / N),
        "actor/grad_norm": 0.2 * np.exp(-T / N),
        "perf/max_memory_allocated_gb": 50 + 4 * T / N,
        "perf/max_memory_reserved_gb": 58 + 5 * T / N,
        "timing_s/update_weights": np.full(N, 4.0),
    }
    assert diagnose(_run(**curves)).findings == ()


def test_a_log_of_a_few_steps_raises_no_alarm() -> None:
    rows = [
        Row(step=i, data={"critic/rewards/mean": 0.1 * i, GAP: 0.006, "timing_s/gen": 10.0 + i})
        for i in range(4)
    ]
    diagnosis = diagnose(assemble(rows, source="log", format="test"))
    assert diagnosis.findings == ()
    assert diagnosis.num_steps == 4


def test_a_pipeline_that_fills_up_to_its_bound_is_well() -> None:
    """Seen in every asynchronous run: staleness 0, 1, 2, ... up to the bound of 4, and the gap with it."""
    age = np.minimum(T, 4.0)
    fills = {f"{STALENESS}/{stat}": age for stat in ("mean", "max", "min")}
    gap = {GAP: _noisy(0.002 + 0.003 * age, 2), "rollout_corr/kl": _noisy(1e-4 + 5e-4 * age, 3, 0.1)}
    assert diagnose(_run(**fills, **gap)).findings == ()


def test_a_gap_that_staleness_brings_is_no_mismatch_of_the_engine() -> None:
    """Large from the second step on, but at staleness 0 in the first: another engine would have it there too."""
    age = np.minimum(T, 2.0)
    fills = {f"{STALENESS}/{stat}": age for stat in ("mean", "max", "min")}
    large = {GAP: _noisy(0.0005 + 0.03 * age, 2), "rollout_corr/kl": _noisy(1e-5 + 0.05 * age, 3, 0.1)}
    assert diagnose(_run(**fills, **large)).verdict == "well"
    always = {GAP: _noisy(0.06, 2), "rollout_corr/kl": _noisy(0.1, 3, 0.1)}
    assert diagnose(_run(**fills, **always)).verdict == "engine_mismatch"


def test_a_slow_host_is_no_tail() -> None:
    """Every third step from the middle on takes twice as long in generation and in training."""
    hit = (T >= AT) & (T % 3 == 0)
    slow = {
        "timing_s/gen": _noisy(50.0, 10) * np.where(hit, 2, 1),
        "timing_s/update_actor": _noisy(40.0, 11) * np.where(hit, 2, 1),
        "response_length/max": _noisy(3000.0, 9) * np.where(hit, 1.7, 1),
    }
    assert diagnose(_run(**slow)).findings == ()
    tail = {**slow, "timing_s/update_actor": _noisy(40.0, 11)}
    assert diagnose(_run(**tail)).verdict == "tail_burst"


def test_a_fall_of_the_reward_names_no_source_where_none_is_logged() -> None:
    """Rewards are lower from one step to the next, as they are at a switch of the data."""
    rng = np.random.default_rng(1)
    diagnosis = diagnose(_run(critic__rewards__mean=np.where(T < AT, 0.5, 0.35) + rng.normal(0, 0.01, N)))
    assert "one_source_all_zero" not in [f.rule for f in (*diagnosis.findings, *diagnosis.consequences)]
    assert "one_source_all_zero" in [item.rule for item in diagnosis.not_judged]


def test_a_fall_that_a_larger_rise_hides_is_found() -> None:
    """A reward that was learned within fifteen steps and loses a quarter at step 60: the rise is the larger split."""
    learned = 0.1 + 0.6 * (1 - np.exp(-T / 4.0))
    noise = np.random.default_rng(30).normal(0, 0.008, N)
    held_out = np.where(T % 20 == 19, np.where(T < AT, 0.5, 0.0), np.nan)
    score = np.clip(np.where(T < AT, learned, 0.75 * learned) + noise, 0, 1)
    finding = diagnose(
        _run(critic__rewards__mean=score, **{"val-core__code__reward__mean@1": held_out})
    ).findings[0]
    assert (finding.rule, finding.step) == ("one_source_all_zero", AT + 1)


def test_a_restart_after_which_the_reward_is_higher_lost_nothing() -> None:
    resumed = Event(kind="resumed", step=AT, text="Resuming from global_step_60")
    noise = np.random.default_rng(32).normal(0, 0.004, N)
    better = 0.30 + np.where(T < AT, 0.0, 0.08) + noise
    assert diagnose(_run((resumed,), critic__rewards__mean=better)).verdict == "well"
    worse = 0.30 - np.where(T < AT, 0.0, 0.08) + noise
    assert diagnose(_run((resumed,), critic__rewards__mean=worse)).verdict == "discontinuity_after_resume"


def _fades(size: float) -> NDArray[np.float64]:
    return 1 + np.where(T >= AT, size * np.exp(-np.clip(T - AT, 0, None) / 12), 0.0)


def test_an_optimizer_without_moments_is_found_where_nothing_marks_the_restart() -> None:
    """One log without a seam, a constant learning rate; reward, gradients and step KL are back twenty steps later."""
    lost = {
        "actor/grad_norm": _noisy(0.2, 4, 0.1) * _fades(3),
        "actor/ppo_kl": _noisy(2e-4, 6, 0.3) * _fades(4),
        "critic/rewards/mean": (0.3 + 0.2 * T / N + np.random.default_rng(1).normal(0, 0.01, N))
        * _fades(-0.4),
    }
    finding = diagnose(_run(**lost)).findings[0]
    assert (finding.rule, finding.step) == ("discontinuity_after_resume", AT + 1)
    # Harder data: gradients rise and the reward falls, the step KL stays.
    harder = diagnose(_run(**{**lost, "actor/ppo_kl": _noisy(2e-4, 6, 0.1)}))
    assert "discontinuity_after_resume" not in [f.rule for f in (*harder.findings, *harder.consequences)]


def test_a_schedule_that_begins_anew_marks_a_restart_and_cycles_do_not() -> None:
    lost = {
        "actor/grad_norm": _noisy(0.2, 4, 0.1) * _fades(3),
        "actor/entropy": _noisy(0.4, 5, 0.02) * _fades(0.3),
    }
    fell = 2e-6 * (1 - 0.5 * T / N)
    anew = np.where(T >= AT, fell[0] * (1 - 0.5 * (T - AT) / N), fell)
    cycles = 1e-6 * (1 - 0.5 * ((T - AT) % 15) / 15)
    assert diagnose(_run(**lost, **{"actor/lr": anew})).verdict == "discontinuity_after_resume"
    assert diagnose(_run(**lost, **{"actor/lr": cycles})).is_well
    assert diagnose(_run(**lost, **{"actor/lr": fell})).is_well


def test_other_data_that_lengthen_the_answers_are_no_restart() -> None:
    """The reward falls and the lengths grow at one step; the entropy moves by its noise only."""
    other = {
        "critic/rewards/mean": 0.3
        + 0.2 * T / N
        + np.random.default_rng(1).normal(0, 0.01, N)
        - 0.12 * (T >= AT),
        "response_length/mean": _noisy(800.0, 8) * np.where(T >= AT, 1.5, 1.0),
        "actor/entropy": _noisy(0.4, 5, 0.005) * np.where(T >= AT, 1.03, 1.0),
    }
    assert diagnose(_run(**other)).is_well


def test_probabilities_far_apart_from_the_first_step_are_a_mismatch_though_the_kl_is_small() -> None:
    """0.06 and a correlation of 0.92 are wrong for any pair of engines, whatever a KL of 0.007 says."""
    apart = {
        GAP: _noisy(0.06, 2),
        "training/rollout_actor_probs_pearson_corr": 1 - _noisy(0.08, 30),
        "rollout_corr/kl": _noisy(0.007, 3, 0.1),
        "rollout_corr/rollout_is_eff_sample_size": _noisy(0.95, 31, 0.003),
    }
    diagnosis = diagnose(_run(**apart))
    assert (diagnosis.verdict, diagnosis.signals[2].verdict) == ("engine_mismatch", "moved")


def test_probabilities_without_any_relation_are_noise_even_where_no_reward_is_lost() -> None:
    pearson = "training/rollout_actor_probs_pearson_corr"
    moved = {GAP: _step(_noisy(0.006, 2), 40), "rollout_corr/kl": _step(_noisy(0.001, 3, 0.1), 900)}
    noise = np.where(T >= AT, 0.05, 0.999) + np.random.default_rng(30).normal(0, 0.0005, N)
    rounded = np.where(T >= AT, 0.8, 0.999) + np.random.default_rng(30).normal(0, 0.0005, N)
    assert diagnose(_run(**moved, **{pearson: noise})).verdict == "silent_error_after_wake"
    assert diagnose(_run(**moved, **{pearson: rounded})).verdict == "engine_mismatch"


def test_flat_groups_of_a_solved_task_starve_nobody_unless_more_is_generated() -> None:
    """A solved task: short answers, nearly all right, most groups flat, and fixed costs make a token slower."""
    solved = {
        "critic/rewards/mean": np.clip(_grow(_noisy(0.4, 40, 0.02), 2.45, 20), 0, 0.99),
        "batch/effective_frac": _step(_noisy(0.9, 41), 0.2),
        "response_length/mean": _grow(_noisy(800.0, 8), 0.12, 20),
        "response_length/max": _grow(_noisy(3000.0, 9), 0.12, 20),
        "timing_s/gen": _grow(_noisy(50.0, 10), 0.35, 20),
    }
    as_many = {"generated/num_trajectories": np.full(N, 256.0)}
    assert diagnose(_run(**solved, **as_many)).is_well
    refilled = {"generated/num_trajectories": _step(np.full(N, 256.0), 4), "timing_s/gen": _noisy(50.0, 10)}
    assert diagnose(_run(**{**solved, **refilled})).verdict == "filter_starvation"
    fewer = {"batch/num_groups": _step(_noisy(32.0, 42, 0.02), 0.1)}
    assert diagnose(_run(**solved, **as_many, **fewer)).is_well  # as few are left to train
    unsolved = {"critic/rewards/mean": _noisy(0.3, 40, 0.02)}
    assert diagnose(_run(**{**solved, **unsolved}, **as_many, **fewer)).verdict == "filter_starvation"


def test_much_shorter_responses_that_cost_nearly_as_much_are_no_wait() -> None:
    """A solved task answers in a few tokens, and a step is then prompts and calls; the same seconds at the old
    lengths would be nothing either."""
    short = {
        "critic/rewards/mean": np.clip(_grow(_noisy(0.4, 40, 0.02), 2.45, 20), 0, 0.99),
        "response_length/mean": _grow(_noisy(800.0, 8), 0.1, 20),
        "response_length/max": _grow(_noisy(3000.0, 9), 0.1, 20),
        "timing_s/gen": _grow(_noisy(50.0, 10), 0.8, 20),
    }
    assert diagnose(_run(**short)).is_well
    waits = {**short, "timing_s/gen": _step(_noisy(50.0, 10), 4)}
    assert diagnose(_run(**waits)).verdict == "buffer_never_fills"


def test_a_gap_is_read_off_the_metrics_that_are_quiet() -> None:
    """A correlation so near 1 that what is left of it is noise must not drown a difference that grows fourfold."""
    corr = 1 - np.abs(np.random.default_rng(40).normal(4e-4, 3e-4, N)) - np.where(T < AT, 0, 1e-4 * (T - AT))
    run = _run(
        **{
            GAP: _grow(_noisy(0.003, 2), 4),
            "rollout_corr/kl": np.full(N, np.nan),
            "training/rollout_actor_probs_pearson_corr": corr,
        }
    )
    assert diagnose(run).verdict == "missed_weight_sync"


def test_a_gap_that_grows_slowly_with_staleness_is_no_missed_sync() -> None:
    """Nothing shows at any one step: a version more every ten steps."""
    age = 0.5 + np.where(T < 30, 0.0, 0.1 * (T - 30))
    slow = {f"{STALENESS}/mean": _noisy(age, 41), f"{STALENESS}/max": np.ceil(1.5 * age)}
    gap = {GAP: _noisy(0.004 * np.sqrt(1 + (0.3 * age) ** 2), 2, 0.03)}
    gap["rollout_corr/kl"] = _noisy(5e-4 * (1 + (0.3 * age) ** 2), 3, 0.1)
    diagnosis = diagnose(_run(**slow, **gap))
    assert diagnosis.verdict == "stale_samples"
    assert "missed_weight_sync" not in [finding.rule for finding in diagnosis.findings]


def test_a_source_that_was_out_for_a_while_is_named_with_its_end() -> None:
    out = (T >= AT) & (T < AT + 12)
    code = np.where(out, 0.0, np.random.default_rng(42).normal(0.4, 0.03, N))
    maths = np.random.default_rng(43).normal(0.5, 0.03, N)
    finding = diagnose(_run(reward__code__mean=code, reward__maths__mean=maths)).findings[0]
    assert (finding.rule, finding.step, finding.until_step) == ("one_source_all_zero", AT + 1, AT + 13)


def test_a_sandbox_pool_that_dies_again_and_again_is_found() -> None:
    dead = (T >= AT) & ((T - AT) % 20 < 9)
    broken = {
        "num_turns/mean": _noisy(6.0, 44, 0.02) * np.where(dead, 0.6, 1.0),
        "response/aborted_ratio": np.where(dead, 0.4, 0.004) + np.random.default_rng(45).normal(0, 1e-3, N),
        "critic/rewards/mean": np.where(dead, 0.15, 0.4) + np.random.default_rng(46).normal(0, 0.01, N),
    }
    finding = diagnose(_run(**broken)).findings[0]
    assert finding.rule == "dead_sandbox_pool" and abs(finding.step - AT) <= 2


def test_a_distance_to_the_reference_that_shrinks_and_grows_again_is_a_restart() -> None:
    since = np.clip(T - AT, 0, None)
    restarted = {
        "actor/kl_loss": np.where(T < AT, 1e-3 * T, 1e-3 * (20 + 2 * since)) * _noisy(1.0, 47, 0.02),
        "actor/entropy": _noisy(0.6 - 0.003 * np.where(T < AT, T, 20 + since), 48, 0.01),
    }
    finding = diagnose(_run(**restarted)).findings[0]
    assert finding.rule == "discontinuity_after_resume" and abs(finding.step - AT) <= 2
    reference = {
        "actor/kl_loss": restarted["actor/kl_loss"]
    }  # replaced by the policy of that step, on purpose
    assert diagnose(_run(**reference)).findings == ()


def test_a_policy_that_runs_away_is_no_restart() -> None:
    way = np.clip((T - AT) / 10, 0, 1)
    away = {
        "actor/entropy": _noisy(0.4 * (1 + way), 5, 0.02),
        "actor/grad_norm": _noisy(0.2 * np.exp(2 * way), 4, 0.1),
        "actor/ppo_kl": _noisy(2e-4 * np.exp(4 * way), 6, 0.1),
        "actor/pg_clipfrac": _noisy(2e-3 * np.exp(2 * way), 7, 0.1),
        "critic/rewards/mean": 0.4 * (1 - 0.7 * way) + np.random.default_rng(1).normal(0, 0.01, N),
        GAP: _noisy(0.006 * (1 + 0.8 * way), 2),
        "rollout_corr/kl": _noisy(0.001 * (1 + 0.8 * way) ** 2, 3, 0.1),
    }
    diagnosis = diagnose(_run(**away))
    assert diagnosis.findings == ()
    assert diagnosis.states[0].name == "learning_rate_too_high"


def test_responses_eight_times_as_long_are_a_tail_whatever_the_host_does() -> None:
    """Forty steps; seconds that wander by a factor of ten, and by half from one step to the next."""
    for seed in range(5):
        rng = np.random.default_rng(seed)
        t = np.arange(40)
        hit = (t >= 13) & (t % 3 == 0)
        host = np.exp(0.2 * np.cumsum(rng.normal(0, 1, 40)) + rng.normal(0, 0.25, 40))
        columns = {
            "critic/rewards/mean": 0.5 + rng.normal(0, 0.03, 40),
            "response_length/max": np.where(hit, 24.0, 3.0),
            "response_length/mean": np.where(hit, 3.8, 2.9),
            "timing_s/gen": 0.03 * host * np.where(hit, 3, 1),
            "timing_s/update_actor": 0.02 * host * np.exp(rng.normal(0, 0.4, 40)),
        }
        rows = [Row(step=int(i), data={k: float(v[i]) for k, v in columns.items()}) for i in t]
        assert diagnose(assemble(rows, source="log", format="test")).verdict == "tail_burst", seed


def test_more_responses_at_the_limit_hold_no_step_up_that_was_held_up_before() -> None:
    """The wait is eight times as long from step 60 on; the longest have always ended at the limit."""
    waits = {
        "timing_s/gen": _step(_noisy(50.0, 10), 8),
        "response_length/max": np.full(N, 4096.0),
        "response_length/clip_ratio": _step(_noisy(0.004, 49, 0.2), 6),
    }
    assert "tail_burst" not in [finding.rule for finding in diagnose(_run(**waits)).findings]


def test_a_correction_that_rejects_nearly_everything_is_named_with_its_onset() -> None:
    masked = np.where(T < AT, 0.02, 0.95) + np.random.default_rng(50).normal(0, 0.005, N)
    finding = diagnose(_run(rollout_corr__rollout_rs_seq_masked_fraction=masked)).findings[0]
    assert (finding.rule, finding.step) == ("all_rejected", AT + 1)
    assert "0.951 of the sequences are left out" in finding.evidence[0].says
    always = np.full(N, 0.97)
    assert diagnose(_run(rollout_corr__rollout_rs_masked_fraction=always)).findings[0].step == 1
    usual = np.full(N, 0.3)
    assert diagnose(_run(rollout_corr__rollout_rs_masked_fraction=usual)).findings == ()


def test_rejection_only_says_what_a_missed_sync_has_done() -> None:
    masked = np.clip(0.02 + 0.05 * np.clip(T - AT, 0, None), 0, 0.98)
    stale = {GAP: _grow(_noisy(0.006, 2), 6), "rollout_corr/kl": _grow(_noisy(0.001, 3, 0.1), 30)}
    diagnosis = diagnose(_run(**stale, **{"rollout_corr/rollout_rs_masked_fraction": masked}))
    assert [finding.rule for finding in diagnosis.findings] == ["missed_weight_sync"]
    assert "all_rejected" in [finding.rule for finding in diagnosis.consequences]


def test_a_gap_of_a_few_steps_is_said_to_be_too_young_to_tell() -> None:
    """Five steps after it came: other numerics stay, a lost part of a publication grows."""
    young = np.where(T >= N - 5, 4.0, 1.0)
    finding = diagnose(
        _run(**{GAP: _noisy(0.006, 2) * young, "rollout_corr/kl": _noisy(0.001, 3, 0.1) * young**2})
    ).findings[0]
    assert (finding.rule, finding.confidence) == ("engine_mismatch", 0.6)
    assert "read it again in 10 steps" in finding.next_check


def _not_a_number_since(run: RunSeries, first: int) -> RunSeries:
    """The same run, its gradient norm no number from a position on."""
    run.values["actor/grad_norm"] = np.where(first <= T, np.nan, run.values["actor/grad_norm"])
    run.non_finite = {"actor/grad_norm": [int(step) for step in run.steps[first:]]}
    return run


def test_rewards_that_vanish_with_the_last_sound_update_are_not_a_broken_scorer() -> None:
    grown = {GAP: _grow(_noisy(0.006, 2), 8, 30), "rollout_corr/kl": _grow(_noisy(0.001, 3, 0.1), 64, 30)}
    zero = {"critic/rewards/mean": np.where(T >= 100, 0.0, _noisy(0.4, 1))}
    assert diagnose(_run(**zero)).verdict == "dead_scorer"
    diagnosis = diagnose(_not_a_number_since(_run(**grown, **zero), 100))
    assert [finding.rule for finding in diagnosis.findings] == ["mismatch_to_nan"]


def test_noise_after_a_broken_update_is_not_laid_on_the_engine_where_no_gap_was_logged() -> None:
    none = np.full(N, np.nan)
    noise: dict[str, NDArray[np.float64]] = {
        "critic/rewards/mean": np.where(T >= 100, 0.0, _noisy(0.4, 1)),
        "response_length/mean": np.where(T >= 100, 8192.0, _noisy(800.0, 8)),
        "response_length/clip_ratio": np.where(T >= 100, 1.0, _noisy(0.01, 17)),
        GAP: none,
        "rollout_corr/kl": none,
    }
    assert diagnose(_run(**noise)).verdict == "silent_error_after_wake"
    finding = diagnose(_not_a_number_since(_run(**noise), 100)).findings[0]
    assert (finding.rule, finding.step, finding.confidence) == ("not_finite", 101, 0.8)
    assert "or the engine: return logprobs" in finding.next_check


def test_a_source_at_zero_is_said_with_its_number_where_scores_come_every_few_steps() -> None:
    """The reward in training dates the fall between two validations."""
    sparse = np.where(T % 10 == 9, 1.0, np.nan)
    finding = diagnose(
        _run(
            **{
                "critic/rewards/mean": np.where(T >= 63, 0.3, 0.4)
                + np.random.default_rng(1).normal(0, 0.01, N),
                "val-core/code/acc/mean@8": sparse * np.where(T >= 63, 0.0, 0.3),
                "val-core/math/acc/mean@8": sparse * _noisy(0.5, 18),
            }
        )
    ).findings[0]
    assert finding.rule == "one_source_all_zero"
    assert "exactly 0 since step" in finding.evidence[0].says


def test_what_a_step_lost_is_beyond_what_longer_responses_explain() -> None:
    """Sixty steps of 100 s, then sixty of 210 s with responses half as long again: 210 - 150 = 60 s each."""
    steps = {
        "timing_s__step": _step(np.full(N, 100.0), 2.1),
        "response_length__mean": _step(np.full(N, 800.0), 1.5),
    }
    assert lost_in_steps(View.of(_run(**steps)), AT) == pytest.approx(60 * 60.0)
    untimed = _run(**steps | {"timing_s__step": np.full(N, np.nan)})
    for stage in ("gen", "update_actor", "old_log_prob", "update_weights"):
        untimed.values[f"timing_s/{stage}"] = _step(np.full(N, 25.0), 2.1)
    assert lost_in_steps(View.of(untimed), AT) == pytest.approx(60 * 60.0)


def test_leaked_sandboxes_cost_what_whole_steps_lost() -> None:
    grown = _grow(np.ones(N), 3.0)
    run = _run(
        num_turns__mean=_noisy(6.0, 20),
        env__num_leased=np.round(100 * grown),
        env__queue_depth=_noisy(5.0, 21) * grown**2,
        env__turn_s__mean=_noisy(2.0, 22) * grown,
        timing_s__gen=_noisy(50.0, 10) * grown,
        timing_s__step=_noisy(55.0, 14) + 50.0 * grown,
    )
    found = diagnose(run).findings[0]
    assert found.rule == "sandbox_leak"
    assert found.cost_s == pytest.approx(float((50.0 * (grown - 1)).sum()), rel=0.2)


def _waits(factor: float, **changed: NDArray[np.float64]) -> RunSeries:
    """The seconds of generation grow by `factor` half-way, and nothing else unless it is given."""
    gen = _step(_noisy(50.0, 10), factor)
    seconds = {
        "timing_s__gen": gen,
        "timing_s__step": gen + 55.0,
        f"{STALENESS.replace('/', '__')}__mean": _noisy(1.0, 30),
    }
    return _run(**seconds | changed)


def test_a_host_explains_a_longer_wait_as_far_as_it_slows_what_waits_for_nobody() -> None:
    slow = {
        "timing_s__update_actor": _step(_noisy(40.0, 11, 0.15), 2.5),
        "timing_s__old_log_prob": _step(_noisy(10.0, 12, 0.15), 2.5),
    }
    assert diagnose(_waits(3.0)).verdict == "buffer_never_fills"
    assert diagnose(_waits(3.0, **slow)).verdict == "well"
    assert diagnose(_waits(9.0, **slow)).verdict == "buffer_never_fills"


def test_shorter_responses_need_no_shorter_wait() -> None:
    """A quarter of the tokens in nearly the same seconds: the prompts, the calls and the tail are what they were."""
    length = _step(_noisy(800.0, 8), 0.25)
    longest = _step(_noisy(3000.0, 9), 0.25)
    assert diagnose(_waits(1.0, response_length__mean=length, response_length__max=longest)).is_well


@pytest.mark.parametrize(("correlation", "says"), [(0.994, True), (0.89, False)])
def test_sides_far_apart_that_order_tokens_alike_differ_by_a_temperature(
    correlation: float, says: bool
) -> None:
    run = _run(
        **{GAP.replace("/", "__"): _step(_noisy(0.006, 2), 9.0)},
        training__rollout_actor_probs_pearson_corr=np.where(T >= AT, correlation, 0.9995),
        rollout_corr__kl=_step(_noisy(0.001, 3, 0.1), 80.0),
    )
    found = diagnose(run).findings[0]
    assert found.rule == "engine_mismatch"
    assert ("as at another temperature" in found.title) is says
    assert found.action.startswith("compare temperature") is says


def test_a_schedule_that_counts_steps_run_again_twice_has_not_begun_anew() -> None:
    """Four steps are run again; the rate falls by 2 % a step and is that of four steps later, or where it began."""
    falls = 1e-6 * 0.98**T
    for after, is_well in ((falls * 0.98**4, True), (np.full(N, 1e-6), False)):
        run = _run(**{"actor/lr": np.where(T >= AT, after, falls)})
        replaced = {"actor/lr": falls[AT : AT + 4].tolist()}
        run.seams = [Seam(step=int(run.steps[AT]), num_replaced=4, replaced=replaced)]
        assert diagnose(run).is_well is is_well
