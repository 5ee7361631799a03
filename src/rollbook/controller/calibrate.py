"""Measures what the ledger cannot know: this machine's ceilings, and this model's coefficients on it.

Ceilings (`trainer/ceilings.py`): GEMM rate by dtype, copy rate, the time of one small operation. Coefficients
(`measure_model`): decode steps at several batch sizes and contexts, prefill, passes of the trainer over micro batches
from one group to the run's largest, one optimizer update; where engines go on while the trainer works, what that
costs either. `rehearse`: a step without its updates, for the publication and for what the interpreter does in
between. The real engine and trainer do the work, in this process or in others: they are asked through the same
methods, and what a call of another process costs is measured besides. Weights and optimizer state are put back bit for
bit.

Every size is measured several times, in turn with the others, and its median counts: a burst of other work on the
machine then touches one measurement of each size instead of all of one.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rollbook.algos.config import AlgorithmConfig
from rollbook.algos.filters import train_sequences
from rollbook.buffer.buffer import Eviction, Taken
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
from rollbook.ledger.hardware import Contention, HostFit, MachineSpec
from rollbook.modeling.load import ModelFacts
from rollbook.observe.recorder import Recorder
from rollbook.rollout.engine import Engine, EngineStats, GenerateRequest
from rollbook.trainer.ceilings import wait_for
from rollbook.trainer.trainer import Trainer
from rollbook.types import Group, SamplingParams, TrainBatch, TrainSequence

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

FEW_REPEATS = 3
MANY_REPEATS = 9
"""Of what takes longer than an operation: decode steps, updates, publications. At least and at most, as many as fit
into ROUNDS_S: a median over a longer time has seen more of what the machine does besides."""
ROUNDS_S = 3.0
WINDOW_S = 1.0
"""For which each side is watched, alone and beside the other, CONTENTION_ROUNDS times."""
CONTENTION_ROUNDS = 3
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
    objective = _objective(controller)
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
    batch = _step_batch(trainer, work)
    objective = _objective(controller)
    trainer.keep_state()
    trainer.update(batch, objective, lr=0.0)
    trainer.put_back_state()


def _objective(controller: Controller) -> PolicyObjective:
    """Of updates that are measured: a plain one, with the logprobs that the run's own has to have."""
    return PolicyObjective(AlgorithmConfig(), proximal_is_current=not controller.needs_proximal)


def _step_batch(trainer: Trainer, work: TypicalWork) -> TrainBatch:
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


async def measure_contention(
    controller: Controller, work: TypicalWork, answer: Callable[[int], Awaitable[object]]
) -> Contention:
    """How much longer engine and trainer take while the other one works than alone.

    Both do what they do in the run. The trainer makes a step's forward and update again and again; with each of them
    the engines are given another step's worth of prompts, no more ahead than the staleness bound admits, so that rows
    come and go, requests are made and responses scored. Engines alone get as many prompts at the same pace.

    Args:
        answer: has the engines answer about a step's worth of prompts; its argument is another one each time.
    """
    trainer = controller.trainer
    batch = _step_batch(trainer, work)
    await controller.compute(trainer.keep_state)
    objective = _objective(controller)
    most_ahead = controller.config.buffer.max_staleness_steps
    numbers = itertools.count()

    async def train() -> float:
        began_s = time.perf_counter()
        await controller.compute(lambda: trainer.fill_proximal(batch))
        await controller.compute(lambda: trainer.update(batch, objective, lr=0.0))
        return time.perf_counter() - began_s

    async def alone() -> tuple[float, float]:
        """Seconds of a pass, and of a publication with its probe, while the engines stand idle."""
        passes: list[float] = []
        while sum(passes) < WINDOW_S:
            passes.append(await train())
        sync_s, probe_s, _ = await _publish(controller)
        return float(np.mean(passes)), sync_s + probe_s

    async def generating(make_pass: Callable[[], Awaitable[float]]) -> tuple[float, float, float]:
        """Engine seconds of a token, seconds of a pass, and of a publication, while steps are generated."""
        asked: deque[asyncio.Future[object]] = deque()
        try:
            passes: list[float] = []
            before = await _used(controller)
            while sum(passes[1:]) < WINDOW_S:
                asked.append(asyncio.ensure_future(answer(next(numbers))))
                if len(asked) > most_ahead:
                    await asked.popleft()
                passes.append(await make_pass())
                if len(passes) == 1:  # until then the engines fill
                    before = await _used(controller)
            after = await _used(controller)
            busy_s, num_tokens = after[0] - before[0], after[1] - before[1]
            sync_s, probe_s, _ = await _publish(controller)
            return busy_s / max(num_tokens, 1), float(np.mean(passes[1:])), sync_s + probe_s
        finally:
            for each in asked:
                each.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def stand_by(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    await train()  # warm-up
    ratios = []
    for _ in range(CONTENTION_ROUNDS):
        alone_s, publication_s = await alone()
        token_beside_s, beside_s, publication_beside_s = await generating(train)
        token_s, _, _ = await generating(
            partial(stand_by, beside_s)
        )  # at that pace as many rows share a decode step
        ratios.append(
            (
                token_beside_s / max(token_s, 1e-9),
                beside_s / alone_s,
                publication_beside_s / max(publication_s, 1e-6),
            )
        )
        if alone_s > ROUNDS_S:
            break  # a long pass is steady enough, and takes long enough
    await controller.compute(trainer.put_back_state)
    of_engine, of_trainer, of_publication = np.maximum(np.median(ratios, axis=0), 1.0).tolist()
    return Contention(engine=of_engine, trainer=of_trainer, publication=of_publication)


async def _used(controller: Controller) -> tuple[float, int]:
    """Seconds that the engines computed so far, and the tokens that they decoded."""
    stats = [await engine.stats() for engine in controller.router.engines]
    return sum(held.busy_s for held in stats), sum(held.decode_tokens for held in stats)


async def _publish(controller: Controller) -> tuple[float, float, int]:
    """Seconds of publishing to every replica, seconds of probing them all, and the bytes published."""
    wait_for(controller.trainer.model.device)
    began_s = time.perf_counter()
    reports = [await controller.publisher.resync(engine.replica_id) for engine in controller.router.engines]
    sync_s = time.perf_counter() - began_s
    probe_s = await as_after_publication(controller)
    return sync_s, probe_s, sum(report.num_bytes for report in reports)


async def as_after_publication(controller: Controller) -> float:
    """The engines remember of earlier prompts what they do under new weights: the probe, whose first tokens may be
    those of other prompts too. Returns the seconds of the probe."""
    await forget_prefixes(controller)
    began_s = time.perf_counter()
    for engine in controller.router.engines if controller.probes else ():
        await controller.prober.check(engine, controller.weight_version, controller.compute)
    return time.perf_counter() - began_s


async def forget_prefixes(controller: Controller) -> None:
    """What the engines remember of earlier prompts: a step finds nothing of it under new weights."""
    for engine in controller.router.engines:
        await engine.reset_prefix_cache()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsal:
    """Seconds of the stages of a step that the host pays, in the order of a step: after groups were generated, before
    any weight moves."""

    num_scored: int
    num_sequences: tuple[int, int]
    """That were trained: of all groups, and of a quarter, as few as filters may leave. The first few sequences cost
    more than the others: a line from one group would say that a quarter costs less than it does."""
    pack_s: tuple[float, float]
    """With all groups, and with a quarter."""
    forwards_s: dict[str, float]
    """Each forward pass before the update, over all groups, by stage."""
    advantage_s: tuple[float, float]
    report_s: tuple[float, float]
    """What lies between the stages and after them. All groups were generated in both."""
    texts_s: float
    """Of the texts of tokens that no rehearsal before had."""
    sync_s: float
    probe_s: float
    published_bytes: int


async def rehearse(controller: Controller, groups: Sequence[Group], recorder: Recorder) -> Rehearsal | None:
    """Everything of a step on `groups`, fresh from the run's engine, but generation and updates, by the loop's own
    methods and spans. None where no group can be trained.

    Args:
        recorder: of a scratch folder; what is reported goes there. The same one for every rehearsal: what a run writes
            once (the text of a token) becomes less from one to the next, as in its first steps.
    """
    unfiltered = controller.config.algorithm.filter.model_copy(update={"drop_flat": False})
    trainable = [group for group in groups if train_sequences([group], unfiltered)]
    if not trainable:
        return None
    forwards = [stage for stage, _ in controller.forward_passes()]
    numbers: list[int] = []
    pack_s, advantage_s, report_s = [], [], []
    forwards_s: dict[str, float] = {}
    sync_s = probe_s = 0.0
    num_bytes = 0
    with _reporting_to(controller, recorder):
        began_s = time.perf_counter()
        recorder.write_texts([trajectory for group in groups for trajectory in group.scored])
        texts_s = time.perf_counter() - began_s
        for step, trained in enumerate((trainable, trainable[: max(len(trainable) // 4, 1)])):
            taken = _taken(groups, trained)
            published_s = 0.0
            with recorder.step(step) as span:
                batch = await controller.prepare(taken, 0, group_filter=unfiltered)
                assert batch is not None
                for sequence in batch.sequences:  # on the shortcut the update notes them, before the report
                    if sequence.proximal_logprobs is None:
                        sequence.proximal_logprobs = sequence.behavior_logprobs
                recorder.metrics(controller.gap(batch, taken, ()))
                if step == 0:
                    sync_s, probe_s, num_bytes = await _publish(controller)
                    published_s = sync_s + probe_s
                await controller.report(taken, batch, step=0)
            assert span.duration_s is not None
            pack_s.append(recorder.seconds_of(["pack"]))
            advantage_s.append(recorder.seconds_of(["adv"]))
            forwards_s = forwards_s or {stage: recorder.seconds_of([stage]) for stage in forwards}
            stages_s = recorder.seconds_of(["pack", *forwards, "adv"]) + published_s
            report_s.append(span.duration_s - stages_s)
            numbers.append(len(batch.sequences))
    return Rehearsal(
        num_scored=sum(len(group.scored) for group in groups),
        num_sequences=(numbers[0], numbers[1]),
        pack_s=(pack_s[0], pack_s[1]),
        forwards_s=forwards_s,
        advantage_s=(advantage_s[0], advantage_s[1]),
        report_s=(report_s[0], report_s[1]),
        texts_s=texts_s,
        sync_s=sync_s,
        probe_s=probe_s,
        published_bytes=num_bytes,
    )


def with_rehearsals(
    machine: MachineSpec, rehearsals: Sequence[Rehearsal], *, reports_every: int, texts_s: float = 0.0
) -> MachineSpec:
    """`machine` with the medians of what the host paid.

    Args:
        reports_every: steps between two files of trajectories.
        texts_s: of a step, for the texts of new tokens.
    """
    first = rehearsals[0]
    (num_all, num_few) = first.num_sequences

    def line(name: str) -> tuple[float, float]:
        """Seconds of a sequence, and what is paid whatever their number."""
        whole_s, few_s = np.median([getattr(r, name) for r in rehearsals], axis=0)
        each_s = max((whole_s - few_s) / (num_all - num_few), 0.0) if num_all > num_few else whole_s / num_all
        return float(each_s), max(float(few_s - each_s * num_few), 0.0)

    (pack_s, pack_base_s), (advantage_s, advantage_base_s) = line("pack_s"), line("advantage_s")
    report_trained_s, report_base_s = line("report_s")
    return replace(
        machine,
        host=HostFit(
            pack_s=pack_s,
            pack_base_s=pack_base_s,
            advantage_s=advantage_s,
            advantage_base_s=advantage_base_s,
            report_s=report_base_s / first.num_scored / reports_every,
            report_trained_s=report_trained_s,
            texts_s=texts_s,
        ),
        digest_bytes_per_s=first.published_bytes
        / max(float(np.median([r.sync_s for r in rehearsals])), 1e-6),
        sync_base_s=float(np.median([r.probe_s for r in rehearsals])),
    )


def mean_texts_s(
    rehearsed_s: Sequence[float], *, step_frac: float, steps: Sequence[int], every: int
) -> float:
    """Seconds of a step for texts of tokens that none before had, in the mean of `steps`.

    Args:
        rehearsed_s: of rehearsals one after the other. Each leaves the same share of what it met for the next one.
        step_frac: of a step that one rehearsal is.
        steps: numbers of the run's steps.
        every: steps between two files of trajectories.
    """
    before_s = sum(rehearsed_s[:-1])
    left = min(sum(rehearsed_s[1:]) / before_s, 0.99) if before_s > 0 else 0.0
    left_by_step = float(left ** (1 / step_frac))
    first_s = rehearsed_s[0] * (1 - left_by_step) / (1 - left)
    written = (first_s * left_by_step ** (step // every) for step in steps if step % every == 0)
    return sum(written) / max(len(steps), 1)


def _taken(groups: Sequence[Group], trained: Sequence[Group]) -> Taken:
    """A step that trains some of its groups; the others are told of one by one, as filters' are."""
    ids = {group.group_id for group in trained}
    dropped = [group for group in groups if group.group_id not in ids]
    return Taken(
        groups=list(trained),
        staleness_steps=[0] * len(trained),
        evictions=[
            Eviction(group.group_id, "flat", 0, sum(t.num_response_tokens for t in group.trajectories))
            for group in dropped
        ],
        num_refills=0,
        dropped=dropped,
        prompts_done=[],
    )


@contextmanager
def scratch_recorder(controller: Controller) -> Iterator[Recorder]:
    """A recorder whose run directory is thrown away afterwards."""
    held = controller.recorder
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "trial", num_gpus=held.num_gpus, decode=held.decode)
        try:
            yield recorder
        finally:
            recorder.close()


@contextmanager
def _reporting_to(controller: Controller, recorder: Recorder) -> Iterator[None]:
    """Whatever the controller reports goes to `recorder`, and what it says once it will still say."""
    held, has_said = controller.recorder, controller.has_said_rejection
    controller.recorder = recorder
    try:
        yield
    finally:
        controller.recorder, controller.has_said_rejection = held, has_said


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
