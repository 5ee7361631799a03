"""Units of bytes as names of metrics and lines of logs write them: `kb` and its kind mean powers of two as well."""

from __future__ import annotations

from collections.abc import Set

BYTES = {"bytes": 1.0} | {
    f"{prefix}{b}": 2.0 ** (10 * power) for power, prefix in enumerate("kmgt", 1) for b in ("b", "ib")
}
"""Unit, in lower case -> bytes."""
GIB = BYTES["gib"]


def unit_of(words: Set[str]) -> str | None:
    """The unit of bytes among the words of a name; None without one."""
    return next((unit for unit in BYTES if unit in words), None)
