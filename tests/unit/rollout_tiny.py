"""A tiny model, requests for it, and what the trainer's code says about the engine's tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from rollbook.modeling.attention import packed_layout
from rollbook.modeling.config import ModelConfig, NewModelConfig
from rollbook.modeling.load import LoadedModel, load_model
from rollbook.modeling.logprobs import token_logprobs
from rollbook.rollout.config import RolloutConfig
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.native.engine import NativeEngine
from rollbook.types import Ids, SamplingParams

VOCAB = 40


def tiny_model(seed: int = 0) -> LoadedModel:
    """Random, with weights large enough that tokens depend on what came before."""
    new = NewModelConfig(
        alphabet="0123456789",
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        max_position=128,
        initializer_range=0.25,
    )
    return load_model(ModelConfig(new=new, seed=seed))


def random_ids(count: int, seed: int = 0) -> Ids:
    return np.random.default_rng(seed).integers(0, VOCAB, count).astype(np.int32)


def request(
    prompt_ids: Ids,
    name: str = "0/0",
    *,
    max_response_tokens: int = 8,
    seed: int = 5,
    first_token_idx: int = 0,
    **sampling: Any,
) -> GenerateRequest:
    """`name` is "group/member", with "#anything" behind it where the id must differ."""
    group_id, member_idx = (int(part) for part in name.partition("#")[0].split("/"))
    return GenerateRequest(
        request_id=name,
        prompt_ids=prompt_ids,
        sampling=SamplingParams(max_response_tokens=max_response_tokens, **sampling),
        seed=seed,
        group_id=group_id,
        member_idx=member_idx,
        first_token_idx=first_token_idx,
    )


@asynccontextmanager
async def running(
    model: LoadedModel, *, engine: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[NativeEngine]:
    """A started engine with the `[rollout]` values of `settings`."""
    values = {"num_slots": 8, "page_tokens": 4, "kv_pool_tokens": 512, **settings}
    made = NativeEngine(model, RolloutConfig.model_validate(values), **(engine or {}))
    await made.start()
    try:
        yield made
    finally:
        await made.close()


async def generate(engine: NativeEngine, requests: Sequence[GenerateRequest]) -> list[Response]:
    return await asyncio.gather(*(engine.generate(one) for one in requests))


def trainer_logprobs(
    model: LoadedModel, prompt_ids: Ids, response_ids: Ids, temperature: float = 1.0
) -> np.ndarray:
    """[n] logprobs of the response as the trainer computes them: packed attention, one forward."""
    ids = torch.from_numpy(np.concatenate([prompt_ids, response_ids])).long()
    positions = torch.arange(len(ids))
    with torch.no_grad():
        hidden = model.hidden_states(ids[None], positions[None], packed=packed_layout([0, len(ids)]))[0]
        start = len(prompt_ids)
        logprobs, _ = token_logprobs(
            hidden[start - 1 : -1], model.lm_head(), ids[start:], temperature=temperature
        )
    return logprobs.numpy()


async def write_weights(engine: NativeEngine, source: LoadedModel) -> None:
    """All weights of `source` into the engine, in its dtype, between two steps; the caller adopts the version."""
    weights = await engine.live_weights()

    def write() -> None:
        for name, tensor in source.named_tensors().items():
            weights.write(name, tensor.detach().to(weights.read(name).dtype))

    await engine.run_between_steps(write)


class AtStep:
    """Calls `command` on the event loop while the engine's thread runs decode step number `step` (from 1), and holds
    that step until the command is queued: what the command does happens right after this step."""

    def __init__(self, engine: NativeEngine, step: int, command: Any) -> None:
        self.answer: asyncio.Task[Any] | None = None
        self._engine, self._step, self._command = engine, step, command
        self._num_decodes = 0
        self._loop = asyncio.get_running_loop()
        runner = engine._runner
        assert runner is not None
        self._run = runner.step
        runner.step = self  # type: ignore[assignment]

    def __call__(self, plan: Any, draws: Any) -> Any:
        result = self._run(plan, draws)
        self._num_decodes += plan.num_decode > 0
        if self._num_decodes == self._step and plan.num_decode:
            self._loop.call_soon_threadsafe(self._begin)
            while not self._engine._thread._inbox:
                pass
        return result

    def _begin(self) -> None:
        self.answer = self._loop.create_task(self._command())
