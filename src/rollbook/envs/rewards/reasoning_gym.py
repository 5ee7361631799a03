"""Scorers of reasoning-gym (extra `tasks`), as its tasks define them.

Known of 0.1.25: several tasks give 0.01 to 0.05 for any text; some have no reference answer (boxnet, graph_color,
propositional_logic, rubiks_cube, rush_hour); prime_factorization raises on text that holds no number. Such a raise
means "not an answer", and to call it a failure would let a policy escape by writing nonsense. So it scores 0, but
only once the same scorer has judged its own reference answer without raising; otherwise the raise stands.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rollbook.envs.reasoning_gym import entry

if TYPE_CHECKING:
    from pydantic import JsonValue


def prepare() -> None:
    """Import the library; a missing one is said by the task that asks for it."""
    with contextlib.suppress(ImportError):
        importlib.import_module("reasoning_gym.factory")


def reasoning_gym(response: str, task: Mapping[str, JsonValue], **_: JsonValue) -> float:
    """The task's own score of the response, 0 to 1. A right answer within a sentence scores little: have the
    policy give the answer alone, or cut it out before scoring."""
    dataset, made = entry(task)
    given = response.strip()
    if not given:
        return 0.0
    try:
        return float(dataset.score_answer(given, made))
    except Exception:
        if made["answer"] is None:
            raise
        dataset.score_answer(made["answer"], made)  # raises where the scorer is broken rather than the text
        return 0.0
