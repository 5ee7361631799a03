"""The search, the choice, the waterfall and what a plan says when it cannot be made."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollbook.errors import ConfigError, PlanError
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.workload import AgentWork, Workload
from rollbook.planner.decoding import decode_step_s
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.publication import choose_publication
from rollbook.planner.request import PlanRequest, choice_of, split_of
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Search
from rollbook.planner.sensitivity import sensitivity
from rollbook.planner.simulate import simulate
from rollbook.planner.splits import node_unit
from rollbook.planner.staleness import least_step_s, within_bound
from rollbook.planner.waterfall import waterfall
from rollbook.planner.words import seconds


def request(
    model: str = "Qwen3-8B",
    num_gpus: int = 32,
    *,
    gpu: str = "H100",
    assume: str = "default",
    work: dict[str, Any] | None = None,
    **changes: Any,
) -> PlanRequest:
    values: dict[str, Any] = {
        "num_prompts": 256, "group_size": 8, "prompt_tokens": 512, "response_tokens": 2048,
        "max_response_tokens": 8192,
    }  # fmt: skip
    return PlanRequest(
        model=load_model(model),
        workload=Workload(**(values | (work or {}))),
        cluster=Cluster(accelerator=load_accelerator(gpu), num_gpus=num_gpus),
        assumptions=load_assumptions(assume),
        **changes,
    )


@pytest.mark.parametrize("assume", ["paper", "default"])
@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-30B-A3B"])
def test_losses_and_mfu_add_up_to_the_whole_peak(assume: str, model: str) -> None:
    r = request(model, assume=assume, work={"algorithm": "ppo", "reward": "model"})
    for candidate in Search(r).run()[:12]:
        losses = waterfall(candidate.account, r.cluster)
        total = candidate.account.mfu_frac + sum(loss.frac for loss in losses)
        assert total == pytest.approx(1.0, abs=1e-6)
        assert losses == sorted(losses, key=lambda loss: -loss.frac)


def test_a_decode_step_above_the_peak_is_told_and_loses_nothing() -> None:
    """The paper account reads memory only: 1,024 short sequences on one GPU would compute above its peak."""
    work = {"num_prompts": 1024, "group_size": 16, "prompt_tokens": 32, "response_tokens": 64,
            "max_response_tokens": 64}  # fmt: skip
    plan = make_plan(request("Gemma-3-1B", 1, gpu="H20-141GB", assume="paper", work=work), is_brief=True)
    assert any("decode computes above the peak" in note for note in plan.warnings)
    assert all(loss.frac >= 0 for loss in plan.base_waterfall)
    total = sum(loss.frac for loss in plan.base_waterfall) + plan.base.account.mfu_frac
    assert total == pytest.approx(1.0)


def test_ranking_puts_what_fits_first_and_fast_before_slow() -> None:
    found = Search(request()).run()
    fitting = [c.step_s for c in found if c.fits]
    assert fitting == sorted(fitting)
    assert {c.mode for c in found} == {"sync", "colocate_async", "separate_sync", "separate_async"}


def test_separated_sides_are_whole_nodes() -> None:
    for candidate in Search(request(num_gpus=64)).run():
        if candidate.fits and candidate.mode.startswith("separate"):
            assert candidate.split[0] % 8 == 0 and sum(candidate.split) == 64


def test_inside_one_node_sides_are_single_gpus() -> None:
    assert node_unit(request(num_gpus=8)) == 1
    splits = {c.split for c in Search(request(num_gpus=8)).run() if c.mode == "separate_async"}
    assert (3, 5) in splits


def test_a_large_cluster_searches_around_the_optimum_instead_of_everywhere() -> None:
    r = request("Qwen3-32B", 4096, work={"num_prompts": 4096, "group_size": 16})
    search = Search(r)
    found = search.run()
    optimum = search.time_optimal_rollout_gpus()
    assert optimum is not None
    assert len(found) < 160
    assert any(abs(c.split[0] - optimum) <= 8 and c.fits for c in found if c.mode == "separate_async")


def test_on_policy_stands_when_asynchrony_gains_too_little() -> None:
    eager = make_plan(request(min_async_gain_frac=0.0), is_brief=True).require_chosen()
    reluctant = make_plan(request(min_async_gain_frac=0.9), is_brief=True)
    assert not eager.is_on_policy
    assert reluctant.require_chosen().is_on_policy
    assert "less than the 90.0 %" in reluctant.choice_because


def test_a_bound_of_zero_stays_on_policy() -> None:
    plan = make_plan(request(max_staleness_steps=0), is_brief=True)
    assert plan.require_chosen().is_on_policy and "bound is 0" in plan.choice_because


@pytest.mark.parametrize("bound", [1, 2, 4])
@pytest.mark.parametrize(
    ("model", "num_gpus", "rollout"), [("Qwen3-8B", 32, 8), ("Qwen3-32B", 64, 16), ("Qwen3-32B", 64, 32)]
)
def test_the_step_under_a_staleness_bound_agrees_with_the_simulator(
    model: str, num_gpus: int, rollout: int, bound: int
) -> None:
    """Both asynchronous modes; `bench/planner.py` compares many more."""
    r = request(
        model,
        num_gpus,
        max_staleness_steps=bound,
        work={"num_prompts": 64, "response_tokens": 4096, "max_response_tokens": 32768},
    )
    search = Search(r)
    for candidate in (
        search.candidate("separate_async", rollout, num_gpus - rollout),
        search.candidate("colocate_async", num_gpus, num_gpus),
    ):
        simulated = simulate(scenario_of(r, candidate))
        assert candidate.step_s == pytest.approx(simulated.step_s, rel=0.1)


def test_a_wider_staleness_bound_never_slows_the_step() -> None:
    work = {"num_prompts": 32, "response_tokens": 4096, "max_response_tokens": 32768}
    steps = [
        Search(request(max_staleness_steps=bound, work=work)).candidate("separate_async", 8, 24).step_s
        for bound in (1, 2, 4, 8)
    ]
    assert steps == sorted(steps, reverse=True)
    assert steps[0] > 1.2 * steps[-1]


def test_a_batch_has_bound_plus_one_steps_from_admission_to_the_end_of_its_training() -> None:
    """(bound + 1) (T - what stands between the sides' work) >= G + t: equal where batches are evenly spread, more where
    they bunch."""
    r = request(work={"num_prompts": 32, "response_tokens": 4096, "max_response_tokens": 32768})
    search = Search(r)
    layout, train = search.layouts[0], search.trainers.best(24)
    open_ended = search._joined(
        "separate_async", search.engines.of(8, "separate_async", layout), layout, train
    )
    account = open_ended.account
    between_s = account.seconds.sync + account.seconds.other
    evenly_s = least_step_s(r, account, layout) - between_s
    bunched = within_bound(r, account, layout)
    alone_s = r.workload.lengths().expected_max(r.workload.num_sequences) * decode_step_s(r, layout)(1, 4096)
    assert alone_s + account.train.total_s < 2 * evenly_s
    assert evenly_s < bunched.seconds.total - between_s < 1.3 * evenly_s


def test_simulated_sync_steps_agree_with_the_ledger() -> None:
    for model, num_gpus in (("Qwen3-8B", 16), ("Qwen3-32B", 64)):
        r = request(model, num_gpus)
        candidate = Search(r).candidate("sync", num_gpus, num_gpus)
        assert simulate(scenario_of(r, candidate, num_steps=6)).step_s == pytest.approx(
            candidate.step_s, rel=0.08
        )


def test_a_plan_that_fits_nowhere_names_the_smallest_change() -> None:
    """671 B parameters at 16 bytes on 64 GPUs of 80 GB; with the optimizer on the host it would just fit."""
    plan = make_plan(request("DeepSeek-V3", 64, offload="none"))
    assert plan.chosen is None
    assert not any(c.fits for c in plan.candidates)
    assert plan.smallest_changes[0] == "keep the optimizer state in host memory (--offload auto)"
    assert any("GPUs instead of 64" in change for change in plan.smallest_changes)
    with pytest.raises(PlanError, match="no topology fits"):
        plan.require_chosen()
    as_json = plan.as_json()
    assert as_json["recommendation"]["mode"] is None  # type: ignore[index]
    assert "Nothing fits" in plan.derivation[4].because


@pytest.mark.parametrize("assume", ["default", "paper"])
@pytest.mark.parametrize("num_gpus", [8, 40, 64, 256])
def test_every_part_counts_the_training_state_alike(assume: str, num_gpus: int) -> None:
    """What step 2 says is needed at least is never more than what stands, nor than a change that would fit."""
    plan = make_plan(request("DeepSeek-V3", num_gpus, assume=assume), is_brief=True)
    outputs = plan.derivation[1].outputs
    if plan.chosen is not None:
        assert outputs["min_train_gpus"] <= plan.chosen.split[1]  # type: ignore[operator]
        assert bool(outputs["host_state_bytes"]) == plan.chosen.train.is_offloaded
        told = plan.derivation[1].because
        assert ("in host memory" in told) == plan.chosen.train.is_offloaded
        return
    enough = next(change for change in plan.smallest_changes if "GPUs instead" in change)
    is_fewer = int(enough.split()[1]) < outputs["min_train_gpus"]  # type: ignore[operator]
    assert "in host memory" in enough or not is_fewer
    assert "TP" not in plan.choice_because  # no layout helps where the GPUs are too few


def test_the_paper_account_says_what_it_takes_a_critic_for() -> None:
    options: dict[str, Any] = {"model": "qwen3-0.6b", "num_gpus": "8", "assume": "paper"}
    told = make_plan(PlanOptions(**options, algorithm="ppo").request(), is_brief=True).derivation[0].because
    assert "2 N of values at the forward MFU and 6 N of training" in told
    assert "16 bytes a parameter cross" in told
    assert "critic" not in make_plan(PlanOptions(**options).request(), is_brief=True).derivation[0].because


def test_the_named_number_of_gpus_is_the_smallest_that_fits() -> None:
    plan = make_plan(request("Qwen3-32B", 4, offload="none", assume="paper"))
    change = next(c for c in plan.smallest_changes if "GPUs instead" in c)
    enough = int(change.split()[1])
    r = request("Qwen3-32B", enough, offload="none", assume="paper")
    assert any(c.fits for c in Search(r).run())
    fewer = request("Qwen3-32B", enough - 1 if enough <= 8 else enough - 8, offload="none", assume="paper")
    assert not any(c.fits for c in Search(fewer).run())


@pytest.mark.parametrize(("num_gpus", "enough"), [(8, 64), (48, 64), (56, 64)])
def test_a_smaller_number_of_gpus_that_fits_is_not_passed_over(num_gpus: int, enough: int) -> None:
    """72, 80 and 88 GPUs divide into no layout that fits: what fits is no matter of more or fewer alone."""
    plan = make_plan(request("DeepSeek-V3", num_gpus), is_brief=True)
    change = next(c for c in plan.smallest_changes if "GPUs instead" in c)
    assert int(change.split()[1]) == enough


def test_where_a_micro_batch_fills_a_gpu_no_number_of_them_is_named() -> None:
    """Of what hardly anything is left for, thousands of GPUs would be enough."""
    because = make_plan(request("DeepSeek-V3", 56), is_brief=True).choice_because
    assert "one micro batch still takes" in because and "it takes about" not in because
    assert "it takes about" in make_plan(request("DeepSeek-V3", 8), is_brief=True).choice_because


@pytest.mark.parametrize(("num_gpus", "offload"), [(1, "auto"), (3, "none")])
def test_a_change_says_what_has_to_be_in_host_memory(num_gpus: int, offload: str) -> None:
    """On three GPUs the optimizer's state alone is not enough."""
    assert not any(c.fits for c in Search(request("Qwen3-32B", 3, offload="optimizer")).run())
    plan = make_plan(request("Qwen3-32B", num_gpus, offload=offload), is_brief=True)
    assert any("all of the training state in host memory" in change for change in plan.smallest_changes)
    assert not any("the optimizer state" in change for change in plan.smallest_changes)


def test_offload_is_used_where_nothing_else_fits() -> None:
    assert not make_plan(request("Qwen3-8B", 8), is_brief=True).require_chosen().train.is_offloaded
    tight = make_plan(request("DeepSeek-V3", 64), is_brief=True).require_chosen()
    assert tight.train.is_offloaded
    assert "host memory" in make_plan(request("DeepSeek-V3", 64), is_brief=True).derivation[4].because


def test_a_step_that_offload_shortens_takes_it_and_tells_what_it_would_be_without() -> None:
    asked = PlanOptions(
        model="Qwen3-32B",
        gpu="H20",
        num_gpus="8",
        response_tokens="8k",
        max_response_tokens="16k",
        length_sigma=1.0,
    )
    plan = make_plan(asked.request(), is_brief=True)
    near = make_plan(replace(asked, offload="none").request(), is_brief=True).require_chosen()
    assert plan.require_chosen().train.offload == "optimizer"
    assert plan.require_chosen().step_s < 0.95 * near.step_s
    told = plan.derivation[4].because
    assert seconds(near.step_s) in told and "in host memory because the step is" in told
    asked_for = make_plan(replace(asked, offload="optimizer").request(), is_brief=True)
    assert "in host memory as was asked for" in asked_for.derivation[4].because


def test_every_size_of_the_front_is_whole_nodes_and_faster_with_more_gpus() -> None:
    sizes = [s for s in make_plan(request(num_gpus=32)).sizes if s.best is not None]
    assert [s.num_gpus for s in sizes] == sorted(s.num_gpus for s in sizes)
    steps = [s.best.step_s for s in sizes if s.best is not None]
    assert steps == sorted(steps, reverse=True)


def test_longer_responses_cost_more_and_slower_compute_costs_at_most_its_share() -> None:
    r = request()
    plan = make_plan(r, is_brief=True)
    chosen = plan.require_chosen()
    longer, wider, slower = sensitivity(r, chosen, [chosen.rollout_layout])
    assert longer.change_frac is not None and longer.change_frac > 0.35
    assert wider.change_frac is not None and 0 <= wider.change_frac < longer.change_frac
    assert slower.change_frac is not None and 0 < slower.change_frac < 1 / 0.9 - 1 + 0.02


def test_longer_responses_stop_at_the_models_context() -> None:
    work = {"response_tokens": 30000, "max_response_tokens": 40000, "num_prompts": 64}
    r = request("Qwen3-8B", 64, work=work)  # context of 40,960
    plan = make_plan(r, is_brief=True)
    shifts = sensitivity(r, plan.require_chosen(), [])
    assert shifts[0].change.startswith("responses 1.5")


def test_agents_that_wait_for_environments_take_longer() -> None:
    alone = make_plan(request(), is_brief=True).base.step_s
    agent = AgentWork(num_turns=5, observation_tokens=200, env_s=20.0)
    assert make_plan(request(work={"agent": agent}), is_brief=True).base.step_s > alone + 60


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"work": {"response_tokens": 8192, "max_response_tokens": 65536}}, "beyond the 40960 of Qwen3-8B"),
        ({"work": {"group_size": 1}}, "--group-size is 1"),
        ({"num_gpus": 12}, "not whole nodes of 8"),
        ({"rollout_tp": 5}, "does not divide 32 GPUs"),
        ({"num_gpus": 24, "rollout_tp": 3}, "32 attention heads"),
        ({"split": (20, 20)}, "--split is 20:20"),
        ({"max_staleness_steps": -1}, "staleness is -1"),
    ],
)
def test_a_question_that_cannot_be_meant_is_an_error_with_a_remedy(
    change: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError, match=words) as caught:
        make_plan(request(**change))
    assert len(caught.value.remedy) > 10


@pytest.mark.parametrize(("mean", "is_told"), [(512, False), (30_000, True)])
def test_a_limit_within_the_context_is_not_below_the_mean_unsaid(mean: int, is_told: bool) -> None:
    asked = {"work": {"prompt_tokens": 16_384, "response_tokens": mean, "max_response_tokens": 40_000}}
    with pytest.raises(PlanError, match="beyond the 40960") as caught:
        make_plan(request(**asked))
    assert "--max-response-tokens to 24576" in caught.value.remedy
    assert ("--response-tokens below" in caught.value.remedy) == is_told


@pytest.mark.parametrize(
    ("num_gpus", "rollout_tp", "remedy"),
    [
        (32, 3, "use --rollout-tp 2 or 4"),
        (8, 16, "use --rollout-tp 4 or 8, or --num-gpus 16"),
        (40, 16, "use --rollout-tp 4 or 8, or --num-gpus 32"),
    ],
)
def test_what_a_degree_that_does_not_fit_is_told_to_be_fits(
    num_gpus: int, rollout_tp: int, remedy: str
) -> None:
    """Degrees divide the heads too, 32 of them, and numbers of GPUs are whole nodes."""
    with pytest.raises(PlanError) as caught:
        make_plan(request(num_gpus=num_gpus, rollout_tp=rollout_tp))
    assert caught.value.remedy == remedy


def test_a_group_of_one_is_fine_with_a_critic() -> None:
    assert make_plan(request(work={"group_size": 1, "algorithm": "ppo"}), is_brief=True).chosen is not None


def test_a_scaled_rope_may_be_declared() -> None:
    work = {"response_tokens": 8192, "max_response_tokens": 65536, "num_prompts": 32}
    assert make_plan(request(work=work, max_context_tokens=131072), is_brief=True).candidates


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        load_model("Qwen3-8b-typo")
    with pytest.raises(PlanError, match="did you mean 'float8'"):
        choice_of("--rollout-dtype", "float9", "bfloat16", "float8", "auto")
    with pytest.raises(PlanError, match="40:24"):
        split_of("40-24")


def test_a_plan_that_needs_offload_keeps_it_in_its_what_ifs() -> None:
    """Qwen3-32B on 8 H100 fits with optimizer state on the host only: other sizes and what-ifs are asked likewise."""
    plan = make_plan(request("Qwen3-32B", 8))
    chosen = plan.require_chosen()
    assert chosen.train.is_offloaded
    own = next(size for size in plan.sizes if size.num_gpus == 8)
    assert own.best is not None and own.best.step_s == pytest.approx(chosen.step_s)
    slower = plan.shifts[-1]
    assert slower.step_s is not None and slower.step_s > chosen.step_s
    assert plan.publication is not None
    assert plan.publication.seconds == pytest.approx(chosen.account.seconds.sync)


@pytest.mark.parametrize(
    ("name", "num_gpus", "mode"),
    [("Qwen3-30B-A3B", 32, "sync"), ("Qwen3-30B-A3B", 64, "separate_async"), ("Qwen3-32B", 64, "sync")],
)
def test_the_step_and_the_publication_beside_it_take_the_same_seconds(
    name: str, num_gpus: int, mode: str
) -> None:
    """Each stage of a trainer's pipeline sends what it holds, in the account of the step and in the section."""
    work = {"response_tokens": 8192, "max_response_tokens": 32768}
    asked = request(name, num_gpus, work=work)
    of_megatron = replace(asked.assumptions, stack="megatron", sources={"stack": "asked for"})
    plan = make_plan(replace(asked, assumptions=of_megatron), is_brief=True)
    fitting = [c for c in plan.candidates if c.fits and c.mode == mode]
    assert any(c.train.layout.pp_size > 1 for c in fitting)
    for found in fitting:
        published = choose_publication(plan.request, found)
        assert published.seconds == pytest.approx(found.account.seconds.sync)


@pytest.mark.parametrize("reward", ["rule", "model", "generative"])
def test_printed_stages_and_losses_add_up_with_any_reward(reward: str) -> None:
    """A generative reward model works in the engines: its seconds and FLOPs are a stage of their own."""
    plan = make_plan(request(work={"reward": reward, "algorithm": "ppo"}), is_brief=True)
    s, losses = plan.base.account.seconds, {loss.loss: loss for loss in plan.base_waterfall}
    assert ("reward" in losses) == (reward == "generative") == (s.reward > 0)
    stages = s.generate_throughput + s.generate_tail + s.prefill + s.forward + s.train
    assert stages + s.switch + s.sync + s.env + s.reward + s.other == pytest.approx(s.total)
    assert sum(loss.frac for loss in plan.base_waterfall) + plan.base.account.mfu_frac == pytest.approx(1)
    assert all(loss.frac >= 0 for loss in plan.base_waterfall)


def test_responses_of_one_length_have_no_tail_to_explain() -> None:
    """Four groups of equal responses, all in their slots at once, end together."""
    asked: dict[str, Any] = {"model": "qwen3-0.6b", "num_gpus": "1", "prompts": "4", "group_size": "4"}
    plan = make_plan(
        PlanOptions(**asked, response_tokens="256", max_response_tokens="256", length_sigma=0).request(),
        is_brief=True,
    )
    assert plan.base.account.seconds.generate_tail == 0
    assert "no tail" in plan.derivation[2].because and "hold all replicas" not in plan.derivation[2].because
