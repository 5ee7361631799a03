"""Few steps that wait for one response or one call: too rare for a stretch, too far from the others for chance."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 200
T = np.arange(N)
FEW = np.isin(T, (61, 84, 139, 170)).astype(np.float64)


def _run(hit: Array, *, longest: float = 10.0, wait_s: float = 250.0, **changed: Array) -> Diagnosis:
    """One response of some steps is many times as long, and the step waits for it."""
    values = {
        "response_length/max": noisy(3000.0, 9, 0.1, n=N) * np.where(hit > 0, longest, 1.0),
        "timing_s/gen": noisy(50.0, 10, n=N) + wait_s * hit,
        "timing_s/step": noisy(105.0, 14, n=N) + wait_s * hit,
    }
    return diagnose(run_of(values | changed, n=N))


@pytest.mark.parametrize(("longest", "wait_s"), [(10.0, 250.0), (3.0, 60.0)])
def test_four_responses_that_run_to_the_limit_in_two_hundred_steps_are_bursts(
    longest: float, wait_s: float
) -> None:
    found = _run(FEW, longest=longest, wait_s=wait_s)
    assert (found.verdict, found.findings[0].step) == ("tail_burst", 62)
    assert found.findings[0].cost_s == pytest.approx(4 * wait_s, rel=0.1)


@pytest.mark.parametrize(
    "healthy",
    [
        {"hit": 1.0 * np.isin(T, (61, 139))},  # twice is no habit
        {"hit": FEW, "longest": 2.0},  # as long as the longest of a thousand may be
        {"hit": FEW, "wait_s": 2.0},  # nobody waits for it
        {
            "hit": FEW,
            "response_length/mean": noisy(800.0, 8, n=N) * np.where(FEW > 0, 1.5, 1.0),
        },  # all are longer
        {
            "hit": FEW,
            "timing_s/update_actor": noisy(40.0, 11, n=N) * np.where(FEW > 0, 4.0, 1.0),
        },  # a slow host
        {"hit": 1.0 * (T % 40 == 10)},  # scores of a held-out set, every fortieth step
    ],
    ids=["twice", "by chance", "unfelt", "all longer", "slow host", "validation"],
)
def test_what_looks_like_it_is_none(healthy: dict[str, Array]) -> None:
    scores = {"val-core/math/reward/mean@1": np.where(T % 40 == 10, noisy(0.4, 30, n=N), np.nan)}
    assert _run(**{**scores, **healthy}).verdict == "well"  # type: ignore[arg-type]


def test_longest_responses_of_a_heavy_tail_lie_close_to_each_other() -> None:
    """The largest of many have no gap between the few and the others, however far the first is."""
    rng = np.random.default_rng(4)
    longest = 2000 * (1 + rng.pareto(2.5, (N, 64)).max(axis=1))
    wait_s = longest * 0.02
    found = _run(
        np.zeros(N),
        **{"response_length/max": longest, "timing_s/gen": wait_s, "timing_s/step": wait_s + 55},
    )
    assert found.verdict == "well"


@pytest.mark.parametrize("name", ["env/turn_s/max", "perf/non_generation_time/max"])
@pytest.mark.parametrize(("wait_s", "verdict"), [(600.0, "tail_burst"), (0.0, "well")])
def test_one_call_of_ten_minutes_holds_up_its_step_and_no_mean_moves(
    name: str, wait_s: float, verdict: str
) -> None:
    calls = {
        name: noisy(20.0, 20, 0.1, n=N) + 600.0 * FEW,
        name.replace("/max", "/mean"): noisy(6.0, 21, n=N) + 0.6 * FEW,
    }
    found = _run(FEW, longest=1.0, wait_s=wait_s, **{"num_turns/mean": noisy(6.0, 22, n=N), **calls})
    assert found.verdict == verdict
    if wait_s:
        assert "call" in found.findings[0].title


@pytest.mark.parametrize(
    ("nearest", "wait_s", "verdict"),
    [(0.8, 80.0, "tail_burst"), (0.97, 80.0, "well"), (0.8, 5.0, "well")],
    ids=["alone", "others come near", "unfelt"],
)
def test_responses_that_all_end_at_the_limit_need_not_be_far_from_the_others(
    nearest: float, wait_s: float, verdict: str
) -> None:
    """Twice the usual longest, for they were cut off; hardly any other comes near to that."""
    usual = np.minimum(noisy(3000.0, 9, 0.12, n=N), 5000.0)
    usual[120:124] = nearest * 6000.0
    longest = {"response_length/max": np.where(FEW > 0, 6000.0, usual)}
    assert _run(FEW, wait_s=wait_s, **longest).verdict == verdict


def test_a_tail_that_reaches_the_limit_by_itself_comes_near_it_as_often() -> None:
    """The largest of many, cut off at the limit; each step waits for its longest."""
    for seed in range(20):
        longest = np.minimum(noisy(3000.0, seed, 0.35, n=N), 6000.0)
        waits = {"timing_s/gen": longest * 0.02, "timing_s/step": longest * 0.02 + 55}
        assert _run(np.zeros(N), **{"response_length/max": longest, **waits}).verdict == "well"


AGENTIC = {"num_turns/mean": noisy(11.0, 51, n=N)}
FRESH = {f"training/off_policy/trajectory_staleness/{of}": np.zeros(N) for of in ("mean", "max")}


def test_steps_of_a_synchronous_agentic_job_that_wait_for_nothing_that_is_measured_wait_for_a_call() -> None:
    found = _run(FEW, longest=1.0, **AGENTIC, **FRESH)
    assert (found.verdict, found.findings[0].step, len(found.findings)) == ("tail_burst", 62, 1)


@pytest.mark.parametrize(
    ("hit", "wait_s", "changed"),
    [
        (FEW, 60.0, AGENTIC | FRESH),
        (1.0 * np.isin(T, (61, 139)), 250.0, AGENTIC | FRESH),
        (FEW, 250.0, AGENTIC | FRESH | {"timing_s/update_actor": noisy(40.0, 11, n=N) * (1 + 4 * FEW)}),
        (FEW, 250.0, FRESH),
    ],
    ids=["not for long", "twice", "slow host", "no calls"],
)
def test_other_waits_of_such_a_job_are_no_calls(hit: Array, wait_s: float, changed: dict[str, Array]) -> None:
    assert _run(hit, longest=1.0, wait_s=wait_s, **changed).verdict == "well"


def test_an_asynchronous_job_waits_for_its_buffer() -> None:
    ages = {name: series + 0.5 for name, series in FRESH.items()}
    assert _run(FEW, longest=1.0, **AGENTIC, **ages).verdict == "buffer_never_fills"


SOME = (T >= 30) & (np.arange(N) % 7 < 2)


@pytest.mark.parametrize(
    ("at_the_limit", "wait_s", "verdict"),
    [
        (SOME, 60.0, "tail_burst"),  # others have one too, now and then, and do not wait
        (SOME, 4.0, "well"),  # nobody waits
        (
            T >= 30,
            60.0,
            "well",
        ),  # as many of the steps that do not wait have one: something else holds them up
        (np.zeros(N, bool), 60.0, "well"),  # no response of those steps is longer
    ],
    ids=["waits", "unfelt", "all at the limit", "none at the limit"],
)
def test_steps_that_wait_each_have_a_response_at_the_limit(
    at_the_limit: Array, wait_s: float, verdict: str
) -> None:
    """Lengths come near the limit, so that no response is far longer than others."""
    longest = np.minimum(noisy(3400.0, 9, 0.08, n=N), 4000.0)
    values = {
        "response_length/max": np.where(at_the_limit, 4000.0, longest),
        "timing_s/gen": noisy(50.0, 10, n=N) + wait_s * SOME,
        "timing_s/step": noisy(105.0, 14, n=N) + wait_s * SOME,
    }
    found = diagnose(run_of(values, n=N)).verdict
    assert (found == "tail_burst") == (verdict == "tail_burst")


def test_calls_of_the_slowest_trajectory_are_read_under_their_name(tmp_path: Path) -> None:
    """As verl's agent loop writes them."""
    waits = 150.0 * FEW
    rows = [
        {
            "agent_loop/slowest/tool_calls": 4.0 + waits[i],
            "num_turns/mean": 6.0,
            "response_length/mean": 800.0,
            "response_length/max": 3000.0 + i,
            "timing_s/gen": 50.0 + waits[i] + i % 3,
            "timing_s/step": 105.0 + waits[i] + i % 3,
        }
        for i in range(N)
    ]
    log = tmp_path / "run.jsonl"
    log.write_text("".join(json.dumps({"step": i + 1, "data": row}) + "\n" for i, row in enumerate(rows)))
    found = diagnose(load(str(log)))
    assert (found.verdict, found.findings[0].step) == ("tail_burst", 62)
    assert "calls" in found.findings[0].title
