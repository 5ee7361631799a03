"""Measures what the ledger cannot know: this machine's ceilings, and this model's coefficients on it.

Ceilings (`trainer/ceilings.py`): GEMM rate by dtype, copy rate, the time of one small operation. Coefficients
(`measure_model`): decode steps at several batch sizes and contexts, prefill, passes of the trainer over micro batches
from one group to the run's largest, one optimizer update. Whole steps without their updates are `rehearsal.py`'s, both
sides at once `contention.py`'s. The real engine and trainer do the work, in this process or in others: they are asked
through the same methods, and what a call of another process costs is measured besides. Weights and optimizer state are
put back bit for bit.

Every size is measured several times, in turn with the others, and its median counts: a burst of other work on the
machine then touches one measurement of each size instead of all of one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollbook.algos.config import AlgorithmConfig
from rollbook.controller.objective import PolicyObjective, ValueObjective
from rollbook.ledger.fit import (
    BatchPoint,
    DecodePoint,
    PrefillPoint,
    fit_call,
    fit_decode,
    fit_pass,
    fit_train,
)
from rollbook.ledger.hardware import MachineSpec
from rollbook.modeling.load import ModelFacts
from rollbook.rollout.engine import Engine, EngineStats, GenerateRequest
from rollbook.trainer.ceilings import wait_for
from rollbook.trainer.trainer import Trainer
from rollbook.types import SamplingParams, TrainBatch, TrainSequence

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

FEW_REPEATS = 3
MANY_REPEATS = 9
"""Of what takes longer than an operation: decode steps, updates, publications. At least and at most, as many as fit
into ROUNDS_S: a median over a longer time has seen more of what the machine does besides."""
ROUNDS_S = 3.0
Size = TypeVar("Size")


PARTS = (
    "responses of a sample",
    "rates of this machine",
    "decode steps and prefills",
    "forward, backward and optimizer",
    "steps without updates",
    "both sides at once",
    "held-out prompts",
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
    """Mean."""
    lengths: tuple[int, ...] = ()
    """Of some responses: a few long ones cost more than as many tokens in equal ones. Empty: all of the mean."""
    group_size: int
    num_sequences: int
    micro_batch_tokens: int
    num_mini_batches: int = 1
    num_params: int = 1
    """That the policy's optimizer moves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPoints:
    """What the trainer's passes took."""

    train: list[BatchPoint]
    """Forward and backward of the policy."""
    forward: list[BatchPoint]
    others: dict[str, list[BatchPoint]]
    """By stage: "teacher", "values", "critic"."""
    calls: list[BatchPoint]
    """A batch to the trainer and its answer back, nothing computed. What the passes took is without it."""
    optimizer_s: float
    """One update."""


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
    others = _other_passes(controller)
    objective = plain_objective(controller)
    points = await controller.compute(lambda: _train_points(trainer, work, others, objective))
    return replace(
        machine,
        model=trainer.model.source,
        dtype=str(trainer.model.dtype).removeprefix("torch."),
        decode=fit_decode(decode, prefill),
        train=fit_train(
            points.train, points.forward, optimizer_s=points.optimizer_s, num_params=work.num_params
        ),
        passes={stage: fit_pass(measured) for stage, measured in points.others.items()},
        call=None if controller.config.cluster.kind == "inproc" else fit_call(points.calls),
    )


def train_once(controller: Controller, work: TypicalWork) -> None:
    """A step's updates, undone: what stays of them is how they left the device's memory."""
    trainer = controller.trainer
    batch = step_batch(trainer, work)
    objective = plain_objective(controller)
    trainer.keep_state()
    trainer.update(batch, objective, lr=0.0)
    trainer.put_back_state()


def plain_objective(controller: Controller) -> PolicyObjective:
    """Of updates that are measured: a plain one, with the logprobs that the run's own has to have."""
    return PolicyObjective(AlgorithmConfig(), proximal_is_current=not controller.needs_proximal)


def step_batch(trainer: Trainer, work: TypicalWork) -> TrainBatch:
    """As many groups as a step has."""
    num_groups = max(work.num_sequences // work.group_size, 1)
    return trainer.make_batch(_sequences(trainer, work, num_groups), step=0, weight_version=0)


def _other_passes(controller: Controller) -> dict[str, Callable[[TrainBatch], object]]:
    """Passes over a batch of networks that are not as large as the policy, by stage."""
    trainer, algorithm = controller.trainer, controller.config.algorithm
    passes: dict[str, Callable[[TrainBatch], object]] = {}
    if algorithm.needs_teacher and controller.remote_teacher is None:
        passes["teacher"] = trainer.fill_teacher
    if algorithm.needs_values:
        objective = ValueObjective(algorithm)
        passes["values"] = trainer.fill_values
        passes["critic"] = lambda batch: trainer.update_critic(batch, objective)
    return passes


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

    # The pull of the context shows at a few rows; prefilling long prompts into every slot only takes time.
    wanted = [(n, tokens) for tokens in contexts for n in (sizes if tokens == contexts[0] else sizes[:-1])]
    seconds: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for round_idx, (num_rows, prompt_tokens) in rounds(wanted, warm_up=(num_slots, contexts[0])):
        rows, delta = await measure(num_rows, prompt_tokens, round_idx * len(sizes) + sizes.index(num_rows))
        if round_idx > 0:
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
                    is_last_turn=True,
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


def _train_points(
    trainer: Trainer,
    work: TypicalWork,
    others: Mapping[str, Callable[[TrainBatch], object]],
    objective: PolicyObjective,
) -> TrainPoints:
    """Passes over micro batches of the run's sizes, from one group to the largest; the trainer's state is put back.

    Args:
        others: passes of other networks, by stage.
        objective: of the updates. On the shortcut it notes logprobs, which come back with the answer; else not.
    """
    trainer.keep_state()
    passes: dict[str, Callable[[TrainBatch], object]] = {
        "call": trainer.carry,
        "proximal": trainer.fill_proximal,
        **others,
        "train": lambda batch: trainer.update(batch, objective, lr=0.0),
    }
    update_sizes, forward_sizes = _group_counts(work), _group_counts(replace(work, num_mini_batches=1))
    sizes = sorted({*update_sizes, forward_sizes[-1]})
    seconds: dict[tuple[str, int], list[float]] = {}
    counts: dict[int, tuple[int, int]] = {}
    optimizer_s: list[float] = []
    for round_idx, num_groups in rounds(sizes, warm_up=sizes[-1]):
        batch = trainer.make_batch(_sequences(trainer, work, num_groups), step=0, weight_version=0)
        batch.mini_batches = [list(range(len(batch.sequences)))]
        is_update_size = num_groups in update_sizes
        for stage, compute in passes.items():
            if stage in OF_UPDATES and not is_update_size and num_groups in counts:
                continue
            objective.noted.clear()
            began_s = time.perf_counter()
            values = compute(batch)
            wait_for(trainer.model.device)
            if round_idx > 0 or num_groups not in counts:
                seconds.setdefault((stage, num_groups), []).append(time.perf_counter() - began_s)
            if stage == "train":  # tokens that are computed: shared prompts once
                assert isinstance(values, dict)
                names = "trainer/actor_micro_batches", "trainer/actor_tokens"
                num_micro, num_tokens = (int(values[name].result()) for name in names)
                counts[num_groups] = num_micro, num_tokens
                optimizer_s.append(trainer.measure_optimizer())
    trainer.put_back_state()
    step_s = float(np.median(optimizer_s[1:]))

    def median_s(stage: str, num_groups: int) -> float:
        """Seconds of a pass without the call."""
        call_s = 0.0 if stage == "call" else median_s("call", num_groups)
        return max(float(np.median(seconds[stage, num_groups])) - call_s, 1e-6)

    def points(stage: str, sizes: Sequence[int]) -> list[BatchPoint]:
        return [BatchPoint(*counts[n], median_s(stage, n)) for n in sizes]

    def of_updates(stage: str) -> list[BatchPoint]:
        # A backward never takes less than its forward: what noise makes of the difference has this bound.
        return [
            replace(update, seconds=max(update.seconds - step_s, 2 * forward.seconds))
            for update, forward in zip(
                points(stage, update_sizes), points("proximal", update_sizes), strict=True
            )
        ]

    return TrainPoints(
        train=of_updates("train"),
        forward=points("proximal", sizes),
        others={
            stage: of_updates(stage) if stage in OF_UPDATES else points(stage, sizes) for stage in others
        },
        calls=points("call", sizes),
        optimizer_s=step_s,
    )


OF_UPDATES = frozenset({"train", "critic"})
"""Passes with a backward and an optimizer update; the others are forwards, over micro batches of the whole step."""


def _group_counts(work: TypicalWork) -> list[int]:
    """Groups of one pass, from one to the largest micro batch that an update of the run has; and twice that where an
    update has several."""
    per_group = work.prompt_tokens + work.group_size * work.response_tokens
    per_micro = max(work.micro_batch_tokens // per_group, 1)
    per_update = max(work.num_sequences // work.group_size // work.num_mini_batches, 1)
    largest = min(per_micro, per_update)
    several = 2 * largest if per_update > per_micro or largest == 1 else largest
    return sorted({1, max(largest // 8, 1), max(largest // 3, 1), largest, several})


def rounds(sizes: Sequence[Size], *, warm_up: Size) -> Iterator[tuple[int, Size]]:
    """Each size in turn, round after round, for as long as ROUNDS_S last: FEW_REPEATS rounds at least, MANY_REPEATS at
    most. Round 0 is a warm-up."""
    yield 0, warm_up
    began_s = time.perf_counter()
    for round_idx in range(1, MANY_REPEATS + 1):
        if round_idx > FEW_REPEATS and time.perf_counter() - began_s > ROUNDS_S:
            return
        for size in sizes:
            yield round_idx, size


def _sequences(trainer: Trainer, work: TypicalWork, num_groups: int) -> list[TrainSequence]:
    """Groups of random tokens with the run's lengths, members sharing their prompt."""
    draw = np.random.default_rng(0)
    vocab_size = trainer.model.facts.vocab_size
    lengths = itertools.cycle(work.lengths or (work.response_tokens,))
    sequences = []
    for group_id in range(num_groups):
        prompt = draw.integers(0, vocab_size, work.prompt_tokens)
        for member_idx in range(work.group_size):
            response = draw.integers(0, vocab_size, max(next(lengths), 2))
            ids = np.concatenate([prompt, response]).astype(np.int32)
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
                    values=np.zeros(len(ids), np.float32),
                    returns=np.zeros(len(ids), np.float32),
                )
            )
    return sequences
