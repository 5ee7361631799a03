"""Spells: what leaves its level and comes back is found where it is, and what stays, drifts or wobbles is none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollbook.diagnose.spells import find_spells, follow, tooth_of

SEEDS = st.integers(0, 2**31)


def _noisy(seed: int, n: int = 200, size: float = 0.05) -> NDArray[np.float64]:
    return np.asarray(60.0 * np.exp(np.random.default_rng(seed).normal(0, size, n)))


@given(SEEDS, st.floats(0.01, 0.15), st.floats(-1.0, 1.0))
def test_noise_and_drift_have_no_spells(seed: int, size: float, drift: float) -> None:
    values = _noisy(seed, size=size) * np.exp(drift * np.arange(200) / 200)
    assert find_spells(values, least=np.log(1.5)) is None


@given(SEEDS, st.integers(20, 170))
def test_a_level_that_stays_is_no_spell(seed: int, at: int) -> None:
    values = _noisy(seed)
    values[at:] *= 4.0
    assert find_spells(values, least=np.log(1.5)) is None


@given(SEEDS, st.integers(30, 60), st.integers(1, 14), st.integers(6, 20), st.floats(-0.7, 0.7))
def test_stretches_that_come_back_are_found_where_they_are(
    seed: int, first: int, length: int, pause: int, drift: float
) -> None:
    """Whatever their length, up to half of the steps, on a level that itself doubles or halves."""
    values = _noisy(seed) * np.exp(drift * np.arange(200) / 200)
    pause = max(pause, length)
    truth = np.zeros(200, np.bool_)
    for start in range(first, 200, length + pause):
        truth[start : start + length] = True
    values[truth] *= 5.0
    found = find_spells(values, least=np.log(1.5))
    assert found is not None
    assert found.first == first
    assert (found.hit == truth).mean() >= 0.97
    assert 4.0 <= found.ratio <= 6.0


def test_one_spell_is_no_habit() -> None:
    values = _noisy(3)
    values[90:100] *= 8.0
    assert find_spells(values) is None


@pytest.mark.parametrize(("falls_at_once", "is_saw"), [(True, True), (False, False)])
def test_a_tooth_grows_step_by_step_and_is_gone_at_once(falls_at_once: bool, is_saw: bool) -> None:
    values = _noisy(5, size=0.02)
    for start in range(40, 180, 30):
        way_up = np.linspace(1.0, 6.0, 12)
        shape = way_up if falls_at_once else np.concatenate([way_up[::2], way_up[::-2]])
        values[start : start + 12] *= shape
    found = find_spells(values)
    assert found is not None
    assert tooth_of(values, found).is_saw is is_saw


def test_spells_that_follow_marks_are_told_from_those_that_do_not() -> None:
    values = _noisy(7)
    marks = np.arange(9, 200, 20)
    after = values.copy()
    after[marks[2:] + 1] *= 6.0
    elsewhere = values.copy()
    elsewhere[[51, 60, 83, 97, 121, 133, 140, 166, 171]] *= 6.0
    of_marks, of_others = find_spells(after), find_spells(elsewhere)
    assert of_marks is not None and of_others is not None
    assert follow(of_marks, marks)
    assert not follow(of_others, marks)
