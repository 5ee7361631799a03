"""Scorers of the tests: one that always tells responses apart, and the ways a scorer can go wrong."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def low_digits(response: str, task: Mapping[str, Any]) -> float:
    """Share of the characters that are 0 to 4, so that an untrained model's group is rarely flat."""
    return sum(character in "01234" for character in response) / max(len(response), 1)


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


def dies_once(response: str, task: Mapping[str, Any], *, marker: str) -> float:
    """Kills the process of the run at the first call that finds no file `marker`: a power cut in a step."""
    if not os.path.exists(marker):  # noqa: PTH110
        with open(marker, "w"):  # noqa: PTH123
            pass
        os.kill(os.getpid(), 9)
    return low_digits(response, task)


def by_answer(response: str, task: Mapping[str, Any]) -> float:
    """1 where the row's answer is "right", whatever the response says."""
    return float(task["answer"] == "right")
