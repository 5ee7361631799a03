"""Scorers by name: the built-in table, and import paths."""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rollbook.envs.rewards.builtin import digits, exact, numeric
from rollbook.envs.rewards.math_verify import math_verify
from rollbook.envs.rewards.reasoning_gym import reasoning_gym
from rollbook.envs.rewards.result import Isolation
from rollbook.errors import ConfigError, nearest_name

RewardFunction = Callable[..., object | Awaitable[object]]
"""`def reward(response: str, task: Mapping, **options) -> float | dict[str, float]`, plain or async.

A mapping holds the value under "score"; its other entries are reported beside it.
"""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A scorer of ours, and where it runs unless the config says otherwise."""

    function: RewardFunction
    isolation: Isolation


REWARDS: Mapping[str, BuiltIn] = {
    "exact": BuiltIn(exact, "inline"),
    "digits": BuiltIn(digits, "inline"),
    "numeric": BuiltIn(numeric, "inline"),
    "math_verify": BuiltIn(math_verify, "process"),
    "reasoning_gym": BuiltIn(reasoning_gym, "process"),
}


def find_function(name: str) -> RewardFunction:
    """A built-in by name, or an import path `module:function`. Raises ConfigError."""
    if name in REWARDS:
        return REWARDS[name].function
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"reward function {name!r} is neither a built-in nor an import path",
            nearest_name(name, REWARDS) + " An own function is written as 'module:function'.",
        )
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ConfigError(
            f"reward function {name!r}: importing {module_name} raised {type(error).__name__}: {error}",
            "check the module's name and that its folder is on PYTHONPATH",
        ) from None
    function = vars(module).get(attribute)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(
            f"reward function {name!r}: {module_name} has no function {attribute!r}",
            nearest_name(attribute, known) if known else "define it in that module",
        )
    chosen: RewardFunction = function
    return chosen
