"""One step, from prompts to the proven version that serves the next token.

    collect ──► prepare ──► train ──► publish ──► evaluate ──► save
    groups      logprobs,   mini      the next    held-out     the whole
    of a step   advantages  batches   version,    prompts      RL state
                                      proven

`rollout.py` keeps generating beside this loop as far as the staleness bound admits; with a bound of 0 that is not
at all, and the loop is synchronous. A schedule (`schedule.py`) says whether generation pauses while the trainer
has the device. There is no other difference between the modes.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch

from rollbook.algos.advantage import estimate_advantages
from rollbook.algos.correction import correct
from rollbook.algos.filters import train_sequences
from rollbook.algos.gap import logprob_gap
from rollbook.buffer.buffer import Taken
from rollbook.config.run_config import RunConfig
from rollbook.controller.evaluate import Evaluator
from rollbook.controller.expectation import Plan, can_plan, make_plan
from rollbook.controller.lending import Lending
from rollbook.controller.objective import PolicyObjective, ValueObjective
from rollbook.controller.preflight import preflight
from rollbook.controller.probing import Prober
from rollbook.controller.rollout import Rollout
from rollbook.controller.saving import Saver, last_span_s
from rollbook.controller.schedule import Schedule
from rollbook.controller.step_metrics import (
    batch_values,
    buffer_values,
    engine_values,
    staleness_values,
    teacher_values,
    trajectory_values,
)
from rollbook.controller.switching import DeviceSwitch, Half
from rollbook.controller.warmup import answer_sequences, warmup_lr
from rollbook.envs.rewards.scorer import Scorer
from rollbook.errors import CheckpointError, ConfigError, EngineError, SyncError
from rollbook.ledger.entry import Entry
from rollbook.observe.recorder import Recorder
from rollbook.observe.values import Last, Peak, Ratio, Total, Values
from rollbook.observe.whole_step import Work
from rollbook.rollout.engine import Engine, EngineStats
from rollbook.rollout.router import Router
from rollbook.rollout.teacher import HttpTeacher
from rollbook.sync.publisher import PublicationReport, Publisher
from rollbook.trainer.objective import SupervisedObjective
from rollbook.trainer.trainer import Trainer
from rollbook.types import Prompt, TrainBatch, TrainSequence

Result = TypeVar("Result")
MAX_FRESH = 16
"""Responses a step that are scored for the gap alone, when the batch holds none of the trainer's own version."""
FillBatch = Callable[[TrainBatch], Awaitable[Values]]
"""A forward pass that writes what it found into the batch."""
OF_A_BATCH = frozenset({"proximal", "reference", "teacher", "values", "adv", "train", "critic"})
"""Stages that a step without a batch has not."""


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
    plan: Plan | None = None
    """What the ledger expects of each stage of a step."""
    expected: Mapping[str, Entry] = field(default_factory=dict)
    """Of this step: the plan's, and from the moment the batch is known, what that batch should take."""
    num_steps_done: int = 0
    """The next step to make, too."""
    weight_version: int = 0
    """The newest published version."""
    has_moved: bool = False
    """The trainer's weights changed since the last publication; a step of flat rewards changes nothing."""
    has_said_rejection: bool = False
    """The correction left nothing of a step to train, and the run said so."""
    is_stepping: bool = False
    """The loop has begun: a Ctrl-C waits for the end of the step."""
    is_stop_requested: bool = False
    """Set by Ctrl-C: the loop ends after the step in progress, with a checkpoint."""
    _engine_stats: dict[int, EngineStats] = field(default_factory=dict)
    _engine_stats_at_s: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "trainer", initializer=self._begin_thread)
        """The trainer's own thread: the event loop, and an engine beside it, go on while it computes."""

    def _begin_thread(self) -> None:
        if self.config.trainer.num_threads is not None:
            torch.set_num_threads(self.config.trainer.num_threads)

    async def begin(self, *, resume: bool) -> None:
        """Everything before the first step: weights proven on every replica, preflight, warm-up, expectations."""
        step = self.saver.load(self) if resume else None
        if step is not None and self.is_complete:
            self.recorder.accept()
            self.recorder.event("already_complete", num_steps_done=self.num_steps_done)
            return
        if self.rollout.buffer.serving_step < self.num_steps_done:
            self.weight_version += (
                1  # the checkpoint's weights were in no publication: a version of their own
            )
        with self.recorder.span("publish"):
            publication = await self.publish(self.weight_version)
            await self._note_mismatch()
        with self.recorder.span("preflight"):
            await preflight(
                scorer=self.scorer,
                prompts=self.train_prompts,
                num_self_test_prompts=self.config.reward.self_test_prompts,
                rollout=self.rollout,
                recorder=self.recorder,
                deadline_s=self.config.buffer.group_deadline_s,
                versions=await self._versions(),
                publication=publication,
            )
            await self._check_deadlines()
        self.recorder.accept()  # all that a user can get wrong was checked: from here on the run is on disk
        if step is None:
            await self._warm_up()
        self.rollout.buffer.published(self.weight_version, self.num_steps_done)
        await self._probe()
        if self.lending is not None:
            with self.recorder.span("lending"):
                await self.lending.rehearse()
        if step is None:
            await self._write_checkpoint(0)
        else:
            self.saver.last_write_s = last_span_s(self.recorder.run_dir.events.path, "checkpoint")
        gc.collect()
        gc.freeze()  # what was imported and built stays: a full collection no longer goes through all of it
        if can_plan(self.config):
            with self.recorder.span("plan"):
                self.plan = await make_plan(self)
            self._show_plan(self.plan)
        if step is None:
            await self._evaluate(-1)
            self.saver.commit()

    def _show_plan(self, plan: Plan) -> None:
        """Write the plan and say it, before the first step: the promise that the measurements stand beside."""
        self.recorder.run_dir.write_plan(plan.as_json())
        seconds = plan.mean_seconds()
        self.expected = plan.stages
        step_s = (self._expected_step_s() or 0.0) + seconds.get("checkpoint", 0.0)
        num_left = self.config.run.num_steps - self.num_steps_done
        self.recorder.event(
            "plan",
            topology=self._topology(),
            stages=seconds,
            step_s=step_s,
            total_s=num_left * (step_s + seconds.get("eval", 0.0)),
        )

    def _topology(self) -> str:
        """Who computes where, in words."""
        rollout, num_replicas = self.config.rollout, self.config.rollout.num_replicas
        engines = f"{num_replicas} {rollout.engine} engine{'s' if num_replicas > 1 else ''}"
        beside = "in turn with" if self.schedule.pauses_for_training else "beside"
        trainer = f"the trainer on {self.config.model.device}"
        return f"{self.schedule.name}: {engines} on {rollout.device}, {beside} {trainer}"

    async def _note_mismatch(self) -> None:
        """A run that samples from rounded weights on purpose says so before its first token."""
        if self.config.rollout.mismatch != "none":
            stats = {str(engine.replica_id): await engine.stats() for engine in self.router.engines}
            self.recorder.event(
                "mismatch",
                mismatch=self.config.rollout.mismatch,
                error_frac={replica_id: held.mismatch_error_frac for replica_id, held in stats.items()},
            )

    async def _versions(self) -> dict[int, int]:
        """Replica -> the weight version it reports, of those in service."""
        serving = [e for e in self.router.engines if e.replica_id not in self.router.out_of_service]
        return {engine.replica_id: (await engine.stats()).weight_version for engine in serving}

    async def _check_deadlines(self) -> None:
        """A response of full length must fit its deadlines, at the pace of the trial (one sequence alone: the fastest).

        Raises:
            ConfigError: it cannot.
        """
        stats = [await engine.stats() for engine in self.router.engines]
        num_steps = sum(held.decode_steps for held in stats)
        if not num_steps:
            return
        step_s = sum(held.decode_s for held in stats) / num_steps
        longest_s = step_s * self.config.rollout.max_response_tokens
        for name, deadline_s in (
            ("buffer.group_deadline_s", self.config.buffer.group_deadline_s),
            ("rollout.response_deadline_s", self.config.rollout.response_deadline_s),
        ):
            if longest_s > deadline_s:
                raise ConfigError(
                    f"{name} is {deadline_s:g} s, and a response of rollout.max_response_tokens "
                    f"{self.config.rollout.max_response_tokens} takes at least {longest_s:.3g} s "
                    f"({step_s:.3g} s a token in the trial)",
                    "every long response would fail as a timeout: raise the deadline, or lower the limit",
                )

    async def _warm_up(self) -> None:
        """Supervised updates on reference answers, until enough held-out prompts are answered or they are used up."""
        config = self.config.warmup
        if not config.num_updates:
            return
        objective = SupervisedObjective()
        tokenizer = self.trainer.model.tokenizer
        assert tokenizer is not None
        batches = answer_sequences(
            self.train_prompts,
            tokenizer,
            batch_sequences=config.batch_sequences,
            num_batches=config.num_updates,
            seed=self.config.run.seed,
        )
        with self.recorder.span("warmup"):
            for update, sequences in enumerate(batches, start=1):
                batch = self.trainer.make_batch(sequences, step=update, weight_version=self.weight_version)
                batch.mini_batches = [
                    list(range(len(sequences)))
                ]  # one update, whatever a step makes of its batch
                lr = warmup_lr(config.learning_rate, update, config.num_updates)
                values = await self.compute(partial(self.trainer.update, batch, objective, lr=lr))
                self._note_movement(values)
                self.recorder.event(
                    "warmup",
                    update=update,
                    num_updates=config.num_updates,
                    loss=values["warmup/loss"].result(),
                )
                if update % config.check_every_updates == 0 or update == config.num_updates:
                    await self.publish(self.weight_version + 1)
                    if await self._is_warm():
                        break
            self.trainer.optimizer.reset_moments()
            self.trainer.freeze_reference()

    async def _is_warm(self) -> bool:
        """Whether held-out prompts are answered well enough; asks the engines."""
        config = self.config.warmup
        if config.until_exact_frac >= 1 or not self.evaluator.prompts:
            return False
        values = await self.evaluator.run(self.router)
        exact = [value.result() for name, value in values.items() if name.endswith("/exact_match")]
        self.recorder.event("warmup_check", exact_match=exact)
        return bool(exact) and min(exact) >= config.until_exact_frac

    async def run(self) -> None:
        """Every step of the run. On an error the run directory stays whole and resumable."""
        self.is_stepping = True
        try:
            for step in range(self.num_steps_done, self.config.run.num_steps):
                if self.is_stop_requested or self.is_complete:
                    break
                with self.recorder.step(step) as span:
                    self.expected = {} if self.plan is None else self.plan.stages
                    span.expected_s = self._expected_step_s(saves=self._is_save_due(step))
                    taken = await self._collect()
                    batch = await self._prepare(taken, step)
                    if batch is not None:
                        await self._train(batch, taken)
                    await self._publish(step, moved=batch is not None)
                    await self.report(taken, batch, step)
                    await self._evaluate(step)
                    await self._save(step)
                    # Expected of the work that the step got, as its stages are.
                    span.expected_s = self._expected_step_s(saves=self._is_save_due(step))
                self.saver.commit()
                self.num_steps_done = step + 1
                self.rollout.admit()
            await self._finish()
        finally:
            await self.rollout.stop()

    async def close(self) -> None:
        """Wait for what the trainer's thread is computing, and end it."""
        gc.unfreeze()  # what this run held may go, where the process goes on to another
        await asyncio.to_thread(self._thread.shutdown, wait=True)

    async def _collect(self) -> Taken:
        """Wait for the groups of this step. The engines generate them; scoring happens as they finish."""
        with self.recorder.span("rollout", expected_s=self._expected_s("rollout")) as span:
            if self.lending is None:
                taken = await self.rollout.collect()
            else:
                taken = await self.lending.during(self.rollout.collect(), is_published=not self.has_moved)
            if not self.runs_ahead:
                span.set(tokens=self._num_generated(taken))
                self._expect_rollout_of(taken)
                span.set(expected_s=self._expected_s("rollout"))
        if taken.starved is not None:
            self.recorder.finding("starved", taken.starved.what, remedy=taken.starved.remedy)
        if self.schedule.pauses_for_training:
            with self.recorder.span("to_trainer", expected_s=self._switch_s("to_trainer")):
                await self.switch.to_trainer()
        return taken

    def _expect_rollout_of(self, taken: Taken) -> None:
        """From here on the expected rollout is that of the responses which the step got."""
        if self.plan is not None:
            groups = sorted([*taken.groups, *taken.dropped], key=lambda group: group.group_id)
            lengths = [max(t.num_response_tokens, 1) for group in groups for t in group.scored]
            self.expected = {**self.expected, "rollout": self.plan.rollout_for(lengths)}

    def _num_generated(self, taken: Taken) -> int:
        """Response tokens of everything that ended: groups that filters dropped took the engine's time as well, and so
        did failures."""
        groups = [*taken.groups, *taken.dropped]
        finished = [t for group in groups for t in group.scored]
        return sum(t.num_response_tokens for t in [*finished, *self.rollout.failed_trajectories])

    async def _prepare(self, taken: Taken, step: int) -> TrainBatch | None:
        """Sequences with everything the loss reads: trainer's logprobs, corrections, advantages. None when the
        filters left nothing to train."""
        algorithm = self.config.algorithm
        with self.recorder.span("pack", expected_s=self._expected_s("pack")) as span:
            sequences = train_sequences(taken.groups, algorithm.filter)
            if not sequences:
                self.recorder.event("empty_batch", evictions=len(taken.evictions))
                self.expected = _without(self.expected, OF_A_BATCH)
                return None
            batch = self.trainer.make_batch(sequences, step=step, weight_version=self.weight_version)
            if self.plan is not None:
                mean_tokens = batch.num_tokens / len(sequences)
                self.expected = {**self.expected, **self.plan.stages_for(len(sequences), mean_tokens)}
                span.set(expected_s=self._expected_s("pack"))
        for stage, fill in self.forward_passes():
            with self.recorder.span(stage, expected_s=self._expected_s(stage)) as span:
                self.recorder.metrics(await fill(batch))
                span.set(tokens=batch.num_tokens)
        with self.recorder.span("adv", expected_s=self._expected_s("adv")):
            has_loss = any(s.loss_mask.any() for s in batch.sequences)
            self.recorder.metrics(self.correct_and_estimate(batch))
        if has_loss and not any(s.loss_mask.any() for s in batch.sequences):
            self._say_all_rejected(step)
        return batch

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

    def correct_and_estimate(self, batch: TrainBatch) -> Values:
        """Write importance weights and advantages, once every forward pass was made."""
        algorithm = self.config.algorithm
        values = correct(batch.sequences, algorithm.correction) if self.needs_proximal else {}
        return values | estimate_advantages(batch.sequences, algorithm)

    async def _train(self, batch: TrainBatch, taken: Taken) -> None:
        """Every optimizer update of the step."""
        objective = PolicyObjective(self.config.algorithm, proximal_is_current=not self.needs_proximal)
        fresh: list[TrainSequence] = []
        before_step = self._fresh_scorer(batch, taken, fresh)
        with self.recorder.span("train", expected_s=self._expected_s("train")) as span:
            values = await self.compute(
                lambda: self.trainer.update(batch, objective, before_step=before_step)
            )
            self._note_movement(values)
            self.recorder.metrics(values)
            self._expect_update_of(values, fresh)
            span.set(tokens=batch.num_tokens, expected_s=self._expected_s("train"))
        if self.config.algorithm.needs_values:
            critic = ValueObjective(self.config.algorithm)
            with self.recorder.span("critic", expected_s=self._expected_s("critic")):
                self.recorder.metrics(await self.compute(lambda: self.trainer.update_critic(batch, critic)))
        for idx in batch.mini_batches[0]:  # the others were seen by weights that had moved already
            if idx in objective.noted:
                batch.sequences[idx].proximal_logprobs = objective.noted[idx].float().cpu().numpy()
        self.recorder.metrics(self.gap(batch, taken, fresh))

    def _expect_update_of(self, values: Values, fresh: Sequence[TrainSequence]) -> None:
        """From here on the expected updates are those of the micro batches that they had, and of what was scored beside
        them."""
        if self.plan is None:
            return
        counts = {
            name: values[metric].result() if metric in values else 0.0
            for name, metric in (
                ("num_micro_batches", "trainer/actor_micro_batches"),
                ("num_tokens", "trainer/actor_tokens"),
                ("num_updates", "trainer/actor_updates"),
            )
        }
        num_fresh_tokens = sum(sequence.num_tokens for sequence in fresh)
        train = self.plan.update_for(**counts, num_fresh_tokens=num_fresh_tokens)
        self.expected = {**self.expected, "train": train}

    async def _publish(self, step: int, *, moved: bool) -> None:
        """Prove the new weights on every replica; then they, and only they, serve."""
        if self.schedule.pauses_for_training and self.config.memory.moves_anything:
            with self.recorder.span("to_rollout", expected_s=self._switch_s("make_room")):
                await self.switch.make_room()
        if self._is_publication_due(step):
            if moved or self.rollout.buffer.serving_step < step or self.switch.needs_publication:
                with self.recorder.span("sync", expected_s=self._expected_s("sync")) as span:
                    self.rollout.buffer.offered(self.weight_version + 1, step + 1)
                    report = await self.publish(self.weight_version + 1)
                    span.set(bytes=report.num_bytes)
                    self.recorder.metrics(report.values())
            else:
                self.expected = _without(self.expected, {"sync"})
            self.rollout.buffer.published(self.weight_version, step + 1)
        else:
            self.expected = _without(self.expected, {"sync"})
        if self.schedule.pauses_for_training:
            with self.recorder.span("to_rollout", expected_s=self._switch_s("to_engine")):
                await self.switch.to_engine()
        if self._is_publication_due(step) and self.probes:
            with self.recorder.span("sync"):
                await self._probe()

    async def _probe(self) -> None:
        """Compare engine and trainer on one short prompt; a replica that differs serves nothing until it is re-synced.

        Raises:
            SyncError: no replica is left that agrees with the trainer.
        """
        if not self.probes:
            return
        for engine in self.router.engines:
            if engine.replica_id in self.router.out_of_service:
                continue
            if why := await self.probe_one(engine):
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
        except EngineError as error:
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
        values |= await self._engine_values()
        values["training/weight_version"] = Last(self.weight_version)
        values["batch/num_groups"] = Total(len(taken.groups))
        masks = {}
        values |= staleness_values(taken)
        if batch is not None:
            values |= batch_values(batch)
            masks = {f"{s.group_id}/{s.member_idx}": s.loss_mask for s in batch.sequences}
        self.recorder.metrics(values)
        if self.plan is not None:
            self.recorder.work(self._work(self.plan, self._num_generated(taken)))
        every = self.config.observe.trajectories_every_steps
        if every and step % every == 0:
            finished = [t for group in [*taken.groups, *taken.dropped] for t in group.scored]
            self.recorder.trajectories(step, finished + failed, loss_masks=masks)

    def _work(self, plan: Plan, num_generated: float) -> Work:
        """The FLOPs of the step's own work: what was expected of its batch, and of the tokens that were sampled."""
        flops = {stage: entry.flops for stage, entry in self.expected.items() if entry.flops}
        planned = plan.work.num_sequences * plan.work.lengths.mean_tokens
        if "rollout" in flops and planned:
            flops["rollout"] *= num_generated / planned
        peak = plan.machine.gemm_flops_per_s.get(plan.machine.dtype, 0.0)
        return Work(flops=flops, peak_flops_per_s=peak * max(self.recorder.num_gpus, 1))

    async def _evaluate(self, step: int) -> None:
        """Held-out prompts, before the next step's groups take the engine; before the first step, `step` is -1."""
        is_first = step < 0
        if self.evaluator.is_due(step + 1, is_last=is_first or self._is_last(step)):
            with self.recorder.span("eval", expected_s=self._occasional_s("eval")):
                values = await self.evaluator.run(self.router)
            if is_first and self.evaluator.baseline is not None:
                with self.recorder.span("baseline"):
                    values |= await self.evaluator.run_baseline()
            self.recorder.metrics(values, step=0 if is_first else None)

    async def _save(self, step: int) -> None:
        if self._is_save_due(step):
            await self._write_checkpoint(step + 1)

    def _is_save_due(self, step: int) -> bool:
        return self.saver.is_due(step + 1, is_last=self._is_last(step) or self.is_stop_requested)

    async def _finish(self) -> None:
        """What a run leaves behind: the state it ended in and, if nothing is left to do, the model."""
        if self.saver.newest_step != self.num_steps_done:  # the data ended without a group to train
            await self._write_checkpoint(self.num_steps_done)
            self.saver.commit()
        if self.is_complete and self.config.checkpoint.save_model:
            await self.compute(lambda: self.saver.write_model(self.trainer))

    # ---- what the stages use -----------------------------------------------------------------------------

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Run `work` on the trainer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _write_checkpoint(self, num_steps_done: int) -> None:
        """Write the whole RL state aside, once more if that fails.

        Raises:
            CheckpointError: it failed twice; earlier checkpoints are untouched.
        """
        counters = self.saver.counters(self, num_steps_done)
        with self.recorder.span("checkpoint", expected_s=self._occasional_s("checkpoint")) as span:
            try:
                await self.compute(lambda: self.saver.write(counters, self.switch))
            except CheckpointError as error:
                self.recorder.event("checkpoint_failed", num_steps_done=num_steps_done, error=error.what)
                await self.compute(lambda: self.saver.write(counters, self.switch))
        self.saver.last_write_s = span.duration_s

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
        """Whether a forward must give the trust-region anchor: with one update on policy it is the current policy.

        The staleness bound decides, not the schedule, so that a bound of 0 gives the same numbers in all of them.
        """
        algorithm = self.config.algorithm
        if algorithm.proximal == "behavior":
            return False
        is_on_policy = self.config.buffer.max_staleness_steps == 0
        return algorithm.needs_proximal_first or not is_on_policy or self.trainer.num_updates_per_step > 1

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

    def _note_movement(self, values: Values) -> None:
        """An update whose gradient is not zero moves the weights: a publication of the same bits is then a fault."""
        norm = values.get("actor/grad_norm")
        self.has_moved |= isinstance(norm, Ratio) and norm.numerator > 0

    def _is_publication_due(self, step: int) -> bool:
        return self._is_last(step) or (step + 1) % self.config.sync.every_steps == 0

    def _fresh_scorer(
        self, batch: TrainBatch, taken: Taken, fresh: list[TrainSequence]
    ) -> Callable[[], None] | None:
        """What fills `fresh` once the gradients of the first update are there, and the weights are still those that
        began the step: responses that the engines finished under these weights meanwhile, with the trainer's logprobs.

        None where the batch itself holds such responses, or the trainer is elsewhere.
        """
        ages = {taken.staleness(s.oldest_version) for s in batch.sequences}
        if 0 in ages or self.schedule.pauses_for_training or self.config.cluster.kind != "inproc":
            return None
        loop = asyncio.get_running_loop()

        async def finished() -> list[TrainSequence]:
            buffer = self.rollout.buffer
            if buffer.serving_step != taken.step:  # the trainer has moved on from what the engines hold
                return []
            sequences = train_sequences(buffer.finished(), self.config.algorithm.filter)
            return [s for s in sequences if s.oldest_version == batch.weight_version][:MAX_FRESH]

        def score() -> None:
            found = asyncio.run_coroutine_threadsafe(finished(), loop).result()
            if found:
                beside = self.trainer.make_batch(found, step=batch.step, weight_version=batch.weight_version)
                self.trainer.fill_proximal(beside)
                fresh.extend(found)

        return score

    def gap(self, batch: TrainBatch, taken: Taken, fresh: Sequence[TrainSequence]) -> Values:
        """Trainer against engine on the step's tokens; with proximal = "behavior" and several updates, on those of the
        first, which alone saw the weights that began the step."""
        sequences = [s for s in batch.sequences if s.proximal_logprobs is not None]
        algorithm = self.config.algorithm
        values: Values = {} if self.needs_proximal else correct(sequences, algorithm.correction)
        report = logprob_gap(
            sequences,
            staleness=taken.staleness,
            fresh=fresh,
            clip_eps_low=algorithm.clip_eps_low,
            clip_eps_high=algorithm.clip_eps_high,
        )
        return values if report is None else values | report.values()

    def _expected_s(self, stage: str) -> float | None:
        entry = self.expected.get(stage)
        return None if entry is None else entry.seconds

    def _occasional_s(self, stage: str) -> float | None:
        entry = None if self.plan is None else self.plan.occasional.get(stage)
        return None if entry is None else entry.seconds

    def _switch_s(self, half: Half) -> float | None:
        wanted = self.switch.expected(half)
        return None if wanted is None else wanted.seconds

    def _expected_step_s(self, *, saves: bool = False) -> float | None:
        """The stages run one after the other. Of a rollout beside the training, only the wait for it is a stage."""
        seconds = {name: entry.seconds for name, entry in self.expected.items()}
        if not seconds:
            return None
        if saves:
            seconds["checkpoint"] = self._occasional_s("checkpoint") or 0.0
        return sum(seconds.values())

    async def _engine_values(self) -> Values:
        now_s = time.monotonic()
        now = {engine.replica_id: await engine.stats() for engine in self.router.engines}
        values = engine_values(
            self._engine_stats,
            now,
            elapsed_s=now_s - self._engine_stats_at_s,
            num_quarantined=len(self.router.out_of_service),
        )
        if self.lending is not None:
            sampled = Total(values["generated/num_tokens"].result() + self.lending.pop_tokens())
            values["generated/num_tokens"] = sampled
        if self.runs_ahead:
            rate = Ratio(values["generated/num_tokens"].result(), now_s - self._engine_stats_at_s)
            values["perf/tokens_per_s/gen"] = rate  # of the whole step: it is how long the engines had
        self._engine_stats, self._engine_stats_at_s = now, now_s
        return values


def _without(expected: Mapping[str, Entry], stages: Set[str]) -> dict[str, Entry]:
    """What is expected of a step that does not have these stages."""
    return {name: entry for name, entry in expected.items() if name not in stages}
