"""The configs under examples/ run, and the config a run writes down is the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import start_run
from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import load_model
from tiny_run import RunResult, TinyRun, as_set

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.toml"))

SHORT: dict[str, Any] = {
    "run.num_steps": 1,
    "run.groups_per_step": 4,
    "rollout.group_size": 2,
    "rollout.max_response_tokens": 8,
    "rollout.num_slots": 16,
    "rollout.kv_pool_tokens": 4096,
    "trainer.num_mini_batches": 2,
    "trainer.num_threads": 1,
    "warmup.num_updates": 2,
    "warmup.batch_sequences": 4,
    "eval.num_prompts": 2,
    "eval.every_steps": 1,
    "observe.terminal": "off",
    "observe.strict_metrics": True,
    "run.max_failure_frac": 1.0,
    "algorithm.filter.refill": False,  # an untrained model answers nothing right: every group is flat
}
"""Each example as it stands, with less to do: what is on by default, such as the plan, stays on."""


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """A model folder and question files, for the examples that ask for a user's own."""
    folder = tmp_path_factory.mktemp("own")
    new = NewModelConfig(hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, max_position=512)
    load_model(ModelConfig(new=new)).save(folder / "model")
    for name, number in (("train", 0), ("test", 50), ("mine", 100)):
        rows = [
            {"prompt": f"{n}+1?", "question": f"{n}+1?", "answer": f"so it is #### {n + 1}"}
            for n in range(number, number + 40)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = {"model.path": str(folder / "model")}
    return {
        "hf_folder": model | {"data.sources.0.path": str(folder / "mine.jsonl")},
        "gsm8k": model
        | {
            "data.sources.0.path": str(folder / "train.jsonl"),
            "data.held_out.0.path": str(folder / "test.jsonl"),
        },
    }


def test_five_examples_are_there() -> None:
    assert {"addition", "gsm8k", "hf_folder", "ppo_critic", "reasoning_gym"} <= {p.stem for p in EXAMPLES}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_passes_its_checks_and_runs(
    path: Path, own_files: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    config = load_config(path, [], RunConfig)
    config.check()
    if any(source.reasoning_gym for source in config.data.sources):
        pytest.importorskip("reasoning_gym")
    if any(term.function == "math_verify" for term in config.reward.terms):
        pytest.importorskip("math_verify")
    overrides = SHORT | own_files.get(path.stem, {}) | {"run.dir": str(tmp_path)}
    if not config.data.held_out and not config.data.held_out_frac:
        overrides |= {"eval.num_prompts": 0}
    run = RunResult(start_run(path, as_set(overrides)))
    assert run.state["num_steps_done"] == 1
    (plan,) = run.events_of("plan")
    assert ("critic" in plan["stages"]) == config.algorithm.needs_values
    assert (run.folder / "model" / "config.json").is_file()


def test_the_config_that_a_run_writes_down_is_equal_and_gives_the_same_run(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    """Defaults, presets and overrides resolved; run again from the written file alone."""
    overrides = {
        "rollout.batch_invariant": True,
        "algorithm.name": "dapo",
        "trainer.lr": 1e-3,
        "algorithm.clip_eps_low": 0.1,
        "data.sources": [{"task": "addition", "num_prompts": 9, "options": {"num_digits": 1}}],
    }
    first = tiny_run(num_steps=3, **overrides)
    written = load_config(first.folder / "config.toml", [], RunConfig)
    given = load_config(tmp_path / "run.toml", as_set(overrides), RunConfig)
    folders = (str(tmp_path), str(Path.cwd()))  # where its reward function was looked for
    assert written.reward.search_path == folders
    assert written == given.model_copy(
        update={"reward": given.reward.model_copy(update={"search_path": folders})}
    )
    again = RunResult(start_run(first.folder / "config.toml", [f"run.dir={tmp_path / 'again'}"]))
    assert again.trained == first.trained
    for name, tensor in first.parameters.items():
        assert tensor.equal(again.parameters[name]), name
    text = (first.folder / "config.toml").read_text()
    here, there = (f'dir = "{folder}"' for folder in (tmp_path, tmp_path / "again"))
    assert (again.folder / "config.toml").read_text() == text.replace(here, there)
