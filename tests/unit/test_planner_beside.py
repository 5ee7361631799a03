"""What a plan says beside the step: checkpoints, adapters, environments, and FLOPs by stage."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from rollbook.cli.main import main
from rollbook.errors import PlanError
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.workload import AgentWork, Workload
from rollbook.planner.beside import beside
from rollbook.planner.emit import emitter
from rollbook.planner.emit_verl import verl_overrides
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.request import PlanRequest
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Search
from rollbook.planner.simulate import simulate

AGENTS = ["--turns", "4", "--observation-tokens", "100", "--env-seconds", "5"]


def output(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `rollbook plan`."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "qwen3-8b", "--num-gpus", "16", *args])
    captured = capsys.readouterr()
    return int(ended.value.code or 0), captured.out, captured.err


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    code, out, err = output(capsys, *args, "--json")
    assert (code, err) == (0, "")
    data: dict[str, Any] = json.loads(out)
    return data


def request(**work: Any) -> PlanRequest:
    values = {
        "num_prompts": 128, "group_size": 8, "prompt_tokens": 512, "response_tokens": 2048,
        "max_response_tokens": 8192,
    }  # fmt: skip
    return PlanRequest(
        model=load_model("Qwen3-8B"),
        workload=Workload(**(values | work)),
        cluster=Cluster(accelerator=load_accelerator("H100"), num_gpus=32),
        assumptions=load_assumptions("default"),
    )


# -- checkpoints


def test_a_checkpoint_is_due_within_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Steps of a tiny workload take seconds: an hour of them is more than a run of 50 steps."""
    tiny = ["--prompts", "8", "--response-tokens", "100", "--max-response-tokens", "200", "--horizon", "50"]
    plan = planned(capsys, *tiny)
    assert plan["checkpoint"]["every_steps"] == 50
    assert "more than the 50 steps of the run" in plan["derivation"][5]["because"]
    long = planned(capsys, "--response-tokens", "8k", "--max-response-tokens", "32k")
    assert long["checkpoint"]["every_steps"] < 200
    assert "steps of the run" not in long["derivation"][5]["because"]
    asked = planned(capsys, *tiny, "--checkpoint-every", "70")
    assert asked["checkpoint"]["every_steps"] == 70
    assert "ends after 50 steps (--horizon), before" in asked["derivation"][5]["because"]
    within = planned(capsys, *tiny, "--checkpoint-every", "50")["derivation"][5]["because"]
    assert "--horizon" not in within


def test_a_checkpoint_stops_training_until_the_storage_has_it(capsys: pytest.CaptureFixture[str]) -> None:
    """14 B x 8.19e9 = 115 GB, at 2 GB/s 57 s; asynchronous, the copy of a GPU's share over its host link."""
    wish = ["--checkpoint-every", "5", "--storage-gb-per-s", "2"]
    waits = planned(capsys, *wish)["checkpoint"]
    copies = planned(capsys, *wish, "--checkpoint-async")["checkpoint"]
    total = 14 * load_model("qwen3-8b").params
    assert waits["total_bytes"] == total and waits["every_steps"] == 5
    assert waits["stall_s"] == waits["write_s"] == pytest.approx(total / 2e9)
    assert waits["pinned_bytes_per_node"] == 0
    assert copies["stall_s"] < 0.02 * waits["stall_s"] and copies["is_async"]
    assert copies["pinned_bytes_per_node"] == pytest.approx(copies["bytes_per_gpu"] * 8)


def test_without_a_wish_a_checkpoint_is_made_about_once_an_hour(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys)
    every, step_s = data["checkpoint"]["every_steps"], data["recommendation"]["step_s"]
    assert 0.6 * 3600 < every * step_s < 1.5 * 3600


# -- adapters


def test_adapters_change_state_training_and_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    whole, adapters = planned(capsys), planned(capsys, "--lora-rank", "16")
    assert whole["adapters"] is None
    told = adapters["adapters"]
    assert told["state_bytes"] == pytest.approx(adapters["step"]["memory"]["train_state_bytes"])
    assert told["state_bytes"] < whole["step"]["memory"]["train_state_bytes"] / 6
    assert told["alone_bytes"] == pytest.approx(2 * told["trained_params"])
    assert told["alone_bytes"] < told["merged_bytes"] / 50 and told["alone_s"] < told["merged_s"]
    assert adapters["checkpoint"]["total_bytes"] == pytest.approx(14 * told["trained_params"])
    assert adapters["step"]["flops"]["train"] < whole["step"]["flops"]["train"]
    assert adapters["workload"]["lora_rank"] == 16


def test_adapters_alone_are_published_where_that_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    merged = planned(capsys, "--lora-rank", "16")
    alone = planned(capsys, "--lora-rank", "16", "--lora-publish", "adapter")
    assert merged["recommendation"]["publication"]["bytes"] == merged["adapters"]["merged_bytes"]
    assert alone["recommendation"]["publication"]["bytes"] == alone["adapters"]["alone_bytes"]


def test_verl_is_told_of_adapters_and_others_refuse_them() -> None:
    plan = make_plan(replace(request(lora_rank=16), recompute="full"), is_brief=True)
    keys = {override.key: override.value for override in verl_overrides(plan)}
    assert keys["actor_rollout_ref.model.lora_rank"] == 16
    for name in ("slime", "areal"):
        with pytest.raises(PlanError, match=f"rank 16 cannot be exported to {name}"):
            emitter(name)(plan)


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--lora-rank", "-1"], "--lora-rank is -1"),
        (["--lora-rank", "8192"], "for matrices of 4096 columns"),
        (["--lora-rank", "8", "--algorithm", "ppo"], "whole second model"),
        (["--lora-rank", "8", "--assume", "paper"], "paper account"),
        (["--lora-publish", "adapter"], "without --lora-rank"),
        (["--lora-publish", "adaptor", "--lora-rank", "8"], "did you mean 'adapter'"),
        (["--checkpoint-every", "-2"], "--checkpoint-every is -2"),
        (["--storage-gb-per-s", "nan"], "not a finite number"),
    ],
)
def test_what_cannot_be_meant_is_told(capsys: pytest.CaptureFixture[str], args: list[str], what: str) -> None:
    code, out, err = output(capsys, *args)
    assert (code, out) == (2, "") and what in err and "\nhint: " in err


# -- environments


def test_the_slow_tail_of_environments_acts_in_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    """Three calls between four turns: 15 s without spread, and some more because the next ones wait for slots that are
    held meanwhile; most of that again with a 99th percentile of 40 s."""
    even, spread = planned(capsys, *AGENTS), planned(capsys, *AGENTS, "--env-p99-seconds", "40")
    even_s, spread_s = (plan["step"]["seconds"]["env"] for plan in (even, spread))
    assert 15.0 < even_s == even["agents"]["wait_s"] < 40.0
    assert spread_s > 1.5 * even_s
    grown = spread["step"]["seconds"]["total"] - even["step"]["seconds"]["total"]
    assert grown == pytest.approx(spread_s - even_s)
    assert spread["agents"]["slowest_env_s"] > even["agents"]["slowest_env_s"] == 15.0


@pytest.mark.parametrize("p99_s", [0.0, 30.0])
@pytest.mark.parametrize(("mode", "split"), [("sync", (32, 32)), ("separate_async", (16, 16))])
def test_environments_with_a_tail_agree_with_the_simulator(
    mode: Any, split: tuple[int, int], p99_s: float
) -> None:
    agent = AgentWork(num_turns=4, observation_tokens=100, env_s=10, env_p99_s=p99_s)
    r = request(agent=agent)
    candidate = Search(r).candidate(mode, *split)
    # Environments spread batches that would bunch, which the closed form does not know.
    rel = 0.03 if mode == "sync" else 0.12
    assert candidate.step_s == pytest.approx(simulate(scenario_of(r, candidate)).step_s, rel=rel)


# -- what is printed


def test_every_flops_key_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    ppo = ["--algorithm", "ppo", "--reward", "model"]
    flops = planned(capsys, *ppo)["step"]["flops"]
    _, out, _ = output(capsys, *ppo)
    table = out[out.index("FLOPs of the step") : out.index("Topologies, fastest first")]
    for key, value in flops.items():
        assert value > 0 and key.replace("_", " ") in table


def test_the_critics_values_are_work_of_the_forward_row() -> None:
    """One of its four passes; with it the forward row runs at the rate of one forward, whoever makes it."""
    with_critic = make_plan(request(algorithm="ppo"), is_brief=True).base.account
    without = make_plan(request(), is_brief=True).base.account
    f = with_critic.flops
    assert f.critic_values == pytest.approx(f.reference) == pytest.approx(f.critic / 4)
    rate = (f.reference + f.proximal + f.critic_values) / with_critic.seconds.forward
    assert rate == pytest.approx((without.flops.reference + without.flops.proximal) / without.seconds.forward)


def test_terminal_derivation_and_page_say_it(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    page = tmp_path / "plan.html"
    _, out, _ = output(
        capsys,
        *AGENTS,
        "--env-p99-seconds",
        "20",
        "--lora-rank",
        "16",
        "--checkpoint-async",
        "--html",
        str(page),
    )
    rows = ("pinned host memory", "publication, alone", "a synchronous step waits", "training stands still")
    text, html = " ".join(out.split()), page.read_text()
    for row in rows:
        assert row in text and row in html
    for sentence in ("A checkpoint every", "Adapters of rank 16 are", "Environments work 15.0 s"):
        assert sentence in text and sentence in html
    last = planned(capsys, "--lora-rank", "16")["derivation"][-1]
    assert last["outputs"]["checkpoint"]["every_steps"] >= 1 and last["outputs"]["adapters"]["rank"] == 16


# -- owners and moves


def test_the_moves_add_up_to_the_hand_over(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--max-staleness", "0", "--split", "8:8", "--idle-state", "host")
    assert data["recommendation"]["mode"] == "sync"
    moves = data["hand_over"]["moves"]
    assert sum(move["seconds"] for move in moves) == pytest.approx(data["step"]["seconds"]["switch"])
    state = next(move["bytes"] for move in moves if move["name"] == "training state to host")
    assert state == pytest.approx(data["step"]["memory"]["train_state_bytes_per_gpu"])
    assert data["hand_over"]["pinned_bytes_per_gpu"] > state  # the reference too


@pytest.mark.parametrize(
    "extra", [[], ["--lora-rank", "16"], ["--algorithm", "ppo"], ["--offload", "optimizer"]]
)
def test_owners_of_memory_add_up_to_what_the_plan_holds(
    capsys: pytest.CaptureFixture[str], extra: list[str]
) -> None:
    data = planned(capsys, *extra)
    of: dict[str, float] = {}
    for item in data["memory_items"]:
        if item["place"] == "train device":
            of[item["name"]] = item["bytes"]
    state = sum(of.get(name, 0) for name in ("weights", "gradients", "master weights", "optimizer moments"))
    memory = data["recommendation"]["step"]["memory"]
    assert state == pytest.approx(memory["train_state_bytes_per_gpu"])
    on_host = [
        item["bytes"] for item in data["memory_items"] if item["name"] == "training state (pinned), always"
    ]
    if extra[:1] == ["--offload"]:
        assert "master weights" not in of and "optimizer moments" not in of
        num_gpus = data["recommendation"]["num_train_gpus"]
        assert on_host == [pytest.approx(12 * data["model"]["params"] / num_gpus)]
    else:
        assert on_host == []


def test_the_paper_account_has_no_owners_and_no_moves(capsys: pytest.CaptureFixture[str]) -> None:
    data = planned(capsys, "--assume", "paper")
    assert data["memory_items"] == [] and data["hand_over"]["moves"] == []


# -- switches


def test_recomputing_everything_takes_longer_and_less_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Four passes over the matrices instead of three; of a layer's activations its input alone."""
    small = ["--response-tokens", "512", "--max-response-tokens", "2048"]
    full, selective = (planned(capsys, *small, "--recompute", mode)["step"] for mode in ("full", "selective"))
    assert full["seconds"]["train"] > 1.05 * selective["seconds"]["train"]
    of = "activation_bytes_per_gpu"
    assert full["memory"][of] < selective["memory"][of] / 4
    assert full["flops"] == selective["flops"]  # model FLOPs


def test_a_lost_prefix_is_prefilled_again_each_turn(capsys: pytest.CaptureFixture[str]) -> None:
    kept, lost = planned(capsys, *AGENTS), planned(capsys, *AGENTS, "--lose-prefix")
    assert lost["step"]["flops"]["prefill"] > 3 * kept["step"]["flops"]["prefill"]
    assert lost["agents"]["prefilled_tokens"] > 3 * kept["agents"]["prefilled_tokens"]


def test_checkpoints_that_take_a_visible_share_of_the_time_are_noted_with_the_way_out() -> None:
    """14 bytes a parameter of 671 B at 3.6 GB/s are 2,609 s."""
    options = {
        "model": "DeepSeek-V3",
        "num_gpus": "512",
        "response_tokens": "8k",
        "max_response_tokens": "32k",
    }

    def told(**more: object) -> list[str]:
        plan = make_plan(PlanOptions(**options, **more).request(), is_brief=True)  # type: ignore[arg-type]
        return [note for note in plan.chosen_notes if "checkpoint" in note]

    (note,) = told()
    assert (
        "3.6 GB/s of storage, which is assumed (--storage-gb-per-s)" in note and "--checkpoint-async" in note
    )
    assert told(checkpoint_async=True) == told(storage_gb_per_s=200.0) == []


def test_every_sandbox_that_is_open_has_the_cores_that_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    """One that waits for the next action keeps its cores; the pool that is written has room for all at once."""
    four = [*AGENTS, "--cores-per-sandbox", "4", "--reward", "sandbox"]
    agents = planned(capsys, *four)["agents"]
    assert agents["held_cores"] == 4 * agents["num_running"]
    assert agents["held_core_hours"] > agents["cpu_core_hours"]
    code, script, _ = output(capsys, *four, "--assume", "default", "--emit", "ray")
    bundle = re.search(r'"sandbox": \{"bundles": \[\{"CPU": (\d+)\}\] \* (\d+)', script)
    assert code == 0 and bundle is not None
    assert int(bundle[1]) * int(bundle[2]) >= agents["held_cores"]


def test_sandboxes_are_as_many_as_trajectories_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    """A slot for each that keeps its prefix; of those that lose it all that are admitted, under a bound two steps'."""
    few = [*AGENTS, "--prompts", "512", "--group-size", "16"]
    kept, lost = (
        planned(capsys, *few, keep)["agents"]["num_running"] for keep in ("--keep-prefix", "--lose-prefix")
    )
    assert kept < lost and lost in (512 * 16, 2 * 512 * 16)
    search = Search(
        request(agent=AgentWork(num_turns=4, env_s=5.0, observation_tokens=100.0), num_prompts=32)
    )
    at_once = {
        mode: beside(search.request, search.candidate(mode, 32, 32)).agents
        for mode in ("sync", "colocate_async")
    }
    sync, asynchronous = at_once["sync"], at_once["colocate_async"]
    assert sync is not None and asynchronous is not None
    assert (sync.num_running, asynchronous.num_running) == (32 * 8, 2 * 32 * 8)
