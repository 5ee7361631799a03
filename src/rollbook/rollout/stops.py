"""Stop strings: whether the newest token completed one, wherever in the response it began."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rollbook.rollout.engine import GenerateRequest
from rollbook.types import Ids


class TextDecoder(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, token_ids: list[int]) -> str: ...


def meets_stop_string(
    request: GenerateRequest, sampled: Sequence[int] | Ids, decode: Callable[[list[int]], str]
) -> bool:
    """Whether the text of the response ends its generation.

    A response that was cut and continued has its first part at the end of the request's prompt (`num_continued`): a
    string that began before the cut counts, and one that stands in the prompt proper does not.

    Args:
        sampled: every token sampled for this request, the newest last.
        decode: token ids to text.
    """
    stops = request.sampling.stop_strings
    # Each token adds at least one byte, so a string that just completed lies within so many tokens of the end.
    num_last = max(len(text.encode()) for text in stops) + 4
    tail = [int(token) for token in sampled[-num_last:]]
    num_before = min(num_last - len(tail), request.num_continued)
    if num_before > 0:
        tail = [*request.prompt_ids[-num_before:].tolist(), *tail]
    text = decode(tail)
    return any(stop in text for stop in stops)
