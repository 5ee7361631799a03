"""math-verify (extra `tasks`): equality of mathematical expressions.

Its own time-outs use an alarm signal, which exists only in a main thread; they are switched off here and the
scorer's deadline stands instead. That needs a process that can be killed, where this scorer runs by default.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rollbook.envs.rewards.builtin import answer_of

if TYPE_CHECKING:
    from pydantic import JsonValue


@functools.cache
def _library() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        from math_verify import parse, verify
    except ImportError:
        raise ImportError("math-verify is not installed: pip install 'rollbook[tasks]'") from None
    # It warns at every call that its time-outs are off, which is on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return parse, verify


def prepare() -> None:
    """Import the library and its parser's tables."""
    parse, verify = _library()
    verify(parse("$1$", parsing_timeout=None), parse("1", parsing_timeout=None), timeout_seconds=None)


def math_verify(response: str, task: Mapping[str, JsonValue], **_: JsonValue) -> float:
    """1 when an expression of the response equals the answer; LaTeX, plain numbers, sets, intervals."""
    parse, verify = _library()
    wanted = parse(answer_of(task), parsing_timeout=None)
    if not wanted:
        raise ValueError(f"math-verify finds no expression in the answer {answer_of(task)!r:.60}")
    return float(verify(wanted, parse(response, parsing_timeout=None), timeout_seconds=None))
