"""Scorers by name: the built-in table, and import paths."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

from rollbook.envs.rewards.builtin import digits, exact, numeric
from rollbook.envs.rewards.math_verify import math_verify
from rollbook.envs.rewards.math_verify import prepare as prepare_math_verify
from rollbook.envs.rewards.reasoning_gym import prepare as prepare_reasoning_gym
from rollbook.envs.rewards.reasoning_gym import reasoning_gym
from rollbook.envs.rewards.result import Isolation
from rollbook.errors import ConfigError, nearest_name

if TYPE_CHECKING:
    from pydantic import JsonValue

RewardFunction = Callable[..., object | Awaitable[object]]
"""`def reward(response: str, task: Mapping, **options) -> float | dict[str, float]`, plain or async.

A mapping holds the value under "score"; its other entries are reported beside it.
"""


@dataclass(frozen=True, slots=True)
class BuiltIn:
    """A scorer of ours, and where it runs unless the config says otherwise."""

    function: RewardFunction
    isolation: Isolation
    prepare: Callable[[], object] | None = None
    """Loads what the first call would otherwise load within its deadline."""


REWARDS: Mapping[str, BuiltIn] = {
    "exact": BuiltIn(exact, "inline"),
    "digits": BuiltIn(digits, "inline"),
    "numeric": BuiltIn(numeric, "inline"),
    "math_verify": BuiltIn(math_verify, "process", prepare_math_verify),
    "reasoning_gym": BuiltIn(reasoning_gym, "process", prepare_reasoning_gym),
}


def prepare(name: str) -> None:
    """Load the libraries of a built-in; an own function has loaded them with its module."""
    if name in REWARDS and (load := REWARDS[name].prepare):
        load()


def add_search_path(folders: Sequence[str]) -> None:
    """Let import paths be found in these folders too, after everything else, so that no module is hidden by them."""
    sys.path += [folder for folder in folders if folder not in sys.path]


def missing_module(name: str, folders: Sequence[str] = ()) -> ConfigError | None:
    """What `find_function` would say of an import path whose module is nowhere; nothing is imported."""
    first = name.partition(":")[0].partition(".")[0]
    is_there = first in sys.modules or (
        importlib.util.find_spec(first) or PathFinder.find_spec(first, [*folders])
    )
    return None if is_there else _not_found(name, first, folders)


def _not_found(name: str, module_name: str, folders: Sequence[str]) -> ConfigError:
    searched = ", ".join([*folders, "PYTHONPATH and the installed packages"])
    return ConfigError(
        f"reward function {name!r}: there is no module {module_name!r}; searched: {searched}",
        f"put {module_name.replace('.', '/')}.py beside the config, or add its folder to reward.search_path",
    )


def require_signature(name: str, function: RewardFunction, options: Mapping[str, JsonValue]) -> None:
    """
    Raises:
        ConfigError: the function cannot be called as it will be.
    """
    try:
        signature = inspect.signature(function)
    except ValueError:  # of C code; its first call will tell
        return
    try:
        signature.bind("", {}, **options)
    except TypeError as error:
        given = ", ".join(["response", "task", *(f"{option}=..." for option in options)])
        own = name.rpartition(":")[2]
        raise ConfigError(
            f"reward function {name!r} is {own}{signature} and is called as {own}({given}): {error}",
            f"write it as `def {own}(response: str, task: dict, **options)`: task holds the row's answer under "
            "'answer' and its task_columns, options are those of the term; it returns a number, or a dict with 'score'",
        ) from None


def find_function(name: str, folders: Sequence[str] = ()) -> RewardFunction:
    """A built-in by name, or an import path `module:function`.

    Args:
        folders: where import paths are looked for beside Python's own path (`add_search_path` was called); for the
            message.
    Raises:
        ConfigError: there is no such function, or its module cannot be imported.
    """
    if name in REWARDS:
        return REWARDS[name].function
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"reward function {name!r} is neither a built-in nor an import path",
            f"{nearest_name(name, [*REWARDS, 'judge'])} (an own function is written as 'module:function')",
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"reward function {name!r}: {module_name} imports {error.name!r}, which is not installed",
                f"install {error.name}, or put it beside {module_name}",
            ) from None
        raise _not_found(name, error.name, folders) from None
    except (Exception, SystemExit) as error:  # whatever the user's module raises when it is imported
        raise ConfigError(
            f"reward function {name!r}: importing {module_name} raised {type(error).__name__}: {error}",
            "mend the module: it must import without an error",
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
