"""Values that know how to be reduced: over micro batches, ranks and replicas, the result is the same.

A part returns `dict[str, Value]`; two readings of one metric are merged with `+`, and `result()` is what
is written. A mean is never averaged: its numerator and denominator travel separately.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Ratio:
    """Sum of numerators over sum of denominators; NaN when the denominator is zero (nothing to report)."""

    numerator: float
    denominator: float

    def __add__(self, other: Ratio) -> Ratio:
        return Ratio(self.numerator + other.numerator, self.denominator + other.denominator)

    def result(self) -> float:
        """
        >>> (Ratio(6, 6) + Ratio(6, 2)).result()  # 6 tokens of loss 1 and 2 tokens of loss 3
        1.5
        """
        return self.numerator / self.denominator if self.denominator else math.nan


@dataclass(frozen=True, slots=True)
class Total:
    """A sum."""

    value: float

    def __add__(self, other: Total) -> Total:
        return Total(self.value + other.value)

    def result(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Peak:
    """A maximum."""

    value: float

    def __add__(self, other: Peak) -> Peak:
        return Peak(max(self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Low:
    """A minimum."""

    value: float

    def __add__(self, other: Low) -> Low:
        return Low(min(self.value, other.value))

    def result(self) -> float:
        return self.value


@dataclass(frozen=True, slots=True)
class Last:
    """A gauge: the later reading stands."""

    value: float

    def __add__(self, other: Last) -> Last:
        return other

    def result(self) -> float:
        return self.value


Value = Ratio | Total | Peak | Low | Last
Values = dict[str, Value]


def merge(into: Values, more: Values) -> None:
    """Add `more` to `into`; a metric keeps its kind of reduction."""
    for name, value in more.items():
        held = into.get(name)
        if held is None:
            into[name] = value
        elif type(held) is not type(value):
            raise TypeError(f"metric {name!r} was {type(held).__name__} and is now {type(value).__name__}")
        else:
            into[name] = held + value  # type: ignore[operator]
