"""Where whole steps are all that is timed, what comes by a period is a checkpoint or an evaluation, and no hang."""

from __future__ import annotations

import numpy as np
import pytest
from tests.diagnose_runs import Array, noisy, run_of

from rollbook.diagnose.signs.periods import of_a_period
from rollbook.diagnose.tree import diagnose

N = 200
T = np.arange(N)
STAGES = ("timing_s/gen", "timing_s/update_actor", "timing_s/old_log_prob", "timing_s/update_weights")
IRREGULAR = np.isin(T, (61, 74, 78, 93, 112, 131, 148, 166, 187))


def _verdict(over_s: Array) -> tuple[str, int | None]:
    values = {stage: np.full(N, np.nan) for stage in STAGES}
    found = diagnose(run_of(values | {"timing_s/step": noisy(200.0, 14, 0.08, n=N) + over_s}, n=N))
    return found.verdict, found.findings[0].step if found.findings else None


def _saves(period: int, phase: int, missed: tuple[int, ...] = ()) -> Array:
    """Minutes at each step of a phase, longer in every second of them; some steps lose nothing."""
    saves = (period - 1 - phase == T % period) & ~np.isin(T, missed)
    return np.asarray(noisy(180.0, 30, 0.15, n=N) * saves + 250.0 * (saves & (T // period % 2 == 0)))


@pytest.mark.parametrize("hiccups", [(), (47, 122), (33, 90, 158)], ids=len)
@pytest.mark.parametrize(
    ("period", "phase", "missed"),
    [(3, 0, ()), (5, 0, (94,)), (5, 2, (12, 57)), (20, 10, (129,)), (25, 20, (29, 104))],
)
def test_steps_that_are_long_by_a_period_save_or_validate(
    period: int, phase: int, missed: tuple[int, ...], hiccups: tuple[int, ...]
) -> None:
    assert _verdict(_saves(period, phase, missed) + 300.0 * np.isin(T, hiccups))[0] == "well"


def test_steps_that_are_long_at_no_period_stall_though_others_save() -> None:
    stalls = noisy(400.0, 31, 0.4, n=N) * IRREGULAR
    assert _verdict(stalls) == ("collective_hang", 62)
    verdict, step = _verdict(stalls + _saves(20, 10))
    assert verdict == "collective_hang"
    assert step is not None
    assert 62 <= step <= 75


def test_whole_steps_that_take_half_as_long_again_are_hiccups() -> None:
    """Ten of them, at no period, and minutes each: many a thing takes them, and the run goes on."""
    assert _verdict(noisy(130.0, 31, 0.15, n=N) * IRREGULAR)[0] == "well"


def test_what_comes_by_a_period_only_later_is_no_schedule() -> None:
    assert _verdict(400.0 * ((T >= 80) & (T % 7 == 0)))[0] == "collective_hang"


@pytest.mark.parametrize("seed", range(20))
def test_no_period_is_found_by_chance(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for share in (0.03, 0.1, 0.3):
        assert not of_a_period(rng.random(N) < share, T.astype(np.float64)).any()


def test_a_log_of_every_tenth_step_has_no_period_of_ten() -> None:
    """Every row of it is at one phase of ten, and says nothing of when."""
    steps = 10.0 * np.arange(1, N + 1)
    assert not of_a_period(IRREGULAR, steps).any()
    assert np.flatnonzero(of_a_period(T % 5 == 4, steps)).tolist() == list(range(4, N, 5))
