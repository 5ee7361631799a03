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
`LiveWeights.read`, equals the trainer's. What comes in, and in which order, is `arriving.py`'s.
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
from rollbook.sync.arriving import HOLD_BYTES, Arriving, some
from rollbook.sync.bucket import DigestLedger
from rollbook.sync.digest import fold
from rollbook.sync.layout import MappedWeights
from rollbook.weights import Bucket, CommitReport, Digests, LiveWeights, Manifest

Staging = Literal["staged", "direct"]

DIGEST_BYTES = 1 << 30
"""On a device, digests are started when so much has arrived: a launch takes the host a good part of the
time that a fast link takes for a bucket."""


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
        self._arriving: Arriving | None = None
        self._device = next((live.read(name).device for name in live.specs()), torch.device("cpu"))
        self._copying: torch.cuda.Stream | None = None
        self._reading: torch.cuda.Stream | None = None
        if self._device.type == "cuda":  # beside the engine's decode steps: what arrives, and its digests
            self._copying = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            self._reading = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._clear()

    def _clear(self) -> None:
        if self._arriving is not None:
            self._arriving.drop()
        self._arriving = None
        self._expected_live: dict[str, str] = {}
        self._fault = ""
        self._is_torn = False
        """The live weights are of no version, or partly of the one that arrives: nothing is left to go back to."""

    @property
    def pending_version(self) -> int:
        """The version under way; the proven one when nothing is."""
        return self.weight_version if self._arriving is None else self._arriving.manifest.weight_version

    # ---- open

    def open(self, manifest: Manifest) -> dict[str, int]:
        """Begin a publication. Nothing is touched unless every name, shape, dtype and the base agree.

        Returns:
            Tensors of the manifest by what will become of them: matched, renamed, fused, dropped.
        """
        if self.state in (State.OPEN, State.PROVEN):
            raise SyncError(
                f"{self._me()} has version {self.pending_version} open and was asked to open "
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
        self._arriving = Arriving(
            manifest,
            self.live,
            dropped=dropped,
            device=self._device,
            writes_at_once=self.staging == "direct",
            who=self._me(),
        )
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
                f"{self._me()} refuses version {manifest.weight_version}: {some(faults, '; ')}",
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
                f"the live weights of {self._me()} are no longer version {base}: {some(changed)} changed",
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
        arriving = self._require(State.OPEN, "receive")
        try:
            arriving.check_order(bucket)
            if self._copying is None or self._reading is None:
                if bucket.ready is not None:
                    bucket.ready.synchronize()
                arriving.take_in(bucket)
                arriving.start_digests()
                copied = None
            elif self.staging == "direct":  # the digests read the sender's buffer
                with self._on(self._copying, after_current=True):
                    self._after(bucket, self._copying)
                    arriving.take_in(bucket)
                    arriving.start_digests()
                self._copying.synchronize()
                copied = None
            else:
                with self._on(self._copying):
                    self._after(bucket, self._copying)
                    arriving.take_in(bucket)
                    copied = self._copying.record_event()
                with self._on(self._reading):
                    self._reading.wait_event(copied)
                    if bucket.shared is None and arriving.undigested_bytes >= DIGEST_BYTES:
                        arriving.start_digests()  # tensors by reference wait for `prove`, and share one launch
        except Exception as error:
            self._fault = str(error)
            raise
        return copied

    @staticmethod
    def _after(bucket: Bucket, stream: torch.cuda.Stream) -> None:
        if bucket.ready is not None:
            stream.wait_event(bucket.ready)

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

    # ---- prove

    def prove(self, digests: Digests) -> None:
        """Phase one: everything arrived, and its digests equal the trainer's. The live weights are not yet new
        (staged), or not yet trusted (direct)."""
        arriving = self._require(State.OPEN, "prove")
        if missing := arriving.missing():
            raise self._faulty(
                f"{len(missing)} tensors did not arrive whole at {self._me()}: {some(missing)}",
                "a bucket was lost; the publication is repeated in full",
            )
        if set(digests) != set(arriving.specs):
            odd = sorted(set(digests) ^ set(arriving.specs))
            raise self._faulty(
                f"the trainer's digests and the manifest differ in {some(odd)}",
                "the export and its manifest must agree",
            )
        with self._on(self._reading):
            arrived, parts = arriving.digests()
        unchanged = [name for name in arriving.specs if name not in arrived]  # proven with the base version
        arrived |= {name: self._held_full[name] for name in unchanged}
        changed = _differing(digests, arrived)
        if changed:
            raise self._faulty(
                f"{len(changed)} tensors reached {self._me()} altered: {some(changed)}",
                "the transport damaged them; the publication is repeated in full",
            )
        self._expected_live = {name: d for name, d in digests.items() if name not in arriving.dropped}
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
        arriving = self._require(State.PROVEN, "commit")
        with self._on(self._copying, after_current=True):  # old tensors take the memory that new ones leave
            return self._commit(arriving)

    def _commit(self, arriving: Arriving) -> CommitReport:
        if not self._held_live and self.staging == "staged":
            self._held_live = self._live_digests(self.live.specs())  # so that a roll-back can be proven
        started_at_s = time.perf_counter()
        replaced: list[str] = []
        try:
            self._is_torn = True
            for name in arriving.staged:
                if name not in arriving.dropped:
                    self._exchange(name, arriving.staged, replaced)
            _synchronize(arriving.staged.values())
            written_at_s = time.perf_counter()
            live = self._live_digests(self._expected_live)
        except Exception as error:
            raise self._rolled_back(
                arriving, replaced, f"the write into the engine failed: {error}"
            ) from error
        changed = _differing(self._expected_live, live)
        if changed:
            raise self._rolled_back(arriving, replaced, f"the live proof failed for {some(changed)}")
        proven_at_s = time.perf_counter()
        report = CommitReport(
            replica_id=self.replica_id,
            weight_version=arriving.manifest.weight_version,
            num_tensors=len(arriving.specs),
            num_bytes=sum(spec.num_bytes for spec in arriving.specs.values()),
            write_s=written_at_s - started_at_s,
            digest_s=proven_at_s - written_at_s,
            coverage=self.coverage,
        )
        self.weight_version = arriving.manifest.weight_version
        self._held_live, self._held_full = live, self._digests
        self._clear()
        self.state = State.IDLE
        return report

    def _exchange(self, name: str, staged: dict[str, Tensor], replaced: list[str]) -> None:
        """Write the staged tensor; the old bytes take its place in the staging, for a roll-back."""
        live, new = self.live.read(name), staged[name]
        if (live.data_ptr(), live.stride(), live.shape) == (new.data_ptr(), new.stride(), new.shape):
            return  # the trainer's tensor is the engine's (one process): there is nothing to write
        old = live.detach().clone()
        if isinstance(self.live, MappedWeights) and self.live.is_cut(name):
            whole = new.clone()
            self.live.part(name, whole).copy_(old)
            old = whole
        staged[name] = old
        replaced.append(name)
        self.live.write(name, new)

    def _rolled_back(self, arriving: Arriving, replaced: Iterable[str], why: str) -> SyncError:
        """Put the old tensors back, and prove them."""
        outcome = "its old weights are gone"
        is_whole = False
        if self.staging == "staged":
            try:
                for name in replaced:
                    self.live.write(name, arriving.staged[name])
                is_whole = not _differing(self._held_live, self._live_digests(self._held_live))
                outcome = "its old weights were put back and " + ("proven" if is_whole else "did not prove")
            except Exception as error:
                outcome = f"its old weights could not be put back ({error})"
        self._clear()
        self.state = State.IDLE if is_whole else State.BROKEN
        return SyncError(
            f"{self._me()} could not take version {arriving.manifest.weight_version}: {why}; {outcome}",
            f"it stays out of service at version {self.weight_version} until it is re-synced in full",
        )

    # ---- abort

    def abort(self) -> None:
        """Drop the open publication. BROKEN where it had begun to write, or was to mend what was BROKEN."""
        for stream in (self._copying, self._reading):
            if stream is not None:
                stream.synchronize()  # nothing reads the sender's buffers or the staging any more
        has_written = self._arriving is not None and self._arriving.has_written
        is_broken = self.state is State.BROKEN or self._is_torn or has_written
        self._clear()
        self.state = State.BROKEN if is_broken else State.IDLE

    # ---- helpers

    def _require(self, state: State, action: str) -> Arriving:
        if self.state is not state or self._arriving is None:
            raise SyncError(
                f"{self._me()} was asked to {action} in state {self.state.value}",
                "the order is open, receive, prove, commit; abort and begin again",
            )
        if self._fault:
            raise SyncError(
                f"{self._me()} was asked to {action} after a fault: {self._fault}",
                "abort this publication and repeat it in full",
            )
        return self._arriving

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


def _differing(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    return [name for name, digest in expected.items() if actual.get(name) != digest]


def _synchronize(tensors: Iterable[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
