"""Buckets: the trainer's stream of tensors, packed into buffers of one size or passed on by reference.

    export ──► pack ──► slot 0: bucket 0, 2, 4 ...      while slot 0 travels, slot 1 is filled
                        slot 1: bucket 1, 3, 5 ...      (more than two slots: `sync.max_buckets`)

A tensor goes whole into one bucket; one that is larger than a bucket is cut into parts that fill buckets of
their own. The digest of every tensor is started on the exported tensor itself, not on the packed copy: a
mistake in the packing is a mismatch, not a consistent lie. On a device a bucket is announced as soon as its copies are
queued; its digests are computed while it travels, and read once, after the last bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from rollbook.errors import SyncError
from rollbook.sync.digest import PendingDigests, flat_bytes, joined, launch
from rollbook.weights import Bucket, BucketEntry, Digests, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from rollbook.sync.delta import AcknowledgedWeights

MAX_SLOTS = 8
"""Buffers that may exist at a time; a slot is filled again when its bucket has arrived everywhere."""
ALIGN_BYTES = 256
"""Entries start on this boundary, so that a part can be viewed in its dtype where it lies."""
SMALL_BYTES = 1 << 20
"""On a device, tensors up to here wait for the end of the bucket and are copied by one launch."""
HOLD_BYTES = 128 << 20
"""Exported tensors wait for their digest until a bucket, or at least so much, is held, and share a launch. What an
export gathers for the publication alone is held no longer than that."""

Buffers = Callable[[int, int, torch.device], "Tensor"]
"""(slot index, bytes, device of the exported tensors) -> [bytes] uint8 buffer; the same one for the same slot."""


PackedViews = dict[tuple[str, int, int], tuple[BucketEntry, "Tensor"]]
"""(name, byte of the tensor, address in a slot) -> the entry that begins there, and its place as a view of the slot."""


class SlotBuffers:
    """Plain buffers on the device of the exported tensors, one per slot, allocated once."""

    def __init__(self) -> None:
        self._slots: dict[tuple[int, torch.device], Tensor] = {}

    def __call__(self, slot_idx: int, num_bytes: int, device: torch.device) -> Tensor:
        held = self._slots.get((slot_idx, device))
        if held is None or held.numel() < num_bytes:
            held = self._slots[slot_idx, device] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return held[:num_bytes]


class DigestLedger:
    """Digests of a stream of tensors, started as they come and read from the devices once, at the end.

    Args:
        hold_bytes: tensors wait until this much is held, or for `flush`, and share a launch.
    """

    def __init__(self, hold_bytes: int = HOLD_BYTES) -> None:
        self._hold_bytes = hold_bytes
        self._held: list[tuple[str, Tensor]] = []
        self.held_bytes = 0
        """Of tensors whose digests are not started."""
        self._pending: list[tuple[list[str], PendingDigests]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        self._held.append((name, tensor))
        self.held_bytes += tensor.numel() * tensor.element_size()
        if self.held_bytes > self._hold_bytes:
            self.flush()

    def flush(self) -> None:
        """Start what was held back; the tensors are free afterwards."""
        by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
        for name, tensor in self._held:
            by_device.setdefault(tensor.device, []).append((name, tensor))
        for held in by_device.values():
            pending = launch([tensor for _, tensor in held])
            self._pending.append(([name for name, _ in held], pending))
        self._held.clear()
        self.held_bytes = 0

    def results(self) -> dict[str, str]:
        """Name -> digest of everything added; one copy from each device."""
        self.flush()
        by_device: dict[torch.device, list[tuple[list[str], PendingDigests]]] = {}
        for names, pending in self._pending:
            by_device.setdefault(pending.sums.device, []).append((names, pending))
        digests: dict[str, str] = {}
        for rows in by_device.values():
            names = [name for names, _ in rows for name in names]
            digests.update(zip(names, joined([pending for _, pending in rows]).results(), strict=True))
        return digests


class _SmallCopies:
    """Copies that wait, and are then one launch for all."""

    def __init__(self) -> None:
        self._targets: list[Tensor] = []
        self._payloads: list[Tensor] = []

    def add(self, target: Tensor, payload: Tensor) -> None:
        self._targets.append(target)
        self._payloads.append(payload)

    def run(self) -> None:
        if self._targets:
            torch._foreach_copy_(self._targets, self._payloads, non_blocking=True)
        self._targets, self._payloads = [], []


@dataclass(slots=True)
class Packer:
    """One pass over the export; `buckets()` yields each bucket when its copies are queued (`Bucket.ready`)."""

    specs: dict[str, TensorSpec]
    stream: Iterator[tuple[str, Tensor]]
    weight_version: int
    bucket_bytes: int
    buffers: Buffers | None
    """None: tensors travel by reference and nothing is copied."""
    num_slots: int = 2
    views: PackedViews = field(default_factory=dict)
    """Kept from one publication to the next: a bucket's layout does not change in a run."""
    acknowledged: AcknowledgedWeights | None = None
    """What deltas are taken against; None: every tensor travels whole."""
    ledger: DigestLedger = field(init=False)
    sent_bytes: int = field(init=False, default=0)
    device: torch.device | None = field(init=False, default=None)
    """Of the tensors that were exported last."""

    def __post_init__(self) -> None:
        self.ledger = DigestLedger(max(HOLD_BYTES, self.bucket_bytes))

    def buckets(self) -> Iterator[Bucket]:
        yield from self._shared_buckets() if self.buffers is None else self._data_buckets(self.buffers)
        self.ledger.flush()

    def digests(self) -> Digests:
        """Digests of everything that was exported; after the last bucket."""
        return self.ledger.results()

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The export, checked against what was announced."""
        missing = dict(self.specs)
        for name, tensor in self.stream:
            spec = missing.pop(name, None)
            if spec is None:
                fault = "twice" if name in self.specs else "without announcing it in weight_specs()"
                raise SyncError(f"the trainer exported {name} {fault}", "the export is at fault: mend it")
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (tuple(tensor.shape), dtype) != (spec.shape, spec.dtype):
                raise SyncError(
                    f"the trainer exported {name} as {dtype}{list(tensor.shape)} and announced "
                    f"{spec.dtype}{list(spec.shape)}",
                    "the export is at fault: weight_specs() and export_weights() must agree",
                )
            tensor = tensor.detach()
            self.device = tensor.device
            self.ledger.add(name, tensor)
            yield name, tensor
        if missing:
            raise SyncError(
                f"the trainer's export ended without {len(missing)} tensors: {', '.join(list(missing)[:8])}",
                "the export is at fault: every tensor of weight_specs() must come once",
            )

    def _shared_buckets(self) -> Iterator[Bucket]:
        bucket_idx, held, held_bytes = 0, dict[str, "Tensor"](), 0
        for name, tensor in self._tensors():
            num_bytes = self.specs[name].num_bytes
            if held and held_bytes + num_bytes > self.bucket_bytes:
                yield self._shared(bucket_idx, held)
                bucket_idx, held, held_bytes = bucket_idx + 1, {}, 0
            held[name] = tensor
            held_bytes += num_bytes
        yield self._shared(bucket_idx, held)

    def _finish(self) -> torch.cuda.Event | None:
        """The bucket's copies are queued: whoever reads it waits for this event. Its digests are computed while it
        travels."""
        copied = None
        if self.device is not None and self.device.type == "cuda":
            copied = torch.cuda.current_stream(self.device).record_event()
        self.ledger.flush()
        return copied

    def _shared(self, bucket_idx: int, tensors: dict[str, Tensor]) -> Bucket:
        copied = self._finish()
        entries = tuple(
            BucketEntry(name=name, offset_bytes=0, num_bytes=self.specs[name].num_bytes) for name in tensors
        )
        return Bucket(
            weight_version=self.weight_version,
            bucket_idx=bucket_idx,
            entries=entries,
            data=None,
            shared=tensors,
            ready=copied,
        )

    def _data_buckets(self, buffers: Buffers) -> Iterator[Bucket]:
        bucket_idx, used = 0, 0
        entries: list[BucketEntry] = []
        buffer: Tensor | None = None
        small = _SmallCopies()
        for name, tensor in self._tensors():
            for entry, payload in self._parts(name, tensor):
                if entries and used + entry.num_bytes > self.bucket_bytes:
                    assert buffer is not None
                    small.run()
                    yield self._filled(bucket_idx, entries, buffer, used)
                    bucket_idx, used, entries = bucket_idx + 1, 0, []
                if not entries:
                    buffer = buffers(bucket_idx % self.num_slots, self.bucket_bytes, tensor.device)
                assert buffer is not None
                entry, target = self._placed(entry, payload, buffer, used)
                if payload.is_cuda and entry.num_bytes <= SMALL_BYTES:
                    small.add(target, payload)
                else:
                    target.copy_(payload, non_blocking=True)
                entries.append(entry)
                used += -(-entry.num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        if buffer is None:
            buffer = buffers(0, self.bucket_bytes, torch.device("cpu"))
        small.run()
        yield self._filled(bucket_idx, entries, buffer, used)

    def _parts(self, name: str, tensor: Tensor) -> Iterator[tuple[BucketEntry, Tensor]]:
        """The tensor whole, or as encoded parts of at most a bucket each; offsets in the bucket are not set yet."""
        num_bytes, size = self.specs[name].num_bytes, tensor.element_size()
        part_bytes = max(16, self.bucket_bytes // 16 * 16)
        if self.acknowledged is None and num_bytes <= part_bytes:
            yield BucketEntry(name=name, offset_bytes=0, num_bytes=num_bytes), tensor
            return
        flat = flat_bytes(tensor) if self.acknowledged is None else None
        for start in range(0, max(1, num_bytes), part_bytes):
            length = min(part_bytes, num_bytes - start)
            if flat is not None:
                encoding, payload = "dense", flat[start : start + length]
            else:
                assert self.acknowledged is not None
                elements = slice(start // min(8, size), (start + length) // min(8, size))
                encoded = self.acknowledged.encode(name, tensor, elements)
                encoding, payload = encoded.encoding, encoded.payload
            entry = BucketEntry(
                name=name,
                offset_bytes=0,
                num_bytes=payload.numel(),
                encoding=encoding,
                tensor_offset_bytes=start,
                tensor_num_bytes=length,
            )
            yield entry, payload

    def _placed(
        self, entry: BucketEntry, payload: Tensor, buffer: Tensor, used: int
    ) -> tuple[BucketEntry, Tensor]:
        """The entry at `used`, and its place in the buffer as a view in the payload's dtype and shape."""
        key = (entry.name, entry.tensor_offset_bytes, buffer.data_ptr() + used)
        held = self.views.get(key)
        if held is not None:
            is_same = held[0].offset_bytes == used and held[0].num_bytes == entry.num_bytes
            if is_same and held[1].dtype == payload.dtype and held[1].shape == payload.shape:
                return held
        placed = replace(entry, offset_bytes=used)
        target = buffer[used : used + entry.num_bytes].view(payload.dtype).view(payload.shape)
        if self.acknowledged is None:  # the layout of a delta is another one each time
            self.views[key] = placed, target
        return placed, target

    def _filled(self, bucket_idx: int, entries: list[BucketEntry], buffer: Tensor, used: int) -> Bucket:
        copied = self._finish()
        self.sent_bytes += used
        return Bucket(
            weight_version=self.weight_version,
            bucket_idx=bucket_idx,
            entries=tuple(entries),
            data=buffer[: min(used, buffer.numel())],
            ready=copied,
        )
