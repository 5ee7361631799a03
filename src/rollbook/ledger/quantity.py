"""Counts as people write them: `8k`, `32k`, `671b`."""

from __future__ import annotations

import re

from rollbook.errors import ConfigError

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
    if value < 1:
        raise ConfigError(f"{what} is {text}, below 1", f"give {what} of at least 1")
    if value != round(value):
        raise ConfigError(f"{what} is {text}, which is {value}: not whole", "write a whole number")
    return round(value)


_SEPARATORS = str.maketrans("", "", "_,")


def format_bytes(num_bytes: float) -> str:
    """Powers of ten, as device memory is sold.

    >>> format_bytes(10.736e12), format_bytes(64.2e9)
    ('10.7 TB', '64.2 GB')
    """
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes:.0f} B"
