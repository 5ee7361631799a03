"""The life of a group as a bounded state machine.

                     finish(kept)                     take()
    admit() ──► RUNNING ────────────► FINISHED ─────────────────► TRAINED
                   │  finish(dropped)     │ take() finds it stale
                   ├──────────────────────┴───────────────────► EVICTED (reason)
                   └─ fail(reason) ───────────────────────────► FAILED  (reason)

    admitted = running + finished + failed + trained + evicted, after every call.

Places. A step consumes `groups_per_step` places, in the order of admission. A group holds its place from
admission on; a group that fails or is dropped either keeps its place (the step is then smaller) or gives it
back (a *refill*: another prompt is admitted instead).

Staleness. A group admitted while every serving replica holds the version of step p holds one of the first
(p + max_staleness_steps + 1) x groups_per_step places, and none beyond those of `num_steps` steps. In `admission`
order it is therefore used at step p + max_staleness_steps at the latest, whatever the timing; `take` proves it
again on the oldest token. In `arrival` order groups overtake, so `take` either evicts what is too old or waits
for what is about to be.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.buffer.config import BufferConfig
from rollbook.errors import DataError, RunError
from rollbook.types import Group, Prompt

MAX_RUNNING_GROUPS = 4096
"""Groups under way at once where `buffer.max_running_groups` is 0 and a step takes fewer: each is a task and a request
that waits for a slot, and no engine has as many slots."""


class GroupState(enum.StrEnum):
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    TRAINED = "trained"
    EVICTED = "evicted"


class StarvedError(RunError):
    """Too many groups failed, were flat or went stale while one step was collected."""


@dataclass(slots=True)
class Entry:
    """One group under way. `admitted_step` is the step whose weights every serving replica held at admission."""

    group_id: int
    prompt: Prompt
    admitted_step: int
    admitted_at_s: float
    state: GroupState = GroupState.RUNNING
    group: Group | None = None
    finish_idx: int = -1
    drop_reason: str | None = None
    """Set when the group is to leave with its step instead of being trained."""


@dataclass(frozen=True, slots=True)
class Eviction:
    """A group that left untrained, for the metrics: which, why, how stale and how long it was."""

    group_id: int
    reason: str
    staleness_steps: int
    num_response_tokens: int


@dataclass(slots=True)
class Taken:
    """What one step trains on, and what left the buffer with it."""

    groups: list[Group]
    staleness_steps: list[int]
    """One a group: the step minus the step whose weights sampled its oldest token."""
    evictions: list[Eviction]
    num_refills: int
    dropped: list[Group]
    """Groups that finished and were not trained (flat, stale): their rewards are part of the policy's record."""
    prompts_done: list[Prompt]
    """Prompts that will not be sampled again: trained, failed and evicted ones, for the prompt stream."""
    step: int = 0
    """The one that trains on them."""
    starved: StarvedError | None = None
    """Why the step has fewer groups, where `buffer.on_starvation` goes on with them."""
    version_steps: Mapping[int, int] = field(default_factory=dict)
    """Weight version -> steps whose updates it contains, of every version that the groups can carry."""

    def staleness(self, weight_version: int) -> int:
        """Steps between the one that trains and the one whose weights `weight_version` holds. With a publication
        every step these are versions; else a version stands for several steps."""
        return self.step - self.version_steps.get(weight_version, self.step)


@dataclass(slots=True)
class GroupBuffer:
    """See the module's drawing. Not thread-safe: called from the event loop only."""

    config: BufferConfig
    groups_per_step: int
    num_steps: int | None = None
    """No group is admitted for a step after so many. None: there is no last step."""
    next_group_id: int = 0
    step: int = 0
    """The next step to take; steps before it have been trained."""
    serving_step: int = 0
    """Steps whose updates every serving replica holds; moved by `published`."""
    counts: Counter[GroupState] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    num_admitted: int = 0
    num_refills: int = 0
    """Places given back since the last `take`."""
    is_last_step: bool = False
    """The prompts ran out: the groups there are form the last, smaller step."""
    _entries: dict[int, Entry] = field(default_factory=dict)
    """Groups that hold a place of a step not yet taken, in order of admission."""
    _num_places_taken: int = 0
    _num_finished: int = 0
    _lost: Counter[str] = field(default_factory=Counter)
    """Groups that gave their place back since the last `take`, by cause."""
    _flat_scores: Counter[float] = field(default_factory=Counter)
    """Of those that were flat: the one score of all members."""
    _evictions: list[Eviction] = field(default_factory=list)
    _dropped: list[Group] = field(default_factory=list)
    _prompts_done: list[Prompt] = field(default_factory=list)
    _untold: list[tuple[GroupState, str]] = field(default_factory=list)
    """State and reason of the groups whose prompts these are: a resumed run asks them again."""
    _version_step: dict[int, int] = field(default_factory=lambda: {0: 0})

    # ---- versions ----------------------------------------------------------------------------------------

    def offered(self, weight_version: int, step: int) -> None:
        """`weight_version`, which contains the updates of `step` steps, is on its way: from the moment a replica
        holds it, finished groups may carry it."""
        self._version_step.setdefault(weight_version, step)

    def published(self, weight_version: int, step: int) -> None:
        """Every serving replica now holds `weight_version`, which contains the updates of `step` steps."""
        newest = max(self._version_step)
        if weight_version < newest or step < self.serving_step:
            raise DataError(
                f"version {weight_version} of step {step} was published after version {newest} of step "
                f"{self.serving_step}",
                "publications move forward; look for two publishers",
            )
        self._version_step[weight_version] = step
        self.serving_step = step

    def staleness_steps(self, group: Group) -> int:
        """Step at use minus the step of the oldest token. DataError for a version nobody published."""
        version = group.oldest_version
        newest = max(t.newest_version for t in group.scored)
        for claimed in (version, newest):
            if claimed not in self._version_step:
                raise DataError(
                    f"group {group.group_id} has tokens of weight version {claimed}; published are "
                    f"{min(self._version_step)} to {max(self._version_step)}",
                    "quarantine the replica that reported this version",
                )
        return self.step - self._version_step[version]

    # ---- admission ---------------------------------------------------------------------------------------

    @property
    def num_running(self) -> int:
        return self.counts[GroupState.RUNNING]

    @property
    def num_finished(self) -> int:
        return self.counts[GroupState.FINISHED]

    def capacity(self) -> int:
        """Groups that may be admitted now."""
        num_steps = self.serving_step + self.config.max_staleness_steps + 1
        if self.num_steps is not None:
            num_steps = min(num_steps, self.num_steps)
        places = num_steps * self.groups_per_step
        free = places - self._num_places_taken - len(self._entries)
        most = self.config.max_running_groups or max(MAX_RUNNING_GROUPS, self.groups_per_step)
        free = min(free, most - self.num_running)
        if self.is_starved:
            free = 0
        return max(free, 0)

    @property
    def is_starved(self) -> bool:
        return self.num_refills > self._max_refills

    @property
    def _max_refills(self) -> int:
        return self.config.max_refills(self.groups_per_step)

    def admit(self, prompt: Prompt, *, now_s: float) -> int:
        """Give `prompt` a place and a group id. Call only with `capacity() > 0`."""
        if self.capacity() <= 0:
            raise DataError(
                f"no place for prompt {prompt.prompt_id}: {len(self._entries)} groups hold places",
                "ask capacity() before admit()",
            )
        group_id = self.next_group_id
        self.next_group_id += 1
        self.num_admitted += 1
        self._entries[group_id] = Entry(group_id, prompt, self.serving_step, now_s)
        self.counts[GroupState.RUNNING] += 1
        self.check()
        return group_id

    # ---- the end of a rollout ----------------------------------------------------------------------------

    def finish(self, group: Group, *, drop_reason: str | None = None, refill: bool = False) -> None:
        """A group is complete and scored. With `drop_reason` it will not be trained (a flat group, say):
        with `refill` it gives its place back now, without it leaves with its step, which is then smaller."""
        entry = self._running(group.group_id)
        if group.scored:
            self.staleness_steps(group)  # refuses a version that nobody published
        entry.group = group
        if drop_reason is not None and refill:
            self._evict(entry, drop_reason)
            self._release(entry, drop_reason)
            scores = {t.reward_terms.get("score", t.reward or 0.0) for t in group.scored}
            if len(scores) == 1:
                self._flat_scores.update(scores)
        else:
            entry.drop_reason = drop_reason
            entry.finish_idx = self._num_finished
            self._num_finished += 1
            self._move(entry, GroupState.FINISHED)
            self._drop_if_stale(entry)
        self.check()

    def fail(self, group_id: int, reason: str) -> None:
        """No member of the group can be trained; the reason is counted, the reward stays unknown."""
        entry = self._running(group_id)
        self.failures[reason] += 1
        self._end_prompt(entry, GroupState.FAILED, reason)
        if self.config.refill_failed:
            self._move(entry, GroupState.FAILED)
            self._release(entry, f"failed as {reason}")
        else:
            entry.drop_reason = reason
            self._move(entry, GroupState.FAILED)
        self.check()

    # ---- use ---------------------------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether `take` would give a step its groups."""
        return self._choose() is not None

    def take(self) -> Taken:
        """The groups of the next step; they count as trained from here on.

        Raises:
            StarvedError: refills ran out and the config says stop.
            DataError: not ready, or a group is staler than the bound although admission forbids it.
        """
        chosen = self._choose()
        if chosen is None:
            raise DataError(f"step {self.step} is not ready", "ask is_ready() before take()")
        starved = self._starvation(chosen) if self.is_starved else None
        if starved is not None and self.config.on_starvation == "stop":
            raise starved
        taken = Taken([], [], [], self.num_refills, [], [], self.step, starved, dict(self._version_step))
        for entry in chosen:
            del self._entries[entry.group_id]
            if entry.state is GroupState.FAILED:
                continue
            assert entry.group is not None
            if entry.drop_reason is not None:
                self._evict(entry, entry.drop_reason)
                continue
            staleness_steps = self.staleness_steps(entry.group)
            if staleness_steps > self.config.max_staleness_steps:
                raise DataError(
                    f"group {entry.group_id} would be trained {staleness_steps} steps stale at step {self.step}; "
                    f"buffer.max_staleness_steps is {self.config.max_staleness_steps}",
                    "a replica sampled under an older version than it was serving at admission: quarantine it",
                )
            self._move(entry, GroupState.TRAINED)
            self._end_prompt(entry, GroupState.TRAINED, "")
            taken.groups.append(entry.group)
            taken.staleness_steps.append(staleness_steps)
        self._num_places_taken += self.groups_per_step  # by a step with fewer groups as well
        taken.evictions, self._evictions = self._evictions, []
        taken.dropped, self._dropped = self._dropped, []
        taken.prompts_done, self._prompts_done = self._prompts_done, []
        self._untold.clear()
        self.step += 1
        self.num_refills = 0
        self._lost.clear()
        self._flat_scores.clear()
        for entry in [e for e in self._entries.values() if e.state is GroupState.FINISHED]:
            self._drop_if_stale(entry)
        self._forget_old_versions()
        self.check()
        return taken

    def _starvation(self, chosen: Sequence[Entry]) -> StarvedError:
        num_groups = sum(e.state is GroupState.FINISHED and e.drop_reason is None for e in chosen)
        lost = _losses_in_words(self._lost, self._flat_scores)
        goes_on = ""
        if self.config.on_starvation == "train_partial":
            trains = f"trains these {num_groups}" if num_groups else "makes no update"
            goes_on = f". As buffer.on_starvation is 'train_partial', the step {trains} and the run goes on"
        return StarvedError(
            f"step {self.step} has {num_groups} of {self.groups_per_step} groups and lost {self.num_refills} "
            f"(buffer.max_refills_per_step is {self._max_refills}): {lost}; {self.num_admitted} "
            f"groups were admitted in all{goes_on}",
            _starved_remedy(self._lost),
        )

    def _choose(self) -> list[Entry] | None:
        """Entries of the next step, or None while they are not all there. Asked after each group that ends: while these
        are too few, their number tells."""
        wanted = self.groups_per_step
        if self.is_starved or self.is_last_step:
            wanted = min(wanted, len(self._entries))
        if len(self._entries) - self.num_running < wanted:
            return None
        entries = self._entries.values()
        if self.config.order == "admission":
            chosen = list(itertools.islice(entries, wanted))
            return None if any(e.state is GroupState.RUNNING for e in chosen) else chosen
        expiring = itertools.takewhile(self._expires, entries)  # in the order of admission the first ones
        if self.config.when_stale == "wait" and any(e.state is GroupState.RUNNING for e in expiring):
            return None
        done = [e for e in entries if e.state is not GroupState.RUNNING]
        done.sort(key=lambda e: (not self._expires(e), e.finish_idx))
        return done[:wanted]

    def _expires(self, entry: Entry) -> bool:
        """Whether the group may be used at this step and not at the next."""
        return self.step + 1 - entry.admitted_step > self.config.max_staleness_steps

    def _drop_if_stale(self, entry: Entry) -> None:
        """Where the config says so, a finished group leaves as soon as it is too old: when it ends, or when a step is
        taken."""
        if self.config.when_stale != "drop" or entry.drop_reason is not None:
            return
        assert entry.group is not None
        if self.staleness_steps(entry.group) > self.config.max_staleness_steps:
            self._evict(entry, "stale")
            self._release(entry, "stale")

    # ---- inside ------------------------------------------------------------------------------------------

    def running(self) -> list[Entry]:
        """Groups being generated, oldest first: what a deadline message names."""
        return [e for e in self._entries.values() if e.state is GroupState.RUNNING]

    def finished(self) -> list[Group]:
        return [e.group for e in self._entries.values() if e.group is not None]

    def _running(self, group_id: int) -> Entry:
        entry = self._entries.get(group_id)
        if entry is None or entry.state is not GroupState.RUNNING:
            state = "unknown or gone" if entry is None else entry.state
            raise DataError(f"group {group_id} ended twice: it is {state}", "each group ends exactly once")
        return entry

    def _move(self, entry: Entry, state: GroupState) -> None:
        self.counts[entry.state] -= 1
        entry.state = state
        self.counts[state] += 1

    def _evict(self, entry: Entry, reason: str) -> None:
        assert entry.group is not None
        num_tokens = sum(t.num_response_tokens for t in entry.group.trajectories)
        staleness = self.staleness_steps(entry.group) if entry.group.scored else 0
        self._evictions.append(Eviction(entry.group_id, reason, staleness, num_tokens))
        self._dropped.append(entry.group)
        self._end_prompt(entry, GroupState.EVICTED, reason)
        self._move(entry, GroupState.EVICTED)

    def _end_prompt(self, entry: Entry, state: GroupState, reason: str) -> None:
        self._prompts_done.append(entry.prompt)
        self._untold.append((state, reason))

    def _release(self, entry: Entry, cause: str) -> None:
        del self._entries[entry.group_id]
        self.num_refills += 1
        self._lost[cause] += 1

    def _forget_old_versions(self) -> None:
        """Versions no group under way can carry. Keeps the map bounded over a long run."""
        oldest = min([e.admitted_step for e in self._entries.values()], default=self.serving_step)
        kept = [v for v, step in self._version_step.items() if step >= oldest]
        newest = max(self._version_step)
        self._version_step = {v: s for v, s in self._version_step.items() if v in kept or v == newest}

    def state(self) -> dict[str, Any]:
        """Counters for a checkpoint. Left out are groups under way, and those that ended after the stream was last told
        so: a resumed run admits their prompts again."""
        ended = self.counts - Counter(state for state, _ in self._untold)
        for state in (GroupState.RUNNING, GroupState.FINISHED):
            del ended[state]
        failures = self.failures - Counter(r for state, r in self._untold if state is GroupState.FAILED)
        return {
            "next_group_id": self.next_group_id,
            "step": self.step,
            "serving_step": self.serving_step,
            "counts": {state.value: count for state, count in ended.items()},
            "failures": dict(failures),
            "num_places_taken": self._num_places_taken,
            "newest_version": max(self._version_step),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`; the buffer must be fresh."""
        assert self.num_admitted == 0, "restore before the first group is admitted"
        self.next_group_id = state["next_group_id"]
        self.step, self.serving_step = state["step"], state["serving_step"]
        self.counts = Counter({GroupState(name): count for name, count in state["counts"].items()})
        self.num_admitted = self.counts.total()
        self.failures = Counter(state["failures"])
        self._num_places_taken = state["num_places_taken"]
        self._version_step = {state["newest_version"]: self.serving_step}
        self.check()

    def check(self) -> None:
        """The invariant; cheap enough to run at every transition."""
        total = sum(self.counts.values())
        if total != self.num_admitted or min(self.counts.values(), default=0) < 0:
            raise AssertionError(
                f"{self.num_admitted} groups admitted, but {dict(self.counts)} accounted for"
            )


def _losses_in_words(lost: Counter[str], flat_scores: Counter[float]) -> str:
    """ "430 flat (score in all their members 0: 420, 1: 10), 82 failed as timeout"."""
    values = [f"{score:g}: {count}" for score, count in flat_scores.most_common(3)]
    causes = []
    for cause, count in lost.most_common():
        which = f" (score in all their members {', '.join(values)})" if cause == "flat" and values else ""
        causes.append(f"{count} {cause}{which}")
    return ", ".join(causes)


def _starved_remedy(lost: Counter[str]) -> str:
    """What to look at first, by what took most groups."""
    cause = lost.most_common(1)[0][0] if lost else ""
    if cause == "flat":
        look = "the task is too easy, too hard, or its scorer gives one value to everything: look at some responses"
    elif cause.startswith("failed"):
        look = "mend that failure first: events and trajectories hold its messages"
    else:
        look = "raise buffer.max_staleness_steps, or let fewer groups run at once"
    return f"{look}; or raise buffer.max_refills_per_step"
