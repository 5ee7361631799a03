"""Scorers that need nothing but the text. All give 1.0 for full marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import JsonValue

# A minus belongs to the number unless it follows one: "5-3" ends in 3.
_NUMBER = re.compile(r"(?<![\d.])[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
RELATIVE_TOLERANCE = 1e-6


def answer_of(task: Mapping[str, JsonValue]) -> str:
    """The reference answer as text. Raises ValueError when the task has none."""
    answer = task.get("answer")
    if answer is None:
        raise ValueError(f"the task has no 'answer' (it has: {', '.join(task) or 'nothing'})")
    return str(answer)


def exact(response: str, task: Mapping[str, JsonValue], **_: JsonValue) -> float:
    """1 when response and answer are equal but for white space at their ends."""
    return float(response.strip() == answer_of(task).strip())


def digits(response: str, task: Mapping[str, JsonValue], **_: JsonValue) -> dict[str, float]:
    """Half for an exact match, half for the share of characters that are right in their place.

    >>> digits("64", {"answer": "641"})["score"], digits("641", {"answer": "641"})["score"]
    (0.3333333333333333, 1.0)
    """
    given, wanted = response.strip(), answer_of(task).strip()
    is_exact = float(given == wanted)
    right_frac = sum(a == b for a, b in zip(given, wanted)) / max(len(given), len(wanted), 1)
    return {"score": 0.5 * is_exact + 0.5 * right_frac, "exact": is_exact, "right_frac": right_frac}


def last_number(text: str) -> float | None:
    """The last number written in the text, with or without thousands separators.

    >>> [last_number(t) for t in ("so 5-3", "#### -1,234.50", "it costs $18.", "none")]
    [3.0, -1234.5, 18.0, None]
    """
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def numeric(response: str, task: Mapping[str, JsonValue], **_: JsonValue) -> float:
    """1 when the last number of the response equals the last number of the answer, to 1e-6 of its size."""
    wanted = last_number(answer_of(task))
    if wanted is None:
        raise ValueError(f"the answer {answer_of(task)!r:.60} holds no number")
    given = last_number(response)
    return float(given is not None and abs(given - wanted) <= RELATIVE_TOLERANCE * max(1.0, abs(wanted)))
