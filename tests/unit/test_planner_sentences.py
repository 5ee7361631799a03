"""Sentences of a plan that an engineer reads: what they claim holds, in whatever topology they are said of."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import pytest

from rollbook.planner.derived_publication import step_by_bound
from rollbook.planner.emit import emitter
from rollbook.planner.engines import engine_sentence
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import Plan, make_plan
from rollbook.planner.search import Search


@functools.cache
def plan(**asked: Any) -> Plan:
    return make_plan(PlanOptions(**asked).request(), is_brief=True)


ONE_GPU: dict[str, Any] = {
    "model": "Qwen2.5-0.5B", "gpu": "4090", "num_gpus": 1, "prompts": 64, "group_size": 8, "prompt_tokens": 256,
    "response_tokens": 512,
}  # fmt: skip
ADAPTERS: dict[str, Any] = {
    "model": "Qwen3-14B", "gpu": "A100-80GB", "num_gpus": 2, "lora_rank": 32, "lora_publish": "adapter",
    "prompts": 64, "response_tokens": 1024,
}  # fmt: skip
JUDGE: dict[str, Any] = {
    "model": "Qwen3-8B", "num_gpus": 16, "reward": "generative", "reward_model": "Qwen3-32B", "reward_tokens": 512,
}  # fmt: skip
SEES: dict[str, Any] = {"model": "Qwen2.5-VL-7B", "num_gpus": 8, "response_tokens": 1024}
ALL = {"one GPU": ONE_GPU, "adapters": ADAPTERS, "judge": JUDGE, "sees": SEES}


def said(step: int, asked: dict[str, Any]) -> str:
    return plan(**asked).derivation[step - 1].because


@pytest.mark.parametrize("name", ALL)
def test_the_shares_of_a_steps_work_are_all_of_it(name: str) -> None:
    shares = said(1, ALL[name]).partition("of which ")[2].partition(". At the peak")[0]
    told = [float(share) for share in re.findall(r"([\d.]+) %", shares)]
    assert sum(told) == pytest.approx(100.0, abs=0.1 * len(told)), shares
    assert ("the reward model" in shares) == (name == "judge")


def test_a_replica_that_also_judges_holds_both_models() -> None:
    """Qwen3-32B is 65.5 GB in bfloat16."""
    assert re.search(
        r"16\.4 GB of weights for generation and the 65\.5 GB of the reward model", said(2, JUDGE)
    )
    assert "of generation and judging beside" in said(4, JUDGE)
    assert "reward model" not in said(2, SEES) and "judging" not in said(4, SEES)


@pytest.mark.parametrize("name", ["adapters", "judge", "sees"])
def test_two_sides_meet_only_where_they_take_about_equally_long(name: str) -> None:
    made = plan(**ALL[name])
    outputs = made.derivation[3].outputs
    sides = sorted(float(str(outputs[f"{side}_side_s"])) for side in ("rollout", "train"))
    words = "the two sides meet at" if sides[0] > 0.9 * sides[1] else "the two sides come closest at"
    assert words in made.derivation[3].because


def test_families_of_engines_that_take_equally_long_are_told_at_once() -> None:
    made = plan(**ONE_GPU)
    sentence = engine_sentence(made.request, made.base)
    assert re.fullmatch(
        r"Engines are priced as vLLM, which generates a step in [\d.]+ s; "
        r"SGLang and TensorRT-LLM would take [\d.]+ s\.",
        sentence,
    ), sentence
    assert "hold the replica" in said(3, ONE_GPU) and "hold all replicas" in said(3, SEES)


@pytest.mark.parametrize(
    ("name", "how_far"),
    [
        ("one GPU", "so no byte leaves its GPU."),
        ("sees", "so the gather stays on the scale-up link."),
        ("judge", "so no byte crosses a network but the gather's."),
    ],
)
def test_bytes_of_a_shared_publication_go_as_far_as_shards_are_apart(name: str, how_far: str) -> None:
    made = plan(**ALL[name])
    assert made.chosen is not None and made.chosen.mode == "sync"
    assert f"engine and trainer share their devices, {how_far}" in said(6, ALL[name])


def test_how_adapters_are_published_is_a_sentence() -> None:
    assert re.search(
        r"They are published alone, 256\.9 MB in \d+ ms; merged into whole weights they would be 29\.5 GB in ",
        said(6, ADAPTERS),
    )


def test_seconds_of_another_trainer_are_of_forwards_too() -> None:
    """The table of the step has training alone: 274 s where the sentence has 448 s."""
    text = said(5, JUDGE)
    assert "for forwards and training instead of" in text


def test_a_model_that_sees_is_planned_by_its_language_model_alone() -> None:
    assert any("language model alone" in note and "image" in note for note in plan(**SEES).warnings)
    assert not any("image" in note for name in ("one GPU", "judge") for note in plan(**ALL[name]).warnings)


def test_steps_by_bound_keep_the_training_state_where_the_plan_has_it() -> None:
    request = PlanOptions(model="Qwen3-8B", num_gpus=16, prompts=64, max_staleness=1).request()
    search = Search(request)
    chosen = search.candidate("separate_async", 8, 8, "optimizer")
    steps = step_by_bound(request, search, chosen)
    assert steps[1] == chosen.step_s != search.candidate("separate_async", 8, 8, "none").step_s
    wider = Search(replace(request, max_staleness_steps=2), layouts=[chosen.rollout_layout])
    assert steps[2] == wider.candidate("separate_async", 8, 8, "optimizer").step_s


@pytest.mark.parametrize("name", ["one GPU", "judge", "sees"])
def test_a_node_of_an_export_has_no_more_gpus_than_the_cluster(name: str) -> None:
    made = plan(**ALL[name])
    gpus = made.request.cluster.num_gpus
    for target in ("verl", "slime", "areal"):
        text = emitter(target)(made)
        told = [int(count) for count in re.findall(r"gpus[_-]per[_-]node[=: ]+(\d+)", text)]
        assert told and set(told) == {min(8, gpus)}, (target, told)
