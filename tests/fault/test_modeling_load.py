"""Model folders that cannot be used: each says what is wrong and what to do, without a traceback."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from rollbook.errors import ConfigError
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import INDEX, WEIGHTS, LoadedModel, load_model

NEW = {
    "hidden_size": 16,
    "num_heads": 2,
    "num_layers": 1,
    "intermediate_size": 16,
    "alphabet": "0123456789+=",
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    load_model(ModelConfig.model_validate({"new": NEW})).save(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "model"))


def _load(folder: Path, **more: object) -> LoadedModel:
    return load_model(ModelConfig.model_validate({"path": str(folder), **more}))


def _edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        _load(tmp_path / "nowhere")


def test_a_file_is_not_a_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        _load(folder / "config.json")


def test_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        _load(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_unreadable_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        _load(folder)


def test_config_without_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ConfigError, match="no weights"):
        _load(folder)


def test_missing_shard_is_named(folder: Path) -> None:
    names = dict.fromkeys(load_file(folder / WEIGHTS), "model-00002-of-00002.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": names}))
    with pytest.raises(ConfigError, match="first model-00002-of-00002"):
        _load(folder)


def test_truncated_weights(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])
    with pytest.raises(ConfigError, match="cannot be read"):
        _load(folder)


def test_missing_and_unknown_tensors_are_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    norm = tensors.pop("model.norm.weight")
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"lack 1 tensors, first model\.norm\.weight"):
        _load(folder)
    save_file({**tensors, "model.norm.weight": norm, "model.extra": norm.clone()}, folder / WEIGHTS)
    with pytest.raises(ConfigError, match=r"unknown model\.extra"):
        _load(folder)


def test_weights_of_another_shape(folder: Path) -> None:
    _edit_config(folder, intermediate_size=32)
    with pytest.raises(ConfigError, match=r"has shape \[16, 16\], config\.json says \[16, 32\]"):
        _load(folder)


def test_tokenizer_with_more_ids_than_embeddings(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:15].clone()
    save_file(tensors, folder / WEIGHTS)
    _edit_config(folder, vocab_size=15)
    with pytest.raises(ConfigError, match="ids up to 19 and the model's embedding 15 rows"):
        _load(folder)


def test_code_beside_the_weights_needs_consent(folder: Path) -> None:
    _edit_config(folder, auto_map={"AutoModelForCausalLM": "code.Model"})
    with pytest.raises(ConfigError, match="its own Python code"):
        _load(folder)


def test_an_architecture_nobody_knows(folder: Path) -> None:
    _edit_config(folder, model_type="unheard_of", architectures=["UnheardOf"])
    with pytest.raises(ConfigError, match="transformers cannot load"):
        _load(folder)
    with pytest.raises(ConfigError, match="model_type is 'unheard_of'"):
        _load(folder, implementation="rollbook")


def test_missing_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        _load(folder)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_folder_without_tokenizer_files_is_told_from_prompts_without_tokens(
    tmp_path: Path, architecture: str
) -> None:
    """transformers makes an empty tokenizer of it, whose every text has no token."""
    folder = tmp_path / architecture
    load_model(ModelConfig.model_validate({"new": {**NEW, "architecture": architecture}})).save(folder)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ConfigError, match=r"tokenizer (of|could be loaded)") as refused:
        _load(folder)
    assert "tokenizer's files beside the model" in refused.value.remedy


def test_sampling_settings_beside_the_weights_are_never_read(folder: Path) -> None:
    """BR-063: an unreadable generation config changes nothing, for either implementation."""
    reference = _load(folder)
    settings = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 1.3, "eos_token_id": 7}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    for implementation in ("rollbook", "transformers"):
        model = _load(folder, implementation=implementation)
        assert model.facts.eos_ids == reference.facts.eos_ids == (2,)
        for name, tensor in reference.named_tensors().items():
            assert torch.equal(tensor, model.named_tensors()[name])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="'cuda'"):
        load_model(ModelConfig.model_validate({"new": NEW, "device": "cuda"}))
