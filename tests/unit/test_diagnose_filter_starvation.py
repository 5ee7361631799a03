"""A filter that starves a run is found whatever its count counts, and however much single steps swing."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import noisy, run_of
from rollbook.diagnose.finding import Finding
from rollbook.diagnose.rules.filter_starvation import judge
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 120
LATE = np.arange(N) >= 70
EVICTED, BATCHES = "training/filter_groups/evicted_samples", "train/num_gen_batches"
TOKENS = {
    "perf/total_num_tokens": noisy(512 * 1000.0, 20, 0.01, n=N),
    "prompt_length/mean": noisy(200.0, 21, 0.01, n=N),
}
"""512 sequences of 200 + 800 tokens."""


def _dropped(before: float, after: float, seed: int = 22) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.random.default_rng(seed).poisson(np.where(LATE, after, before)).astype(np.float64)


def _gen(factor: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return noisy(np.where(LATE, 50.0 * factor, 50.0), 10, n=N)


def test_counts_that_are_no_multiples_of_a_group_are_groups() -> None:
    """16 and then 140 of them beside 512 sequences: of single samples a fifth, of groups of eight two thirds.
    Generation takes twice as long, which a fifth would not explain."""
    run = run_of(TOKENS | {EVICTED: _dropped(16, 140), "timing_s/gen": _gen(2.2)}, n=N)
    assert diagnose(run).verdict == "filter_starvation"
    of_members = run_of(
        TOKENS | {EVICTED: 8 * np.round(_dropped(16, 140) / 8), "timing_s/gen": _gen(2.2)}, n=N
    )
    assert judge(View.of(of_members)) is None  # a fifth of the samples


@pytest.mark.parametrize(("batches", "factor", "found"), [(3.0, 1.5, True), (2.0, 2.2, False)])
def test_the_batches_of_a_step_tell_what_share_is_dropped(batches: float, factor: float, found: bool) -> None:
    """Of three batches two are dropped at the most; of two one, and half is what a sound mix may lose."""
    series = {EVICTED: _dropped(16, 140), BATCHES: np.where(LATE, batches, 1.0), "timing_s/gen": _gen(factor)}
    assert (judge(View.of(run_of(TOKENS | series, n=N))) is not None) == found


def test_a_tail_takes_the_seconds_that_a_filter_does_not() -> None:
    """More is dropped while a few responses run on to three times the length: nobody knows what the seconds went to."""
    tail = {"response_length/max": noisy(np.where(LATE, 9000.0, 3000.0), 9, n=N)}
    run = run_of(TOKENS | tail | {EVICTED: _dropped(16, 140), "timing_s/gen": _gen(2.2)}, n=N)
    assert judge(View.of(run)) is None


def test_drops_that_do_not_show_in_the_seconds_starve_nobody() -> None:
    """More groups are flat, as a task is learned, and no step takes longer for it."""
    assert (
        judge(View.of(run_of(TOKENS | {EVICTED: _dropped(16, 60), "timing_s/gen": _gen(1.1)}, n=N))) is None
    )


def test_a_rise_that_no_single_step_shows_is_one_where_nearly_every_later_step_has_more() -> None:
    """Of eight prompts a batch, drops come by eights and swing between nothing and four batches, seconds with them."""
    n = 400
    late = np.arange(n) >= 250
    rng = np.random.default_rng(3)
    batches = np.where(late, rng.integers(4, 11, n), rng.integers(0, 4, n))
    dropped = 8.0 * batches
    seconds = 60.0 + 30.0 * batches + rng.normal(0, 8, n)
    series = {EVICTED: dropped, "timing_s/gen": seconds}
    found = judge(View.of(run_of(series, n=n)))
    assert isinstance(found, Finding)
    assert abs(found.step - 251) <= 15
    mixed = rng.permutation(n)
    assert judge(View.of(run_of({k: v[mixed] for k, v in series.items()}, n=n))) is None


@pytest.mark.parametrize("power", [1.0, 1.5])
@pytest.mark.parametrize("counts", [EVICTED, "filter/kept_frac"])
def test_a_ramp_of_drops_is_dated_by_its_foot(counts: str, power: float) -> None:
    """From step 121 of 400 on ever more is dropped, up to nine times as much as at first; seconds go with it."""
    n = 400
    climb = np.clip((np.arange(n) - 120) / 280, 0, 1) ** power
    batches = 1.2 + 4 * climb
    series = {
        EVICTED: noisy(512 * (batches - 1), 22, 0.12, n=n),
        "filter/kept_frac": noisy(1 / batches, 23, 0.05, n=n),
    }
    seconds = noisy(50 * batches, 10, n=n)
    found = judge(View.of(run_of({counts: series[counts], "timing_s/gen": seconds}, n=n)))
    assert isinstance(found, Finding)
    assert abs(found.step - 121) <= 18


@pytest.mark.parametrize(
    ("dropped", "kept", "verdict"),
    [
        ("rollout/rejected", "rollout/accepted", "filter_starvation"),
        ("groups_discarded", "kept/groups", "filter_starvation"),
        ("rollout/rejected", "rollout/finished", "well"),
        ("rollout/rejected_tokens", "rollout/accepted_tokens", "well"),
        ("rollout/dropped_stale", "rollout/accepted_stale", "well"),
    ],
)
def test_what_a_filter_drops_is_known_beside_what_it_keeps(dropped: str, kept: str, verdict: str) -> None:
    counts = {dropped: _dropped(30, 500), kept: np.full(N, 64.0)}
    found = diagnose(run_of(TOKENS | counts | {"timing_s/gen": _gen(4.0)}, n=N))
    rules = [f.rule for f in found.findings]
    assert ("filter_starvation" in rules) == (verdict == "filter_starvation")


def test_a_filter_that_drops_as_much_as_ever_is_no_finding() -> None:
    counts = {"rollout/rejected": _dropped(30, 30), "rollout/accepted": np.full(N, 64.0)}
    assert not diagnose(run_of(TOKENS | counts, n=N)).findings
