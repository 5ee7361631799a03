"""Numbers as people read them, for the terminal and reports: "1.92 s", "12.1k", "3.4 GB"."""

from __future__ import annotations

import math


def seconds(value: float) -> str:
    """
    >>> [seconds(v) for v in (0.00042, 0.31, 9.5, 81.0, 4200.0, 90_000.0)]
    ['0.42 ms', '310 ms', '9.50 s', '81.0 s', '1 h 10 min', '1 d 1 h']
    """
    if not math.isfinite(value):
        return "?"
    if value < 0.01:
        return f"{value * 1e3:.2f} ms"
    if value < 1:
        return f"{value * 1e3:.0f} ms"
    if value < 10:
        return f"{value:.2f} s"
    if value < 100:
        return f"{value:.1f} s"
    minutes = round(value / 60)
    if minutes < 60:
        return f"{int(value // 60)} min {int(value % 60)} s"
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def count(value: float) -> str:
    """
    >>> [count(v) for v in (0, 7.25, 5520.3, 12_060.0, 3_400_000.0, 2.5e9)]
    ['0', '7.25', '5520', '12.1k', '3.4M', '2.5G']
    """
    if not math.isfinite(value):
        return "?"
    for factor, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1e3 if letter == 'k' else factor):.1f}{letter}"
    if value == round(value) or abs(value) >= 1000:
        return str(round(value))
    return f"{value:.3g}"


def counted(number: float, noun: str) -> str:
    """A number and what it counts.

    >>> counted(1, "prompt"), counted(512, "training GPU"), counted(2, "trajectory"), counted(0, "box")
    ('1 prompt', '512 training GPUs', '2 trajectories', '0 boxes')
    """
    if number != 1:
        ending = "es" if noun.endswith(("s", "x", "ch")) else "s"
        is_vowel = noun[-2:-1] in "aeiou"
        noun = noun[:-1] + "ies" if noun.endswith("y") and not is_vowel else noun + ending
    return f"{number:g} {noun}" if isinstance(number, float) else f"{number} {noun}"


def num_bytes(value: float) -> str:
    """Decimal units, as disks and links are sold.

    >>> [num_bytes(v) for v in (512, 81_000, 3.4e9)]
    ['512 B', '81.0 kB', '3.4 GB']
    """
    for factor, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= factor:
            return f"{value / factor:.1f} {unit}"
    return f"{int(value)} B"


def tiny(value: float) -> str:
    """A quantity that is best near zero.

    >>> [tiny(v) for v in (0.0, 3.14e-6, 0.0213, 1.5)]
    ['0', '3.1e-06', '0.021', '1.50']
    """
    if value == 0:
        return "0"
    if abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.2f}" if abs(value) >= 1 else f"{value:.2g}"


def frac(value: float) -> str:
    """A share, as percent for people.

    >>> [frac(v) for v in (0.0, 0.004, 0.25, 1.0)]
    ['0 %', '0.4 %', '25 %', '100 %']
    """
    percent = value * 100
    return f"{percent:.1f} %" if 0 < percent < 1 else f"{percent:.0f} %"
