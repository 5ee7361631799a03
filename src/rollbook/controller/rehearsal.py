"""A step rehearsed without its updates: what the host pays for it, and what its publication takes.

The loop's own methods work on groups that the run's engine just generated; what they report goes to a scratch folder.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollbook.algos.filters import train_sequences
from rollbook.buffer.buffer import Eviction, Taken
from rollbook.controller.gap import gap_values
from rollbook.ledger.hardware import HostFit, MachineSpec
from rollbook.observe.recorder import Recorder
from rollbook.trainer.ceilings import wait_for
from rollbook.types import Group

if TYPE_CHECKING:
    from rollbook.controller.loop import Controller


async def publish_everywhere(controller: Controller) -> tuple[float, int]:
    """Give every replica its weights again. Returns the seconds and the bytes."""
    wait_for(controller.trainer.model.device)
    began_s = time.perf_counter()
    reports = [await controller.publisher.resync(engine.replica_id) for engine in controller.router.engines]
    return time.perf_counter() - began_s, sum(report.num_bytes for report in reports)


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
                recorder.metrics(gap_values(controller, batch, taken))
                if step == 0:
                    sync_s, num_bytes = await publish_everywhere(controller)
                    probe_s = await as_after_publication(controller)
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
        digest_bytes_per_s=publication_rate([(r.sync_s, r.published_bytes) for r in rehearsals]),
        sync_base_s=float(np.median([r.probe_s for r in rehearsals])),
    )


def publication_rate(measured: Sequence[tuple[float, int]]) -> float:
    """Bytes a second in the median of publications of (seconds, bytes)."""
    return float(np.median([num_bytes / max(seconds, 1e-6) for seconds, num_bytes in measured]))


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
