"""Numbers out of texts: "about 8k tokens", "2 min 12 s", "1.2-1.5 s"."""

from __future__ import annotations

import re
from typing import Any

HEDGE = r"(?:about|around|approximately|approx\.?|roughly|some|ca\.?|circa|nearly|~|≈)?\s*"
FIGURE = r"(\d[\d,]*(?:\.\d+)?)\s*([kKM](?![a-zA-Z]))?"


def figure(text: str) -> float | None:
    """The number that a text begins with: "8,192", "about 20.6k (per-batch table)", "16 GPUs"."""
    found = re.match(rf"\s*{HEDGE}{FIGURE}", text)
    return None if found is None else scaled(found[1], found[2])


def scaled(digits: str, suffix: str | None) -> float:
    value = float(digits.replace(",", ""))
    if not suffix:
        return value
    if suffix == "M":
        return value * 1e6
    # A limit of 8k is 8,192 tokens, a mean of 20.6k is 20,600.
    is_power = value.is_integer() and int(value) & (int(value) - 1) == 0
    return value * (1024 if is_power else 1000)


UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "min": 60.0, "mins": 60.0,
    "m": 60.0, "minute": 60.0, "minutes": 60.0, "h": 3600.0, "hr": 3600.0, "hour": 3600.0, "hours": 3600.0,
}  # fmt: skip
_UNIT_WORDS = "|".join(sorted(UNITS, key=len, reverse=True))


def seconds_of(value: Any, unit: str = "s") -> Any:
    """Seconds of a number in `unit`, or of a text that may name its own: "1.5 min", "2 m 30 s", "1.2-1.5 s"."""
    if isinstance(value, list):
        return [seconds_of(one, unit) for one in value]
    if isinstance(value, dict):
        return {key: seconds_of(one, unit) for key, one in value.items()}
    if not isinstance(value, str):
        return value if unit == "s" or value is None else value * UNITS[unit]
    text = re.sub(rf"^\s*{HEDGE}", "", value)
    parts = re.findall(rf"(\d[\d,]*(?:\.\d+)?)\s*({_UNIT_WORDS})\b", text)
    ends = re.match(rf"([\d.]+)\s*(?:-|–|to)\s*([\d.]+)\s*({_UNIT_WORDS})?\b", text)
    if ends:
        scale = UNITS[ends[3] or unit]
        return [float(ends[1]) * scale, float(ends[2]) * scale]
    if parts and re.match(r"\s*\d", text):
        return sum(UNITS[word] * float(digits.replace(",", "")) for digits, word in parts)
    number = figure(text)
    return value if number is None else number * UNITS[unit]
