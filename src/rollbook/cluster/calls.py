"""Waiting for an answer of an actor: never without a deadline, and what it raised is raised here as it was there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray

from rollbook.errors import DeadlineError, EngineError, RunError, TrainerDownError


async def within(ref: Any, actor: str, call: str, deadline_s: float) -> Any:
    try:
        async with asyncio.timeout(deadline_s):
            return await asyncio.wrap_future(ref.future())
    except TimeoutError:
        raise DeadlineError(
            f"{actor} did not answer to {call} within {deadline_s:g} s",
            "look at its log, or raise cluster.start_deadline_s",
        ) from None
    except ray.exceptions.RayTaskError as error:
        raise cause_of(error, f"{actor} failed in {call}") from None
    except ray.exceptions.RayActorError as error:
        raise TrainerDownError(f"{actor} died in {call}: {first_line(error)}", "look at its log") from None


def label_of(name: str, args: Sequence[Any]) -> str:
    """The method that a call comes down to."""
    return args[0] if name in ("do", "fill", "update") and args and isinstance(args[0], str) else name


def cause_of(error: Any, what: str) -> RunError:
    """What an actor raised, as it was raised there."""
    cause = error.cause
    if isinstance(cause, RunError):
        return cause
    return EngineError(f"{what}: {type(cause).__name__}: {first_line(cause)}", "look at the actor's log")


def rank_lost(why: str) -> TrainerDownError:
    return TrainerDownError(
        f"the trainer lost a rank: {why}", "the run goes on from its last checkpoint; look at the rank's log"
    )


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
