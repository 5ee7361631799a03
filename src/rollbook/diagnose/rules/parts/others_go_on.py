"""A held-out score that falls to zero, or nearly so, while those of all other sources go on (`one_source_all_zero`)."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.signs.rewards import lowest_reward, reward_of
from rollbook.diagnose.view import View

GO_ON_SCORES = 3
"""Held-out scores at the floor, up to the last one, where every other source goes on as before; a small model may
well have none right of a source that it hardly solves."""
SOLVED = 0.1
"""Level of a score above the floor that such a source must have had."""


def zero_while_others_go_on(view: View, metric: str, others: list[str]) -> int | None:
    """Position from which a held-out score, never at the floor before, is exactly there to the end, while all others
    are as good as they were: of few evaluations those that others passed count."""
    values = view.values[metric] - floor_of(view, metric)
    known = np.flatnonzero(np.isfinite(values))
    zeros = np.flatnonzero(np.abs(values[known]) <= 1e-9)
    first = len(known) - len(zeros)
    if not len(zeros) or not first or zeros[0] != first:
        return None
    since, worst = int(known[first]), float(values[known[:first]].min())
    fell = _falls_between(view, int(known[first - 1]), since) if worst >= FIRMLY else None
    if fell is None and (len(zeros) < GO_ON_SCORES or first < 2 or worst < SOLVED):
        return None
    goes_on = _go_on(view, others, int(known[max(0, first - 3)]), since)
    return (since if fell is None else fell) if goes_on else None


GO_ON = 0.9
"""Of the scores of others, that must be left."""


def _go_on(view: View, others: list[str], earlier: int, since: int) -> bool:
    """Whether the other sources are as good from a position on as from an earlier one to it; False without any."""
    levels = ((view.level(m, earlier, since), view.level(m, since)) for m in others)
    return bool(others) and all(after >= GO_ON * before > 0.0 for before, after in levels)


FIRMLY = 0.25
"""Level of a score above the floor from which on a single zero, after a fall of the rewards of training, is no luck."""


def _falls_between(view: View, start: int, end: int) -> int | None:
    """Position after one and up to another at which the mean reward of training falls most, if it does at once."""
    at = (view.contrast(reward_of(view).metric, idx, width=10) for idx in range(start + 1, end + 1))
    falls = [(c.score, i) for i, c in enumerate(at) if c is not None and c.score <= -5 and c.is_at_once]
    return start + 1 + min(falls)[1] if falls else None


NEARLY = 0.1
"""Share of a score that is left where all but a few answers count as wrong."""
AT_MOST = 0.2
"""Of it, at its highest since."""


def nearly_zero_while_others_go_on(view: View, metric: str, others: list[str]) -> int | None:
    """Position from which a firm held-out score is all but gone, from one evaluation to the next and to the end, while
    all others are as good as they were: a policy forgets no source between two of them that it has not lost before."""
    values = view.values[metric] - floor_of(view, metric)
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 5 or not others:
        return None
    scores = values[known]
    first = 2 + int(np.argmin(np.diff(scores)[1:-1]))
    before, after = float(np.median(scores[max(0, first - 3) : first])), scores[first:]
    if before < FIRMLY or scores[first - 1] < 0.75 * before:
        return None
    if float(np.median(after)) > NEARLY * before or float(after.max()) > AT_MOST * before:
        return None
    since = int(known[first])
    if not _go_on(view, others, int(known[max(0, first - 3)]), since):
        return None
    fell = _falls_between(view, int(known[first - 1]), since)
    return since if fell is None else fell


def floor_of(view: View, metric: str) -> float:
    """What a score reads when every answer is wrong: of rewards from -1 to 1, -1."""
    low = float(np.nanmin(view.values[metric]))
    return lowest_reward(view) if low < -1e-9 else 0.0
