"""CUDA memory shared between two processes of one host: the engine reads the trainer's bucket on the device.

The slots are device buffers that live as long as the sender. Their CUDA IPC handles cross once, as bytes in
base64; the engine opens a handle once and keeps the mapping. Between two GPUs the copy out of the mapping goes over
NVLink or PCIe. Needs plain allocations: PyTorch's expandable segments cannot be shared this way.
"""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.transport import Receiver, Sender, announced, wait_until_packed
from rollbook.sync.wire import Json, field
from rollbook.weights import Bucket


class IpcSender(Sender):
    """The trainer's half: slots on the device of the exported tensors."""

    is_quick = True

    def __init__(self) -> None:
        self._slots: dict[int, tuple[Tensor, Json]] = {}

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        held = self._slots.get(slot_idx)
        if held is None or held[0].numel() < num_bytes:
            if device.type != "cuda":
                raise SyncError(
                    f"the ipc transport was to pack into memory of {device}",
                    'export from a CUDA device, or use sync.transport = "shm"',
                )
            slot = torch.empty(num_bytes, dtype=torch.uint8, device=device)
            held = self._slots[slot_idx] = (slot, _handle_of(slot, slot_idx))
        return held[0][:num_bytes]

    def announce(self, bucket: Bucket) -> Json:
        assert bucket.data is not None
        wait_until_packed(bucket)
        address = bucket.data.untyped_storage().data_ptr()
        for slot, handle in self._slots.values():
            if slot.untyped_storage().data_ptr() == address:
                return {**handle, "num_bytes": bucket.data.numel()}
        raise SyncError(
            "a bucket does not lie in a shared slot", "pass this sender's `buffer` to the Publisher"
        )

    def close(self) -> None:
        self._slots.clear()


class IpcReceiver(Receiver):
    """The engine's half. Both processes must number the GPUs alike (CUDA_VISIBLE_DEVICES)."""

    is_quick = True

    def __init__(self) -> None:
        self._slots: dict[int, tuple[str, Tensor]] = {}

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        slot_idx, handle = field(place, "slot_idx", int), field(place, "handle", str)
        held = self._slots.get(slot_idx)
        if held is None or held[0] != handle:
            self._slots.pop(slot_idx, None)
            held = self._slots[slot_idx] = (handle, self._opened(place))
        return replace(bucket, data=announced(held[1], bucket, place))

    def _opened(self, place: Json) -> Tensor:
        fields: tuple[Any, ...] = (
            field(place, "device", int),
            _bytes(place, "handle"),
            field(place, "storage_bytes", int),
            field(place, "storage_offset_bytes", int),
            _bytes(place, "ref_counter_handle"),
            field(place, "ref_counter_offset", int),
            _bytes(place, "event_handle"),
            field(place, "event_sync_required", bool),
        )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        try:
            with torch.cuda.device(fields[0]):
                storage = torch.UntypedStorage._new_shared_cuda(*fields)
        except RuntimeError as error:
            raise SyncError(
                f"the trainer's CUDA memory cannot be opened: {str(error).splitlines()[0]}",
                "trainer and engine must run on one host and see the same GPUs; PyTorch's expandable segments "
                "cannot be shared (PYTORCH_ALLOC_CONF)",
            ) from error
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def close(self) -> None:
        self._slots.clear()


def _handle_of(slot: Tensor, slot_idx: int) -> Json:
    names = (
        *("device", "handle", "storage_bytes", "storage_offset_bytes", "ref_counter_handle"),
        *("ref_counter_offset", "event_handle", "event_sync_required"),
    )
    shared = slot.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    handle = dict(zip(names, shared, strict=True))
    text = {
        name: base64.b64encode(value).decode() for name, value in handle.items() if isinstance(value, bytes)
    }
    return {**handle, **text, "slot_idx": slot_idx}


def _bytes(place: Json, name: str) -> bytes:
    try:
        return base64.b64decode(field(place, name, str), validate=True)
    except ValueError:
        raise SyncError(
            f"field {name!r} of a message is not base64", "look at who talks to this port"
        ) from None
