"""The random number behind a token: a hash of (seed, group, member, token index), of nothing else.

Batch neighbours, arrival order, preemption and the engine's device therefore cannot change what is drawn.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Keys = NDArray[np.uint64]
"""[n] uint64."""

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014): every input bit moves every output bit."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def sequence_key(seed: int, group_id: int, member_idx: int) -> int:
    """64-bit key of one trajectory's stream of draws.

    >>> sequence_key(0, 0, 0) != sequence_key(0, 0, 1) != sequence_key(0, 1, 0)
    True
    """
    key = 0
    for part in (seed, group_id, member_idx):
        key = _mix((key + _GOLDEN + (part & _MASK)) & _MASK)
    return key


def uniforms(keys: Keys, token_idx: NDArray[np.int64]) -> NDArray[np.float64]:
    """[n] float64 in [0, 1): draw number `token_idx[i]` of the stream `keys[i]`.

    >>> draws = uniforms(np.array([7, 7], np.uint64), np.array([0, 1]))
    >>> bool(draws[0] == uniforms(np.array([7], np.uint64), np.array([0]))[0]) and bool(draws[0] != draws[1])
    True
    """
    value = keys + (token_idx.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    value ^= value >> np.uint64(31)
    draws: NDArray[np.float64] = (value >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return draws
