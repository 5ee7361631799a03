"""The trainer's side of a publication: one export pass, two phases over all replicas, one new version.

    publish(v):  open ──► stream ──────────────────────────► prove ──► commit ──► report
                 all      export thread: gather, pack, digest   all       all
                 replicas event loop:    buckets on their way,   must      each proves
                                         while one is packed    agree     its live weights

No replica commits before every replica still in the publication has proven what it received. A replica that
fails or misses a deadline leaves the publication: it is asked to abort, put into `quarantined`, and re-synced in
full by the next publication. When the trainer itself fails, every replica is asked to abort and goes on serving
the version it held. The version of this object advances when at least one replica committed.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from rollbook.errors import DeadlineError, RunError, SyncError
from rollbook.sync.bucket import Buffers, PackedViews, Packer
from rollbook.sync.config import SyncConfig
from rollbook.sync.delta import AcknowledgedWeights
from rollbook.sync.digest import fold
from rollbook.sync.handshake import Handshake
from rollbook.sync.quantized import QuantizedSource
from rollbook.sync.report import PublicationReport
from rollbook.weights import Arrival, Bucket, CommitReport, Digests, Manifest, WeightPort, WeightSource

Result = TypeVar("Result")


@dataclass(slots=True)
class _Publication:
    """One publication under way."""

    attempt: int
    version: int
    base: int | None
    ports: dict[int, WeightPort]
    """Replicas still in it."""
    failed: dict[int, Exception] = field(default_factory=dict)
    superseded: dict[int, tuple[int, ...]] = field(default_factory=dict)
    marks_s: dict[str, float] = field(default_factory=dict)
    export_s: float = 0.0
    num_buckets: int = 0
    packing_ends_at_s: float = math.inf
    """Monotonic clock: when the bucket that is being packed is late."""
    under_way: set[_Sent] = field(default_factory=set)
    is_over: bool = False
    """Nothing more of it is to be sent."""


@dataclass(frozen=True, slots=True, eq=False)
class _Sent:
    """One bucket on its way to one replica."""

    port: WeightPort
    arrival: Arrival | None
    failed: Exception | None
    """Why it was not even sent."""
    ends_at_s: float

    def wait(self) -> None:
        if self.failed is not None:
            raise self.failed
        assert self.arrival is not None
        self.arrival.result(max(self.ends_at_s - time.monotonic(), 0.0))

    def cancel(self) -> None:
        if self.arrival is not None:
            self.arrival.cancel()


class Publisher:
    """Publishes a trainer's weights to its replicas, one version at a time.

    Args:
        source: the trainer's export.
        ports: one per replica.
        config: sizes and deadlines.
        buffers: where buckets are packed (a transport's `buffer`); None passes tensors by reference, for replicas
            in this process.
        weight_version: the trainer's version now. The first publication of this object re-syncs every replica in
            full, at this version or a later one, whatever they held.
    """

    def __init__(
        self,
        source: WeightSource,
        ports: Sequence[WeightPort],
        config: SyncConfig,
        *,
        buffers: Buffers | None = None,
        weight_version: int = 0,
    ) -> None:
        self.source = source
        self.ports = {port.replica_id: port for port in ports}
        self.config = config
        self.weight_version = weight_version
        """The newest version that a replica holds."""
        self.quarantined: dict[int, str] = {}
        """Replicas out of service, and why. The next publication re-syncs them in full."""
        self.handshakes = {port.replica_id: Handshake(port.replica_id, weight_version) for port in ports}
        self._buffers = buffers
        self._views: PackedViews = {}
        self._digests: Digests | None = None
        self._unrounded = ""
        """Digest of what the newest version was rounded from; empty where it was sent as it is."""
        self._acknowledged = AcknowledgedWeights() if config.delta else None
        self._under_way: int | None = None
        self._num_attempts = 0
        self._export = ThreadPoolExecutor(1, thread_name_prefix="export")

    def join(self, port: WeightPort) -> None:
        """One more replica, which holds nothing yet: `resync` brings it to the newest version."""
        self.ports[port.replica_id] = port
        self.handshakes[port.replica_id] = Handshake(port.replica_id, self.weight_version)

    def leave(self, replica_id: int) -> None:
        """It is sent no further version."""
        for held in (self.ports, self.handshakes, self.quarantined):
            held.pop(replica_id, None)

    async def publish(self, weight_version: int, *, moved: bool = True) -> PublicationReport:
        """Bring every replica to `weight_version`, quarantined ones included (in full).

        Args:
            moved: an update changed a bit of the weights since the last publication. Bits that are all the same are
                then an error: the export missed the update. So is any other bit where nothing moved.
        Raises:
            SyncError: the export is at fault, or no replica could take the version. Every replica that answers is
                back at the version it held.
            DeadlineError: the trainer's export hangs.
        """
        is_first = self._digests is None
        if weight_version < self.weight_version or (weight_version == self.weight_version and not is_first):
            raise SyncError(
                f"version {weight_version} was to be published after version {self.weight_version}",
                "versions only grow: publish the next one, or `resync` a replica at this one",
            )
        base = None
        if self._acknowledged is not None and not self.quarantined and not is_first:
            base = self._acknowledged.weight_version
        return await self._transact(weight_version, list(self.ports), base=base, moved=moved)

    async def resync(self, replica_id: int) -> PublicationReport:
        """Send the newest version in full to one replica, which is then back in service.

        Raises:
            SyncError: nothing was published yet, the trainer has moved on, or the replica failed again.
        """
        if self._digests is None:
            raise SyncError(
                f"replica {replica_id} was to be re-synced before the first publication",
                "publish first: it brings every replica along",
            )
        return await self._transact(self.weight_version, [replica_id], base=None, moved=False, is_resync=True)

    def close(self) -> None:
        """End the export thread."""
        self._export.shutdown(wait=False)

    # ---- one publication

    async def _transact(
        self,
        version: int,
        replica_ids: Sequence[int],
        *,
        base: int | None,
        moved: bool,
        is_resync: bool = False,
    ) -> PublicationReport:
        if self._under_way is not None:
            raise SyncError(
                f"version {version} was to be published while version {self._under_way} is under way",
                "one publication at a time: await the first one",
            )
        self._under_way = version
        self._num_attempts += 1
        ports = {i: self.ports[i] for i in replica_ids}
        publication = _Publication(self._num_attempts, version, base, ports)
        acknowledged = None if is_resync else self._acknowledged
        packer = Packer(
            specs={spec.name: spec for spec in self.source.weight_specs()},
            stream=iter(self.source.export_weights()),
            weight_version=version,
            bucket_bytes=self.config.bucket_bytes,
            buffers=self._buffers,
            num_slots=self.config.max_buckets,
            views=self._views,
            acknowledged=acknowledged,
        )
        try:
            if acknowledged is not None:
                acknowledged.begin(base)
            started_at_s = time.perf_counter()
            await self._open(publication, packer)
            publication.marks_s["open"] = time.perf_counter()
            await self._stream(publication, packer)
            digests, unrounded = await self._in_export_thread(
                publication, "the digests", lambda: (packer.digests(), self._digest_before_rounding())
            )
            publication.marks_s["stream"] = time.perf_counter()
            self._check_digests(version, digests, unrounded, moved=moved, must_equal=is_resync)
            await self._each(
                publication, "prove", lambda port: port.prove(digests), self.config.prove_deadline_s
            )
            publication.marks_s["prove"] = time.perf_counter()
            commits = await self._each(
                publication,
                "commit",
                lambda port: port.commit(),
                self.config.commit_deadline_s,
                one_by_one=self.config.commit_order == "rolling",
            )
            publication.marks_s["commit"] = time.perf_counter()
        except BaseException:
            for replica_id in replica_ids:
                self.handshakes[replica_id].withdraw(version)
            await asyncio.shield(self._abort(list(publication.ports.values())))
            raise
        finally:
            self._under_way = None
        report = self._report(publication, packer, digests, list(commits.values()), started_at_s)
        self.weight_version = version
        if not is_resync:  # which may find the trainer moved by less than what is sent resolves
            self._digests, self._unrounded = digests, unrounded
        if acknowledged is not None:
            acknowledged.acknowledge(version)
        return report

    async def _open(self, publication: _Publication, packer: Packer) -> None:
        base = publication.base
        base_digest = fold(self._digests) if base is not None and self._digests is not None else None
        is_first = self._digests is None

        async def open_one(port: WeightPort) -> None:
            is_resync = is_first or publication.version == self.weight_version
            is_resync = is_resync or port.replica_id in self.quarantined
            self.handshakes[port.replica_id].offer(publication.version)
            await port.open(
                Manifest(
                    weight_version=publication.version,
                    base_version=base,
                    tensors=tuple(packer.specs.values()),
                    base_digest=base_digest,
                    is_resync=is_resync,
                )
            )

        await self._each(publication, "open", open_one, self.config.open_deadline_s)

    async def _stream(self, publication: _Publication, packer: Packer) -> None:
        """The export thread packs buckets and sends them on their way; this watches that it goes on."""
        loop = asyncio.get_running_loop()
        # From now on: the thread may still hang in an export that was given up.
        publication.packing_ends_at_s = time.monotonic() + self.config.export_deadline_s
        streaming = loop.run_in_executor(self._export, self._send_all, publication, packer, loop)
        try:
            while not streaming.done():
                wait_s = publication.packing_ends_at_s - time.monotonic()
                if wait_s < 0:
                    raise self._hangs(publication, f"bucket {publication.num_buckets}")
                await asyncio.wait({streaming}, timeout=min(wait_s, self.config.export_deadline_s))
            try:
                streaming.result()
            except (RunError, asyncio.CancelledError):
                raise
            except Exception as error:
                raise self._export_failed(publication, f"bucket {publication.num_buckets}", error) from error
        finally:
            publication.is_over = True
            for sent in list(publication.under_way):
                sent.cancel()
            if publication.packing_ends_at_s == math.inf:  # it waits for nothing any more
                await asyncio.wait({streaming}, timeout=self.config.abort_deadline_s)
            if streaming.done() and not streaming.cancelled():
                streaming.exception()

    def _send_all(self, publication: _Publication, packer: Packer, loop: asyncio.AbstractEventLoop) -> None:
        """On the export thread. With two slots, bucket i+2 is packed as soon as bucket i has arrived, while i+1
        travels."""
        buckets: Iterator[Bucket | None] = iter(packer.buckets())
        travelling: deque[list[_Sent]] = deque()
        try:
            while not publication.is_over:
                began_at_s = time.perf_counter()
                publication.packing_ends_at_s = time.monotonic() + self.config.export_deadline_s
                bucket = next(buckets, None)
                publication.packing_ends_at_s = math.inf
                publication.export_s += time.perf_counter() - began_at_s
                # Given up while it was packed, a bucket is sent to nobody.
                if bucket is None or publication.is_over:
                    break
                publication.num_buckets += 1
                travelling.append(self._send(publication, bucket, loop))
                if len(travelling) == self.config.max_buckets:
                    self._arrive(publication, travelling.popleft(), loop)
            while travelling and not publication.is_over:
                self._arrive(publication, travelling.popleft(), loop)
        finally:
            for sent in itertools.chain.from_iterable(travelling):
                sent.cancel()

    def _send(
        self, publication: _Publication, bucket: Bucket, loop: asyncio.AbstractEventLoop
    ) -> list[_Sent]:
        """The bucket on its way to every replica that is still in the publication."""
        ports = list(publication.ports.values())
        bucket = replace(bucket, attempt=publication.attempt, replica_ids=tuple(publication.ports))
        sent = []
        for port in ports:
            arrival: Arrival | None = None
            failed: Exception | None = None
            try:
                receiving = port.receive(bucket)
                if isinstance(receiving, Coroutine):
                    receiving = asyncio.run_coroutine_threadsafe(receiving, loop)
                arrival = receiving
            except Exception as error:
                failed = error
            sent.append(_Sent(port, arrival, failed, time.monotonic() + self.config.receive_deadline_s))
        publication.under_way.update(sent)
        return sent

    def _arrive(
        self, publication: _Publication, bucket: Sequence[_Sent], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Wait until a bucket has arrived; replicas that it does not reach leave the publication."""
        outcomes: list[BaseException | None] = []
        for sent in bucket:
            try:
                sent.wait()
                outcomes.append(None)
            except TimeoutError:
                sent.cancel()
                deadline_s = self.config.receive_deadline_s
                outcomes.append(self._late(publication, "receive", sent.port.replica_id, deadline_s))
            except BaseException as error:
                outcomes.append(error)
        publication.under_way.difference_update(bucket)
        if publication.is_over or not any(outcomes):
            return
        ports = [sent.port for sent in bucket]
        settling = self._settled(publication, "receive", ports, outcomes)
        asyncio.run_coroutine_threadsafe(settling, loop).result()

    def _digest_before_rounding(self) -> str:
        return self.source.digest_before_rounding() if isinstance(self.source, QuantizedSource) else ""

    def _check_digests(
        self, version: int, digests: Digests, unrounded: str, *, moved: bool, must_equal: bool
    ) -> None:
        is_same = self._digests is not None and dict(digests) == dict(self._digests)
        if moved and is_same and unrounded == self._unrounded:
            raise SyncError(
                f"all {len(digests)} tensors of version {version} equal version {self.weight_version} bit for bit, "
                "and the trainer says that it has moved",
                "the export misses the update (adapters not merged, a stale copy, a learning rate of 0); if "
                "nothing was trained on purpose, publish with moved=False",
            )
        if must_equal and not is_same:
            raise SyncError(
                f"the trainer's weights are no longer those published as version {version}",
                "publish the next version instead: it re-syncs quarantined replicas as well",
            )
        if not moved and self._digests is not None and not is_same:
            raise SyncError(
                f"{_changed_names(self._digests, digests)} of version {version} differ from version "
                f"{self.weight_version}, and the trainer says that no update moved its weights",
                "something besides an update wrote into the trainer's weights, or an update was not reported: look at "
                "what ran since that version",
            )

    # ---- replicas

    async def _each(
        self,
        publication: _Publication,
        phase: str,
        call: Callable[[WeightPort], Awaitable[Result]],
        deadline_s: float,
        *,
        one_by_one: bool = False,
    ) -> dict[int, Result]:
        """One phase over all replicas, at once or in turn; those that fail leave the publication."""
        ports = list(publication.ports.values())

        async def over(some: Sequence[WeightPort]) -> list[Result | BaseException]:
            return await asyncio.gather(
                *(self._within(phase, port.replica_id, call(port), deadline_s, publication) for port in some),
                return_exceptions=True,
            )

        turns = [[port] for port in ports] if one_by_one else [ports]
        outcomes = [outcome for turn in turns for outcome in await over(turn)]
        return await self._settled(publication, phase, ports, outcomes)

    async def _settled(
        self,
        publication: _Publication,
        phase: str,
        ports: Sequence[WeightPort],
        outcomes: Sequence[Result | BaseException],
    ) -> dict[int, Result]:
        """Replicas that failed a phase leave the publication; the answers of the others."""
        results: dict[int, Result] = {}
        for port, outcome in zip(ports, outcomes, strict=True):
            if isinstance(outcome, Exception):
                publication.failed.setdefault(port.replica_id, outcome)
                publication.ports.pop(port.replica_id, None)
                self.quarantined[port.replica_id] = _one_line(publication.failed[port.replica_id])
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                results[port.replica_id] = outcome
                if phase == "commit":
                    acknowledge = self.handshakes[port.replica_id].acknowledge
                    publication.superseded[port.replica_id] = acknowledge(publication.version)
                    self.quarantined.pop(port.replica_id, None)
        lost = [port for port in ports if port.replica_id not in results]
        if lost and phase != "commit":
            await self._abort(lost)
        if not results or (lost and self.config.on_replica_failure == "abort" and phase != "commit"):
            raise self._refused(publication, phase)
        return results

    def _refused(self, publication: _Publication, phase: str) -> SyncError:
        replica_id, first = next(iter(publication.failed.items()))
        others = len(publication.failed) - 1
        what = first.what if isinstance(first, RunError) else f"{type(first).__name__}: {first}"
        remedy = first.remedy if isinstance(first, RunError) else "look at the replica's own log"
        more = f" (and {others} more)" if others else ""
        error = SyncError(
            f"version {publication.version} was not published: {phase} failed on replica {replica_id}{more}: {what}",
            remedy,
        )
        error.__cause__ = first
        return error

    async def _within(
        self,
        phase: str,
        replica_id: int,
        call: Awaitable[Result],
        deadline_s: float,
        publication: _Publication | None = None,
    ) -> Result:
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            raise self._late(publication, phase, replica_id, deadline_s) from None

    def _late(
        self, publication: _Publication | None, phase: str, replica_id: int, deadline_s: float
    ) -> DeadlineError:
        subject = f" of version {publication.version}" if publication is not None else ""
        return DeadlineError(
            f"replica {replica_id} did not answer to {phase}{subject} within {deadline_s:g} s "
            f"({self.handshakes[replica_id].waits_for()})",
            f"look at replica {replica_id}: a long step, a dead process, or raise sync.{phase}_deadline_s",
        )

    async def _abort(self, ports: Sequence[WeightPort]) -> None:
        """Ask replicas to drop the publication; one that does not answer is quarantined already, or is now."""
        outcomes = await asyncio.gather(
            *(
                self._within("abort", port.replica_id, port.abort(), self.config.abort_deadline_s)
                for port in ports
            ),
            return_exceptions=True,
        )
        for port, outcome in zip(ports, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.quarantined.setdefault(port.replica_id, _one_line(outcome))

    # ---- the trainer

    async def _in_export_thread(
        self, publication: _Publication, what: str, work: Callable[[], Result]
    ) -> Result:
        """Run trainer's work on the export thread; collectives stay on one thread, in one order."""
        began_at_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.config.export_deadline_s):
                return await asyncio.get_running_loop().run_in_executor(self._export, work)
        except TimeoutError:
            raise self._hangs(publication, what) from None
        except (RunError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise self._export_failed(publication, what, error) from error
        finally:
            publication.export_s += time.perf_counter() - began_at_s

    def _hangs(self, publication: _Publication, what: str) -> DeadlineError:
        return DeadlineError(
            f"the trainer did not export {what} of version {publication.version} within "
            f"{self.config.export_deadline_s:g} s",
            "a rank hangs in the gather, or sync.export_deadline_s is too short for this model",
        )

    def _export_failed(self, publication: _Publication, what: str, error: Exception) -> SyncError:
        return SyncError(
            f"the trainer's export of version {publication.version} failed at {what}: "
            f"{type(error).__name__}: {error}",
            "the replicas keep their version; mend the trainer and publish again",
        )

    def _report(
        self,
        publication: _Publication,
        packer: Packer,
        digests: Digests,
        commits: list[CommitReport],
        started_at_s: float,
    ) -> PublicationReport:
        num_bytes = sum(spec.num_bytes for spec in packer.specs.values())
        if packer.acknowledged is not None and publication.base is not None:
            changed_frac = packer.acknowledged.num_changed / max(1, packer.acknowledged.num_elements)
        else:
            held = self._digests or {}
            changed = sum(s.num_bytes for s in packer.specs.values() if held.get(s.name) != digests[s.name])
            changed_frac = changed / max(1, num_bytes)
        marks_s = publication.marks_s
        return PublicationReport(
            weight_version=publication.version,
            base_version=publication.base,
            num_tensors=len(packer.specs),
            num_adapter_tensors=sum("lora_" in name for name in packer.specs),
            num_bytes=num_bytes,
            sent_bytes=packer.sent_bytes,
            num_buckets=publication.num_buckets,
            changed_frac=changed_frac,
            export_s=publication.export_s,
            open_s=marks_s["open"] - started_at_s,
            stream_s=marks_s["stream"] - marks_s["open"],
            prove_s=marks_s["prove"] - marks_s["stream"],
            commit_s=marks_s["commit"] - marks_s["prove"],
            total_s=marks_s["commit"] - started_at_s,
            replicas=tuple(commits),
            quarantined=dict(self.quarantined),
            digest=fold(digests),
            superseded={i: old for i, old in publication.superseded.items() if old},
        )


def _changed_names(earlier: Digests, later: Digests) -> str:
    changed = [name for name in later if earlier.get(name) != later[name]]
    return f"{len(changed)} tensors ({', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''})"


def _one_line(error: Exception) -> str:
    return error.what if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
