"""Rows of a log become one run: pieces joined, restarts and second runs told apart, odd clocks said."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rollbook.diagnose.readers.assemble import assemble
from rollbook.diagnose.series import Event, Row, RunSeries
from rollbook.errors import DataError


def _run(rows: list[tuple[int, dict[str, float]]], run_idx: int | None = None) -> RunSeries:
    items = [Row(step=step, data=data) for step, data in rows]
    return assemble(items, source="log", format="test", run_idx=run_idx)


def test_rows_of_a_step_complete_each_other_and_repeats_change_nothing() -> None:
    run = _run([(1, {"a": 1.0}), (1, {"b": 2.0}), (1, {"a": 1.0, "b": 2.0}), (2, {"a": 3.0})])
    assert run.steps.tolist() == [1, 2]
    np.testing.assert_array_equal(run.values["b"], [2.0, math.nan])
    assert run.seams == []


def test_more_digits_of_the_same_number_are_no_other_value() -> None:
    run = _run(
        [(1, {"epoch": 0.0113, "a": 1.0}), (2, {"epoch": 0.0226}), (2, {"epoch": 0.02260000001, "eval": 3.0})]
    )
    assert (run.seams, run.steps.tolist(), run.num_runs) == ([], [1, 2], 1)


def test_a_number_whose_square_is_infinite_counts_as_infinite() -> None:
    run = _run([(1, {"a": 1.0}), (2, {"a": -1e308}), (3, {"a": 3.0})])
    np.testing.assert_array_equal(run.values["a"], [1.0, math.nan, 3.0])
    assert run.non_finite == {"a": [2]}


def test_what_is_no_number_is_said() -> None:
    nan, inf = math.nan, math.inf
    run = _run([(1, {"a": nan, "b": 1.0, "c": inf, "d": nan}), (2, {"a": nan, "b": nan, "c": 2.0, "d": 1.0})])
    assert run.notes == [
        "NaN, null or infinite, and left out: a in 2 steps, the first 1; b in 1 step, the first 2; "
        "c in 1 step, the first 1; 1 more metric"
    ]


def test_rows_out_of_order_are_sorted_and_said() -> None:
    run = _run([(s, {"a": float(s)}) for s in (1, 3, 2, 5, 4)])
    np.testing.assert_array_equal(run.values["a"], [1.0, 2.0, 3.0, 4.0, 5.0])
    assert any("out of order" in note for note in run.notes)


def test_a_restart_keeps_what_ran_last_and_remembers_what_it_replaced() -> None:
    """Steps 1 to 6, then again from 4: the second 4, 5, 6 stand."""
    first = [(s, {"a": float(s)}) for s in range(1, 7)]
    again = [(s, {"a": 10.0 * s}) for s in range(4, 8)]
    run = _run(first + again)
    np.testing.assert_array_equal(run.values["a"], [1.0, 2.0, 3.0, 40.0, 50.0, 60.0, 70.0])
    assert [(seam.step, seam.num_replaced, seam.replaced["a"]) for seam in run.seams] == [
        (4, 3, [4.0, 5.0, 6.0])
    ]


def test_two_runs_in_one_log_are_told_apart_and_either_can_be_asked_for() -> None:
    rows = [(s, {"a": 1.0 + s}) for s in range(1, 9)] + [(s, {"a": 100.0 + s}) for s in range(1, 5)]
    newest, first = _run(rows), _run(rows, run_idx=0)
    assert (newest.num_steps, first.num_steps, newest.num_runs) == (4, 8, 2)
    assert newest.values["a"][0] == 101.0
    assert any("2 runs in one log" in note for note in newest.notes)
    with pytest.raises(DataError, match="holds 2 runs"):
        _run(rows, run_idx=2)


def test_a_clock_that_runs_backwards_is_said() -> None:
    items = [
        Row(step=s, data={"a": 1.0}, at_s=at_s) for s, at_s in ((1, 100.0), (2, 160.0), (3, 40.0), (4, 100.0))
    ]
    run = assemble(items, source="log", format="test")
    assert any("clock ran backwards 1 time" in note for note in run.notes)


def test_negative_seconds_are_left_out_and_said_with_their_steps() -> None:
    rows = [(s, {"timing_s/gen": -3480.0 if s == 4 else 40.0, "a": -1.0}) for s in range(1, 9)]
    run = _run(rows)
    assert np.isnan(run.values["timing_s/gen"]).tolist() == [s == 4 for s in range(1, 9)]
    assert run.values["a"].tolist() == [-1.0] * 8, "only seconds are never negative"
    says = "less than 0 s (a clock was set back), and left out: timing_s/gen in 1 step, the first 4"
    assert says in run.notes


def test_events_belong_to_the_run_in_which_they_were_written() -> None:
    items = [
        Row(step=1, data={"a": 1.0}),
        Row(step=2, data={"a": 2.0}),
        Row(step=3, data={"a": 2.0}),
        Event(kind="out_of_memory", step=3),
        Row(step=1, data={"a": 9.0}),
        Event(kind="resumed", step=1),
    ]
    run = assemble(items, source="log", format="test")
    assert run.num_runs == 2
    assert "resumed" in [event.kind for event in run.events]


def test_steps_that_are_not_in_the_log_are_counted() -> None:
    run = _run([(s, {"a": 1.0}) for s in (1, 2, 3, 4, 8, 9, 10)])
    assert any("3 of 10 steps are not in the log" in note for note in run.notes)


def test_a_log_without_a_step_is_an_error() -> None:
    with pytest.raises(DataError, match="holds no step"):
        _run([])
