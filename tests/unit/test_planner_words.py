"""What plans say of names, sizes and places: as a reader needs it, and once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from rollbook.cli.main import main
from rollbook.errors import ConfigError
from rollbook.ledger.model import hub_name, load_model
from rollbook.ledger.quantity import apart_bytes
from rollbook.planner.options import PlanOptions
from rollbook.planner.plan import make_plan
from rollbook.planner.run_toml import run_toml


@pytest.mark.parametrize("command", ["plan", "simulate"])
def test_names_are_one_object_where_json_is_asked_for(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    def told(*args: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main([command, *args])
        assert not ended.value.code
        return capsys.readouterr().out

    models, gpus = told("--model", "list"), told("--model", "qwen3-4b", "--gpu", "list")
    assert json.loads(told("--model", "list", "--json")) == {"models": models.split("\n")[:-1]}
    assert json.loads(told("--model", "qwen3-4b", "--gpu", "list", "--json")) == {
        "gpus": gpus.split("\n")[:-1]
    }
    both = json.loads(told("--model", "list", "--gpu", "list", "--json"))
    assert set(both) == {"models", "gpus"}


def test_sizes_that_are_compared_are_told_apart() -> None:
    """Not "72.0 GB of 72.0 GB"."""
    for needed in (72.4e9, 72.04e9, 72.004e9):
        told = apart_bytes(needed, 72e9)
        assert told[0] != told[1] and all(text.endswith(" GB") for text in told)


def test_a_config_names_the_model_as_the_hub_does(tmp_path: Path) -> None:
    """As its comment asks; what the registry does not know, and a folder, stay as they were named."""

    def path_of(model: str) -> str:
        request = PlanOptions(model=model, num_gpus="8").request()
        return str(tomllib.loads(run_toml(make_plan(request, is_brief=True)))["model"]["path"])

    assert path_of("qwen3-4b") == "Qwen/Qwen3-4B"
    assert path_of("Qwen2.5-7B-Instruct") == "Qwen/Qwen2.5-7B-Instruct"
    assert path_of("someone/Qwen3-4B") == "someone/Qwen3-4B"
    assert path_of("Mistral-Nemo-12B") == "Mistral-Nemo-12B"


def test_every_name_on_the_hub_is_of_a_model_that_is_known() -> None:
    from rollbook.ledger.model import _registry_table

    for full in _registry_table()["hub"]:
        owner, _, name = full.partition("/")
        assert owner and load_model(full).params > 0 and hub_name(name) == full


def test_a_model_that_sees_says_whose_figures_it_has() -> None:
    notes = make_plan(PlanOptions(model="Qwen3-VL-8B", num_gpus="8").request(), is_brief=True).warnings
    assert any("figures of the text model of that shape" in note for note in notes)


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "rwkv"])
def test_a_model_without_attention_is_refused_with_a_way_out(kind: str) -> None:
    config = {"model_type": kind, "hidden_size": 2560, "num_hidden_layers": 64, "vocab_size": 50280}
    with pytest.raises(ConfigError) as caught:
        from_config = type(load_model("qwen3-4b")).from_hf_config
        from_config(config)
    assert "state-space layers" in caught.value.remedy


def test_state_on_the_host_has_one_name_and_says_when() -> None:
    options = {"model": "Qwen3-32B", "gpu": "H100", "num_gpus": "8", "response_tokens": "4k"}
    plan = make_plan(
        PlanOptions(**options, offload="optimizer", idle_state="host", max_staleness=0).request(),
        is_brief=True,
    )
    names = {item.name for item in plan.beside.memory if item.place == "train host"}
    assert names == {"training state (pinned), always", "training state (pinned), while engines generate"}
