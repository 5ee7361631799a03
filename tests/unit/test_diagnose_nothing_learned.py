"""Runs that teach nothing or the wrong thing while every part of the system works."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import Array, noisy, run_of
from rollbook.diagnose.finding import Diagnosis, State
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N, dtype=np.float64)
ZERO = np.zeros(N)
STANDS = 0.35 + np.random.default_rng(1).normal(0, 0.02, N)
ENDS = {"critic/score/max": np.ones(N), "critic/score/min": ZERO}


def _rules(run: dict[str, Array], *, decimals: int | None = None) -> list[str]:
    return [f.rule for f in diagnose(run_of(run, decimals=decimals)).findings]


def _state(diagnosis: Diagnosis, name: str) -> State | None:
    return next((state for state in diagnosis.states if state.name == name), None)


@pytest.mark.parametrize(
    ("advantage", "why"),
    [
        (0.0, "every advantage is zero"),
        (1.7, "advantages are there, and no parameter has a gradient"),
        (np.nan, "rewards differ, and no parameter has a gradient"),
    ],
)
def test_a_gradient_of_exactly_zero_at_different_rewards_is_told_by_its_advantages(
    advantage: float, why: str
) -> None:
    run = ENDS | {"critic/score/mean": STANDS, "actor/grad_norm": ZERO}
    run |= {f"critic/advantages/{end}": np.full(N, advantage) for end in ("max", "min")}
    found = diagnose(run_of(run)).findings
    assert [(f.rule, f.step) for f in found] == [("no_update", 1)]
    assert found[0].title == f"nothing is learned: {why}"


def test_groups_that_are_all_alike_are_a_state_and_no_fault_of_the_loss() -> None:
    alike = ENDS | {"critic/score/mean": STANDS, "actor/grad_norm": ZERO}
    diagnosis = diagnose(run_of(alike | {"batch/effective_frac": np.full(N, 0.05)}))
    assert not diagnosis.findings
    assert _state(diagnosis, "no_signal") is not None


def test_groups_without_a_difference_are_a_state_though_a_kl_term_has_a_gradient() -> None:
    rare = np.where(T % 3 == 0, 0.05, 0.0)
    diagnosis = diagnose(run_of(ENDS | {"critic/score/mean": rare, "batch/effective_frac": 4 * rare}))
    state = _state(diagnosis, "no_signal")
    assert not diagnosis.findings and state is not None
    assert "in 0.667 of the steps no group has two different rewards" in state.evidence[0].says


def test_a_reward_that_is_the_same_by_its_own_spread_is_all_wrong_though_a_kl_term_has_a_gradient() -> None:
    """No best and worst answer is logged, as in TRL."""
    dead = {"critic/score/mean": ZERO, "reward_std": ZERO}
    assert _rules(dead) == ["all_wrong"]
    assert _rules(dead | {"reward_std": noisy(0.3, 9)}) == [], "a mean may be centred"


def test_weights_of_sequences_far_below_one_are_a_mismatch_by_the_token_and_scatter_over_long_ones() -> None:
    weights = {"rollout_corr/rollout_is_mean": noisy(0.15, 21, 0.3)}
    lengths = {"response_length/max": noisy(400.0, 9), "response_length/mean": noisy(300.0, 8)}
    assert _rules(weights | lengths) == ["engine_mismatch"]
    assert _rules(weights | {"response_length/mean": noisy(16_000.0, 8)}) == []
    assert _rules({"rollout_corr/rollout_is_mean": noisy(0.8, 21, 0.3)} | lengths) == []


def test_a_solved_task_has_no_gradient_and_is_no_fault() -> None:
    solved = np.minimum(0.3 + T / 60, 0.995)
    run = ENDS | {"critic/score/mean": solved, "actor/grad_norm": np.where(solved > 0.99, 0.0, noisy(0.2, 4))}
    assert _rules(run) == []


@pytest.mark.parametrize(("until", "rules"), [(0, ["no_update"]), (60, ["no_update"]), (114, []), (N, [])])
def test_a_rate_that_is_zero_for_a_good_part_of_the_run_teaches_nothing(until: int, rules: list[str]) -> None:
    """A schedule may end at zero, and does so in its last steps."""
    assert _rules({"actor/lr": np.where(until > T, 1e-6 * (1 - T / N), 0.0)}) == rules


def test_a_rate_printed_with_three_decimals_is_not_zero() -> None:
    assert _rules({"actor/lr": np.full(N, 1e-6)}, decimals=3) == []


@pytest.mark.parametrize("where", [T == 70, np.isin(T, (50, 77, 101)), T >= 0])
def test_a_gradient_of_billions_is_named_in_one_step_and_in_all(where: Array) -> None:
    found = diagnose(run_of({"actor/grad_norm": np.where(where, 3e9, noisy(0.2, 4, 0.1))})).findings
    assert [(f.rule, f.step) for f in found] == [("absurd_gradient", int(np.flatnonzero(where)[0]) + 1)]


def test_a_batch_whose_gradient_is_a_hundred_times_the_usual_is_nothing_absurd() -> None:
    assert _rules({"actor/grad_norm": np.where(T == 70, 30.0, noisy(0.2, 4, 0.1))}) == []


LEARNS = 0.3 + 0.5 * T / N + np.random.default_rng(1).normal(0, 0.01, N)
EVERY_TEN = np.where(T % 10 == 9, 1.0, np.nan)


def test_a_reward_that_rises_while_the_held_out_score_falls_is_gamed() -> None:
    held_out = EVERY_TEN * (0.5 + np.where(T < 50, T / 500, 0.1 - (T - 50) / 300))
    run = {"critic/score/mean": LEARNS, "val-core/math/reward/mean@1": held_out}
    diagnosis = diagnose(run_of(run | {"response_length/mean": noisy(800 * (1 + T / N), 8)}))
    state = _state(diagnosis, "overoptimised")
    assert not diagnosis.findings and state is not None
    assert 40 <= state.step <= 62
    assert "it may be length that is paid" in state.evidence[-1].says


def test_a_term_that_falls_under_a_sum_that_rises_is_gamed_and_a_source_that_falls_is_not() -> None:
    right, pleases = 0.5 - 0.3 * T / N, 0.3 + 1.0 * T / N
    terms = {"reward/accuracy/mean": right, "reward/style/mean": pleases}
    assert _state(diagnose(run_of(terms | {"critic/score/mean": right + pleases})), "overoptimised")
    sources = diagnose(run_of(terms | {"critic/score/mean": (right + pleases) / 2}))
    assert not _state(sources, "overoptimised")


@pytest.mark.parametrize("held_out", [0.5 + 0.1 * T / N, np.full(N, 0.5)])
def test_a_held_out_score_that_wavers_or_rises_is_not_gamed(held_out: Array) -> None:
    wavers = EVERY_TEN * (held_out + np.random.default_rng(7).normal(0, 0.015, N))
    run = {"critic/score/mean": LEARNS, "val-core/math/reward/mean@1": wavers}
    assert not _state(diagnose(run_of(run)), "overoptimised")
