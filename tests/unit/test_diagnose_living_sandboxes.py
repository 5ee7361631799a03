"""Sandboxes that live against those in use: the difference only grows where they are not given back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.series import Event
from rollbook.diagnose.signs.living import unreturned
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 100
T = np.arange(N)
IN_USE = np.round(noisy(60.0, 30, 0.03, n=N))


def _verdict(living: Array, used: Array = IN_USE, **changed: Array) -> tuple[str, int | None]:
    values = {"sandbox/alive": np.round(living), "sandbox/in_use_peak": np.round(used)}
    found = diagnose(run_of(values | changed, n=N))
    return found.verdict, found.findings[0].step if found.findings else None


@pytest.mark.parametrize("since", [2, 30])
def test_ever_more_that_live_while_as_many_are_used_are_a_leak(since: int) -> None:
    verdict, step = _verdict(80 + 3.0 * np.maximum(T - since, 0))
    assert verdict == "sandbox_leak"
    assert step is not None
    assert abs(step - 1 - since) <= 5


def test_it_goes_before_the_creations_that_fail_at_its_end() -> None:
    failed = np.round(40.0 * np.clip((T - 80) / 20, 0, 1))
    changed = {"sandbox/create_failed": failed, "response/aborted_ratio": failed / 120}
    changed["critic/score/mean"] = 0.4 - 0.1 * np.clip((T - 80) / 20, 0, 1) + noisy(0.01, 31, 0.3, n=N)
    assert _verdict(np.minimum(80 + 6.0 * T, 512), **changed)[0] == "sandbox_leak"


@pytest.mark.parametrize(
    ("living", "used"),
    [
        (80 + 120 * (1 - np.exp(-T / 4.0)), IN_USE),  # a pool that is filled at first
        (np.where(T < 50, 80.0, 240.0), IN_USE),  # scaled up once
        (90 + noisy(8.0, 33, n=N), IN_USE),  # some are kept warm
        (80 + 60 * (T % 20) / 20, IN_USE),  # reaped every twenty steps
    ],
    ids=["filled", "scaled", "warm", "reaped"],
)
def test_a_pool_of_another_size_is_no_leak(living: Array, used: Array) -> None:
    assert _verdict(living, used)[0] == "well"


def test_those_that_grow_with_the_use_are_given_back() -> None:
    values = {
        "sandbox/alive": np.asarray(80 + 3.0 * T, np.float64),
        "sandbox/in_use": np.asarray(60 + 2.6 * T, np.float64),
    }
    assert unreturned(View.of(run_of(values, n=N))) is None
    assert unreturned(View.of(run_of(values | {"sandbox/in_use": IN_USE}, n=N))) is not None


@pytest.mark.parametrize("living", [0.0 * T, 3.0 * (T > 40)], ids=["never any", "none at first"])
@pytest.mark.parametrize("used", [0.0 * T, 2.0 * (T > 40)], ids=["none used", "none used at first"])
def test_counts_that_are_zero_are_no_leak_and_no_error(living: Array, used: Array) -> None:
    assert _verdict(living, used)[0] == "well"


def test_totals_that_stand_at_first_are_no_error() -> None:
    made = 5.0 * np.maximum(T - N // 11, 0)
    totals = {"sandbox/created_total": made, "sandbox/released_total": np.maximum(made - 5.0, 0)}
    assert diagnose(run_of(totals, n=N)).verdict == "well"


@pytest.mark.parametrize(
    "line",
    [
        "WARNING {} containers running, {} leased; oldest unleased 25 min (limit 1024)",
        "sandbox pool: alive={} idle=3 in_use={}",
    ],
)
@pytest.mark.parametrize(("each_step", "verdict"), [(6.0, "sandbox_leak"), (0.1, "well")])
def test_lines_that_count_both_tell_as_much(
    tmp_path: Path, line: str, each_step: float, verdict: str
) -> None:
    path = tmp_path / "run.log"
    said = [f"step:{i} - timing_s/step:9.0\n{line.format(int(80 + each_step * i), 60)}" for i in range(1, 60)]
    path.write_text("\n".join(said))
    events: tuple[Event, ...] = tuple(e for e in load(str(path)).events if e.kind == "sandboxes_counted")
    assert len(events) == 59
    assert diagnose(run_of({}, n=N, events=events)).verdict == verdict


@pytest.mark.parametrize(
    "names",
    [("sandbox/created_total", "sandbox/released_total"), ("containers_started", "containers_removed")],
)
@pytest.mark.parametrize(
    ("left", "grown", "rule"),
    [
        (24 + 2.0 * np.maximum(T - 30, 0), 1.0, "sandbox_leak"),
        (24.0 + 0.0 * T, 1.0, "well"),  # as many as ever
        (24 + 40.0 * (T >= 50), 1.0, "well"),  # more are kept warm since a step
        (24 * (1 + T / 40), 1.0 + T / 40, "well"),  # there is more to do
    ],
    ids=["leak", "level", "one step", "more work"],
)
def test_what_was_made_and_is_not_gone_grows_only_where_it_is_not_given_back(
    names: tuple[str, str], left: Array, grown: Array, rule: str
) -> None:
    made = np.cumsum(np.round(256 * np.ones(N) * grown))
    wavers = np.random.default_rng(7).normal(0, 4, N)
    made_gone = {names[0]: made, names[1]: np.round(made - left - wavers)}
    found = diagnose(run_of(made_gone | {"num_turns/mean": noisy(8.0, 32, 0.02, n=N)}, n=N))
    assert found.verdict == rule
    if rule != "well":
        assert abs(found.findings[0].step - 31) <= 8
