"""A plan prices its publication by the description that published measurements are compared under."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.model import load_model
from rollbook.ledger.step import Layouts, publication_work
from rollbook.ledger.sync import num_tensors
from rollbook.ledger.workload import Workload
from rollbook.planner.candidate import sync_work_of
from rollbook.planner.plan import Plan, make_plan
from rollbook.planner.request import PlanRequest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

from ledger_errors import load_cases  # noqa: E402
from ledger_sync_cases import published_work  # noqa: E402

EXPERTS = {
    "Qwen3-30B-A3B": ("H100", 16),
    "Qwen3-235B-A22B": ("H200", 64),
    "DeepSeek-V3": ("H800", 512),
}


def request(model: str, assume: str, **work: Any) -> PlanRequest:
    device, num_gpus = EXPERTS[model]
    return PlanRequest(
        model=load_model(model),
        workload=Workload(
            num_prompts=512, group_size=16, prompt_tokens=1024, response_tokens=8192, max_response_tokens=32768,
            **work,
        ),
        cluster=Cluster(accelerator=load_accelerator(device), num_gpus=num_gpus),
        assumptions=load_assumptions(assume),
    )  # fmt: skip


@cache
def plan(model: str, assume: str) -> Plan:
    return make_plan(request(model, assume), is_brief=True)


@pytest.mark.parametrize("model", EXPERTS)
@pytest.mark.parametrize("assume", ["default", "verl", "rollbook"])
def test_engines_of_other_frameworks_find_every_expert_by_name_and_ours_copy_a_layer(
    model: str, assume: str
) -> None:
    """Each engine GPU loads the matrices of its own experts; the copy alone is what the replica's bytes take."""
    found = plan(model, assume)
    assert found.publication is not None and found.chosen is not None
    account, replica = found.publication.account, found.chosen.rollout_layout
    spec, sync = load_model(model), found.request.assumptions.sync
    is_ours = assume == "rollbook"
    assert account.num_tensors == num_tensors(spec, splits_experts=not is_ours)
    stacked = num_tensors(spec, splits_experts=False)
    named_s = 0.0 if is_ours else (account.num_tensors - stacked) / replica.ep_size * sync.expert_load_s
    handed_s = account.num_tensors * sync.handle_tensor_s if found.publication.method == "ipc" else 0.0
    copied_s = account.total_bytes / (sync.load_bytes_per_s * replica.num_gpus)
    assert account.stages_s["load"] == pytest.approx(copied_s + named_s + handed_s)


@pytest.mark.parametrize("model", EXPERTS)
def test_the_step_holds_the_publication_that_the_plan_shows(model: str) -> None:
    found = plan(model, "default")
    assert found.publication is not None and found.chosen is not None
    work, chosen = sync_work_of(found.request, found.chosen), found.chosen
    assert chosen.account.seconds.sync == pytest.approx(found.publication.seconds)
    replica, trainer = chosen.rollout_layout, chosen.train.layout
    assert (work.engine_ep_size, work.dense_copies) == (replica.ep_size, replica.attention_copies)
    assert (work.ep_size, work.pp_size) == (trainer.ep_size, trainer.pp_size)
    assert work.shard_gpus == (trainer.tp_size if chosen.train.backend == "megatron" else 0)


PUBLISHED = {
    ("Qwen3-30B-A3B", "verl"): ("wsync8-verl-ladder-30b-8-1", "wsync8-verl-ladder-30b-16-8"),
    ("Qwen3-235B-A22B", "default"): ("wsync6-miles-p2p-qwen3-235b-8n", "wsync7-nemo-mxfp8-235b-b200"),
    # Broadcasts of 0.7 and 1 trillion parameters.
    ("DeepSeek-V3", "default"): ("wsync6-miles-p2p-kimi-k2-32n", "wsync6-miles-p2p-glm5-16n"),
}


@pytest.mark.parametrize(("model", "assume"), PUBLISHED)
def test_planned_publications_take_what_such_models_took_elsewhere(model: str, assume: str) -> None:
    """Within a factor of two of the measured seconds, whatever the layouts."""
    cases = {case["id"]: case for case in load_cases(BENCH / "data", ["weight_sync"], "A")}
    found = plan(model, assume).publication
    assert found is not None
    for name in PUBLISHED[model, assume]:
        measured = cases[name]["measured"]
        seconds = float(measured.get("nccl_full_broadcast_s") or measured.get("sync_s"))
        assert seconds / 2 < found.seconds < 2 * seconds, name


@pytest.mark.parametrize(
    ("placement", "stack", "trainer", "engine"),
    [
        ("Megatron TP4 PP2 EP8, 4+2 nodes, SGLang TP8 EP8", "megatron", TrainLayout(tp_size=4, pp_size=2, ep_size=8),
         ReplicaLayout(tp_size=8, ep_size=8)),
        ("FSDP2, 4+2 nodes, vLLM EP16", "fsdp", TrainLayout(), ReplicaLayout(tp_size=1, ep_size=16)),
        ("slime, 4+2 nodes, SGLang TP8", "megatron", TrainLayout(tp_size=8, ep_size=8), ReplicaLayout(tp_size=8)),
    ],
)  # fmt: skip
def test_a_measured_and_a_planned_publication_between_the_same_layouts_are_one(
    placement: str, stack: str, trainer: TrainLayout, engine: ReplicaLayout
) -> None:
    """Beside what only a measurement says: that the sides have nodes of their own, and how much changes in a step."""
    default = load_assumptions("default")
    measured = published_work(
        {"model": "Qwen3-235B-A22B", "placement": placement}, load_model("Qwen3-235B-A22B"), load_accelerator("H100"),
        default, device="H100", framework_name="",
    )  # fmt: skip
    planned = publication_work(
        Layouts(replica=engine, train=trainer, changed_frac=measured.changed_frac),
        replace(default, stack=stack),
        mode="separate_async",
        num_train_gpus=32,
        num_rollout_gpus=16,
    )
    assert measured == replace(planned, is_apart=True)
