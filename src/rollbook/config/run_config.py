"""The whole configuration of a run: the folders' sections, and the relations between them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from pydantic import model_validator

from rollbook.algos.config import AlgorithmConfig
from rollbook.buffer.config import BufferConfig
from rollbook.checkpoint.config import CheckpointConfig
from rollbook.cluster.config import ClusterConfig
from rollbook.controller.config import EvalSection, LendingSection, PlanSection, RunSection, WarmupSection
from rollbook.controller.schedule import SCHEDULES
from rollbook.envs.config import DataConfig, EndpointConfig, RewardConfig
from rollbook.errors import refuse
from rollbook.memory.config import MemoryConfig
from rollbook.modeling.config import ModelConfig
from rollbook.observe.config import ObserveConfig
from rollbook.rollout.config import RolloutConfig
from rollbook.section import Section
from rollbook.sync.config import SyncConfig
from rollbook.trainer.config import CriticConfig, TrainerConfig

DEVICE = r"cpu|cuda(:\d+)?"
"""What a device is called."""


class Pools(NamedTuple):
    """How many devices a run has, by who computes there."""

    num_trainer_devices: int
    num_engine_devices: int
    """0 where GPUs train and a CPU samples."""
    is_shared: bool
    """Engines and trainer have the same ones, as far as they go."""

    @property
    def num_devices(self) -> int:
        both = (self.num_trainer_devices, self.num_engine_devices)
        return max(both) if self.is_shared else sum(both)


class RunConfig(Section):
    """One run. A run started from the resolved file in a run directory is the same run."""

    run: RunSection
    """Name, length, schedule."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Prompts."""
    reward: RewardConfig = RewardConfig()
    """How responses are scored."""
    rollout: RolloutConfig = RolloutConfig()
    """Engines and sampling."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, loss, filters, corrections."""
    teacher: ModelConfig | None = None
    """A second model, frozen, whose logprobs the policy is drawn to; for `algorithm.distill`."""
    teacher_endpoint: EndpointConfig | None = None
    """Instead of `teacher`: a vLLM server whose model has the policy's tokenizer."""
    trainer: TrainerConfig = TrainerConfig()
    """Optimizer and batches."""
    critic: CriticConfig = CriticConfig()
    """Value model, for estimators that need one."""
    buffer: BufferConfig = BufferConfig()
    """Staleness and the life of groups."""
    sync: SyncConfig = SyncConfig()
    """Weight publications."""
    cluster: ClusterConfig = ClusterConfig()
    """In which processes trainer and engines run."""
    memory: MemoryConfig = MemoryConfig()
    """What leaves a device that engine and trainer own in turn."""
    lending: LendingSection = LendingSection()
    """Generation on the trainer's device while the trainer waits."""
    warmup: WarmupSection = WarmupSection()
    """Supervised phase before the first step."""
    eval: EvalSection = EvalSection()
    """Held-out evaluation."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    observe: ObserveConfig = ObserveConfig()
    """Where readings go."""
    plan: PlanSection = PlanSection()
    """Where expectations come from."""

    @model_validator(mode="before")
    @classmethod
    def _bound_of_the_schedule(cls, data: Any) -> Any:
        """`colocate_async` has a staleness of at least 1, so that choosing it is one line."""
        match data:
            case {"run": {"schedule": "colocate_async"}, **others}:
                buffer = others.get("buffer", {})
                if isinstance(buffer, Mapping):
                    return {**data, "buffer": {"max_staleness_steps": 1, **buffer}}
        return data

    @property
    def pools(self) -> Pools:
        if self.cluster.kind == "ray":
            is_beside = self.run.schedule == "separate_async"
            return Pools(self.cluster.num_trainer_ranks, self.rollout.num_replicas, is_shared=not is_beside)
        engine, trainer = (_first_is_0(section.device) for section in (self.rollout, self.model))
        num_engine_devices = self.rollout.vllm.tp_size if self.rollout.engine == "vllm" else 1
        if engine == "cpu" and trainer != "cpu":
            num_engine_devices = 0
        return Pools(1, num_engine_devices, is_shared=engine == trainer)

    def check(self, further: Iterable[tuple[str, str]] = ()) -> None:
        """Relations between sections, all problems at once, before any device is touched.

        Args:
            further: problems found elsewhere, (what, remedy) each, to be reported with these.
        Raises:
            ConfigError: lists every relation that does not hold, with values and remedies.
        """
        refuse([*self._problems(), *further])

    def _problems(self) -> Iterator[tuple[str, str]]:
        yield from self._schedule_problems()
        yield from self._correction_problems()
        yield from self._group_problems()
        yield from self._sampling_problems()
        yield from self._device_problems()
        yield from self._cluster_problems()
        yield from self._memory_problems()
        yield from self._lending_problems()

    def _schedule_problems(self) -> Iterator[tuple[str, str]]:
        schedule, staleness = SCHEDULES[self.run.schedule], self.buffer.max_staleness_steps
        if schedule.is_on_policy and staleness > 0:
            yield (
                f"run.schedule is 'sync' and buffer.max_staleness_steps is {staleness}",
                "a synchronous run is on-policy: set it to 0, or choose colocate_async or separate_async",
            )
        if self.run.schedule == "colocate_async" and staleness < 1:
            yield (
                "run.schedule is 'colocate_async' and buffer.max_staleness_steps is 0",
                "responses that continue under the next version are one step stale: set at least 1, or use sync",
            )
        if staleness < self.sync.every_steps - 1:
            yield (
                f"sync.every_steps is {self.sync.every_steps} and buffer.max_staleness_steps is {staleness}",
                f"weights published every {self.sync.every_steps} steps make tokens up to "
                f"{self.sync.every_steps - 1} steps stale: raise the bound to that, or publish more often",
            )
        if self.buffer.order == "arrival" and staleness == 0:
            yield (
                "buffer.order is 'arrival' and buffer.max_staleness_steps is 0",
                "on-policy every step takes exactly what was admitted: use order = 'admission'",
            )
        if self.buffer.group_deadline_s > self.buffer.step_deadline_s:
            yield (
                f"buffer.group_deadline_s is {self.buffer.group_deadline_s:g}, longer than "
                f"buffer.step_deadline_s {self.buffer.step_deadline_s:g}",
                "a late group must be failed before its step is given up: lower the group's deadline",
            )
        running = self.buffer.max_running_groups
        if running and running < self.run.groups_per_step:
            yield (
                f"buffer.max_running_groups is {running}, fewer than run.groups_per_step {self.run.groups_per_step}",
                "a step could never be generated at once: raise it, or leave it at 0",
            )

    def _correction_problems(self) -> Iterator[tuple[str, str]]:
        """Where behavior and proximal policy are the same numbers, their ratio is 1."""
        rollout, algorithm = self.rollout, self.algorithm
        is_same = (
            rollout.engine == "native"
            and self.model.dtype == "float32"
            and rollout.dtype in ("auto", "float32")
            and rollout.mismatch == "none"
            and self.sync.quantize == "none"
            and rollout.device == self.model.device
        )
        num_updates = self.trainer.num_mini_batches * self.trainer.num_epochs
        is_at_start = (
            algorithm.proximal == "recompute" or num_updates == 1
        )  # weights are of the step's first policy
        on_policy = self.buffer.max_staleness_steps == 0 and is_at_start
        if algorithm.correction.is_on and is_same and on_policy:
            yield (
                "algorithm.correction is on, buffer.max_staleness_steps is 0, and engine and trainer compute alike, in "
                "float32 on one kind of device: every weight would be 1",
                "leave the correction out, or raise the staleness bound",
            )

    def _group_problems(self) -> Iterator[tuple[str, str]]:
        if self.algorithm.needs_group and self.rollout.group_size < 2:
            yield (
                f"algorithm.name '{self.algorithm.name}' compares the members of a group, and rollout.group_size "
                f"is {self.rollout.group_size}",
                "use a group_size of at least 2, or an algorithm without a group baseline (reinforce_pp, ppo)",
            )
        num_sequences = self.run.groups_per_step * self.rollout.group_size
        if (min_scored := self.algorithm.filter.min_scored) > self.rollout.group_size:
            yield (
                f"algorithm.filter.min_scored is {min_scored} and rollout.group_size {self.rollout.group_size}: every "
                "group would be dropped",
                f"use at most {self.rollout.group_size}, or larger groups",
            )
        mini_batches = self.trainer.num_mini_batches
        if num_sequences < mini_batches:
            yield (
                f"trainer.num_mini_batches is {mini_batches} and a step has {num_sequences} sequences",
                "use fewer mini batches or more sequences",
            )
        if self.algorithm.entropy_coef and not self.trainer.measure_entropy:
            yield (
                f"algorithm.entropy_coef is {self.algorithm.entropy_coef:g} and trainer.measure_entropy is false",
                "the bonus is of the entropy that is measured: set measure_entropy = true, or entropy_coef = 0",
            )
        has_teacher = self.teacher is not None or self.teacher_endpoint is not None
        if self.algorithm.needs_teacher and not has_teacher:
            yield (
                f"algorithm.distill.placement is '{self.algorithm.distill.placement}' and there is no teacher",
                "add a [teacher] table with the path of a model that has the policy's tokenizer, or a "
                "[teacher_endpoint]",
            )
        if self.teacher is not None and self.teacher_endpoint is not None:
            yield "there is a [teacher] table and a [teacher_endpoint]", "remove one of them"
        if self.teacher_endpoint is not None and self.rollout.temperature != 1:
            yield (
                f"there is a [teacher_endpoint] and rollout.temperature is {self.rollout.temperature:g}",
                "a server scores tokens at temperature 1: sample at 1, or load the model as [teacher]",
            )
        if has_teacher and not self.algorithm.needs_teacher:
            table = "teacher" if self.teacher is not None else "teacher_endpoint"
            yield (
                f"there is a [{table}] table and algorithm.distill.placement is 'none': it would never be asked",
                "set algorithm.name = 'distill' (or algorithm.distill), or remove the table",
            )

    def _cluster_problems(self) -> Iterator[tuple[str, str]]:
        if self.cluster.kind == "inproc" and self.cluster.num_trainer_ranks > 1:
            yield (
                f"cluster.num_trainer_ranks is {self.cluster.num_trainer_ranks} and cluster.kind 'inproc'",
                "ranks are processes: set cluster.kind = 'ray'",
            )
        if self.cluster.kind == "ray" and self.sync.transport == "ipc":
            yield (
                f"sync.transport is '{self.sync.transport}' and cluster.kind 'ray'",
                "use 'shm' on one host, 'broadcast' or 'disk' on several",
            )
        if self.cluster.kind == "ray" and self.rollout.engine == "vllm" and not self.rollout.vllm.in_process:
            yield (
                "rollout.vllm.in_process is false and cluster.kind 'ray'",
                "a replica on Ray is a process of its own, and vLLM runs inside it: leave in_process at true (for "
                "tp_size above 1 use kind = 'inproc')",
            )
        if self.cluster.num_trainer_ranks > 1 and self.model.lora is not None:
            yield (
                f"cluster.num_trainer_ranks is {self.cluster.num_trainer_ranks} with model.lora",
                "adapters are trained by one rank: set it to 1",
            )

    def _device_problems(self) -> Iterator[tuple[str, str]]:
        for name, device in (("model.device", self.model.device), ("rollout.device", self.rollout.device)):
            if not re.fullmatch(DEVICE, device):
                yield f"{name} is '{device}'", "use cpu, cuda or cuda:N"

    def _memory_problems(self) -> Iterator[tuple[str, str]]:
        memory, devices = self.memory, (self.model.device, self.rollout.device)
        if not memory.moves_anything:
            return
        asked = f"memory.sleep_level is {memory.sleep_level} and memory.offload {str(memory.offload).lower()}"
        if not SCHEDULES[self.run.schedule].pauses_for_training:
            yield (
                f"{asked}, and run.schedule '{self.run.schedule}' never hands a device over",
                "use sync or colocate_async, or leave [memory] at its defaults",
            )
        if len({"cuda:0" if device == "cuda" else device for device in devices}) > 1:
            yield (
                f"{asked}, model.device is '{devices[0]}' and rollout.device '{devices[1]}'",
                "a hand-over makes room on one device that both use: leave [memory] at its defaults",
            )
        if self.cluster.kind == "ray":
            yield (
                f"{asked}, and cluster.kind is 'ray'",
                "state is handed over inside one process: use kind = 'inproc', or leave [memory] at its defaults",
            )
        if memory.sleep_level == 2 and self.sync.every_steps > 1:
            yield (
                f"memory.sleep_level is 2 and sync.every_steps is {self.sync.every_steps}",
                "weights that were dropped come back by the publication of the same step: use sleep_level 1, or "
                "publish every step",
            )
        if memory.sleep_level == 2 and self.sync.delta:
            yield (
                "memory.sleep_level is 2 and sync.delta is true",
                "a delta needs the weights that level 2 drops: use sleep_level 1, or sync.delta = false",
            )

    def _lending_problems(self) -> Iterator[tuple[str, str]]:
        if not self.lending.is_on:
            return
        asked = "lending.is_on is true"
        if SCHEDULES[self.run.schedule].pauses_for_training:
            yield (
                f"{asked}, and run.schedule '{self.run.schedule}' gives the engines the trainer's device in any case",
                "use separate_async, or leave [lending] out",
            )
        devices = {"cuda:0" if d == "cuda" else d for d in (self.model.device, self.rollout.device)}
        if len(devices) == 1 and "cpu" not in devices:
            yield (
                f"{asked}, and trainer and engines are both on {self.model.device}",
                "the device generates already: give the trainer another one, or leave [lending] out",
            )
        if self.cluster.kind != "inproc":
            yield (
                f"{asked}, and cluster.kind is '{self.cluster.kind}'",
                "the lent engine lives in the trainer's process: use kind = 'inproc', or leave [lending] out",
            )
        if self.rollout.engine != "native":
            yield (
                f"{asked}, and rollout.engine is '{self.rollout.engine}'",
                "only native engines hand responses to each other: use engine = 'native', or leave [lending] out",
            )
        if self.sync.transport == "broadcast":
            yield (
                f"{asked}, and sync.transport is 'broadcast'",
                "a broadcast goes to all its replicas or by messages: use 'inproc', 'shm' or 'disk'",
            )

    def _sampling_problems(self) -> Iterator[tuple[str, str]]:
        if self.rollout.temperature == 0:
            yield (
                "rollout.temperature is 0: greedy responses of a group are all equal",
                "use a temperature above 0 for training; eval.temperature = 0 evaluates greedily",
            )
        if self.rollout.mismatch != "none" and self.rollout.engine != "native":
            yield (
                f"rollout.mismatch is '{self.rollout.mismatch}' and rollout.engine is '{self.rollout.engine}'",
                "only the native engine rounds its weights on purpose: use engine = 'native', or mismatch = 'none'",
            )
        dtype = self.model.dtype if self.rollout.dtype == "auto" else self.rollout.dtype
        if self.rollout.mismatch == "bf16" and dtype == "bfloat16":
            yield (
                "rollout.mismatch is 'bf16' and the engine's weights are bfloat16: nothing would be rounded",
                "use int8, int4 or fp8, or rollout.dtype = 'float32'",
            )
        if self.rollout.engine == "openai":
            yield (
                "rollout.engine is 'openai', whose weights cannot be updated",
                "train with the native or vllm engine; an OpenAI-compatible server can judge or teach",
            )
        if self.model.new is not None and self.rollout.max_response_tokens >= self.model.new.max_position:
            yield (
                f"rollout.max_response_tokens is {self.rollout.max_response_tokens} and the model's context "
                f"(model.new.max_position) is {self.model.new.max_position}",
                "leave room for the prompt: lower the response limit or raise the context",
            )


def _first_is_0(device: str) -> str:
    return "cuda:0" if device == "cuda" else device
