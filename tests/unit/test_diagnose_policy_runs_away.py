"""A learning rate that is too high, met while it still warms up."""

from __future__ import annotations

import numpy as np

from diagnose_runs import DIFF, KL, noisy, run_of
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.tree import diagnose
from rollbook.diagnose.view import View

N = 42
T = np.arange(N, dtype=np.float64)
LR = 2e-5 * np.minimum((T + 1) / 16, 1)


def _runs_away(since: int = 9, over: int = 6) -> dict[str, np.ndarray[tuple[int], np.dtype[np.float64]]]:
    up = np.clip((T - since) / over, 0, 1)
    return {
        "actor/lr": LR,
        "actor/ppo_kl": noisy(3e-4 * (LR / LR[-1]) ** 2 * (1 + 80 * up), 6, 0.3, n=N),
        "actor/pg_clipfrac": noisy(8e-4 * (LR / LR[-1]) * (1 + 8 * up), 7, 0.1, n=N),
        "actor/grad_norm": noisy(0.8 * (1 + 4 * up), 4, 0.1, n=N),
        "actor/entropy": noisy(0.6 * (1 + 2 * up), 5, 0.03, n=N),
        "critic/score/mean": 0.65 - 0.4 * up + np.random.default_rng(1).normal(0, 0.01, N),
    }


def test_a_policy_that_runs_away_in_the_warm_up_is_no_restart_and_no_mismatch() -> None:
    """The gap follows, to twice what it was."""
    up = np.clip((T - 11) / 6, 0, 1)
    gap = {DIFF: noisy(0.0045 * (1 + up), 2, n=N), KL: noisy(0.001 * (1 + up) ** 2, 3, 0.1, n=N)}
    diagnosis = diagnose(run_of(_runs_away() | gap, n=N))
    assert diagnosis.verdict == "well"
    assert [state.name for state in diagnosis.states] == ["learning_rate_too_high"]


def test_movement_that_only_warms_up_with_the_learning_rate_is_no_blow_up() -> None:
    """Step KL with the square of the rate, clip fraction with the rate: both grow many times in sixteen steps."""
    warms = {name: series for name, series in _runs_away(since=1000).items() if name != "critic/score/mean"}
    assert policy_of(View.of(run_of(warms, n=N))).blow_up_idx is None


def test_older_weights_are_a_restart_though_the_policy_soon_learns_again() -> None:
    """At step 19 of 40 the entropy is a fifth higher and the reward as low as at step 8, and both are back in ten
    steps; nothing else marks the restart. The same over six steps is a policy that runs away."""
    n = 40
    steps = np.arange(n, dtype=np.float64)
    for over, verdict in ((1, "discontinuity_after_resume"), (6, "well")):
        came = np.clip((steps - 17) / over, 0, 1) * np.exp(-np.clip(steps - 18, 0, None) / 8)
        lost = {
            "critic/score/mean": 0.5
            + 0.25 * steps / n
            - 0.2 * came
            + np.random.default_rng(1).normal(0, 0.01, n),
            "actor/entropy": noisy((0.8 - 0.1 * steps / n) * (1 + 0.22 * came), 5, 0.01, n=n),
        }
        assert diagnose(run_of(lost, n=n)).verdict == verdict


def test_ratios_of_single_tokens_that_explode_are_a_state_and_no_alarm() -> None:
    """In four of 42 steps the loss is a thousand times what it is in the others; a sum over tokens is large in all."""
    leaps = np.isin(T, (5, 12, 26, 33))
    loss = np.where(leaps, -20.0, 0.01)
    norms = noisy(np.where(leaps, 900.0, 0.5), 4, 0.1, n=N)
    diagnosis = diagnose(run_of({"actor/pg_loss": loss, "actor/grad_norm": norms}, n=N))
    assert diagnosis.verdict == "well"
    state = next(state for state in diagnosis.states if state.name == "ratios_explode")
    assert (state.step, [item.metric for item in state.evidence]) == (6, ["actor/pg_loss", "actor/grad_norm"])
    for other in (np.where(T == 5, -20.0, 0.01), noisy(-20.0, 4, 0.5, n=N)):
        states = diagnose(run_of({"actor/pg_loss": other}, n=N)).states
        assert "ratios_explode" not in {state.name for state in states}
