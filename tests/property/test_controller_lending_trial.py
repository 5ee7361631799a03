"""Whether a lending pays is found by trying: a lending that slows the engines costs a bounded share, one that helps is
kept. Seconds are simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.controller.lending_trial import FIRST_HOLD, MAX_HOLD, NUM_PAIRS, LendingTrial, Verdict

ALONE_TOKENS_PER_S = 1000.0


@dataclass
class Simulated:
    """A run whose waits take what their tokens take, with a lending or without.

    Args:
        gain: pace with the lent engine over pace without it, by the number of the wait; below 1 it slows the others.
        cost_s: to bring it up and to take the device back, where a wait alone takes about a second.
        spread: of a wait's seconds, beyond what its tokens explain.
    """

    gain: Callable[[int], float]
    cost_s: float = 0.0
    spread: float = 0.0
    seed: int = 0
    trial: LendingTrial = field(default_factory=LendingTrial)
    lent: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def run(self, num_waits: int) -> Simulated:
        rng = random.Random(self.seed)
        for idx in range(num_waits):
            num_tokens = rng.randint(500, 1500)
            noise = 1 + self.spread * rng.uniform(-1, 1)
            alone_s = num_tokens / ALONE_TOKENS_PER_S * noise
            lends, longest_s = self.trial.lends_next, self.trial.longest_s
            seconds = alone_s
            if lends:
                assert longest_s is not None, "nothing is lent before a wait without it was measured"
                together_s = self.cost_s + alone_s / self.gain(idx)
                seconds = min(together_s, self._cut(longest_s, alone_s, self.gain(idx)))
            self.lent.append(lends)
            self.seconds.append(seconds)
            self.alone_s.append(alone_s)
            if verdict := self.trial.note(num_tokens=num_tokens, seconds=seconds):
                self.verdicts.append(verdict)
        return self

    def _cut(self, longest_s: float, alone_s: float, gain: float) -> float:
        """Ended while the trainer still waits: the rest at the pace of before."""
        done_frac = max(longest_s - self.cost_s, 0.0) * gain / alone_s
        return longest_s + self.cost_s + max(1 - done_frac, 0.0) * alone_s

    @property
    def ratio(self) -> float:
        """Seconds over those of the same run without lending."""
        return sum(self.seconds) / sum(self.alone_s)


@settings(max_examples=200, deadline=None)
@given(
    gain=st.floats(0.05, 1.0),
    cost_s=st.floats(0.0, 0.5),
    spread=st.floats(0.0, 0.2),
    seed=st.integers(0, 1_000_000),
)
def test_a_lending_that_does_not_pay_costs_a_bounded_share(
    gain: float, cost_s: float, spread: float, seed: int
) -> None:
    run = Simulated(lambda _: gain, cost_s, spread, seed).run(400)
    assert run.ratio < 1.10
    if gain + cost_s < 0.8:
        assert not any(verdict.pays for verdict in run.verdicts)
        assert sum(run.lent) < 0.06 * 400


@settings(max_examples=200, deadline=None)
@given(
    gain=st.floats(1.3, 3.0),
    cost_s=st.floats(0.0, 0.05),
    spread=st.floats(0.0, 0.15),
    seed=st.integers(0, 1_000_000),
)
def test_a_lending_that_pays_is_kept(gain: float, cost_s: float, spread: float, seed: int) -> None:
    run = Simulated(lambda _: gain, cost_s, spread, seed).run(400)
    possible = 1 - (1 / gain + cost_s)
    assert 1 - run.ratio > 0.75 * possible
    assert run.verdicts[-1].pays


@pytest.mark.parametrize("gain", [0.5, 2.0])
def test_what_a_comparison_says_is_what_was_measured(gain: float) -> None:
    verdict = Simulated(lambda _: gain).run(2 * (1 + NUM_PAIRS)).verdicts[0]
    assert verdict.pays is (gain > 1)
    assert verdict.alone_tokens_per_s == pytest.approx(ALONE_TOKENS_PER_S)
    assert verdict.num_waits_held == FIRST_HOLD
    if gain > 1:
        assert verdict.lent_tokens_per_s == pytest.approx(gain * ALONE_TOKENS_PER_S)


def test_paces_that_are_far_apart_need_two_lendings_and_close_ones_all() -> None:
    assert sum(Simulated(lambda _: 0.4).run(FIRST_HOLD).lent) == 2
    assert sum(Simulated(lambda _: 0.9).run(FIRST_HOLD).lent) == 1 + NUM_PAIRS


def test_the_first_lending_is_not_counted() -> None:
    """On a GPU it records the graphs of its decode steps."""
    first = Simulated(lambda idx: 0.1 if idx < 2 else 2.0).run(2 * (1 + NUM_PAIRS))
    assert first.lent[:2] == [False, True]
    assert first.verdicts[0].pays and first.verdicts[0].lent_tokens_per_s == pytest.approx(2000.0)


def test_a_lending_that_stops_to_pay_is_ended_and_one_that_begins_to_is_found() -> None:
    stops = Simulated(lambda idx: 1.6 if idx < 100 else 0.6).run(200)
    after = stops.lent[100:]
    assert sum(after) < 12
    begins = Simulated(lambda idx: 0.6 if idx < 100 else 1.6).run(400)
    assert sum(begins.lent[300:]) > 80
    assert [verdict.pays for verdict in begins.verdicts][-1]


def test_work_that_slows_down_is_no_reason_to_stop() -> None:
    """Longer responses lower the pace of both kinds: a few waits without it show that."""

    class Slower(Simulated):
        def run(self, num_waits: int) -> Simulated:
            for idx in range(num_waits):
                alone_s = 1.0 if idx < 60 else 3.0
                lends = self.trial.lends_next
                self.lent.append(lends)
                self.trial.note(num_tokens=1000, seconds=alone_s / 1.5 if lends else alone_s)
            return self

    run = Slower(lambda _: 1.5).run(120)
    assert sum(run.lent[60:]) > 48


def test_comparisons_that_end_as_before_come_ever_more_rarely() -> None:
    for gain, pays in ((0.5, False), (2.0, True)):
        run = Simulated(lambda _, gain=gain: gain).run(2000)  # type: ignore[misc]
        held = [verdict.num_waits_held for verdict in run.verdicts]
        assert held == sorted(held) and held[0] == FIRST_HOLD and held[-1] == MAX_HOLD[pays]
        assert all(later == min(2 * former, MAX_HOLD[pays]) for former, later in itertools.pairwise(held))
