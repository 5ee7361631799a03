"""The gap's quantiles without versions or ages: a part of the tokens that moves away with the updates is of some
replicas, all that move are of every engine, and a tail that jumps or is of few tokens is of neither."""

from __future__ import annotations

import numpy as np
import pytest

from diagnose_runs import DIFF, KL, PEARSON, Array, noisy, run_of
from rollbook.diagnose.tree import diagnose

N = 160
T = np.arange(N, dtype=np.float64)
SINCE = np.clip(T - 60, 0, None)
FRESH = 0.009


def _quantiles(
    old: Array, share: float, *, name: str = "training/logprob_gap/", last: bool = True
) -> dict[str, Array]:
    """Of tokens of which a share has a gap `old` times as wide, both spread exponentially."""
    x = np.linspace(0.0, 60.0, 24_001)
    out = {name + "mean": noisy(FRESH * (1 - share + share * old), 1, n=N)}
    for i, q in enumerate((50, 95, 99)):
        if q == 99 and not last:
            continue
        level = [
            float(x[np.searchsorted(1 - (1 - share) * np.exp(-x) - share * np.exp(-x / times), q / 100)])
            for times in old
        ]
        out[f"{name}p{q}"] = noisy(FRESH * np.array(level), 2 + i, 0.03, n=N)
    return out


def _rules(changed: dict[str, Array]) -> tuple[str, int | None]:
    without = {name: np.full(N, np.nan) for name in (DIFF, KL, PEARSON)}
    diagnosis = diagnose(run_of(without | changed, n=N))
    return diagnosis.verdict, diagnosis.findings[0].step if diagnosis.findings else None


@pytest.mark.parametrize("share", [0.125, 0.25, 1 / 3])
@pytest.mark.parametrize("name", ["training/logprob_gap/", "logprob_gap/", "actor/log_prob_gap_"])
def test_a_part_of_the_tokens_that_moves_away_is_of_some_replicas(share: float, name: str) -> None:
    verdict, step = _rules(_quantiles(1 + 0.06 * SINCE, share, name=name))
    assert verdict == "version_drift"
    assert step is not None and 55 <= step <= 80


def test_two_quantiles_are_enough() -> None:
    assert _rules(_quantiles(1 + 0.06 * SINCE, 0.25, last=False))[0] == "version_drift"


def test_tokens_that_all_move_away_are_of_every_engine() -> None:
    assert _rules(_quantiles(1 + 0.06 * SINCE, 1.0))[0] == "missed_weight_sync"


@pytest.mark.parametrize("wobble", [0.0, 0.25])
def test_a_gap_that_stands_or_wobbles_is_well(wobble: float) -> None:
    assert _rules(_quantiles(1 + wobble * np.sin(T / 7), 0.25))[0] == "well"


def test_a_part_that_is_off_at_once_and_stays_is_numerics() -> None:
    assert _rules(_quantiles(np.where(T >= 60, 6.0, 1.0), 0.25))[0] != "version_drift"


def test_a_tail_of_few_tokens_is_no_replica() -> None:
    tail = _quantiles(np.ones(N), 0.25)
    tail["training/logprob_gap/p99"] = tail["training/logprob_gap/p99"] * (1 + 0.05 * SINCE)
    assert _rules(tail)[0] != "version_drift"


def test_samples_that_are_older_explain_what_is_above() -> None:
    age = {"training/off_policy/trajectory_staleness/mean": noisy(np.where(T >= 60, 3.0, 1.0), 9, 0.05, n=N)}
    assert _rules(_quantiles(1 + np.clip(SINCE / 10, 0, 2), 0.25) | age)[0] != "version_drift"
