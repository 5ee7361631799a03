"""One publication under way: who is still in it, what is on its way, how it failed or what it came to."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rollbook.errors import DeadlineError, RunError, SyncError
from rollbook.sync.bucket import Packer
from rollbook.sync.digest import fold
from rollbook.sync.report import PublicationReport
from rollbook.weights import Arrival, CommitReport, Digests, WeightPort


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
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


@dataclass(slots=True)
class Publication:
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
    under_way: set[Sent] = field(default_factory=set)
    is_over: bool = False
    """Nothing more of it is to be sent."""

    def refused(self, phase: str) -> SyncError:
        replica_id, first = next(iter(self.failed.items()))
        others = len(self.failed) - 1
        what = first.what if isinstance(first, RunError) else f"{type(first).__name__}: {first}"
        remedy = first.remedy if isinstance(first, RunError) else "look at the replica's own log"
        more = f" (and {others} more)" if others else ""
        error = SyncError(
            f"version {self.version} was not published: {phase} failed on replica {replica_id}{more}: {what}",
            remedy,
        )
        error.__cause__ = first
        return error

    def hangs(self, what: str, deadline_s: float) -> DeadlineError:
        return DeadlineError(
            f"the trainer did not export {what} of version {self.version} within {deadline_s:g} s",
            "a rank hangs in the gather, or sync.export_deadline_s is too short for this model",
        )

    def export_failed(self, what: str, error: Exception) -> SyncError:
        return SyncError(
            f"the trainer's export of version {self.version} failed at {what}: "
            f"{type(error).__name__}: {error}",
            "the replicas keep their version; mend the trainer and publish again",
        )

    def report(
        self,
        packer: Packer,
        digests: Digests,
        commits: list[CommitReport],
        *,
        held: Digests,
        quarantined: Mapping[int, str],
        started_at_s: float,
    ) -> PublicationReport:
        """Of a publication that was committed; `held` are the digests of the version before."""
        num_bytes = sum(spec.num_bytes for spec in packer.specs.values())
        if packer.acknowledged is not None and self.base is not None:
            changed_frac = packer.acknowledged.num_changed / max(1, packer.acknowledged.num_elements)
        else:
            changed = sum(s.num_bytes for s in packer.specs.values() if held.get(s.name) != digests[s.name])
            changed_frac = changed / max(1, num_bytes)
        marks_s = self.marks_s
        return PublicationReport(
            weight_version=self.version,
            base_version=self.base,
            num_tensors=len(packer.specs),
            num_adapter_tensors=sum("lora_" in name for name in packer.specs),
            num_bytes=num_bytes,
            sent_bytes=packer.sent_bytes,
            num_buckets=self.num_buckets,
            changed_frac=changed_frac,
            export_s=self.export_s,
            open_s=marks_s["open"] - started_at_s,
            stream_s=marks_s["stream"] - marks_s["open"],
            prove_s=marks_s["prove"] - marks_s["stream"],
            commit_s=marks_s["commit"] - marks_s["prove"],
            total_s=marks_s["commit"] - started_at_s,
            replicas=tuple(commits),
            quarantined=dict(quarantined),
            digest=fold(digests),
            superseded={i: old for i, old in self.superseded.items() if old},
        )
