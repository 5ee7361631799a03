"""The tensors of one publication as they come in at a replica: whole, in parts, or as differences to the base version.

    check_order ──► take_in ──► (staged: kept; direct: written) ──► digest started ──► arrived, missing

Buckets by number, parts by offset, names against the manifest: nothing is taken that does not follow what was there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rollbook.errors import SyncError, nearest_name
from rollbook.sync import delta
from rollbook.sync.bucket import DigestLedger
from rollbook.sync.layout import MappedWeights
from rollbook.weights import Bucket, BucketEntry, LiveWeights, Manifest, TensorSpec

HOLD_BYTES = 1 << 62
"""Everything in a bucket shares one launch: the replica keeps the tensors anyway."""
ALIGN_BYTES = 16
"""Where a tensor may begin in an allocation that it shares: every dtype, and the widest loads of the digest."""
SHOWN_NAMES = 8
"""Tensors an error names before it counts the rest."""


class Arriving:
    """See the module. Every error is a SyncError, after which only an abort is left.

    Args:
        dropped: names of the manifest that this engine does without.
        device: where whole tensors are put down.
        writes_at_once: into the live weights, as soon as a tensor is whole ("direct"); else all wait in `staged`.
        who: the replica, for messages.
    """

    def __init__(
        self,
        manifest: Manifest,
        live: LiveWeights,
        *,
        dropped: frozenset[str],
        device: torch.device,
        writes_at_once: bool,
        who: str,
    ) -> None:
        self.manifest = manifest
        self.specs = {spec.name: spec for spec in manifest.tensors}
        self.dropped = dropped
        self.staged: dict[str, Tensor] = {}
        """Whole tensors that wait for the commit; of a difference or of parts, what has come so far."""
        self.has_written = False
        """The live weights are no longer what they were."""
        self._live = live
        self._device = device
        self._writes_at_once = writes_at_once
        self._who = who
        self._arrived_bytes: dict[str, int] = {}
        # Digests are started while the next bucket travels, and read by `prove`: of what arrived, and of the parts
        # that this rank will hold of it.
        self._arrivals, self._parts = DigestLedger(HOLD_BYTES), DigestLedger(HOLD_BYTES)
        self._next_bucket_idx = 0

    def drop(self) -> None:
        """Let every tensor go, whoever still holds this object: the traceback of an error may."""
        self.staged.clear()
        self._arrivals, self._parts = DigestLedger(HOLD_BYTES), DigestLedger(HOLD_BYTES)

    @property
    def undigested_bytes(self) -> int:
        """Of tensors that are there and whose digests are not started."""
        return self._arrivals.held_bytes

    def start_digests(self) -> None:
        self._arrivals.flush()
        self._parts.flush()

    def digests(self) -> tuple[dict[str, str], dict[str, str]]:
        """Of every tensor that arrived, whole, and of the part of it that this rank will hold where that is less."""
        return self._arrivals.results(), self._parts.results()

    def missing(self) -> list[str]:
        """Tensors that are not there whole."""
        return [n for n, spec in self.specs.items() if self._arrived_bytes.get(n, -1) != spec.num_bytes]

    def check_order(self, bucket: Bucket) -> None:
        manifest = self.manifest
        if bucket.weight_version != manifest.weight_version:
            raise SyncError(
                f"{self._who} has version {manifest.weight_version} open and received a bucket of version "
                f"{bucket.weight_version} with {some(entry.name for entry in bucket.entries)}",
                "two publications overlap: only one may be under way",
            )
        if bucket.bucket_idx != self._next_bucket_idx:
            how = "twice" if bucket.bucket_idx < self._next_bucket_idx else "too early"
            raise SyncError(
                f"bucket {bucket.bucket_idx} (with {some(entry.name for entry in bucket.entries)}) reached "
                f"{self._who} {how}; bucket {self._next_bucket_idx} was next",
                "the transport lost or repeated a bucket; the publication is repeated in full",
            )

    def take_in(self, bucket: Bucket) -> None:
        """The next bucket, once `check_order` let it pass; on a device its copies are queued on the current stream."""
        if bucket.shared is not None:
            self._receive_shared(bucket, bucket.shared)
        else:
            self._receive_packed(bucket)
        self._next_bucket_idx += 1

    def _receive_packed(self, bucket: Bucket) -> None:
        together: list[tuple[BucketEntry, TensorSpec]] = []
        for entry in bucket.entries:
            if self.manifest.base_version is None and self._fits_together(bucket, entry, together):
                spec = self.specs[entry.name]
                self._advance(entry, spec)
                together.append((entry, spec))
            else:
                self._receive_entry(bucket, entry)
        if together:
            self._receive_together(bucket, together)

    def _receive_shared(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> None:
        for entry in bucket.entries:
            spec = self._spec_of(entry)
            tensor = tensors.get(entry.name)
            if tensor is None:
                raise SyncError(
                    f"bucket {bucket.bucket_idx} announces {entry.name} and does not carry it",
                    "the bucket was put together wrongly; the publication is repeated in full",
                )
            dtype = str(tensor.dtype).removeprefix("torch.")
            if (tuple(tensor.shape), dtype) != (spec.shape, spec.dtype):
                raise SyncError(
                    f"{entry.name} arrived as {dtype}{list(tensor.shape)}, the manifest says "
                    f"{spec.dtype}{list(spec.shape)}",
                    "the export and its manifest must agree",
                )
            self._advance(entry, spec)
            self._take_whole(entry.name, tensor)

    def _fits_together(
        self, bucket: Bucket, entry: BucketEntry, together: list[tuple[BucketEntry, TensorSpec]]
    ) -> bool:
        """A tensor that travels whole, plain and aligned, to the engine's device: one copy for all of them. Anything
        else, faults included, is for `_receive_entry`."""
        spec, data = self.specs.get(entry.name), bucket.data
        first_byte = together[0][0].offset_bytes if together else entry.offset_bytes
        return (
            not self._writes_at_once
            and spec is not None
            and data is not None
            and entry.encoding == "dense"
            and entry.tensor_offset_bytes == 0
            and entry.num_bytes == _covered_bytes(entry) == spec.num_bytes
            and 0 <= first_byte <= entry.offset_bytes <= data.numel() - entry.num_bytes
            and (entry.offset_bytes - first_byte) % ALIGN_BYTES == 0
            and entry.name not in self.dropped
        )

    def _receive_together(self, bucket: Bucket, together: list[tuple[BucketEntry, TensorSpec]]) -> None:
        """The staging tensors of these entries are views of one allocation, filled by one copy."""
        assert bucket.data is not None
        begin = together[0][0].offset_bytes
        end = max(entry.offset_bytes + entry.num_bytes for entry, _ in together)
        held = torch.empty(end - begin, dtype=torch.uint8, device=self._device)
        held.copy_(bucket.data[begin:end], non_blocking=True)
        for entry, spec in together:
            data = held[entry.offset_bytes - begin : entry.offset_bytes - begin + entry.num_bytes]
            self._take_whole(entry.name, data.view(getattr(torch, spec.dtype)).view(spec.shape))

    def _receive_entry(self, bucket: Bucket, entry: BucketEntry) -> None:
        spec = self._spec_of(entry)
        data = bucket.data
        end = entry.offset_bytes + entry.num_bytes
        if data is None or entry.offset_bytes < 0 or entry.num_bytes < 0 or end > data.numel():
            raise SyncError(
                f"bucket {bucket.bucket_idx} ends at byte {0 if data is None else data.numel()}, {entry.name} "
                f"in it at byte {end}",
                "the bucket was cut short on its way; the publication is repeated in full",
            )
        payload = data[entry.offset_bytes : end]
        start = self._advance(entry, spec)
        length = _covered_bytes(entry)
        is_whole = length == spec.num_bytes
        if entry.encoding == "unchanged" and is_whole and not payload.numel():
            return  # the base version's tensor stays where it is
        if entry.encoding == "dense" and is_whole and self._writes_at_once:
            if entry.num_bytes != length:
                raise SyncError(
                    f"{entry.name} arrived with {entry.num_bytes} bytes of {length}",
                    "the bucket was cut short on its way; the publication is repeated in full",
                )
            dtype = getattr(torch, spec.dtype)
            is_aligned = (data.storage_offset() + entry.offset_bytes) % dtype.itemsize == 0
            tensor = (payload if is_aligned else payload.clone()).view(dtype).view(spec.shape)
            self._take_whole(entry.name, tensor)
            return
        tensor = self._staging_tensor(entry, spec)
        size = min(8, tensor.element_size())
        if start % size or length % size:
            raise SyncError(
                f"a part of {entry.name} covers bytes {start} to {start + length}, not whole elements",
                "the bucket was put together wrongly; the publication is repeated in full",
            )
        target = _integers(tensor)[start // size : (start + length) // size]
        if entry.encoding != "dense":
            payload = payload.to(target.device)
        delta.apply(entry.encoding, payload, target)
        if self._arrived_bytes[entry.name] == spec.num_bytes:
            self._take_whole(entry.name, self.staged.pop(entry.name))

    def _spec_of(self, entry: BucketEntry) -> TensorSpec:
        spec = self.specs.get(entry.name)
        if spec is None:
            raise SyncError(
                f"{entry.name} arrived at {self._who} and is not in the manifest",
                "the export and its manifest must agree; " + nearest_name(entry.name, self.specs),
            )
        return spec

    def _advance(self, entry: BucketEntry, spec: TensorSpec) -> int:
        """Check that this part follows what has arrived; returns where it begins, in bytes."""
        start = self._arrived_bytes.get(entry.name, 0)
        if entry.name in self._arrived_bytes and start == spec.num_bytes:
            raise SyncError(
                f"{entry.name} reached {self._who} twice",
                "the transport repeated a tensor; the publication is repeated in full",
            )
        length = _covered_bytes(entry)
        if entry.tensor_offset_bytes != start or length < 0 or start + length > spec.num_bytes:
            raise SyncError(
                f"a part of {entry.name} covers bytes {entry.tensor_offset_bytes} to "
                f"{entry.tensor_offset_bytes + length} of {spec.num_bytes}, and {start} have arrived",
                "a part was lost, repeated or swapped; the publication is repeated in full",
            )
        if entry.encoding != "dense" and (self.manifest.base_version is None):
            raise SyncError(
                f"{entry.name} arrived as {entry.encoding} in a publication without a base version",
                "a delta needs a base: open with base_version, or send every tensor whole",
            )
        self._arrived_bytes[entry.name] = start + length
        return start

    def _staging_tensor(self, entry: BucketEntry, spec: TensorSpec) -> Tensor:
        tensor = self.staged.get(entry.name)
        if tensor is None:
            is_delta = self.manifest.base_version is not None
            if is_delta and not (entry.encoding == "dense" and _covered_bytes(entry) == spec.num_bytes):
                self._require_uncut(entry.name)
                tensor = self._live.read(entry.name).detach().clone(memory_format=torch.contiguous_format)
            else:
                device = self._device_of(entry.name)
                tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            self.staged[entry.name] = tensor
        return tensor

    def _device_of(self, name: str) -> torch.device:
        return torch.device("cpu") if name in self.dropped else self._live.read(name).device

    def _require_uncut(self, name: str) -> None:
        if name in self.dropped or (isinstance(self._live, MappedWeights) and self._live.is_cut(name)):
            raise SyncError(
                f"{self._who} holds only a part of {name}: a delta of the whole tensor cannot be applied",
                "publish in full (sync.delta = false) to engines with tensor parallelism or dropped tensors",
            )

    def _take_whole(self, name: str, tensor: Tensor) -> None:
        """A tensor has arrived: start its digest, and keep it for the commit or write it now."""
        self._arrivals.add(name, tensor)
        if isinstance(self._live, MappedWeights) and name not in self.dropped and self._live.is_cut(name):
            self._parts.add(name, self._live.part(name, tensor))
        if not self._writes_at_once:
            self.staged[name] = tensor
        elif name not in self.dropped:
            self.has_written = True
            self._live.write(name, tensor)


def _covered_bytes(entry: BucketEntry) -> int:
    return entry.num_bytes if entry.tensor_num_bytes is None else entry.tensor_num_bytes


def _integers(tensor: Tensor) -> Tensor:
    """[n] view of a contiguous tensor's elements as integers, for writing."""
    return tensor.view(-1).view(delta.INTEGERS[min(8, tensor.element_size())])


def some(names: Iterable[str], separator: str = ", ") -> str:
    names = list(names)
    more = len(names) - SHOWN_NAMES
    return separator.join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
