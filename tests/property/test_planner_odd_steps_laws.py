"""Whatever one step of a log holds, the figures are of the others, or of all: never of a number between."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rollbook.planner.measured import Measured, means_of

STAGES = ("gen", "old_log_prob", "update_actor", "update_weights")
Log = dict[str, NDArray[np.float64]]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    """Steps that scatter by a few per cent, some of their seconds between the stages."""
    count = draw(st.integers(8, 60))
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    scale = 10.0 ** draw(st.integers(-3, 3))
    values = {
        f"timing_s/{name}": scale
        * draw(st.floats(1.0, 50.0))
        * np.exp(0.05 * generator.standard_normal(count))
        for name in STAGES[: draw(st.integers(0, 4))]
    }
    rest = scale * np.exp(0.05 * generator.standard_normal(count))
    return {**values, "timing_s/step": np.asarray(sum(values.values(), rest))}


def measured(values: Log, kept: NDArray[np.int64] | None = None) -> Measured:
    steps = np.arange(len(values["timing_s/step"]))
    kept = steps if kept is None else kept
    return means_of(kept, {name: series[kept] for name, series in values.items()}, first=0, last=None)


@given(values=logs(), data=st.data())
@settings(max_examples=150, deadline=None)
def test_one_broken_value_never_makes_the_mean(values: Log, data: st.DataObject) -> None:
    """A value far off is told and left out with its step; the means are those of a log that never had the step."""
    count = len(values["timing_s/step"])
    place, name = data.draw(st.integers(0, count - 1)), data.draw(st.sampled_from(sorted(values)))
    broken = data.draw(st.sampled_from([-1e9, -1.0, math.inf, -math.inf, 1e9, 1e6, 100.0, math.nan]))
    of_scale = broken * float(np.median(values["timing_s/step"]))
    odd = {n: series.copy() for n, series in values.items()}
    odd[name][place] = of_scale
    found = measured(odd)
    expected = measured(values, np.delete(np.arange(count), place))
    assert found.means == pytest.approx(expected.means)
    assert found.num_steps == count - 1
    is_told = not (name == "timing_s/step" and math.isnan(broken))  # a line that is no step
    assert found.left_out == ((place,) if is_told else ())
    assert len(found.notes) == len(found.left_out)


@given(values=logs(), factor=st.floats(1e-3, 1e3))
@settings(max_examples=50, deadline=None)
def test_ordinary_logs_are_whole_in_any_unit(values: Log, factor: float) -> None:
    found = measured({name: factor * series for name, series in values.items()})
    assert (found.left_out, found.notes) == ((), ()) and found.num_steps == len(values["timing_s/step"])
    for name, series in values.items():
        assert found.means[name] == pytest.approx(factor * series.mean())


@given(
    count=st.integers(1, 40),
    stages=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=32), min_size=1, max_size=40),
    steps=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40),
)
@settings(max_examples=150, deadline=None)
def test_any_seconds_at_all_give_finite_means(count: int, stages: list[float], steps: list[float]) -> None:
    values = {"timing_s/gen": np.resize(stages, count), "timing_s/step": np.resize(steps, count)}
    found = measured(values)
    assert found.num_steps >= 1 and found.num_steps + len(found.left_out) == count
    assert all(math.isfinite(mean) and mean >= 0 for mean in found.means.values())
