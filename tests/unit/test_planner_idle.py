"""One definition of an idle GPU: the closed forms and the simulation count the same seconds."""

from __future__ import annotations

import pytest

from rollbook.ledger.workload import MODES, Mode
from rollbook.planner.candidate import Candidate, rollout_s
from rollbook.planner.options import PlanOptions
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Search
from rollbook.planner.sensitivity import slower_compute
from rollbook.planner.simulate import simulate
from rollbook.planner.waterfall import BETWEEN, waterfall


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


@pytest.mark.parametrize(
    ("mode", "assume"),
    [*((mode, "default") for mode in MODES), ("separate_async", "paper"), ("separate_async", "rollbook")],
)
def test_losses_are_whole_and_name_the_loop_and_the_bound_for_what_they_are(mode: Mode, assume: str) -> None:
    """A small job: 10 s between the stages of every step are no waiting of one side for the other."""
    search, found = candidate(mode, model="Qwen3-0.6B", prompts="16", max_staleness=1, assume=assume)
    account = found.account
    losses = waterfall(account, search.request.cluster)
    fracs = {loss.loss: loss.frac for loss in losses}
    assert sum(fracs.values()) + account.mfu_frac == pytest.approx(1.0)
    total_s = account.seconds.total
    assert fracs.get(BETWEEN, 0.0) == pytest.approx(account.seconds.other / total_s)
    assert (BETWEEN in fracs) == (assume != "paper")
    assert fracs.get("bound", 0.0) == pytest.approx(account.bound_s / total_s)
    # A publication beside which both sides go on holds up nobody.
    sync_s = 0.0 if assume == "paper" else account.seconds.sync
    assert fracs.get("sync", 0.0) == pytest.approx(sync_s / total_s)
    if mode in ("sync", "colocate_async"):
        assert "waiting" not in fracs  # no side waits, and TP 1 leaves no GPU over


def test_a_bound_that_binds_is_a_loss_of_its_own() -> None:
    search, found = candidate("colocate_async", max_staleness=1, prompts="16", max_response_tokens="16k")
    (bound,) = [loss for loss in waterfall(found.account, search.request.cluster) if loss.loss == "bound"]
    assert bound.frac == pytest.approx(found.account.bound_s / found.step_s) and bound.frac > 0.05


@pytest.mark.parametrize("num_rollout_gpus", [12, 14, 16])
def test_engines_that_judge_keep_their_pace_under_a_bound(num_rollout_gpus: int) -> None:
    """Training takes longer than decoding and no longer than decoding and judging; slower, it shortens nothing. (Slower
    still, it can: rollouts then overlap otherwise with the bound, in the simulation too.)"""
    options = {"reward": "generative", "reward_tokens": "2k", "max_staleness": 1, "rollout_tp": 1}
    search, _ = candidate("separate_async", **options)

    def at(speed: float) -> Candidate:
        slower = Search(slower_compute(search.request, speed), layouts=search.layouts)
        return slower.candidate("separate_async", num_rollout_gpus, 32 - num_rollout_gpus)

    steps = []
    as_it_is = at(1.0).account
    worked_s = rollout_s(as_it_is.rollout, "separate_async")
    for share in (0.7, 0.85, 0.99):
        account = at(as_it_is.train.total_s / (share * worked_s)).account
        train_s, seconds = account.train.total_s, account.seconds
        assert worked_s - seconds.reward < train_s < worked_s
        assert seconds.total - seconds.sync - seconds.other >= worked_s - 1e-6
        steps.append(seconds.total)
    assert steps == sorted(steps)


@pytest.mark.parametrize(("mode", "split"), [("separate_async", (14, 18)), ("colocate_async", (32, 32))])
def test_a_bound_lets_responses_feel_the_judging_as_the_simulation_does(
    mode: Mode, split: tuple[int, int]
) -> None:
    options = {"reward": "generative", "reward_tokens": "512", "max_staleness": 1, "rollout_tp": 1}
    search, _ = candidate(mode, **options)
    found = search.candidate(mode, *split)
    assert found.account.bound_s + found.account.seconds.reward > 0.1 * found.step_s
    assert simulate(scenario_of(search.request, found)).step_s == pytest.approx(found.step_s, rel=0.08)


@pytest.mark.parametrize("reward", ["rule", "generative"])
@pytest.mark.parametrize("num_rollout_gpus", [14, 16, 18])
def test_a_trainer_that_all_wait_for_spreads_the_batches_that_it_takes(
    num_rollout_gpus: int, reward: str
) -> None:
    """Where training becomes the longer side, batches no longer bunch: the step is the trainer's, not a crowd's."""
    search, _ = candidate("separate_async", reward=reward, reward_tokens="256", max_staleness=1)
    found = search.candidate("separate_async", num_rollout_gpus, 32 - num_rollout_gpus)
    long = simulate(scenario_of(search.request, found, num_steps=24)).step_s
    assert found.step_s == pytest.approx(long, rel=0.08)
