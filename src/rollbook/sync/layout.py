"""An engine's parameters under Hugging Face names: renamed, fused, stacked, padded, tied, or cut over ranks.

`MappedWeights` is the `LiveWeights` for every engine whose parameters can be described by a table of places.
The table is checked once, when it is made: each element of each parameter belongs to exactly one Hugging Face
tensor or to declared padding, so that a publication that fills every place has filled the engine.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.weights import TensorSpec

Box = tuple[slice, ...]
"""A rectangle in a tensor: one slice per dimension; fewer slices take the rest whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one Hugging Face tensor lies in an engine's parameters."""

    parameter: str
    box: Box = ()
    """The part of the parameter it fills; () is all of it."""
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face tensor."""
    part: Box = ()
    """The part of the tensor this rank holds (tensor parallelism); () is all of it."""


class MappedWeights:
    """Live parameters addressed by Hugging Face names through a table of places."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        places: Mapping[str, Place],
        *,
        dropped: Collection[str] = (),
        padding: Mapping[str, Sequence[Box]] | None = None,
    ) -> None:
        """
        Args:
            parameters: the engine's own tensors, updated in place.
            places: Hugging Face name -> place, for every tensor a publication must carry.
            dropped: names a publication may carry and the engine has no use for (a tied head, an unused tower).
            padding: parameter -> boxes that no tensor fills (padded vocabulary rows).
        Raises:
            SyncError: an element of a parameter belongs to no tensor, or to two.
        """
        self.parameters = dict(parameters)
        self.places = dict(places)
        self.dropped = frozenset(dropped)
        self._num_places = Counter(place.parameter for place in places.values())
        self._check_cover(padding or {})
        self._specs = self._make_specs()

    def specs(self) -> Mapping[str, TensorSpec]:
        return self._specs

    def _make_specs(self) -> dict[str, TensorSpec]:
        specs = {}
        for name, place in self.places.items():
            dtype = self.parameters[place.parameter].dtype
            num_bytes = int(np.prod(place.shape, dtype=np.int64)) * dtype.itemsize
            specs[name] = TensorSpec(
                name=name, shape=place.shape, dtype=str(dtype).removeprefix("torch."), num_bytes=num_bytes
            )
        return specs

    def read(self, name: str) -> Tensor:
        """A view of the live bytes of `name`; of the part this rank holds, where the tensor is cut."""
        place = self.places[name]
        view = self.parameters[place.parameter].detach()[place.box]
        return view if place.part else view.view(place.shape)

    def write(self, name: str, tensor: Tensor) -> None:
        """Copy the whole Hugging Face tensor (the part this rank holds of it) into the parameters."""
        target = self.read(name)
        target.copy_(self.part(name, tensor).view(target.shape))

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """What `read` returns after `tensor` was written."""
        return tensor[self.places[name].part]

    def is_cut(self, name: str) -> bool:
        """True when this rank holds only a part of the tensor."""
        return bool(self.places[name].part)

    def kind(self, name: str) -> str:
        """ "matched", "renamed" (another name in the engine) or "fused" (shares its parameter)."""
        place = self.places[name]
        if self._num_places[place.parameter] > 1:
            return "fused"
        return "matched" if place.parameter == name else "renamed"

    def _check_cover(self, padding: Mapping[str, Sequence[Box]]) -> None:
        boxes: dict[str, list[Box]] = defaultdict(list)
        for name, place in self.places.items():
            if place.parameter not in self.parameters:
                raise SyncError(
                    f"{name} is placed in {place.parameter!r}, which the engine does not have",
                    "the table of places was made for another model: build it from this engine's parameters",
                )
            boxes[place.parameter].append(place.box)
        for parameter, more in padding.items():
            boxes[parameter] += more
        for name, tensor in self.parameters.items():
            least, most = _cover_counts(tuple(tensor.shape), boxes[name])
            if least < 1 or most > 1:
                fault = "belong to no tensor" if least < 1 else "belong to two tensors"
                raise SyncError(
                    f"elements of the engine's parameter {name} {fault}",
                    "place every Hugging Face tensor exactly once, and declare padding as padding",
                )


def _cover_counts(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[int, int]:
    """How often the least and the most covered element is covered, on the grid of all box edges."""
    spans = []
    for box in boxes:
        whole = (*box, *(slice(None),) * (len(shape) - len(box)))
        spans.append([s.indices(n)[:2] for s, n in zip(whole, shape, strict=True)])
    edges = [sorted({0, n} | {edge for span in spans for edge in span[dim]}) for dim, n in enumerate(shape)]
    counts = np.zeros([max(1, len(e) - 1) for e in edges], np.int32)
    for span in spans:
        counts[tuple(slice(e.index(lo), e.index(hi)) for e, (lo, hi) in zip(edges, span, strict=True))] += 1
    return int(counts.min()), int(counts.max())
