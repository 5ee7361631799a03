"""Who has which version: every offered version ends acknowledged or explicitly superseded, and nobody waits for ever.

The trainer offers versions; a consumer (a replica) acknowledges. The rule that keeps both from waiting for each
other: an acknowledgement of version n settles *every* version up to n. What the consumer jumped over is recorded
as superseded, so the trainer never waits for a version that nobody will ever hold. A publication that failed on
every replica is withdrawn: its number was never a version. To a consumer that comes back from a crash the trainer
offers the newest version again, whatever it holds.

The machine is pure and small enough to be checked by walking through all its states (tests/property).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.errors import SyncError


@dataclass(slots=True)
class Handshake:
    """The trainer's side, for one replica."""

    replica_id: int
    acknowledged: int
    """Newest version the replica proved."""
    offered: int | None = None
    """Version under way; None when everything is settled."""
    superseded: dict[int, int] = field(default_factory=dict)
    """Offered version -> the version that took its place."""
    _unsettled: list[int] = field(default_factory=list)

    def offer(self, version: int) -> None:
        """Begin version `version`. One that is still under way is superseded by it, if it is older."""
        if self.offered is not None and version < self.offered:
            raise SyncError(
                f"version {version} was offered to replica {self.replica_id} after version {self.offered}",
                "versions only grow; publish the next one",
            )
        if self.offered != version:
            self._unsettled.append(version)
        self.offered = version

    def acknowledge(self, version: int) -> tuple[int, ...]:
        """The replica proved `version`: everything up to it is settled. Returns what it jumped over."""
        if version not in self._unsettled:
            raise SyncError(
                f"replica {self.replica_id} acknowledged version {version}; the trainer waits for {self.offered} and "
                f"the replica last held {self.acknowledged}",
                "the replica talks to another trainer, or a message was lost: re-sync it in full",
            )
        jumped = tuple(old for old in self._unsettled if old < version)
        for old in jumped:
            self.superseded[old] = version
        self._unsettled = [newer for newer in self._unsettled if newer > version]
        self.acknowledged = version
        if version == self.offered:
            self.offered = None
        return jumped

    def withdraw(self, version: int) -> int | None:
        """The trainer gave `version` up before the replica took it. Returns an older version that it still lacks."""
        self._unsettled = [other for other in self._unsettled if other != version]
        if self.offered == version:
            self.offered = max(self._unsettled, default=None)
        return self.offered

    def waits_for(self) -> str:
        """Both sides' versions, for the message of a deadline."""
        return f"the trainer offered version {self.offered}, the replica last proved {self.acknowledged}"
