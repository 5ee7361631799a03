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
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rollbook.buffer.buffer import Taken
from rollbook.cluster.config import ClusterConfig
from rollbook.config.loading import load_config
from rollbook.config.run_config import RunConfig
from rollbook.controller.begin import warm_up
from rollbook.controller.build import build
from rollbook.controller.config import LendingSection
from rollbook.controller.loop import Controller
from rollbook.controller.rollout import Member
from rollbook.errors import ConfigError, RunError
from rollbook.observe.recorder import Recorder
from rollbook.observe.run_dir import read_json_lines
from rollbook.observe.trajectories import read_loss_masks, read_trajectories
from rollbook.rollout.engine import GenerateRequest, Response
from rollbook.rollout.native.engine import NativeEngine
from rollbook.sync.digest import digests, fold
from rollbook.sync.quantized import as_sent, as_sent_to
from rollbook.types import Bools, Group, Trajectory, Turn

MAX_DIFFERENCES = 20
"""Differences that are listed; all are counted."""
NO_STARTS = (
    "the log does not say where keys and values were computed anew: logprobs of responses that more than one version "
    "sampled differ where they were"
)
NO_DIGESTS = "the log has no digests of its publications: weights were not compared"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place at which the log and its repetition are not the same."""

    kind: str
    """digest, loss_mask, token, length, logprob, version, reward, or failure."""
    step: int
    where: str
    logged: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.where}: {self.kind} {self.logged} in the log, {self.replayed} replayed"
        )


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What was compared, and where it differs."""

    run_dir: str
    num_steps: int = 0
    num_digests: int = 0
    num_trajectories: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    """Trajectories that more than one version sampled."""
    num_differences: int = 0
    differences: list[Difference] = field(default_factory=list)
    """The first ones."""
    notes: list[str] = field(default_factory=list)
    num_by_kind: dict[str, int] = field(default_factory=dict)
    """Differences of each kind."""
    logprob_gap_nats: float = 0.0
    """Largest difference of a logprob, of trajectories with the same tokens."""
    is_batch_invariant: bool = True
    """Of the run: an engine's numbers do not depend on what it computes beside a sequence."""
    num_trainer_ranks: int = 1
    """Of the run; a replay has one."""

    @property
    def is_equal(self) -> bool:
        return self.num_differences == 0

    def conclusion(self) -> str:
        """What the comparison comes to, and why bits that differ need not be a fault."""
        if self.is_equal:
            return "EQUAL, bit for bit"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.num_by_kind.items())
        said = f"NOT EQUAL: {self.num_differences} differences ({kinds}), the first above"
        if set(self.num_by_kind) == {"logprob"}:
            said += (
                f"\nTokens, rewards, versions and digests are all equal; logprobs differ by at most "
                f"{self.logprob_gap_nats:.1e} nats"
            )
        if not self.is_batch_invariant:
            said += (
                "\nThe run has rollout.batch_invariant = false, so that an engine's rounding depends on the sequences "
                "beside one: it can be repeated, and not to the last bit. A run with rollout.batch_invariant = true "
                "can"
            )
        if self.num_trainer_ranks > 1:
            said += (
                f"\nThe run's trainer was divided among {self.num_trainer_ranks} ranks, which add gradients up in "
                "another order than the one rank of a replay: weights differ in their last bits from the first update "
                "on"
            )
        return said

    def differs(self, kind: str, step: int, where: str, logged: object, replayed: object) -> None:
        self.num_differences += 1
        self.num_by_kind[kind] = self.num_by_kind.get(kind, 0) + 1
        if len(self.differences) < MAX_DIFFERENCES:
            self.differences.append(
                Difference(kind=kind, step=step, where=where, logged=str(logged), replayed=str(replayed))
            )


@dataclass(frozen=True, slots=True)
class Publication:
    """A version as the log has it."""

    after_steps: int
    """Steps whose updates it contains."""
    weight_version: int
    digest: str | None
    """Of all tensors; None in logs of before it was written."""


@dataclass(slots=True)
class _Log:
    """What a run directory says of its steps."""

    folder: Path
    publications: list[Publication]
    num_steps: int

    def trajectories(self, step: int) -> list[Trajectory]:
        return read_trajectories(self._path(step))

    def loss_masks(self, step: int) -> dict[str, Bools]:
        return read_loss_masks(self._path(step))

    def _path(self, step: int) -> Path:
        return self.folder / "trajectories" / f"step_{step}.parquet"


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
    log = _read_log(folder, config)
    if only_step is not None and not 0 <= only_step < log.num_steps:
        raise ConfigError(
            f"step {only_step} was to be replayed and {folder} has steps 0 to {log.num_steps - 1}",
            "choose one of them",
        )
    with tempfile.TemporaryDirectory() as aside:
        recorder = Recorder(Path(aside) / "replay")
        try:
            report = asyncio.run(_replay(_for_replay(config), log, recorder, only_step))
        finally:
            recorder.close()
    report.num_trainer_ranks = config.cluster.num_trainer_ranks
    return report


def _for_replay(config: RunConfig) -> RunConfig:
    """The same numbers in this process, from one replica with weights of its own, so that older ones can be put back
    into it, and without a link that the run itself may be using."""
    link = {"transport": "inproc", "delta": False, "staging": "direct", "commit_order": "together"}
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"num_replicas": 1}),
            "sync": config.sync.model_copy(update=link),
            "cluster": ClusterConfig(),
            "plan": config.plan.model_copy(update={"is_on": False}),
            "lending": LendingSection(),
        }
    )


def _read_log(folder: Path, config: RunConfig) -> _Log:
    publications: list[Publication] = []
    is_resumed, num_steps = False, 0
    path = folder / "events.jsonl"
    if not path.is_file():
        raise ConfigError(f"there is no {path}", "a replay reads versions and steps from it")
    for event in read_json_lines(path):
        step = event.get("step")
        if event.get("kind") == "run_resumed":
            is_resumed = True
        elif event.get("kind") == "span_open" and event.get("name") == "step" and isinstance(step, int):
            if is_resumed:  # what came after the checkpoint was taken back
                publications = [p for p in publications if p.after_steps <= step]
                is_resumed = False
        elif event.get("kind") == "span" and event.get("name") == "step" and isinstance(step, int):
            num_steps = step + 1 if "error" not in event else num_steps
        elif event.get("kind") == "publication":
            after = step + 1 if isinstance(step, int) else num_steps
            publications.append(Publication(after, int(event["weight_version"]), event.get("digest")))
    if not num_steps:
        raise ConfigError(f"{folder} has no finished step", "a replay repeats steps: run one")
    return _Log(folder, publications, num_steps)


async def _replay(config: RunConfig, log: _Log, recorder: Recorder, only_step: int | None) -> ReplayReport:
    report = ReplayReport(run_dir=str(log.folder))
    report.is_batch_invariant = config.rollout.batch_invariant
    if not config.rollout.batch_invariant:
        report.notes.append(
            "rollout.batch_invariant is false: an engine's rounding depends on the sequences beside one, so that "
            "logprobs (and, rarely, tokens) of the same sampling may differ in their last bits"
        )
    last = log.num_steps - 1 if only_step is None else only_step
    async with build(config, recorder) as controller:
        replay = _Replay(controller, log, report, only_step)
        await replay.before_first_step()
        for step in range(last + 1):
            await replay.step(step)
        report.num_steps = last + 1
    return report


class _Replay:
    """Fresh parts that go through the log once, in its order."""

    def __init__(
        self, controller: Controller, log: _Log, report: ReplayReport, only_step: int | None
    ) -> None:
        self.controller = controller
        self.log = log
        self.report = report
        engine = controller.router.engines[0]
        assert isinstance(engine, NativeEngine)
        self.sampler = _Sampler(engine, controller)
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


class _Sampler:
    """The engine with the weights of any version that is still needed, and responses cut where the run's were."""

    def __init__(self, engine: NativeEngine, controller: Controller) -> None:
        self.engine = engine
        self._config = controller.config
        self._source = as_sent(controller.trainer, controller.config.sync.quantize)
        self.recorded: dict[str, Trajectory] = {}
        self._held: dict[int, dict[str, Tensor]] = {}
        self._generate = engine.generate
        self._plain_step = engine.step
        self._stop_at: int | None = None
        """Sampled tokens after which the engine is to stand still."""
        self._stopped = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        controller.router.generate = self.generate  # type: ignore[method-assign]
        engine.step = self._step  # type: ignore[method-assign]

    def remember(self, version: int) -> dict[str, Tensor]:
        held = self._held[version] = {name: t.clone() for name, t in self._source.export_weights()}
        return held

    def forget(self, before: int) -> None:
        """Versions that nothing will be sampled from any more."""
        self._held = {version: tensors for version, tensors in self._held.items() if version >= before}

    async def hold(self, version: int) -> None:
        """Put a version's weights into the engine, below its publications. Its own label only ever grows: labels are
        read from the log instead."""
        weights = as_sent_to(await self.engine.live_weights(), self._config.sync.quantize)
        tensors = self._held[version]

        @torch.no_grad()
        def write() -> None:
            for name in weights.specs():
                weights.write(name, tensors[name])
            for name in weights.specs():
                weights.read(name)  # codes and scales are decoded where they are read
            scheduler = self.engine._scheduler
            scheduler.reset_cache()
            scheduler._siblings.clear()

        await self.engine.run_between_steps(write)

    async def generate(
        self, request: GenerateRequest, *, on_sent: Callable[[int], None] | None = None
    ) -> Response:
        """One response, under the versions that the log gives it; in place of the router's."""
        trajectory_id, _, which = request.request_id.partition("#")
        logged = self.recorded.get(trajectory_id)
        turn_idx = int(which.rstrip("+") or 0)
        if logged is None or turn_idx >= len(logged.turns):
            return await self._generate(request)
        turn = logged.turns[turn_idx]
        runs = turn.version_runs
        if logged.oldest_version == logged.newest_version:
            response = await self._generate(request)
        else:
            response = await self._cut(request, turn)
        if len(response.response_ids) != sum(run.num_tokens for run in runs):
            return response  # another length: its own labels do for the comparison
        return replace(response, version_runs=runs)

    async def _cut(self, request: GenerateRequest, turn: Turn) -> Response:
        """The engine stands still wherever the run swapped its weights or computed keys and values anew, and goes on
        with those that the run had."""
        versions = [run.weight_version for run in turn.version_runs for _ in range(run.num_tokens)]
        anew = {start.token_idx: start.weight_version for start in turn.kv_starts}
        swaps = {idx for idx, pair in enumerate(itertools.pairwise(versions), start=1) if len(set(pair)) > 1}
        await self.hold(versions[0])
        response = asyncio.create_task(self._generate(request))
        for idx in sorted((swaps | anew.keys()) & set(range(1, len(versions)))):
            await self._stand_still(response, idx)
            if idx in anew:
                await self.hold(anew[idx])
                await self.engine.run_between_steps(self._compute_anew)
                await self._stand_still(response, idx)  # once they are there, and before the next token
            await self.hold(versions[idx])
        await self.engine.resume()
        return await response

    def _compute_anew(self) -> None:
        scheduler = self.engine._scheduler
        scheduler._restart(scheduler.running())

    async def _stand_still(self, response: asyncio.Task[Response], num_sampled: int) -> None:
        """Until so many tokens were sampled, and their keys and values are there to sample the next one."""
        self._stopped.clear()
        self._stop_at = num_sampled
        await self.engine.resume()
        stopped = asyncio.create_task(self._stopped.wait())
        waits: set[asyncio.Task[Response] | asyncio.Task[Literal[True]]] = {stopped, response}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        self._stop_at = None

    def _step(self) -> bool:
        """On the engine's thread: a step, and a stand-still where one is asked for (one sequence runs then)."""
        if self._stop_at is not None and self._has_reached(self._stop_at):
            self.engine._pauses.is_on = True
            self._loop.call_soon_threadsafe(self._stopped.set)
            return False
        return self._plain_step()

    def _has_reached(self, num_tokens: int) -> bool:
        slots = self.engine._scheduler.slots
        return any(
            bool(slots.is_ready[slot]) and int(slots.num_response[slot]) >= num_tokens
            for slot, sequence in enumerate(slots.sequences)
            if sequence is not None
        )


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
