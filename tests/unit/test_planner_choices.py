"""Choices that a user makes beside model and cluster: each changes its own part of the plan, or is refused."""

from __future__ import annotations

import io
import json
import re
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from rollbook.errors import ConfigError, PlanError
from rollbook.ledger.hardware import DecodeFit, HostFit, MachineSpec, TrainFit
from rollbook.ledger.step import train_side
from rollbook.ledger.workload import MODES, Mode
from rollbook.planner.layouts import train_layouts
from rollbook.planner.options import PlanOptions, option_name
from rollbook.planner.plan import Plan, make_plan
from rollbook.planner.pools import pools
from rollbook.planner.publication import choose_publication
from rollbook.planner.report import html_report
from rollbook.planner.run_toml import run_toml
from rollbook.planner.scenario import scenario_of, with_lending
from rollbook.planner.search import Search
from rollbook.planner.show import show_plan
from rollbook.planner.simulate import simulate
from rollbook.planner.words import seconds

BASE: dict[str, Any] = {"model": "Qwen3-8B", "num_gpus": "32", "response_tokens": "4k"}


def plan(*, is_brief: bool = True, **options: Any) -> Plan:
    return make_plan(PlanOptions(**{**BASE, **options}).request(), is_brief=is_brief)


def test_the_publication_of_a_plan_maps_every_tensor_and_route() -> None:
    json_of = plan(num_gpus="64", stack="megatron").as_json()
    recommendation = json_of["recommendation"]
    assert isinstance(recommendation, dict)
    publication = recommendation["publication"]
    mapping = publication["mapping"]
    assert mapping["trainer"].startswith("Megatron on ")
    assert sum(kind["bytes"] for kind in mapping["tensors"]) == pytest.approx(publication["bytes"], rel=0.2)
    routes = {route["route"]: route for route in mapping["routes"]}
    assert publication["method"] in routes
    assert all(route["links"] and route["sender_peak_bytes"] >= 0 for route in routes.values())
    assert routes[publication["method"]]["seconds"] == publication["seconds"]


def test_fewer_changed_weights_make_a_delta_cheaper() -> None:
    def delta(frac: float) -> float:
        asked = PlanOptions(model="Qwen3-32B", num_gpus="64", changed_frac=frac).request()
        separated = Search(asked).candidate("separate_async", 32, 32)
        return choose_publication(asked, separated).options_s["delta"]

    assert delta(0.001) < delta(0.05)


@pytest.mark.parametrize(
    ("assume", "limit", "is_noted"),
    [
        ("default", "1m", True),
        ("paper", "1m", True),
        ("default", "0", False),
        ("default", "8k", False),
    ],
)
def test_a_context_that_nothing_needs_is_noted(assume: str, limit: str, is_noted: bool) -> None:
    """The model's own limit holds the longest sequence already; a lower one is a check that was made."""
    options = {"model": "qwen3-8b", "num_gpus": "16", "response_tokens": "1k", "max_response_tokens": "4k"}
    notes = plan(**options, assume=assume, max_context=limit).chosen_notes
    assert (
        any("--max-context changes nothing" in note and "5120 tokens" in note for note in notes) == is_noted
    )


def test_a_context_that_a_response_needs_acts() -> None:
    options = {"model": "qwen3-8b", "num_gpus": "16", "response_tokens": "8k", "max_response_tokens": "64k"}
    assert not any("--max-context" in note for note in plan(**options, max_context="128k").chosen_notes)


def test_the_median_of_environment_calls_widens_their_tail() -> None:
    agent = {"turns": 4.0, "observation_tokens": "256", "env_seconds": 10.0}
    wide = plan(**agent, env_p50_seconds=4.0).as_json()["agents"]
    flat = plan(**agent).as_json()["agents"]
    assert isinstance(wide, dict) and isinstance(flat, dict)
    assert wide["slowest_env_s"] > 2 * flat["slowest_env_s"]


def test_the_simulator_draws_environments_with_the_median_given() -> None:
    request = PlanOptions(**BASE, turns=4.0, env_seconds=10.0, env_p50_seconds=4.0).request()
    scenario = scenario_of(request, Search(request).candidate("sync", 32, 32))
    assert scenario.env_s is not None
    drawn = scenario.env_s(np.random.default_rng(0), 200_000)
    assert float(np.median(drawn)) == pytest.approx(4.0, rel=0.02)
    assert float(np.mean(drawn)) == pytest.approx(10.0, rel=0.05)


def test_cores_and_start_of_a_sandbox_count_in_core_hours() -> None:
    agent = {"turns": 4.0, "env_seconds": 10.0}
    one = plan(**agent).as_json()["agents"]
    four = plan(**agent, cores_per_sandbox=4.0, sandbox_start_seconds=20.0).as_json()["agents"]
    assert isinstance(one, dict) and isinstance(four, dict)
    assert four["cpu_core_hours"] == pytest.approx(4 * one["cpu_core_hours"] * 50 / 30)


def test_memory_of_a_sandbox_sizes_its_nodes() -> None:
    """16 GB for each of two cores: a node of 64 cores has 512 GB, and the job holds 16 GB of each open sandbox."""
    made = plan(turns=4.0, env_seconds=10.0, cores_per_sandbox=2.0, gb_per_sandbox=16.0)
    pool = next(pool for pool in pools(made, made.require_chosen()) if pool.name == "sandbox")
    assert pool.host_bytes_per_node == 512e9
    assert made.beside.agents is not None
    assert made.beside.agents.held_bytes == 16e9 * made.beside.agents.num_running


def test_lent_training_gpus_shorten_an_asynchronous_step_as_the_simulator_has_it() -> None:
    """24 trainers that wait for 8 engines; the simulator also pays for KV that is lost at the way back."""
    options = {**BASE, "split": "8:24", "prompts": "256", "max_staleness": 4}
    alone = PlanOptions(**options).request()
    lending = PlanOptions(**options, lend=5.0).request()
    before = Search(alone).candidate("separate_async", 8, 24)
    after = Search(lending).candidate("separate_async", 8, 24)
    assert after.step_s < 0.9 * before.step_s
    scenario = scenario_of(alone, before, num_steps=24)
    simulated = simulate(with_lending(scenario, before, 5.0))
    assert after.step_s == pytest.approx(simulated.step_s, rel=0.10)
    assert any("training GPUs generate for" in note for note in after.account.notes)


def test_nothing_is_lent_where_training_waits_less_than_the_switches() -> None:
    lending = PlanOptions(**BASE, lend=1e5).request()
    alone = PlanOptions(**BASE).request()
    assert (
        Search(lending).candidate("separate_async", 8, 24).step_s
        == Search(alone).candidate("separate_async", 8, 24).step_s
    )


def test_gpus_that_a_step_has_no_work_for_are_told() -> None:
    """Two responses a step keep two replicas busy, however many there are."""
    few = plan(is_brief=False, model="qwen3-8b", num_gpus=64, prompts=1, group_size=2)
    told = next(note for note in few.chosen_notes if "too little work" in note)
    enough = int(told.split()[0])
    same = next(size for size in few.sizes if size.num_gpus == enough)
    assert few.chosen and same.best and enough < 64 and f"other {64 - enough} " in told
    assert same.best.step_s <= 1.05 * few.chosen.step_s
    busy = plan(is_brief=False, model="qwen3-8b", num_gpus=16)
    assert not any("too little work" in note for note in busy.chosen_notes)


def test_growing_responses_are_followed_over_training() -> None:
    grown = plan(is_brief=False, length_growth=0.01, horizon=100).growth
    assert [at.step for at in grown] == [0, 25, 50, 75, 100]
    assert grown[2].response_tokens == pytest.approx(4096 * 1.01**50)
    steps = [at.chosen_step_s for at in grown]
    assert all(a is not None and b is not None and a < b for a, b in pairwise(steps))
    assert grown[-1].response_tokens <= 0.95 * 16_384  # four times the mean is the limit
    assert plan(is_brief=False).growth == ()


def test_growth_beyond_every_limit_ends_at_the_limit() -> None:
    grown = plan(is_brief=False, length_growth=0.3, horizon=100_000).growth
    assert grown[-1].response_tokens == pytest.approx(0.95 * 16_384)
    shrunk = plan(is_brief=False, length_growth=-0.5, horizon=100_000).growth
    assert shrunk[-1].response_tokens == 1.0


def test_a_budget_too_small_for_chunks_names_the_way_out() -> None:
    made = plan(prefill_chunk="10")
    assert made.chosen is None
    assert any("--prefill-chunk 0" in change for change in made.smallest_changes)


def test_growing_responses_stop_at_the_limit_in_the_simulator_too() -> None:
    request = PlanOptions(**BASE, prompts="16").request()
    scenario = scenario_of(request, Search(request).candidate("sync", 32, 32))
    assert scenario.max_response_tokens == 16_384


def test_a_page_of_a_plan_that_fits_nowhere_says_so_first_and_prices_nothing() -> None:
    text = html_report(plan(model="DeepSeek-V3", num_gpus="8"))
    assert "nothing fits</h1>" in text
    assert text.index("Nothing fits") < text.index("<h2>")
    for section in ("Topologies side by side", "Where the peak goes", "GPU hours", "What if"):
        assert section not in text
    assert "Memory" in text and "would make it fit" in text


CPU = MachineSpec(
    name="a desk", device="cpu", gemm_flops_per_s={"float32": 1e11}, copy_bytes_per_s=2e10, memory_bytes=2**34
)  # fmt: skip


@pytest.mark.parametrize("response_tokens", ["1k", "4k", "8k"])
def test_no_recomputation_that_is_asked_for_makes_a_faster_step_than_the_chosen_one(
    response_tokens: str,
) -> None:
    chosen, selective, full = (
        plan(recompute=recompute, response_tokens=response_tokens).base.step_s
        for recompute in ("auto", "selective", "full")
    )
    assert chosen == min(selective, full)


@pytest.mark.parametrize(
    ("model", "gpu", "num_gpus"),
    [
        ("Qwen3-32B", "A100", 16), ("Qwen3-32B", "H20", 16), ("Qwen3-32B", "H20", 64), ("Qwen3-8B", "A100", 128),
        ("Qwen3-32B", "H100", 64), ("Qwen3-235B-A22B", "H20", 64), ("DeepSeek-V3", "H100", 512),
    ],
)  # fmt: skip
def test_no_trainer_layout_that_fits_is_faster_than_the_chosen_one(
    model: str, gpu: str, num_gpus: int
) -> None:
    request = PlanOptions(
        model=model, gpu=gpu, num_gpus=str(num_gpus), response_tokens="8k", max_response_tokens="32k"
    ).request()
    chosen = Search(request).trainers.best(num_gpus)
    others = [
        train_side(
            request.model,
            request.workload,
            request.cluster,
            chosen.assumptions,
            num_gpus=num_gpus,
            layout=layout,
        )
        for layout in train_layouts(replace(request, assumptions=chosen.assumptions), num_gpus)
    ]
    assert chosen.side.total_s == min(side.total_s for side in others if not side.why_not)


def test_what_is_split_to_recompute_less_is_trained_undivided_with_more() -> None:
    """At 4k + 16k tokens a layer over two GPUs keeps its activations; over one it recomputes them, and fits as well."""
    found = plan()
    layout = found.require_chosen().train.layout
    assert (layout.cp_size, layout.recompute) == (2, "selective")
    assert "would have to recompute everything otherwise" in found.derivation[4].because
    text = run_toml(found)
    assert 'kind = "ray"' in text and "gradient_checkpointing = true" in text
    assert "- trainer.gradient_checkpointing: planned selective recomputation" in text


@pytest.mark.parametrize(("response_tokens", "is_floor"), [("4k", False), ("512", True)])
def test_the_reason_of_a_deadline_is_its_own(response_tokens: str, is_floor: bool) -> None:
    """600 s at least: four times the few seconds of short responses is no fault."""
    text = run_toml(plan(response_tokens=response_tokens))
    assert ("response_deadline_s = 600.0" in text) == is_floor
    assert ("four times that is a fault" not in text) == is_floor


def processor_plan(tmp_path: Path, machine: MachineSpec) -> Plan:
    """Of a small model in the folder "tiny", on that machine."""
    (tmp_path / "tiny").mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "intermediate_size": 128,
        "max_position_embeddings": 1024,
    }  # fmt: skip
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(config))
    machine.write(tmp_path / "hw.toml")
    return plan(
        model=str(tmp_path / "tiny"), gpu=str(tmp_path / "hw.toml"), num_gpus="1", prompts="8", group_size="4",
        prompt_tokens="11", response_tokens="16", max_response_tokens="16", length_sigma=0.0, reference=False,
    )  # fmt: skip


FITTED = replace(
    CPU,
    model="models/tiny",
    decode=DecodeFit(base_s=2e-3, per_row_s=1e-5, per_row_token_s=1e-6, prefill_tokens_per_s=1e5),
    train=TrainFit(per_micro_batch_s=8e-3, tokens_per_s=25e3, forward_tokens_per_s=100e3),
    host=HostFit(report_s=1e-4),
    reward_s=1e-3,
)


def test_a_processor_that_was_measured_with_the_model_is_planned_with_what_was_measured(
    tmp_path: Path,
) -> None:
    """32 rows: 2 ms + 0.32 ms and 1 us a token they hold. 8 x (11 + 4 x 15) = 568 tokens in one micro batch: 8 ms and
    22.7 ms of training, 5.68 ms of one forward. 32 x 1.1 ms of scoring and reports."""
    found = processor_plan(tmp_path, FITTED)
    account = found.base.account
    held = 11 + 8
    assert account.rollout.decode_step_s == pytest.approx(2.32e-3 + 32 * held * 1e-6, rel=0.02)
    assert account.seconds.generate_throughput + account.seconds.generate_tail == pytest.approx(
        16 * account.rollout.decode_step_s, rel=0.05
    )
    assert account.seconds.train == pytest.approx(8e-3 + 568 / 25e3)
    assert account.seconds.forward == pytest.approx(568 / 100e3)
    assert account.seconds.other == pytest.approx(32 * 1.1e-3)
    assert not found.warnings


def test_a_processor_that_was_measured_without_the_model_says_so_and_is_not_sure(tmp_path: Path) -> None:
    sure = processor_plan(tmp_path, FITTED).base.account.step_s
    for i, machine in enumerate((CPU, replace(FITTED, model="models/other"))):
        (tmp_path / str(i)).mkdir()
        found = processor_plan(tmp_path / str(i), machine)
        assert any("measured without this model" in note for note in found.warnings)
        unsure = found.base.account.step_s
        assert unsure.high / unsure.value > 3 * sure.high / sure.value


def test_a_plan_of_several_processors_says_that_it_runs_on_one(tmp_path: Path) -> None:
    CPU.write(tmp_path / "hw.toml")
    one, two = (plan(model="Qwen3-0.6B", gpu=str(tmp_path / "hw.toml"), num_gpus=n) for n in ("1", "2"))
    assert "planned 2 machines like this one; the file runs on one" in " ".join(run_toml(two).split("\n# "))
    assert "machines like this one" not in run_toml(one)


def test_a_plan_of_a_processor_names_no_gpu(tmp_path: Path) -> None:
    machine = tmp_path / "hardware.toml"
    CPU.write(machine)
    made = plan(
        model="Qwen3-0.6B", gpu=str(machine), num_gpus="1", prompts="8", group_size="8",
        prompt_tokens="64", response_tokens="128", is_brief=False,
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    show_plan(made, console)
    assert isinstance(console.file, io.StringIO)
    page = html_report(made).split("<summary>Assumptions")[0]
    made_json = made.as_json()
    told = json.dumps(
        {key: value for key, value in made_json.items() if key not in ("assumptions", "cluster")}
    )
    for text in (console.file.getvalue(), page, run_toml(made), told):
        lines = [line for line in text.splitlines() if "GPU" in line or "CUDA" in line or "NCCL" in line]
        assert lines == []
    assert "1 shared CPU" in console.file.getvalue()


@pytest.mark.parametrize(
    ("options", "what", "hint"),
    [
        ({"changed_frac": 1.5}, "--changed-frac is 1.5", "between 0 and 1"),
        ({"sleep_level": 3}, "--sleep-level is 3", "use 0"),
        ({"stack": "megatrn"}, "--stack is 'megatrn'", "megatron"),
        ({"reward_model": "Qwen3-0.6B"}, "--reward-model is Qwen3-0.6B with a reward by rule", "--reward model"),
        ({"reward_tokens": "99"}, "--reward-tokens is 99 with a reward by rule", "generative"),
        ({"cores_per_sandbox": 4.0}, "nothing runs in a sandbox", "--reward sandbox"),
        ({"gb_per_sandbox": 8.0}, "nothing runs in a sandbox", "--reward sandbox"),
        ({"turns": 2.0, "env_p50_seconds": 3.0}, "without --env-seconds", "the mean"),
        (
            {"turns": 2.0, "env_seconds": 2.0, "env_p50_seconds": 3.0},
            "--env-p50-seconds is 3 where --env-seconds is 2",
            "at most 2",
        ),
        ({"length_growth": 2.0}, "--length-growth is 2", "such as 0.01"),
        ({"horizon": 0}, "--horizon is 0", "at least 1"),
        ({"lend": -1.0}, "--lend is -1", "0 to lend nothing"),
        ({"prefill_chunk": "many"}, "--prefill-chunk", "such as"),
        ({"epochs": 0}, "--epochs is 0", "at least 1"),
    ],
)  # fmt: skip
def test_a_choice_that_cannot_be_meant_is_refused(options: dict[str, Any], what: str, hint: str) -> None:
    with pytest.raises((PlanError, ConfigError)) as caught:
        PlanOptions(**{**BASE, **options}).request()
    assert what in caught.value.args[0]
    assert hint in caught.value.args[1]


def test_a_plan_is_one_json_object_with_the_growth_and_prefill() -> None:
    text = json.dumps(plan(is_brief=False, length_growth=0.01, prefill_chunk="8k").as_json())
    data = json.loads(text)
    assert data["growth"][0]["best_step_s"]["sync"] > 0
    assert data["prefill"]["chunk_tokens"] > 0


def test_every_predicted_second_has_a_range() -> None:
    data = plan().as_json()
    step, recommendation = data["step"], data["recommendation"]
    assert isinstance(step, dict) and isinstance(recommendation, dict)
    for name, value in step["seconds"].items():
        low, high = step["seconds_range"][name]
        assert low < value < high or value == low == high == 0
    publication = recommendation["publication"]
    low, high = publication["seconds_range"]
    assert low < publication["seconds"] < high


def test_recomputation_is_told_beside_the_total_and_never_in_it() -> None:
    """One more forward of every trained token, as many FLOPs as the reference's pass."""
    full, selective = (plan(recompute=way).base.account.flops for way in ("full", "selective"))
    assert (full.recomputed, selective.recomputed) == (full.reference, 0.0)
    assert full.total == selective.total


def test_an_agents_prefill_is_told_with_and_without_its_prefix() -> None:
    """4 turns, 3 observations of 256 tokens: linear; without the prefix all before each turn again: quadratic."""
    agents = plan(turns=4.0, observation_tokens="256", env_seconds=1.0).as_json()["agents"]
    assert isinstance(agents, dict)
    prompts, trajectories = 512 * 1024, 8192
    assert agents["prefilled_tokens_kept"] == prompts + trajectories * 3 * 256
    per_turn = 4096 / 4 + 256
    assert agents["prefilled_tokens_lost"] == prompts + trajectories * (3 * 1024 + per_turn * (1 + 2 + 3))
    assert agents["prefilled_tokens"] == agents["prefilled_tokens_kept"]


def test_every_option_of_a_plan_stands_in_its_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    missing = [name for f in fields(PlanOptions) if (name := option_name(f.name)) not in page]
    assert missing == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"changed_frac": 0.01}, "--changed-frac changes nothing of what is recommended: engine and trainer share"),
        ({"host_gb_per_gpu": 640.0}, "--host-gb-per-gpu changes nothing of what is recommended: its training"),
        ({"lend": 5.0}, "--lend changes nothing"),
        ({"max_staleness": 3}, "--max-staleness changes nothing"),
        ({"sleep_level": 1}, ""),
    ],
)  # fmt: skip
def test_a_choice_that_the_recommended_topology_does_not_read_is_told(
    changes: dict[str, Any], told: str
) -> None:
    """Eight GPUs of a short step stay colocated and synchronous."""
    made = plan(num_gpus="8", response_tokens="512", length_sigma=0.1, **changes)
    assert made.require_chosen().mode == "sync"
    assert [note for note in made.advice if told and note.startswith(told)] == list(made.advice)
    assert bool(made.advice) == bool(told)


def test_every_table_of_a_plan_knows_what_the_plan_recommends() -> None:
    """Engines of 64 GPUs: the best split, 192:320, is not next to where both sides take equally long, 160:352."""
    plan = make_plan(
        PlanOptions(
            model="DeepSeek-V3", num_gpus="512", max_staleness=2, response_tokens="8k", max_response_tokens="32k",
            length_growth=0.001, horizon=10,
        ).request()
    )  # fmt: skip
    chosen = plan.require_chosen()
    found = (chosen.mode, *chosen.split, chosen.step_s)
    rows = [size.best for size in plan.sizes if size.num_gpus == 512] + [plan.growth[0].best]
    assert [(best.mode, *best.split, best.step_s) for best in rows if best] == [found, found]
    for shift in plan.shifts:
        assert shift.best is not None and shift.step_s is not None
        assert shift.best.step_s <= shift.step_s or shift.best.is_on_policy
    for moment in plan.growth:
        assert moment.chosen_step_s is not None
        assert moment.best_step_s[chosen.mode] <= moment.chosen_step_s
    # The brief search of other sizes lands where the whole one does.
    brief = Search(plan.request, is_brief=True).run()
    assert brief[0].step_s == pytest.approx(chosen.step_s)


def test_a_generative_reward_model_owns_its_bytes_in_the_engines() -> None:
    """32.8 B parameters in bfloat16 over the GPUs of a replica, beside the policy's 8.2 B; the page says so, too."""
    found = plan(reward="generative", reward_model="Qwen3-32B")
    layout = found.require_chosen().rollout_layout
    owned = {item.name: item.bytes for item in found.beside.memory if item.place == "rollout device"}
    assert owned["reward model"] == pytest.approx(65.5e9 / layout.num_gpus, rel=0.02)
    assert owned["rollout weights"] == pytest.approx(16.4e9 / layout.num_gpus, rel=0.02)
    legends = [
        next(text for text in html_report(made).split("</ul>") if "KV pool</li>" in text).split("<ul")[-1]
        for made in (plan(), found)
    ]
    assert ["reward model" in legend for legend in legends] == [False, True]
    assert all("reference policy" in legend for legend in legends)


def test_a_publication_that_shows_is_told_beside_what_others_take() -> None:
    """1.3 TB of DeepSeek-V3 in a step of short responses: a difference takes longer, slices less."""
    asked: dict[str, Any] = {
        "model": "DeepSeek-V3",
        "num_gpus": "512",
        "prompts": "128",
        "response_tokens": "512",
    }
    published = plan(**asked).publication
    assert published is not None and published.method == "broadcast"
    delta, sharded = (seconds(published.options_s[name]) for name in ("delta", "sharded"))
    assert f"last version would take {delta}" in published.because
    assert f"would take {sharded}, but needs a loop that knows both layouts" in published.because
    of_slime = plan(**asked, assume="slime").publication  # which does
    assert of_slime is not None and of_slime.method == "sharded"


def test_the_time_optimum_says_what_its_step_has_besides_its_sides() -> None:
    found = plan(
        model="Qwen3-32B", num_gpus="128", response_tokens="8k", max_response_tokens="32k", is_brief=False
    )
    optimum = found.derivation[3].outputs["time_optimal_split"]
    at = next(c for c in found.candidates if [*c.split] == optimum and c.mode == "separate_async")
    because = found.derivation[3].because
    assert f"the staleness bound {seconds(at.account.bound_s)}" in because
    assert f"it is {seconds(at.step_s)}." in because


def test_asynchrony_that_is_slower_is_not_said_to_save() -> None:
    """All responses of one length: nothing runs alone, so keeping parts of them gains nothing."""
    because = plan(num_gpus="8", max_response_tokens="4k").choice_because
    assert "no asynchronous topology has a shorter step" in because and "0.0 %" not in because


def test_a_context_that_observations_fill_says_so() -> None:
    """19 observations of 20 k tokens each between 20 turns."""
    with pytest.raises(PlanError) as caught:
        plan(turns=20.0, observation_tokens="20k")
    assert "observations of 389120" in caught.value.what and "--observation-tokens" in caught.value.remedy


def test_a_plan_for_megatron_splits_what_one_gpu_cannot_hold() -> None:
    """Data parallelism repeats the weights and gradients of a rank: 131 GB of Qwen3-32B where nothing splits it."""
    found = plan(model="Qwen3-32B", num_gpus="64", stack="megatron")
    held = [
        (4 * 32.8e9 / (c.train.layout.tp_size * c.train.layout.pp_size), c.fits) for c in found.candidates
    ]
    assert any(fits for _, fits in held) and all(bytes_held < 72e9 for bytes_held, fits in held if fits)
    owned = {item.name for item in found.beside.memory}
    assert "weights and gradients of the rank" in owned
    assert "weights and gradients of the rank" not in {item.name for item in plan().beside.memory}


@pytest.mark.parametrize(("stack", "trainer"), [("fsdp_experts", "FSDP2"), ("megatron_tuned", "Megatron")])
def test_a_stack_is_mapped_by_how_it_holds_its_weights(stack: str, trainer: str) -> None:
    found = plan(num_gpus="8", stack=stack)
    assert found.publication is not None and found.publication.mapping.trainer.startswith(f"{trainer} on ")
    because = found.derivation[4].because
    assert ("beside the weights and gradients of a rank" in because) == (trainer == "Megatron")


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "separate_async"])
def test_lending_moves_nothing_of_a_mode_that_lends_nothing(mode: Mode) -> None:
    """Of shared GPUs there are none to lend, and an on-policy step is planned without."""
    options = BASE | {"response_tokens": "4k", "max_response_tokens": "16k"}
    split = (8, 24) if mode.startswith("separate") else (32, 32)
    without, lending = (Search(PlanOptions(**options, lend=lend).request()) for lend in (0.0, 5.0))
    assert lending.candidate(mode, *split).account == without.candidate(mode, *split).account


@pytest.mark.parametrize("dtype", ["bfloat16", "float8"])
def test_weights_and_kv_of_a_replica_add_up_to_the_share_of_it_that_is_told(dtype: str) -> None:
    made = plan(model="Qwen3-30B-A3B", num_gpus="16", rollout_dtype=dtype)
    told = re.search(
        r"A replica of (\d+) GPUs? holds the ([\d.]+) GB of weights for generation, with ([\d.]+) GB left for KV, of "
        r"the ([\d.]+) % of a GPU",
        made.derivation[1].because,
    )
    assert told is not None
    num_gpus, weights_gb, kv_gb, percent = map(float, told.groups())
    assert weights_gb + kv_gb == pytest.approx(num_gpus * 80.0 * percent / 100, rel=0.01)


def test_where_memory_stops_splits_stands_with_the_fewest_training_gpus_that_it_does_not_stop() -> None:
    made = plan(model="Qwen3-32B", num_gpus="32")
    fitting = [c.split[1] for c in made.candidates if c.mode == "separate_async" and c.train.fits]
    assert (
        f"of the splits looked at, {min(fitting)} are the fewest that hold it" in made.derivation[4].because
    )
