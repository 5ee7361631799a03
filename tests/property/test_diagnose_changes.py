"""Laws of the change points: where a shift is found does not depend on units, spikes or what came elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.diagnose.breaks import Break, find_break
from rollbook.diagnose.changes import (
    Split,
    noise_scale,
    running_median,
    without_spikes,
    worthy_split,
)
from rollbook.diagnose.series import Series

SEEDS = st.integers(0, 2**31 - 1)


def _noise(seed: int, n: int, rho: float = 0.0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    out = np.zeros(n)
    for i in range(1, n):
        out[i] = rho * out[i - 1] + rng.normal()
    return out


def _split(values: Series) -> Split | None:
    clean = without_spikes(values)
    return worthy_split(clean, noise_scale(clean))


def _rise(values: Series) -> Break:
    found = find_break("x", np.arange(float(len(values))), values, 1, log=False)
    assert found is not None
    return found


@given(seed=SEEDS, n=st.integers(60, 300), where=st.floats(0.25, 0.75), size=st.sampled_from([-8.0, 8.0]))
@settings(max_examples=60, deadline=None)
def test_a_large_step_is_found_where_it_is(seed: int, n: int, where: float, size: float) -> None:
    at = int(n * where)
    values = _noise(seed, n) + np.where(np.arange(n) >= at, size, 0.0)
    found = _split(values)
    assert found is not None
    assert abs(found.idx - at) <= 2
    assert found.kind == "level"


@given(seed=SEEDS, scale=st.floats(1e-6, 1e6), offset=st.floats(-1e3, 1e3))
@settings(max_examples=40, deadline=None)
def test_units_do_not_matter(seed: int, scale: float, offset: float) -> None:
    values = _noise(seed, 120) + np.where(np.arange(120) >= 70, 7.0, 0.0)
    plain, scaled = _split(values), _split(values * scale + offset * scale)
    assert plain is not None
    assert scaled is not None
    assert (plain.idx, plain.kind) == (scaled.idx, scaled.kind)


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_missing_values_move_nothing(seed: int) -> None:
    """Positions count missing values too: the step is found at the first value after it that is there, or beside it."""
    rng = np.random.default_rng(seed)
    values = _noise(seed, 160) + np.where(np.arange(160) >= 100, 9.0, 0.0)
    values[rng.random(160) < 0.3] = np.nan
    found = _rise(values)
    known = np.flatnonzero(np.isfinite(values))
    assert abs(np.searchsorted(known, found.idx) - np.searchsorted(known, 100)) <= 1


@given(seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_rare_spikes_are_no_change(seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = _noise(seed, 200)
    values[rng.choice(np.arange(5, 195, 6), 8, replace=False)] += 50.0
    assert _split(values) is None
    assert np.abs(without_spikes(values)).max() < 30.0


def test_autocorrelated_noise_seldom_has_a_change() -> None:
    """AR(1) with 0.6 and 200 values: at most 2 of 100 series."""
    assert sum(_split(_noise(seed, 200, rho=0.6)) is not None for seed in range(100)) <= 2


def test_a_ramp_is_a_change_of_slope_at_its_beginning() -> None:
    values = _noise(3, 200) * 0.5 + np.maximum(0.0, np.arange(200) - 120) * 0.3
    found = _split(values)
    assert found is not None
    assert found.kind == "slope"
    assert abs(found.idx - 120) <= 8


def test_noise_is_that_of_neighbors_not_of_levels_or_trends() -> None:
    """Standard deviation 2 under a step of 100 and a trend of 1 a value."""
    rng = np.random.default_rng(0)
    values = rng.normal(0, 2, 2000) + np.arange(2000) + np.where(np.arange(2000) > 900, 100.0, 0.0)
    assert noise_scale(values) == pytest.approx(2.0, rel=0.1)


def test_running_median_of_three_by_hand() -> None:
    """The ends see their mirror image."""
    assert running_median(np.array([1.0, 9.0, 2.0, 3.0, 8.0]), 3).tolist() == [9.0, 2.0, 3.0, 3.0, 3.0]
