"""How the bytes of a bucket get from the trainer's process into the engine's.

A transport has two halves, one file each pair. The `Sender` owns the buffers that buckets are packed into and
says, as JSON, where a bucket's bytes are (`announce`); the `Receiver` turns that into a bucket with data. Messages
travel over `remote.py`'s connection. This file holds the halves' protocols and the simplest pair: the bytes travel
in the message itself.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from rollbook.errors import SyncError
from rollbook.sync.bucket import MAX_SLOTS, SlotBuffers
from rollbook.sync.wire import Json, field
from rollbook.weights import Bucket, Receiving


class Sender(Protocol):
    """The trainer's half, shared by the ports of all replicas. Its methods are called from one thread at a time. What a
    transport has nothing to do for stays as it is here."""

    @property
    def is_quick(self) -> bool:
        """`announce` and `transfer` take no time worth another thread."""

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        """[num_bytes] uint8 to pack into; pass it to the `Publisher` as `buffers`."""

    def announce(self, bucket: Bucket) -> Json:
        """Where the bytes are. Called once per replica; costly work is done once per bucket."""

    def payload(self, bucket: Bucket) -> Tensor | None:
        """Bytes to send in the message itself, on the host."""
        return None

    def transfer(self, bucket: Bucket) -> Future[Json] | None:
        """Begin what has to run while the replicas read the message (a collective); once per bucket."""
        return None

    def missed(self, bucket: Bucket) -> None:
        """A replica did not take the bucket: it failed, or its deadline passed."""
        return

    def close(self) -> None:
        return None


class Receiver(Protocol):
    """The engine's half. `take` may block: it runs on a thread of the connection."""

    @property
    def is_quick(self) -> bool:
        """`take` only looks something up: another thread would cost more than it."""

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        """The bucket with its data; `bucket.data` holds the message's payload.

        Raises:
            SyncError: the place does not exist, or does not hold what the bucket says.
        """

    def close(self) -> None:
        return None


class Once:
    """Runs work once per bucket of a publication however many replicas ask for it, and gives all of them its outcome,
    an error too. Another attempt at the same version is another publication."""

    def __init__(self) -> None:
        self._outcomes: dict[tuple[int, int], Future[Json]] = {}
        self._lock = threading.Lock()

    def run(self, bucket: Bucket, begin: Callable[[], Future[Json]]) -> Future[Json]:
        key = (bucket.attempt, bucket.bucket_idx)
        with self._lock:
            outcome = self._outcomes.get(key)
            if outcome is None:
                outcome = self._outcomes[key] = begin()
                for old in list(self._outcomes)[: -2 * MAX_SLOTS]:
                    del self._outcomes[old]
        return outcome


def settled(answer: Json) -> Future[Json]:
    """An outcome that is there already."""
    outcome: Future[Json] = Future()
    outcome.set_result(answer)
    return outcome


async def arrived(receiving: Receiving) -> None:
    """Wait on the event loop for what a port's `receive` gave: for a port that stands around another one."""
    if isinstance(receiving, Coroutine):
        await receiving
    else:
        await asyncio.to_thread(receiving.result)


def wait_until_packed(bucket: Bucket) -> None:
    """For whoever reads the bytes from the host, or tells another process of them."""
    if bucket.ready is not None:
        bucket.ready.synchronize()


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


class InlineSender(Sender):
    """Bytes in the message: needs nothing but the connection, and pays for copies through the socket."""

    is_quick = False

    def __init__(self) -> None:
        self._buffers = SlotBuffers()

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        return self._buffers(slot_idx, num_bytes, torch.device("cpu"))

    def announce(self, bucket: Bucket) -> Json:
        wait_until_packed(bucket)
        return {}

    def payload(self, bucket: Bucket) -> Tensor | None:
        return bucket.data


class InlineReceiver(Receiver):
    is_quick = True

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        return replace(bucket)
