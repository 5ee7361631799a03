"""The gap between trainer and engines of a step: on the batch, and on fresher responses where all of that is stale."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rollbook.algos.correction import mismatch
from rollbook.algos.filters import fresh_sequences
from rollbook.algos.gap import logprob_gap
from rollbook.buffer.buffer import Taken
from rollbook.observe.values import Values
from rollbook.types import TrainBatch, TrainSequence

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

MAX_FRESH = 16
"""Responses a step that are scored for the gap alone, when the batch holds none of the trainer's own version."""


def fresh_scorer(
    controller: Controller, batch: TrainBatch, taken: Taken, fresh: list[TrainSequence]
) -> Callable[[], None] | None:
    """What fills `fresh` once the gradients of the first update are there, and the weights are still those that
    began the step: responses that the engines finished under these weights meanwhile, with the trainer's logprobs.

    None where the batch itself holds such responses, or the trainer is elsewhere.
    """
    ages = {taken.staleness(s.oldest_version) for s in batch.sequences}
    config = controller.config
    if 0 in ages or controller.schedule.pauses_for_training or config.cluster.kind != "inproc":
        return None
    loop = asyncio.get_running_loop()

    async def finished() -> list[TrainSequence]:
        buffer = controller.rollout.buffer
        if buffer.serving_step != taken.step:  # the trainer has moved on from what the engines hold
            return []
        return fresh_sequences(
            buffer.finished(), config.algorithm.filter, weight_version=batch.weight_version, most=MAX_FRESH
        )

    def score() -> None:
        """On the trainer's thread."""
        found = asyncio.run_coroutine_threadsafe(finished(), loop).result()
        if found:
            trainer = controller.trainer
            beside = trainer.make_batch(found, step=batch.step, weight_version=batch.weight_version)
            trainer.fill_proximal(beside)
            fresh.extend(found)

    return score


def gap_values(
    controller: Controller, batch: TrainBatch, taken: Taken, fresh: Sequence[TrainSequence] = ()
) -> Values:
    """Trainer against engine on the step's tokens; with proximal = "behavior" and several updates, on those of the
    first, which alone saw the weights that began the step. Where no forward gave the trainer's logprobs before the
    updates, their mismatch is known, and reported, only now."""
    sequences = [s for s in batch.sequences if s.proximal_logprobs is not None]
    algorithm = controller.config.algorithm
    values: Values = {} if controller.needs_proximal else mismatch(sequences, algorithm.correction)
    report = logprob_gap(
        sequences,
        staleness=taken.staleness,
        fresh=fresh,
        clip_eps_low=algorithm.clip_eps_low,
        clip_eps_high=algorithm.clip_eps_high,
    )
    return values if report is None else values | report.values()
