"""Ages that rise slowly or level off, and engines far off whose answers change."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, noisy, run_of
from rollbook.diagnose.signs.versions import STALENESS, unit_ramp
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 120
T = np.arange(N, dtype=np.float64)


def test_a_slow_rise_counts_from_where_it_began_if_the_gap_goes_with_it() -> None:
    n = 600
    t = np.arange(n, dtype=np.float64)
    rng = np.random.default_rng(4)
    ramp = np.clip((t - 200) / 200, 0, 1)
    ages = {
        f"{STALENESS}/mean": (0.5 + 1.6 * ramp) * rng.normal(1, 0.12, n),
        f"{STALENESS}/max": np.round(1.2 + 4 * ramp + rng.normal(0, 0.3, n)),
    }
    gap = (1 + 1.4 * ramp) * rng.normal(1, 0.06, n)
    found = diagnose(run_of(ages | {DIFF: 0.006 * gap, KL: 0.001 * gap}, n=n)).findings
    assert [f.rule for f in found] == ["stale_samples"]
    assert 195 <= found[0].step <= 260
    assert diagnose(run_of(ages, n=n)).findings == ()


def test_an_age_that_wobbles_at_its_height_has_levelled_off() -> None:
    n = 120
    rng = np.random.default_rng(2)
    oldest = np.round(4 + 16 * np.clip((np.arange(n) - 60) / 20, 0, 1) + rng.normal(0, 1.2, n))
    oldest[-3:] = (18, 17, 18)
    oldest_of = f"{STALENESS}/max"
    assert unit_ramp(View.of(run_of({oldest_of: oldest})), oldest_of) is None
    never_back = 4 + np.clip(np.arange(n) - 60, 0, None)
    assert unit_ramp(View.of(run_of({oldest_of: never_back.astype(np.float64)})), oldest_of) is not None


@pytest.mark.parametrize(
    ("length", "correlation", "is_noise"), [(2.3, 0.91, True), (2.3, 0.985, False), (1.0, 0.91, False)]
)
def test_an_engine_far_off_whose_answers_change_and_lose_reward_samples_noise(
    length: float, correlation: float, is_noise: bool
) -> None:
    broken = T >= 60
    run = run_of(
        {
            DIFF: noisy(0.0035, 3, 0.06) * np.where(broken, 24.0, 1.0),
            KL: noisy(2e-4, 6, 0.1) * np.where(broken, 200.0, 1.0),
            PEARSON: np.where(broken, correlation, 0.999),
            "response_length/mean": noisy(250.0, 4, 0.03) * np.where(broken, length, 1.0),
            "critic/score/mean": noisy(0.37, 5, 0.08) - 0.33 * broken,
            "critic/score/min": np.full(N, -1.1),
        }
    )
    first = diagnose(run).findings[0]
    assert (first.rule == "silent_error_after_wake") is is_noise


def test_the_largest_age_tells_of_stale_samples_where_it_is_all_there_is() -> None:
    """It goes from 3 to 22 in some steps, and the gap with it; by a version a step it is one replica that stands."""
    climb = np.clip((T - 60) / 6, 0, 1)
    rng = np.random.default_rng(5)
    oldest = np.round(3 + 19 * climb + rng.normal(0, 0.8, N))
    apart = {DIFF: noisy(0.006 * (1 + 2 * climb), 2), KL: noisy(0.001 * (1 + 2 * climb) ** 2, 3, 0.1)}
    assert diagnose(run_of(apart | {f"{STALENESS}/max": oldest})).verdict == "stale_samples"
    stands = 3 + np.clip(T - 60, 0, None)
    assert diagnose(run_of(apart | {f"{STALENESS}/max": stands})).verdict == "version_drift"
    calm = {f"{STALENESS}/max": oldest, f"{STALENESS}/min": np.zeros(N)}
    assert "stale_samples" not in [f.rule for f in diagnose(run_of(calm)).findings]


@pytest.mark.parametrize(
    ("first", "grows_on", "rules"),
    [(0.1, 0.0, []), (0.9, 0.0, ["stale_samples"]), (0.1, 2.0, ["stale_samples"])],
    ids=["fills", "was full", "grows on"],
)
def test_a_pipeline_that_fills_over_a_third_of_the_run_and_stays_full_is_well(
    first: float, grows_on: float, rules: list[str]
) -> None:
    """The gap goes with the ages either way."""
    n = 180
    t = np.arange(n)
    ages = first + 2.0 * (1 - np.exp(-np.clip(t - 20 * (first > 0.5), 0, None) / 22)) + grows_on * t / n
    gap = 1 + 0.25 * ages
    run = {
        f"{STALENESS}/mean": ages * np.random.default_rng(3).normal(1, 0.05, n),
        f"{STALENESS}/max": np.round(ages + 2),
        DIFF: noisy(0.006, 2, n=n) * gap,
        KL: noisy(0.001, 3, 0.1, n=n) * gap,
    }
    assert [f.rule for f in diagnose(run_of(run, n=n)).findings] == rules


@pytest.mark.parametrize(
    ("all_age", "is_thrown_away", "comes_back", "is_found"),
    [
        (False, True, True, True),
        (True, True, True, False),
        (False, False, True, False),
        (False, True, False, False),
    ],
    ids=["one replica", "all samples", "nothing is evicted", "the oldest stay as old"],
)
def test_the_oldest_age_until_the_bound_throws_them_away(
    all_age: bool, is_thrown_away: bool, comes_back: bool, is_found: bool
) -> None:
    """Five versions in five steps, and from then on an eighth of the samples is evicted."""
    ramp = np.clip(T - 60, 0, 5) * ((T < 66) | (not comes_back))
    evicted = 250.0 * (T >= 66) * is_thrown_away
    ages = {
        f"{STALENESS}/mean": 1.1
        + ramp * (0.9 if all_age else 0.13)
        + np.random.default_rng(6).normal(0, 0.08, N),
        f"{STALENESS}/max": 3.0 + ramp,
        f"{STALENESS}/min": np.zeros(N),
        "training/off_policy/evicted_samples": evicted * np.random.default_rng(7).normal(1, 0.05, N),
    }
    rules = {f.rule for f in diagnose(run_of(ages)).findings}
    assert ("version_drift" in rules) is is_found
