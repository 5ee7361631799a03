"""Packed attention, the built-in decoder and chunked logprobs against plain transformers, sequence by sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rollbook.modeling.attention import packed_layout
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.decoder import Decoder
from rollbook.modeling.load import load_model
from rollbook.modeling.logprobs import token_logprobs

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied_bias": ("Llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3_ROPE, "head_dim": 16}),
    "mistral_window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 24, **SOFTCAPS}),
    "gemma3": ("Gemma3", {"head_dim": 16, "sliding_window": 5}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
}
BUILT_IN = {"llama", "llama_tied_bias", "llama3_rope", "mistral_window", "qwen2", "qwen2_window", "qwen3"}
LENGTHS = [9, 1, 23, 4]


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    prefix, more = FAMILIES[request.param]
    config_class = getattr(transformers, f"{prefix}TextConfig" if prefix == "Gemma3" else f"{prefix}Config")
    torch.manual_seed(1)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config_class(**(SMALL | more)))
    for name, tensor in model.named_parameters():
        if tensor.ndim == 1:  # norms and biases away from 1 and 0, so that a lost one shows
            torch.nn.init.normal_(tensor, 0.0 if name.endswith("bias") or "Gemma" in prefix else 1.0, 0.2)
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    return request.param, folder


def _reference(
    folder: Path, sequences: list[torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Logprobs of each sequence alone by eager attention, and the gradient of their weighted sum."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    outputs = []
    for ids in sequences:
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        outputs.append(torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0])
    (torch.cat(outputs) * _weights(sequences)).sum().backward()
    return [o.detach() for o in outputs], {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def _weights(sequences: list[torch.Tensor]) -> torch.Tensor:
    return torch.linspace(-1, 2, sum(len(s) - 1 for s in sequences))


@pytest.mark.parametrize("implementation", ["rollbook", "transformers"])
def test_packed_logprobs_and_gradients_equal_each_sequence_alone(
    family: tuple[str, Path], implementation: str
) -> None:
    name, folder = family
    if implementation == "rollbook" and name not in BUILT_IN:
        pytest.skip("the built-in decoder leaves this family to transformers")
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 61, (n,), generator=generator) for n in LENGTHS]
    expected, expected_grads = _reference(folder, sequences)

    config = ModelConfig.model_validate({"path": str(folder), "implementation": implementation})
    model = load_model(config, with_tokenizer=False)
    assert isinstance(model.module, Decoder) == (implementation == "rollbook")
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    ids = torch.cat(sequences)[None]
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    hidden = model.hidden_states(ids, positions, packed=packed_layout(starts))[0]
    rows = torch.cat([torch.arange(a, a + n - 1) for a, n in zip(starts, LENGTHS)])
    targets = torch.cat([s[1:] for s in sequences])
    logprobs, _ = token_logprobs(hidden[rows], model.lm_head(), targets, chunk_tokens=7)

    torch.testing.assert_close(logprobs, torch.cat(expected), rtol=1e-5, atol=1e-5)
    (logprobs * _weights(sequences)).sum().backward()
    grads = {n: t.grad for n, t in model.named_tensors().items() if t.grad is not None}
    assert set(grads) == set(expected_grads)
    for key, grad in grads.items():
        torch.testing.assert_close(
            grad, expected_grads[key], rtol=1e-4, atol=2e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_saved_new_model_is_the_same_model_in_transformers(architecture: str, tmp_path: Path) -> None:
    new = {
        "architecture": architecture,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "intermediate_size": 48,
        "tie_embeddings": architecture == "qwen2",
        "alphabet": "0123456789+=",
        "initializer_range": 0.3,
    }
    model = load_model(ModelConfig.model_validate({"new": new, "seed": 3}))
    model.save(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.arange(12)[None]
    hidden = model.hidden_states(ids, ids, packed=packed_layout([0, 12]))
    ours = model.lm_head().logits(hidden)
    torch.testing.assert_close(ours, theirs(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    again = load_model(ModelConfig.model_validate({"path": str(tmp_path)}))
    for name, tensor in model.named_tensors().items():
        assert torch.equal(tensor, again.named_tensors()[name]), name


def test_bfloat16_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    """The same bfloat16 weights: our logprobs may differ from transformers' by a few roundings of logits of 4."""
    new = {"hidden_size": 64, "num_layers": 2, "alphabet": "0123456789+=", "initializer_range": 0.1}
    load_model(ModelConfig.model_validate({"new": new})).save(tmp_path)
    ours = load_model(ModelConfig.model_validate({"path": str(tmp_path), "dtype": "bfloat16"}))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.bfloat16
    )
    ids = torch.arange(20)[None] % 20
    hidden = ours.hidden_states(ids, ids, packed=packed_layout([0, 20]))[0, :-1]
    logprobs, _ = token_logprobs(hidden, ours.lm_head(), ids[0, 1:])
    expected = torch.log_softmax(theirs(input_ids=ids).logits[0, :-1].float(), -1).gather(
        1, ids[0, 1:, None]
    )[:, 0]
    assert logprobs.dtype == torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0.06)
