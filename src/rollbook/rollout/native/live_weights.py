"""The engine's live parameters, addressed by Hugging Face names: what a publication writes and proves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollbook.errors import SyncError, nearest_name
from rollbook.modeling.load import LoadedModel
from rollbook.weights import TensorSpec


class NativeWeights:
    """`LiveWeights` over the engine's model: its parameters and saved buffers, tied tensors once. Of a model whose
    adapters alone are published: those."""

    def __init__(self, model: LoadedModel) -> None:
        shapes = model.published_shapes()
        self._tensors = {name: tensor for name, tensor in model.named_tensors().items() if name in shapes}
        self._specs = {
            name: TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                num_bytes=tensor.numel() * tensor.element_size(),
            )
            for name, tensor in self._tensors.items()
        }

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy `tensor` into the live parameter; nothing is copied when it is that parameter's own memory.

        Raises:
            SyncError: unknown name, or another shape or dtype.
        """
        live = self._named(name)
        if tensor.shape != live.shape or tensor.dtype != live.dtype:
            raise SyncError(
                f"{name}: the publication carries {tuple(tensor.shape)} {tensor.dtype}, the engine holds "
                f"{tuple(live.shape)} {live.dtype}",
                "export weights in the engine's dtype, from the same model config",
            )
        if _same_memory(live, tensor):
            return
        with torch.no_grad():
            live.copy_(tensor)

    def read(self, name: str) -> Tensor:
        """The live tensor itself.

        Raises:
            SyncError: unknown name.
        """
        return self._named(name)

    def _named(self, name: str) -> Tensor:
        held = self._tensors.get(name)
        if held is None:
            raise SyncError(f"the engine has no tensor {name!r}", nearest_name(name, self._tensors))
        return held.detach()


def _same_memory(live: Tensor, tensor: Tensor) -> bool:
    return (
        live.device == tensor.device
        and live.data_ptr() == tensor.data_ptr()
        and live.stride() == tensor.stride()
        and live.numel() > 0
    )
