"""One step, from prompts to the proven version that serves the next token.

    collect ──► prepare ──► train ──► publish ──► report ──► evaluate ──► save
    groups      logprobs,   mini      the next    metrics    held-out     the whole
    of a step   advantages  batches   version,    of the     prompts      RL state
                                      proven      step

`rollout.py` keeps generating beside this loop as far as the staleness bound admits; with a bound of 0 that is not
at all, and the loop is synchronous. A schedule (`schedule.py`) says whether generation pauses while the trainer
has the device. Modes differ by these two alone; what is expected of a wait, which responses show the gap and who was
idle follow from them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rollbook.algos.advantage import estimate_advantages
from rollbook.algos.config import FilterConfig
from rollbook.algos.correction import correct
from rollbook.algos.filters import train_sequences
from rollbook.buffer.buffer import Taken
from rollbook.config.run_config import RunConfig
from rollbook.controller.engine_readings import EngineReadings
from rollbook.controller.evaluate import Evaluator, evaluation_values
from rollbook.controller.gap import fresh_scorer, gap_values
from rollbook.controller.lending import Lending
from rollbook.controller.objective import PolicyObjective, ValueObjective
from rollbook.controller.probing import Prober
from rollbook.controller.rollout import Rollout
from rollbook.controller.saving import Saver
from rollbook.controller.schedule import Schedule
from rollbook.controller.step_metrics import (
    batch_values,
    buffer_values,
    staleness_values,
    teacher_values,
    trajectory_values,
    untrained_events,
)
from rollbook.controller.step_plan import OF_A_BATCH, Expected, StepPlan, as_expected
from rollbook.controller.switching import DeviceSwitch, Half
from rollbook.envs.rewards.scorer import Scorer
from rollbook.errors import CheckpointError, DeadlineError, EngineError, SyncError
from rollbook.observe.recorder import Recorder
from rollbook.observe.spans import Span
from rollbook.observe.values import Last, Peak, Total, Values
from rollbook.rollout.engine import Engine
from rollbook.rollout.router import Router
from rollbook.rollout.teacher import HttpTeacher
from rollbook.sync.publisher import Publisher
from rollbook.sync.report import PublicationReport
from rollbook.trainer.trainer import Trainer
from rollbook.types import Prompt, TrainBatch, TrainSequence

Result = TypeVar("Result")
FillBatch = Callable[[TrainBatch], Awaitable[Values]]
"""A forward pass that writes what it found into the batch."""


@dataclass(kw_only=True)
class Controller:
    """The parts of a run and the loop over them. `build.py` makes one from a config."""

    config: RunConfig
    schedule: Schedule
    recorder: Recorder
    rollout: Rollout
    router: Router
    trainer: Trainer
    publisher: Publisher
    switch: DeviceSwitch
    prober: Prober
    evaluator: Evaluator
    saver: Saver
    scorer: Scorer
    train_prompts: Sequence[Prompt]
    remote_teacher: HttpTeacher | None = None
    """Asked instead of the trainer's own teacher."""
    lending: Lending | None = None
    """Serves on the trainer's device while the trainer waits; None where `lending.is_on` is false."""
    expected: StepPlan = field(default_factory=StepPlan)
    """What the ledger expects of the step in progress."""
    num_steps_done: int = 0
    """The next step to make, too."""
    weight_version: int = 0
    """The newest published version."""
    has_moved: bool = False
    """An update changed a bit of the weights since the last publication; a step of flat rewards may change none."""
    has_said_rejection: bool = False
    """The correction left nothing of a step to train, and the run said so."""
    is_stepping: bool = False
    """The loop has begun: a Ctrl-C waits for the end of the step."""
    is_stop_requested: bool = False
    """Set by Ctrl-C: the loop ends after the step in progress, with a checkpoint."""
    _waited_at_s: float | None = None
    """When the last wait for a step's groups ended."""

    def __post_init__(self) -> None:
        self._readings = EngineReadings(self.router)
        trainer = self.config.trainer.num_threads or torch.get_num_threads()
        self.num_threads = {"trainer": trainer, "engine": self.config.rollout.num_threads or trainer}
        """With which either side computes, where it is in this process."""
        self._thread = ThreadPoolExecutor(
            1, "trainer", initializer=torch.set_num_threads, initargs=(trainer,)
        )
        """The trainer's own thread: the event loop, and an engine beside it, go on while it computes."""

    async def run(self) -> None:
        """Every step of the run. On an error the run directory stays whole and resumable."""
        self.is_stepping = True
        await self._readings.begin()
        try:
            first = self.num_steps_done
            for step in range(first, self.config.run.num_steps):
                if self.is_stop_requested or self.is_complete:
                    break
                with self.recorder.step(step) as span:
                    self.expected.begin_step()
                    span.expected_s = self.expected.step_s(saves=self._is_save_due(step))
                    taken = await self._collect()
                    batch = await self.prepare(taken, step)
                    if batch is not None:
                        await self._train(batch, taken)
                    await self._publish_if_due(step, has_batch=batch is not None)
                    await self.report(taken, batch, step)
                    await self.evaluate(step)
                    await self._save(step)
                    # Expected of the work that the step got, as its stages are.
                    span.expected_s = self.expected.step_s(saves=self._is_save_due(step))
                self.commit_checkpoint()
                self.num_steps_done = step + 1
                self.rollout.admit()
                if step == first:  # which imported and made what a start does not need
                    gc.collect()
                    gc.freeze()
            await self._finish()
        finally:
            await self.rollout.stop()

    async def close(self) -> None:
        """Wait for what the trainer's thread is computing, and end it."""
        gc.unfreeze()  # what this run held may go, where the process goes on to another
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    async def _collect(self) -> Taken:
        """Wait for the groups of this step. The engines generate them; scoring happens as they finish."""
        with self.recorder.span("rollout", **self.expected.of("rollout")) as span:
            if self.lending is None:
                taken = await self.rollout.collect()
            else:
                taken = await self.lending.during(self.rollout.collect(), is_published=not self.has_moved)
            if self.runs_ahead:
                self._expect_wait(span, taken)
            else:
                span.set(tokens=self._num_generated(taken))
                self.expected.rollout_of([*taken.groups, *taken.dropped])
                span.set(**self.expected.of("rollout"))
        if taken.starved is not None:
            self.recorder.finding("starved", taken.starved.what, remedy=taken.starved.remedy)
        if self.schedule.pauses_for_training:
            with self.recorder.span("to_trainer", **self._of_switch("to_trainer")):
                await self.switch.to_trainer()
        return taken

    def _expect_wait(self, span: Span, taken: Taken) -> None:
        """Of engines that run ahead: what the other stages took since the last wait, this one need not."""
        if self._waited_at_s is not None:
            self.expected.wait_after(span.mono_s - self._waited_at_s, [*taken.groups, *taken.dropped])
            span.set(**self.expected.of("rollout"))
        self._waited_at_s = self.recorder.clock.mono_s()

    def _num_generated(self, taken: Taken) -> int:
        """Response tokens of everything that ended: groups that filters dropped took the engine's time as well, and so
        did failures."""
        groups = [*taken.groups, *taken.dropped]
        finished = [t for group in groups for t in group.scored]
        return sum(t.num_response_tokens for t in [*finished, *self.rollout.failed_trajectories])

    async def prepare(
        self, taken: Taken, step: int, *, group_filter: FilterConfig | None = None
    ) -> TrainBatch | None:
        """Sequences with everything the loss reads: trainer's logprobs, corrections, advantages. None when the
        filters left nothing to train.

        Args:
            group_filter: instead of the run's; a rehearsal has its own.
        """
        with self.recorder.span("pack", **self.expected.of("pack")) as span:
            batch = await self.compute(lambda: self._pack(taken, step, group_filter))
            if batch is None:
                self.recorder.event("empty_batch", evictions=len(taken.evictions))
                self.expected.leave_out(OF_A_BATCH)
                return None
            self.expected.batch_of(len(batch.sequences), batch.num_tokens)
            span.set(**self.expected.of("pack"))
        for stage, fill in self.forward_passes():
            with self.recorder.span(stage, **self.expected.of(stage)) as span:
                self.recorder.metrics(await fill(batch))
                span.set(tokens=batch.num_tokens)
        with self.recorder.span("adv", **self.expected.of("adv")):
            has_loss = any(s.loss_mask.any() for s in batch.sequences)
            self.recorder.metrics(await self.compute(lambda: self._correct_and_estimate(batch)))
        if has_loss and not any(s.loss_mask.any() for s in batch.sequences):
            self._say_all_rejected(step)
        return batch

    def _pack(self, taken: Taken, step: int, group_filter: FilterConfig | None) -> TrainBatch | None:
        sequences = train_sequences(taken.groups, group_filter or self.config.algorithm.filter)
        if not sequences:
            return None
        return self.trainer.make_batch(sequences, step=step, weight_version=self.weight_version)

    def _say_all_rejected(self, step: int) -> None:
        """The step makes no update. Said once, since it will be so again; the metrics hold the share of every step."""
        if self.has_said_rejection:
            return
        self.has_said_rejection = True
        self.recorder.finding(
            "all_rejected",
            f"algorithm.correction left out every token of step {step}: it makes no update",
            remedy="widen its bounds, or lower buffer.max_staleness_steps or the learning rate; "
            "rollout_corr/rollout_rs_masked_fraction is the share it leaves out, training/logprob_gap_all/... why",
        )

    def forward_passes(self) -> list[tuple[str, FillBatch]]:
        """What this algorithm reads of the networks beside the sampled tokens, by stage, in the order of a step. The
        calibration makes the same passes: what one of them fills in, the advantages may read."""
        algorithm, trainer = self.config.algorithm, self.trainer
        wanted: dict[str, tuple[bool, FillBatch]] = {
            "proximal": (self.needs_proximal, self._on_trainer(trainer.fill_proximal)),
            "reference": (algorithm.needs_reference, self._on_trainer(trainer.fill_reference)),
            "teacher": (algorithm.needs_teacher, self._fill_teacher),
            "values": (algorithm.needs_values, self._on_trainer(trainer.fill_values)),
        }
        return [(stage, fill) for stage, (is_wanted, fill) in wanted.items() if is_wanted]

    def _on_trainer(self, fill: Callable[[TrainBatch], Values]) -> FillBatch:
        return lambda batch: self.compute(lambda: fill(batch))

    async def _fill_teacher(self, batch: TrainBatch) -> Values:
        if self.remote_teacher is not None:
            await self.remote_teacher.fill(batch)
            return teacher_values(batch)
        return await self.compute(lambda: self.trainer.fill_teacher(batch)) | teacher_values(batch)

    def _correct_and_estimate(self, batch: TrainBatch) -> Values:
        """Write importance weights and advantages, once every forward pass was made."""
        algorithm = self.config.algorithm
        values = correct(batch.sequences, algorithm.correction) if self.needs_proximal else {}
        return values | estimate_advantages(batch.sequences, algorithm)

    async def _train(self, batch: TrainBatch, taken: Taken) -> None:
        """Every optimizer update of the step."""
        objective = PolicyObjective(self.config.algorithm, proximal_is_current=not self.needs_proximal)
        fresh: list[TrainSequence] = []
        before_step = fresh_scorer(self, batch, taken, fresh)
        with self.recorder.span("train", **self.expected.of("train")) as span:
            values = await self.compute(
                lambda: self.trainer.update(batch, objective, before_step=before_step)
            )
            self.note_movement(values)
            self.recorder.metrics(values)
            self.expected.updates_of(values, fresh)
            span.set(tokens=batch.num_tokens, **self.expected.of("train"))
        if self.config.algorithm.needs_values:
            critic = ValueObjective(self.config.algorithm)
            with self.recorder.span("critic", **self.expected.of("critic")):
                self.recorder.metrics(await self.compute(lambda: self.trainer.update_critic(batch, critic)))
        for idx in batch.mini_batches[0]:  # the others were seen by weights that had moved already
            if idx in objective.noted:
                batch.sequences[idx].proximal_logprobs = objective.noted[idx]
        self.recorder.metrics(await self.compute(lambda: gap_values(self, batch, taken, fresh)))

    async def _publish_if_due(self, step: int, *, has_batch: bool) -> None:
        """Prove the step's weights on every replica; then they, and only they, serve. Where engine and trainer own the
        device in turn, it changes hands around this."""
        schedule, buffer, is_due = self.schedule, self.rollout.buffer, self._is_publication_due(step)
        if schedule.pauses_for_training and self.config.memory.moves_anything:
            with self.recorder.span("to_rollout", **self._of_switch("make_room")):
                await self.switch.make_room()
        # A step without a batch changed nothing: the version of the step before is its version as well.
        if is_due and (has_batch or buffer.serving_step < step or self.switch.needs_publication):
            with self.recorder.span("sync", **self.expected.publication()) as span:
                buffer.offered(self.weight_version + 1, step + 1)
                report = await self.publish(self.weight_version + 1)
                span.set(bytes=report.num_bytes * len(report.replicas))
                self.recorder.metrics(report.values())
        else:
            self.expected.leave_out({"sync"})
        if is_due:
            buffer.published(self.weight_version, step + 1)
        if schedule.pauses_for_training:
            with self.recorder.span("to_rollout", **self._of_switch("to_engine")):
                await self.switch.to_engine()
        if is_due and self.probes:
            before, num_replicas = self.prober.num_checked, len(self.router.engines)
            with self.recorder.span("sync") as span:
                await self.probe()
                asked_frac = (self.prober.num_checked - before) / num_replicas
                span.set(**self.expected.probe_of(asked_frac))

    async def probe(self) -> None:
        """Compare engine and trainer on one short prompt, all replicas at once; a replica that differs serves nothing
        until it is re-synced.

        Raises:
            SyncError: no replica is left that agrees with the trainer.
        """
        if not self.probes:
            return
        in_service = [e for e in self.router.engines if e.replica_id not in self.router.out_of_service]
        answers = await asyncio.gather(*(self.probe_one(engine) for engine in in_service))
        for engine, why in zip(in_service, answers):
            if why:
                self.router.take_out(engine.replica_id, why)
                self.publisher.quarantined[engine.replica_id] = why
        if len(self.router.out_of_service) == len(self.router.engines):
            raise SyncError(
                "no replica gives the trainer's logprobs: " + "; ".join(self.router.out_of_service.values()),
                "the bytes are equal: compare dtype, temperature and kernels of engine and trainer; "
                "sync.probe = false goes on regardless",
            )

    async def probe_one(self, engine: Engine) -> str:
        """Why `engine` does not give the trainer's logprobs, or nothing."""
        if not self.probes:
            return ""
        try:
            report = await self.prober.check(engine, self.weight_version, self.compute)
            why = "" if report is None else report.why
        except (EngineError, DeadlineError) as error:
            report, why = None, error.what
        if report is not None:
            self.recorder.metrics({"sync/probe_gap_max": Peak(report.gap_max_nats)})
        if why:
            held = {"replica_id": engine.replica_id, "weight_version": self.weight_version, "why": why}
            self.recorder.event("probe_failed", **held)
        return why

    async def report(self, taken: Taken, batch: TrainBatch | None, step: int) -> None:
        """Metrics of the step that no part reports by itself, and its trajectories."""
        failed, self.rollout.failed_trajectories = self.rollout.failed_trajectories, []
        values = trajectory_values(taken, failed) | buffer_values(self.rollout.buffer)
        values |= await self._engine_values() | self.scorer.values()
        values["training/weight_version"] = Last(self.weight_version)
        values["batch/num_groups"] = Total(len(taken.groups))
        masks = {}
        values |= staleness_values(taken)
        if batch is not None:
            values |= batch_values(batch)
            masks = {f"{s.group_id}/{s.member_idx}": s.loss_mask for s in batch.sequences}
        self.recorder.metrics(values)
        for kind, event in untrained_events(taken, failed):
            self.recorder.event(kind, **event)
        work = self.expected.work(self._num_generated(taken), num_gpus=self.recorder.num_gpus)
        if work is not None:
            self.recorder.work(work)
        every = self.config.observe.trajectories_every_steps
        if every and step % every == 0:
            finished = [t for group in [*taken.groups, *taken.dropped] for t in group.scored]
            written = finished + failed
            await asyncio.to_thread(self.recorder.trajectories, step, written, loss_masks=masks)

    async def evaluate(self, step: int) -> None:
        """Held-out prompts, before the next step's groups take the engine; before the first step, `step` is -1."""
        is_first = step < 0
        if self.evaluator.is_due(step + 1, is_last=is_first or self._is_last(step)):
            with self.recorder.span("eval", **self.expected.of("eval")) as span:
                answers = await self.evaluator.answer(self.router)
                values = evaluation_values(answers)
                span.set(**self.expected.evaluation_of(answers))
            if is_first and self.evaluator.baseline is not None:
                with self.recorder.span("baseline"):
                    values |= await self.evaluator.run_baseline()
            self.recorder.metrics(values, step=0 if is_first else None)

    async def _save(self, step: int) -> None:
        if self._is_save_due(step):
            await self.write_checkpoint(step + 1)

    def _is_save_due(self, step: int) -> bool:
        return self.saver.is_due(step + 1, is_last=self._is_last(step) or self.is_stop_requested)

    async def _finish(self) -> None:
        """What a run leaves behind: the state it ended in and, if nothing is left to do, the model."""
        if self.saver.newest_step != self.num_steps_done:  # the data ended without a group to train
            await self.write_checkpoint(self.num_steps_done)
            self.commit_checkpoint()
        if self.is_complete and self.config.checkpoint.save_model:
            await self.compute(lambda: self.saver.write_model(self.trainer))

    # ---- what the stages use -----------------------------------------------------------------------------

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the trainer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def write_checkpoint(self, num_steps_done: int) -> None:
        """Write the whole RL state aside, once more if that fails.

        Raises:
            CheckpointError: it failed twice; earlier checkpoints are untouched.
        """
        counters = self.saver.counters(self, num_steps_done)
        with self.recorder.span("checkpoint", **self.expected.of("checkpoint")) as span:
            try:
                await self.compute(lambda: self.saver.write(counters, self.switch))
            except CheckpointError as error:
                self.recorder.event("checkpoint_failed", num_steps_done=num_steps_done, error=error.what)
                await self.compute(lambda: self.saver.write(counters, self.switch))
            span.set(bytes=self.saver.last_write_bytes)
        self.saver.last_write_s = span.duration_s

    def commit_checkpoint(self) -> None:
        """Make the checkpoint that was written aside, if one was, the run's newest."""
        if (path := self.saver.commit()) is not None:
            size = self.saver.last_write_bytes
            self.recorder.event("checkpoint", path=f"{path.parent.name}/{path.name}", num_bytes=size)

    @property
    def num_steps_uncommitted(self) -> int:
        """Steps done since the newest checkpoint: a run that is killed repeats them."""
        return self.num_steps_done - (self.saver.newest_step or 0)

    @property
    def is_complete(self) -> bool:
        """Every step was made, or every epoch of the data was consumed."""
        return self.num_steps_done >= self.config.run.num_steps or self.rollout.is_exhausted

    def _is_last(self, step: int) -> bool:
        """Whether no step follows: known before the next prompts are asked for."""
        return step + 1 == self.config.run.num_steps or self.rollout.stream.is_consumed

    @property
    def probes(self) -> bool:
        """Not where the engine's weights are rounded on purpose: the gap is then what the user came to see."""
        return self.config.sync.probe and self.config.rollout.mismatch == "none"

    @property
    def runs_ahead(self) -> bool:
        """Whether engines may finish more than a step waits for, so that its wait is not what generating took."""
        return self.config.buffer.max_staleness_steps > 0 or not self.schedule.pauses_for_training

    @property
    def num_sequences(self) -> int:
        """Sequences of a step before filters."""
        return self.config.run.groups_per_step * self.config.rollout.group_size

    @property
    def needs_proximal(self) -> bool:
        """Whether a forward must give the trust-region anchor before the updates."""
        return self.config.algorithm.needs_proximal(self.trainer.num_updates_per_step)

    async def publish(self, weight_version: int) -> PublicationReport:
        """One publication, repeated once if it fails. Replicas that missed it are out of service.

        Raises:
            SyncError: it failed twice; every replica still holds a version that was proven.
        """
        self.router.newest_version = weight_version
        try:
            report = await self.publisher.publish(weight_version, moved=self.has_moved)
        except SyncError as error:
            self.recorder.event("publication_failed", weight_version=weight_version, error=error.what)
            self.recorder.metrics({"sync/num_failed": Total(1), "sync/num_retries": Total(1)})
            report = await self.publisher.publish(weight_version, moved=self.has_moved)
        for replica_id, why in report.quarantined.items():
            self.router.take_out(replica_id, why)
            self.router.announce(replica_id, why)
        for replica_id in report.committed:
            if replica_id not in report.quarantined:
                self.router.put_back(replica_id)
        self.weight_version = weight_version
        self.has_moved = False
        self.recorder.event("publication", **report.as_event())
        return report

    def note_movement(self, values: Values) -> None:
        """After an update that moved the weights, a publication of the same bits is a fault."""
        done, unmoved = (values.get(f"trainer/actor_{name}updates") for name in ("", "unmoved_"))
        self.has_moved |= (
            isinstance(done, Total) and isinstance(unmoved, Total) and done.value > unmoved.value
        )

    def _is_publication_due(self, step: int) -> bool:
        return self._is_last(step) or (step + 1) % self.config.sync.every_steps == 0

    def _of_switch(self, half: Half) -> Expected:
        return as_expected(self.switch.expected(half))

    async def _engine_values(self) -> Values:
        stages = ["proximal", "reference", "values", "train", "critic"]
        if self.remote_teacher is None:
            stages.append("teacher")
        return await self._readings.since_last(
            computed_s=self.recorder.seconds_of(stages),
            shares_device=self.schedule.pauses_for_training,
            runs_ahead=self.runs_ahead,
            num_lent_tokens=0 if self.lending is None else self.lending.pop_tokens(),
        )
