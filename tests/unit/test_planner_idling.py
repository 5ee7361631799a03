"""What stays on GPUs that engine and trainer share, and what leaves them in turn: by hand, in the books, as written.

Qwen3-4B (4.02e9 parameters) on one H200 (141 GB, less a tenth: 126.9 usable; an engine takes 58 % at most, 81.8).
    state               16 B each                                                    64.3 GB
    engine weights      2 B each                                                      8.0
    KV                  36 layers x 8 heads x 128 x K and V x 2 B = 147,456 B a token;
                        256 responses of 520 tokens, whole                           19.6
    together 92 of 126.9: the state can stay. 126.9 - 64.3 = 62.6 GB are the engine's, 54.5 of it KV; 2 x 64.3 GB at
    5 GB/s, 25.7 s of 47.1, are saved. A trainer at work takes 119.5 GB (51 of activations), which leaves less than the
    weights: the engine has to sleep.
Qwen3-32B (32.8e9) on 128 H100 (80 GB: 72 usable, 46.4 an engine's at most).
    16 B of state and 2 of a reference are 4.6 GB a GPU; 72 - 4.6 = 67.4 is more than an engine takes. The state stays
    and costs no KV; 2 x 4.1 + 0.5 GB at 5 GB/s, 1.7 s, are saved.
DeepSeek-V3 (671e9) on 512 H100.
    18 B are 23.6 GB a GPU, and ranks of TP 1, PP 16, EP 32 hold weights and gradients of their own besides: 35.3.
    72 - 35.3 = 36.7 GB, 30.5 of them weights, leave replicas of 64 GPUs 392 GB of KV instead of 1,015, and 206 slots
    instead of 533. Twice as many waves and more cost more than hand-overs of 11.1 s: the state waits in host memory.
"""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from rollbook.config.loading import validate
from rollbook.config.run_config import RunConfig
from rollbook.errors import PlanError
from rollbook.ledger.decode import replica_weight_bytes
from rollbook.ledger.switch import SleepChoice
from rollbook.planner.candidate import Candidate
from rollbook.planner.emit import emitter
from rollbook.planner.execution import execution
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import Plan, make_plan
from rollbook.planner.report_costs import device_bytes
from rollbook.planner.run_toml import run_toml
from rollbook.planner.scenario import scenario_of
from rollbook.planner.search import Search

SMALL: dict[str, Any] = {
    "model": "Qwen3-4B", "gpu": "H200", "num_gpus": "1", "gpus_per_node": 1, "prompts": "32", "group_size": "8",
    "prompt_tokens": "8", "response_tokens": "512", "max_response_tokens": "512", "length_sigma": 0.0,
    "reference": False, "proximal": False,
}  # fmt: skip
LONG = {"prompt_tokens": "1024", "response_tokens": "8k", "max_response_tokens": "32k"}
TINY = {**SMALL, "model": "Qwen3-0.6B"}
"""A trainer at work takes a third of the device."""
FULL = {
    **SMALL, "prompts": "64", "group_size": "16", "response_tokens": "8k", "max_response_tokens": "32k",
    "offload": "none", "reference": True,
}  # fmt: skip
"""A thousand long responses: every slot is worth more than the moves."""
STAYS, SLEEPS = (SleepChoice(sleep_level=level, moves_state=False) for level in (0, 2))
WAITS = SleepChoice()


def planned(*, is_brief: bool = True, **options: Any) -> Plan:
    return make_plan(PlanOptions(**{**SMALL, **options}).request(), is_brief=is_brief)


def shared(plan: Plan) -> list[Candidate]:
    return [c for c in plan.candidates if c.idle_state is not None]


def test_a_state_that_fits_beside_the_engine_stays() -> None:
    found, moved = planned().base, planned(idle_state="host").base
    assert (found.sleep, moved.sleep) == (SLEEPS, WAITS)
    state = 16 * 4.022e9
    assert found.account.rollout.kv_pool_bytes == pytest.approx(0.9 * 141e9 - state - 8.04e9, rel=1e-3)
    assert found.account.rollout.slots_per_replica == 256
    assert moved.account.seconds.switch - found.account.seconds.switch == pytest.approx(
        2 * state / 5e9, rel=1e-3
    )
    assert moved.step_s - found.step_s == pytest.approx(25.7, abs=0.1)  # nothing else differs
    told = {(i.sleep.sleep_level, i.sleep.moves_state): i for i in found.idles}
    assert told[2, True].step_s == pytest.approx(moved.step_s) and not told[2, True].is_least
    assert "beside 119.5 GB of the trainer's" in told[0, False].why_not[0]


def test_a_large_cluster_keeps_its_state_at_no_cost_of_kv() -> None:
    options = {"model": "Qwen3-32B", "gpu": "H100", "num_gpus": "128"}
    plan = make_plan(PlanOptions(**options, **LONG).request(), is_brief=True)
    found = plan.base
    waiting = next(i for i in found.idles if i.sleep == WAITS)
    assert found.sleep == SLEEPS and found.account.rollout.kv_pool_bytes == waiting.kv_pool_bytes
    assert waiting.step_s - found.step_s == pytest.approx(
        (2 * 16 + 2) * 32.76e9 / 128 / 5e9, rel=0.01
    )  # the reference moves one way
    assert "leave engines the 58.0 % that they may take in any case" in plan.derivation[3].because


def test_a_state_that_would_take_two_thirds_of_the_slots_waits_in_host_memory() -> None:
    options = {"model": "DeepSeek-V3", "gpu": "H100", "num_gpus": "512"}
    found = make_plan(PlanOptions(**options, **LONG).request(), is_brief=True).base
    kept = next(i for i in found.idles if i.sleep == SLEEPS)
    assert found.sleep == WAITS and found.rollout_layout.num_gpus == 64
    assert kept.num_slots == pytest.approx(0.39 * found.account.rollout.slots_per_replica, rel=0.02)
    assert kept.step_s > found.step_s + found.account.seconds.switch


def test_an_engine_that_fits_beside_a_trainer_at_work_does_not_sleep() -> None:
    found = planned(**TINY).base
    assert found.sleep == STAYS and found.account.seconds.switch == 0
    asleep = planned(**TINY, sleep_level="2").base
    assert asleep.sleep == SLEEPS and asleep.step_s > found.step_s
    # Graphs that are captured again are those of an engine that slept.
    rebuilt = planned(**TINY, rebuild_engine=True).base
    assert rebuilt.sleep == replace(SLEEPS, rebuilds_engine=True)


@pytest.mark.parametrize(
    "options",
    [SMALL, TINY, FULL, {**FULL, "model": "Qwen3-0.6B"}, {**SMALL, "algorithm": "ppo", "gpu": "B200"}],
    ids=["small", "tiny", "full", "tiny and full", "critic"],
)
def test_the_fastest_of_all_that_fit_is_taken(options: dict[str, Any]) -> None:
    alone = [
        planned(**options, idle_state=state, sleep_level=level).candidates
        for state, level in (("device", "0"), ("device", "2"), ("host", "2"))
    ]
    for found in shared(planned(**options)):
        each = [c for candidates in alone for c in candidates if c.mode == found.mode and c.fits]
        # One with less room for its engines has to save half a per cent.
        assert 1 - 1e-6 <= found.step_s / min(c.step_s for c in each) < 1.0051


@pytest.mark.parametrize(
    "options",
    [
        SMALL, TINY, FULL, {**SMALL, "idle_state": "host"}, {**SMALL, "algorithm": "ppo", "gpu": "B200"},
        {"model": "Qwen3-8B", "num_gpus": "16", "reward": "model", "max_staleness": 0},
        {"model": "Qwen3-30B-A3B", "num_gpus": "64", "stack": "megatron", "max_staleness": 0},
        {"model": "Qwen3-8B", "num_gpus": "8", "lora_rank": 16, "max_staleness": 0},
    ],
    ids=["small", "tiny", "full", "host", "critic", "reward model", "megatron", "adapters"],
)  # fmt: skip
def test_the_books_add_up_at_both_moments(options: dict[str, Any]) -> None:
    """Owners in the table are those of the picture, within the device, and the state stands where it is."""
    plan = make_plan(PlanOptions(**options).request(), is_brief=True)
    shown, request = plan.require_chosen(), plan.request
    assert shown.idle_state is not None
    generating, training = (sum(v for _, _, v in parts) for parts in device_bytes(request, shown))
    device = request.cluster.accelerator.hbm_bytes
    assert generating <= device * 1.0001 and training <= device * 1.0001
    of: dict[str, float] = {}
    for item in plan.beside.memory:
        of[item.place] = of.get(item.place, 0.0) + item.bytes
    runtime = request.assumptions.memory_overhead_frac * device
    for place, total in (("rollout device", generating), ("train device", training)):
        fixed = sum(
            item.bytes
            for item in plan.beside.memory
            if item.place == place and item.name in ("CUDA graphs", "context and communication")
        )
        assert of[place] - fixed == pytest.approx(total - runtime)
    waits = [item.name for item in plan.beside.memory if item.place == "train host"]
    assert bool(waits) == (shown.idle_state == "host")
    names = {item.name for item in plan.beside.memory if item.place == "rollout device"}
    assert ("optimizer moments" in names) == (shown.idle_state == "device")


def test_what_leaves_is_told_with_its_reason() -> None:
    plan = planned()
    told = plan.derivation[3].because
    assert "engines sleep while the trainer works, and its state stays on the GPU: its 64.3 GB" in told
    assert "hand-overs of 27.9 s instead of 2.2 s, and a step of 47.1 s" in told
    data: dict[str, Any] = plan.as_json()
    row = data["recommendation"]
    assert (row["idle_state"], row["sleep_level"]) == ("device", 2)
    assert [(i["idle_state"], i["sleep_level"], i["fits"]) for i in row["idle_choices"]] == [
        ("device", 0, False), ("device", 2, True), ("host", 2, True),
    ]  # fmt: skip
    waiting = planned(**FULL).derivation[3].because
    assert "its state waits in host memory while they generate: its 72.4 GB" in waiting
    assert "more than hand-overs of 29.5 s cost" in waiting
    apart = planned(num_gpus="2", gpus_per_node=2, response_tokens="64", max_response_tokens="64")
    rows: list[dict[str, Any]] = [c.as_json() for c in apart.candidates]
    assert {r["idle_state"] for r in rows if r["mode"].startswith("separate")} == {None}


def test_nothing_is_asked_where_it_makes_no_difference() -> None:
    paper = planned(assume="paper")
    assert paper.base.sleep == WAITS and paper.base.idles == () and paper.base.account.seconds.switch > 0
    assert any(
        "stays on shared GPUs" in note for note in planned(assume="paper", idle_state="device").warnings
    )
    apart = planned(num_gpus="2", gpus_per_node=2, idle_state="host", response_tokens="64")
    chosen = apart.require_chosen()
    noted = any("--idle-state changes nothing" in note for note in apart.advice)
    assert noted == (chosen.idle_state is None)


def test_a_choice_that_does_not_fit_names_the_one_that_does() -> None:
    plan = planned(sleep_level="0")
    assert plan.chosen is None
    assert "leave to the planner whether engines sleep (--sleep-level auto)" in plan.smallest_changes
    tight = planned(idle_state="host", host_gb_per_gpu=10.0)
    assert tight.chosen is None
    assert any("--idle-state auto" in change for change in tight.smallest_changes)
    assert planned(host_gb_per_gpu=10.0).require_chosen().sleep == SLEEPS
    with pytest.raises(PlanError, match="not built again"):
        PlanOptions(**SMALL, sleep_level="0", rebuild_engine=True).request()


# -- as written


@pytest.mark.parametrize(
    ("options", "memory"),
    [(SMALL, (2, False)), (TINY, (0, False)), (FULL, (2, True)), ({**SMALL, "sleep_level": "1"}, (1, False))],
)
def test_a_config_hands_over_what_was_planned(options: dict[str, Any], memory: tuple[int, bool]) -> None:
    plan = planned(**options)
    config = validate(tomllib.loads(run_toml(plan)), RunConfig, origin="run.toml")
    config.check()
    assert (config.memory.sleep_level, config.memory.offload) == memory
    request, chosen = plan.request, plan.require_chosen()
    held = config.rollout.kv_pool_tokens * request.model.kv_bytes_per_token(2)
    assert held <= chosen.account.rollout.kv_pool_bytes
    if not chosen.sleep.moves_state:
        longest = request.workload.prompt_tokens + request.workload.max_response_tokens
        assert config.rollout.kv_pool_tokens <= config.rollout.num_slots * longest
    assert not [text for text in execution(request, chosen).differences if text.startswith("memory")]


def test_adapters_planned_over_many_gpus_leave_room_for_a_trainer_that_is_whole_on_one() -> None:
    options = {"model": "Qwen3-8B", "num_gpus": "8", "lora_rank": 16, "max_staleness": 0}
    plan = make_plan(PlanOptions(**options).request(), is_brief=True)
    request, chosen = plan.request, plan.require_chosen()
    assert not chosen.sleep.moves_state
    done = execution(request, chosen)
    weights = replica_weight_bytes(request.model, chosen.rollout_layout)
    state = 2 * request.model.params if not done.sleep.moves_state else 0
    used = done.kv_pool_bytes / done.replica_gpus + weights + state
    assert used <= 0.9 * request.cluster.accelerator.hbm_bytes


@pytest.mark.parametrize(
    ("options", "verl", "slime"),
    [
        (SMALL, {"param_offload": False, "gpu_memory_utilization": 0.44}, ["--no-offload-train"]),
        (TINY, {"param_offload": False, "free_cache_engine": False}, ["--no-offload-train", "--no-offload-rollout"]),
        (FULL, {"param_offload": True, "gpu_memory_utilization": 0.58}, []),
    ],
    ids=["engine sleeps", "all stays", "state waits"],
)  # fmt: skip
def test_other_systems_are_told_what_stays(
    options: dict[str, Any], verl: dict[str, Any], slime: list[str]
) -> None:
    plan = planned(**options, max_staleness=0)
    text = emitter("verl")(plan)
    told = dict(re.findall(r"^  [\w.]*?(\w+)=(\S+)$", text, re.MULTILINE))
    assert {key: told.get(key) for key in verl} == {key: str(value) for key, value in verl.items()}
    assert told["optimizer_offload"] == told["param_offload"]
    if "free_cache_engine" not in verl:  # verl's own default
        assert "free_cache_engine" not in text
    assert [word for word in emitter("slime")(plan).split() if word.startswith("--no-offload")] == slime
    offload = f"enable_offload: {str(verl['param_offload']).lower()}"
    assert offload in emitter("areal")(plan)


# -- beyond one plan


def test_the_simulation_hands_over_as_planned() -> None:
    plan = planned()
    search = Search(plan.request)
    found = search.candidate("sync", 1, 1)
    scenario = scenario_of(plan.request, found)
    assert scenario.switch_s == found.account.seconds.switch == pytest.approx(2.2)
    token = plan.request.model.kv_bytes_per_token(2)
    assert scenario.kv_pool_tokens == pytest.approx(found.account.rollout.kv_pool_bytes / token, rel=0.01)


def test_growing_responses_tip_a_state_that_stays_over_to_host_memory() -> None:
    """When 16k tokens are usual, the KV pool beside the state binds; the plan as it is goes on without the moves."""
    plan = planned(
        is_brief=False, model="Qwen3-8B", num_gpus="2", gpus_per_node=2, prompts="64", group_size="16",
        response_tokens="2k", max_response_tokens="16k", length_sigma=0.3, length_growth=0.02, horizon=100,
        max_staleness=0,
    )  # fmt: skip
    assert plan.require_chosen().sleep == SLEEPS
    states = [moment.best.idle_state for moment in plan.growth if moment.best is not None]
    assert states[0] == "device" and states[-1] == "host" and states == sorted(states)  # type: ignore[type-var]
    last = plan.growth[-1]
    assert last.best is not None and last.chosen_step_s is not None
    assert last.best.step_s < last.chosen_step_s and "state waits on hosts" in last.cells()[-1]
    data: list[dict[str, Any]] = [moment.as_json() for moment in plan.growth]
    assert data[-1]["recommended"]["idle_state"] == "host"


def test_what_ifs_keep_what_leaves_and_ask_again_for_the_best() -> None:
    plan = planned(is_brief=False, **{**SMALL, "max_staleness": 0})
    longer = plan.shifts[0]
    assert longer.step_s is not None and longer.best is not None
    assert longer.step_s < 1.6 * plan.require_chosen().step_s  # no hand-over came in
    assert {s.best.idle_state for s in plan.sizes if s.best is not None} == {"device"}
