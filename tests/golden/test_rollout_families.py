"""The engine's logprobs against a plain eager Hugging Face forward, for every family it claims to run.

Prompts of different lengths, prefill in chunks, pages smaller than the prompts, a pool that forces preemption, members
of a group that copy the prompt's pages, windows shorter than the sequences: the numbers stay those of one forward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import LoadedModel, load_model, wrap_transformers
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.native.engine import NativeEngine
from rollbook.types import SamplingParams

VOCAB = 48

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama, tied, one query per key head": (
        "LlamaConfig",
        {"num_key_value_heads": 4, "tie_word_embeddings": True},
    ),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "mistral": ("MistralConfig", {"sliding_window": None, "head_dim": 8}),
    "mistral, sliding window": ("MistralConfig", {"sliding_window": 9, "head_dim": 8}),
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 8, "sliding_window": 9, "layer_types": SLIDING, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "sliding_window": 9, "layer_types": SLIDING}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gpt-oss, attention sinks": (
        "GptOssConfig",
        {"num_local_experts": 4, "head_dim": 8, "sliding_window": 9, "layer_types": SLIDING},
    ),
}


def tiny_model(family: str) -> PreTrainedModel:
    name, extra = FAMILIES[family]
    config = getattr(transformers, name)(**(SHAPE | extra))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():  # large enough that attention decides, and sinks are not all equal
        for parameter in model.parameters():
            parameter.normal_(std=0.25)
    return model


def eager_logprobs(model: PreTrainedModel, prompt_ids: np.ndarray, response: Response) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt_ids, response.response_ids])).long()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0].float()
    start = len(prompt_ids)
    rows = torch.log_softmax(logits[start - 1 : -1], -1)
    return rows.gather(1, ids[start:, None])[:, 0].numpy()


async def responses(
    model: LoadedModel, prompts: Sequence[np.ndarray], **settings: Any
) -> tuple[list[Response], NativeEngine]:
    engine = NativeEngine(model, RolloutConfig.model_validate(settings))
    await engine.start()
    requests = [
        GenerateRequest(
            request_id=f"{group_id}/{member_idx}",
            prompt_ids=prompt_ids,
            sampling=SamplingParams(max_response_tokens=14),
            seed=3,
            group_id=group_id,
            member_idx=member_idx,
        )
        for group_id, prompt_ids in enumerate(prompts)
        for member_idx in range(2)
    ]
    return await asyncio.gather(*(engine.generate(request) for request in requests)), engine


async def check(model: PreTrainedModel, loaded: LoadedModel) -> None:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, count).astype(np.int32) for count in (1, 4, 5, 17, 30)]
    found, engine = await responses(
        loaded, prompts, num_slots=6, page_tokens=4, kv_pool_tokens=84, max_prefill_tokens=11
    )
    stats = await engine.stats()
    await engine.close()
    assert (
        stats.num_preemptions > 0
    )  # the pool was too small for all at once: recomputing is part of the test
    for idx, response in enumerate(found):
        expected = eager_logprobs(model, prompts[idx // 2], response)
        np.testing.assert_allclose(response.logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
async def test_logprobs_equal_one_eager_forward(family: str) -> None:
    model = tiny_model(family)
    await check(model, wrap_transformers(model))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral, sliding window"])
async def test_the_built_in_decoder_equals_one_eager_forward(family: str, tmp_path: Path) -> None:
    model = tiny_model(family)
    model.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), implementation="rollbook")
    await check(model, load_model(config, with_tokenizer=False))
