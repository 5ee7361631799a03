"""Consoles that print three decimals: what can still be told of a small gap, and what must not be made up."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, noisy, run_of
from rollbook.diagnose.changes import spearman
from rollbook.diagnose.signs.gap import gap_of
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 120
SINCE = np.clip(np.arange(N) - 60.0, 0, None)


def _far(size: float) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """A gap of 0.0022 that grows to `size` times as much; its KL is printed as 0.000 until then."""
    amplitude = np.sqrt(1 + (size * SINCE / 60) ** 2)
    return {
        DIFF: noisy(0.0022 * amplitude, 2, 0.03),
        KL: noisy(0.0003 * amplitude**2, 3, 0.05),
        PEARSON: 1 - noisy(0.0006 * amplitude**2, 4, 0.05),
        "actor/ppo_kl": noisy(5e-5, 6, 0.1),
    }


def test_a_missed_sync_is_seen_in_steps_of_the_last_decimal() -> None:
    """0.002 grows to 0.009, and the KL from 0.000 to 0.005: the metric that does not stand at its last digit tells."""
    run = run_of(_far(4), decimals=3)
    assert diagnose(run).verdict == "missed_weight_sync"
    found = gap_of(View.of(run))
    assert found is not None
    assert found.metrics == (DIFF,)


@pytest.mark.parametrize("level", [0.0005, 0.0015, 0.0025, 0.0035])
def test_a_gap_that_flickers_between_two_last_digits_does_not_move(level: float) -> None:
    """Levels in the middle of two printed values, for good, and one that drifts by less than a digit."""
    drifts = noisy(level * (1 + 0.0004 / level * SINCE / 60), 2, 0.05)
    run = run_of({DIFF: drifts, KL: noisy(0.0003, 3, 0.3)}, decimals=3)
    assert diagnose(run).verdict == "well"


def test_ties_have_no_order() -> None:
    """A step KL that prints as 0.000 all through goes up with nothing."""
    rises = np.arange(40.0)
    assert spearman(np.zeros(40), rises) == 0.0
    assert abs(spearman(np.where(rises == 20, 1.0, 0.0), rises)) < 0.05


def test_a_gap_that_is_back_for_the_last_four_steps_has_ended() -> None:
    """Syncs were missed from step 61 to 117; a whole one came then."""
    back = np.where(np.arange(N) >= 116, 0.0, SINCE)
    amplitude = np.sqrt(1 + (5 * back / 60) ** 2)
    found = diagnose(
        run_of({DIFF: noisy(0.006 * amplitude, 2), KL: noisy(0.001 * amplitude**2, 3, 0.1)})
    ).findings[0]
    assert found.rule == "missed_weight_sync"
    assert found.until_step == 117


def test_a_divergence_that_is_printed_as_zero_for_long_flickers_later() -> None:
    """0.0002 in its first five hundred steps, 0.0004 to 0.0005 later: a last digit now and then, and no rise."""
    n = 700
    kl = noisy(np.where(np.arange(n) < 500, 0.0002, 0.00047), 3, 0.1, n=n)
    without = {DIFF: np.full(n, np.nan), PEARSON: np.full(n, np.nan)}
    late = {KL: kl, "rollout_corr/k3_kl": np.where(np.arange(n) >= 690, 0.0009, kl)}
    run = run_of(late | without, n=n, decimals=3)
    assert View.of(run).resolution(KL) == 0.001
    assert diagnose(run).verdict != "engine_mismatch"
