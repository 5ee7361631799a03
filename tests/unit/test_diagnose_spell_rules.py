"""Faults that come and go, each on the smallest run that shows it, beside the healthy run that looks most like it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.series import Event, Row
from rollbook.diagnose.tree import diagnose

Array = NDArray[np.float64]
N = 160
T = np.arange(N, dtype=np.float64)
GAP = "training/rollout_probs_diff_mean"
AGE = "training/off_policy/trajectory_staleness"
EVICTED = "training/off_policy/evicted_samples"
ALLOCATED, RESERVED = "perf/max_memory_allocated_gb", "perf/max_memory_reserved_gb"
SPELLS = (T >= 50) & ((T - 50) % 20 < 6)
SINGLE = (T >= 50) & ((T - 50) % 12 < 1)
VALIDATES = (T + 1) % 10 == 0


def _noisy(level: float | Array, seed: int, size: float = 0.03) -> Array:
    return np.asarray(level * np.exp(np.random.default_rng(seed).normal(0, size, N)))


def _diagnose(changed: dict[str, Array], *, end: Event | None = None) -> Diagnosis:
    """The verdict on a healthy synchronous run of verl with some series replaced."""
    values = {
        "critic/score/mean": np.clip(0.3 + 0.2 * T / N + np.random.default_rng(1).normal(0, 0.01, N), 0, 1),
        GAP: _noisy(0.006, 2),
        "rollout_corr/k3_kl": _noisy(0.001, 3, 0.08),
        "actor/grad_norm": _noisy(0.2, 4, 0.1),
        "actor/entropy": _noisy(0.4, 5, 0.02),
        "actor/ppo_kl": _noisy(2e-4, 6, 0.1),
        "response_length/mean": _noisy(800.0, 8),
        "response_length/max": _noisy(3000.0, 9, 0.06),
        "response_length/clip_ratio": np.full(N, 0.001),
        "prompt_length/mean": _noisy(200.0, 20, 0.01),
        "perf/total_num_tokens": _noisy(1.0e6, 21),
        "timing_s/gen": _noisy(50.0, 10),
        "timing_s/update_actor": _noisy(40.0, 11),
        "timing_s/old_log_prob": _noisy(10.0, 12),
        "timing_s/adv": _noisy(0.2, 22),
        "timing_s/update_weights": _noisy(4.0, 13),
        "timing_s/step": _noisy(106.0, 14, 0.01),
        "perf/cpu_memory_used_gb": _noisy(200.0, 23, 0.004),
        ALLOCATED: np.maximum.accumulate(_noisy(50.0, 15, 0.001)),
        RESERVED: np.maximum.accumulate(_noisy(58.0, 16, 0.001)),
    }
    values.update(changed)
    rows = [
        Row(step=i + 1, data={k: float(v[i]) for k, v in values.items() if np.isfinite(v[i])})
        for i in range(N)
    ]
    return diagnose(assemble([*rows, *([end] if end else [])], source="log", format="verl-file"))


def _with_age(mean: Array, oldest: Array, newest: Array) -> dict[str, Array]:
    return {f"{AGE}/mean": mean, f"{AGE}/max": np.round(oldest), f"{AGE}/min": np.round(newest)}


FRESH = _with_age(_noisy(0.9, 30), np.full(N, 2.0), np.zeros(N))


def test_the_base_run_is_well() -> None:
    assert _diagnose({}).verdict == "well"
    assert _diagnose(FRESH).verdict == "well"


@pytest.mark.parametrize("stage", ["update_actor", "update_weights"])
def test_a_stage_that_stalls_for_minutes_at_equal_tokens_is_a_collective(stage: str) -> None:
    stalls = _noisy(40.0, 11) + 400.0 * SINGLE
    found = _diagnose(
        {f"timing_s/{stage}": stalls, "timing_s/step": _noisy(106.0, 14, 0.01) + 400.0 * SINGLE}
    )
    assert found.verdict == "collective_hang"
    assert found.findings[0].step == 51


def test_a_stage_that_takes_longer_for_more_tokens_is_none() -> None:
    more = 1.0 + 9.0 * SINGLE
    busy = {
        "timing_s/update_actor": _noisy(40.0, 11) * more,
        "perf/total_num_tokens": _noisy(1e6, 21) * more,
        "response_length/mean": _noisy(800.0, 8) * more,
        "response_length/max": _noisy(3000.0, 9) * more,
        "timing_s/gen": _noisy(50.0, 10) * more,
    }
    assert _diagnose(busy).verdict != "collective_hang"


def test_training_that_slows_with_other_collectives_while_generation_does_not_is_a_link() -> None:
    slower = np.exp(np.clip((T - 90) / 40, 0, 1) * 2.2)
    link = {
        f"timing_s/{s}": _noisy(v, i) * slower
        for i, (s, v) in enumerate({"update_actor": 40.0, "old_log_prob": 10.0}.items())
    }
    assert _diagnose(link).verdict == "collective_hang"


def test_waiting_again_and_again_is_the_buffers_only_where_there_is_one() -> None:
    waits = {"timing_s/gen": _noisy(50.0, 10) + 900.0 * SPELLS}
    assert _diagnose({**FRESH, **waits}).verdict == "buffer_never_fills"
    assert _diagnose(waits).verdict != "buffer_never_fills"


def test_what_takes_longer_at_each_validation_or_save_is_its_work() -> None:
    after = np.concatenate([[False], VALIDATES[:-1]])
    marks = {"timing_s/testing": np.where(VALIDATES, 200.0, np.nan)}
    waits = {"timing_s/gen": _noisy(50.0, 10) + 400.0 * after, "timing_s/adv": _noisy(0.2, 22) + 3.0 * after}
    writes = {"timing_s/update_weights": _noisy(4.0, 13) + 100.0 * after}
    assert _diagnose({**FRESH, **marks, **waits, **writes}).verdict == "well"


def test_more_evicted_than_trained_is_a_bound_too_tight_whatever_the_lengths() -> None:
    grow = np.clip((T - 60) / 30, 0, 1)
    batch = 1e6 / 1000.0
    tight = {
        EVICTED: np.round(1.5 * batch * grow),
        "timing_s/gen": _noisy(50.0, 10) * (1 + 1.2 * grow),
        "response_length/mean": _noisy(800.0, 8) * (1 + 0.4 * grow),
    }
    assert _diagnose({**FRESH, **tight}).verdict == "buffer_never_fills"


@pytest.mark.parametrize("starved", [T >= 70, SPELLS])
def test_a_filter_that_drops_most_of_a_step_starves_it_for_good_or_in_spells(
    starved: NDArray[np.bool_],
) -> None:
    slow = {"timing_s/gen": _noisy(50.0, 10) * np.where(starved, 3.5, 1.0)}
    dropped = {
        "training/filter_groups/evicted_samples": np.round(
            _noisy(900.0, 40, 0.1) * np.where(starved, 7.0, 1.0)
        )
    }
    assert _diagnose({**slow, **dropped}).verdict == "filter_starvation"


def test_a_filter_that_makes_one_batch_more_now_and_then_is_well() -> None:
    second = np.random.default_rng(41).random(N) < 0.3
    dropped = {"training/filter_groups/evicted_samples": np.where(second, 2100.0, 950.0)}
    assert (
        _diagnose({**dropped, "timing_s/gen": _noisy(50.0, 10) * np.where(second, 1.9, 1.0)}).verdict
        == "well"
    )


def _scores(share: Array | float, answers: int, seed: int) -> Array:
    """A held-out score every tenth step: right answers of so many."""
    right = np.random.default_rng(seed).binomial(answers, np.broadcast_to(share, (N,)))
    return np.where(VALIDATES, right / answers, np.nan)


def _sources(second: Array) -> dict[str, Array]:
    first, third = _scores(0.5, 400, 50), _scores(0.7, 400, 51)
    names = {"math": first, "code": second, "logic": third}
    return {f"val-core/{name}/reward/mean@1": scores for name, scores in names.items()}


def test_a_source_without_one_right_answer_of_thousands_is_broken() -> None:
    found = _diagnose(_sources(_scores(0.0, 400, 52)))
    assert found.verdict == "one_source_all_zero"
    assert "code" in found.findings[0].title


def test_a_source_that_is_zero_in_some_scores_of_hundreds_is_broken_and_one_of_thirty_is_hard() -> None:
    down = np.where((T >= 60) & ((T - 60) % 50 < 25), 0.0, 0.45)
    assert _diagnose(_sources(_scores(down, 400, 52))).verdict == "one_source_all_zero"
    assert _diagnose(_sources(_scores(0.03, 30, 53))).verdict == "well"


def test_noise_in_the_step_after_each_validation_is_an_engine_that_woke_wrong() -> None:
    woke = np.concatenate([[False], VALIDATES[:-1]]) & (T >= 40)
    noise = {
        "timing_s/testing": np.where(VALIDATES, 60.0, np.nan),
        GAP: np.where(woke, 0.3, _noisy(0.006, 2)),
        "rollout_corr/k3_kl": np.where(woke, 5.0, _noisy(0.001, 3, 0.08)),
        "critic/score/mean": np.where(woke, 0.05, _noisy(0.4, 1)),
        "response_length/clip_ratio": np.where(woke, 0.8, 0.001),
    }
    found = _diagnose(noise)
    assert found.verdict == "silent_error_after_wake"
    assert "after each validation" in found.findings[0].title


def test_one_replica_of_eight_that_samples_noise_changes_answers_where_numerics_do_not() -> None:
    gone = T >= 80
    gap = {
        GAP: np.where(gone, 0.045, _noisy(0.006, 2)),
        "rollout_corr/k3_kl": np.where(gone, 1.5, _noisy(0.001, 3, 0.08)),
    }
    answers = {
        "response_length/clip_ratio": np.where(gone, 0.1, 0.001),
        "response_length/mean": _noisy(800.0, 8) * np.where(gone, 1.7, 1.0),
        "actor/entropy": _noisy(0.4, 5, 0.02) * np.where(gone, 2.0, 1.0),
    }
    assert _diagnose({**gap, **answers}).verdict == "silent_error_after_wake"
    numerics = {
        GAP: _noisy(0.006, 2) * np.where(gone, 4.0, 1.0),
        "rollout_corr/k3_kl": _noisy(0.001, 3, 0.08) * np.where(gone, 16.0, 1.0),
    }
    assert _diagnose(numerics).verdict == "engine_mismatch"


def test_a_gap_that_grows_and_is_back_in_one_step_is_a_row_of_skipped_publications() -> None:
    since = np.where((T >= 50) & ((T - 50) % 25 < 15), (T - 50) % 25 + 1, 0.0)
    teeth = {
        GAP: np.hypot(_noisy(0.006, 2), 0.002 * since),
        "rollout_corr/k3_kl": _noisy(0.001, 3, 0.08) * (1 + (since / 3) ** 2),
    }
    assert _diagnose(teeth).verdict == "missed_weight_sync"


def test_one_unit_of_the_last_printed_decimal_of_a_gap_is_no_movement() -> None:
    """0.004 and 0.005, printed by a log of three decimals, may be the same number."""
    printed = np.where((T >= 12) & (T < 24), 0.005, 0.004)
    assert _diagnose({GAP: printed, "rollout_corr/k3_kl": np.full(N, np.nan)}).verdict == "well"


def test_evicted_samples_that_age_by_a_version_a_step_are_one_replicas() -> None:
    age = np.where(T >= 70, T - 60 + 1, np.nan)
    stands = {EVICTED: np.where(T >= 70, 60.0, 0.0), f"{EVICTED}_staleness/max": age}
    found = _diagnose({**FRESH, **stands})
    assert found.verdict == "version_drift"
    assert abs(found.findings[0].step - 61) <= 3


def test_oldest_samples_that_fall_behind_alone_are_some_replicas_and_with_all_others_a_queue() -> None:
    behind = np.floor(np.clip(T - 60, 0, None) / 5)
    few = _with_age(_noisy(0.9, 30) + 0.2 * behind, 2 + behind, np.zeros(N))
    every = _with_age(_noisy(0.9, 30) + behind, 2 + 1.2 * behind, 0.7 * behind)
    gap = {GAP: _noisy(0.006, 2) * (1 + 0.06 * behind)}
    assert _diagnose({**few, **gap}).verdict == "version_drift"
    assert _diagnose({**every, **gap}).verdict == "stale_samples"


def _memory(held: Array) -> dict[str, Array]:
    used = _noisy(50.0, 15, 0.001)
    return {ALLOCATED: used, RESERVED: used + np.clip(held, 0, 28.5)}


def test_memory_that_is_held_and_given_back_in_ever_higher_teeth_is_fragmentation() -> None:
    teeth = 6.0 + np.where(T >= 30, (T % 20) / 20 * (10.0 + 14.0 * T / N), 0.0)
    assert _diagnose(_memory(teeth)).verdict == "fragmentation"


def test_memory_that_is_held_from_one_step_on_is_fragmentation_only_if_it_creeps_on() -> None:
    leap = np.where(T >= 70, 15.0, 0.0)
    assert _diagnose(_memory(6.0 + leap)).verdict == "well"
    assert _diagnose(_memory(6.0 + leap + 7.0 * np.clip((T - 70) / 80, 0, 1))).verdict == "fragmentation"


def test_an_error_that_says_how_much_was_left_unused_is_fragmentation_by_its_own_words() -> None:
    def error(left: str) -> Event:
        text = (
            f"CUDA out of memory. Tried to allocate 2.34 GiB. {left} is reserved by PyTorch but unallocated."
        )
        return Event(kind="out_of_memory", step=N, text=text)

    assert _diagnose({}, end=error("24.87 GiB")).verdict == "fragmentation"
    assert _diagnose({}, end=error("512.00 MiB")).verdict == "late_oom_with_length"


def test_a_log_that_ends_at_the_brim_with_its_longest_batch_ran_out_of_memory_by_length() -> None:
    """Spells of long batches, each longer than the last; where they end well below the device, all is well."""
    longer = _noisy(1.0, 9, 0.05) * (1.0 + np.where(T % 40 >= 34, 0.35 + 0.75 * T / N, 0.0))
    longer[-1] = 2.4
    lengths = {"response_length/max": 3000.0 * longer, "response_length/mean": 800.0 * longer}

    def used(at_the_end: float) -> dict[str, Array]:
        peak = 40.0 + (at_the_end - 40.0) * (longer - 1.0) / 1.4
        return {ALLOCATED: peak, RESERVED: peak + 1.0}

    assert _diagnose({**lengths, **used(78.5)}).verdict == "late_oom_with_length"
    assert _diagnose({**lengths, **used(56.0)}).verdict == "well"


def test_a_store_that_spills_now_and_then_shows_in_what_moves_data_and_in_host_memory() -> None:
    spills = {
        "timing_s/adv": _noisy(0.2, 22) + 5.0 * SPELLS,
        "timing_s/step": _noisy(106.0, 14, 0.01) + 120.0 * SPELLS,
        "perf/cpu_memory_used_gb": _noisy(200.0, 23, 0.004) + 140.0 * SPELLS,
    }
    assert _diagnose(spills).verdict == "object_store_spill"


def _agent(calls: Array, turns: Array, reward: Array) -> dict[str, Array]:
    return {"env/turn_s/mean": calls, "num_turns/mean": turns, "critic/score/mean": reward}


def test_calls_that_take_ever_longer_are_leaked_sandboxes_once_turns_and_rewards_go() -> None:
    x = np.clip((T - 30) / 110, 0, 1)
    calls = _noisy(5.5, 60) / (1 - 0.85 * x)
    lost = np.clip(x - 0.4, 0, 1)
    worse = _agent(calls, _noisy(6.5, 61, 0.01) * (1 - 0.3 * lost), _noisy(0.5, 62, 0.02) * (1 - lost))
    fine = _agent(calls, _noisy(6.5, 61, 0.01), _noisy(0.4, 62, 0.02) * (1 + 0.4 * T / N))
    assert _diagnose(worse).verdict == "sandbox_leak"
    assert _diagnose(fine).verdict == "well"


def test_trajectories_that_go_round_to_the_limit_of_turns_are_a_tail() -> None:
    stuck = T >= 80
    turns = {"num_turns/mean": _noisy(6.5, 61, 0.01), "num_turns/max": np.where(stuck, 100.0, 15.0)}
    longer = {
        "response_length/max": np.where(stuck, 6000.0, _noisy(3000.0, 9, 0.06)),
        "timing_s/gen": _noisy(50.0, 10) * np.where(stuck, 2.2, 1.0),
    }
    assert _diagnose({**turns, **longer}).verdict == "tail_burst"


@pytest.mark.parametrize("first", [0, 14])
def test_runaway_responses_at_a_rate_that_never_changed_are_no_burst(first: int) -> None:
    """A quarter of the steps has one; that the first fourteen have none is luck."""
    has = (np.random.default_rng(70).random(N) < 0.26) & (first <= T)
    runaway = {
        "response_length/max": np.where(has, 8192.0, _noisy(3000.0, 9, 0.06)),
        "timing_s/gen": _noisy(50.0, 10) * np.where(has, 1.6, 1.0),
    }
    assert _diagnose(runaway).verdict == "well"


def test_a_burst_that_costs_next_to_nothing_is_a_note() -> None:
    has = (T >= 80) & (T < 100) & (T % 4 < 1)
    burst = {
        "response_length/max": np.where(has, 8192.0, _noisy(3000.0, 9, 0.03)),
        "timing_s/gen": _noisy(50.0, 10, 0.01) * np.where(has, 1.35, 1.0),
    }
    cheap = _diagnose({**burst, "timing_s/step": _noisy(1000.0, 14, 0.01)})
    assert cheap.verdict == "well"
    assert any("hold up the steps" in note and "too little" in note for note in cheap.notes)
    assert _diagnose(burst).verdict == "tail_burst"


def test_other_prompts_lower_rewards_at_once_and_are_no_older_weights() -> None:
    late = T >= 90
    easier = {
        "critic/score/mean": _noisy(0.3 + 0.25 * T / N, 1, 0.01) * np.where(late, 0.75, 1.0),
        "actor/entropy": _noisy(0.5 - 0.25 * T / N, 5, 0.01) * np.where(late, 1.2, 1.0),
    }
    harder = {**easier, "prompt_length/mean": _noisy(200.0, 20, 0.01) * np.where(late, 1.5, 1.0)}
    assert _diagnose(easier).verdict == "discontinuity_after_resume"
    assert _diagnose(harder).verdict == "well"


def test_epochs_and_a_learning_rate_that_begin_anew_are_a_restart_without_its_state() -> None:
    cosine = 1e-6 * (0.55 + 0.45 * np.cos(np.pi * T / 170))
    anew = np.where(T >= 100, 1e-6 * np.clip((T - 99) / 8, 0, 1), cosine)
    restarted = {
        "actor/lr": anew,
        "training/epoch": np.where(T >= 100, np.floor((T - 100) / 50), np.floor(T / 50)),
    }
    found = _diagnose(restarted)
    assert found.verdict == "discontinuity_after_resume"
    assert found.findings[0].step == 101
