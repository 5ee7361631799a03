"""AdamW over float32 master weights, for a model that computes in the same or a lower precision.

    compute weights (bfloat16 or float32) ──backward──► gradients ──hook──► float32 sums
            ▲                                                                  │ clip, AdamW
            └───────────────────── one copy a step ◄── master weights ◄────────┘

When the model computes in float32 its weights are the master weights and nothing is copied. Where parameters are
divided among ranks they are the float32 master weights, FSDP2 rounds what it gathers, and everything here is this
rank's rows. torch.optim is not used: constructing its optimizer imports the compiler stack, which takes longer than
many small runs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rollbook.errors import CheckpointError
from rollbook.trainer.config import OptimizerFields
from rollbook.trainer.parallel import ALONE, Ranks

COMPARED_BYTES = 64 << 20
"""Copied at most, to see whether an update moves a weight that has no master; a larger tensor is copied whole."""
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What one optimizer update did."""

    grad_norm: float
    """Global norm before clipping; not finite when a gradient was not."""
    lr: float
    is_applied: bool
    """False: the gradient was not finite, so weights and moments were left as they were."""
    is_clipped: bool
    has_moved: bool
    """A bit of a published weight changed. A small step can be less than its type resolves; and without a gradient,
    moments and decay still move it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Copies of one rank's own rows, in host memory."""

    masters: list[Tensor]
    moments: list[Tensor]
    """Empty before the first update, when they are zeros."""
    num_updates: int
    num_skipped: int


def lower_precision(parameters: Mapping[str, nn.Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """Make the parameters compute in `dtype`; returns what they were, the master weights, where that differs."""
    masters = {name: p.detach() for name, p in parameters.items() if p.dtype != dtype}
    for name in masters:
        parameters[name].data = masters[name].to(dtype)
    return masters


def learning_rate(config: OptimizerFields, update: int, num_updates: int | None) -> float:
    """Learning rate of update number `update`, from 0, of `num_updates` in the whole run (None: not known).

    >>> config = OptimizerFields(lr=1.0, schedule="linear", warmup_updates=2)
    >>> [learning_rate(config, update, 6) for update in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if update < config.warmup_updates:
        return config.lr * (update + 1) / config.warmup_updates
    if config.schedule == "constant" or num_updates is None:
        return config.lr
    done = min((update - config.warmup_updates) / max(num_updates - config.warmup_updates, 1), 1.0)
    left = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_frac + (1 - config.min_lr_frac) * left)


class AdamW:
    """Owns the master weights, gradient sums and moments of named parameters.

    Args:
        parameters: by name; those the model computes with.
        config: the optimizer's fields.
        masters: float32 weights of parameters that compute in less (see `lower_precision`); a parameter without
            one is its own master weight.
        num_updates: of the whole run, for schedules that decay.
        published_dtype: in which the weights leave the trainer; None: as they compute.
        ranks: among which the parameters are divided; one that is not is held whole by each of them.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerFields,
        *,
        masters: Mapping[str, Tensor] | None = None,
        num_updates: int | None = None,
        published_dtype: torch.dtype | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        self.published_dtype = published_dtype
        self.ranks = ranks
        self.num_updates_planned = num_updates
        self.num_updates = 0
        """Updates applied; a skipped one does not count."""
        self.num_skipped = 0
        self.names = list(parameters)
        self.parameters = list(parameters.values())
        given = masters or {}
        self.masters: list[Tensor] = [given.get(n, ranks.local(p.detach())) for n, p in parameters.items()]
        self.means = [torch.zeros_like(m) for m in self.masters]
        self.mean_squares = [torch.zeros_like(m) for m in self.masters]
        self._sums: dict[int, Tensor] = {}
        """Gradients in master precision, by position, of parameters that have a master."""
        self._lower = [i for i, name in enumerate(self.names) if name in given]
        for i in self._lower:
            hook = functools.partial(self._add_gradient, i)
            self.parameters[i].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def lr(self) -> float:
        """Of the next update, by the schedule."""
        return learning_rate(self.config, self.num_updates, self.num_updates_planned)

    def gradients(self) -> list[Tensor]:
        """Sums over the micro batches since the last update, in master precision; zeros where none arrived."""
        sums = [self._sums.get(i, p.grad) for i, p in enumerate(self.parameters)]
        return [torch.zeros_like(m) if g is None else self.ranks.local(g) for g, m in zip(sums, self.masters)]

    def clear(self) -> None:
        self._sums = {}
        for parameter in self.parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float | None = None) -> UpdateReport:
        """Clip, update and refresh the compute weights; clears the gradients.

        Args:
            lr: overrides the schedule.
        """
        rate = self.lr() if lr is None else lr
        grads = self.gradients()
        norm = self._global_norm(grads)
        if not math.isfinite(norm):
            self.num_skipped += 1
            self.clear()
            return UpdateReport(norm, rate, is_applied=False, is_clipped=False, has_moved=False)
        limit = self.config.max_grad_norm
        is_clipped = 0 < limit < norm
        if is_clipped:
            torch._foreach_mul_(grads, limit / norm)
        self.num_updates += 1
        has_moved = self._update_all(grads, rate)
        self.refresh()
        self.clear()
        return UpdateReport(norm, rate, is_applied=True, is_clipped=is_clipped, has_moved=has_moved)

    def _global_norm(self, grads: list[Tensor]) -> float:
        """Of the whole gradient. Parameters held whole are summed over the ranks first, and count once."""
        if self.ranks.is_alone:
            return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
        counted = []
        for parameter, grad in zip(self.parameters, grads):
            is_sharded = self.ranks.is_sharded(parameter)
            if not is_sharded:
                self.ranks.sum_(grad)
            if is_sharded or self.ranks.rank == 0:
                counted.append(grad)
        zero = torch.zeros(1, dtype=torch.float64, device=self.ranks.device)
        squares = [norm.double().square().view(1) for norm in torch._foreach_norm(counted)] if counted else []
        return float(self.ranks.sum_(torch.cat([zero, *squares]).sum()).sqrt())

    def _update_all(self, grads: Sequence[Tensor], rate: float) -> bool:
        """Whether a published weight moves with its master (see `UpdateReport.has_moved`). Mostly the first that is
        looked at tells: those without a master are compared with what they were a portion at a time, until one did."""
        lower, has_moved = set(self._lower), False
        for decays in (True, False):
            weight_decay = self.config.weight_decay if decays else 0.0
            chosen = [i for i, m in enumerate(self.masters) if (m.ndim > 1) == decays and m.numel()]
            if rounded := [i for i in chosen if i in lower]:
                self._update(rounded, grads, rate, weight_decay)
            left = [i for i in chosen if i not in lower]
            while left:
                some = left if has_moved else self._portion(left)
                before = [] if has_moved else [self.masters[i].clone() for i in some]
                self._update(some, grads, rate, weight_decay)
                has_moved = has_moved or any(self._differ(m, self.masters[i]) for m, i in zip(before, some))
                left = left[len(some) :]
        has_moved = has_moved or any(
            self._differ(self.parameters[i].detach(), self.masters[i]) for i in self._lower
        )
        if self.ranks.is_alone:
            return has_moved
        flag = torch.tensor([float(has_moved)], device=self.ranks.device)  # each rank saw its own rows
        return float(self.ranks.sum_(flag)) > 0

    def _portion(self, indices: Sequence[int]) -> list[int]:
        """The first tensors, up to `COMPARED_BYTES` of them, at least one."""
        ends_at = itertools.accumulate(self.masters[i].nbytes for i in indices)
        return list(indices[: max(1, sum(end <= COMPARED_BYTES for end in ends_at))])

    def _differ(self, held: Tensor, master: Tensor) -> bool:
        """Whether what `master` rounds to has other bits than `held` when it is published."""
        dtype = self.published_dtype or held.dtype
        bits = _INTEGERS[dtype.itemsize]
        return not torch.equal(held.to(dtype).view(bits), master.to(held.dtype).to(dtype).view(bits))

    @torch.no_grad()
    def refresh(self) -> None:
        """Compute weights from master weights."""
        if self._lower:
            lower = [self.parameters[i].detach() for i in self._lower]
            torch._foreach_copy_(lower, [self.masters[i] for i in self._lower])

    def state_dict(self) -> dict[str, Any]:
        """Everything the next update depends on; of several ranks, whole tensors on the host of rank 0."""

        def whole(held: Sequence[Tensor]) -> dict[str, Tensor]:
            return {n: self.ranks.whole(t, p) for n, t, p in zip(self.names, held, self.parameters)}

        return {
            "num_updates": self.num_updates,
            "num_skipped": self.num_skipped,
            "masters": whole(self.masters),
            "means": whole(self.means),
            "mean_squares": whole(self.mean_squares),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises CheckpointError where names or shapes differ from the model's."""
        for part, held in (
            ("masters", self.masters),
            ("means", self.means),
            ("mean_squares", self.mean_squares),
        ):
            saved = state[part]
            if set(saved) != set(self.names):
                odd = sorted(set(saved) ^ set(self.names))
                raise CheckpointError(
                    f"the checkpoint's {part} and the model differ in {len(odd)} tensors, first {odd[0]}",
                    "resume with the model and critic settings the run was started with",
                )
            for name, tensor, parameter in zip(self.names, held, self.parameters):
                if saved[name].shape != parameter.shape:
                    raise CheckpointError(
                        f"{name} is {list(saved[name].shape)} in the checkpoint and {list(parameter.shape)} in the "
                        "model",
                        "resume with the model the run was started with",
                    )
                is_sharded = self.ranks.is_sharded(parameter)
                tensor.copy_(self.ranks.own_rows(saved[name]) if is_sharded else saved[name])
        self.num_updates, self.num_skipped = int(state["num_updates"]), int(state["num_skipped"])
        self.refresh()
        self.clear()

    def keep(self) -> Kept:
        """For `put_back`, in this process: nothing is gathered, nothing leaves the rank."""
        moments = [*self.means, *self.mean_squares] if self.num_updates else []
        return Kept(
            [t.detach().to("cpu", copy=True) for t in self.masters],
            [t.to("cpu", copy=True) for t in moments],
            self.num_updates,
            self.num_skipped,
        )

    @torch.no_grad()
    def put_back(self, kept: Kept) -> None:
        """As it was at `keep`, bit for bit."""
        for tensor, saved in zip(self.masters, kept.masters, strict=True):
            tensor.copy_(saved)
        self.reset_moments()
        for tensor, saved in zip([*self.means, *self.mean_squares], kept.moments):
            tensor.copy_(saved)
        self.num_updates, self.num_skipped = kept.num_updates, kept.num_skipped
        self.refresh()
        self.clear()

    def reset_moments(self) -> None:
        """Forget the gradients' history and start the schedule anew: after a warm-up on other data."""
        for tensor in (*self.means, *self.mean_squares):
            tensor.zero_()
        self.num_updates = 0

    def _add_gradient(self, i: int, parameter: Tensor) -> None:
        grad = parameter.grad
        assert grad is not None
        if i in self._sums:
            self._sums[i].add_(grad)
        else:
            self._sums[i] = grad.to(self.masters[i].dtype)
        parameter.grad = None

    def _update(self, chosen: Sequence[int], grads: Sequence[Tensor], lr: float, weight_decay: float) -> None:
        def pick(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[i] for i in chosen]

        # One copy to the device, read by all.
        step = torch.tensor(float(self.num_updates), device=self.masters[chosen[0]].device)
        torch._fused_adamw_(
            pick(self.masters),
            pick(grads),
            pick(self.means),
            pick(self.mean_squares),
            [],
            [step] * len(chosen),
            amsgrad=False,
            lr=lr,
            beta1=self.config.beta1,
            beta2=self.config.beta2,
            weight_decay=weight_decay,
            eps=self.config.eps,
            maximize=False,
        )
