"""Faults that come and go, each on the smallest run that shows it, beside the healthy run that looks most like it."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.readers.names import VERL
from rollbook.diagnose.readers.renamer import Renamer
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


def _diagnose(
    changed: dict[str, Array], *, without: str = "", end: Event | None = None, lives: int = 1
) -> Diagnosis:
    """The verdict on a healthy synchronous run of verl with some series replaced, one left out, or with its last six
    steps run again in other lives."""
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
    values.pop(without, None)
    rows = [
        Row(step=i + 1, data={k: float(v[i]) for k, v in values.items() if not np.isnan(v[i])})
        for i in range(N)
    ]
    for life in range(1, lives):
        rows += [
            Row(step=row.step, data={k: v * (1 + 1e-4 * life) for k, v in row.data.items()})
            for row in rows[N - 6 : N]
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


@pytest.mark.parametrize(
    ("at", "lasting_s", "usual_s", "verdict"),
    [
        ((95, 145, 148), (270, 310, 350), 7.0, "collective_hang"),  # a fifteenth of the step, each time
        ((95, 145, 148), (190, 200, 205), 30.0, "collective_hang"),  # a good quarter
        ((95, 145), (270, 310), 7.0, "well"),
        ((95, 145, 148), (60, 80, 100), 7.0, "well"),  # moments of a busy cluster
        (
            (95, 145, 148),
            (400, 550, 700),
            50.0,
            "well",
        ),  # half of the step: there a host stands still by chance
    ],
)
def test_few_stalls_of_minutes_that_keep_to_one_stage_are_a_collective(
    at: tuple[int, ...], lasting_s: tuple[float, ...], usual_s: float, verdict: str
) -> None:
    over = np.zeros(N)
    over[list(at)] = lasting_s
    seconds = {
        "timing_s/update_actor": _noisy(usual_s, 11) + over,
        "timing_s/step": _noisy(106.0, 14, 0.01) + over,
    }
    found = _diagnose(seconds)
    assert found.verdict == verdict
    assert [f.step for f in found.findings] == ([at[0] + 1] if found.findings else [])


def test_stalls_are_dated_by_the_first_and_not_by_the_longest() -> None:
    over = 600.0 * np.isin(T, (40, 90)) + 900.0 * (T == 120)
    found = _diagnose(
        {"timing_s/adv": _noisy(0.2, 22) + over, "timing_s/step": _noisy(106.0, 14, 0.01) + over}
    )
    assert [(f.rule, f.step) for f in found.findings] == [("collective_hang", 41)]


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


def test_what_takes_longer_at_multiples_of_one_number_of_steps_is_work_that_is_not_logged() -> None:
    sometimes = np.random.default_rng(8).uniform(0, 1, N) < 0.7
    for first, expected in ((9, "well"), (47, "collective_hang")):
        hit = ((first + 1) % 10 == (T + 1) % 10) & (first <= T) & sometimes
        hit |= T == 71  # the host, for once
        seconds = {"timing_s/update_actor": _noisy(40.0, 11) + 90.0 * hit}
        assert _diagnose(seconds).verdict == expected


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


def test_oldest_samples_that_fall_behind_at_once_are_some_replicas_if_the_mean_rises_by_their_share() -> None:
    lag = np.where(T >= 60, 9.0, 0.0)
    few = _with_age(_noisy(0.9, 30) + 0.12 * lag, 2 + lag, np.zeros(N))
    every = _with_age(_noisy(0.9, 30) + 0.9 * lag, 2 + lag, 0.8 * lag)
    found = _diagnose(few)
    assert (found.verdict, found.findings[0].step) == ("version_drift", 61)
    assert _diagnose(every).verdict != "version_drift"


@pytest.mark.parametrize("bound", [5.0, 60.0])
def test_trajectories_that_run_on_over_ever_more_versions_are_found_by_their_first_tokens(
    bound: float,
) -> None:
    age = np.minimum(np.clip(T - 60, 0, None), bound)
    worst = {
        f"{AGE}_worst/max": 3.0 + age,
        f"{AGE}_worst/min": np.zeros(N),
        f"{AGE}_worst/mean": 1 + 0.08 * age,
    }
    spans = {"training/off_policy/trajectory_spans/max": 2 + (T % 3 == 0) + age}
    evicted = {EVICTED: np.where(T >= 65, 60.0 + T % 7, 0.0) * (bound < 10)}
    found = _diagnose({**FRESH, **worst, **spans, **evicted})
    assert found.verdict == "version_drift"
    assert "do not end" in found.findings[0].title
    assert abs(found.findings[0].step - 61) <= 4
    longer = {
        f"response_length/{end}": _noisy(800.0 * k * (1 + age), 8) for end, k in (("mean", 1), ("max", 4))
    }
    assert _diagnose({**FRESH, **worst, **spans, **longer}).verdict != "version_drift"


def test_a_filter_whose_drops_grow_from_little_is_judged_by_what_is_made_in_the_end() -> None:
    dropped = np.round(_noisy(20.0, 60) * np.exp(2.4 * np.clip((T - 40) / 80, 0, 1)))
    made = 160.0 + 5 * dropped
    flat = {"evicted/flat/num_groups": dropped, "batch/num_groups": np.full(N, 32.0)}
    slow = {"timing_s/gen": _noisy(50.0, 10) * made / made[0], "generated/num_trajectories": made}
    assert _diagnose({**flat, **slow}).verdict == "filter_starvation"
    same = {"generated/num_trajectories": np.full(N, 300.0)}
    assert _diagnose({**flat, **same}).verdict == "well"


@pytest.mark.parametrize("steps", [1, 6, 60])
def test_a_pool_that_is_gone_within_a_few_steps_died_though_nothing_broke_at_one(steps: int) -> None:
    gone = np.clip((T - 60) / steps, 0, 1)
    dies = {
        "rollout/sandbox_error_ratio": 0.003 + 0.96 * gone + np.random.default_rng(3).normal(0, 1e-3, N),
        "critic/score/mean": _noisy(0.45, 1) * (1 - 0.4 * gone),
        "response_length/mean": _noisy(800.0, 8) * (1 - 0.5 * gone),
        "timing_s/gen": _noisy(50.0, 10) * (1 - 0.3 * gone),
    }
    found = _diagnose(dies)
    if steps <= 6:
        assert (found.verdict, abs(found.findings[0].step - 61) <= 3) == ("dead_sandbox_pool", True)
    else:
        assert found.verdict != "dead_sandbox_pool"


def test_memory_that_is_full_early_in_the_run_is_fragmented_if_the_update_waits() -> None:
    held = {RESERVED: np.minimum(52 + 0.6 * np.clip(T - 15, 0, None), 78.6)}
    slow = {"timing_s/update_actor": _noisy(40.0, 11) * (1 + np.clip((T - 70) / 60, 0, 1))}
    assert _diagnose({**held, **slow}).verdict == "fragmentation"
    assert _diagnose(held).verdict == "well"


def test_a_peak_that_leaps_with_the_longest_response_of_all_is_no_hand_overs() -> None:
    grows = {"response_length/mean": _noisy(800.0, 8) * (1 + 1.6 * np.clip((T - 40) / 100, 0, 1))}
    leap = {
        ALLOCATED: np.where(T >= 120, 77.2, 50 + 0.02 * T),
        RESERVED: np.where(T >= 120, 78.4, 52 + 0.02 * T),
    }
    longest = {"response_length/max": _noisy(3000.0, 9, 0.06) * np.where(T == 120, 2.5, 1.0)}
    assert _diagnose({**grows, **leap, **longest}).verdict != "oom_in_sync"
    assert _diagnose(leap).verdict == "oom_in_sync"


def test_failures_that_come_one_by_one_while_calls_wait_ever_longer_are_leaked_sandboxes() -> None:
    leaks = np.clip((T - 130) / 30, 0, None)
    agent = {
        "num_turns/mean": _noisy(9.0, 61, 0.02) * (1 - 0.22 * leaks),
        "env/turn_s/mean": _noisy(12.0, 62, 0.1) * (1 + 1.0 * (leaks > 0) + 2.2 * leaks),
        "perf/cpu_memory_used_gb": _noisy(92.0, 63, 0.01) * (1 + 0.8 * leaks),
        "training/rollout_failure/evicted_samples": np.ceil(30 * leaks),
        "timing_s/gen": _noisy(60.0, 64, 0.06) * (1 + 0.9 * (leaks > 0) + 1.4 * leaks),
    }
    assert _diagnose(agent).verdict == "sandbox_leak"


def test_a_first_short_spell_of_noise_is_no_restart() -> None:
    spell = (T >= 50) & ((T - 50) % 25 < 3)
    noise = {
        GAP: _noisy(0.006, 2) * np.where(spell, 40.0, 1.0),
        "rollout_corr/k3_kl": _noisy(0.001, 3, 0.08) * np.where(spell, 900.0, 1.0),
        "actor/grad_norm": _noisy(0.2, 4, 0.1) * np.where(spell, 9.0, 1.0),
        "actor/entropy": _noisy(0.4, 5, 0.02) * np.where(spell, 4.0, 1.0),
        "response_length/mean": _noisy(800.0, 8) * np.where(spell, 4.0, 1.0),
    }
    assert "discontinuity_after_resume" not in [f.rule for f in _diagnose(noise).findings]


def test_the_last_three_scores_of_a_noisy_source_do_not_say_that_it_fell() -> None:
    noisy = np.clip(0.32 + np.random.default_rng(5).normal(0, 0.08, N), 0, 1)
    noisy[-3:-1] = 0.14
    shape = np.where(T >= 60, 0.0, np.minimum(0.05 + 0.012 * T, 0.65))
    assert (
        _diagnose({"reward/accuracy/mean": noisy, "reward/format/mean": shape}).verdict
        == "one_source_all_zero"
    )


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


def test_stages_of_a_millisecond_that_take_ten_on_a_busy_host_spill_nothing() -> None:
    """In a step of 0.2 s they are worth a word, as the same at a thousand times the size is a store that spills."""

    def verdict(scale: float) -> str:
        seconds = {"gen": 0.1, "update_actor": 0.08, "old_log_prob": 0.02, "update_weights": 8e-3}
        busy = {f"timing_s/{name}": scale * _noisy(s, i) for i, (name, s) in enumerate(seconds.items())}
        for name, often in (("adv", 6e-4), ("reward", 1.2e-3)):
            busy[f"timing_s/{name}"] = scale * (_noisy(often, 22) + 10 * often * SPELLS)
        return _diagnose(busy | {"timing_s/step": np.sum(list(busy.values()), axis=0)}).verdict

    assert verdict(1.0) == "well"
    assert verdict(1000.0) == "object_store_spill"


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


@pytest.mark.parametrize("every", [2, 6])
def test_the_longest_of_a_heavy_tail_come_in_clusters_by_chance(every: int) -> None:
    longs = np.isin(T, [12, 40, 71, 99]) | ((T >= 125) & (T < 150) & (T % every == 0))
    tail = {"response_length/max": _noisy(3000.0, 9, 0.06) * np.where(longs, 2.2, 1.0)}
    found = _diagnose({**tail, "timing_s/gen": _noisy(50.0, 10) * np.where(longs, 1.9, 1.0)})
    assert ("tail_burst" in [f.rule for f in found.findings]) == (every == 2)


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


def test_a_queue_between_engine_and_trainer_makes_a_run_asynchronous() -> None:
    waits = {"timing_s/gen": _noisy(5.0, 10) * np.where(T >= 80, 30.0, 1.0)}
    queue = {"fully_async/monitor/queue/mq_queue_size": np.where(T >= 80, 1.0, 500.0)}
    assert _diagnose({**queue, **waits}).verdict == "buffer_never_fills"
    assert _diagnose(waits).verdict != "buffer_never_fills"
    assert _diagnose(queue).verdict == "well"


def test_verls_names_of_a_fully_asynchronous_run_tell_the_age_of_samples() -> None:
    row = Row(step=1, data={"fully_async/trajectory_staleness/mean": 2.0})
    (read,) = Renamer((VERL,)).rows([row])
    assert isinstance(read, Row) and read.data == {f"{AGE}/mean": 2.0}


def test_verls_count_of_dropped_samples_is_read_by_the_step_and_again_after_a_restart() -> None:
    counts = (5.0, 5.0, 12.0, 3.0, 4.0)
    rows = [Row(step=i, data={"fully_async/count/dropped_stale_samples": c}) for i, c in enumerate(counts)]
    read = [row.data.get(EVICTED) for row in Renamer((VERL,)).rows(rows) if isinstance(row, Row)]
    assert read == [None, 0.0, 7.0, None, 1.0]


@pytest.mark.parametrize(("is_timeout", "verdict"), [(True, "collective_hang"), (False, "well")])
def test_rare_stalls_that_all_last_as_long_are_a_time_out_and_no_hiccups(
    is_timeout: bool, verdict: str
) -> None:
    rng = np.random.default_rng(7)
    seconds = {"timing_s/gen": 50.0, "timing_s/update_actor": 40.0, "timing_s/old_log_prob": 10.0}
    stalls = dict.fromkeys((60, 140, 290, 430, 520, 610, 705), 300.0)
    rows = []
    for step in range(1, 801):
        data = {name: float(s * np.exp(rng.normal(0, 0.03))) for name, s in seconds.items()}
        stall = stalls.get(step, 0.0) * (1.0 if is_timeout else float(rng.uniform(0.2, 0.38)))
        data["timing_s/old_log_prob"] += stall
        data["timing_s/step"] = sum(data.values())
        data["critic/score/mean"] = 0.3 + 2e-4 * step + float(rng.normal(0, 0.01))
        data[GAP] = 0.006 * float(np.exp(rng.normal(0, 0.03)))
        data["response_length/mean"] = 800.0 * float(np.exp(rng.normal(0, 0.03)))
        rows.append(Row(step=step, data=data))
    assert diagnose(assemble(rows, source="log", format="verl-file")).verdict == verdict


def test_memory_that_follows_lengths_is_full_when_the_allocator_has_taken_all() -> None:
    grow = np.clip(T / N, 0, 1)
    longer = {
        "response_length/mean": _noisy(800.0, 8) * (1 + grow),
        "response_length/max": _noisy(3000.0, 9, 0.06) * (1 + grow),
        ALLOCATED: np.maximum.accumulate(50.0 + 20.0 * grow),
    }
    assert _diagnose({**longer, RESERVED: 56.0 + 23.0 * grow}).verdict == "late_oom_with_length"
    assert _diagnose({**longer, RESERVED: 54.0 + 20.0 * grow}).verdict == "well"


def test_two_lives_that_end_in_a_leap_of_memory_at_equal_lengths_died_in_the_hand_over() -> None:
    leap = {ALLOCATED: np.where(T < N - 1, 45.0, 78.4), RESERVED: np.where(T < N - 1, 52.0, 79.0)}
    assert _diagnose(leap, lives=3).verdict == "oom_in_sync"
    longer = {"response_length/max": _noisy(3000.0, 9, 0.06) * np.where(T < N - 1, 1.0, 2.5)}
    assert _diagnose({**leap, **longer}, lives=3).verdict != "oom_in_sync"
    assert _diagnose({}, lives=3).verdict == "well"


def test_a_gap_that_grows_from_a_fine_first_step_was_never_published() -> None:
    grows = 0.003 + 0.005 * T
    away = {GAP: grows, "rollout_corr/k3_kl": 0.001 * (grows / 0.006) ** 2}
    assert _diagnose(away).verdict == "missed_weight_sync"
    apart = {GAP: _noisy(0.06, 2), "rollout_corr/k3_kl": _noisy(0.1, 3, 0.08)}
    assert _diagnose(apart).verdict == "engine_mismatch"


def test_runaway_answers_in_stretches_hold_up_a_wait_that_swings() -> None:
    tail = {
        "response_length/clip_ratio": np.where(SPELLS, _noisy(0.008, 50, 0.1), 0.0),
        "response_length/max": np.where(SPELLS, 4096.0, _noisy(2800.0, 9, 0.1)),
    }
    swings = _noisy(50.0, 10, 0.35)
    assert _diagnose({**tail, "timing_s/gen": swings * np.where(SPELLS, 2.2, 1.0)}).verdict == "tail_burst"
    assert _diagnose({**tail, "timing_s/gen": swings}).verdict == "well"


def test_an_answer_that_runs_to_the_limit_now_and_then_among_few_is_chance() -> None:
    hit = (T >= 20) & (T % 9 == 0)
    few = {
        "response_length/clip_ratio": np.where(hit, 1 / 64, 0.0),
        "response_length/max": np.where(hit, 4096.0, _noisy(2800.0, 9, 0.1)),
        "timing_s/gen": _noisy(50.0, 10, 0.1) * np.where(hit, 1.4, 1.0),
    }
    assert _diagnose(few).verdict == "well"


def test_a_load_that_grows_in_teeth_is_a_leak_only_if_calls_wait_for_it() -> None:
    tooth = np.where(T >= 30, (T - 30) % 20, 0.0)
    agent = {"num_turns/mean": _noisy(8.0, 60), "env/turn_s/mean": _noisy(2.0, 61)}
    held = {"perf/cpu_memory_used_gb": _noisy(200.0, 23, 0.004) + 30.0 * tooth}
    waits = {"env/turn_s/mean": _noisy(2.0, 61) * (1 + 0.1 * tooth)}
    assert _diagnose({**agent, **held, **waits}).verdict == "sandbox_leak"
    assert _diagnose({**agent, **held}).verdict == "well"
    assert _diagnose({**agent, **waits}).verdict == "well"


def test_sandboxes_that_die_one_by_one_end_the_longest_calls_at_a_time_out() -> None:
    dies = np.clip((T - 70) / 50, 0, 1)
    agent = {"num_turns/mean": _noisy(8.0, 60), "env/turn_s/mean": _noisy(10.0, 61) * (1 + 6 * dies)}
    reward = {"critic/score/mean": 0.3 + 0.2 * np.clip(T / 70, 0, 1) - 0.2 * dies + 0.01 * np.sin(37 * T)}
    timeout = {"env/turn_s/max": np.where(T >= 70, _noisy(180.5, 62, 0.001), _noisy(80.0, 62, 0.1))}
    assert _diagnose({**agent, **reward, **timeout}).verdict == "dead_sandbox_pool"
    own = {"env/turn_s/max": _noisy(80.0, 62, 0.1) * (1 + 6 * dies)}
    assert _diagnose({**agent, **reward, **own}).verdict != "dead_sandbox_pool"
    few = {"num_turns/mean": _noisy(8.0, 60), "env/turn_s/mean": _noisy(10.0, 61)}
    assert _diagnose({**few, "env/turn_s/max": _noisy(180.5, 62, 0.001)}).verdict == "well"


def test_an_allocator_at_the_brim_is_fragmented_if_the_update_waits_for_it() -> None:
    held = {
        ALLOCATED: np.full(N, 70.8),
        RESERVED: np.maximum.accumulate(76.8 + 2.0 * np.clip((T - 60) / 30, 0, 1)),
    }
    slower = {"timing_s/update_actor": _noisy(40.0, 11) * np.where(T >= 82, 1.3, 1.0)}
    assert _diagnose({**held, **slower}).verdict == "fragmentation"
    assert _diagnose(held).verdict == "well"
    assert _diagnose(slower).verdict == "well"


def test_a_gap_that_comes_and_goes_at_once_is_other_numerics_wherever_its_plateau_is_highest() -> None:
    rough = {GAP: np.where(SPELLS, _noisy(0.05, 2, 0.08), _noisy(0.006, 2, 0.08))}
    kl = {"rollout_corr/k3_kl": np.where(SPELLS, 0.06, _noisy(0.001, 3, 0.08))}
    assert _diagnose({**rough, **kl}).verdict == "engine_mismatch"


@pytest.mark.parametrize(("gap_first", "verdict"), [(True, "mismatch_to_nan"), (False, "well")])
def test_where_the_engines_logprobs_are_the_old_ones_gradients_tell_who_went_first(
    gap_first: bool, verdict: str
) -> None:
    first, second = np.clip((T - 50) / 90, 0, 1), np.clip((T - 95) / 45, 0, 1)
    gap, own = (first, second) if gap_first else (second, first)
    broken = np.where(T >= 145, np.inf, 0.0)
    away = {
        GAP: _noisy(0.009, 2) * (1 + 15 * gap),
        "rollout_corr/k3_kl": _noisy(0.001, 3, 0.08) * (1 + 15 * gap) ** 2,
        "actor/ppo_kl": _noisy(2e-4, 6, 0.1) * (1 + 15 * gap) ** 2 + broken,
        "actor/grad_norm": _noisy(0.2, 4, 0.1) * (1 + 25 * own**2 * own) + broken,
        "actor/entropy": _noisy(0.4, 5, 0.02) + (0.0 if gap_first else 1.0) * own + broken,
    }
    age = _with_age(_noisy(1.8, 30) * np.where(T >= 147, 2.2, 1.0), np.full(N, 5.0), np.zeros(N))
    assert _diagnose({**away, **age}, without="timing_s/old_log_prob").verdict == verdict


def test_memory_far_from_the_brim_explains_no_stall() -> None:
    """The steps that stall hold a longer response, 3.5 % more memory for it, and half of the card stays free."""
    stalls = 300.0 * np.isin(T, (66, 69, 79, 85, 89))
    slow = {
        "timing_s/update_actor": _noisy(6.3, 11) + stalls,
        "timing_s/step": _noisy(40.0, 14, 0.01) + stalls,
    }
    held = {ALLOCATED: _noisy(41.0, 15, 0.002) * np.where(stalls > 0, 1.035, 1.0), RESERVED: np.full(N, 44.0)}
    assert _diagnose(slow | held | {RESERVED: np.full(N, 60.0)}).verdict == "collective_hang"
    full = {ALLOCATED: 1.9 * held[ALLOCATED], RESERVED: np.full(N, 80.0)}
    assert _diagnose(slow | full).verdict != "collective_hang"


def test_three_slow_steps_as_far_apart_as_each_other_are_a_schedule() -> None:
    """Whole steps are all that is timed; two of three are a quarter of an hour. A step off, and they are stalls."""
    keep = (
        "timing_s/gen",
        "timing_s/update_actor",
        "timing_s/old_log_prob",
        "timing_s/adv",
        "timing_s/update_weights",
    )
    for third, verdict in ((130, "well"), (137, "collective_hang")):
        seconds = _noisy(44.0, 14) + 650.0 * np.isin(T, (50, 90, third))
        changed = {name: np.full(N, np.nan) for name in keep} | {"timing_s/step": seconds}
        assert _diagnose(changed).verdict == verdict


def test_a_last_step_that_waits_for_the_longest_response_of_all_is_no_hang() -> None:
    """The last step but one takes a quarter of an hour longer, with a response twice as long, or without."""
    late = np.where(T == N - 2, 1.0, 0.0)
    slow = {
        "timing_s/gen": _noisy(50.0, 10) + 900.0 * late,
        "timing_s/step": _noisy(106.0, 14, 0.01) + 900.0 * late,
    }
    longest = {"response_length/max": _noisy(3000.0, 9, 0.06) * (1 + 1.5 * late)}
    assert _diagnose(slow).verdict == "collective_hang"
    assert _diagnose(slow | longest).verdict != "collective_hang"


def test_what_stopped_the_run_goes_before_what_it_lived_with() -> None:
    """A few steps had runaway responses, for a while; much later memory ran out in the hand-over."""
    burst = (T >= 50) & (T < 66) & (T % 4 == 0)
    lived = {
        "response_length/max": _noisy(3000.0, 9, 0.06) * np.where(burst, 6.0, 1.0),
        "timing_s/gen": _noisy(50.0, 10) * np.where(burst, 4.0, 1.0),
        "timing_s/step": _noisy(106.0, 14, 0.01) + np.where(burst, 150.0, 0.0),
    }
    died = Event(
        kind="out_of_memory",
        step=N - 1,
        text="CUDA out of memory. Tried to allocate 4 GiB",
        fields={"stage": "sync"},
    )
    assert _diagnose(lived).verdict == "tail_burst"
    diagnosis = _diagnose(lived, end=died)
    assert [f.rule for f in diagnosis.findings] == ["oom_in_sync", "tail_burst"]
