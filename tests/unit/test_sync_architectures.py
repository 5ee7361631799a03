"""Publications between Hugging Face models of every family we train: the receiver computes the sender's logits."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fault"))

from sync_fakes import FakeSource, publish
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rollbook.sync.layout import MappedWeights, Place
from rollbook.sync.transaction import ReplicaTransaction

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
CONFIGS = {
    "llama": LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama tied": LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SMALL, tie_word_embeddings=False),
    "mistral": MistralConfig(**SMALL),
    "gemma": GemmaConfig(**SMALL),
    "gemma2": Gemma2Config(**SMALL),
    "qwen3 moe": Qwen3MoeConfig(**SMALL, **EXPERTS),
    "mixtral": MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
}


def model(config: Any, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return made


def module_weights(module: torch.nn.Module) -> MappedWeights:
    """Every parameter once; tied names are dropped."""
    parameters: dict[str, torch.Tensor] = dict(module.named_parameters())
    every_name = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    places = {name: Place(parameter=name, shape=tuple(p.shape)) for name, p in parameters.items()}
    return MappedWeights(parameters, places, dropped=every_name - set(parameters))


@torch.no_grad()
def logits(module: torch.nn.Module) -> torch.Tensor:
    out: torch.Tensor = module(input_ids=torch.arange(20)[None], use_cache=False).logits
    return out


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("staging", ["staged", "direct"])
def test_the_receiver_computes_the_senders_logits(family: str, staging: Any) -> None:
    trainer, engine = model(CONFIGS[family], seed=0), model(CONFIGS[family], seed=1)
    assert not torch.equal(logits(trainer), logits(engine))
    live = module_weights(engine)
    transaction = ReplicaTransaction(live, replica_id=0, weight_version=0, staging=staging)
    source = FakeSource({name: p.detach() for name, p in trainer.named_parameters()})
    publish(transaction, source, 1, bucket_bytes=1000)
    assert torch.equal(logits(trainer), logits(engine))
    assert sum(transaction.coverage.values()) == len(live.specs())


@pytest.mark.parametrize(("family", "is_tied"), [("llama tied", True), ("llama", False)])
def test_a_tied_head_may_be_sent_twice_and_an_untied_one_must_be_sent(family: str, is_tied: bool) -> None:
    trainer, engine = model(CONFIGS[family], seed=0), model(CONFIGS[family], seed=1)
    tensors = {name: p.detach() for name, p in trainer.named_parameters(remove_duplicate=False)}
    transaction = ReplicaTransaction(module_weights(engine), replica_id=0, weight_version=0)
    publish(transaction, FakeSource(tensors), 1)
    assert "lm_head.weight" in tensors
    assert transaction.coverage["dropped"] == is_tied
    assert torch.equal(logits(trainer), logits(engine))
