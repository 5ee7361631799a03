"""How the bytes of a bucket get from the trainer's process into the engine's.

A transport has two halves, one file each pair. The `Sender` owns the buffers that buckets are packed into and
says, as JSON, where a bucket's bytes are (`announce`); the `Receiver` turns that into a bucket with data. Messages
travel over `remote.py`'s connection. This file holds the halves' protocols and the simplest pair: the bytes travel
in the message itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.bucket import MAX_SLOTS, SlotBuffers
from rollbook.sync.wire import Json, field
from rollbook.weights import Bucket


class Sender(Protocol):
    """The trainer's half, shared by the ports of all replicas."""

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        """[num_bytes] uint8 to pack into; pass it to the `Publisher` as `buffers`."""

    async def announce(self, bucket: Bucket) -> Json:
        """Where the bytes are. Called once per replica; costly work is done once per bucket."""

    def payload(self, bucket: Bucket) -> Tensor | None:
        """Bytes to send in the message itself, on the host."""

    async def transfer(self, bucket: Bucket) -> None:
        """What has to run while the replicas read the message (a collective); once per bucket."""

    def missed(self, bucket: Bucket) -> None:
        """A replica did not take the bucket: it failed, or its deadline passed."""

    def close(self) -> None: ...


class Receiver(Protocol):
    """The engine's half. `take` may block: it runs on a worker thread."""

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        """The bucket with its data; `bucket.data` holds the message's payload.

        Raises:
            SyncError: the place does not exist, or does not hold what the bucket says.
        """

    def close(self) -> None: ...


class Once:
    """Runs work once per bucket of a publication however many replicas ask for it, and gives all of them its outcome.

    The same version may be published again: to a replica that missed it, or after a publication that failed.
    """

    def __init__(self) -> None:
        self._tasks: dict[tuple[int, int], asyncio.Future[Json]] = {}

    async def run(self, bucket: Bucket, work: Callable[[], Awaitable[Json]]) -> Json:
        key = (bucket.attempt, bucket.bucket_idx)
        task = self._tasks.get(key)
        if task is None or _has_failed(task):
            task = self._tasks[key] = asyncio.ensure_future(work())
            for old in list(self._tasks)[: -2 * MAX_SLOTS]:
                del self._tasks[old]
        return await asyncio.shield(task)  # one replica's deadline does not end it for the others


def _has_failed(task: asyncio.Future[Json]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


def announced(slot: Tensor, bucket: Bucket, place: Json) -> Tensor:
    """The bucket's bytes in its slot.

    Raises:
        SyncError: more bytes are announced than the slot has.
    """
    num_bytes = field(place, "num_bytes", int)
    if not 0 <= num_bytes <= slot.numel():
        raise SyncError(
            f"bucket {bucket.bucket_idx} was announced with {num_bytes} bytes in a slot of {slot.numel()}",
            "use the same sync.bucket_bytes on both sides",
        )
    return slot[:num_bytes]


class InlineSender:
    """Bytes in the message: needs nothing but the connection, and pays for copies through the socket."""

    def __init__(self) -> None:
        self._buffers = SlotBuffers()

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        return self._buffers(slot_idx, num_bytes, torch.device("cpu"))

    async def announce(self, bucket: Bucket) -> Json:
        return {}

    def payload(self, bucket: Bucket) -> Tensor | None:
        return bucket.data

    async def transfer(self, bucket: Bucket) -> None:
        return None

    def missed(self, bucket: Bucket) -> None:
        return None

    def close(self) -> None:
        return None


class InlineReceiver:
    def take(self, bucket: Bucket, place: Json) -> Bucket:
        return replace(bucket)

    def close(self) -> None:
        return None
