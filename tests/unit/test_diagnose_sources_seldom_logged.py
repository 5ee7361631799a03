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


def _each(before: float, *since: float) -> dict[int, float]:
    """Four scores about a level, and those since."""
    scores = [0.8 * before, 0.9 * before, 0.95 * before, before, *since]
    return {10 + 12 * i: score for i, score in enumerate(scores)}


HALVED = {"math": _each(0.6, 0.62, 0.63, 0.6, 0.65), "hotpotqa": _each(0.5, 0.52, 0.49, 0.53, 0.5)}


@pytest.mark.parametrize("lost", [0.0, 0.15])
def test_a_source_of_which_hardly_an_answer_counts_any_more_is_named_as_one_of_none(lost: float) -> None:
    scores = _validations(code=_each(0.5, 0.03, 0.01, 0.06, 0.02), **HALVED)
    statistics = {m.replace("mean@1", "best@4/mean"): np.minimum(1.0, 1.5 * s) for m, s in scores.items()}
    found = diagnose(run_of(_reward(lost) | scores | statistics)).findings
    assert [f.rule for f in found] == ["one_source_all_zero"]
    assert 46 <= found[0].step - 1 <= 60
    assert "nearly all rewards of source 'code'" in found[0].title


def test_it_is_dated_by_its_fall_though_some_scores_are_exactly_zero() -> None:
    code = _each(0.5, 0.02, 0.0, 0.03, 0.0)
    found = diagnose(run_of(_reward(0.0) | _validations(code=code, **HALVED))).findings
    assert [(f.rule, f.step) for f in found] == [("one_source_all_zero", 59)]


@pytest.mark.parametrize(
    "code",
    [
        _each(0.5, 0.2, 0.15, 0.18, 0.2),
        _each(0.5, 0.03, 0.02, 0.3, 0.4),
        {**_each(0.5, 0.03, 0.01, 0.02, 0.02), 34: 0.3, 46: 0.1},
        _each(0.12, 0.01, 0.005, 0.01, 0.01),
    ],
    ids=["some are right", "it came back", "it faded", "it was hardly solved"],
)
def test_a_source_that_becomes_worse_is_not_broken(code: dict[int, float]) -> None:
    assert not diagnose(run_of(_reward(0.0) | _validations(code=code, **HALVED))).findings


def test_a_source_that_falls_with_all_others_is_unlearned() -> None:
    scores = {s: _each(0.5, 0.03, 0.01, 0.06, 0.02) for s in ("code", "math", "hotpotqa")}
    assert not diagnose(run_of(_reward(0.0) | _validations(**scores))).findings
