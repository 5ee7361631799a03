"""How the step's tokens are divided: over the experts of a model, and over ranks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rollbook.trainer.expert_load import ExpertLoad
from rollbook.trainer.parallel import ALONE


class ScriptedRouter(nn.Module):
    """Sends each row where the test says."""

    num_experts = 4

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return chosen.float(), chosen.float(), chosen


def test_violations_are_loads_over_an_even_share() -> None:
    """Eight choices over four experts, an even share of 2: loads 4, 2, 2, 0 are violations 1, 0, 0, -1. The second
    layer sends all eight to one expert: 3, -1, -1, -1."""
    model = nn.ModuleList([ScriptedRouter(), nn.Linear(1, 1), ScriptedRouter()])
    load = ExpertLoad(model, ALONE)
    model[0](torch.tensor([[3, 3], [3, 3]]))  # not counted: a forward that trains nothing
    with load.counting():
        model[0](torch.tensor([[0, 1], [0, 2]]))
        model[0](torch.tensor([[0, 1], [0, 2]]))
        model[2](torch.full((4, 2), 1))
    told = {name: value.result() for name, value in load.values().items()}
    assert told == pytest.approx(
        {
            "rollout/moe/max_vio/layer_0": 1.0,
            "rollout/moe/min_vio/layer_0": -1.0,
            "rollout/moe/avg_vio/layer_0": 0.5,
            "rollout/moe/max_vio/layer_1": 3.0,
            "rollout/moe/min_vio/layer_1": -1.0,
            "rollout/moe/avg_vio/layer_1": 1.5,
            "rollout/moe/max_vio/max": 3.0,
            "rollout/moe/max_vio/avg": 2.0,
            "rollout/moe/min_vio/max": -1.0,
            "rollout/moe/min_vio/avg": -1.0,
            "rollout/moe/avg_vio/max": 1.5,
            "rollout/moe/avg_vio/avg": 1.0,
        }
    )
    with load.counting():
        pass
    assert load.values() == {}, "each step counts from nothing"


def test_a_model_without_routers_says_nothing_of_experts() -> None:
    load = ExpertLoad(nn.ModuleList([nn.Linear(2, 2)]), ALONE)
    with load.counting():
        pass
    assert load.values() == {}
