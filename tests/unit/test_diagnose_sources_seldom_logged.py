"""A source whose scorer broke, told by the few validations of a log; and what is zero by right."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import Array, run_of
from rollbook.diagnose.tree import diagnose

N, SINCE = 120, 60
T = np.arange(N)
RNG = np.random.default_rng(4)


def _validations(**at: dict[int, float]) -> dict[str, Array]:
    """Scores of sources, by the positions of the few validations."""
    scores = {}
    for source, values in at.items():
        series = np.full(N, np.nan)
        series[list(values)] = list(values.values())
        scores[f"val-core/{source}/acc/mean@1"] = series
    return scores


def _reward(lost: float) -> dict[str, Array]:
    return {"critic/score/mean": 0.55 - lost * (T >= SINCE) + RNG.normal(0, 0.015, N)}


OTHERS = {"math": {80: 0.6}, "hotpotqa": {80: 0.5}}


@pytest.mark.parametrize(
    "code", [{80: 0.0}, {40: 0.3, 80: 0.0, 110: 0.0}], ids=["one validation", "one before and two since"]
)
def test_one_validation_names_the_source_where_the_rewards_fall_at_once(code: dict[int, float]) -> None:
    found = diagnose(run_of(_reward(0.22) | _validations(code=code, **OTHERS))).findings
    assert [(f.rule, f.step) for f in found] == [("one_source_all_zero", SINCE + 1)]
    assert "'code'" in found[0].title


@pytest.mark.parametrize(
    ("lost", "scores"),
    [
        (0.0, {"code": {80: 0.0}, **OTHERS}),
        (0.22, {"code": {40: 0.0, 80: 0.0}, **OTHERS}),
        (0.22, {"aime_24": {80: 0.0}, **OTHERS}),
        (0.22, {"code": {80: 0.1}, **OTHERS}),
        (0.22, {"code": {80: 0.0}, "math": {80: 0.0}, "hotpotqa": {80: 0.5}}),
    ],
    ids=["the rewards stand", "none before either", "too hard", "some", "two sources"],
)
def test_a_zero_in_a_validation_alone_names_no_source(
    lost: float, scores: dict[str, dict[int, float]]
) -> None:
    found = diagnose(run_of(_reward(lost) | _validations(**scores))).findings
    assert not any("has no right answer" in f.title for f in found)


@pytest.mark.parametrize("penalty", ["overlong_penalty", "repetition", "too_long", "length_penalty"])
@pytest.mark.parametrize("before", [0.0, -0.1], ids=["never", "no longer"])
@pytest.mark.parametrize("format", ["trl", "verl-file"])
def test_a_penalty_that_nothing_earns_is_zero_by_right(penalty: str, before: float, format: str) -> None:
    rewards = {
        "reward/math/mean": RNG.binomial(256, 0.5, N) / 256,
        "reward/code/mean": RNG.binomial(256, 0.6, N) / 256,
        f"reward/{penalty}/mean": np.where(T < SINCE, before * RNG.uniform(0.8, 1.2, N), 0.0),
    }
    assert diagnose(run_of(rewards, format=format)).findings == ()


@pytest.mark.parametrize(
    ("name", "is_found"), [("format", False), ("format_strict", False), ("countdown", True)]
)
def test_a_form_that_is_never_met_is_no_source_without_a_right_answer(name: str, is_found: bool) -> None:
    rewards = {
        "reward/math/mean": RNG.binomial(256, 0.5, N) / 256,
        f"reward/{name}/mean": np.zeros(N),
    }
    assert bool(diagnose(run_of(rewards)).findings) is is_found


@pytest.mark.parametrize(
    ("lost", "code", "is_found"),
    [
        (0.08, {20: 0.36, 80: 0.0}, True),
        (0.0, {20: 0.36, 80: 0.0}, False),
        (0.08, {20: 0.1, 80: 0.0}, False),
        (0.08, {20: 0.36, 80: 0.05}, False),
    ],
    ids=["with the rewards", "alone", "hardly solved before", "not all"],
)
def test_one_zero_of_a_source_that_was_solved_counts_where_the_rewards_fell(
    lost: float, code: dict[int, float], is_found: bool
) -> None:
    others = {"math": {20: 0.4, 80: 0.42}}
    found = diagnose(run_of(_reward(lost) | _validations(code=code, **others))).findings
    assert [(f.rule, f.step) for f in found] == ([("one_source_all_zero", SINCE + 1)] if is_found else [])
