"""The value model of PPO: one number for each action token, from the state before it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from rollbook.modeling.load import LoadedModel
from rollbook.trainer.config import CriticConfig
from rollbook.trainer.optimizer import AdamW, lower_precision
from rollbook.trainer.packing import ModelInputs
from rollbook.trainer.parallel import ALONE, Ranks
from rollbook.trainer.policy import predictor_states

HEAD = "value_head.weight"


class Critic:
    """A float32 value head, starting at 0, on a backbone of its own or on the policy's.

    Args:
        config: `[critic]`.
        policy: whose weights an own backbone starts from.
        masters: float32 weights of the policy's parameters that compute in less.
        num_updates: of the whole run, for schedules that decay.
        dtype: in which the policy computes.
        ranks: among which an own backbone is divided. Each holds the whole head.
    """

    def __init__(
        self,
        config: CriticConfig,
        policy: LoadedModel,
        masters: Mapping[str, Tensor],
        num_updates: int | None,
        dtype: torch.dtype,
        ranks: Ranks = ALONE,
    ) -> None:
        self.config = config
        device = policy.device if ranks.is_alone else ranks.device
        self.head = nn.Parameter(torch.zeros(1, policy.facts.hidden_size, device=device))
        if dtype == torch.float64:
            self.head.data = self.head.data.double()
        self.backbone = policy
        parameters = {HEAD: self.head}
        own_masters: dict[str, Tensor] = {}
        if config.backbone == "own":
            self.backbone = dataclasses.replace(policy, module=copy.deepcopy(policy.module))
            states = _backbone_parameters(self.backbone)
            for name, parameter in states.items():
                if name in masters:
                    parameter.data = masters[name].clone()
            if ranks.is_alone:
                own_masters = lower_precision(states, dtype)
            else:
                ranks.shard(self.backbone, dtype)
                states = _backbone_parameters(self.backbone)
            parameters |= states
        self.optimizer = AdamW(parameters, config, masters=own_masters, num_updates=num_updates, ranks=ranks)

    def values(self, inputs: ModelInputs) -> Tensor:
        """[S] float32: the value before each action token."""
        with torch.no_grad() if self.config.backbone == "shared" else nullcontext():
            states = predictor_states(self.backbone, inputs)
        return torch.nn.functional.linear(states.to(self.head.dtype), self.head).squeeze(1)


def _backbone_parameters(model: LoadedModel) -> dict[str, nn.Parameter]:
    """All but an output head of its own, which values don't use."""
    used = {id(p) for p in model.module.base_model.parameters()}  # type: ignore[union-attr]
    return {n: t for n, t in model.named_tensors().items() if isinstance(t, nn.Parameter) and id(t) in used}
