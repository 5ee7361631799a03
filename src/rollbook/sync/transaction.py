"""One replica's side of a publication: a state machine that ends in a proven version or changes nothing.

            open            receive*           prove             commit
    IDLE ─────────► OPEN ─────────► OPEN ─────────► PROVEN ─────────► IDLE at the new version
      ▲              │                │                │                │
      └──── abort ───┴──── abort ─────┴──── abort ─────┘                └─► live proof fails: the old tensors are
                                                                            put back and proven (IDLE, old version)
    BROKEN: the live weights are of no version. Only a full publication with `is_resync` leads out.

`staged` (default): tensors wait in memory of their own, and the live parameters change only inside `commit`, so
any fault before leaves the old version live and serving. `direct`: no second copy; tensors are written while the
engine is paused, and any fault after the first write leaves the replica BROKEN.

Either way the version advances only when the digest of every *live* tensor, read back through
`LiveWeights.read`, equals the trainer's. The order of events is checked here and nowhere else: buckets by
number, parts by offset, names against the manifest.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from rollbook.errors import SyncError, nearest_name
from rollbook.sync import delta
from rollbook.sync.bucket import DigestLedger
from rollbook.sync.digest import fold
from rollbook.sync.layout import MappedWeights
from rollbook.weights import Bucket, BucketEntry, CommitReport, Digests, LiveWeights, Manifest, TensorSpec

Staging = Literal["staged", "direct"]

HOLD_BYTES = 1 << 62
"""Everything in a bucket shares one launch: the replica keeps the tensors anyway."""
DIGEST_BYTES = 1 << 30
"""On a device, digests are started when so much has arrived: a launch takes the host a good part of the
time that a fast link takes for a bucket."""
ALIGN_BYTES = 16
"""Where a tensor may begin in an allocation that it shares: every dtype, and the widest loads of the digest."""
SHOWN_NAMES = 8
"""Tensors an error names before it counts the rest."""


class State(enum.Enum):
    IDLE = "idle"
    OPEN = "open"
    PROVEN = "proven"
    BROKEN = "broken"


class ReplicaTransaction:
    """The state machine above, over one engine's live weights. Not thread-safe: one caller at a time.

    `open` (with a base version), `receive` in direct mode or of deltas, `prove` and `commit` touch the live
    weights: call them where the engine allows it (between decode steps). Every error is a SyncError.
    """

    def __init__(
        self,
        live: LiveWeights,
        *,
        replica_id: int,
        weight_version: int,
        staging: Staging = "staged",
    ) -> None:
        self.live = live
        self.replica_id = replica_id
        self.weight_version = weight_version
        """The last proven version; what was there at the start counts as proven by whoever loaded it."""
        self.staging = staging
        self.state = State.IDLE
        self.coverage: dict[str, int] = {}
        self._held_live: dict[str, str] = {}  # digests of the live tensors at `weight_version`, part for part
        self._held_full: dict[str, str] = {}  # the trainer's digests at `weight_version`
        self._device = next((live.read(name).device for name in live.specs()), torch.device("cpu"))
        self._copying: torch.cuda.Stream | None = None
        self._reading: torch.cuda.Stream | None = None
        if self._device.type == "cuda":  # beside the engine's decode steps: what arrives, and its digests
            self._copying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._reading = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._clear()

    def _clear(self) -> None:
        self._manifest: Manifest | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._staged: dict[str, Tensor] = {}
        self._arrived_bytes: dict[str, int] = {}
        # Digests are started while the next bucket travels, and read by `prove`: of what arrived, and of the parts
        # that this rank will hold of it.
        self._arrivals, self._parts = DigestLedger(HOLD_BYTES), DigestLedger(HOLD_BYTES)
        self._expected_live: dict[str, str] = {}
        self._dropped: frozenset[str] = frozenset()
        self._next_bucket_idx = 0
        self._fault = ""
        self._is_torn = False
        """The live weights are of no version, or partly of the one that arrives: nothing is left to go back to."""

    @property
    def pending_version(self) -> int:
        """The version under way; the proven one when nothing is."""
        return self._manifest.weight_version if self._manifest is not None else self.weight_version

    # ---- open

    def open(self, manifest: Manifest) -> dict[str, int]:
        """Begin a publication. Nothing is touched unless every name, shape, dtype and the base agree.

        Returns:
            Tensors of the manifest by what will become of them: matched, renamed, fused, dropped.
        """
        if self.state in (State.OPEN, State.PROVEN):
            assert self._manifest is not None
            raise SyncError(
                f"{self._me()} has version {self._manifest.weight_version} open and was asked to open "
                f"{manifest.weight_version}",
                "one publication at a time: let the first one commit or abort it",
            )
        self._check_versions(manifest)
        coverage, dropped = self._check_tensors(manifest)
        if manifest.base_version is not None:
            self._check_base(manifest)
        was_broken = self.state is State.BROKEN
        self._clear()
        self._is_torn = was_broken
        self._manifest = manifest
        self._specs = {spec.name: spec for spec in manifest.tensors}
        self._dropped = dropped
        self.coverage = coverage
        self.state = State.OPEN
        return coverage

    def _check_versions(self, manifest: Manifest) -> None:
        version, base = manifest.weight_version, manifest.base_version
        if manifest.is_resync:
            if base is not None:
                raise SyncError(
                    f"a resync of {self._me()} came as a delta against version {base}",
                    "a resync carries every tensor in full: send it without a base version",
                )
            return
        if self.state is State.BROKEN:
            raise SyncError(
                f"{self._me()} holds no proven version and was sent version {version}",
                "re-sync it in full first (a manifest with is_resync)",
            )
        if version <= self.weight_version:
            raise SyncError(
                f"{self._me()} holds version {self.weight_version} and was sent version {version}",
                "versions only grow; a trainer that started again re-syncs its replicas in full",
            )
        if base is not None and base != self.weight_version:
            raise SyncError(
                f"{self._me()} holds version {self.weight_version} and was sent a delta against {base}",
                "re-sync it in full",
            )

    def _check_tensors(self, manifest: Manifest) -> tuple[dict[str, int], frozenset[str]]:
        mapped = self.live if isinstance(self.live, MappedWeights) else None
        wanted = self.live.specs()
        known_drops = mapped.dropped if mapped is not None else frozenset()
        counts: Counter[str] = Counter(matched=0, renamed=0, fused=0, dropped=0)
        faults, seen, dropped = [], set[str](), set[str]()
        for spec in manifest.tensors:
            want = wanted.get(spec.name)
            if spec.name in seen:
                faults.append(f"{spec.name} is listed twice")
            elif want is None and spec.name in known_drops:
                dropped.add(spec.name)
                counts["dropped"] += 1
            elif want is None:
                faults.append(f"{spec.name} is unknown to the engine ({nearest_name(spec.name, wanted)})")
            elif (spec.shape, spec.dtype, spec.num_bytes) != (want.shape, want.dtype, want.num_bytes):
                faults.append(
                    f"{spec.name} is {spec.dtype}{list(spec.shape)} of {spec.num_bytes} bytes, the engine "
                    f"holds {want.dtype}{list(want.shape)} of {want.num_bytes}"
                )
            else:
                counts[mapped.kind(spec.name) if mapped is not None else "matched"] += 1
            seen.add(spec.name)
        faults += [f"{name} is missing" for name in wanted if name not in seen]
        if faults:
            raise SyncError(
                f"{self._me()} refuses version {manifest.weight_version}: {_some(faults, '; ')}",
                "the trainer's names and the engine's table of places must describe one model",
            )
        return dict(counts), frozenset(dropped)

    def _check_base(self, manifest: Manifest) -> None:
        base = manifest.base_version
        if not self._held_full or fold(self._held_full) != manifest.base_digest:
            raise SyncError(
                f"{self._me()} cannot prove that its version {base} is the trainer's version {base}",
                "re-sync it in full: the trainer was restarted, or a publication was lost",
            )
        changed = _differing(self._held_live, self._live_digests(self._held_live))
        if changed:
            self.state = State.BROKEN
            raise SyncError(
                f"the live weights of {self._me()} are no longer version {base}: {_some(changed)} changed",
                "something wrote into the engine's weights besides a publication; re-sync it in full",
            )

    # ---- receive

    def receive(self, bucket: Bucket) -> None:
        """Take in the next bucket; the sender may fill its buffer again afterwards. After an error the publication can
        only be aborted."""
        copied = self.begin_receive(bucket)
        if copied is not None:
            copied.synchronize()

    def begin_receive(self, bucket: Bucket) -> torch.cuda.Event | None:
        """`receive` without waiting for the device, so that the next bucket's copies queue up behind this one's.

        Returns:
            What to wait for before the sender may fill the buffer again; None when it may already.
        """
        manifest = self._require(State.OPEN, "receive")
        try:
            self._check_order(bucket, manifest)
            if self._copying is None or self._reading is None:
                if bucket.ready is not None:
                    bucket.ready.synchronize()
                self._take_in(bucket, manifest)
                self._start_digests()
                copied = None
            elif self.staging == "direct":  # the digests read the sender's buffer
                with self._on(self._copying, after_current=True):
                    self._after(bucket, self._copying)
                    self._take_in(bucket, manifest)
                    self._start_digests()
                self._copying.synchronize()
                copied = None
            else:
                with self._on(self._copying):
                    self._after(bucket, self._copying)
                    self._take_in(bucket, manifest)
                    copied = self._copying.record_event()
                with self._on(self._reading):
                    self._reading.wait_event(copied)
                    if bucket.shared is None and self._arrivals.held_bytes >= DIGEST_BYTES:
                        self._start_digests()  # tensors by reference wait for `prove`, and share one launch
        except Exception as error:
            self._fault = str(error)
            raise
        self._next_bucket_idx += 1
        return copied

    @staticmethod
    def _after(bucket: Bucket, stream: torch.cuda.Stream) -> None:
        if bucket.ready is not None:
            stream.wait_event(bucket.ready)

    def _take_in(self, bucket: Bucket, manifest: Manifest) -> None:
        if bucket.shared is not None:
            self._receive_shared(bucket, bucket.shared)
            return
        together: list[tuple[BucketEntry, TensorSpec]] = []
        for entry in bucket.entries:
            if manifest.base_version is None and self._fits_together(bucket, entry, together):
                spec = self._specs[entry.name]
                self._advance(entry, spec)
                together.append((entry, spec))
            else:
                self._receive_entry(bucket, entry)
        if together:
            self._receive_together(bucket, together)

    def _start_digests(self) -> None:
        self._arrivals.flush()
        self._parts.flush()

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None, *, after_current: bool = False) -> Iterator[None]:
        """Work of the block goes to `stream` (None: there is no device).

        Args:
            after_current: behind everything that is queued on the caller's stream (the engine's kernels).
        """
        if stream is None:
            yield
            return
        if after_current:
            stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            yield

    def _check_order(self, bucket: Bucket, manifest: Manifest) -> None:
        if bucket.weight_version != manifest.weight_version:
            raise SyncError(
                f"{self._me()} has version {manifest.weight_version} open and received a bucket of version "
                f"{bucket.weight_version} with {_some(entry.name for entry in bucket.entries)}",
                "two publications overlap: only one may be under way",
            )
        if bucket.bucket_idx != self._next_bucket_idx:
            how = "twice" if bucket.bucket_idx < self._next_bucket_idx else "too early"
            raise SyncError(
                f"bucket {bucket.bucket_idx} (with {_some(entry.name for entry in bucket.entries)}) reached "
                f"{self._me()} {how}; bucket {self._next_bucket_idx} was next",
                "the transport lost or repeated a bucket; the publication is repeated in full",
            )

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
        spec, data = self._specs.get(entry.name), bucket.data
        first_byte = together[0][0].offset_bytes if together else entry.offset_bytes
        return (
            self.staging == "staged"
            and spec is not None
            and data is not None
            and entry.encoding == "dense"
            and entry.tensor_offset_bytes == 0
            and entry.num_bytes == _covered_bytes(entry) == spec.num_bytes
            and 0 <= first_byte <= entry.offset_bytes <= data.numel() - entry.num_bytes
            and (entry.offset_bytes - first_byte) % ALIGN_BYTES == 0
            and entry.name not in self._dropped
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
        if entry.encoding == "dense" and is_whole and self.staging == "direct":
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
            self._take_whole(entry.name, self._staged.pop(entry.name))

    def _spec_of(self, entry: BucketEntry) -> TensorSpec:
        spec = self._specs.get(entry.name)
        if spec is None:
            raise SyncError(
                f"{entry.name} arrived at {self._me()} and is not in the manifest",
                "the export and its manifest must agree; " + nearest_name(entry.name, self._specs),
            )
        return spec

    def _advance(self, entry: BucketEntry, spec: TensorSpec) -> int:
        """Check that this part follows what has arrived; returns where it begins, in bytes."""
        start = self._arrived_bytes.get(entry.name, 0)
        if entry.name in self._arrived_bytes and start == spec.num_bytes:
            raise SyncError(
                f"{entry.name} reached {self._me()} twice",
                "the transport repeated a tensor; the publication is repeated in full",
            )
        length = _covered_bytes(entry)
        if entry.tensor_offset_bytes != start or length < 0 or start + length > spec.num_bytes:
            raise SyncError(
                f"a part of {entry.name} covers bytes {entry.tensor_offset_bytes} to "
                f"{entry.tensor_offset_bytes + length} of {spec.num_bytes}, and {start} have arrived",
                "a part was lost, repeated or swapped; the publication is repeated in full",
            )
        if entry.encoding != "dense" and (self._manifest is None or self._manifest.base_version is None):
            raise SyncError(
                f"{entry.name} arrived as {entry.encoding} in a publication without a base version",
                "a delta needs a base: open with base_version, or send every tensor whole",
            )
        self._arrived_bytes[entry.name] = start + length
        return start

    def _staging_tensor(self, entry: BucketEntry, spec: TensorSpec) -> Tensor:
        tensor = self._staged.get(entry.name)
        if tensor is None:
            is_delta = self._manifest is not None and self._manifest.base_version is not None
            if is_delta and not (entry.encoding == "dense" and _covered_bytes(entry) == spec.num_bytes):
                self._require_uncut(entry.name)
                tensor = self.live.read(entry.name).detach().clone(memory_format=torch.contiguous_format)
            else:
                device = self._device_of(entry.name)
                tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device=device)
            self._staged[entry.name] = tensor
        return tensor

    def _device_of(self, name: str) -> torch.device:
        return torch.device("cpu") if name in self._dropped else self.live.read(name).device

    def _require_uncut(self, name: str) -> None:
        if name in self._dropped or (isinstance(self.live, MappedWeights) and self.live.is_cut(name)):
            raise SyncError(
                f"{self._me()} holds only a part of {name}: a delta of the whole tensor cannot be applied",
                "publish in full (sync.delta = false) to engines with tensor parallelism or dropped tensors",
            )

    def _take_whole(self, name: str, tensor: Tensor) -> None:
        """A tensor has arrived: start its digest, and keep it for the commit or write it now."""
        self._arrivals.add(name, tensor)
        if isinstance(self.live, MappedWeights) and name not in self._dropped and self.live.is_cut(name):
            self._parts.add(name, self.live.part(name, tensor))
        if self.staging == "staged":
            self._staged[name] = tensor
        elif name not in self._dropped:
            self._is_torn = True
            self.live.write(name, tensor)

    # ---- prove

    def prove(self, digests: Digests) -> None:
        """Phase one: everything arrived, and its digests equal the trainer's. The live weights are not yet new
        (staged), or not yet trusted (direct)."""
        self._require(State.OPEN, "prove")
        missing = [
            name for name, spec in self._specs.items() if self._arrived_bytes.get(name, -1) != spec.num_bytes
        ]
        if missing:
            raise self._faulty(
                f"{len(missing)} tensors did not arrive whole at {self._me()}: {_some(missing)}",
                "a bucket was lost; the publication is repeated in full",
            )
        if set(digests) != set(self._specs):
            odd = sorted(set(digests) ^ set(self._specs))
            raise self._faulty(
                f"the trainer's digests and the manifest differ in {_some(odd)}",
                "the export and its manifest must agree",
            )
        with self._on(self._reading):
            arrived, parts = self._arrivals.results(), self._parts.results()
        unchanged = [name for name in self._specs if name not in arrived]  # proven with the base version
        arrived |= {name: self._held_full[name] for name in unchanged}
        changed = _differing(digests, arrived)
        if changed:
            raise self._faulty(
                f"{len(changed)} tensors reached {self._me()} altered: {_some(changed)}",
                "the transport damaged them; the publication is repeated in full",
            )
        self._expected_live = {name: d for name, d in digests.items() if name not in self._dropped}
        self._expected_live |= {name: self._held_live[name] for name in unchanged if name in self._held_live}
        self._expected_live |= parts
        self._digests = dict(digests)
        self.state = State.PROVEN

    # ---- commit

    def commit(self) -> CommitReport:
        """Phase two, between decode steps: make the new tensors live, prove the live parameters, advance.

        Raises:
            SyncError: the live proof failed. The old tensors were put back and proven (state IDLE, the old
                version), or could not be (state BROKEN).
        """
        manifest = self._require(State.PROVEN, "commit")
        with self._on(self._copying, after_current=True):  # old tensors take the memory that new ones leave
            return self._commit(manifest)

    def _commit(self, manifest: Manifest) -> CommitReport:
        if not self._held_live and self.staging == "staged":
            self._held_live = self._live_digests(self.live.specs())  # so that a roll-back can be proven
        started_at_s = time.perf_counter()
        replaced: list[str] = []
        try:
            self._is_torn = True
            for name in self._staged:
                if name not in self._dropped:
                    self._exchange(name, replaced)
            _synchronize(self._staged.values())
            written_at_s = time.perf_counter()
            live = self._live_digests(self._expected_live)
        except Exception as error:
            raise self._rolled_back(replaced, f"the write into the engine failed: {error}") from error
        changed = _differing(self._expected_live, live)
        if changed:
            raise self._rolled_back(replaced, f"the live proof failed for {_some(changed)}")
        proven_at_s = time.perf_counter()
        report = CommitReport(
            replica_id=self.replica_id,
            weight_version=manifest.weight_version,
            num_tensors=len(self._specs),
            num_bytes=sum(spec.num_bytes for spec in self._specs.values()),
            write_s=written_at_s - started_at_s,
            digest_s=proven_at_s - written_at_s,
            coverage=self.coverage,
        )
        self.weight_version = manifest.weight_version
        self._held_live, self._held_full = live, self._digests
        self._clear()
        self.state = State.IDLE
        return report

    def _exchange(self, name: str, replaced: list[str]) -> None:
        """Write the staged tensor; the old bytes take its place in the staging, for a roll-back."""
        live, new = self.live.read(name), self._staged[name]
        if (live.data_ptr(), live.stride(), live.shape) == (new.data_ptr(), new.stride(), new.shape):
            return  # the trainer's tensor is the engine's (one process): there is nothing to write
        old = live.detach().clone()
        if isinstance(self.live, MappedWeights) and self.live.is_cut(name):
            whole = new.clone()
            self.live.part(name, whole).copy_(old)
            old = whole
        self._staged[name] = old
        replaced.append(name)
        self.live.write(name, new)

    def _rolled_back(self, replaced: Iterable[str], why: str) -> SyncError:
        """Put the old tensors back, and prove them."""
        manifest = self._manifest
        assert manifest is not None
        outcome = "its old weights are gone"
        is_whole = False
        if self.staging == "staged":
            try:
                for name in replaced:
                    self.live.write(name, self._staged[name])
                is_whole = not _differing(self._held_live, self._live_digests(self._held_live))
                outcome = "its old weights were put back and " + ("proven" if is_whole else "did not prove")
            except Exception as error:
                outcome = f"its old weights could not be put back ({error})"
        self._clear()
        self.state = State.IDLE if is_whole else State.BROKEN
        return SyncError(
            f"{self._me()} could not take version {manifest.weight_version}: {why}; {outcome}",
            f"it stays out of service at version {self.weight_version} until it is re-synced in full",
        )

    # ---- abort

    def abort(self) -> None:
        """Drop the open publication. BROKEN where it had begun to write, or was to mend what was BROKEN."""
        for stream in (self._copying, self._reading):
            if stream is not None:
                stream.synchronize()  # nothing reads the sender's buffers or the staging any more
        is_broken = self.state is State.BROKEN or self._is_torn
        self._clear()
        self.state = State.BROKEN if is_broken else State.IDLE

    # ---- helpers

    def _require(self, state: State, action: str) -> Manifest:
        if self.state is not state or self._manifest is None:
            raise SyncError(
                f"{self._me()} was asked to {action} in state {self.state.value}",
                "the order is open, receive, prove, commit; abort and begin again",
            )
        if self._fault:
            raise SyncError(
                f"{self._me()} was asked to {action} after a fault: {self._fault}",
                "abort this publication and repeat it in full",
            )
        return self._manifest

    def _faulty(self, what: str, remedy: str) -> SyncError:
        self._fault = what
        return SyncError(what, remedy)

    def _live_digests(self, names: Iterable[str]) -> dict[str, str]:
        ledger = DigestLedger(HOLD_BYTES)
        for name in names:
            ledger.add(name, self.live.read(name))
        return ledger.results()

    def _me(self) -> str:
        return f"replica {self.replica_id}"


def _covered_bytes(entry: BucketEntry) -> int:
    return entry.num_bytes if entry.tensor_num_bytes is None else entry.tensor_num_bytes


def _integers(tensor: Tensor) -> Tensor:
    """[n] view of a contiguous tensor's elements as integers, for writing."""
    return tensor.view(-1).view(delta.INTEGERS[min(8, tensor.element_size())])


def _differing(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    return [name for name, digest in expected.items() if actual.get(name) != digest]


def _synchronize(tensors: Iterable[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def _some(names: Iterable[str], separator: str = ", ") -> str:
    names = list(names)
    more = len(names) - SHOWN_NAMES
    return separator.join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
