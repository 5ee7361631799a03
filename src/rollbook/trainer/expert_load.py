"""How evenly the experts of a model are used: the routers' choices in the forward passes of the policy's updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rollbook.observe.values import Last, Values
from rollbook.trainer.parallel import Ranks


class ExpertLoad:
    """Counts, layer by layer, the tokens that each expert gets while `counting`. Nothing for a model without routers.

    Args:
        module: the policy; hooks are put on its routers, the modules that return indices of experts. What is copied
            from it afterwards counts too: make the copies first.
        ranks: among which the tokens are divided.
    """

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.ranks = ranks
        self.routers = [m for m in module.modules() if _num_experts(m) > 1]
        self.counts: list[Tensor] = []
        self._is_on = False
        for layer_idx, router in enumerate(self.routers):
            self.counts.append(torch.zeros(_num_experts(router), dtype=torch.int64))
            router.register_forward_hook(self._counter(layer_idx))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count from nothing; a forward that is repeated for its gradient counts twice, in the same shares."""
        self.counts = [torch.zeros_like(count) for count in self.counts]
        self._is_on = True
        try:
            yield
        finally:
            self._is_on = False

    def values(self) -> Values:
        """Violations of balance of all ranks' tokens, load of an expert x experts - 1: of the busiest expert, of the
        idlest one, and the mean of their sizes; by layer, and their largest and mean over layers. All ranks call it."""
        by_name: dict[str, list[float]] = {"max": [], "min": [], "avg": []}
        values: Values = {}
        for layer_idx, count in enumerate(self.counts):
            total = self.ranks.sum_(count.to(self.ranks.device) if not self.ranks.is_alone else count)
            if not int(total.sum()):
                continue  # a router that told no choices
            violation = total.double() / total.sum() * len(total) - 1.0
            told = {"max": violation.max(), "min": violation.min(), "avg": violation.abs().mean()}
            for name, value in told.items():
                values[f"rollout/moe/{name}_vio/layer_{layer_idx}"] = Last(float(value))
                by_name[name].append(float(value))
        for name, layers in by_name.items():
            if layers:
                values[f"rollout/moe/{name}_vio/max"] = Last(max(layers))
                values[f"rollout/moe/{name}_vio/avg"] = Last(sum(layers) / len(layers))
        return values

    def _counter(self, layer_idx: int) -> Any:
        def count(router: nn.Module, _inputs: Any, output: Any) -> None:
            if not self._is_on:
                return
            parts = output if isinstance(output, tuple) else (output,)
            chosen = [p for p in parts if isinstance(p, Tensor) and p.dtype in (torch.int64, torch.int32)]
            if chosen:
                held = self.counts[layer_idx].to(chosen[-1].device)
                self.counts[layer_idx] = held + torch.bincount(
                    chosen[-1].detach().flatten(), minlength=len(held)
                )

        return count


def _num_experts(module: nn.Module) -> int:
    """Of a router; 0 of any other module."""
    if not type(module).__name__.endswith("Router"):
        return 0
    num = getattr(module, "num_experts", None)
    return num if isinstance(num, int) else 0
