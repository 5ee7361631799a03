"""The weight version that each replica serves, under names of its own: `engine/3/version`, `dp_rank2.weights_step`.
A name is read by its words: a number, a word of a replica, those of a version, and no other that might mean more."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from rollbook.diagnose.readers.words import pieces_in, word_set
from rollbook.diagnose.series import Series, finite

_OF_A_REPLICA = word_set(
    "replica replicas engine engines worker workers server servers rollout rollouts instance instances dp rank sampler"
    " generator vllm sglang actor"
)
_VERSIONS = (word_set("version"), word_set("weights step"), word_set("weight step"))
_BESIDE = word_set(
    "weight weights policy model param params current served serving loaded id num by per versions step node nodes host"
    " gpu"
)


def versions_by_words(values: Mapping[str, Series]) -> dict[str, str]:
    """`replica/<number>/weight_version` -> the log's own name for it, of two replicas and more.

    >>> up = np.arange(4.0)
    >>> versions_by_words({"engine/0/version": up, "engine/1/version": up, "engine/1/version_lag": up})
    {'replica/0/weight_version': 'engine/0/version', 'replica/1/weight_version': 'engine/1/version'}
    """
    families: dict[str, dict[str, str]] = defaultdict(dict)
    for name, series in values.items():
        if (replica := _replica(name)) is not None and _counts_up(series):
            families[re.sub(r"\d+", "#", name)][f"replica/{replica}/weight_version"] = name
    if "replica/#/weight_version" in families:
        return {}  # nothing to rename
    found = max(families.values(), key=len, default={})
    return found if len(found) >= 2 else {}


def _replica(name: str) -> str | None:
    """The number of the replica whose version a name tells."""
    pieces = [piece for piece in pieces_in(name) if piece != "@"]
    numbers = [piece for piece in pieces if piece.isdigit()]
    words = frozenset(pieces) - frozenset(numbers)
    version = next((words & v for v in _VERSIONS if words >= v), None)
    if (
        not numbers
        or version is None
        or not words & _OF_A_REPLICA
        or words - _OF_A_REPLICA - version - _BESIDE
    ):
        return None
    return "-".join(numbers)


def _counts_up(series: Series) -> bool:
    """Whether values are whole numbers that grow but for a restart, or stand."""
    known = finite(series)
    return len(known) >= 4 and not np.any(known % 1) and float(np.mean(np.diff(known) >= 0)) >= 0.9
