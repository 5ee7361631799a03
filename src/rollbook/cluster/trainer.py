"""The trainer as the driver sees it: every method calls all ranks, and rank 0 answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ray
import torch
from torch import Tensor

from rollbook.checkpoint.checkpoint import State, Written
from rollbook.cluster.calls import cause_of, first_line, label_of, rank_lost
from rollbook.cluster.meeting import RemoteFacts
from rollbook.config.run_config import RunConfig
from rollbook.errors import DeadlineError, SyncError
from rollbook.ledger.hardware import MachineSpec
from rollbook.modeling.load import LoadedModel, ModelFacts
from rollbook.modeling.tokenizer import Tokenizer
from rollbook.observe.values import Values
from rollbook.trainer.objective import CriticObjective, NotingObjective, Objective
from rollbook.trainer.trainer import Trainer
from rollbook.types import TrainBatch
from rollbook.weights import TensorSpec

SETTLE_S = 5.0
"""After one rank raised, the others may take this long to come to their own end."""


@dataclass(slots=True, kw_only=True)
class RemoteModel:
    """The readable part of `LoadedModel`."""

    facts: ModelFacts
    source: str
    dtype: torch.dtype
    device: torch.device
    """Of this process: it computes nothing, and owns no memory of an accelerator."""
    tokenizer: Tokenizer
    config: dict[str, Any]

    def hf_config(self) -> dict[str, Any]:
        return dict(self.config)


class RemoteTrainer(Trainer):
    """A trainer whose ranks are actors: every method calls all of them, and rank 0 answers."""

    def __init__(self, actors: Sequence[Any], config: RunConfig, facts: RemoteFacts, tokenizer: Tokenizer):
        self.actors = list(actors)
        self.config = config.trainer
        self.deadline_s = config.cluster.step_deadline_s
        self.max_response_tokens = config.rollout.max_response_tokens
        self.temperature = config.rollout.temperature
        self.export_dtype = getattr(torch, facts.specs[0].dtype)
        self.specs = facts.specs
        self._num_trained_params = facts.num_trained_params
        remote = RemoteModel(
            facts=facts.facts,
            source=facts.source,
            dtype=facts.dtype,
            device=torch.device("cpu"),
            tokenizer=tokenizer,
            config=facts.hf_config,
        )
        self.model = cast(LoadedModel, remote)
        self._lock = threading.Lock()
        self._lost = ""

    def fill_proximal(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_proximal", batch, "proximal_logprobs")

    def fill_reference(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_reference", batch, "reference_logprobs")

    def fill_teacher(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_teacher", batch, "teacher_logprobs")

    def fill_values(self, batch: TrainBatch) -> Values:
        return self._fill_remote("fill_values", batch, "values")

    def update(
        self,
        batch: TrainBatch,
        objective: Objective,
        *,
        lr: float | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Values:
        assert before_step is None, "the ranks cannot call back"
        values, noted = self.call("update", "update", ray.put(batch), objective, {"lr": lr})
        if isinstance(objective, NotingObjective):
            objective.noted.update({i: row.copy() for i, row in noted.items()})
        return cast(Values, values)

    def update_critic(self, batch: TrainBatch, objective: CriticObjective) -> Values:
        values, _ = self.call("update", "update_critic", ray.put(batch), objective, {})
        return cast(Values, values)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return self.specs

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise SyncError("the weights are in other processes", "rank 0 publishes them itself")

    def save_model(self, folder: Path) -> None:
        self.call("do", "save_model", folder.absolute())

    def reset_moments(self) -> None:
        self.call("do", "reset_moments")

    def write_state(self, folder: Path, readable: Callable[[State], State] = lambda state: state) -> Written:
        """Rank 0 writes: of what a rank holds nothing is parked, and nothing passes through Ray."""
        return cast(Written, self.call("do", "write_state", folder.absolute()))

    def read_state(self, checkpoint: Path) -> None:
        self.call("do", "read_state", checkpoint.absolute())

    def freeze_reference(self) -> None:
        self.call("do", "freeze_reference")

    @property
    def num_trained_params(self) -> int:
        return self._num_trained_params

    def keep_state(self) -> None:
        self.call("do", "keep_state")

    def put_back_state(self) -> None:
        self.call("do", "put_back_state")

    def measure_machine(self) -> MachineSpec:
        return cast(MachineSpec, self.call("do", "measure_machine"))

    def measure_optimizer(self) -> float:
        return cast(float, self.call("do", "measure_optimizer"))

    def carry(self, batch: TrainBatch) -> None:
        self.call("carry", ray.put(batch))

    def _fill_remote(self, method: str, batch: TrainBatch, name: str) -> Values:
        values, rows = self.call("fill", method, ray.put(batch), name)
        for sequence, row in zip(batch.sequences, rows, strict=True):
            setattr(sequence, name, row)
        return cast(Values, values)

    def call(self, name: str, *args: Any) -> Any:
        """The same call on all ranks; rank 0's answer.

        Raises:
            RunError: what a rank raised.
            TrainerDownError: a rank is gone, or stopped in the middle of a collective.
            DeadlineError: a rank does not answer; names it and the call.
        """
        return self.each([(name, args)] * len(self.actors))

    def each(self, calls: Sequence[tuple[str, tuple[Any, ...]]]) -> Any:
        """One call for each rank, as `call`."""
        if self._lost:
            raise rank_lost(self._lost)
        with self._lock:  # every rank sees the calls in one order
            refs = {
                getattr(actor, name).remote(*args): Asked(rank, label_of(name, args))
                for rank, (actor, (name, args)) in enumerate(zip(self.actors, calls, strict=True))
            }
        return self._answers(refs)

    def _answers(self, refs: Mapping[Any, Asked]) -> Any:
        waiting, answers = dict(refs), dict[int, Any]()
        ends_at_s = time.monotonic() + self.deadline_s
        failed: Exception | None = None
        while waiting:
            ready, _ = ray.wait(list(waiting), timeout=max(ends_at_s - time.monotonic(), 0.0))
            if not ready:
                break
            asked = waiting.pop(ready[0])
            try:
                answers[asked.rank] = ray.get(ready[0])
            except ray.exceptions.RayActorError as error:
                self._lose(f"rank {asked.rank} died in {asked.call}: {first_line(error)}")
                raise rank_lost(self._lost) from None
            except ray.exceptions.RayTaskError as error:
                if failed is None:
                    failed = cause_of(error, f"rank {asked.rank} of the trainer failed in {asked.call}")
                    ends_at_s = time.monotonic() + SETTLE_S
        if waiting:
            late = ", ".join(f"rank {asked.rank} of the trainer ({asked.call})" for asked in waiting.values())
            if failed is not None:
                self._lose(f"{late} did not come to an end after {first_line(failed)}")
                raise failed
            self._lose(f"{late} did not answer within {self.deadline_s:g} s")
            raise DeadlineError(
                self._lost,
                "look at its log, or raise cluster.step_deadline_s; "
                "`rollbook train --resume` continues from the last checkpoint",
            )
        if failed is not None:
            raise failed
        return answers[0]

    def _lose(self, why: str) -> None:
        """The ranks are out of step for good."""
        self._lost = why
        for actor in self.actors:
            ray.kill(actor)


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of one rank that is under way."""

    rank: int
    call: str
