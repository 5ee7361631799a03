"""Built-in tasks in plain characters, small enough to learn on a CPU. One more task is one line in TASKS.

A task numbers its problems, so that a source draws without repetition and a problem is a function of its number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from pydantic import Field, JsonValue, ValidationError

from rollbook.errors import ConfigError, nearest_name
from rollbook.section import Section

MAX_ENUMERATED = 1_000_000
"""Problems that `num_prompts = 0` may mean."""

DIGITS = "0123456789"
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its only right answer."""

    prompt: str
    answer: str


class AdditionOptions(Section):
    """Options of the addition task."""

    num_digits: int = Field(default=2, ge=1, le=9)
    """Digits of each summand, padded with zeros on the left."""
    answer: Literal["reversed", "padded", "natural"] = "reversed"
    """Answer with the last digit first, padded; in the usual order, padded; or unpadded."""


class StringOptions(Section):
    """Options of the tasks on one string."""

    length: int = Field(default=4, ge=1, le=12)
    """Characters of the string."""


Options = TypeVar("Options", bound=Section)


@dataclass(frozen=True, slots=True)
class Task(Generic[Options]):
    """A numbered family of problems."""

    options: type[Options]
    alphabet: str
    """Every character of its prompts and answers."""
    num_problems: Callable[[Options], int]
    problem: Callable[[Options, int], Problem]
    """(options, number below num_problems) -> problem."""


def _addition(options: AdditionOptions, number: int) -> Problem:
    width = options.num_digits
    a, b = divmod(number, 10**width)
    padded = f"{a + b:0{width + 1}d}"
    answer = {"reversed": padded[::-1], "padded": padded, "natural": str(a + b)}[options.answer]
    return Problem(f"{a:0{width}d}+{b:0{width}d}=", answer)


def _spell(alphabet: str, length: int, number: int) -> str:
    letters = []
    for _ in range(length):
        number, rest = divmod(number, len(alphabet))
        letters.append(alphabet[rest])
    return "".join(reversed(letters))


def _reverse(options: StringOptions, number: int) -> Problem:
    word = _spell(LETTERS, options.length, number)
    return Problem(f"{word}>", word[::-1])


def _sort_digits(options: StringOptions, number: int) -> Problem:
    word = _spell(DIGITS, options.length, number)
    return Problem(f"{word}>", "".join(sorted(word)))


TASKS: Mapping[str, Task[Any]] = {
    "addition": Task(AdditionOptions, DIGITS + "+=", lambda o: 10 ** (2 * o.num_digits), _addition),
    "reverse": Task(StringOptions, LETTERS + ">", lambda o: len(LETTERS) ** o.length, _reverse),
    "sort_digits": Task(StringOptions, DIGITS + ">", lambda o: 10**o.length, _sort_digits),
}


def find_task(name: str) -> Task[Any]:
    """The task of that name; ConfigError names the nearest."""
    if name not in TASKS:
        raise ConfigError(f"data source task {name!r} does not exist", nearest_name(name, TASKS))
    return TASKS[name]


def problems(
    name: str, options: Mapping[str, JsonValue], *, num_prompts: int, seed: int
) -> Iterator[Problem]:
    """`num_prompts` different problems drawn by `seed`, or all in order with 0.

    Raises:
        ConfigError: an unknown task or option, or more problems than there are.

    >>> [p.prompt + p.answer for p in problems("addition", {"num_digits": 1}, num_prompts=2, seed=0)]
    ['4+9=31', '9+7=61']
    """
    return _draw(find_task(name), name, options, num_prompts, seed)


def _draw(
    task: Task[Options], name: str, options: Mapping[str, JsonValue], num_prompts: int, seed: int
) -> Iterator[Problem]:
    try:
        chosen = task.options.model_validate(dict(options))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        known = ", ".join(task.options.model_fields)
        raise ConfigError(
            f"option {key!r} of data source task {name!r}: {first['msg']}", f"its options are: {known}"
        ) from None
    total = task.num_problems(chosen)
    if num_prompts > total:
        raise ConfigError(
            f"data source task {name!r} has {total} problems and num_prompts is {num_prompts}",
            f"use at most {total}, or options with more digits or letters",
        )
    if num_prompts == 0 and total > MAX_ENUMERATED:
        raise ConfigError(
            f"data source task {name!r} has {total} problems and num_prompts is 0 (all)",
            "set num_prompts to the number to draw",
        )
    numbers = random.Random(seed).sample(range(total), num_prompts) if num_prompts else range(total)
    return (task.problem(chosen, number) for number in numbers)
