"""The handshake, walked through every state it can reach: nobody waits for ever, nothing stays unsettled."""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import dataclass, field

import pytest

from rollbook.errors import SyncError
from rollbook.sync.handshake import Handshake

MAX_VERSION = 4


@dataclass
class World:
    """One trainer, one consumer, and the messages between them, in order, lost when the consumer dies."""

    trainer: Handshake = field(default_factory=lambda: Handshake(replica_id=0, acknowledged=0))
    newest: int = 0
    to_consumer: list[int] = field(default_factory=list)
    to_trainer: list[tuple[str, int]] = field(default_factory=list)
    held: int = 0
    is_up: bool = True
    withdrawn: set[int] = field(default_factory=set)

    def key(self) -> tuple[object, ...]:
        t = self.trainer
        return (
            *(t.acknowledged, t.offered, tuple(t._unsettled), tuple(sorted(t.superseded.items()))),
            *(self.newest, tuple(self.to_consumer), tuple(self.to_trainer), self.held, self.is_up),
            tuple(sorted(self.withdrawn)),
        )

    def actions(self) -> list[str]:
        able = []
        if self.newest < MAX_VERSION:
            able.append("publish")  # at any time: the consumer may be slow, busy or dead
        offered = self.trainer.offered
        if offered is not None and self.to_consumer[-1:] == [offered] and self.held != offered:
            able.append("withdraw")  # before the consumer took it
        if self.is_up and self.to_consumer:
            able.append("take")
        if self.to_trainer:
            able.append("hear")
        able.append("die" if self.is_up else "restart")
        return able

    def act(self, action: str) -> None:
        if action == "publish":
            self.newest += 1
            self.trainer.offer(self.newest)
            if self.is_up:
                self.to_consumer.append(self.newest)
        elif action == "withdraw":
            version = self.to_consumer[-1]
            self.to_consumer = [other for other in self.to_consumer if other != version]
            self.withdrawn.add(version)
            if (older := self.trainer.withdraw(version)) is not None:
                self.to_consumer.append(older)
        elif action == "take":  # jumps to the newest offer: the older ones are never held
            self.held = self.to_consumer[-1]
            self.to_consumer.clear()
            self.to_trainer.append(("acknowledge", self.held))
        elif action == "hear":
            kind, version = self.to_trainer.pop(0)
            if kind == "acknowledge":
                if version in self.trainer._unsettled:
                    self.trainer.acknowledge(version)
            else:  # a full re-sync at the newest version, as `Publisher.resync` does
                again = max(set(range(self.newest + 1)) - self.withdrawn)
                self.trainer.offer(again)
                if self.is_up:
                    self.to_consumer.append(again)
        elif action == "die":
            self.is_up = False
            self.to_consumer.clear()
            self.to_trainer.clear()
        elif action == "restart":  # with what it had on disk
            self.is_up = True
            self.to_trainer.append(("is back", self.held))


def reachable() -> dict[tuple[object, ...], tuple[World, list[tuple[str, tuple[object, ...]]]]]:
    start = World()
    seen = {start.key(): (start, list[tuple[str, tuple[object, ...]]]())}
    queue = deque([start])
    while queue:
        world = queue.popleft()
        for action in world.actions():
            after = copy.deepcopy(world)
            after.act(action)
            seen[world.key()][1].append((action, after.key()))
            if after.key() not in seen:
                seen[after.key()] = (after, [])
                queue.append(after)
    return seen


def test_no_state_in_which_both_sides_wait() -> None:
    """BR-021. In every reachable state without new publications and deaths, taking, hearing and restarting lead to
    rest: nothing offered, the consumer at the newest version, every version acknowledged or superseded."""
    states = reachable()
    assert len(states) > 500
    can_rest = {
        key
        for key, (world, _) in states.items()
        if world.is_up
        and world.trainer.offered is None
        and world.held == world.trainer.acknowledged
        and world.held == max(set(range(world.newest + 1)) - world.withdrawn)
        and not world.to_consumer
        and not world.to_trainer
    }
    assert can_rest
    grows = True
    while grows:
        before = len(can_rest)
        for key, (_, steps) in states.items():
            if key not in can_rest:
                kind = [after for action, after in steps if action in ("take", "hear", "restart")]
                if kind and all(after in can_rest for after in kind):
                    can_rest.add(key)
        grows = len(can_rest) > before
    assert can_rest == set(states)


def test_every_published_version_is_settled_at_rest() -> None:
    for world, _ in reachable().values():
        trainer = world.trainer
        settled = set(trainer.superseded) | set(trainer._unsettled)
        for version in range(1, world.newest + 1):
            is_settled = version in settled | world.withdrawn or version <= trainer.acknowledged
            assert is_settled, world
        if trainer.offered is None:
            assert not trainer._unsettled


def test_a_jump_is_recorded_as_superseded() -> None:
    trainer = Handshake(replica_id=1, acknowledged=5)
    trainer.offer(6)
    trainer.offer(7)
    assert trainer.acknowledge(7) == (6,)
    assert trainer.superseded == {6: 7}
    assert trainer.offered is None


def test_an_unknown_acknowledgement_names_both_versions() -> None:
    trainer = Handshake(replica_id=1, acknowledged=5)
    trainer.offer(6)
    with pytest.raises(SyncError, match="acknowledged version 8; the trainer waits for 6 .* last held 5"):
        trainer.acknowledge(8)
    with pytest.raises(SyncError, match="version 4 was offered to replica 1 after version 6"):
        trainer.offer(4)
    assert trainer.waits_for() == "the trainer offered version 6, the replica last proved 5"
