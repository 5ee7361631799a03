"""Counts as people write them: `8k`, `32k`, `671b`; and the bounds within which a number means something."""

from __future__ import annotations

import math
import re

from rollbook.errors import ConfigError, PlanError

MOST_COUNT = 10**12
"""Largest count of anything that a person can have meant."""

_UNITS = {"": 1, "k": 1024, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_count(text: str | int | float, *, what: str = "count") -> int:
    """A positive whole number from what a user typed.

    `k` is 1024, as in a context of 32k; `m`, `b` and `t` are powers of ten, as in a model of 671b.

    Args:
        text: "8k", "1.5k", "671b", "4_096", "4,096", or a number.
        what: the name used in the error.
    Raises:
        ConfigError: not a number, not whole, or below 1.

    >>> parse_count("8k"), parse_count("671b"), parse_count("1.5K"), parse_count(300)
    (8192, 671000000000, 1536, 300)
    """
    match = re.fullmatch(
        r"([+-]?\d*\.?\d+(?:e[+-]?\d+)?)\s*([kmbt]?)", str(text).strip().lower().translate(_SEPARATORS)
    )
    if match is None:
        raise ConfigError(
            f"{what} is {text!r}, not a number", "write a whole number such as 4096, 8k, 32k or 671b"
        )
    value = float(match[1]) * _UNITS[match[2]]
    if value > MOST_COUNT:
        raise ConfigError(f"{what} is {text}, above {MOST_COUNT:.0e}", "check the number and its unit")
    if value < 1:
        raise ConfigError(f"{what} is {text}, below 1", f"give {what} of at least 1")
    if value != round(value):
        comes_to = "" if match[2] == "" else f" = {value:.6g}"
        raise ConfigError(f"{what} is {text}{comes_to}, not whole", "write a whole number")
    return round(value)


def require_number(what: str, value: object, *, least: float, most: float = math.inf, remedy: str) -> None:
    """Refuse what is no number, not finite, or outside of [least, most].

    Raises:
        PlanError: with the value and `remedy`.

    >>> require_number("--turns", float("nan"), least=1, remedy="give at least 1")
    Traceback (most recent call last):
        ...
    rollbook.errors.PlanError: --turns is nan, not a finite number
    hint: give at least 1
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise PlanError(f"{what} is {value!r}, not a number", remedy)
    if not math.isfinite(value):
        raise PlanError(f"{what} is {value}, not a finite number", remedy)
    if value < least:
        raise PlanError(f"{what} is {_plain(value)}, below {_plain(least)}", remedy)
    if value > most:
        raise PlanError(f"{what} is {_plain(value)}, above {_plain(most)}", remedy)


def _plain(value: float) -> str:
    """As a person writes it: a count in full, 1e300 as 1e+300.

    >>> _plain(1000000), _plain(0.5), _plain(1e300)
    ('1000000', '0.5', '1e+300')
    """
    return f"{value:.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:g}"


_SEPARATORS = str.maketrans("", "", "_,")


_BYTE_UNITS = {"TB": 1e12, "GB": 1e9, "MB": 1e6, "kB": 1e3}
_MOST_DIGITS = 3


def format_bytes(num_bytes: float) -> str:
    """Powers of ten, as device memory is sold.

    >>> format_bytes(10.736e12), format_bytes(64.2e9)
    ('10.7 TB', '64.2 GB')
    """
    for unit, size in _BYTE_UNITS.items():
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"


def apart_bytes(needed: float, room: float) -> tuple[str, str]:
    """Two sizes that are compared, in as many digits as tell them apart.

    >>> apart_bytes(83.9e9, 72e9), apart_bytes(72.03e9, 72e9), apart_bytes(72e9 + 1, 72e9)
    (('83.9 GB', '72.0 GB'), ('72.03 GB', '72.00 GB'), ('72.0 GB', '72.0 GB'))
    """
    told = format_bytes(needed), format_bytes(room)
    unit = told[0].rpartition(" ")[2]
    if told[0] != told[1] or unit not in _BYTE_UNITS:
        return told
    for digits in range(2, _MOST_DIGITS + 1):
        exact = tuple(f"{value / _BYTE_UNITS[unit]:.{digits}f} {unit}" for value in (needed, room))
        if exact[0] != exact[1]:
            return exact[0], exact[1]
    return told
