"""What a log says of a filter of groups under names of its own: `rollout/rejected` beside `rollout/accepted`. A name is
read by its words, and only as one of such a pair."""

from __future__ import annotations

from collections.abc import Iterable

from rollbook.diagnose.readers.words import pieces_of

BATCHES = "train/num_gen_batches"
DROPPED = ("training/filter_groups/evicted_samples", "filter/flat/num_groups", BATCHES)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_OF = _words(
    "rollout rollouts group groups sample samples prompt prompts trajectory trajectories episode episodes filter"
)
_KEPT = _words("accepted kept passed")
_DROPPED = _words("rejected filtered dropped discarded")
_NOT = _words(
    "token tokens draft drafts spec speculative stale staleness age old expired error errors failed failures reward"
    " rate ratio frac fraction share pct s sec seconds time max min std"
)
"""Who samples ahead accepts tokens; what is too old or failed passed no filter of groups."""


def dropped_by_words(names: Iterable[str]) -> str | None:
    """The log's name for what a filter drops, beside one for what it keeps; None without both.

    >>> dropped_by_words(["rollout/accepted", "rollout/rejected", "spec/accepted_tokens", "spec/rejected_tokens"])
    'rollout/rejected'
    """
    said = {name: pieces_of(name) for name in names}
    kept = {words - _KEPT for words in said.values() if words & _KEPT}
    for name, words in said.items():
        if words & _DROPPED and words & _OF and not words & _NOT and words - _DROPPED in kept:
            return name
    return None
