"""A config.json as people keep it: what its model is called, and what is no shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollbook.errors import ConfigError, PlanError, RunError
from rollbook.ledger.model import ModelSpec, load_model
from rollbook.planner.options import PlanOptions

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 4, "hidden_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512, "intermediate_size": 256,
}  # fmt: skip


def written(folder: Path, **changed: Any) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(QWEN3 | changed))
    return str(path)


@pytest.mark.parametrize(
    ("folder", "changed", "name"),
    [
        ("tmp8f3a", {"_name_or_path": "Qwen/Qwen3-0.1B"}, "Qwen3-0.1B"),
        ("tmp8f3a", {}, "Qwen3ForCausalLM"),
        ("step_40", {"_name_or_path": "."}, "Qwen3ForCausalLM"),
        ("model", {"architectures": None}, "qwen3"),
        ("my-Qwen3-tiny", {}, "my-Qwen3-tiny"),
        ("policy_8b_sft", {}, "policy_8b_sft"),
        ("models--org--Qwen3-0.1B/snapshots/0a1b2c3d", {}, "Qwen3-0.1B"),
    ],
)
def test_a_model_is_named_by_itself_then_its_folder_then_its_architecture(
    tmp_path: Path, folder: str, changed: dict[str, Any], name: str
) -> None:
    path = written(tmp_path / folder, **changed)
    assert load_model(path).name == name
    assert load_model(str(Path(path).parent)).name == name


@pytest.mark.parametrize("key", sorted(k for k in QWEN3 if isinstance(QWEN3[k], int)))
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), 1e30, "many", {}, [None]])
def test_a_shape_that_is_no_count_is_refused_by_name(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(RunError, match=key) as refused:
        load_model(written(tmp_path, **{key: value}))
    assert refused.value.remedy


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (
            {"num_experts": 8, "num_experts_per_tok": 64, "moe_intermediate_size": 64},
            "64 experts a token of 8",
        ),
        ({"layer_types": 3}, "layer_types"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3}, "mlp_only_layers"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"hidden_size": 128.5}, r"hidden_size is 128\.5"),
        ({"num_hidden_layers": 0}, "no num_hidden_layers above 0"),
        ({"vocab_size": None}, "no vocab_size"),
        ({"num_key_value_heads": 3}, "4 attention heads in 3 key-value heads"),
        ({"num_key_value_heads": 8}, "4 attention heads in 8 key-value heads"),
        ({"layer_types": ["full_attention"] * 3}, "4 layers and 3 layer_types"),
    ],
)
def test_what_no_model_can_have_is_refused(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    with pytest.raises(RunError, match=told) as refused:
        load_model(written(tmp_path, **changed))
    assert refused.value.remedy


def test_a_byte_order_mark_is_no_part_of_a_config(tmp_path: Path) -> None:
    path = Path(written(tmp_path))
    spec = load_model(str(path))
    path.write_text(path.read_text(), "utf-8-sig")
    assert load_model(str(path)) == spec


def test_heads_wider_than_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="256 heads share a hidden size of 128"):
        load_model(written(tmp_path, num_attention_heads=256))


def test_keys_that_make_layers_differ_in_an_unknown_architecture_are_told() -> None:
    """Jamba's attention is one layer of eight, and its experts are in every other one."""
    plain = {
        "model_type": "jambalike", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 65536, "intermediate_size": 14336, "sliding_window_pattern": 6,
    }  # fmt: skip
    mixed = {
        **plain,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "ssm_state_size": None,
    }
    told = set(ModelSpec.from_hf_config(mixed).assumed) - set(ModelSpec.from_hf_config(plain).assumed)
    assert told == {
        "its layers are taken to be alike: not read are attn_layer_offset, attn_layer_period, mamba_d_state"
    }


SHAPE = {
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 30_522,
}


@pytest.mark.parametrize(
    "more",
    [
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": "modernbert"},
        {"model_type": "new", "architectures": ["NewForTokenClassification"]},
        {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]},
    ],
)
def test_an_encoder_generates_nothing_and_may_judge(more: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SHAPE | more))
    with pytest.raises(PlanError, match="is an encoder, which generates nothing"):
        PlanOptions(model=str(path)).request().check()
    PlanOptions(model="Qwen3-8B", reward="model", reward_model=str(path)).request().check()


@pytest.mark.parametrize("model_type", ["bert", "roberta"])
def test_an_encoder_made_a_decoder_is_one(model_type: str) -> None:
    assert not ModelSpec.from_hf_config(SHAPE | {"model_type": model_type, "is_decoder": True}).is_encoder


def test_an_encoder_decoder_is_refused_by_that_name() -> None:
    with pytest.raises(ConfigError, match="encoder-decoder .t5."):
        ModelSpec.from_hf_config(
            {"model_type": "t5", "is_encoder_decoder": True, "d_model": 512, "num_layers": 6}
        )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (
            {"text_config": {"model_type": "qwen2"}, "vision_config": {"depth": 32}},
            "vision_config is not read",
        ),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "taken as the decoder under it"),
        ({"architectures": ["Qwen2Model"]}, "taken as the decoder under it"),
        (
            {"layer_types": ["conv"] * 9 + ["full_attention"] * 3},
            "layers of the type conv are taken as attention",
        ),
    ],
)
def test_what_stands_around_a_decoder_is_said(more: dict[str, object], told: str) -> None:
    model = ModelSpec.from_hf_config(SHAPE | {"model_type": "qwen2"} | more)
    assert told in "; ".join(model.assumed) and not model.is_encoder
