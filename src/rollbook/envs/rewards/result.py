"""What scoring a response gives, and what a scorer may return."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from rollbook.types import Failure

Isolation = Literal["auto", "inline", "thread", "process"]
"""Where a scorer runs; see RewardTermConfig.isolation."""

SCORE = "score"
"""The reward before any shaping, in `RewardResult.terms`; the key of the value in a scorer's mapping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """A finite reward, or the reason why there is none; never both, and never neither.

    Raises:
        ValueError: it would be something else.
    """

    reward: float | None
    """Weighted sum of the terms, reward units; None on failure."""
    terms: dict[str, float] = field(default_factory=dict)
    """Each term before its weight, parts of a term as "term.part", and their weighted sum as "score"."""
    failure: Failure | None = None

    def __post_init__(self) -> None:
        if (self.reward is None) == (self.failure is None):
            raise ValueError(
                f"a result has reward {self.reward} and failure {self.failure}: give one of them"
            )
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"a result has reward {self.reward}, not a finite number")


def checked_score(returned: object) -> dict[str, float]:
    """What a scorer returned, as {"score": value} and further named parts.

    Raises:
        ValueError: not a finite number, nor a mapping with a finite "score".

    >>> checked_score(True), checked_score({"score": 0.5, "format": 1})
    ({'score': 1.0}, {'score': 0.5, 'format': 1.0})
    """
    if isinstance(returned, Mapping):
        if SCORE not in returned:
            raise ValueError(
                f"the scorer returned a mapping without 'score': its keys are {sorted(returned)}"
            )
        return {str(name): _number(value, f"the scorer's {name!r}") for name, value in returned.items()}
    return {SCORE: _number(returned, "the scorer's value")}


def _number(value: object, what: str) -> float:
    if isinstance(value, str | bytes) or value is None:
        raise ValueError(f"{what} is {type(value).__name__} {value!r:.60}, not a number")
    try:
        number = float(value)  # type: ignore[arg-type]  # numbers, and numpy or torch scalars
    except (TypeError, ValueError):
        raise ValueError(f"{what} is a {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{what} is {number}, not a finite number")
    return number
