"""Tensors that leave a device for a while and come back into the same tensors.

Pinning is slow (about 1.6 GB/s) and page-locked copies are fast (about 55 GB/s), so each owner's host buffer is
pinned once and reused for the rest of the run. What moves is the storage under the tensors: parameters, optimizer
states and views of them stay the same Python objects, and nobody has to look them up again.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable

import torch
from torch import Tensor

from rollbook.errors import RunError

ALIGN_BYTES = 512


class Parking:
    """The tensors of one owner, on their device or in one host buffer.

    Args:
        name: for messages, e.g. "optimizer moments".
        tensors: contiguous storages of one device; two views of one storage move it once.
        is_constant: nobody writes them, so the first copy on the host stays good and later ones are not made.
    """

    def __init__(self, name: str, tensors: Iterable[Tensor], *, is_constant: bool = False) -> None:
        self.name = name
        self.is_constant = is_constant
        storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage
        self._storages = list(storages.values())
        self._place = {storage._cdata: place for place, storage in enumerate(self._storages)}
        """By identity: the address of a storage is gone while it is parked."""
        self._sizes = [storage.nbytes() for storage in self._storages]
        room = [-(-size // ALIGN_BYTES) * ALIGN_BYTES for size in self._sizes]
        *self._starts, self._room = itertools.accumulate(room, initial=0)
        devices = {storage.device for storage in self._storages}
        if len(devices) > 1:
            raise RunError(
                f"{name} lies on {', '.join(sorted(map(str, devices)))}",
                "park the tensors of one device at a time",
            )
        self.device = devices.pop() if devices else torch.device("cpu")
        self.num_bytes = sum(self._sizes)
        self.is_parked = False
        self.pin_s = 0.0
        """Seconds spent on pinning, once."""
        self._host: Tensor | None = None
        self._is_good = False
        """The host buffer holds what the tensors hold."""

    def pin(self) -> None:
        """Allocate the host buffer now rather than inside the first hand-over."""
        if self._host is None:
            began_at_s = time.perf_counter()
            self._host = torch.empty(self._room, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
            self.pin_s = time.perf_counter() - began_at_s

    def to_host(self) -> int:
        """Copy everything to the host and give the device's memory back to the allocator. Returns the bytes copied."""
        if self.is_parked:
            return 0
        needs_copy = self._host is None or not self._is_good
        if needs_copy:
            self.pin()
            for storage, slot in self._slots():
                slot.copy_(_as_bytes(storage), non_blocking=True)
            self._finish()
            self._is_good = self.is_constant
        for storage in self._storages:
            storage.resize_(0)
        self.is_parked = True
        return self.num_bytes if needs_copy else 0

    def to_device(self) -> int:
        """Allocate again and copy back, into the same tensors; returns the bytes. One is allocated while the one before
        travels."""
        if not self.is_parked:
            return 0
        for storage, slot in self._slots():
            storage.resize_(slot.numel())
            _as_bytes(storage).copy_(slot, non_blocking=True)
        self._finish()
        self.is_parked = False
        return self.num_bytes

    def readable(self, tensor: Tensor) -> Tensor:
        """The tensor itself, or, while it is parked, its values where they lie in the host buffer."""
        place = self._place.get(tensor.untyped_storage()._cdata)
        if place is None or not self.is_parked:
            return tensor
        assert self._host is not None
        offset = self._starts[place] // tensor.itemsize + tensor.storage_offset()
        held = torch.empty(0, dtype=tensor.dtype)
        return held.set_(self._host.untyped_storage(), offset, tensor.shape, tensor.stride())

    def _slots(self) -> Iterable[tuple[torch.UntypedStorage, Tensor]]:
        assert self._host is not None
        for storage, start, size in zip(self._storages, self._starts, self._sizes, strict=True):
            yield storage, self._host[start : start + size]

    def _finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
