"""Shapes against published totals, and KV bytes against hand arithmetic."""

from __future__ import annotations

import pytest

from rollbook.errors import ConfigError
from rollbook.ledger.flops import attention_flops, forward_flops
from rollbook.ledger.hardware import accelerator_names, load_accelerator
from rollbook.ledger.model import ModelSpec, load_model, model_names


@pytest.mark.parametrize("name", model_names())
def test_parameters_from_shapes_agree_with_the_published_total(name: str) -> None:
    model = load_model(name)
    if model.published_params:
        assert model.computed_params == pytest.approx(model.published_params, rel=0.01)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("DeepSeek-V3", 37e9), ("Qwen3-30B-A3B", 3.3e9), ("Qwen3-235B-A22B", 22e9), ("Qwen3.5-397B-A17B", 17e9)],
)
def test_active_parameters_from_shapes(name: str, expected: float) -> None:
    """Cards round, and some leave the embedding out: within 3 %."""
    assert load_model(name).computed_active_params == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-8B", 2 * 36 * 8 * 128 * 2),  # K and V, layers, KV heads, width, bfloat16
        ("Llama-3.1-8B", 2 * 32 * 8 * 128 * 2),
        ("Llama-3.1-70B", 2 * 80 * 8 * 128 * 2),
        ("Qwen2.5-7B", 2 * 28 * 4 * 128 * 2),
        ("DeepSeek-V3", 61 * (512 + 64) * 2),  # latent and rope key, once for all heads
        ("Qwen3.5-397B-A17B", 2 * 15 * 2 * 256 * 2),  # one layer in four has attention
    ],
)
def test_kv_bytes_per_token(name: str, expected: int) -> None:
    assert load_model(name).kv_bytes_per_token() == expected


def test_sliding_windows_stop_growing() -> None:
    """gpt-oss-20b: 12 of 24 layers keep at most 128 tokens; 2 x 8 x 64 x 2 bytes a layer and token."""
    model = load_model("gpt-oss-20b")
    assert model.kv_bytes(100) == 24 * 2048 * 100
    assert model.kv_bytes(10_000) == 12 * 2048 * (10_000 + 128)


def test_linear_attention_keeps_a_constant_state() -> None:
    """Qwen3.5-27B: 48 layers x 48 heads x 128 x 128 x 4 bytes, the published 151 MB a sequence."""
    model = load_model("Qwen3.5-27B")
    assert model.state_bytes == 48 * 48 * 128 * 128 * 4
    assert model.kv_bytes(1000) - model.kv_bytes(0) == 1000 * model.kv_bytes_per_token()


def test_embeddings_stand_apart() -> None:
    """Qwen3-0.6B ties 151,936 x 1,024: the body is 0.44 B, the card's "non-embedding" figure."""
    model = load_model("Qwen3-0.6B")
    assert model.embedding_params == 151_936 * 1024
    assert model.computed_params - model.embedding_params == pytest.approx(0.44e9, rel=0.01)


def test_forward_flops_of_a_dense_model() -> None:
    """2 FLOPs per multiplied parameter and token; causal attention 2 x layers x (heads x width) x S a token."""
    model = load_model("Llama-3.1-8B")
    assert model.matmul_params == model.computed_params - 128_256 * 4096
    assert float(attention_flops(model, 4096.0)) == 2 * 32 * 4096 * 4096 * 4096
    assert forward_flops(model, 4096.0) == 2 * model.matmul_params * 4096 + 2 * 32 * 4096 * 4096 * 4096


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "Llama-3-8B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen3-30B-A3B"),
        ("Qwen3_235B_a22B", "Qwen3-235B-A22B"),
        ("LLAMA3.1_405B", "Llama-3.1-405B"),
        ("DeepSeek-V3.1 (FP8)", "DeepSeek-V3.1"),
        ("GPT OSS 120B", "gpt-oss-120b"),
    ],
)
def test_names_are_read_as_people_write_them(spelling: str, name: str) -> None:
    assert load_model(spelling).name == name


def test_unknown_model_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Qwen3-8B"):
        load_model("Qwen3-9B")


def test_unknown_gpu_names_the_nearest_and_unpublished_facts_are_refused() -> None:
    with pytest.raises(ConfigError, match="H100"):
        load_accelerator("H10O")
    with pytest.raises(ConfigError, match="calibrate"):
        load_accelerator("Ascend 910B")
    assert "H100 SXM" in accelerator_names()


def test_h100_is_the_published_one() -> None:
    gpu = load_accelerator("h100")
    assert (gpu.peak("bfloat16"), gpu.hbm_bytes, gpu.hbm_bytes_per_s) == (989e12, 80_000_000_000, 3.35e12)
    assert load_accelerator("A100").peak("float8") == 312e12  # no float8 units: runs as bfloat16


QWEN3_8B_CONFIG = {
    "model_type": "qwen3", "num_hidden_layers": 36, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
    "tie_word_embeddings": False, "max_position_embeddings": 40960,
}  # fmt: skip


def test_config_json_gives_the_registrys_model() -> None:
    model = ModelSpec.from_hf_config(QWEN3_8B_CONFIG)
    assert model.computed_params == load_model("Qwen3-8B").computed_params
    assert model.assumed == ()


def test_config_json_of_experts_and_latent_attention() -> None:
    config = {
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "intermediate_size": 18432, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "max_position_embeddings": 163840,
    }  # fmt: skip
    assert ModelSpec.from_hf_config(config).computed_params == load_model("DeepSeek-V3").computed_params


def test_config_json_of_linear_attention() -> None:
    config = {
        "model_type": "qwen3_5", "text_config": {
            "model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 256, "intermediate_size": 12288, "vocab_size": 248320,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        },
    }  # fmt: skip
    assert ModelSpec.from_hf_config(config).computed_params == load_model("Qwen3.5-9B").computed_params


def test_unknown_architecture_says_what_it_assumed() -> None:
    model = ModelSpec.from_hf_config({**QWEN3_8B_CONFIG, "model_type": "zebra"}, name="zebra-8b")
    assert "zebra" in model.assumed[0] and "Llama-style" in model.assumed[0]


def test_config_without_sizes_is_refused() -> None:
    with pytest.raises(ConfigError, match="hidden_size"):
        ModelSpec.from_hf_config({"model_type": "llama", "num_hidden_layers": 2}, name="broken")
