"""What a log says of a filter of groups under names of its own: `rollout/rejected` beside `rollout/accepted`. A name is
read by its words, and only as one of such a pair."""

from __future__ import annotations

from collections.abc import Collection

from rollbook.diagnose.readers.words import pieces_of, word_set

BATCHES = "train/num_gen_batches"
DROPPED = ("training/filter_groups/evicted_samples", "filter/flat/num_groups", BATCHES)


_OF = word_set(
    "rollout rollouts group groups sample samples prompt prompts trajectory trajectories episode episodes filter"
)
_KEPT = word_set("accepted kept passed")
_DROPPED = word_set("rejected filtered dropped discarded")
_NOT = word_set(
    "token tokens draft drafts spec speculative stale staleness age old expired error errors failed failures reward"
    " rate ratio frac fraction share pct s sec seconds time max min std"
)
"""Who samples ahead accepts tokens; what is too old or failed passed no filter of groups."""


def dropped_by_words(names: Collection[str]) -> dict[str, str]:
    """Metric of what a filter drops -> the log's own name for it, beside one for what is kept; nothing where a log has
    it under a known name.

    >>> dropped_by_words(["rollout/accepted", "rollout/rejected", "spec/accepted_tokens", "spec/rejected_tokens"])
    {'training/filter_groups/evicted_samples': 'rollout/rejected'}
    """
    if any(metric in names for metric in DROPPED):
        return {}
    said = {name: pieces_of(name) for name in names}
    kept = {words - _KEPT for words in said.values() if words & _KEPT}
    for name, words in said.items():
        if words & _DROPPED and words & _OF and not words & _NOT and words - _DROPPED in kept:
            return {DROPPED[0]: name}
    return {}
