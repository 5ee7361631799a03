"""Low-rank adapters: the base stays as it was loaded, and only B A in some linear layers is trained.

    y = W x + (alpha / rank) B (A x)        W [out, in] frozen · A [rank, in] · B [out, rank], 0 at the start

A layer becomes an `AdaptedLinear` in place and keeps its name; `lora_A` and `lora_B` stand beside its `weight`. What is
published is either the merged weights under the names every engine knows, or the adapters alone, for engines that hold
the same base and compute the same sum.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollbook.errors import ConfigError, nearest_name
from rollbook.modeling.config import LoraConfig

if TYPE_CHECKING:
    from rollbook.modeling.load import LoadedModel

DOWN, UP = "lora_A", "lora_B"


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter beside it."""

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    stand_in: tuple[Tensor, Tensor] | None
    """A and B of a reference, while it computes."""

    def forward(self, input: Tensor) -> Tensor:
        down, up = (self.lora_A, self.lora_B) if self.stand_in is None else self.stand_in
        return F.linear(input, self.weight, self.bias) + F.linear(F.linear(input, down), up) * self.scale

    def merged(self, dtype: torch.dtype) -> Tensor:
        """[out, in] W + scale B A, summed in at least float32, rounded once to `dtype`."""
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        update = self.lora_B.detach().to(wide) @ self.lora_A.detach().to(wide)
        return torch.add(self.weight.detach().to(wide), update, alpha=self.scale).to(dtype)


def add_adapters(model: LoadedModel, config: LoraConfig, *, base_dtype: torch.dtype, seed: int) -> None:
    """Freeze the model in `base_dtype`, and give the layers that `config.targets` names an adapter each, in the dtype
    the model had.

    Raises:
        ConfigError: a target is the name of no linear layer.
    """
    module, dtype = model.module, model.dtype
    linear = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    head: Any = module
    own = {name: m for name, m in linear.items() if m is not head.get_output_embeddings()}
    known = {name.rpartition(".")[2] for name in own}
    for target in config.targets:
        if target not in known:
            raise ConfigError(
                f"model.lora.targets names {target!r}, and {model.source} has no such linear layer",
                nearest_name(target, known),
            )
    module.requires_grad_(False)
    module.to(base_dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, layer in own.items():
        if name.rpartition(".")[2] not in config.targets:
            continue
        down = torch.empty(config.rank, layer.in_features).uniform_(-1, 1, generator=generator)
        down *= (3 / layer.in_features) ** 0.5  # each of A x has the size of x's elements
        device = layer.weight.device
        layer.__class__ = AdaptedLinear
        assert isinstance(layer, AdaptedLinear)
        layer.lora_A = nn.Parameter(down.to(device=device, dtype=dtype))
        layer.lora_B = nn.Parameter(torch.zeros(layer.out_features, config.rank, device=device, dtype=dtype))
        layer.scale, layer.stand_in = config.alpha / config.rank, None
    model.lora = config


def adapted(module: nn.Module) -> dict[str, AdaptedLinear]:
    """Layers with an adapter, by name."""
    return {name: layer for name, layer in module.named_modules() if isinstance(layer, AdaptedLinear)}


def adapter_tensors(model: LoadedModel) -> dict[str, Tensor]:
    """The adapters' parameters by name."""
    return {n: t for n, t in model.named_tensors().items() if n.rpartition(".")[2] in (DOWN, UP)}


def base_digest(model: LoadedModel) -> str:
    """Of the tensors that the adapters stand on: nothing changes them, no checkpoint holds them, and where adapters are
    published alone no publication carries them."""
    found = hashlib.sha256()
    for name, tensor in model.named_tensors().items():
        if not tensor.requires_grad and tensor.numel():
            of_values = int(torch.hash_tensor(tensor).view(torch.int64))
            found.update(f"{name} {tensor.dtype} {list(tensor.shape)} {of_values}\n".encode())
    return found.hexdigest()[:16]


def exported(model: LoadedModel, dtype: torch.dtype, *, merge: bool) -> Iterator[tuple[str, Tensor]]:
    """What stands for the policy outside: the merged tensors under the base's names, one made at a time, or the
    adapters alone."""
    if not merge:
        for name, tensor in adapter_tensors(model).items():
            yield name, tensor.detach().to(dtype)
        return
    layers = adapted(model.module)
    for name, tensor in model.named_tensors().items():
        owner, _, key = name.rpartition(".")
        if key in (DOWN, UP):
            continue
        layer = layers.get(owner) if key == "weight" else None
        yield name, tensor.detach().to(dtype) if layer is None else layer.merged(dtype)


def without_adapters(model: LoadedModel) -> LoadedModel:
    """A module tree of its own over the base's very memory: the shape of an engine that takes merged weights."""
    module = copy.deepcopy(model.module, {id(p): p for p in model.module.parameters()})
    for layer in adapted(module).values():
        del layer.lora_A, layer.lora_B
        layer.__class__ = nn.Linear  # type: ignore[assignment]
    return dataclasses.replace(model, module=module, lora=None)


@contextmanager
def computing_with(module: nn.Module, adapters: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the layers use these adapters instead of their own; gradients don't reach them."""
    layers = adapted(module)
    try:
        for name, layer in layers.items():
            layer.stand_in = adapters[f"{name}.{DOWN}"], adapters[f"{name}.{UP}"]
        yield
    finally:
        for layer in layers.values():
            layer.stand_in = None
