"""A mistake is told in the words of who made it: options on the command line, keys in a workload file."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

import rollbook.planner.options as options_module
import rollbook.planner.request as request_module
from rollbook.cli.main import main
from rollbook.errors import RunError
from rollbook.planner.options import PlanOptions, of_file, of_options, option_name
from rollbook.planner.plan import make_plan

FIELDS = {f.name for f in fields(PlanOptions) if "_" in f.name} | set(options_module._FIELDS_OF_OPTIONS)
OPTIONS = {option_name(f.name) for f in fields(PlanOptions)} | {"--lose-prefix"}

MISTAKES: list[tuple[dict[str, object], str]] = [
    ({"group_size": "1"}, "--group-size"),
    ({"response_tokens": "8k", "max_response_tokens": "4k"}, "--max-response-tokens"),
    ({"response_tokens": "8k", "max_response_tokens": "64k"}, "--max-response-tokens"),
    ({"prompt_tokens": "1m"}, "--prompt-tokens"),
    ({"turns": 9.0, "observation_tokens": "100k"}, "--observation-tokens"),
    ({"prompts": "1", "group_size": "2", "mini_batches": 3}, "--mini-batches"),
    ({"lora_rank": 16, "algorithm": "ppo"}, "--lora-rank"),
    ({"lora_rank": 65_000}, "--lora-rank"),
    ({"lora_rank": 16, "assume": "paper"}, "--lora-rank"),
    ({"lora_publish": "adapter"}, "--lora-rank"),
    ({"reward_model": "qwen3-8b"}, "--reward-model"),
    ({"num_gpus": "0"}, "--num-gpus"),
    ({"num_gpus": "12"}, "--num-gpus"),
    ({"rollout_tp": 3}, "--rollout-tp"),
    ({"num_gpus": "3", "rollout_tp": 3}, "--rollout-tp"),
    ({"rollout_tp": -1}, "--rollout-tp"),
    ({"split": "20:20"}, "--split"),
    ({"split": "4;4"}, "--split"),
    ({"offload": "weights", "assume": "paper"}, "--offload"),
    ({"offload": "weights", "stack": "megatron"}, "--offload"),
    ({"max_staleness": -1}, "--max-staleness"),
    ({"host_gb_per_gpu": -1.0}, "--host-gb-per-gpu"),
    ({"length_sigma": 9.0}, "--length-sigma"),
    ({"turns": 0.0}, "--turns"),
    ({"env_seconds": 2.0}, "--env-seconds"),
    ({"keep_prefix": False}, "--lose-prefix"),
]


def told_of(change: dict[str, object]) -> RunError:
    base: dict[str, object] = {"model": "qwen3-8b", "num_gpus": "16"}
    with pytest.raises(RunError) as caught:
        make_plan(PlanOptions(**{**base, **change}).request(), is_brief=True)  # type: ignore[arg-type]
    return caught.value


def of_the_books(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", text) if word in FIELDS}


@pytest.mark.parametrize(("change", "option"), MISTAKES)
def test_a_mistake_of_an_option_is_told_by_its_name(change: dict[str, object], option: str) -> None:
    error = told_of(change)
    said = f"{error.what}; {error.remedy}"
    assert re.search(rf"{option}(?![a-z-])", said), said
    assert not of_the_books(said), said
    assert set(re.findall(r"--[a-z][a-z0-9-]*", said)) <= OPTIONS, said


@pytest.mark.parametrize(("change", "option"), MISTAKES)
def test_a_mistake_of_a_file_is_told_by_its_key(change: dict[str, object], option: str) -> None:
    error = of_file(Path("w.toml"), told_of(change))
    said = f"{error.what}; {error.remedy}"
    key = "keep_prefix = false" if option == "--lose-prefix" else option[2:].replace("-", "_")
    assert said.startswith("w.toml: ") and "--" not in said, said
    assert re.search(rf"\b{key}\b", said), said


@pytest.mark.parametrize("module", [options_module, request_module])
def test_no_message_of_the_question_names_a_field_of_the_books(module: object) -> None:
    """Also of those that no test provokes."""
    tree = ast.parse(Path(str(module.__file__)).read_text())  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("PlanError", "ConfigError"):
            texts = [
                n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)
            ]
            assert not of_the_books(" ".join(texts).replace("getattr", "")), texts


def test_the_command_says_it_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--model", "qwen3-8b", "--response-tokens", "8k", "--max-response-tokens", "4k"])
    err = capsys.readouterr().err
    assert ended.value.code == 2
    assert "hint: raise --max-response-tokens or lower --response-tokens" in err


@pytest.mark.parametrize(
    ("args", "what", "hint"),
    [
        (["--steps", "100000"], "819,200,000", "fewer --steps"),
        (["--sync-every", "3"], "--sync-every is 3", "a --sync-every that divides"),
        (["--take", "first"], "--take is 'first'", "--take admission or arrival"),
        (["--on-publish", "stop"], "--on-publish is 'stop'", "--on-publish keep, drain or abort"),
    ],
)
def test_a_mistake_of_a_simulation_is_told_by_its_option(
    capsys: pytest.CaptureFixture[str], args: list[str], what: str, hint: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", "--model", "qwen3-8b", "--num-gpus", "16", *args])
    error, remedy = capsys.readouterr().err.rstrip().split("\nhint: ")
    assert ended.value.code == 2
    assert what in error and hint in remedy


def test_a_path_or_a_key_of_a_model_is_no_option() -> None:
    error = RunError("runs/group_size/plan.json: num_kv_heads is 0", "see docs.group_size")
    assert of_options(error).args == error.args
