"""What the scheduler keeps of each sequence and hands out for a step. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import EngineError
from rollbook.rollout.engine import GenerateRequest
from rollbook.types import Floats, Ids, KVStart

Indices = NDArray[np.int64]
"""[n] int64."""

Number = TypeVar("Number", np.int32, np.int64, np.float32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One request from submission to response."""

    request: GenerateRequest
    arrival_idx: int
    """How many requests came before it."""
    num_prompt: int
    max_response: int
    """Most tokens it may sample: the request's limit or what the context leaves."""
    version_starts: list[tuple[int, int]]
    """(response index, weight version) at which each version began to sample."""
    slot: int = -1
    """-1 while it waits."""
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose keys and values are in `pages`. Not kept up while ready: then it is known tokens - 1."""
    kv_version: int = 0
    """Weight version of its oldest keys and values."""
    response_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """What it had sampled when it last lost its slot."""
    logprobs: Floats = field(default_factory=lambda: np.zeros(0, np.float32))
    leader: Sequence | None = None
    """A running sequence that computes the same prompt now; its pages are copied when it is done."""
    followers: list[Sequence] = field(default_factory=list)
    kv_starts: list[KVStart] = field(default_factory=list)
    num_cached: int = 0
    num_preemptions: int = 0
    was_admitted: bool = False
    is_done: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Whose turn comes first: older groups, so that a response which came back from another replica, or an agent's
        next turn, is not put behind the groups of later steps."""
        return self.request.group_id, self.arrival_idx

    @property
    def prompt_key(self) -> bytes:
        return self.request.prompt_ids.tobytes()


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Consecutive tokens of one sequence, computed in one step."""

    sequence: Sequence
    first_row: int
    """Row of its first token in the step."""
    start: int
    """Position of that token in its sequence: the keys and values before it are in the pool."""
    num_tokens: int
    pages: Indices
    """The pages that hold positions 0 to start + num_tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRows:
    """The rows of one step: first the ready sequences (`num_decode`, one row each), then the prefill spans."""

    token_ids: Indices
    """[T]."""
    positions: Indices
    """[T] index of the token in its sequence."""
    write_pages: Indices
    """[T] page that takes the token's keys and values; `write_offsets` is the place in it."""
    write_offsets: Indices
    slots: Indices
    """[num_decode] slot of each decoding row."""
    page_owner: Indices
    """[N] for page i of the pool: the decoding row it belongs to, 0 for a page of no decoding row."""
    page_start: Indices
    """[N] position of the page's first token in its sequence."""
    page_lists: Indices
    """[M] pages of row 0 in order, then of row 1, ...; `page_list_starts` [num_decode] says where each row begins."""
    page_list_starts: Indices
    spans: tuple[PrefillSpan, ...]

    @property
    def num_decode(self) -> int:
        return len(self.slots)

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True)
class Counters:
    """Since the engine started."""

    prefill_tokens: int = 0
    cached_prompt_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    active_slots_sum: int = 0
    kv_used_tokens_sum: int = 0
    num_preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence that ended without a response."""

    request_id: str
    error: EngineError


class SlotTable:
    """Columns of per-slot state, so that a step books all its rows at once."""

    def __init__(self, num_slots: int) -> None:
        self.sequences: list[Sequence | None] = [None] * num_slots
        self.is_ready = np.zeros(num_slots, np.bool_)
        self.position = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.num_response = np.zeros(num_slots, np.int64)
        self.max_response = np.zeros(num_slots, np.int64)
        self.num_pages = np.zeros(num_slots, np.int64)
        self.ignore_eos = np.zeros(num_slots, np.bool_)
        self.has_own_stops = np.zeros(num_slots, np.bool_)
        self.key = np.zeros(num_slots, np.uint64)
        self.first_token_idx = np.zeros(num_slots, np.int64)
        self.temperature = np.ones(num_slots, np.float32)
        self.top_p = np.ones(num_slots, np.float32)
        self.top_k = np.zeros(num_slots, np.int64)
        self.min_p = np.zeros(num_slots, np.float32)
        self.pages = np.zeros((num_slots, 8), np.int64)
        self.response_ids = np.zeros((num_slots, 64), np.int32)
        self.logprobs = np.zeros((num_slots, 64), np.float32)

    def widen_pages(self, num_pages: int) -> None:
        if num_pages > self.pages.shape[1]:
            self.pages = _widened(self.pages, num_pages)

    def widen_responses(self, num_tokens: int) -> None:
        if num_tokens > self.response_ids.shape[1]:
            self.response_ids = _widened(self.response_ids, num_tokens)
            self.logprobs = _widened(self.logprobs, num_tokens)


def _widened(column: NDArray[Number], width: int) -> NDArray[Number]:
    """`column` with at least `width` entries a row, doubling so that growth is rare."""
    wide = np.zeros((column.shape[0], max(width, 2 * column.shape[1])), column.dtype)
    wide[:, : column.shape[1]] = column
    return wide
