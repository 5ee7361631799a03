"""Keeps the buffer full, beside the step loop.

    prompt stream ──► admit ──► members (agent loop on an engine) ──► score ──► shape, filter ──► buffer
         ▲              ▲                                                                           │
         │              └── capacity: places left under the staleness bound ◄───────────────────────┤
         └── acknowledged when trained, failed or evicted ◄──── collect() ◄─────────────────────────┘

One task per group. It *takes* an admitted prompt, *gives* a finished or failed group, *waits for* slots of the
engine, and is *freed by* its last member or by its deadline. Whatever happens inside (an exception, a
cancellation, a result that never comes) the group ends exactly once.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from rollbook.buffer.buffer import GroupBuffer, Taken
from rollbook.errors import DeadlineError, EnvError, RewardError, RolloutError, RunError
from rollbook.types import Failure, FailureKind, Group, Prompt, Trajectory

ADMITTED_AT_ONCE = 256
"""Groups that are started before anything else on the event loop has its turn."""
FIRST_GROUPS = 8
"""Groups after which a reward that never varied is worth a word."""
FAILURE_WINDOW = 512
"""Trajectories over which the failure rate is judged."""


class PromptStream(Protocol):
    """A resumable source of prompts. A prompt counts as consumed once it is acknowledged, not when taken."""

    def take_one(self) -> Prompt | None:
        """The next prompt, or None when the data is exhausted."""

    def acknowledge(self, prompt: Prompt) -> None: ...

    @property
    def is_consumed(self) -> bool:
        """Every prompt of every epoch was acknowledged."""

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class Progress:
    """Where a member is, for the message of a deadline."""

    turn_idx: int = 0
    replica_id: int | None = None
    """Which has its request, or had the last one."""
    has_response: bool = False
    """The turn was sampled: environment or scorer are at work."""
    is_done: bool = False

    @property
    def where(self) -> str:
        replica = "no replica yet" if self.replica_id is None else f"replica {self.replica_id}"
        return f"its environment or scorer, after {replica}" if self.has_response else replica


@dataclass(frozen=True, slots=True)
class Member:
    """One trajectory to produce."""

    group_id: int
    member_idx: int
    prompt: Prompt
    progress: Progress = field(default_factory=Progress)


ProduceMember = Callable[[Member], Awaitable[Trajectory]]
"""Generates and scores one trajectory; raises RolloutError where it cannot."""

ShapeGroup = Callable[[Group], None]
"""Adds to the rewards of its members what depends on the algorithm: a length penalty. Does the same again when asked
again."""
DropReason = Callable[[Group], str | None]
"""Why a finished group is not worth training (flat, ...), or None."""


KINDS: tuple[tuple[type[Exception], FailureKind], ...] = (
    (RewardError, FailureKind.REWARD),
    (EnvError, FailureKind.ENVIRONMENT),
    (DeadlineError, FailureKind.TIMEOUT),
    (MemoryError, FailureKind.OUT_OF_MEMORY),
)


def kind_of(error: Exception) -> FailureKind:
    """What a trajectory that ended in this error is counted as; anything unforeseen is the engine's."""
    return next((kind for named, kind in KINDS if isinstance(error, named)), FailureKind.ENGINE)


def in_words(error: Exception) -> str:
    """As a trajectory records it."""
    return str(error) if isinstance(error, RunError | MemoryError) else f"{type(error).__name__}: {error}"


class FailureRateError(RolloutError):
    """So many trajectories fail that training on the rest would be a different task."""


@dataclass(kw_only=True)
class Rollout:
    """See the module's drawing."""

    buffer: GroupBuffer
    stream: PromptStream
    produce: ProduceMember
    shape: ShapeGroup
    drop_reason: DropReason
    group_size: int
    refill_dropped: bool
    """Whether a group with a `drop_reason` is replaced by another prompt."""
    min_scored: int
    """Members with a reward that a group needs to be trained."""
    max_failure_frac: float
    clock: Callable[[], float]
    warn: Callable[[str, str], None]
    """Told at once of a task that has nothing to learn from: what was seen, and a remedy."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Condition()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._members: dict[int, list[Member]] = {}
        self._recent: deque[FailureKind | None] = deque(maxlen=FAILURE_WINDOW)
        self._error: BaseException | None = None
        self.failed_trajectories: list[Trajectory] = []
        """Failures since the last step, for the record of trajectories."""
        self.num_failures: Counter[FailureKind] = Counter()
        self._first_rewards: list[list[float]] | None = []
        """Of the first groups; None once they were judged."""
        self._is_exhausted = False
        self._is_stopped = False
        self._goes_on: asyncio.Handle | None = None
        """The rest of an admission that let others have their turn."""
        self._telling: asyncio.Future[None] | None = None
        """Wakes whoever collects, after the error of such a rest."""

    def admit(self) -> None:
        """Start as many groups as the buffer has places for, the first now and the rest in the next turns of the event
        loop. Called whenever places may have come free."""
        for _ in range(ADMITTED_AT_ONCE):
            if self._is_stopped or self._error is not None or self.buffer.capacity() <= 0:
                return
            prompt = self.stream.take_one()
            if prompt is None:
                self._is_exhausted = True
                return
            group_id = self.buffer.admit(prompt, now_s=self.clock())
            members = [Member(group_id, i, prompt) for i in range(self.group_size)]
            self._members[group_id] = members
            self._tasks[group_id] = asyncio.create_task(self._run_group(group_id, prompt, members))
        if self._goes_on is None:
            self._goes_on = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._goes_on = None
        if not self._admit_beside():
            self._telling = asyncio.ensure_future(self._tell())

    def _admit_beside(self) -> bool:
        """`admit` where nobody waits for its outcome: an error of the prompts is kept for whoever collects."""
        try:
            self.admit()
        except Exception as error:
            self._error = self._error or error
            return False
        return True

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def collect(self) -> Taken:
        """Wait for the groups of the next step and take them.

        Raises:
            DeadlineError: `buffer.step_deadline_s` passed; names the oldest trajectories under way.
            FailureRateError: too many of the recent trajectories failed.
        """
        self.admit()
        deadline_s = self.buffer.config.step_deadline_s
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                await self._changed.wait_for(lambda: self._error is not None or self._is_ready())
        except TimeoutError:
            raise DeadlineError(
                f"step {self.buffer.step} waited {deadline_s:g} s for its groups; under way: {self._describe()}",
                "look at the replica or environment named here; raise buffer.step_deadline_s if responses are "
                "expected to take this long",
            ) from None
        if self._error is not None:
            raise self._error
        taken = self.buffer.take()
        for prompt in taken.prompts_done:
            self.stream.acknowledge(prompt)
        return taken

    def _is_ready(self) -> bool:
        if self.buffer.is_ready():
            return True
        return self._is_exhausted and not self._tasks and self._end_of_data()

    def _end_of_data(self) -> bool:
        """The stream ran dry in the middle of a step: its last groups, if any is left, form a smaller one."""
        self.buffer.is_last_step = True
        return self.buffer.is_ready()

    @property
    def is_exhausted(self) -> bool:
        """No prompt is left and no group is under way."""
        is_dry = self._is_exhausted or self.stream.is_consumed
        return is_dry and not self._tasks and self.buffer.num_finished == 0

    async def stop(self) -> None:
        """Cancel what runs. Its prompts were not acknowledged, so a resumed run samples them again."""
        self._is_stopped = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- one group -------------------------------------------------------------------------------------

    async def _run_group(self, group_id: int, prompt: Prompt, members: list[Member]) -> None:
        try:
            trajectories = await self.run_members(members)
            self._end_group(Group(group_id=group_id, prompt=prompt, trajectories=tuple(trajectories)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a mistake of ours or a lying replica: stop the run, lose nothing
            self._error = error
        finally:
            self._tasks.pop(group_id, None)
            self._members.pop(group_id, None)
            self._admit_beside()
            await self._tell()

    async def run_members(self, members: list[Member]) -> list[Trajectory]:
        """One trajectory for each member, within the group's deadline."""
        tasks = [asyncio.create_task(self._run_member(member)) for member in members]
        late: set[asyncio.Task[Trajectory]] = set()
        try:
            _, late = await asyncio.wait(tasks, timeout=self.buffer.config.group_deadline_s)
        finally:
            for task in tasks:
                task.cancel()  # a no-op for those that are done
            await asyncio.gather(*tasks, return_exceptions=True)
        trajectories = []
        for member, task in zip(members, tasks, strict=True):
            if not task.cancelled():
                trajectories.append(task.result())
            elif task in late:
                trajectories.append(self._failed(member, FailureKind.TIMEOUT, self._late(member)))
            else:
                trajectories.append(self._failed(member, FailureKind.CANCELLED, "cancelled from inside"))
        return trajectories

    async def _run_member(self, member: Member) -> Trajectory:
        """Always a trajectory: what went wrong is recorded on it, its siblings go on."""
        try:
            trajectory = await self.produce(member)
        except Exception as error:
            return self._failed(member, kind_of(error), in_words(error))
        finally:
            member.progress.is_done = True
        if not isinstance(trajectory, Trajectory):
            return self._failed(member, FailureKind.ENGINE, f"the agent loop returned {trajectory!r}")
        return trajectory

    def _late(self, member: Member) -> str:
        deadline_s, progress = self.buffer.config.group_deadline_s, member.progress
        return f"not finished after {deadline_s:g} s, in turn {progress.turn_idx} on {progress.where}"

    @staticmethod
    def _failed(member: Member, kind: FailureKind, message: str) -> Trajectory:
        failure = Failure(kind=kind, message=message, turn_idx=member.progress.turn_idx)
        return Trajectory(
            group_id=member.group_id, member_idx=member.member_idx, prompt=member.prompt, failure=failure
        )

    def _end_group(self, group: Group) -> None:
        failures = [t for t in group.trajectories if t.failure is not None]
        kinds = [t.failure.kind for t in failures if t.failure is not None]
        self.failed_trajectories += failures
        self.num_failures.update(kinds)
        self._recent.extend(kinds)
        self._recent.extend([None] * (len(group.trajectories) - len(kinds)))
        self.note_rewards(group)
        if len(group.scored) < self.min_scored:
            self.buffer.fail(group.group_id, Counter(kinds).most_common(1)[0][0])
        else:
            self.shape(group)
            self.buffer.finish(group, drop_reason=self.drop_reason(group), refill=self.refill_dropped)
        self._check_failure_rate(failures)

    def note_rewards(self, group: Group) -> None:
        """Warn once, as soon as the first groups of the run have all got one and the same reward."""
        if self._first_rewards is None:
            return
        self._first_rewards.append([t.reward for t in group.scored if t.reward is not None])
        if len(self._first_rewards) < min(FIRST_GROUPS, max(self.buffer.groups_per_step, 2)):
            return
        rewards = [reward for held in self._first_rewards for reward in held]
        num_groups, self._first_rewards = len(self._first_rewards), None
        if len(rewards) > 1 and len(set(rewards)) == 1:
            self.warn(
                f"all {len(rewards)} rewards of the first {num_groups} groups are {rewards[0]:g}: there is nothing to "
                "learn from",
                "look at some responses and at the scorer: the task may be too hard or too easy for this model, or its "
                "answers in a form that the scorer does not see",
            )

    def _check_failure_rate(self, failures: list[Trajectory]) -> None:
        """Judged once a window's worth (or a step's worth, if less) of trajectories has ended."""
        enough = min(FAILURE_WINDOW, self.buffer.groups_per_step * self.group_size)
        kinds = Counter(kind for kind in self._recent if kind is not None)
        num_failed = kinds.total()
        if (
            not failures
            or len(self._recent) < enough
            or num_failed <= self.max_failure_frac * len(self._recent)
        ):
            return
        kind, count = kinds.most_common(1)[0]
        example = next(
            (t.failure for t in failures if t.failure and t.failure.kind is kind), failures[-1].failure
        )
        assert example is not None
        self._error = FailureRateError(
            f"{num_failed} of the last {len(self._recent)} trajectories failed, {count} of them as {kind}; "
            f"for example: {example.message}",
            "failures are not rewards of zero, so training stops: mend the cause and resume, or raise "
            f"run.max_failure_frac (now {self.max_failure_frac})",
        )

    def _describe(self) -> str:
        """The oldest trajectories under way: id, age, turn, replica."""
        now_s, lines = self.clock(), []
        for entry in self.buffer.running()[:4]:
            stuck = [m for m in self._members.get(entry.group_id, []) if not m.progress.is_done]
            for member in stuck[:2]:
                lines.append(
                    f"trajectory {member.group_id}/{member.member_idx} (age {now_s - entry.admitted_at_s:.1f} s, "
                    f"turn {member.progress.turn_idx}, {member.progress.where})"
                )
        return ", ".join(lines) or f"nothing; {self.buffer.num_finished} groups are finished"
