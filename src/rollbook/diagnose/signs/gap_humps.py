"""The gap's quantiles: most tokens as near to the trainer as ever, and a part that moves away from it with every update
are two sorts of engines, whatever the log lacks of versions. Where all engines stand, the median goes as well."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.signs.gap_causes import LEAST_GROWTH
from rollbook.diagnose.view import View

_OF_THE_GAP = re.compile(
    r"(.*(?:log_?prob_gap|probs?_diff|logp(?:rob)?s?_(?:abs_)?diff))[_/](p50|median|p9\d)"
)
MORE = 2.0
"""Growth of what is above over that of the median, as logarithms, from which on they are two humps: 1 where all tokens
part alike, 2.5 and more where up to a third of them do."""
OF_MANY = 0.5
"""Growth of the 95th over that of the 99th percentile below which it is a tail of few tokens, as numerics have it."""


@dataclass(frozen=True, slots=True)
class Humps:
    """The part of the tokens that moves away."""

    rise: Break
    """Of the highest quantile."""
    median: str
    median_ratio: float
    """What it is in the end over what it was."""


def has_quantiles(view: View) -> bool:
    return bool(_quantiles(view))


def _quantiles(view: View) -> dict[str, str]:
    """Which quantile -> its name, of the first gap that is logged with its median and one above it."""
    families: dict[str, dict[str, str]] = {}
    for metric in view.run.values:
        if (match := _OF_THE_GAP.fullmatch(metric)) is not None and view.has(metric):
            families.setdefault(match[1], {})[match[2].replace("median", "p50")] = metric
    return next((found for found in families.values() if "p50" in found and len(found) > 1), {})


def two_humps(view: View) -> Humps | None:
    """What moves away while the median nearly stands; None where nothing does, or all do."""
    named = _quantiles(view)
    if not named:
        return None
    top = named[max(named)]
    rise = view.rise(top)
    if rise is None or rise.score < 6 or not rise.is_ramp or rise.ratio < LEAST_GROWTH:
        return None

    def grown(metric: str) -> float:
        since = view.values[metric][rise.idx : rise.end_idx]
        late = float(np.nanmedian(since[-max(3, len(since) // 3) :]))
        return float(np.log(late / view.level(metric, max(0, rise.idx - 40), rise.idx)))

    median, above = grown(named["p50"]), grown(top)
    if not above >= MORE * max(median, 0.0) or not above - median >= np.log(LEAST_GROWTH):
        return None
    if "p95" in named and max(named) > "p95" and not grown(named["p95"]) >= OF_MANY * above:
        return None
    return Humps(rise, named["p50"], float(np.exp(median)))
