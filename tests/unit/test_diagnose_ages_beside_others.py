"""Ages of samples explain a gap that goes with them, and no more; a policy that moves too fast makes no sample old."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, Array, noisy, run_of
from rollbook.diagnose.signs.versions import STALENESS
from rollbook.diagnose.tree import diagnose

N = 120
T = np.arange(N)


def _ages(mean: Array) -> dict[str, Array]:
    return {
        f"{STALENESS}/mean": noisy(mean, 3, 0.03),
        f"{STALENESS}/max": np.ceil(1.3 * mean),
        f"{STALENESS}/min": np.floor(0.8 * np.maximum(mean - 0.6, 0.0)),
    }


@pytest.mark.parametrize(("growth", "since", "verdict"), [(14.0, 11, "missed_weight_sync"), (3.0, 1, None)])
def test_a_gap_that_outgrows_the_age_of_a_pipeline_that_had_filled_is_of_the_weights(
    growth: float, since: int, verdict: str | None
) -> None:
    """26 steps: samples come to their age until the eighth, the gap climbs from the twelfth on, or with them."""
    n = 26
    t = np.arange(n)
    gap = 1 + (growth - 1) * np.clip((t - since) / (n - 11 if since > 8 else 8), 0, 1)
    run = run_of(
        {
            DIFF: noisy(0.003 * gap, 2, 0.03, n=n),
            KL: noisy(1e-4 * gap**2, 3, 0.06, n=n),
            f"{STALENESS}/mean": noisy(np.clip(0.1 + 0.1 * t, 0, 0.85), 4, 0.05, n=n),
            f"{STALENESS}/max": np.clip(np.ceil(0.3 * t), 1, 2),
            f"{STALENESS}/min": np.zeros(n),
        },
        n=n,
    )
    found = diagnose(run).findings
    assert [f.rule for f in found] == ([verdict] if verdict else [])


@pytest.mark.parametrize("longer", [1.0, 2.5])
def test_a_policy_that_moves_too_fast_makes_samples_old_only_by_longer_answers(longer: float) -> None:
    late = np.clip((T - 60) / 40, 0, 1)
    run = run_of(
        {
            **_ages(0.7 + 14 * late),
            DIFF: noisy(0.006 * (1 + late), 2),
            KL: noisy(0.001 * (1 + late) ** 2, 5, 0.1),
            "actor/ppo_kl": noisy(2e-4 * (1 + 40 * late), 6, 0.1),
            "actor/pg_clipfrac": noisy(2e-3 * (1 + 60 * late), 7, 0.1),
            "actor/grad_norm": noisy(0.2 * (1 + 2 * late), 8, 0.1),
            "critic/score/mean": 0.4 - 0.2 * late + np.random.default_rng(1).normal(0, 0.01, N),
            "response_length/mean": noisy(800.0 * (1 + (longer - 1) * late), 9),
        }
    )
    found = diagnose(run)
    assert "learning_rate_too_high" in [state.name for state in found.states] or longer == 1.0
    assert ("stale_samples" in [f.rule for f in found.findings]) is (longer == 1.0)


@pytest.mark.parametrize(
    ("per_step", "verdict"), [(0.66, "stale_samples"), (0.8, "stale_samples"), (1.0, "missed_weight_sync")]
)
def test_ages_in_whole_numbers_stand_still_only_if_they_grow_by_a_version_a_step_for_good(
    per_step: float, verdict: str
) -> None:
    """Of a slower growth the rounding leaves eight steps that look like it."""
    n = 60
    age = np.maximum(np.arange(n) - 25, 0) * per_step
    run = run_of(
        {
            f"{STALENESS}/mean": noisy(0.5 + age, 4, 0.01, n=n),
            f"{STALENESS}/max": np.floor(2 + 1.1 * age),
            f"{STALENESS}/min": np.floor(age),
            DIFF: noisy(0.004 * (1 + 0.3 * age), 2, 0.05, n=n),
            KL: noisy(2e-4 * (1 + 0.3 * age) ** 2, 3, 0.08, n=n),
        },
        n=n,
    )
    assert diagnose(run).verdict == verdict


@pytest.mark.parametrize(("queue", "verdict"), [(20.0, "stale_samples"), (0.0, "missed_weight_sync")])
def test_samples_that_grow_old_in_a_queue_are_of_engines_that_go_on(queue: float, verdict: str) -> None:
    """By a version a step, the newest of them too."""
    n = 60
    age = np.maximum(np.arange(n) - 25, 0) * 1.0
    run = run_of(
        {
            f"{STALENESS}/mean": noisy(0.5 + age, 4, 0.01, n=n),
            f"{STALENESS}/max": 2 + age,
            f"{STALENESS}/min": age,
            "fully_async/monitor/queue/mq_queue_size": np.round(noisy(30 + queue * age, 5, 0.03, n=n)),
            DIFF: noisy(0.004 * (1 + 0.3 * age), 2, 0.05, n=n),
            KL: noisy(2e-4 * (1 + 0.3 * age) ** 2, 3, 0.08, n=n),
        },
        n=n,
    )
    assert diagnose(run).verdict == verdict


@pytest.mark.parametrize("growth", [1.0, 8.0])
def test_a_gap_that_grows_on_at_an_age_that_stands_is_of_the_weights(growth: float) -> None:
    """Samples come to their age in the step in which the gap begins to climb, and no further."""
    n = 40
    t = np.arange(n)
    gap = np.where(t < 10, 1.0, 1.3 + growth * np.clip((t - 10) / 30, 0, 1) ** 0.7 * (growth > 1))
    run = run_of(
        {
            f"{STALENESS}/mean": noisy(np.where(t < 10, 0.5, 0.85), 4, 0.04, n=n),
            f"{STALENESS}/max": np.where(t < 10, 1.0, 2.0),
            f"{STALENESS}/min": np.zeros(n),
            DIFF: noisy(0.003 * gap, 2, 0.03, n=n),
            KL: noisy(1e-4 * gap**2, 3, 0.06, n=n),
        },
        n=n,
    )
    found = [f.rule for f in diagnose(run).findings]
    assert found == (["missed_weight_sync"] if growth > 1 else [])
