"""Measures what the ledger cannot know: this machine's ceilings, and this model's coefficients on it.

Ceilings (`measure_machine`): GEMM rate by dtype, copy rate, the time of one small operation. Coefficients
(`measure_model`): decode steps at several batch sizes and contexts, prefill, forward and backward at two sizes, one
optimizer update. The real engine and trainer do the work, on synthetic tokens; weights and optimizer state are put
back bit for bit.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algos.config import AlgorithmConfig
from rollbook.controller.objective import PolicyObjective
from rollbook.ledger.fit import BatchPoint, DecodePoint, PrefillPoint, fit_decode, fit_train
from rollbook.ledger.hardware import MachineSpec
from rollbook.modeling.load import ModelFacts
from rollbook.rollout.engine import EngineStats, GenerateRequest
from rollbook.rollout.native.engine import NativeEngine
from rollbook.trainer.trainer import Trainer
from rollbook.types import SamplingParams, TrainSequence

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
REPEATS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TypicalWork:
    """Sizes at which the coefficients are measured: those of the run."""

    prompt_tokens: int
    response_tokens: int
    group_size: int
    num_sequences: int
    micro_batch_tokens: int


def measure_machine(device: torch.device, *, dtypes: Sequence[str] = ("float32", "bfloat16")) -> MachineSpec:
    """GEMM and copy rates of `device`; medians of a few repeats after one warm-up."""
    size = GEMM_SIZE[device.type]
    gemm: dict[str, float] = {}
    for name in dtypes:
        a = torch.randn(size, size, device=device).to(getattr(torch, name))
        gemm[name] = 2 * size**3 / _median_s(device, partial(torch.matmul, a, a))
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(device, lambda: target.copy_(source))
    one = torch.ones(1, device=device)
    launch_s = _median_s(device, lambda: [one.add_(1) for _ in range(100)]) / 100
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        name = "cpu"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineSpec(
        name=platform.node() or "this machine",
        device=name,
        num_threads=torch.get_num_threads(),
        gemm_flops_per_s=gemm,
        copy_bytes_per_s=2 * source.numel() / copy_s,
        memory_bytes=memory,
        launch_s=launch_s,
    )


async def measure_model(controller: Controller, machine: MachineSpec, work: TypicalWork) -> MachineSpec:
    """`machine` with the fits of this run's model, by its own engine and trainer. Takes a few seconds."""
    engine = controller.router.engines[0]
    assert isinstance(engine, NativeEngine)
    decode, prefill = await _decode_points(engine, controller.trainer.model.facts, work)
    trainer = controller.trainer
    points = await controller.compute(lambda: _train_points(trainer, work))
    train, forward, optimizer_s = points
    num_params = sum(spec.num_bytes // _itemsize(spec.dtype) for spec in trainer.weight_specs())
    reports = [await controller.publisher.resync(engine.replica_id) for engine in controller.router.engines]
    sync_s = sum(report.total_s for report in reports)
    return replace(
        machine,
        model=trainer.model.source,
        dtype=str(trainer.model.dtype).removeprefix("torch."),
        decode=fit_decode(decode, prefill),
        train=fit_train(train, forward, optimizer_s=optimizer_s, num_params=num_params),
        digest_bytes_per_s=sum(report.num_bytes for report in reports) / sync_s,
    )


async def _decode_points(
    engine: NativeEngine, facts: ModelFacts, work: TypicalWork
) -> tuple[list[DecodePoint], list[PrefillPoint]]:
    """Decode steps at a few batch sizes, each over a response's growth, and their prefills."""
    num_slots = min(engine.config.num_slots, work.num_sequences)
    sizes = sorted({1, max(num_slots // 16, 1), max(num_slots // 4, 1), num_slots})
    new_tokens = max(min(work.response_tokens, 32), 3)
    contexts = [work.prompt_tokens]
    long_prompt = work.prompt_tokens + 4 * work.response_tokens
    if long_prompt + new_tokens < facts.max_position:
        contexts.append(long_prompt)
    decode: list[DecodePoint] = []
    prefill: list[PrefillPoint] = []
    page_tokens = engine.config.page_tokens

    async def measure(num_rows: int, prompt_tokens: int, seed: int) -> tuple[int, EngineStats]:
        pages = -(-(prompt_tokens + new_tokens) // page_tokens)
        rows = max(min(num_rows, engine.config.kv_pool_tokens // page_tokens // pages), 1)
        draw = np.random.default_rng([seed, rows, prompt_tokens])
        prompts = draw.integers(0, facts.vocab_size, (rows, prompt_tokens)).astype(np.int32)
        return rows, await _generate(engine, prompts, new_tokens, seed=seed)

    await measure(num_slots, contexts[0], 99)  # warm-up
    for prompt_tokens in contexts:
        for seed, num_rows in enumerate(sizes):
            rows, delta = await measure(num_rows, prompt_tokens, seed)
            mean_context = rows * (prompt_tokens + new_tokens / 2)
            decode.append(DecodePoint(rows, mean_context, delta.decode_s / max(delta.decode_steps, 1)))
            prefill.append(PrefillPoint(rows * prompt_tokens, max(delta.prefill_s, 1e-6)))
    return decode, prefill


async def _generate(
    engine: NativeEngine, prompts: NDArray[np.int32], new_tokens: int, *, seed: int
) -> EngineStats:
    """Differences of the engine's counters over one response of `new_tokens` to each row of `prompts`."""
    before = await engine.stats()
    sampling = SamplingParams(max_response_tokens=new_tokens, ignore_eos=True)
    await asyncio.gather(
        *(
            engine.generate(
                GenerateRequest(
                    request_id=f"calibrate/{seed}/{row}",
                    prompt_ids=prompt,
                    sampling=sampling,
                    seed=seed,
                    group_id=-1_000_000 - row,
                    member_idx=0,
                )
            )
            for row, prompt in enumerate(prompts)
        )
    )
    after = await engine.stats()
    return replace(
        after,
        decode_s=after.decode_s - before.decode_s,
        prefill_s=after.prefill_s - before.prefill_s,
        decode_steps=after.decode_steps - before.decode_steps,
    )


def _train_points(trainer: Trainer, work: TypicalWork) -> tuple[list[BatchPoint], list[BatchPoint], float]:
    """Forward and backward, forward alone, and the optimizer; the trainer's state is put back."""
    held = _copy(trainer.state_dict())
    objective = PolicyObjective(AlgorithmConfig(), proximal_is_current=True)
    train: list[BatchPoint] = []
    forward: list[BatchPoint] = []
    optimizer_s: list[float] = []
    per_group = work.prompt_tokens + work.group_size * work.response_tokens
    groups_per_micro = max(work.micro_batch_tokens // per_group, 1)
    max_groups = max(work.num_sequences // work.group_size, 1)
    sizes = sorted({min(max(groups_per_micro // 4, 1), max_groups), min(groups_per_micro, max_groups)})
    sizes.append(min(2 * groups_per_micro, max_groups) if len(sizes) > 1 else 2 * sizes[-1])
    for num_groups in [sizes[0], *sizes]:  # the first is the warm-up
        batch = trainer.make_batch(_sequences(trainer, work, num_groups), step=0, weight_version=0)
        batch.mini_batches = [list(range(len(batch.sequences)))]
        began_s = time.perf_counter()
        trainer.fill_proximal(batch)
        _wait(trainer.model.device)
        forward_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        values = trainer.update(batch, objective, lr=0.0)
        _wait(trainer.model.device)
        update_s = time.perf_counter() - began_s
        step_s = _optimizer_s(trainer)
        optimizer_s.append(step_s)
        num_micro = int(values["trainer/actor_micro_batches"].result())
        num_tokens = int(values["trainer/actor_tokens"].result())  # computed: shared prompts once
        train.append(BatchPoint(num_micro, num_tokens, max(update_s - step_s, 1e-6)))
        forward.append(BatchPoint(num_micro, num_tokens, forward_s))
    trainer.load_state_dict(held)
    return train[1:], forward[1:], float(np.median(optimizer_s))


def _optimizer_s(trainer: Trainer) -> float:
    """Seconds of one update; gradients that did not arrive count as zeros."""
    began_s = time.perf_counter()
    trainer.optimizer.step(0.0)
    _wait(trainer.model.device)
    return time.perf_counter() - began_s


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _sequences(trainer: Trainer, work: TypicalWork, num_groups: int) -> list[TrainSequence]:
    """Groups of random tokens with the run's lengths, members sharing their prompt."""
    draw = np.random.default_rng(0)
    vocab_size = trainer.model.facts.vocab_size
    sequences = []
    for group_id in range(num_groups):
        prompt = draw.integers(0, vocab_size, work.prompt_tokens)
        for member_idx in range(work.group_size):
            ids = np.concatenate([prompt, draw.integers(0, vocab_size, work.response_tokens)]).astype(
                np.int32
            )
            is_action = np.arange(len(ids)) >= work.prompt_tokens
            sequences.append(
                TrainSequence(
                    group_id=group_id,
                    member_idx=member_idx,
                    source="calibrate",
                    token_ids=ids,
                    action_mask=is_action,
                    loss_mask=is_action.copy(),
                    behavior_logprobs=np.zeros(len(ids), np.float32),
                    reward=0.0,
                    oldest_version=0,
                    advantages=np.ones(len(ids), np.float32),
                )
            )
    return sequences


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return value


def _itemsize(dtype: str) -> int:
    return int(getattr(torch, dtype).itemsize)


def _median_s(device: torch.device, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        _wait(device)
        began_s = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    return float(np.median(seconds[1:]))
