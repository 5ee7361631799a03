"""One definition of an idle GPU: the closed forms and the simulation count the same seconds."""

from __future__ import annotations

import pytest

from rollbook.ledger.workload import MODES, Mode
from rollbook.planner.options import PlanOptions
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Candidate, Search
from rollbook.planner.simulate import simulate
from rollbook.planner.waterfall import waterfall


def candidate(mode: Mode, **options: object) -> tuple[Search, Candidate]:
    values = {
        "model": "Qwen3-8B", "num_gpus": "32", "prompts": "128", "response_tokens": "2k", "max_response_tokens": "8k",
        "max_staleness": 4,
    } | options  # fmt: skip
    search = Search(PlanOptions(**values).request())  # type: ignore[arg-type]
    split = (16, 16) if mode.startswith("separate") else (32, 32)
    return search, search.candidate(mode, *split)


@pytest.mark.parametrize("mode", MODES)
def test_closed_form_and_simulation_agree_on_idle_shares(mode: Mode) -> None:
    """Within 4 points; hand-overs, publications and replicas that end early are idle in both."""
    search, found = candidate(mode)
    result = simulate(scenario_of(search.request, found))
    closed = found.account.idle_frac
    assert result.rollout_idle_frac == pytest.approx(closed["rollout"], abs=0.04)
    assert result.train_idle_frac == pytest.approx(closed["train"], abs=0.04)


def test_the_losses_name_the_side_that_is_ahead() -> None:
    search, _ = candidate("separate_async")
    for split, ahead in (((24, 8), "engines that are ahead"), ((4, 28), "the training GPUs idle")):
        account = search.candidate("separate_async", *split).account
        (waiting,) = [loss for loss in waterfall(account, search.request.cluster) if loss.loss == "waiting"]
        assert (account.train.total_s > account.seconds.generate_throughput) == ("engines" in ahead)
        assert ahead in waiting.why


def test_shared_gpus_are_idle_together_and_during_hand_overs() -> None:
    search, found = candidate("sync")
    result = simulate(scenario_of(search.request, found))
    assert result.rollout_idle_frac == result.train_idle_frac
    s = found.account.seconds
    assert result.rollout_idle_frac > (s.switch + s.sync + s.other) / s.total
    # What waits for a dependency alone is the bubble: less than all that is idle.
    assert result.bubble_s < result.rollout_idle_frac * result.step_s


def test_gpus_that_no_replica_uses_are_idle_in_a_simulation_too() -> None:
    """TP 4 leaves 2 of 18 rollout GPUs over."""
    search, _ = candidate("separate_async", rollout_tp=4)
    found = search.candidate("separate_async", 18, 14)
    scenario = scenario_of(search.request, found)
    assert scenario.rollout_used_frac == 16 / 18
    result = simulate(scenario)
    assert result.rollout_idle_frac >= 2 / 18
    assert result.rollout_idle_frac == pytest.approx(found.account.idle_frac["rollout"], abs=0.04)


def test_replicas_that_end_early_are_idle_until_the_slowest_has_ended() -> None:
    """One group a replica of lengths that differ: most replicas wait for the one with the longest response."""
    few, many = (
        candidate("separate_sync", prompts=prompts, length_sigma=0.4, rollout_tp=1)[1].account.rollout
        for prompts in ("16", "1024")
    )
    assert few.busy_s / few.generate_s < 0.8 < many.busy_s / many.generate_s <= 1.0


def test_a_generative_judge_takes_its_seconds_in_the_simulation_too() -> None:
    search, found = candidate("separate_sync", reward="generative", reward_tokens="256")
    seconds = found.account.seconds
    assert seconds.reward > 0.05 * seconds.total
    assert simulate(scenario_of(search.request, found)).step_s == pytest.approx(seconds.total, rel=0.05)
