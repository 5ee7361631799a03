"""What a simulation moves: groups, their sequences, and the replicas that hold them."""

from __future__ import annotations

import math


class SimGroup:
    __slots__ = ("finished_at_s", "index", "left", "num_trained", "oldest", "replicas", "tokens", "versions")

    def __init__(self, index: int, size: int) -> None:
        self.index = index
        self.left = size
        self.oldest = math.inf
        self.replicas: set[int] = set()
        self.versions: list[int] = []
        self.finished_at_s: list[float] = []
        self.tokens = 0.0
        self.num_trained = 0


class SimSequence:
    __slots__ = (
        "context", "fails", "group", "is_parked", "num_tokens", "num_turns", "order", "replica", "sampled", "turn_left",
        "turn_tokens", "turns_left", "version",
    )  # fmt: skip

    def __init__(
        self, order: int, group: SimGroup, num_tokens: float, num_turns: int, context: float
    ) -> None:
        self.order = order
        self.group = group
        self.num_tokens = num_tokens
        self.turn_tokens = num_tokens / num_turns
        self.turn_left = self.turn_tokens
        self.num_turns = num_turns
        self.turns_left = num_turns
        self.context = context
        self.sampled = 0.0
        self.version = -1
        self.replica: SimReplica | None = None
        self.fails = False
        self.is_parked = False
        """Holds slot and KV while its environment works."""


class SimReplica:
    __slots__ = (
        "busy_s", "clock", "context", "free", "heap", "held_at_s", "idx", "is_down", "is_held", "num_live", "parked",
        "ready_at_s", "residents", "slot_s", "stamp", "time_s", "work_from_s",
    )  # fmt: skip

    def __init__(self, idx: int, num_slots: int) -> None:
        self.idx = idx
        self.free = num_slots
        self.time_s = 0.0
        self.clock = 0.0
        """Decode steps done since the start: a sequence that joins with k tokens left ends at clock + k."""
        self.ready_at_s = 0.0
        """Prefill keeps decoding standing until then."""
        self.num_live = 0
        self.context = 0.0
        self.parked = 0.0
        """Context held for sequences whose environment works."""
        self.heap: list[tuple[float, int, SimSequence]] = []
        self.residents: set[SimSequence] = set()
        self.stamp = 0
        self.is_held = False
        self.held_at_s = 0.0
        self.is_down = False
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.work_from_s = math.nan
