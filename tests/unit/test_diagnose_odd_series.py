"""Whatever a log holds, no rule raises; and one that does leaves the others their say."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose import four_signals, states, tree
from rollbook.diagnose.finding import RuleFailed
from rollbook.diagnose.report import to_text
from rollbook.diagnose.rules import late_oom_with_length
from rollbook.diagnose.signs import memory
from rollbook.diagnose.signs.living import unreturned
from rollbook.diagnose.view import View
from rollbook.observe.catalogue import names

N = 48
T = np.arange(N, dtype=np.float64)
OWN = tuple(run_of({}, n=N).values)
SANDBOXES = ("env/num_alive", "env/num_active", "env/num_leased", "env/capacity")
SIGNALS = sorted({*OWN, *SANDBOXES, *(re.sub(r"\{\w+\}", "a", name) for name in names())})


def _odd(kind: str, rng: np.random.Generator) -> Array:
    values = noisy(float(rng.choice([0.1, 5.0, 400.0])), int(rng.integers(1_000_000)), 0.2, n=N)
    at = int(rng.integers(N))
    if kind == "one value":
        return np.where(np.arange(N) == at, values, np.nan)
    if kind == "few values":
        return np.where(rng.random(N) < 0.25, values, np.nan)
    if kind == "a gap":
        values[at : at + 9] = np.nan
    if kind == "infinite":
        values[at] = np.inf
    if kind == "absurd":
        values[at] = rng.choice([1e9, 1e30, -1e30])
    if kind in ("a gap", "infinite", "absurd"):
        return values
    shapes = {
        "empty": np.full(N, np.nan),
        "equal": np.full(N, 3.0),
        "zero": np.zeros(N),
        "negative": -values,
        "all absurd": values * 1e30,
        "climbs": T * values,
        "falls": (N - T) * values,
    }
    return shapes[kind]


KINDS = ["empty", "one value", "few values", "a gap", "infinite", "absurd", "equal", "zero", "negative"]
KINDS += ["all absurd", "climbs", "falls"]


@pytest.mark.parametrize("kind", [*KINDS, *range(12)])
def test_no_rule_raises_on_odd_series(kind: str | int) -> None:
    """Every signal of one kind, then each of a kind by lot."""
    rng = np.random.default_rng(kind if isinstance(kind, int) else 100)
    kinds = {m: str(rng.choice(KINDS)) if isinstance(kind, int) else kind for m in SIGNALS}
    view = View.of(run_of({metric: _odd(kinds[metric], rng) for metric in SIGNALS}, n=N))
    for rule in tree.RULES.values():
        rule(view)
    states.judge(view)
    four_signals.judge(view)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuleFailed)
        assert to_text(tree.diagnose(view.run))


@pytest.mark.parametrize("num", [8, 12, 15])
def test_sandboxes_that_climb_from_the_first_count_on_are_a_leak(num: int) -> None:
    """In few counts the first is already above their early level."""
    steep = np.asarray(10.0 + 20.0 * np.arange(num) ** 0.6, dtype=np.float64)
    view = View.of(run_of({SANDBOXES[0]: steep, SANDBOXES[1]: np.full(num, 8.0)}, n=num))
    assert unreturned(view) is not None
    as_many = View.of(run_of({SANDBOXES[0]: np.full(num, 10.0), SANDBOXES[1]: np.full(num, 8.0)}, n=num))
    assert unreturned(as_many) is None


def _raises(view: View) -> None:
    raise IndexError("of a rule")


def test_a_rule_that_raises_is_named_and_the_others_judge(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = run_of({"actor/grad_norm": noisy(1e12, 4, n=N)}, n=N)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuleFailed)
        verdict, well = tree.diagnose(wrong).verdict, tree.diagnose(run_of({}, n=N)).verdict
    assert verdict != well == "well"
    monkeypatch.setitem(tree.RULES, "sandbox_leak", _raises)
    with pytest.warns(RuleFailed, match="sandbox_leak"):
        assert tree.diagnose(wrong).verdict == verdict
    with pytest.warns(RuleFailed):
        found = tree.diagnose(run_of({}, n=N))
    assert found.verdict == "not_judged"
    assert "rule that failed: sandbox_leak" in " ".join(to_text(found).split())


def test_memory_below_nothing_of_a_device_that_is_known_is_judged() -> None:
    values = {memory.ALLOCATED: np.full(N, -5.0), memory.TOTAL: np.full(N, 80.0)}
    late_oom_with_length.judge(View.of(run_of(values, n=N)))
