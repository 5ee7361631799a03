"""The policy under training, in one process or divided among several.

    make_batch ──► fill_proximal · _reference · _teacher · _values ──► update · update_critic ──► export_weights
    mini batches   forward passes, written into the sequences          one optimizer update       to the publisher
                                                                       per mini batch

Every loss is a sum of shares: micro batches and ranks only add. Each rank of several makes every call, with the same
arguments, and gets the same answer; where an answer is large (`state_dict`), rank 0 has it (`parallel.py`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollbook.algos.aggregate import LossCounts
from rollbook.checkpoint.checkpoint import State, Written, load_checkpoint, write_arrays
from rollbook.errors import ConfigError
from rollbook.ledger.hardware import MachineSpec
from rollbook.modeling.config import ModelConfig
from rollbook.modeling.load import DTYPES, LoadedModel, load_model
from rollbook.modeling.logprobs import token_logprobs
from rollbook.modeling.lora import base_digest
from rollbook.observe.values import Total, Values, merge
from rollbook.trainer.ceilings import measure_machine, wait_for
from rollbook.trainer.config import CriticConfig, TrainerConfig
from rollbook.trainer.critic import Critic
from rollbook.trainer.expert_load import ExpertLoad
from rollbook.trainer.export import gathered
from rollbook.trainer.mini_batches import mini_batches, require_trainable
from rollbook.trainer.objective import CriticObjective, MicroBatch, NotingObjective, Objective
from rollbook.trainer.optimizer import AdamW, Kept, lower_precision
from rollbook.trainer.packing import ModelInputs, computed_tokens, deal_micro_batches, pack
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.policy import frozen_copy, predictor_states, trainable
from rollbook.trainer.state import put_back, state_of
from rollbook.trainer.teacher import load_teacher
from rollbook.trainer.update_values import balance_values, update_values
from rollbook.types import Floats, TrainBatch, TrainSequence
from rollbook.weights import TensorSpec


class Trainer:
    """See the module. Every method blocks; one thread calls them.

    Args:
        config: `[trainer]`.
        model_config: `[model]`.
        model: the policy when it is loaded already, in float32 if master weights shall start there; None: load it.
            It is trained in place.
        critic_config: make a critic; None: none.
        with_reference: keep a frozen copy of the initial weights.
        teacher_config: a second model, frozen, for `fill_teacher`; None: none.
        temperature: of the rollout: logprobs are those of the distribution that sampled.
        max_response_tokens: limit of a response, a constant of some losses.
        num_updates: optimizer updates of the whole run, for schedules that decay.
        compute_dtype: of forward and backward; None: `model_config.dtype`. "float64" is for proofs.
        export_dtype: of the published weights; None: as they compute.
        ranks: among which the policy, its critic, reference and teacher are divided. They are loaded on the host and
            move to each rank's device layer by layer.
    """

    def __init__(
        self,
        config: TrainerConfig,
        model_config: ModelConfig,
        *,
        model: LoadedModel | None = None,
        critic_config: CriticConfig | None = None,
        with_reference: bool = False,
        teacher_config: ModelConfig | None = None,
        temperature: float = 1.0,
        max_response_tokens: int,
        num_updates: int | None = None,
        compute_dtype: str | None = None,
        export_dtype: str | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        if not temperature > 0:
            raise ConfigError(
                f"the trainer was given temperature {temperature}",
                "train on samples of a positive temperature; 0 (greedy) is for evaluation",
            )
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.config = config
        self.temperature = temperature
        self.max_response_tokens = max_response_tokens
        self.ranks = ranks
        self.model = model or load_model(
            model_config, dtype="float32", device=None if ranks.is_alone else "cpu"
        )
        if config.gradient_checkpointing:
            self.model.enable_gradient_checkpointing()
        if self.model.lora is not None and not ranks.is_alone:
            raise ConfigError(
                f"there is a [model.lora] table and the trainer has {ranks.size} ranks",
                "adapters are trained by one process: use one, or remove the table",
            )
        compute = DTYPES[compute_dtype or model_config.dtype]
        masters = lower_precision(trainable(self.model), compute) if ranks.is_alone else {}
        self.export_dtype = DTYPES[export_dtype] if export_dtype else compute
        self.reference = frozen_copy(self.model) if with_reference else None
        self.teacher = None if teacher_config is None else load_teacher(teacher_config, self.model, ranks)
        self.critic: Critic | None = None
        if critic_config is not None:
            self.critic = Critic(critic_config, self.model, masters, num_updates, compute, ranks)
        if not ranks.is_alone:
            ranks.shard(self.model, compute)
            if self.reference is not None:
                self.reference.module.to(compute)
                ranks.shard(self.reference, compute)
            if self.teacher is not None:
                ranks.shard(self.teacher, self.teacher.dtype)
        self._kept: tuple[Kept, Kept | None] | None = None
        self.optimizer = AdamW(
            trainable(self.model),
            config,
            masters=masters,
            num_updates=num_updates,
            published_dtype=self.export_dtype,
            ranks=ranks,
        )
        self.expert_load = ExpertLoad(self.model.module, ranks)

    # ---- batches -----------------------------------------------------------------------------------------

    @property
    def num_updates_per_step(self) -> int:
        return self.config.num_mini_batches * self.config.num_epochs

    def make_batch(self, sequences: Sequence[TrainSequence], *, step: int, weight_version: int) -> TrainBatch:
        """Split a step's sequences into mini batches, groups kept together where the sizes allow.

        Raises:
            DataError: no sequences, or one that is longer than the model's context.
        """
        require_trainable(sequences, self.model, step)
        return TrainBatch(
            step=step,
            weight_version=weight_version,
            sequences=list(sequences),
            mini_batches=mini_batches(sequences, self.config, step),
        )

    # ---- forward passes ----------------------------------------------------------------------------------

    def fill_proximal(self, batch: TrainBatch) -> Values:
        """Write `proximal_logprobs`: the current weights' numbers, before the first update of the step."""
        return self._fill(batch, "proximal_logprobs", lambda i: self._logprobs(self.model, i))

    def fill_reference(self, batch: TrainBatch) -> Values:
        """Write `reference_logprobs`.

        Raises:
            ConfigError: the trainer was made without a reference.
        """
        reference = self.reference
        if reference is None:
            raise ConfigError("the trainer has no reference model", "make it with_reference=True")
        return self._fill(batch, "reference_logprobs", lambda i: self._logprobs(reference, i))

    def fill_teacher(self, batch: TrainBatch) -> Values:
        """Write `teacher_logprobs`: the teacher's numbers for the tokens the policy sampled.

        Raises:
            ConfigError: the trainer was made without a teacher.
        """
        teacher = self.teacher
        if teacher is None:
            raise ConfigError("the trainer has no teacher", "make it with a teacher_config")
        return self._fill(batch, "teacher_logprobs", lambda i: self._logprobs(teacher, i))

    def fill_values(self, batch: TrainBatch) -> Values:
        """Write `values`, the critic's.

        Raises:
            ConfigError: the trainer was made without a critic.
        """
        critic = self._critic()
        return self._fill(batch, "values", lambda i: critic.values(i))

    def _logprobs(self, model: LoadedModel, inputs: ModelInputs) -> Tensor:
        return self._predict(model, inputs, with_entropy=False)[0]

    @torch.no_grad()
    def _fill(self, batch: TrainBatch, name: str, compute: Callable[[ModelInputs], Tensor]) -> Values:
        num_tokens = 0
        rows: dict[int, Floats] = {}
        for members in self._deal(batch, range(len(batch.sequences)), name)[self.ranks.rank]:
            inputs, micro = self._pack(batch, members)
            num_tokens += inputs.input_ids.shape[0] if members else 0
            whole = _spread(compute(inputs), inputs, micro).float().cpu().numpy()
            bounds = micro.cu_seqlens.tolist()
            rows |= {i: whole[a:b].copy() for i, (a, b) in zip(members, itertools.pairwise(bounds))}
        for i, row in self.ranks.exchange(rows).items():
            setattr(batch.sequences[i], name, row)
        self._release()
        return self.ranks.merged({"trainer/num_forward_tokens": Total(num_tokens)})

    def _deal(self, batch: TrainBatch, members: Sequence[int], what: str) -> list[list[list[int]]]:
        """Each rank's micro batches.

        Raises:
            DataError: the ranks were not given the same work.
        """
        dealt = deal_micro_batches(
            batch.sequences,
            members,
            self.config.micro_batch_tokens,
            share_prompts=self.config.share_prompts,
            num_ranks=self.ranks.size,
        )
        work = [
            batch.step,
            len(members),
            len(dealt[0]),
            sum(computed_tokens(batch.sequences[i]) for i in members),
        ]
        self.ranks.require_same(f"{what} of step {batch.step} (step, sequences, micro batches, tokens)", work)
        return dealt

    def _release(self) -> None:
        backbone = None if self.critic is None else self.critic.backbone
        self.ranks.release(self.model, self.reference, self.teacher, backbone)

    def _predict(
        self, model: LoadedModel, inputs: ModelInputs, *, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """[S] logprobs (and entropies) of the action tokens."""
        return token_logprobs(
            predictor_states(model, inputs),
            model.lm_head(),
            inputs.targets,
            temperature=self.temperature,
            chunk_tokens=self.config.logprob_chunk_tokens,
            keep_bytes=self.config.keep_logits_mib << 20,
            with_entropy=with_entropy,
        )

    # ---- updates -----------------------------------------------------------------------------------------

    def update(
        self,
        batch: TrainBatch,
        objective: Objective,
        *,
        lr: float | None = None,
        before_step: Callable[[], None] | None = None,
    ) -> Values:
        """One optimizer update of the policy for each mini batch.

        Sequences without a loss token are not computed. A mini batch without any changes nothing.

        Args:
            batch: with everything the objective reads filled in.
            objective: the loss.
            lr: overrides the schedule.
            before_step: called once, when the gradients of the first mini batch are there and no weight has moved.
        Returns:
            The objective's metrics over all mini batches, and the trainer's own.
        Raises:
            DataError: what the objective raises; gradients of the mini batch are dropped, weights untouched.
        """

        def share(inputs: ModelInputs, micro: MicroBatch, counts: LossCounts) -> tuple[Tensor, Values]:
            logprobs, entropies = self._predict(self.model, inputs, with_entropy=self.config.measure_entropy)
            whole = _spread(logprobs, inputs, micro)
            entropy = None if entropies is None else _spread(entropies, inputs, micro)
            return objective.loss(micro, whole, entropy, counts)

        def predict(inputs: ModelInputs) -> Tensor:
            return self._predict(self.model, inputs, with_entropy=False)[0]

        with self.expert_load.counting():
            values = self._update(batch, share, predict, self.optimizer, "actor", lr, before_step)
        values |= self.expert_load.values()
        if isinstance(objective, NotingObjective) and not self.ranks.is_alone:
            objective.noted.update(self.ranks.exchange(objective.noted))
        return values

    def update_critic(self, batch: TrainBatch, objective: CriticObjective) -> Values:
        """One optimizer update of the critic for each mini batch; otherwise as `update`.

        Raises:
            ConfigError: the trainer was made without a critic.
        """
        critic = self._critic()

        def share(inputs: ModelInputs, micro: MicroBatch, counts: LossCounts) -> tuple[Tensor, Values]:
            return objective.loss(micro, _spread(critic.values(inputs), inputs, micro), counts)

        return self._update(batch, share, critic.values, critic.optimizer, "critic", None)

    def _update(
        self,
        batch: TrainBatch,
        share: Callable[[ModelInputs, MicroBatch, LossCounts], tuple[Tensor, Values]],
        predict: Callable[[ModelInputs], Tensor],
        optimizer: AdamW,
        prefix: str,
        lr: float | None,
        before_step: Callable[[], None] | None = None,
    ) -> Values:
        values: Values = {}
        """Of this rank's micro batches."""
        reports: Values = {}
        """Of the updates, the same on every rank."""
        rank_tokens = np.zeros(self.ranks.size)
        for mini_batch in batch.mini_batches:
            members = [i for i in mini_batch if batch.sequences[i].loss_mask.any()]
            counts = self._counts(batch.sequences, members)
            dealt = self._deal(batch, members, prefix)
            rank_tokens += [
                sum(computed_tokens(batch.sequences[i]) for micro in own for i in micro) for own in dealt
            ]
            plan = dealt[self.ranks.rank]
            try:
                for chosen in plan:
                    inputs, micro = self._pack(batch, chosen)
                    if chosen:
                        loss, more = share(inputs, micro, counts)
                        merge(values, more)
                        merge(values, {f"trainer/{prefix}_tokens": Total(inputs.input_ids.shape[0])})
                    else:  # other ranks compute now, and need this one's part of every layer
                        loss = predict(inputs).sum() * 0.0
                    loss.backward()  # type: ignore[no-untyped-call]
            except BaseException:
                optimizer.clear()
                raise
            if before_step is not None:
                before_step()
                before_step = None
            merge(values, {f"trainer/{prefix}_micro_batches": Total(sum(map(bool, plan)))})
            if counts.num_loss_tokens == 0:
                merge(reports, {f"trainer/{prefix}_empty_updates": Total(1)})
                continue
            merge(reports, update_values(optimizer.step(lr), prefix))
        self._release()
        values = self.ranks.merged(values)
        merge(values, reports)
        return values | (balance_values(rank_tokens) if prefix == "actor" and rank_tokens.any() else {})

    def _counts(self, sequences: Sequence[TrainSequence], members: Iterable[int]) -> LossCounts:
        chosen = [sequences[i] for i in members]
        return LossCounts(
            num_loss_tokens=sum(int(s.loss_mask.sum()) for s in chosen),
            num_loss_sequences=len(chosen),
            max_response_tokens=self.max_response_tokens,
        )

    def _pack(self, batch: TrainBatch, members: Sequence[int]) -> tuple[ModelInputs, MicroBatch]:
        return pack(batch.sequences, members, self.model.device, share_prompts=self.config.share_prompts)

    def _critic(self) -> Critic:
        if self.critic is None:
            raise ConfigError("the trainer has no critic", "make it with a critic_config")
        return self.critic

    # ---- weights and state -------------------------------------------------------------------------------

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor of `export_weights`, in its order."""
        size = torch.empty(0, dtype=self.export_dtype).element_size()
        name = str(self.export_dtype).removeprefix("torch.")
        return tuple(
            TensorSpec(name=key, shape=tuple(shape), dtype=name, num_bytes=shape.numel() * size)
            for key, shape in self.model.published_shapes().items()
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Hugging Face names, tied tensors once. The live compute weights where their dtype is the engines'; of several
        ranks, gathered a bucket at a time: all of them must go through the stream, to its end."""
        if self.ranks.is_alone:
            yield from self.model.published_tensors(self.export_dtype)
            return
        tensors = self.model.named_tensors()
        yield from gathered(tensors, self.ranks, self.export_dtype, self.config.gather_bytes)

    def save_model(self, folder: Path) -> None:
        """The published weights as a Hugging Face folder, adapters merged; rank 0 writes it."""
        alone = self.ranks.is_alone
        stream = (
            self.model.published_tensors(self.export_dtype, whole=True) if alone else self.export_weights()
        )
        tensors = {n: t.cpu() for n, t in stream if self.ranks.rank == 0}
        if self.ranks.rank == 0:
            self.model.save(folder, tensors)

    def reset_moments(self) -> None:
        """Forget the history of the policy's gradients and start its schedule anew."""
        self.optimizer.reset_moments()

    def state_dict(self) -> dict[str, Any]:
        """Everything the next step depends on: weights, optimizer, schedule, reference, critic. Live tensors; of
        several ranks, whole tensors on the host of rank 0, and nothing in their place on the others.

        There is no random state: the shuffle is a function of seed and step.
        """
        return state_of(self)

    def write_state(self, folder: Path, readable: Callable[[State], State] = lambda state: state) -> Written:
        """Write `state_dict` as files of a checkpoint; of several ranks, which all call this, rank 0 alone writes.

        Args:
            folder: of several ranks, one that rank 0 reaches.
            readable: finds the tensors that are parked elsewhere at the moment.
        """
        state = readable(self.state_dict())
        return Written({}, {}) if self.ranks.rank else write_arrays(folder, state, "trainer")

    def read_state(self, checkpoint: Path) -> None:
        """Continue where a checkpoint was written, which the caller has proven.

        Raises:
            CheckpointError: as `load_state_dict`, or it cannot be read.
        """
        self.load_state_dict(load_checkpoint(checkpoint, prove=False)["trainer"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken.

        Raises:
            CheckpointError: of another model, or without the critic or reference this trainer has; of adapters on
                another base.
        """
        put_back(self, state)

    @cached_property
    def base_digest(self) -> str:
        """Of the weights under the adapters, which no update moves."""
        return base_digest(self.model)

    def freeze_reference(self) -> None:
        """The reference becomes the policy of this moment (after a warm-up)."""
        if self.reference is not None:
            now = self.model.named_tensors()
            for name, tensor in self.reference.named_tensors().items():
                self.ranks.local(tensor.detach()).copy_(self.ranks.local(now[name].detach()))

    # ---- what a calibration asks, wherever the trainer computes -------------------------------------------

    def keep_state(self) -> None:
        """Remember what updates change, so that trials can be undone; each rank keeps its own rows."""
        critic = None if self.critic is None else self.critic.optimizer.keep()
        self._kept = self.optimizer.keep(), critic

    def put_back_state(self) -> None:
        """Undo all updates since `keep_state`."""
        assert self._kept is not None, "keep_state comes first"
        policy, critic = self._kept
        self._kept = None
        self.optimizer.put_back(policy)
        if self.critic is not None and critic is not None:
            self.critic.optimizer.put_back(critic)

    @property
    def num_trained_params(self) -> int:
        """That the policy's optimizer moves."""
        return sum(p.numel() for p in trainable(self.model).values())

    @property
    def num_published_params(self) -> int:
        """Of one publication to one replica."""
        return sum(math.prod(spec.shape) for spec in self.weight_specs())

    def measure_machine(self) -> MachineSpec:
        """Rates of the device that it computes on."""
        return measure_machine(self.model.device)

    def measure_optimizer(self) -> float:
        """Seconds of one update at a learning rate of 0; gradients that did not arrive count as zeros."""
        began_s = time.perf_counter()
        self.optimizer.step(0.0)
        wait_for(self.model.device)
        return time.perf_counter() - began_s

    def carry(self, batch: TrainBatch) -> None:
        """Take `batch` to where it is computed, and as much back as a forward writes into it; compute nothing. Within
        one process there is no way to go."""


def _spread(values: Tensor, inputs: ModelInputs, micro: MicroBatch) -> Tensor:
    """[T] from [S] values of the action tokens; 0 elsewhere."""
    zeros = torch.zeros(micro.action_mask.shape[0], dtype=values.dtype, device=values.device)
    return zeros.index_copy(0, inputs.token_positions, values)
