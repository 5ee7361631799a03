"""Scorers of the tests: one that always tells responses apart, and the ways a scorer can go wrong."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def low_digits(response: str, task: Mapping[str, Any]) -> float:
    """Share of the characters that are 0 to 4, so that an untrained model's group is rarely flat."""
    return sum(character in "01234" for character in response) / max(len(response), 1)


def first_is_low(response: str, task: Mapping[str, Any]) -> float:
    """1 or 0: of a group of two, every other one is flat."""
    return float(response[:1] in tuple("01234"))


def zero(response: str, task: Mapping[str, Any]) -> float:
    return 0.0


def raises(response: str, task: Mapping[str, Any]) -> float:
    raise ZeroDivisionError("the grader divided by zero")


def raises_on_even(response: str, task: Mapping[str, Any]) -> float:
    """A grader that cannot judge responses of even length."""
    if len(response) % 2 == 0:
        raise ValueError("even length")
    return low_digits(response, task)


def not_a_number(response: str, task: Mapping[str, Any]) -> float:
    return float("nan")


def words(response: str, task: Mapping[str, Any]) -> Any:
    return "good"


def interrupts_once(
    response: str, task: Mapping[str, Any], *, marker: str, by: str = "SIGINT", whole_group: bool = False
) -> float:
    """Ctrl-C, or another signal, at call number 12 of the first process: a call a byte of the file `marker`. A
    terminal sends it to the whole process group."""
    path = Path(marker)
    calls = path.stat().st_size if path.exists() else 0
    path.write_bytes(bytes(calls + 1))
    if calls + 1 == 12:
        os.kill(0 if whole_group else os.getpid(), signal.Signals[by])
    return low_digits(response, task)


broken = False


def breaks_down(response: str, task: Mapping[str, Any]) -> float:
    """Works until somebody sets `broken`."""
    if broken:
        raise RuntimeError("the grader is gone")
    return low_digits(response, task)


def by_answer(response: str, task: Mapping[str, Any]) -> float:
    """1 where the row's answer is "right", whatever the response says."""
    return float(task["answer"] == "right")
