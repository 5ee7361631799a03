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
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from torch import Tensor

from rollbook.errors import DeadlineError, RunError, SyncError
from rollbook.sync.bucket import Buffers, PackedViews, Packer
from rollbook.sync.config import SyncConfig
from rollbook.sync.delta import AcknowledgedWeights
from rollbook.sync.digest import fold
from rollbook.sync.export_thread import ExportThread
from rollbook.sync.handshake import Handshake
from rollbook.sync.publication import Publication
from rollbook.sync.quantized import QuantizedSource
from rollbook.sync.report import PublicationReport
from rollbook.sync.sending import Sending
from rollbook.weights import Digests, Manifest, WeightPort, WeightSource

Result = TypeVar("Result")
Exported = tuple[str, Tensor]


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
        self._export = ExportThread()

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

    def close(self) -> str:
        """End the export thread; why it goes on where an export hangs, else nothing. It then reads no tensor after the
        one at which it hangs."""
        deadline_s = self.config.abort_deadline_s
        if self._export.close(deadline_s):
            return ""
        return f"the trainer's export hangs: {deadline_s:g} s after the last publication was given up it had not ended"

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
        publication = Publication(self._num_attempts, version, base, ports)
        acknowledged = None if is_resync else self._acknowledged
        packer = Packer(
            specs={spec.name: spec for spec in self.source.weight_specs()},
            stream=self._while_wanted(publication, self.source.export_weights()),
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
            sending = Sending(
                publication,
                packer,
                self._export,
                self.config,
                settled=partial(self._settled, publication),
                late=partial(self._late, publication),
            )
            await sending.run()
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
        report = publication.report(
            packer,
            digests,
            list(commits.values()),
            held=self._digests or {},
            quarantined=self.quarantined,
            started_at_s=started_at_s,
        )
        self.weight_version = version
        if not is_resync:  # which may find the trainer moved by less than what is sent resolves
            self._digests, self._unrounded = digests, unrounded
        if acknowledged is not None:
            acknowledged.acknowledge(version)
        return report

    async def _open(self, publication: Publication, packer: Packer) -> None:
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

    def _while_wanted(self, publication: Publication, stream: Iterable[Exported]) -> Iterator[Exported]:
        """The export, until nobody waits for it any more: one that hung reads no weight of a later step."""
        for exported in stream:
            if publication.is_over or self._export.is_closed:
                raise SyncError(
                    f"version {publication.version} was given up while it was exported", "publish again"
                )
            yield exported

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
        publication: Publication,
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
        publication: Publication,
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
            raise publication.refused(phase)
        return results

    async def _within(
        self,
        phase: str,
        replica_id: int,
        call: Awaitable[Result],
        deadline_s: float,
        publication: Publication | None = None,
    ) -> Result:
        try:
            async with asyncio.timeout(deadline_s):
                return await call
        except TimeoutError:
            raise self._late(publication, phase, replica_id, deadline_s) from None

    def _late(
        self, publication: Publication | None, phase: str, replica_id: int, deadline_s: float
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
        self, publication: Publication, what: str, work: Callable[[], Result]
    ) -> Result:
        """Run trainer's work on the export thread; collectives stay on one thread, in one order."""
        began_at_s = time.perf_counter()
        try:
            async with asyncio.timeout(self.config.export_deadline_s):
                return await asyncio.wrap_future(self._export.submit(work))
        except TimeoutError:
            raise publication.hangs(what, self.config.export_deadline_s) from None
        except (RunError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise publication.export_failed(what, error) from error
        finally:
            publication.export_s += time.perf_counter() - began_at_s


def _changed_names(earlier: Digests, later: Digests) -> str:
    changed = [name for name in later if earlier.get(name) != later[name]]
    return f"{len(changed)} tensors ({', '.join(changed[:4])}{', ...' if len(changed) > 4 else ''})"


def _one_line(error: Exception) -> str:
    return error.what if isinstance(error, RunError) else f"{type(error).__name__}: {error}"
