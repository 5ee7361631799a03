"""The ranks that train one policy together, and what they tell each other.

    batch ──► every rank, whole ──► deal_micro_batches ──► its own micro batches ──► gradients, summed by FSDP2
    parameter ──► rows 0..n/N of rank 0 │ ... │ rows of rank N-1        gradient, moments and masters likewise

Every rank is given the same batch and works out the same division of it, so counts of a mini batch are global without a
message. What a rank computes is added, never averaged. All ranks make the same calls in the same order; a rank that has
less to do computes fillers. Without a group there is one rank, and nothing of torch.distributed is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from rollbook.errors import DataError
from rollbook.modeling.load import LoadedModel
from rollbook.observe.values import Last, Low, Peak, Ratio, Total, Value, Values, merge
from rollbook.types import Floats

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

KINDS: dict[str, type[Value]] = {kind.__name__: kind for kind in (Ratio, Total, Peak, Low, Last)}


class Ranks:
    """One rank's view of all of them.

    Args:
        group: of `torch.distributed`, made by the caller (gloo on CPUs, NCCL on GPUs); None: this process alone.
        device: where this rank computes, "cpu", "cuda" or "cuda:N".
    """

    def __init__(self, group: ProcessGroup | None = None, device: str | torch.device = "cpu") -> None:
        self.group = group
        self.device = torch.device(device)
        self.rank, self.size = 0, 1
        self._mesh: Any = None
        if group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            self.rank, self.size = group.rank(), group.size()
            self._mesh = DeviceMesh.from_group(group, self.device.type)

    @property
    def is_alone(self) -> bool:
        return self.group is None

    # ---- parameters

    def shard(self, model: LoadedModel, compute_dtype: torch.dtype) -> None:
        """Divide the parameters of `model` among the ranks, in place; each layer is whole only while it computes.

        Parameters keep their dtype (float32 master weights) and are gathered in `compute_dtype`; gradients are summed
        in float32. The model must lie on one device, the same weights on every rank.
        """
        if self.is_alone:
            return
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        first = next(model.module.parameters())
        wide = torch.promote_types(compute_dtype, torch.float32)
        casts = first.dtype != compute_dtype
        precision = MixedPrecisionPolicy(
            param_dtype=compute_dtype if casts else None,
            reduce_dtype=wide if wide != compute_dtype else None,
            cast_forward_inputs=False,
        )
        entry = EntryPoint(model.module)
        for layer in _layers(model):
            fully_shard(layer, mesh=self._mesh, mp_policy=precision)
        fully_shard(entry, mesh=self._mesh, mp_policy=precision, reshard_after_forward=False)
        for module in entry.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        model.entry, model.compute_dtype = entry, compute_dtype

    def release(self, *models: LoadedModel | None) -> None:
        """Drop what a forward pass without a backward pass has left whole."""
        if self.is_alone:
            return
        for model in models:
            if model is not None and model.entry is not None:
                model.entry.reshard()  # type: ignore[operator]

    def local(self, tensor: Tensor) -> Tensor:
        """The rows that this rank holds, sharing memory; a tensor that is not divided itself."""
        return tensor.to_local() if self.is_sharded(tensor) else tensor  # type: ignore[attr-defined]

    def is_sharded(self, tensor: Tensor) -> bool:
        if self.is_alone:
            return False
        from torch.distributed.tensor import DTensor

        return isinstance(tensor, DTensor)

    def own_rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a whole tensor, as a view."""
        first, last = row_bounds(whole.shape[0], self.size)[self.rank]
        return whole[first:last]

    def whole(self, local: Tensor, like: Tensor) -> Tensor:
        """Of rows divided as those of `like`: the whole on rank 0, on its host; an empty tensor on the others."""
        if not self.is_sharded(like):
            return local
        num_rows, rest = like.shape[0], tuple(like.shape[1:])
        most = -(-num_rows // self.size)
        padded = torch.zeros((most, *rest), dtype=local.dtype, device=self.device)
        padded[: local.shape[0]].copy_(local)
        gathered = torch.empty((self.size * most, *rest), dtype=local.dtype, device=self.device)
        self.gather_into(gathered.view(-1), padded.view(-1))
        if self.rank:
            return torch.empty(0, dtype=local.dtype)
        rows = row_bounds(num_rows, self.size)
        parts = [gathered[r * most : r * most + last - first] for r, (first, last) in enumerate(rows)]
        return torch.cat(parts).cpu()

    # ---- numbers

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add the ranks' tensors, in place."""
        if not self.is_alone:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.group)
        return tensor

    def require_same(self, what: str, numbers: Sequence[int]) -> None:
        """
        Raises:
            DataError: the ranks are not about to do the same; on every rank, before anything hangs.
        """
        if self.is_alone:
            return
        mine = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        rows = self._gather(mine).tolist()
        if any(row != rows[0] for row in rows):
            told = "; ".join(f"rank {r}: {row}" for r, row in enumerate(rows))
            raise DataError(
                f"the ranks do not agree on {what}: {told}",
                "every rank must be given the same batch, config and call",
            )

    def merged(self, values: Values) -> Values:
        """The readings of all ranks, reduced by their kinds, in the order of the ranks."""
        if self.is_alone:
            return values
        fields = {n: [type(v).__name__, *(getattr(v, f) for f in v.__slots__)] for n, v in values.items()}
        out: Values = {}
        for text in self._exchange_bytes(json.dumps(fields).encode()):
            read = json.loads(text)
            merge(out, {name: KINDS[kind](*numbers) for name, (kind, *numbers) in read.items()})
        return out

    def exchange(self, rows: Mapping[int, Floats]) -> dict[int, Floats]:
        """Arrays by index: every rank gets those of all."""
        if self.is_alone:
            return dict(rows)
        head = np.array([[i, len(row)] for i, row in rows.items()], np.int64)
        body = np.concatenate([np.zeros(0, np.float32), *rows.values()]).astype(np.float32, copy=False)
        out: dict[int, Floats] = {}
        heads = self._exchange_bytes(head.tobytes())
        for told, text in zip(heads, self._exchange_bytes(body.tobytes())):
            pairs = np.frombuffer(told, np.int64).reshape(-1, 2)
            bounds = np.cumsum(pairs[:, 1])[:-1]
            parts = np.split(np.frombuffer(text, np.float32), bounds) if len(pairs) else []
            out.update(zip(pairs[:, 0].tolist(), (part.copy() for part in parts)))
        return out

    def _exchange_bytes(self, mine: bytes) -> list[bytes]:
        """What every rank has to say, in their order."""
        length = torch.tensor([len(mine)], dtype=torch.int64, device=self.device)
        lengths = self._gather(length).flatten().tolist()
        padded = torch.zeros(max(*lengths, 1), dtype=torch.uint8, device=self.device)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = self._gather(padded).cpu().numpy()
        return [rows[r, :n].tobytes() for r, n in enumerate(lengths)]

    def _gather(self, tensor: Tensor) -> Tensor:
        """[size, *shape] of a tensor with the same shape on every rank."""
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=self.device)
        self.gather_into(out.view(-1), tensor.contiguous().view(-1))
        return out

    def gather_into(self, out: Tensor, mine: Tensor) -> None:
        """[size * n] from every rank's [n], in their order."""
        import torch.distributed as dist

        gather = getattr(dist, "all_gather_single", None)  # its name from torch 2.13 on
        gather = gather or dist.all_gather_into_tensor
        # As bytes: some backends lack some dtypes.
        gather(out.view(torch.uint8), mine.view(torch.uint8), group=self.group)


ALONE = Ranks()
"""One process."""


class EntryPoint(nn.Module):
    """Root of a divided model: embedding, last norm and output head are whole from here to the end of the backward
    pass, so that the head may be read outside of any forward."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **arguments: Any) -> Tensor:
        base: Any = self.module.base_model
        hidden: Tensor = base(**arguments).last_hidden_state
        return hidden


def row_bounds(num_rows: int, num_ranks: int) -> list[tuple[int, int]]:
    """First and last row (exclusive) of each rank: equal shares, the last ones shorter or empty.

    >>> row_bounds(5, 4)
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    most = -(-num_rows // num_ranks)
    return [(min(r * most, num_rows), min((r + 1) * most, num_rows)) for r in range(num_ranks)]


def _layers(model: LoadedModel) -> list[nn.Module]:
    """The decoder's layers: gathered one at a time. None found: the model is gathered as one."""
    base: Any = model.module.base_model
    for module in base.modules():
        if isinstance(module, nn.ModuleList) and len(module) == model.facts.num_layers:
            return list(module)
    return []
