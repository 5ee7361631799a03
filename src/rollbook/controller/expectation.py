"""What the ledger expects of each stage of a step, on this machine and for this config.

The machine comes from `plan.hardware` (a file of `rollbook calibrate`), or is measured before the first step. How
long responses will be comes from the config, or from a sample: one step's worth of prompts at most, generated as the
first step would generate them.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollbook.controller.calibrate import (
    FEW_REPEATS,
    MANY_REPEATS,
    ROUNDS_S,
    TypicalWork,
    announce,
    measure_model,
    rounds,
    train_once,
)
from rollbook.controller.contention import measure_contention
from rollbook.controller.evaluate import evaluation_values, response_lengths
from rollbook.controller.plan import Evaluation, Plan
from rollbook.controller.rehearsal import (
    Rehearsal,
    as_after_publication,
    forget_prefixes,
    mean_texts_s,
    publication_rate,
    publish_everywhere,
    rehearse,
    scratch_recorder,
    with_rehearsals,
)
from rollbook.controller.rollout import Member
from rollbook.controller.switching import Half
from rollbook.errors import ConfigError
from rollbook.ledger.curve import draw_lengths
from rollbook.ledger.entry import Entry, entry
from rollbook.ledger.hardware import MachineSpec
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.predict import (
    StepWork,
    predict_stages,
    rollout_of,
    stages_after_rollout,
)
from rollbook.types import Group, Prompt

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

SAMPLE_GROUPS = 64
"""Most groups generated to learn how long responses are."""
SAMPLE_S = 2.0
"""Most seconds of a sample of a whole step, which then says what a step's trajectories cost the host."""
FORWARDS = ("proximal", "reference", "teacher", "values")
"""Stages that are a forward over the step's sequences."""
SWITCHES: dict[str, tuple[Half, ...]] = {
    "to_trainer": ("to_trainer",),
    "to_rollout": ("make_room", "to_engine"),
}
"""Stages of the hand-over, and the halves they are made of."""


async def make_plan(controller: Controller) -> Plan:
    """Measure what is not given, and predict; where the parts compute makes no difference."""
    config = controller.config
    gc.collect()  # as after a run's first step: later collections look at what a step made alone
    gc.freeze()
    announce(controller, "responses of a sample")
    sample = (await _sample(controller, seed=0)).groups
    for group in sample:
        controller.rollout.note_rewards(group)
    lengths = [t.num_response_tokens for group in sample for t in group.scored]
    kept = [controller.rollout.drop_reason(group) is None for group in sample]
    if not lengths:
        raise ConfigError("no response of the sample could be scored", "look at the failures in events.jsonl")
    limit = config.rollout.max_response_tokens
    distribution = LengthDistribution.from_samples(lengths, max_tokens=limit)
    if config.plan.response_tokens:
        distribution = LengthDistribution(limit, config.plan.response_tokens)
    prompt_tokens = float(np.mean([len(p.prompt_ids) for p in controller.train_prompts[:4096]]))
    model = model_spec(controller)
    typical = TypicalWork(
        prompt_tokens=max(round(prompt_tokens), 1),
        response_tokens=max(round(distribution.mean_tokens), 2),
        lengths=() if config.plan.response_tokens else tuple(lengths),
        group_size=config.rollout.group_size,
        num_sequences=controller.num_sequences,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        num_mini_batches=config.trainer.num_mini_batches,
        num_params=controller.trainer.num_trained_params,
    )
    if config.plan.hardware:
        machine = MachineSpec.read(Path(config.plan.hardware))
    else:
        announce(controller, "rates of this machine")
        machine = await controller.compute(controller.trainer.measure_machine)
    if machine.decode is None or machine.train is None:
        machine = await measure_model(controller, machine, typical)
    work = StepWork(
        num_groups=config.run.groups_per_step,
        group_size=config.rollout.group_size,
        prompt_tokens=prompt_tokens,
        lengths=distribution,
        num_slots=config.rollout.num_slots,
        num_replicas=config.rollout.num_replicas,
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        num_mini_batches=config.trainer.num_mini_batches,
        num_epochs=config.trainer.num_epochs,
        # Of a sample that the filters emptied, a step will still keep some: half a group more, and half less.
        trained_frac=(sum(kept) + 0.5) / (len(kept) + 1) if len(kept) > 0 and not all(kept) else 1.0,
        uses_proximal=controller.needs_proximal,
        uses_reference=config.algorithm.needs_reference,
        uses_critic=config.algorithm.needs_values,
        uses_teacher=config.algorithm.needs_teacher,
        most_running=_most_running(controller),
        generates_beside=not controller.schedule.pauses_for_training
        and config.buffer.max_staleness_steps > 0,
        param_bytes=float(controller.trainer.model.dtype.itemsize),
        trained_params=float(controller.trainer.num_trained_params),
        published_params=float(controller.trainer.num_published_params),
    )
    announce(controller, "steps without updates")
    machine = await _rehearsed(controller, model, machine, work)
    if work.generates_beside:
        announce(controller, "both sides at once")
        contention = await measure_contention(controller, typical, partial(_answer_step, controller))
        machine = replace(machine, contention=contention)
    evaluation, occasional = await _occasional(controller, model, machine, work)
    machine, hand_overs = await _hand_overs(controller, machine, typical)
    steps = range(controller.num_steps_done, config.run.num_steps)
    is_due = {"eval": controller.evaluator.is_due, "checkpoint": controller.saver.is_due}
    return Plan(
        model=model,
        machine=machine,
        work=work,
        stages=_stages(model, machine, work) | hand_overs,
        generation_s=predict_stages(model, machine, replace(work, generates_beside=False))["rollout"].seconds,
        occasional=occasional,
        evaluation=evaluation,
        shares={
            name: sum(is_due[name](n + 1, is_last=n == steps[-1]) for n in steps) / max(len(steps), 1)
            for name in occasional
        },
    )


def _most_running(controller: Controller) -> int:
    """Sequences under way at once where engines run ahead of the step: as many steps' worth as the bound admits."""
    bound = controller.config.buffer.max_staleness_steps
    return (bound + 1) * controller.num_sequences if bound else 0


async def _occasional(
    controller: Controller, model: ModelSpec, machine: MachineSpec, work: StepWork
) -> tuple[Evaluation | None, dict[str, Entry]]:
    """What one evaluation takes, and one checkpoint."""
    entries: dict[str, Entry] = {}
    evaluation = None
    if controller.evaluator.prompts:
        announce(controller, "held-out prompts")
        evaluation, entries["eval"] = await _evaluation(controller, model, machine, work)
    written_s = await _checkpoint_s(controller)
    if written_s is not None:
        entries["checkpoint"] = entry(
            "checkpoint",
            written_s,
            bytes=float(controller.saver.last_write_bytes),
            error_frac=0.5,
            formula="seconds of the checkpoint written last",
            source="measured in this run directory",
        )
    return evaluation, entries


async def _evaluation(
    controller: Controller, model: ModelSpec, machine: MachineSpec, work: StepWork
) -> tuple[Evaluation, Entry]:
    """A rollout of the held-out prompts, all asked for at once and nothing computed meanwhile: other prompts than the
    steps', fewer answers to each, sampled otherwise. Some of them, all where that is short, are asked and judged as
    often as there is time for."""
    evaluator = controller.evaluator
    asked = replace(
        work,
        num_groups=len(evaluator.prompts),
        group_size=evaluator.config.samples_per_prompt,
        most_running=0,
        generates_beside=False,
    )
    entire = _stages(model, machine, asked)["rollout"]
    size = len(evaluator.prompts) if entire.seconds <= SAMPLE_S else SAMPLE_GROUPS
    every = max(len(evaluator.prompts) // size, 1)
    ratios: list[float] = []
    lengths: list[int] = []
    began_s = time.perf_counter()
    while not ratios or (len(ratios) <= MANY_REPEATS and time.perf_counter() - began_s < 2 * ROUNDS_S):
        await as_after_publication(controller)
        asked_s = time.perf_counter()
        answers = await evaluator.answer(controller.router, every=every)
        evaluation_values(answers)
        elapsed_s = time.perf_counter() - asked_s
        lengths = response_lengths(answers)
        if not lengths:  # every one of them failed
            return Evaluation(work=asked, ratio=1.0), _as_evaluation(entire)
        ratios.append(elapsed_s / sum(rollout_of(model, machine, asked, lengths)))
    # The first is the warm-up, where there was time for more.
    evaluation = Evaluation(work=asked, ratio=float(np.median(ratios[1:] or ratios)))
    drawn = draw_lengths(
        LengthDistribution.from_samples(lengths, max_tokens=work.lengths.max_tokens), asked.num_sequences, 0
    )
    seconds = evaluation.seconds(model, machine, lengths if every == 1 else drawn.tolist())
    return evaluation, _as_evaluation(entire.at(seconds))


def _as_evaluation(rollout: Entry) -> Entry:
    return replace(
        rollout, name="eval", formula=f"held-out prompts: {rollout.formula}; x their own rehearsal"
    )


async def _checkpoint_s(controller: Controller) -> float | None:
    """Seconds of a checkpoint: what the last one took, or the median with a few more where that was short, since the
    first write of a run makes its folders and imports what it needs."""
    saver = controller.saver
    if saver.last_write_s is None or not saver.is_prepared:
        return saver.last_write_s
    counters, took_s = saver.counters(controller, controller.num_steps_done), [saver.last_write_s]
    while len(took_s) <= FEW_REPEATS and sum(took_s) < ROUNDS_S:
        began_s = time.perf_counter()
        await controller.compute(lambda: saver.write(counters, controller.switch))
        took_s.append(time.perf_counter() - began_s)
    return float(np.median(took_s))


async def _hand_overs(
    controller: Controller, machine: MachineSpec, work: TypicalWork
) -> tuple[MachineSpec, dict[str, Entry]]:
    """What it takes to give the device to the trainer and back, where they take turns: by the ledger's table, and by a
    rehearsal where that does not know the device or the move. Where memory moves, `machine` publishes as fast as it
    did between the halves of the way back: what was just given back has to be had anew."""
    if not controller.schedule.pauses_for_training:
        return machine, {}
    published: list[tuple[float, int]] = []

    async def publish() -> None:
        published.append(await publish_everywhere(controller))

    switch = controller.switch
    announce(controller, "hand-overs of the device")
    await switch.rehearse(
        train=lambda: controller.compute(partial(train_once, controller, work)), publish=publish
    )
    if published:
        machine = replace(machine, digest_bytes_per_s=publication_rate(published[1:]))
    entries = {}
    for stage, halves in SWITCHES.items():
        wanted = [expected for half in halves if (expected := switch.expected(half)) is not None]
        entries[stage] = entry(
            stage,
            sum(half.seconds for half in wanted),
            bytes=float(sum(half.bytes for half in wanted)),
            error_frac=0.5,
            formula="sum of its moves",
            source="the ledger's table; a rehearsal of the run's own moves where it has none",
        )
    return machine, entries


def _stages(model: ModelSpec, machine: MachineSpec, work: StepWork) -> dict[str, Entry]:
    """The ledger's entries by the loop's stages: trajectories are scored inside the rollout, as they finish."""
    stages = predict_stages(model, machine, work)
    scoring = stages.pop("reward")
    if work.generates_beside:
        return stages
    rollout = stages["rollout"]
    stages["rollout"] = replace(
        rollout,
        seconds=rollout.seconds + scoring.seconds,
        seconds_low=rollout.seconds_low + scoring.seconds_low,
        seconds_high=rollout.seconds_high + scoring.seconds_high,
        formula=f"{rollout.formula}; + host seconds of a trajectory (requests, environment, score) x trajectories",
    )
    return stages


def model_spec(controller: Controller) -> ModelSpec:
    """The ledger's view of the policy."""
    return ModelSpec.from_hf_config(controller.trainer.model.hf_config())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Answers to some training prompts, scored."""

    groups: list[Group]
    elapsed_s: float
    """From the first request to the last score."""
    decode_s: float
    """Of them the replica that computed longest decoded, by its own clock."""
    prefill_s: float
    """Likewise, and prefilled."""

    @property
    def engine_s(self) -> float:
        """It was at work."""
        return self.decode_s + self.prefill_s


async def _sample(controller: Controller, *, seed: int, most_groups: int = SAMPLE_GROUPS) -> Sample:
    """Some training prompts, answered and scored as a step would, and what the engines' clocks say of it."""
    await as_after_publication(controller)
    engines = controller.router.engines
    before = [await engine.stats() for engine in engines]
    began_s = time.perf_counter()
    groups = await _answers(controller, seed=seed, most_groups=most_groups)
    elapsed_s = time.perf_counter() - began_s
    after = [await engine.stats() for engine in engines]
    clocks = [
        (now.decode_s - then.decode_s, now.prefill_s - then.prefill_s)
        for now, then in zip(after, before, strict=True)
    ]
    decode_s, prefill_s = max(clocks, key=sum)
    return Sample(groups=groups, elapsed_s=elapsed_s, decode_s=decode_s, prefill_s=prefill_s)


async def _answers(controller: Controller, *, seed: int, most_groups: int) -> list[Group]:
    """Of some training prompts, scored; they do not count as taken."""
    num_groups = min(most_groups, controller.config.run.groups_per_step, len(controller.train_prompts))
    size = controller.config.rollout.group_size
    draw = np.random.default_rng([controller.config.run.seed, seed])
    chosen = draw.choice(len(controller.train_prompts), num_groups, replace=False)
    first_id = -2 - seed * max(most_groups, SAMPLE_GROUPS)
    prompts = [controller.train_prompts[row] for row in chosen]

    async def answer(group_id: int, prompt: Prompt) -> Group:
        members = [Member(group_id=group_id, member_idx=i, prompt=prompt) for i in range(size)]
        trajectories = await controller.rollout.run_members(members)
        group = Group(group_id=group_id, prompt=prompt, trajectories=tuple(trajectories))
        controller.rollout.shape(group)
        return group

    return await asyncio.gather(*(answer(first_id - n, prompt) for n, prompt in enumerate(prompts)))


async def _answer_step(controller: Controller, number: int) -> None:
    """A step's worth of prompts, answered and scored, beside those before: none of them finds what they left."""
    await forget_prefixes(controller)
    await _answers(controller, seed=1000 + number, most_groups=controller.config.run.groups_per_step)


async def _rehearsed(
    controller: Controller, model: ModelSpec, machine: MachineSpec, work: StepWork
) -> MachineSpec:
    """`machine` with what whole steps, without their updates, showed: the publication, and what the host does.

    Under the run's own requests an engine is not as fast as alone: in one process it shares the interpreter with
    whoever makes and scores them. What samples took by its own clocks scales its fit, decode steps and prefills each,
    in the median. What a trajectory costs besides (requests, environment, score) is the rest of a sample, which engines
    that run ahead do not wait for. Forwards are scaled by what they took over what was just generated, to whom nothing
    is warm yet. A sample is a whole step where that is short, so that nothing is extrapolated.
    """
    sample = await _sample(controller, seed=1)  # the warm-up
    whole = min(controller.config.run.groups_per_step, len(controller.train_prompts))
    is_short = bool(sample.groups) and sample.elapsed_s * whole / len(sample.groups) <= SAMPLE_S
    size = whole if is_short else SAMPLE_GROUPS
    ratios, prefill_ratios, beyond_s, rehearsals, texts_s = [], [], [], [], list[float]()
    forwards: list[dict[str, float]] = []
    assert machine.decode is not None
    decoding = replace(machine, decode=machine.decode.without_prefill())
    with scratch_recorder(controller) as recorder:
        for round_idx, _ in rounds([size], warm_up=size):
            if round_idx > 0:
                sample = await _sample(controller, seed=2 + round_idx, most_groups=size)
            lengths = [t.num_response_tokens for group in sample.groups for t in group.scored]
            rehearsal = await rehearse(controller, sample.groups, recorder)
            if rehearsal is None:
                break
            texts_s.append(rehearsal.texts_s)
            if round_idx == 0:
                continue
            engine_s, _ = rollout_of(model, machine, work, lengths)
            decode_s, _ = rollout_of(model, decoding, work, lengths)
            ratios.append(sample.decode_s / decode_s)
            if engine_s > decode_s and sample.prefill_s > 0:
                prefill_ratios.append(sample.prefill_s / (engine_s - decode_s))
            beyond_s.append((sample.elapsed_s - sample.engine_s) / (len(sample.groups) * work.group_size))
            rehearsals.append(rehearsal)
            forwards.append(_forward_ratios(model, machine, work, rehearsal, lengths))
    if not rehearsals:
        return machine
    every = max(controller.config.observe.trajectories_every_steps, 1)
    num_steps = controller.config.run.num_steps
    texts_mean_s = mean_texts_s(
        texts_s,
        step_frac=min(len(sample.groups) / controller.config.run.groups_per_step, 1.0),
        steps=range(num_steps)[2:] or range(num_steps),
        every=every,
    )
    machine = with_rehearsals(machine, rehearsals, reports_every=every, texts_s=texts_mean_s)
    medians = {stage: float(np.median([each[stage] for each in forwards])) for stage in forwards[0]}
    machine = _with_forwards(machine, {stage: ratio for stage, ratio in medians.items() if ratio > 0})
    assert machine.decode is not None
    return replace(
        machine,
        reward_s=max(float(np.median(beyond_s)), 0.0),
        decode=machine.decode.scaled(
            max(float(np.median(ratios)), 1e-6),
            prefill=float(np.median(prefill_ratios)) if prefill_ratios else None,
        ),
    )


def _forward_ratios(
    model: ModelSpec, machine: MachineSpec, work: StepWork, rehearsal: Rehearsal, lengths: Sequence[int]
) -> dict[str, float]:
    """By how much longer each forward before an update took over the sequences of a rehearsal than it should."""
    rehearsed = replace(
        work,
        num_groups=max(round(rehearsal.num_sequences[0] / work.group_size), 1),
        trained_frac=1.0,
        lengths=LengthDistribution.from_samples(lengths, max_tokens=work.lengths.max_tokens),
    )
    stages = stages_after_rollout(model, machine, rehearsed)
    return {
        name: rehearsal.forwards_s[name] / stages[name].seconds
        for name in FORWARDS
        if name in stages and name in rehearsal.forwards_s
    }


def _with_forwards(machine: MachineSpec, ratios: Mapping[str, float]) -> MachineSpec:
    """`machine` with each forward as many times as long: the policy's, and those of other networks; updates as they
    were measured."""
    assert machine.train is not None
    passes = {name: fit.scaled(ratios.get(name, 1.0)) for name, fit in machine.passes.items()}
    of_policy = [ratio for name, ratio in ratios.items() if name not in passes]
    if not of_policy:
        return replace(machine, passes=passes)
    return replace(
        machine, train=machine.train.with_forwards_scaled(float(np.mean(of_policy))), passes=passes
    )
