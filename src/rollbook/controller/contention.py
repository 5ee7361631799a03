"""What sides that work at the same time cost each other: engine and trainer alone, then each beside the other."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rollbook.controller.calibrate import ROUNDS_S, TypicalWork, plain_objective, step_batch
from rollbook.controller.rehearsal import as_after_publication, publish_everywhere
from rollbook.ledger.hardware import Contention

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller

WINDOW_S = 1.0
"""For which each side is watched, alone and beside the other, CONTENTION_ROUNDS times."""
CONTENTION_ROUNDS = 3


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
    batch = step_batch(trainer, work)
    await controller.compute(trainer.keep_state)
    objective = plain_objective(controller)
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
        return float(np.mean(passes)), await _published_s(controller)

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
            published_s = await _published_s(controller)
            return busy_s / max(num_tokens, 1), float(np.mean(passes[1:])), published_s
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


async def _published_s(controller: Controller) -> float:
    """Seconds of a publication to every replica, with its probes."""
    sync_s, _ = await publish_everywhere(controller)
    return sync_s + await as_after_publication(controller)
