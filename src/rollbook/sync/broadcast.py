"""Buckets to many replicas at once by a collective: NCCL between GPUs, gloo between hosts' memories.

The group is built for weight publications alone (trainer's rank 0, replicas behind it) and is independent of the
trainer's own groups. A bucket is announced over each replica's connection; sender and receivers then meet in one
broadcast. Only all of them can meet: a bucket for some of the replicas (a re-sync, or what is left of a publication)
travels in each one's message instead. A replica that dies inside the collective takes the group with it: the others
miss their deadline and all are quarantined. From the next publication on every bucket travels in messages, until the
group is built anew (`BroadcastGroup.create`).
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Literal, Protocol, cast

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, FileStore, ProcessGroupGloo, Store, TCPStore, Work

from rollbook.errors import SyncError
from rollbook.sync.bucket import MAX_SLOTS, SlotBuffers
from rollbook.sync.transport import Once, Receiver, Sender, settled, wait_until_packed
from rollbook.sync.wire import Json, field
from rollbook.weights import Bucket

TRAINER_RANK = 0

WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",  # the group's collectives are given up; 3, the default, ends the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # Between the deadline and its giving up torch looks up a stack, which took 5 to 20 s the first time, writes a dump
    # that nobody reads, and sleeps four times as long as that may take: 60 s by default. So 1 s in all.
    "TORCH_FR_BUFFER_SIZE": "0",
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "0",  # its older name
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",
}
"""How torch is to treat an NCCL collective that some rank never came to, when the group's deadline is over. It reads
the environment when a group is made: whoever calls `BroadcastGroup.create` sets these."""


class Collective(Protocol):
    """What is used of torch's process groups; its stubs leave it out."""

    def broadcast(self, tensors: list[Tensor], options: BroadcastOptions, /) -> Work: ...
    def size(self) -> int: ...


class BroadcastGroup:
    """One process group for publications: rank 0 sends, the others receive on `device`."""

    def __init__(self, group: object, device: torch.device, rank: int) -> None:
        self.group = cast(Collective, group)
        self.device = device
        self.rank = rank
        self.has_met = False
        """NCCL's ranks wait for each other in their first broadcast; later ones are queued without a wait."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @classmethod
    def create(
        cls,
        backend: Literal["nccl", "gloo"],
        *,
        rank: int,
        size: int,
        device: torch.device,
        deadline_s: float,
        host: str = "127.0.0.1",
        port: int = 0,
        file: str = "",
    ) -> BroadcastGroup:
        """Meet the other ranks; blocks until all `size` are there.

        Args:
            deadline_s: for the meeting, and for each collective. Over NCCL one that is not complete by then is given
                up on the device (with `WATCHDOG`), and what it should have brought does not stand its digests.
            file: path of a file that does not exist yet, for ranks of one host; else `host` and `port` of rank 0.
        """
        timeout = timedelta(seconds=deadline_s)
        store: Store = (
            FileStore(file, size) if file else TCPStore(host, port, size, rank == TRAINER_RANK, timeout)
        )
        if backend == "nccl":
            from torch.distributed import ProcessGroupNCCL  # CUDA builds only

            with torch.cuda.device(device):
                options = ProcessGroupNCCL.Options()
                options._timeout = timeout
                return cls(ProcessGroupNCCL(store, rank, size, options), device, rank)
        return cls(ProcessGroupGloo(store, rank, size, timeout), device, rank)

    def broadcast(self, data: Tensor) -> float:
        """Take part in one broadcast of [bytes] uint8; returns its seconds."""
        began_at_s = time.perf_counter()
        arrived = self.begin(data)
        if arrived is not None:
            arrived.synchronize()
            self.has_met = True
        return time.perf_counter() - began_at_s

    def begin(self, data: Tensor, ready: torch.cuda.Event | None = None) -> torch.cuda.Event | None:
        """Take part in one broadcast. On a device it is only queued, on a stream of its own that neither waits for the
        engine's or the trainer's kernels nor makes them wait.

        Args:
            ready: `data` is whole once the device has come to this point.
        Returns:
            What to wait for; None when it is over.
        """
        options = BroadcastOptions()
        options.rootRank = TRAINER_RANK
        if self._stream is None:
            if ready is not None:
                ready.synchronize()
            self.group.broadcast([data], options).wait()
            return None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            self.group.broadcast([data], options).wait()
            queued: torch.cuda.Event = self._stream.record_event()
            return queued


class BroadcastSender(Sender):
    """The trainer's half: one broadcast per bucket. On a device they are queued in the order of the buckets; others run
    on a thread of their own, so that collectives keep their order."""

    is_quick = True

    def __init__(self, group: BroadcastGroup) -> None:
        self._group = group
        self._buffers = SlotBuffers()
        self._slot_of: dict[int, int] = {}
        self._once = Once()
        self._last_attempt: int | None = None
        """Publication in which the group broke."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="broadcast")
        self._waited_for: Future[Json] | None = None
        """The last broadcast on that thread."""

    def buffer(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        data = self._buffers(slot_idx, num_bytes, self._group.device)
        self._slot_of[data.data_ptr()] = slot_idx
        return data

    def announce(self, bucket: Bucket) -> Json:
        assert bucket.data is not None
        if not self._meets_all(bucket):
            wait_until_packed(bucket)
            return {"is_inline": True}
        return {"num_bytes": bucket.data.numel(), "slot_idx": self._slot_of[bucket.data.data_ptr()]}

    def payload(self, bucket: Bucket) -> Tensor | None:
        return None if self._meets_all(bucket) else bucket.data

    def transfer(self, bucket: Bucket) -> Future[Json] | None:
        if not self._meets_all(bucket):
            return None
        data, group = bucket.data, self._group
        assert data is not None

        def begin() -> Future[Json]:
            if group.has_met and (self._waited_for is None or self._waited_for.done()):
                group.begin(data, bucket.ready)  # the replicas' answers tell when it is over
                return settled({})
            self._waited_for = self._thread.submit(meet)  # behind those that wait there: one order everywhere
            return self._waited_for

        def meet() -> Json:
            wait_until_packed(bucket)
            return {"seconds": group.broadcast(data)}

        return self._once.run(bucket, begin)

    def missed(self, bucket: Bucket) -> None:
        """Its ranks may be one collective apart from now on."""
        if self._meets_all(bucket) and self._last_attempt is None:
            self._last_attempt = bucket.attempt

    def dissolve(self) -> None:
        """A rank is gone, and whoever takes its place is not in the group: from now on buckets travel in messages."""
        if self._last_attempt is None:
            self._last_attempt = -1

    def _meets_all(self, bucket: Bucket) -> bool:
        """Whether the bucket goes by the collective. Until its end, for one publication: replicas wait in it."""
        is_whole = self._last_attempt is None or bucket.attempt <= self._last_attempt
        return is_whole and len(bucket.replica_ids) in (0, self._group.group.size() - 1)

    def close(self) -> None:
        self._thread.shutdown(wait=False)


class BroadcastReceiver(Receiver):
    """The engine's half. `max_bucket_bytes` bounds what a message can make it allocate; its `ReplicaServer` has to
    accept as many bytes in a message (`max_payload_bytes`)."""

    def __init__(self, group: BroadcastGroup | None, *, max_bucket_bytes: int) -> None:
        self._group = group
        """None: this replica came later, and takes what comes in messages."""
        self._max_bucket_bytes = max_bucket_bytes
        self._buffers = SlotBuffers()

    @property
    def is_quick(self) -> bool:
        return self._group is not None and self._group.has_met

    def take(self, bucket: Bucket, place: Json) -> Bucket:
        if "is_inline" in place:
            return replace(bucket)
        group = self._group
        if group is None:
            raise SyncError(
                f"bucket {bucket.bucket_idx} was announced as a broadcast, and this replica is in no group",
                "a replica that was started again takes buckets in messages: tell the sender (`dissolve`)",
            )
        num_bytes, slot_idx = field(place, "num_bytes", int), field(place, "slot_idx", int)
        if not 0 <= slot_idx < MAX_SLOTS:
            raise SyncError(
                f"bucket {bucket.bucket_idx} was announced in slot {slot_idx} of at most {MAX_SLOTS}",
                "trainer and engine run different releases: install the same one",
            )
        if not 0 <= num_bytes <= self._max_bucket_bytes:
            raise SyncError(
                f"bucket {bucket.bucket_idx} was announced with {num_bytes} bytes, the limit is "
                f"{self._max_bucket_bytes}",
                "use the same sync.bucket_bytes on both sides",
            )
        data = self._buffers(slot_idx, num_bytes, group.device)
        if not group.has_met:
            group.broadcast(data)
            return replace(bucket, data=data)
        return replace(bucket, data=data, ready=group.begin(data))
