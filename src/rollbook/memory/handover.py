"""A device changes hands: the moves of a switch, in a stated order, each with its reason, bytes and seconds.

    to the trainer   pause ► sleep the engine ► release ► training state to the device
    to the engine    drop gradients ► training state to the host ► release ► wake the engine ► resume

The order follows from two rules: room is made before it is filled, and nobody reads what is being moved. The
publication stands between the two halves of the way back (`before_publication`, `after_publication`): it needs the
trainer's weights and the engine's at once, and the KV pool, the largest owner, comes last because it takes what is
left.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from rollbook.errors import DeadlineError
from rollbook.memory.parking import Parking


class SleepyEngine(Protocol):
    """What a hand-over needs of an engine."""

    async def pause(self, mode: Literal["keep"] = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int = 1) -> None: ...

    async def wake(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """One move of a hand-over."""

    name: str
    because: str
    """Why it stands where it stands."""
    run: Callable[[], Awaitable[int]]
    """Carries it out and returns the bytes that crossed a link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveReport:
    """What a move took, beside what the ledger expected."""

    name: str
    num_bytes: int
    seconds: float
    expected_bytes: float | None
    expected_s: float | None
    allocated_bytes: int
    """On the device, after the move."""
    fragmented_bytes: int
    """Reserved beyond that."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """The ledger's bytes and seconds of a move (`ledger.switch.Move`)."""

    bytes: float
    seconds: float


def to_trainer(
    engine: SleepyEngine,
    state: Sequence[Parking],
    device: torch.device,
    *,
    sleep_level: int,
    weight_bytes: int = 0,
) -> list[Move]:
    """Moves after which the trainer has the device.

    Args:
        sleep_level: 0: the engine only pauses.
        weight_bytes: of the engine's weights, where level 1 takes them over a link.
    """
    moves = [
        Move(name="pause", because="no step may read what is about to leave", run=_nothing(engine.pause))
    ]
    if sleep_level:
        sleep = Move(
            name="engine sleeps",
            because="the KV pool is the largest owner and needs no copy: it makes the room for everything else",
            run=_nothing(lambda: engine.sleep(sleep_level), weight_bytes if sleep_level == 1 else 0),
        )
        moves.append(sleep)
    return [
        *moves,
        _release(device, "the engine's free segments must be the device's before other sizes are allocated"),
        *_arrivals(state, "last: only now is there room"),
    ]


def before_publication(
    drop_gradients: Callable[[], None], state: Sequence[Parking], device: torch.device
) -> list[Move]:
    """First half of the way back: what the publication does not need leaves."""

    async def drop() -> int:
        drop_gradients()
        return 0

    return [
        Move(name="gradients dropped", because="they are spent and need no copy", run=drop),
        *(
            Move(
                name=f"{parking.name} to host",
                because="the engine's weights need its room",
                run=_in_thread(parking.to_host),
            )
            for parking in state
        ),
        _release(device, "the trainer's free segments must be the device's before the engine allocates"),
    ]


def wake_engine(engine: SleepyEngine, *, weight_bytes: int = 0) -> list[Move]:
    """The engine's weights and pool come back; it stays paused until the publication is proven.

    Args:
        weight_bytes: that come back over a link (sleep level 1).
    """
    return [
        Move(
            name="engine wakes",
            because="after the training state left, before the publication writes into its weights",
            run=_nothing(engine.wake, weight_bytes),
        )
    ]


def after_publication(engine: SleepyEngine) -> list[Move]:
    """The engine may decode."""
    return [Move(name="resume", because="the new weights are proven", run=_nothing(engine.resume))]


async def hand_over(
    moves: Sequence[Move],
    device: torch.device,
    *,
    deadline_s: float,
    expected: Mapping[str, Expectation] | None = None,
) -> list[MoveReport]:
    """Carry out the moves one after the other.

    Raises:
        DeadlineError: a move took longer than `deadline_s`; names it and what was done before it.
    """
    reports: list[MoveReport] = []
    for move in moves:
        began_at_s = time.perf_counter()
        try:
            async with asyncio.timeout(deadline_s):
                num_bytes = await move.run()
        except TimeoutError:
            done = ", ".join(report.name for report in reports) or "nothing"
            raise DeadlineError(
                f"the move '{move.name}' of a hand-over of {device} took longer than {deadline_s:g} s (done: {done})",
                "look for a step that does not end, or host memory that swaps; the run can be resumed",
            ) from None
        seconds = time.perf_counter() - began_at_s
        wanted = (expected or {}).get(move.name)
        allocated, reserved = _allocator(device)
        reports.append(
            MoveReport(
                name=move.name,
                num_bytes=num_bytes,
                seconds=seconds,
                expected_bytes=None if wanted is None else wanted.bytes,
                expected_s=None if wanted is None else wanted.seconds,
                allocated_bytes=allocated,
                fragmented_bytes=reserved - allocated,
            )
        )
    return reports


def _arrivals(state: Sequence[Parking], because: str) -> list[Move]:
    return [
        Move(name=f"{parking.name} to device", because=because, run=_in_thread(parking.to_device))
        for parking in state
    ]


def release(device: torch.device) -> int:
    """Return every free segment to the device, for whoever allocates next. Returns the bytes given back."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_reserved(device)
    gc.collect()
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)


def _release(device: torch.device, because: str) -> Move:
    async def give_back() -> int:
        release(device)
        return 0  # nothing crosses a link

    return Move(name="release", because=because, run=give_back)


def _nothing(call: Callable[[], Awaitable[None]], num_bytes: int = 0) -> Callable[[], Awaitable[int]]:
    """A call that does not tell how many bytes it moved."""

    async def run() -> int:
        await call()
        return num_bytes

    return run


def _in_thread(work: Callable[[], int]) -> Callable[[], Awaitable[int]]:
    async def run() -> int:
        return await asyncio.to_thread(work)

    return run


def _allocator(device: torch.device) -> tuple[int, int]:
    if device.type != "cuda":
        return 0, 0
    return torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
