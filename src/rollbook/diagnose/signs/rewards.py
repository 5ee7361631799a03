"""The mean reward, its lowest value, cliffs and slow declines; and the rewards by source."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import running_median
from rollbook.diagnose.readers.words import pieces_of
from rollbook.diagnose.view import View, once

REWARD = ("critic/score/mean", "critic/rewards/mean")


@dataclass(frozen=True, slots=True)
class Reward:
    metric: str | None
    fall: Break | None
    """A fall of at least a fifth of the reward above its lowest possible value, at once."""
    drop_frac: float
    """Share of the reward that was lost at that step."""


@once("bottom")
def of_all_answers(view: View) -> str | None:
    """The mean reward of all that was generated, where the log has it: groups that were all right are not trained, and
    lack in the mean of those that were."""
    sources = view.family("reward/", "/mean")
    return sources[0] if len(sources) == 1 and not _is_a_function(view, sources[0]) else view.first(*REWARD)


def _is_a_function(view: View, metric: str) -> bool:
    """Whether what the catalogue has for the reward of a source is that of a reward function in the log, as TRL calls
    it: a part of the reward, whose format may long be right while the answers are not."""
    return view.run.in_log.get(metric, metric).removeprefix("train/").startswith("rewards/")


def lowest_reward(view: View) -> float:
    """The reward of a wrong answer: 0, or less where rewards are negative."""
    low = view.level("critic/score/min")
    low = view.level("critic/rewards/min") if not np.isfinite(low) else low
    if np.isfinite(low):
        return min(0.0, low)
    metric = view.first(*REWARD)
    return min(0.0, float(np.nanmin(view.values[metric]))) if metric else 0.0


def lost_reward(view: View, idx: int, *, width: int = 8) -> float:
    """Share of the mean reward above the lowest that is gone after a position; negative when it rose, 0 if unknown."""
    c = view.contrast(view.first(*REWARD), idx, width=width)
    bottom = lowest_reward(view)
    return 0.0 if c is None or c.before <= bottom else -c.diff / (c.before - bottom)


def reward_cost(view: View, idx: int, *, width: int = 12) -> float | None:
    """Mean reward that is gone after a position, 0 where it rose; None where it cannot be told."""
    c = view.contrast(view.first(*REWARD), idx, width=width)
    return None if c is None else max(0.0, -c.diff)


def other_prompts(view: View, idx: int) -> bool:
    """Whether the prompts themselves changed at a step: a run that goes on with other data does all else."""
    if new_curriculum(view, idx - 2, idx + 1):
        return True
    prompts = view.contrast("prompt_length/mean", idx, width=8)
    return prompts is not None and abs(prompts.score) >= 6 and not 0.93 <= prompts.ratio <= 1.07


def new_curriculum(view: View, after: int, until: int) -> bool:
    """Whether a log says that the level of its curriculum changed after one position and up to another."""
    return any(after < at <= until for at in _curriculum_changes(view))


@once("curriculum changes")
def _curriculum_changes(view: View) -> list[int]:
    """Positions at which a level has another value than before."""
    found: list[int] = []
    for metric, values in view.values.items():
        if "curriculum" not in pieces_of(metric):
            continue
        known = np.flatnonzero(np.isfinite(values))
        changes = known[1:][np.diff(values[known]) != 0]
        if len(changes) <= SELDOM * len(known):
            found += changes.tolist()
    return found


SELDOM = 0.1
"""Share of its steps at which a level changes at the most: what changes all the time marks none of them."""


@once("reward")
def reward_of(view: View) -> Reward:
    """The mean reward, and whether it fell off a cliff."""
    metric = view.first(*REWARD)
    if metric is None:
        return Reward(None, None, 0.0)
    bottom = lowest_reward(view)
    fall = view.fall(metric)
    best: tuple[float, Break] | None = None
    if fall is not None:
        c = view.contrast(metric, fall.idx, width=10)
        if c is not None and c.before > bottom:
            lost = -c.diff / (c.before - bottom)
            sudden = c.jump <= 0.5 * c.diff or fall.rise_steps <= 3
            if lost >= 0.18 and c.score <= -5 and sudden:
                best = (lost, fall)
    return Reward(metric, best[1] if best else None, best[0] if best else 0.0)


@dataclass(frozen=True, slots=True)
class Moved:
    """A level that went from one value to another over the run, without a step."""

    metric: str
    step: int
    """Where it left the first value."""
    before: float
    after: float


LEAST_DECLINE = 0.3
"""Share of the best reward above the lowest whose loss is more than a run that wavers."""


@once("decline")
def reward_decline(view: View) -> Moved | None:
    """The mean reward is lost again, slowly: its late level against the best that it held for a tenth of the run."""
    metric = view.first(*REWARD)
    if metric is None or view.count(metric) < 30:
        return None
    known = np.flatnonzero(np.isfinite(view.values[metric]))
    values = view.values[metric][known]
    width = max(7, len(known) // 10)
    smooth = running_median(values, width | 1)
    top = int(np.argmax(smooth[:-width])) if len(smooth) > width else 0
    best, now, bottom = float(smooth[top]), float(np.median(values[-width:])), lowest_reward(view)
    wavers = 1.4826 * float(np.median(np.abs(values - smooth)))
    if best - now < max(LEAST_DECLINE * (best - bottom), 3.0 * wavers) or best <= bottom:
        return None
    left = np.flatnonzero(smooth[top:] >= best - 0.15 * (best - now))
    at = known[top + int(left[-1])]
    return Moved(metric, view.step_at(int(at)), best, now)


_TRAIN = re.compile(
    r"(?:reward|rewards|score|acc|train)/(.+)/(?:mean|reward|score|acc)(?:/mean)?"
    r"|critic/(?:rewards|score)/(.+)/mean"
)
_HELD_OUT = re.compile(
    r"val-(?:core|aux)/(.+)/(?:reward|score|acc)/mean@\d+|val-core/(.+?)/[^/]+/(?:[a-z]+@\d+/)?[^/]+"
    r"|val/(.+)/(?:exact_match|reward|acc|score)|val/test_score/(.+)"
)


@once("sources")
def sources_of(view: View) -> tuple[dict[str, str], dict[str, str]]:
    """Source -> its reward, of those that a log has by source: in training, and held out."""
    return _by_source(view, _TRAIN), _by_source(view, _HELD_OUT)


def held_out_of(view: View) -> dict[str, str]:
    """Source -> its reward in validations, though there was only one."""
    return _by_source(view, _HELD_OUT, least=1)


def _by_source(view: View, pattern: re.Pattern[str], *, least: int = 2) -> dict[str, str]:
    """Source -> its metric with the most values, and so many at the least; of several that of the first form."""
    found: dict[str, str] = {}
    told = [(metric, match) for metric in view.run.values if (match := pattern.fullmatch(metric)) is not None]
    for metric, match in sorted(told, key=lambda each: each[1].lastindex or 0):
        if view.count(metric) < least:
            continue
        source = next(g for g in match.groups() if g)
        if source not in found or view.count(metric) > view.count(found[source]):
            found[source] = metric
    return found
