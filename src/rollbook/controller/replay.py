"""A run repeated from its own log, and compared with it bit for bit.

    config.toml ──► the same parts, fresh
    per step of the log:
        trajectories/step_N.parquet ──► the batch, in its order ──► the same update ──► digest of the weights
                                                                                         = the publication's?
        per version published then: every trajectory whose newest token it sampled is sampled again ──►
                                         tokens, logprobs, reward = the log's?

It needs no timing: which groups a step trained and which version sampled each token stand in the log, and sampling is a
function of (seed, trajectory, token index). A response that a publication cut in two is sampled up to the cut under
the older weights and goes on under the newer ones, with the keys and values that the run kept; where the run
computed them anew (a preemption, another replica, `kv_policy = "recompute"`), so does the repetition, at the same
token and under the same weights.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rollbook.buffer.buffer import Taken
from rollbook.cluster.config import ClusterConfig
from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.begin import warm_up
from rollbook.controller.build import build
from rollbook.controller.config import LendingSection
from rollbook.controller.loop import Controller
from rollbook.controller.replay_log import Publication, RunLog, Threads, read_log
from rollbook.controller.replay_report import ReplayReport
from rollbook.controller.replay_sampler import Sampler
from rollbook.controller.rollout import Member
from rollbook.errors import ConfigError, RunError
from rollbook.observe.recorder import Recorder
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.digest import digests, fold
from rollbook.types import Group, Trajectory

NO_STARTS = (
    "the log does not say where keys and values were computed anew: logprobs of responses that more than one version "
    "sampled differ where they were"
)
NO_DIGESTS = "the log has no digests of its publications: weights were not compared"


def replay_run(folder: Path, *, only_step: int | None = None) -> ReplayReport:
    """Repeat the run in `folder` from its log.

    Args:
        only_step: sample again only what this step trained or dropped; the updates up to it are all repeated.
    Raises:
        ConfigError: the folder is no run directory, or lacks what a replay needs.
    """
    path = folder / "config.toml"
    if not path.is_file():
        raise ConfigError(f"{folder} is no run directory: it has no config.toml", "give the folder of a run")
    config = load_config(path, [], RunConfig)
    if config.observe.trajectories_every_steps != 1:
        raise ConfigError(
            f"observe.trajectories_every_steps of {folder} is {config.observe.trajectories_every_steps}",
            "a replay needs the trajectories of every step: set it to 1 in the next run",
        )
    if config.rollout.engine != "native":
        raise ConfigError(
            f"rollout.engine of {folder} is '{config.rollout.engine}'",
            "a replay samples again what each version sampled, which takes the draws of the native engine",
        )
    log = read_log(folder)
    if only_step is not None and not 0 <= only_step < log.num_steps:
        raise ConfigError(
            f"step {only_step} was to be replayed and {folder} has steps 0 to {log.num_steps - 1}",
            "choose one of them",
        )
    with tempfile.TemporaryDirectory() as aside:
        recorder = Recorder(Path(aside) / "replay")
        try:
            report = asyncio.run(_replay(_for_replay(config, log.threads[:1]), log, recorder, only_step))
        finally:
            recorder.close()
    report.num_trainer_ranks = config.cluster.num_trainer_ranks
    report.run_threads = log.threads
    return report


def _for_replay(config: RunConfig, run_threads: Sequence[Threads]) -> RunConfig:
    """The same numbers in this process, with as many threads as the run began with, from one replica with weights of
    its own, so that older ones can be put back into it, and without a link that the run itself may be using."""
    link = {"transport": "inproc", "delta": False, "staging": "direct", "commit_order": "together"}
    rollout: dict[str, int] = {"num_replicas": 1}
    trainer: dict[str, int] = {}
    for threads in run_threads:
        rollout["num_threads"], trainer["num_threads"] = threads.engine, threads.trainer
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=rollout),
            "trainer": config.trainer.model_copy(update=trainer),
            "sync": config.sync.model_copy(update=link),
            "cluster": ClusterConfig(),
            "plan": config.plan.model_copy(update={"is_on": False}),
            "lending": LendingSection(),
        }
    )


async def _replay(config: RunConfig, log: RunLog, recorder: Recorder, only_step: int | None) -> ReplayReport:
    report = ReplayReport(run_dir=str(log.folder))
    report.is_batch_invariant = config.rollout.batch_invariant
    if not config.rollout.batch_invariant:
        report.notes.append(
            "rollout.batch_invariant is false: an engine's rounding depends on the sequences beside one, so that "
            "logprobs (and, rarely, tokens) of the same sampling may differ in their last bits"
        )
    last = log.num_steps - 1 if only_step is None else only_step
    async with build(config, recorder) as controller:
        report.threads = Threads(**controller.num_threads)
        replay = _Replay(controller, log, report, only_step)
        await replay.before_first_step()
        for step in range(last + 1):
            await replay.step(step)
        report.num_steps = last + 1
    return report


class _Replay:
    """Fresh parts that go through the log once, in its order."""

    def __init__(
        self, controller: Controller, log: RunLog, report: ReplayReport, only_step: int | None
    ) -> None:
        self.controller = controller
        self.log = log
        self.report = report
        engine = controller.router.engines[0]
        assert isinstance(engine, NativeEngine)
        self.sampler = Sampler(engine, controller)
        self._prompts = {prompt.prompt_id: prompt for prompt in controller.train_prompts}
        self._newest_version = -1
        """Published here."""
        self._waiting: dict[int, list[tuple[int, Trajectory]]] = defaultdict(list)
        """Newest version -> (step, trajectory) to sample again once the engine holds it."""
        last = log.num_steps - 1 if only_step is None else only_step
        self._oldest: dict[int, int] = {}
        """Newest version -> the oldest version of what waits for it."""
        for step in range(last + 1):
            for trajectory in log.trajectories(step) if only_step in (None, step) else ():
                if trajectory.failure is None and trajectory.turns:
                    version = trajectory.newest_version
                    self._waiting[version].append((step, trajectory))
                    oldest = self._oldest.get(version, version)
                    self._oldest[version] = min(oldest, trajectory.oldest_version)

    async def before_first_step(self) -> None:
        """The first publication and the warm-up, which are functions of the config."""
        first = [p for p in self.log.publications if p.after_steps == 0]
        start, warm = first[:1], first[1:]
        for publication in start:
            await self._publish(publication, step=0)
        if self.controller.config.warmup.num_updates and warm:
            await warm_up(self.controller)
            self._compare_digest(warm[-1], step=0)
        for publication in first[-1:]:
            await self._sample_again(publication.weight_version)

    async def step(self, step: int) -> None:
        """Train on what the log says that the step trained, publish what it published."""
        controller = self.controller
        masks = self.log.loss_masks(step)
        groups = _groups(t for t in self.log.trajectories(step) if t.trajectory_id in masks)
        taken = Taken(groups, [0] * len(groups), [], 0, [], [])
        with controller.recorder.step(step):
            batch = await controller.prepare(taken, step) if groups else None
            if batch is not None:
                for sequence in batch.sequences:
                    name = f"{sequence.group_id}/{sequence.member_idx}"
                    if not np.array_equal(sequence.loss_mask, masks[name]):
                        at = int(np.flatnonzero(sequence.loss_mask != masks[name])[0])
                        where = f"trajectory {name}, token {at}"
                        self.report.differs("loss_mask", step, where, masks[name][at], sequence.loss_mask[at])
                await controller._train(batch, taken)
        for publication in self.log.publications:
            if publication.after_steps == step + 1:
                await self._publish(publication, step=step)
                await self._sample_again(publication.weight_version)

    async def _publish(self, publication: Publication, *, step: int) -> None:
        if publication.weight_version > self._newest_version:
            self._newest_version = publication.weight_version
            await self.controller.publish(
                publication.weight_version
            )  # else a resumed run gave out what it had
        self._compare_digest(publication, step=step)

    def _compare_digest(self, publication: Publication, *, step: int) -> None:
        """The weights as they are now, which are kept for what is sampled from them."""
        held = self.sampler.remember(publication.weight_version)
        if publication.digest is None:
            if NO_DIGESTS not in self.report.notes:
                self.report.notes.append(NO_DIGESTS)
            return
        replayed = fold(dict(zip(held, digests(list(held.values())), strict=True)))
        self.report.num_digests += 1
        if replayed != publication.digest:
            where = f"weights of version {publication.weight_version}"
            self.report.differs("digest", step, where, publication.digest, replayed)

    async def _sample_again(self, version: int) -> None:
        """Every trajectory whose last token this version sampled."""
        work = self._waiting.pop(version, [])
        if work:
            whole = [(s, t) for s, t in work if t.oldest_version == version]
            cut = [(s, t) for s, t in work if t.oldest_version != version]
            self.sampler.recorded = {t.trajectory_id: t for _, t in work}
            for part in (whole, *([item] for item in cut)):  # cut ones alone: each puts older weights back
                again = await asyncio.gather(*(self._produce(t) for _, t in part))
                for (step, logged), produced in zip(part, again, strict=True):
                    self._compare(step, logged, produced)
            self.report.num_cut += len(cut)
            if (
                any(not turn.kv_starts for _, t in cut for turn in t.turns)
                and NO_STARTS not in self.report.notes
            ):
                self.report.notes.append(NO_STARTS)
            await self.sampler.hold(version)
        self.sampler.forget(min([*self._oldest_ahead(version), version]))

    def _oldest_ahead(self, version: int) -> list[int]:
        return [self._oldest[newest] for newest in self._waiting if newest > version]

    async def _produce(self, logged: Trajectory) -> Trajectory | str:
        prompt = self._prompts.get(logged.prompt.prompt_id)
        if prompt is None:
            return f"the config's data have no prompt {logged.prompt.prompt_id}"
        prompt = replace(prompt)
        try:
            produced = await self.controller.rollout.produce(
                Member(logged.group_id, logged.member_idx, prompt)
            )
        except RunError as error:
            return error.what
        self.controller.rollout.shape(
            Group(group_id=logged.group_id, prompt=prompt, trajectories=(produced,))
        )
        return produced

    def _compare(self, step: int, logged: Trajectory, produced: Trajectory | str) -> None:
        report = self.report
        name = f"trajectory {logged.trajectory_id}"
        report.num_trajectories += 1
        report.num_tokens += logged.num_response_tokens
        if isinstance(produced, str):
            report.differs("failure", step, name, "none", produced)
            return
        then, now = logged.token_ids(), produced.token_ids()
        size = min(len(then), len(now))
        if (unequal := np.flatnonzero(then[:size] != now[:size])).size:
            at = int(unequal[0])
            report.differs("token", step, f"{name}, token {at}", then[at], now[at])
            return
        if len(then) != len(now):
            report.differs("length", step, name, len(then), len(now))
            return
        was, is_ = logged.behavior_logprobs(), produced.behavior_logprobs()
        if (unequal := np.flatnonzero(was.view(np.int32) != is_.view(np.int32))).size:
            at = int(unequal[0])
            report.logprob_gap_nats = max(report.logprob_gap_nats, float(np.abs(was - is_).max()))
            report.differs("logprob", step, f"{name}, token {at}", repr(float(was[at])), repr(float(is_[at])))
        versions = _versions(logged), _versions(produced)
        if versions[0] != versions[1]:
            report.differs("version", step, name, versions[0], versions[1])
        if logged.reward != produced.reward:
            report.differs("reward", step, name, logged.reward, produced.reward)


def _versions(trajectory: Trajectory) -> list[tuple[int, int]]:
    return [(run.weight_version, run.num_tokens) for turn in trajectory.turns for run in turn.version_runs]


def _groups(trajectories: Iterator[Trajectory]) -> list[Group]:
    """The groups of a step in the order of their file."""
    members: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        members.setdefault(trajectory.group_id, []).append(trajectory)
    return [
        Group(group_id=group_id, prompt=own[0].prompt, trajectories=tuple(own))
        for group_id, own in members.items()
    ]
