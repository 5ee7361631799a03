"""Measures what the ledger cannot know: this machine's ceilings, and this model's coefficients on it.

Ceilings (`measure_machine`): GEMM rate by dtype, copy rate, the time of one small operation. Coefficients
(`measure_model`): decode steps at several batch sizes and contexts, prefill, forward and backward at three sizes, one
optimizer update, one publication with its probe. `measure_host`: what the interpreter does between them. The real
engine and trainer do the work, on synthetic tokens; weights and optimizer state are put back bit for bit.

Every size is measured several times, in turn with the others, and its median counts: a burst of other work on the
machine then touches one measurement of each size instead of all of one.
"""

from __future__ import annotations

import asyncio
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.filters import train_sequences
from rollbook.algos.gap import logprob_gap
from rollbook.buffer.buffer import Taken
from rollbook.controller.objective import PolicyObjective
from rollbook.controller.step_metrics import batch_values, staleness_values, trajectory_values
from rollbook.ledger.fit import BatchPoint, DecodePoint, PrefillPoint, fit_decode, fit_train
from rollbook.ledger.hardware import HostFit, MachineSpec
from rollbook.modeling.load import ModelFacts
from rollbook.observe.trajectories import write_trajectories
from rollbook.rollout.engine import Engine, EngineStats, GenerateRequest
from rollbook.trainer.policy import trainable
from rollbook.trainer.trainer import Trainer
from rollbook.types import Group, SamplingParams, TrainBatch, TrainSequence

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
REPEATS = 5
FEW_REPEATS = 3
"""Of what takes longer than an operation: decode steps, updates, publications."""


PARTS = (
    "responses of a sample",
    "rates of this machine",
    "decode steps and prefills",
    "forward, backward and optimizer",
    "publications",
    "host work of a trajectory",
    "hand-overs of the device",
)
"""Of a calibration with a model, in their order."""


def announce(controller: Controller, part: str) -> None:
    """Say which of PARTS begins: together they take as long as many steps."""
    controller.recorder.event("measuring", what=part, part=PARTS.index(part) + 1, num_parts=len(PARTS))


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
    announce(controller, "decode steps and prefills")
    decode, prefill = await _decode_points(
        controller.router.engines[0],
        controller.trainer.model.facts,
        work,
        page_tokens=controller.config.rollout.page_tokens,
    )
    trainer = controller.trainer
    announce(controller, "forward, backward and optimizer")
    points = await controller.compute(lambda: _train_points(trainer, work))
    train, forward, optimizer_s = points
    num_params = sum(parameter.numel() for parameter in trainable(trainer.model).values())
    announce(controller, "publications")
    sync_s, probe_s, num_bytes = await _publication_s(controller)
    return replace(
        machine,
        model=trainer.model.source,
        dtype=str(trainer.model.dtype).removeprefix("torch."),
        decode=fit_decode(decode, prefill),
        train=fit_train(train, forward, optimizer_s=optimizer_s, num_params=num_params),
        digest_bytes_per_s=num_bytes / sync_s,
        sync_base_s=probe_s,
    )


async def forget_prefixes(controller: Controller) -> None:
    """What the engines remember of earlier prompts: a step finds nothing of it under new weights."""
    for engine in controller.router.engines:
        await engine.reset_prefix_cache()


async def _publication_s(controller: Controller) -> tuple[float, float, int]:
    """Medians: seconds of publishing to every replica, seconds of probing them all, and the bytes published."""
    sync_s, probe_s, num_bytes = [], [], 0
    device = controller.trainer.model.device
    other = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    for _ in range(FEW_REPEATS):
        other.add_(1)  # a step publishes after training: the caches hold other things
        _wait(device)
        began_s = time.perf_counter()
        reports = [
            await controller.publisher.resync(engine.replica_id) for engine in controller.router.engines
        ]
        sync_s.append(time.perf_counter() - began_s)
        num_bytes = sum(report.num_bytes for report in reports)
        await forget_prefixes(controller)  # as the new weights of a step would
        began_s = time.perf_counter()
        if controller.probes:
            for engine in controller.router.engines:
                await controller.prober.check(engine, controller.weight_version, controller.compute)
        probe_s.append(time.perf_counter() - began_s)
    return max(float(np.median(sync_s)), 1e-6), float(np.median(probe_s)), num_bytes


async def measure_host(controller: Controller, groups: Sequence[Group]) -> HostFit | None:
    """Seconds a trajectory of packing, advantages and reporting, on `groups` that the run's engine answered. None
    where none of them can be trained."""
    config, trainer = controller.config, controller.trainer
    scored = [t for group in groups for t in group.scored]
    unfiltered = config.algorithm.filter.model_copy(update={"drop_flat": False})
    if not train_sequences(groups, unfiltered):
        return None
    taken = Taken(
        groups=list(groups),
        staleness_steps=[0] * len(groups),
        evictions=[],
        num_refills=0,
        dropped=[],
        prompts_done=[],
    )
    pack_s, advantage_s, report_s = [], [], []
    filled: TrainBatch | None = None
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(FEW_REPEATS):
            began_s = time.perf_counter()
            sequences = train_sequences(groups, unfiltered)
            batch = trainer.make_batch(sequences, step=0, weight_version=controller.weight_version)
            packed_s = time.perf_counter()
            if filled is None:
                filled = batch
                for _, fill in controller.forward_passes():
                    await fill(filled)
            batch = replace(filled, sequences=[copy(sequence) for sequence in filled.sequences])
            filled_s = time.perf_counter()
            controller.correct_and_estimate(batch)
            estimated_s = time.perf_counter()
            for sequence in batch.sequences:  # on the shortcut the update notes them, before the report
                if sequence.proximal_logprobs is None:
                    sequence.proximal_logprobs = sequence.behavior_logprobs
            trajectory_values(taken, [])
            staleness_values(taken)
            batch_values(batch)
            logprob_gap(
                batch.sequences,
                staleness=taken.staleness,
                clip_eps_low=config.algorithm.clip_eps_low,
                clip_eps_high=config.algorithm.clip_eps_high,
            )
            {int(i) for t in scored for i in t.token_ids()}  # the recorder looks for tokens it has not named
            if config.observe.trajectories_every_steps:
                masks = {f"{s.group_id}/{s.member_idx}": s.loss_mask for s in batch.sequences}
                write_trajectories(Path(folder) / "trial.parquet", 0, scored, masks)
            ended_s = time.perf_counter()
            pack_s.append(packed_s - began_s)
            advantage_s.append(estimated_s - filled_s)
            report_s.append(ended_s - estimated_s)
    every = max(config.observe.trajectories_every_steps, 1)
    return HostFit(
        pack_s=float(np.median(pack_s)) / len(scored),
        advantage_s=float(np.median(advantage_s)) / len(batch.sequences),
        report_s=float(np.median(report_s)) / len(scored) / every,
    )


async def _decode_points(
    engine: Engine, facts: ModelFacts, work: TypicalWork, *, page_tokens: int
) -> tuple[list[DecodePoint], list[PrefillPoint]]:
    """Decode steps at a few batch sizes, each over a response's growth, and their prefills."""
    held = await engine.stats()
    num_slots = min(held.num_slots, work.num_sequences)
    sizes = sorted({1, max(num_slots // 16, 1), max(num_slots // 4, 1), num_slots})
    new_tokens = max(min(work.response_tokens, 32), 3)
    contexts = [work.prompt_tokens]
    long_prompt = work.prompt_tokens + 4 * work.response_tokens
    if long_prompt + new_tokens < facts.max_position:
        contexts.append(long_prompt)
    decode: list[DecodePoint] = []
    prefill: list[PrefillPoint] = []

    async def measure(num_rows: int, prompt_tokens: int, seed: int) -> tuple[int, EngineStats]:
        pages = -(-(prompt_tokens + new_tokens) // page_tokens)
        rows = max(min(num_rows, held.kv_pool_tokens // page_tokens // pages), 1)
        draw = np.random.default_rng([seed, rows, prompt_tokens])
        prompts = draw.integers(0, facts.vocab_size, (rows, prompt_tokens)).astype(np.int32)
        return rows, await _generate(engine, prompts, new_tokens, seed=seed)

    await measure(num_slots, contexts[0], 99)  # warm-up
    seconds: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for repeat in range(FEW_REPEATS):
        for prompt_tokens in contexts:
            # The pull of the context shows at a few rows; prefilling long prompts into every slot only takes time.
            for idx, num_rows in enumerate(sizes if prompt_tokens == contexts[0] else sizes[:-1]):
                rows, delta = await measure(num_rows, prompt_tokens, repeat * len(sizes) + idx)
                step_s = delta.decode_s / max(delta.decode_steps, 1)
                seconds.setdefault((rows, prompt_tokens), []).append((step_s, delta.prefill_s))
    for (rows, prompt_tokens), measured in seconds.items():
        step_s, prefill_s = np.median(measured, axis=0)
        mean_context = rows * (prompt_tokens + new_tokens / 2)
        decode.append(DecodePoint(rows, mean_context, max(float(step_s), 1e-6)))
        prefill.append(PrefillPoint(rows * prompt_tokens, max(float(prefill_s), 1e-6)))
    return decode, prefill


async def _generate(engine: Engine, prompts: NDArray[np.int32], new_tokens: int, *, seed: int) -> EngineStats:
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
    updates: dict[int, list[tuple[float, float]]] = {}
    counts: dict[int, tuple[int, int]] = {}
    optimizer_s: list[float] = []
    per_group = work.prompt_tokens + work.group_size * work.response_tokens
    groups_per_micro = max(work.micro_batch_tokens // per_group, 1)
    max_groups = max(work.num_sequences // work.group_size, 1)
    sizes = sorted({min(max(groups_per_micro // 4, 1), max_groups), min(groups_per_micro, max_groups)})
    sizes.append(min(2 * groups_per_micro, max_groups) if len(sizes) > 1 else 2 * sizes[-1])
    for num_groups in [sizes[0], *(FEW_REPEATS * sizes)]:  # the first is the warm-up
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
        optimizer_s.append(_optimizer_s(trainer))
        num_micro = int(values["trainer/actor_micro_batches"].result())
        num_tokens = int(values["trainer/actor_tokens"].result())  # computed: shared prompts once
        counts[num_groups] = num_micro, num_tokens
        if len(optimizer_s) > 1:
            updates.setdefault(num_groups, []).append((forward_s, update_s))
    trainer.load_state_dict(held)
    step_s = float(np.median(optimizer_s[1:]))
    train: list[BatchPoint] = []
    forward: list[BatchPoint] = []
    for num_groups, measured in updates.items():
        forward_s, update_s = (float(s) for s in np.median(measured, axis=0))
        forward.append(BatchPoint(*counts[num_groups], max(forward_s, 1e-6)))
        # A backward never takes less than its forward: what noise makes of the difference has this bound.
        train.append(BatchPoint(*counts[num_groups], max(update_s - step_s, 2 * forward_s, 1e-6)))
    return train, forward, step_s


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


def _median_s(device: torch.device, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        _wait(device)
        began_s = time.perf_counter()
        work()
        _wait(device)
        seconds.append(time.perf_counter() - began_s)
    return float(np.median(seconds[1:]))
