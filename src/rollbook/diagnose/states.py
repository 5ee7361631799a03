"""States of the algorithm or the data that limit a run while the system is well: advice, never alarms. Which there are,
what each brings about, and which leave out others; `algorithm/` tells them."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.algorithm import exploding_ratios, held_out, lengths, no_signal, policy, rewards
from rollbook.diagnose.finding import State
from rollbook.diagnose.view import View

OF_A_WELL_SYSTEM = frozenset({"plateau", "reward_saturates", "reward_falls", "overoptimised"})
"""States that mean nothing while a fault of the system is there."""

BRINGS_ABOUT: dict[str, frozenset[str]] = {
    "learning_rate_too_high": frozenset(
        {
            "tail_burst",
            "buffer_never_fills",
            "engine_mismatch",
            "mismatch_to_nan",
            "not_finite",
            "stale_samples",
            "filter_starvation",
            "one_source_all_zero",
        }
    ),
    "entropy_collapse": frozenset({"tail_burst"}),
}
"""State -> findings that may be nothing but its consequence."""
BY_LONGER_ANSWERS = frozenset({"stale_samples"})
"""Those that only come about where answers take longer."""
LONGER = 1.3
"""Length over that before from which on they do."""

MOVES: dict[str, frozenset[str]] = {
    "learning_rate_too_high": frozenset(
        {"reward by source", "gap of trainer and engine", "staleness, lengths, sync seconds"}
    ),
    "lengths_explode": frozenset({"reward by source", "staleness, lengths, sync seconds"}),
    **dict.fromkeys(
        (
            "entropy_collapse",
            "answers_cut_off",
            "no_signal",
            "data_exhausted",
            "reward_falls",
            "overoptimised",
        ),
        frozenset({"reward by source"}),
    ),
}
"""State -> signals that it moves by itself."""


STATES = (
    policy.learning_rate_too_high,
    exploding_ratios.judge,
    lengths.lengths_explode,
    policy.entropy_collapse,
    lengths.cut_off,
    no_signal.no_signal,
    held_out.data_exhausted,
    held_out.overoptimised,
    rewards.reward_saturates,
)
"""The gravest first."""
OF_NOTHING_ELSE = (rewards.reward_falls, rewards.plateau)
"""Those that are only said where no other holds; the first that does."""
LEAVES_OUT = {"reward_saturates": "entropy_collapse", "data_exhausted": "overoptimised"}
"""State -> another that it explains: solved tasks are answered alike, old data are known by heart."""


def judge(view: View) -> list[State]:
    """The states that hold, the gravest first."""
    found = [state for judge_one in STATES if (state := judge_one(view)) is not None]
    left_out = {LEAVES_OUT.get(state.name) for state in found}
    found = [state for state in found if state.name not in left_out]
    for judge_one in OF_NOTHING_ELSE:
        if not found and (state := judge_one(view)) is not None:
            found.append(state)
    return found


def answers_grow(view: View, step: int) -> bool:
    """Whether answers became longer since a step, as far as is logged."""
    idx, length = view.idx_of(step), view.first("response_length/mean")
    if length is None:
        return True
    before = view.level(length, max(0, idx - 40), idx)
    late = np.nanmax([view.level(length, idx, (idx + view.n) // 2), view.level(length, (idx + view.n) // 2)])
    return not late < LONGER * before
