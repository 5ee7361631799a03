"""A console log in which one message floods: the same traceback a hundred thousand times. Its lines are known again as
bytes, by their shape, and only what they add is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

ANY_NUMBER = bytes.maketrans(b"123456789abcdef", b"0" * 15)
"""What makes lines alike whatever their numbers, hexadecimal ones (of objects and actors) too."""
SAMPLE_BYTES = 32 * 1024
"""Beginning of a block that tells whether it is a flood's."""
ALIKE = 0.5
"""Different shapes over lines, at the most, in a flood."""
LEAST_LINES = 50
MAX_SHAPES = 20_000
MAX_LINE_BYTES = 2000
"""Longer lines are not remembered."""


class Listener(Protocol):
    """What the lines of a log are told to, one at a time, and which may know some of them again."""

    def begin(self) -> None:
        """A line comes, or more of them."""

    @property
    def told(self) -> object | None:
        """What the line that came last adds each time; None where it must be looked at again."""

    @property
    def is_calm(self) -> bool:
        """Whether lines that are known add no more than they did."""

    def again(self, told: object, raw: bytes) -> bool:
        """A known line comes again: whether what it adds was done, so that nobody need look at it."""

    def settle(self) -> None:
        """Other lines follow."""


class Floods:
    """The lines of blocks that are to be looked at, without those that a listener knows.

    Args:
        is_wanted: whether a line may tell anything; asked once of each shape.
    """

    def __init__(self, is_wanted: Callable[[bytes], bool], listener: Listener) -> None:
        self._is_wanted, self._listener = is_wanted, listener
        self._told: dict[bytes, object | None] = {}
        """Shape of a line -> what it adds; None where it is not wanted."""

    def holds(self, block: bytes) -> bool:
        """Whether a block is a flood's."""
        shapes = block[:SAMPLE_BYTES].translate(ANY_NUMBER).splitlines()
        return len(shapes) >= LEAST_LINES and len(set(shapes)) <= ALIKE * len(shapes)

    def lines(self, block: bytes) -> Iterator[bytes]:
        """The wanted lines of a block that the listener does not take as known, each asked for after the one before
        was looked at."""
        listener, told, again = self._listener, self._told, self._listener.again
        listener.begin()
        is_calm = listener.is_calm
        for shape, raw in zip(block.translate(ANY_NUMBER).splitlines(), block.splitlines(), strict=True):
            known = told.get(shape, self)
            if known is None or (is_calm and known is not self and again(known, raw)):
                continue
            if known is self and not self._is_wanted(raw):
                self._remember(shape, None)
                continue
            listener.settle()
            listener.begin()
            yield raw
            is_calm = listener.is_calm
            if known is self and (adds := listener.told) is not None:
                self._remember(shape, adds)
        listener.settle()

    def _remember(self, shape: bytes, adds: object | None) -> None:
        if len(shape) <= MAX_LINE_BYTES:
            if len(self._told) >= MAX_SHAPES:
                self._told.clear()
            self._told[shape] = adds
