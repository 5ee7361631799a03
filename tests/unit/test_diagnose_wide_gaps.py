"""One metric of the gap beyond what is usual from the first step on: an engine in eight bits by intention, if it stands
and the run learns; further off, growing, or where nothing is learned, engine and trainer disagree."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, Array, noisy, run_of
from rollbook.diagnose.tree import diagnose

N = 160
T = np.arange(N)
LEARNS = 0.3 + 0.3 * (1 - np.exp(-T / 50)) + np.random.default_rng(1).normal(0, 0.01, N)
STANDS = 0.3 + np.random.default_rng(2).normal(0, 0.02, N)


def _verdict(name: str, gap: Array, score: Array) -> str:
    without = {metric: np.full(N, np.nan) for metric in (DIFF, KL, PEARSON)}
    return diagnose(run_of(without | {name: gap, "critic/score/mean": score}, n=N)).verdict


@pytest.mark.parametrize(("name", "level"), [("training/logprob_gap/mean", 0.09), (DIFF, 0.028)])
def test_a_wide_gap_that_stands_in_a_run_that_learns_is_meant(name: str, level: float) -> None:
    assert _verdict(name, noisy(level, 3, 0.06, n=N), LEARNS) == "well"
    assert _verdict(name, noisy(level, 3, 0.06, n=N), STANDS) == "engine_mismatch"
    assert _verdict(name, noisy(level * (1 + T / N), 3, 0.06, n=N), LEARNS) != "well"
    assert _verdict(name, noisy(4 * level, 3, 0.06, n=N), LEARNS) == "engine_mismatch"


LONG = 500
SINCE = np.clip(np.arange(LONG) - 150, 0, None) / 350


@pytest.mark.parametrize(("step_nats", "verdict"), [(6e-4, "engine_mismatch"), (2e-5, "missed_weight_sync")])
def test_a_gap_that_grows_by_less_than_the_policy_moves_is_not_of_engines_that_stand(
    step_nats: float, verdict: str
) -> None:
    """In 350 steps to 2.4 times, 0.02 nats: engines with the weights of the start would be 0.2 nats away in the first
    run, and are 0.007 in the second."""
    apart = 1 + 1.4 * SINCE
    gap = {
        DIFF: noisy(0.008 * apart, 3, n=LONG),
        KL: noisy(0.004 * apart**2, 4, 0.08, n=LONG),
        PEARSON: 1 - 0.005 * apart**2,
        "actor/ppo_kl": step_nats * (1 + np.random.default_rng(5).normal(0, 1, LONG)),
    }
    assert diagnose(run_of(gap, n=LONG)).verdict == verdict
