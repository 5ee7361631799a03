"""Training state in host memory: what it holds, what it costs, and when the search takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollbook.errors import PlanError
from rollbook.planner.candidate import Candidate
from rollbook.planner.host_memory import OFFLOAD_GAIN_FRAC
from rollbook.planner.offload import host_state_bytes, on_device
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.search import Search
from rollbook.planner.words import MODE_TITLES, seconds

TIGHT = {
    "model": "Qwen3-32B",
    "gpu": "H20",
    "num_gpus": "8",
    "response_tokens": "8k",
    "max_response_tokens": "16k",
}


def options(**changed: Any) -> PlanOptions:
    return PlanOptions(**{**TIGHT, **changed})


def best(**changed: Any) -> Candidate:
    return min((c for c in Search(options(**changed).request()).run() if c.fits), key=lambda c: c.step_s)


def test_what_stays_on_the_device_and_what_the_hosts_hold_add_up_to_the_state() -> None:
    request = options(algorithm="ppo").request()
    params = request.model.params
    assert request.assumptions.train_state_bytes_per_param == 16
    left = {"none": 16.0, "optimizer": 4.0, "weights": 0.0}
    for offload, on_gpu in left.items():
        kept = on_device(request.assumptions, offload).train_state_bytes_per_param  # type: ignore[arg-type]
        held = host_state_bytes(request, offload)  # type: ignore[arg-type]
        assert kept == pytest.approx(on_gpu, abs=1e-6)
        assert held == pytest.approx((16 - on_gpu) * 2 * params)  # policy and critic


def test_the_optimizer_state_crosses_both_ways_at_each_update_and_shards_show_where_they_outlast_a_layer() -> (
    None
):
    """32 B parameters on 8 GPUs, two updates: 12 B of each cross twice an update, at the rate of a hand-over."""
    request = options(mini_batches=2, offload="optimizer").request()
    plain = Search(replace(request, offload="none")).trainers.best(8)
    moved = Search(request).trainers.best(8)
    same = Search(
        replace(request, offload="none")
    )  # the layout that fits with less on the device, priced without
    assert moved.offload == "optimizer" and not moved.side.why_not
    params, rate = request.model.params / 8, request.assumptions.switch.state_bytes_per_s
    crossing_s = 2 * 2 * 12 * params / rate
    assert rate < request.cluster.accelerator.host_link_bytes_per_s
    assert moved.side.train_s > crossing_s
    if moved.layout == plain.layout:
        assert moved.side.train_s - plain.side.train_s == pytest.approx(crossing_s)
    streamed = same.trainers.best(8, "weights")
    assert streamed.offload == "weights" and streamed.side.train_s >= moved.side.train_s - 1e-6
    slow = replace(request.cluster.accelerator, host_link_bytes_per_s=1e8)
    at_a_crawl = Search(
        replace(request, offload="weights", cluster=replace(request.cluster, accelerator=slow))
    )
    assert at_a_crawl.trainers.best(8).side.train_s > 5 * streamed.side.train_s


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"gpu": "H100", "num_gpus": "16", "max_response_tokens": "32k"},
        {"model": "Qwen3-235B-A22B", "num_gpus": "64"},
        {"model": "DeepSeek-V3", "gpu": "H200", "num_gpus": "128"},
        {"gpu": "H100", "num_gpus": "64"},
        {"model": "Qwen3-8B", "gpu": "L40S", "num_gpus": "8"},
    ],
)
def test_no_place_of_the_state_that_is_asked_for_beats_the_search(changed: dict[str, str]) -> None:
    """Whatever is left unpriced could not have been faster by what makes it worth its moving part."""
    found = best(**changed)
    for offload in ("none", "optimizer", "weights"):
        try:
            asked = best(**changed, offload=offload)
        except ValueError:  # nothing fits
            continue
        assert found.step_s <= asked.step_s / (1 - OFFLOAD_GAIN_FRAC) + 1e-9, offload


def test_a_refused_split_tells_what_its_step_would_be_with_its_state_on_the_hosts() -> None:
    """A topology that host memory makes possible stands beside the one that is refused for it."""
    rows = Search(options(model="Qwen3-235B-A22B", num_gpus="64").request()).run()
    refused = [c for c in rows if not c.fits and not c.train.is_offloaded]
    beside = {(c.mode, c.split): c for c in rows if c.fits and c.train.is_offloaded}
    possible = [c for c in refused if (c.mode, c.split) in beside]
    assert possible
    for c in possible:
        places = {result.offload: result for result in c.offloads}
        told = beside[c.mode, c.split]
        assert places["none"].why_not and "training state" in places["none"].why_not[0]
        assert places[told.train.offload].step_s == pytest.approx(told.step_s)
        assert c.why_refused.endswith(f" in host memory {seconds(told.step_s)}")
        assert told.title.endswith(" on hosts") and c.title == MODE_TITLES[c.mode]
        row = told.as_json()
        assert row["offload"] == told.train.offload and set(row["offloads"]) == set(places)  # type: ignore[call-overload]


def test_hosts_without_room_are_refused_with_what_they_lack() -> None:
    request = replace(options(offload="optimizer").request(), host_bytes_per_gpu=1e9)
    why_not = Search(request).trainers.best(8).side.why_not
    assert len(why_not) == 1 and "1.0 GB (--host-gb-per-gpu)" in why_not[0] and "training GPUs" in why_not[0]
    assert not any(c.train.is_offloaded for c in Search(replace(request, offload="auto")).run() if c.fits)


def test_a_device_is_shared_only_where_the_hosts_have_room_for_the_state_that_waits() -> None:
    """16 B of 8.19 B parameters and 2 B of their reference, on 16 GPUs: 9.2 GB a GPU, 73.7 GB a node."""
    asked: dict[str, Any] = {"model": "Qwen3-8B", "gpu": "H100", "num_gpus": "16", "idle_state": "host"}
    roomy = make_plan(options(**asked, host_gb_per_gpu=9.3).request(), is_brief=True)
    chosen = roomy.require_chosen()
    assert chosen.mode == "sync"
    assert roomy.as_json()["recommendation"]["host_bytes_per_node"] == pytest.approx(  # type: ignore[index]
        18 * roomy.request.model.params / 2
    )
    tight = make_plan(options(**asked, host_gb_per_gpu=9.1).request(), is_brief=True)
    assert tight.require_chosen().mode.startswith("separate")
    shared = [c for c in tight.candidates if c.mode in ("sync", "colocate_async")]
    assert shared and all("9.2 GB of host memory a GPU while the engines" in c.why_refused for c in shared)


def test_what_lives_on_the_hosts_has_no_place_on_the_device() -> None:
    """The trained weights, their gradients, master weights and moments; the reference is frozen and stays."""
    plan = make_plan(options(gpu="H100", num_gpus="16", offload="weights").request(), is_brief=True)
    owners = {item.name: item.bytes for item in plan.beside.memory if item.place == "train device"}
    assert not owners.keys() & {"weights", "gradients", "master weights", "optimizer moments"}
    assert owners["reference"] == pytest.approx(
        2 * plan.request.model.params / plan.require_chosen().split[1]
    )


@pytest.mark.parametrize("host_gb", [0.0, 1.0])
@pytest.mark.parametrize("offload", ["auto", "weights"])
def test_a_plan_that_lacks_host_memory_says_how_much_would_do(host_gb: float, offload: str) -> None:
    """524.8 GB on 8 GPUs do not fit the devices: 12 of 16 bytes in host memory are 49.1 GB a GPU, all of them 65.5.
    What is left, the reference with it, stays on the device while the engines have it."""
    asked = {"gpu": "H100", "response_tokens": "4k", "max_response_tokens": "16k", "offload": offload}
    plan = make_plan(options(**asked, host_gb_per_gpu=host_gb).request(), is_brief=True)
    assert plan.chosen is None
    enough = {"auto": 50, "weights": 66}[offload]
    assert f"give training state more host memory (--host-gb-per-gpu {enough})" in plan.smallest_changes
    assert make_plan(options(**asked, host_gb_per_gpu=float(enough)).request(), is_brief=True).chosen
    least = {"auto": 8, "weights": 1}[offload]  # a trainer has a GPU, also where none of its state is there
    assert plan.derivation[1].outputs["min_train_gpus"] == least


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lora_rank": 16}, "frozen base"),
        ({"stack": "megatron"}, "--stack fsdp"),
        ({"assume": "paper"}, "--assume default"),
    ],
)
def test_weights_on_the_host_are_refused_where_no_trainer_fetches_them(
    changed: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError) as refusal:
        make_plan(options(offload="weights", **changed).request(), is_brief=True)
    assert words in str(refusal.value)


def test_the_sentence_says_why_the_state_left_the_device() -> None:
    plan = make_plan(options(model="Qwen3-235B-A22B", num_gpus="64").request(), is_brief=True)
    chosen = plan.require_chosen()
    if not chosen.train.is_offloaded:
        chosen = next(c for c in plan.candidates if c.train.is_offloaded and c.fits)
    near = next(c for c in plan.candidates if not c.train.is_offloaded and c.fits and c.mode == chosen.mode)
    assert chosen.step_s < (1 - OFFLOAD_GAIN_FRAC) * near.step_s
    assert any("in host memory" in note for note in chosen.account.notes)
