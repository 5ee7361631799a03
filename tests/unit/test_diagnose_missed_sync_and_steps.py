"""A gap that grows beside a policy that moves more, too: whose growth it is."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, noisy, run_of
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 120
SINCE = np.clip(np.arange(N) - 80.0, 0, None)


def _off_policy(steps_kl: float) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    """Engines stand from step 80 on: the gap grows by its floor with every second step. What is sampled so is
    off-policy, so more of it is clipped and the steps' KL grows `steps_kl` times."""
    far = 1 + SINCE / 2
    return {
        DIFF: noisy(0.005 * far, 2, n=N),
        KL: noisy(0.0008 * far**2, 3, 0.1, n=N),
        PEARSON: 1 - noisy(0.0006 * far**2, 16, 0.1, n=N),
        "actor/ppo_kl": noisy(2e-4 * (1 + (steps_kl - 1) * SINCE / SINCE[-1]), 6, 0.2, n=N),
        "actor/pg_clipfrac": noisy(6e-4 * far, 7, 0.1, n=N),
        "actor/grad_norm": noisy(0.2 * (1 + 1.2 * SINCE / SINCE[-1]), 4, 0.1, n=N),
    }


def test_a_gap_that_outgrows_the_distance_of_a_step_is_a_missed_sync_though_steps_grow_too() -> None:
    """Twenty times as far apart, where a step's KL is twelve times what it was: 3.5 times the distance. The clipped
    share, a tail, grows like the gap itself."""
    diagnosis = diagnose(run_of(_off_policy(12.0), n=N))
    assert (diagnosis.verdict, diagnosis.states) == ("missed_weight_sync", ())
    assert abs(diagnosis.findings[0].step - 81) <= 3


def test_a_gap_that_grows_as_the_steps_do_is_the_policys_own() -> None:
    """The same gap, where steps go twenty times as far and the entropy with them: nothing to publish anew."""
    far = 1 + SINCE / 2
    moves = {
        "actor/ppo_kl": noisy(2e-4 * far**2, 6, 0.2, n=N),
        "actor/entropy": noisy(0.4 * far**0.5, 5, 0.02, n=N),
    }
    diagnosis = diagnose(run_of(_off_policy(1.0) | moves, n=N))
    assert "missed_weight_sync" not in [f.rule for f in diagnosis.findings]


def test_the_clipped_share_is_no_distance() -> None:
    """It is the share of a tail: where the step's KL is logged, that tells how much further a step goes."""
    assert policy_of(View.of(run_of(_off_policy(12.0), n=N))).update_ratio < 5


def test_a_slow_ramp_is_dated_from_where_it_leaves_its_floor() -> None:
    """An engine that stands from step 50 on, in a run whose versions differ little: the gap doubles in twenty steps.
    Its bend on a logarithmic scale is seen later than that."""
    far = 1 + np.clip(np.arange(N) - 50.0, 0, None) / 20
    diagnosis = diagnose(
        run_of({DIFF: noisy(0.005 * far, 2, n=N), KL: noisy(8e-4 * far**2, 3, 0.1, n=N)}, n=N)
    )
    assert diagnosis.verdict == "missed_weight_sync"
    assert abs(diagnosis.findings[0].step - 51) <= 4


def test_an_engine_that_never_got_weights_is_dated_from_the_first_steps() -> None:
    far = 1 + np.arange(N) / 12
    diagnosis = diagnose(
        run_of({DIFF: noisy(0.005 * far, 2, n=N), KL: noisy(8e-4 * far**2, 3, 0.1, n=N)}, n=N)
    )
    assert diagnosis.verdict == "missed_weight_sync"
    assert diagnosis.findings[0].step <= 6


@pytest.mark.parametrize(
    ("grows", "verdict"), [("evenly", "missed_weight_sync"), ("ever faster", "engine_mismatch")]
)
def test_a_gap_that_grows_ever_faster_feeds_on_itself(grows: str, verdict: str) -> None:
    """Fifty steps from 0.006 to 0.1: engines that keep their weights part by the policy's steps, which add up to a
    line; what doubles every twelve steps does not. No loss is NaN yet."""
    since = np.clip(np.arange(120) - 69, 0, None)
    apart = 1 + since * 0.3 if grows == "evenly" else 1.057**since
    gap = {DIFF: noisy(0.006 * apart, 2, 0.03), KL: noisy(0.001 * apart**2, 3, 0.06)}
    assert diagnose(run_of(gap)).verdict == verdict
    warms = {"actor/lr": np.clip(np.arange(120) / 119, 0.01, 1) * 1e-6}
    if grows == "ever faster":
        assert diagnose(run_of(gap | warms)).verdict != verdict  # the policy's own steps become larger


def test_a_ramp_of_thousands_of_steps_is_no_step() -> None:
    """Its first forty steps rise by a tenth of what they are: only from far away does it climb, to twelve times."""
    n = 3000
    since = np.clip(np.arange(n) - 1200, 0, None)
    gap = {
        DIFF: noisy(0.006 * (1 + since / 160), 2, 0.05, n=n),
        KL: noisy(0.001 * (1 + since / 160) ** 2, 3, 0.1, n=n),
    }
    finding = diagnose(run_of(gap, n=n)).findings[0]
    assert finding.rule == "missed_weight_sync"
    assert abs(finding.step - 1200) <= 150
