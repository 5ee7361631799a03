"""What a config names is found from the current folder and beside the config, and then from everywhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from rollbook.config.loading import load_config
from rollbook.config.paths import PATHS, WRITTEN, missing_files, with_whole_paths
from rollbook.config.run_config import RunConfig
from rollbook.controller.entry import resume_run, start_run
from rollbook.errors import ConfigError
from rollbook.modeling.load import load_model
from tiny_run import RunResult, as_set, tiny_config, write_tiny


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside the config", "in the current folder"])
def test_a_run_with_relative_paths_is_resumed_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_beside: bool
) -> None:
    (tmp_path / "job").mkdir()
    (tmp_path / "elsewhere").mkdir()
    place = tmp_path / "job" if is_beside else tmp_path
    load_model(tiny_config().model).save(place / "policy")
    rows = [{"prompt": f"{n}+{m}=", "answer": str(n + m)} for n in range(6) for m in range(6)]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    path = write_tiny(tmp_path / "job", num_steps=1, config={"model": {"path": "policy"}})
    run = RunResult(start_run(path, as_set({"data.sources": [{"path": "rows.jsonl"}]})))
    written = load_config(run.folder / "config.toml", [], RunConfig)
    assert written.model.path == str(place / "policy")
    assert written.data.sources[0].path == str(place / "rows.jsonl")
    assert written.data.sources[0].label == "rows"
    monkeypatch.chdir(tmp_path / "elsewhere")
    resume_run(run.folder, ["run.num_steps=2"])
    assert len(run.metrics) == 2


def test_everything_that_is_missing_is_reported_at_once_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job").mkdir()
    monkeypatch.chdir(tmp_path)
    path = write_tiny(tmp_path / "job", config={"model": {"path": "./policy", "tokenizer_path": "./words"}})
    overrides = {
        "data.sources": [{"path": "rows.jsonl"}],
        "data.held_out": [{"path": "held_out.jsonl"}],
        "reward.terms.0.function": "nowhere_at_all:f",
        "plan.hardware": "machine.toml",
    }
    with pytest.raises(ConfigError) as refused:
        start_run(path, as_set(overrides))
    said = refused.value.what
    assert said.startswith("6 problems:")
    for name in ("model.path", "model.tokenizer_path", "data.sources.0.path", "data.held_out.0.path"):
        assert f"{name} '" in said
    assert (
        f"plan.hardware 'machine.toml' does not exist (seen from {tmp_path} and {tmp_path / 'job'})" in said
    )
    assert "there is no module 'nowhere_at_all'" in said
    assert not (tmp_path / "run").exists()


def test_a_name_that_may_be_a_hub_model_is_left_to_the_hub(tmp_path: Path) -> None:
    config = RunConfig.model_validate({**tiny_config().model_dump(), "model": {"path": "Qwen/Qwen3-0.6B"}})
    assert with_whole_paths(config, tmp_path) is config
    assert not list(missing_files(config, tmp_path))


@pytest.mark.parametrize("name", ["../../x", "a/b", "", "..", "a\\b", "a\nb"])
def test_a_run_is_named_after_one_folder(name: str, tmp_path: Path) -> None:
    path = write_tiny(tmp_path)
    with pytest.raises(ConfigError, match=r"run\.name is .*the name of one folder"):
        load_config(path, as_set({"run.name": name}), RunConfig)


def test_every_field_that_names_something_to_read_is_looked_for() -> None:
    """A new field ends here: it stands in PATHS, or is known to be none."""
    others = {
        *WRITTEN,
        "run.dir",  # written, from the current folder
        "reward.search_path",  # whole already
    }
    found = {
        name
        for name in _strings("", RunConfig)
        if name.endswith(("path", "dir", "folder", "file", "hardware"))
    }
    assert found - others == set(PATHS)


def _strings(prefix: str, section: type[BaseModel]) -> list[str]:
    from rollbook.config.loading import _item_type, _sections

    names: list[str] = []
    for name, field in section.model_fields.items():
        inner = _sections(field.annotation)
        item = _item_type(field.annotation)
        if inner:
            names += [n for one in inner for n in _strings(f"{prefix}{name}.", one)]
        elif items := _sections(item):
            names += [n for one in items for n in _strings(f"{prefix}{name}.*.", one)]
        else:
            names.append(f"{prefix}{name}")
    return names
