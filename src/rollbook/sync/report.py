"""What a publication did, for the step's metrics and the event log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollbook.observe.values import Last, Peak, Total, Values
from rollbook.weights import CommitReport


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationReport:
    """What one publication did."""

    weight_version: int
    base_version: int | None
    num_tensors: int
    num_adapter_tensors: int
    """Of them LoRA tensors, by name; 0 when adapters were merged."""
    num_bytes: int
    """Bytes of all tensors, once."""
    sent_bytes: int
    """Bytes in buckets, once; fewer than `num_bytes` for a delta, 0 when tensors went by reference."""
    num_buckets: int
    changed_frac: float
    """Elements that changed against the base (delta), else bytes of the tensors whose digest changed."""
    export_s: float
    """Trainer's side: gather, pack and digest; overlaps the transfer."""
    open_s: float
    stream_s: float
    """From the first export to the last bucket's arrival."""
    prove_s: float
    commit_s: float
    total_s: float
    replicas: tuple[CommitReport, ...]
    """One for each replica that committed."""
    quarantined: Mapping[int, str]
    """Replica -> why it is out of service after this publication."""
    digest: str
    """Of all tensors, as the trainer sent them (`sync.digest.fold`)."""
    superseded: Mapping[int, tuple[int, ...]]
    """Replica -> offered versions that it will never hold, because this one took their place."""

    @property
    def committed(self) -> tuple[int, ...]:
        """Replicas that hold this version, proven."""
        return tuple(report.replica_id for report in self.replicas)

    @property
    def gb_per_s(self) -> float:
        """Weights delivered to one replica, over the whole publication."""
        return self.num_bytes / self.total_s / 1e9 if self.total_s > 0 else 0.0

    def values(self) -> Values:
        """Readings for the catalogue's `sync/...` metrics."""
        return {
            "sync/num_bytes": Total((self.sent_bytes or self.num_bytes) * len(self.replicas)),
            "sync/num_publications": Total(1),
            "checkpoint_engine/changed_ratio": Last(self.changed_frac),
            "sync/export_s": Total(self.export_s),
            "sync/write_s": Peak(max(r.write_s for r in self.replicas)),
            "sync/digest_s": Peak(max(r.digest_s for r in self.replicas)),
            "sync/pause_s": Peak(max(r.write_s + r.digest_s for r in self.replicas)),
        }

    def as_event(self) -> dict[str, object]:
        """JSON values for the event log."""
        return {
            "weight_version": self.weight_version,
            "base_version": self.base_version,
            "num_tensors": self.num_tensors,
            "num_adapter_tensors": self.num_adapter_tensors,
            "num_bytes": self.num_bytes,
            "sent_bytes": self.sent_bytes,
            "changed_frac": self.changed_frac,
            "export_s": self.export_s,
            "open_s": self.open_s,
            "stream_s": self.stream_s,
            "prove_s": self.prove_s,
            "commit_s": self.commit_s,
            "total_s": self.total_s,
            "committed": list(self.committed),
            "coverage": {str(r.replica_id): dict(r.coverage) for r in self.replicas},
            "quarantined": {str(replica_id): why for replica_id, why in self.quarantined.items()},
            "digest": self.digest,
            "superseded": {str(replica_id): list(old) for replica_id, old in self.superseded.items()},
        }
