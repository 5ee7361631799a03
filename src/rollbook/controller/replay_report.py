"""What a replay found: the places at which a run and its repetition differ, and what that comes to."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.controller.replay_log import Threads

MAX_DIFFERENCES = 20
"""Differences that are listed; all are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place at which the log and its repetition are not the same."""

    kind: str
    """digest, loss_mask, token, length, logprob, version, reward, or failure."""
    step: int
    where: str
    logged: str
    replayed: str

    def __str__(self) -> str:
        return (
            f"step {self.step}, {self.where}: {self.kind} {self.logged} in the log, {self.replayed} replayed"
        )


@dataclass(slots=True, kw_only=True)
class ReplayReport:
    """What was compared, and where it differs."""

    run_dir: str
    num_steps: int = 0
    num_digests: int = 0
    num_trajectories: int = 0
    num_tokens: int = 0
    num_cut: int = 0
    """Trajectories that more than one version sampled."""
    num_differences: int = 0
    differences: list[Difference] = field(default_factory=list)
    """The first ones."""
    notes: list[str] = field(default_factory=list)
    num_by_kind: dict[str, int] = field(default_factory=dict)
    """Differences of each kind."""
    logprob_gap_nats: float = 0.0
    """Largest difference of a logprob, of trajectories with the same tokens."""
    is_batch_invariant: bool = True
    """Of the run: an engine's numbers do not depend on what it computes beside a sequence."""
    num_trainer_ranks: int = 1
    """Of the run; a replay has one."""

    run_threads: list[Threads] = field(default_factory=list)
    """Of the run's processes, as its log says; a replay computes with the first."""
    threads: Threads | None = None
    """Of the replay."""

    @property
    def is_equal(self) -> bool:
        return self.num_differences == 0

    def conclusion(self) -> str:
        """What the comparison comes to, and why bits that differ need not be a fault."""
        if self.is_equal:
            return "EQUAL, bit for bit"
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.num_by_kind.items())
        said = f"NOT EQUAL: {self.num_differences} differences ({kinds}), the first above"
        if set(self.num_by_kind) == {"logprob"}:
            said += (
                f"\nTokens, rewards, versions and digests are all equal; logprobs differ by at most "
                f"{self.logprob_gap_nats:.1e} nats"
            )
        said += self._of_threads()
        if not self.is_batch_invariant:
            said += (
                "\nThe run has rollout.batch_invariant = false, so that an engine's rounding depends on the sequences "
                "beside one: it can be repeated, and not to the last bit. A run with rollout.batch_invariant = true "
                "can"
            )
        if self.num_trainer_ranks > 1:
            said += (
                f"\nThe run's trainer was divided among {self.num_trainer_ranks} ranks, which add gradients up in "
                "another order than the one rank of a replay: weights differ in their last bits from the first update "
                "on"
            )
        return said

    def _of_threads(self) -> str:
        """Where the run was not, or may not have been, computed with the threads of the replay."""
        if self.threads is None or self.run_threads == [self.threads]:
            return ""
        known = ", then ".join(map(str, self.run_threads))
        run = f"computed with {known}" if known else "does not say with how many threads it computed"
        return (
            f"\nThe run {run}, and this replay with {self.threads}: another number of threads adds floats up in "
            "another order, so that last bits differ"
        )

    def differs(self, kind: str, step: int, where: str, logged: object, replayed: object) -> None:
        self.num_differences += 1
        self.num_by_kind[kind] = self.num_by_kind.get(kind, 0) + 1
        if len(self.differences) < MAX_DIFFERENCES:
            self.differences.append(
                Difference(kind=kind, step=step, where=where, logged=str(logged), replayed=str(replayed))
            )
