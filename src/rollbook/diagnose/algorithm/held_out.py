"""What the reward of training stands for no longer rises with it: data that were seen too often, or a scorer that is
gamed, as a held-out score or a term of the reward tells."""

from __future__ import annotations

import re

import numpy as np

from rollbook.diagnose.changes import noise_scale, running_median
from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.rewards import REWARD, Moved
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_moved

_HELD_OUT = re.compile(r"val-core/.+|val/.+/(?:exact_match|reward)")
LEAST_GAIN = 0.1
"""Rise of the reward in training over the range it has, from which on something was learned."""
LEAST_LOSS = 0.05
"""Fall of what it stands for, over the best it was, beyond a held-out score that wavers."""


def data_exhausted(view: View) -> State | None:
    epochs = view.last("training/epoch", 1)
    if not np.isfinite(epochs) or epochs < 4:
        return None
    metric = view.first(*REWARD)
    held_out = next((m for m in view.run.values if _HELD_OUT.fullmatch(m) and view.count(m) >= 5), None)
    if metric is None:
        return None
    evidence = [
        Evidence(
            metric="training/epoch", step=view.step_at(view.n - 1), after=epochs, says=f"epoch {num(epochs)}"
        )
    ]
    if held_out is not None:
        values = view.values[held_out]
        known = finite(values)
        smooth = running_median(known, 5 if len(known) >= 10 else 3)
        best, now = float(np.max(smooth)), float(smooth[-1])
        falls = best - now > max(0.02 * max(best, 0.1), 2 * noise_scale(known))
        if not falls and not _parts_from(view, metric, held_out):
            return None  # it still learns, or stands still in all there is
        says = f"held-out score {num(now)}, best {num(best)}"
        evidence.append(
            Evidence(metric=held_out, step=view.step_at(view.n - 1), before=best, after=now, says=says)
        )
    else:
        half = view.level(metric, view.n // 2, view.n // 2 + view.n // 6)
        if view.last(metric, max(3, view.n // 6)) > half + 0.02:
            return None
    return State(
        name="data_exhausted",
        title=f"the data have been seen {num(epochs)} times",
        step=view.step_at(view.n - 1),
        evidence=tuple(evidence),
        advice="add prompts, or stop at the best held-out score",
    )


def _parts_from(view: View, train: str, held_out: str) -> bool:
    """Whether the reward in training rose from the third quarter to the fourth, and the held-out score did not."""
    width = max(3, view.n // 4)
    start, end = view.n - 2 * width, view.n - width
    gained = [view.level(m, end) - view.level(m, start, end) for m in (train, held_out)]
    least = max(0.01, 3 * view.noise_before(train, view.n) / np.sqrt(width))
    return gained[0] > least and gained[1] <= 0.25 * gained[0]


def overoptimised(view: View) -> State | None:
    """The reward rises in training while what it stands for falls: a held-out score, or a term of the reward that is
    right or wrong beside one that can be talked to."""
    metric = view.first(*REWARD)
    if metric is None or view.n < 24:
        return None
    part = max(5, view.n // 8)
    first, last = view.level(metric, 0, part), view.last(metric, part)
    reach = float(np.nanquantile(view.values[metric], 0.95) - np.nanquantile(view.values[metric], 0.05))
    error = 3.0 * view.noise_before(metric, view.n) / np.sqrt(part)
    if last - first < max(LEAST_GAIN * max(abs(first), abs(last)), 0.5 * reach, error):
        return None
    held_out = [m for m in view.run.values if _HELD_OUT.fullmatch(m)]
    terms = _terms_of(view, metric)
    falls = [lost for m in (*held_out, *terms) if (lost := _lost_again(view, m)) is not None]
    if not falls:
        return None
    worst = max(falls, key=lambda lost: (lost.before - lost.after) / abs(lost.before))
    evidence = [
        Evidence(
            metric=metric, step=view.step_at(0), before=first, after=last, says=f"{num(first)} to {num(last)}"
        ),
        of_moved(worst, f"{num(worst.before)} at its best, {num(worst.after)} now"),
    ]
    length = "response_length/mean"
    short, long = view.level(length, 0, part), view.last(length, part)
    if long >= 1.3 * short:
        says = f"{num(short)} tokens at first, {num(long)} now: it may be length that is paid"
        evidence.append(Evidence(metric=length, step=worst.step, before=short, after=long, says=says))
    by_heart = "" if worst.metric in terms else ", or the data are known by heart"
    return State(
        name="overoptimised",
        title=f"the reward rises and what it stands for falls: the scorer is gamed{by_heart}",
        step=worst.step,
        evidence=tuple(evidence),
        advice=f"read the best paid answers of step {view.step_at(view.n - 1)} beside those of step {worst.step}; "
        "bound the term that rises or normalise it for length, add a KL term, and go back to the best held-out score",
    )


def _terms_of(view: View, metric: str) -> list[str]:
    """The terms that a reward is the sum of, where they are logged: several, of the same answers."""
    terms = view.family("reward/", "/mean")
    if len(terms) < 2:
        return []
    total, summed = view.values[metric], np.sum([view.values[m] for m in terms], axis=0)
    known = np.isfinite(total) & np.isfinite(summed)
    apart = np.abs(total - summed)[known]
    return terms if len(apart) >= 5 and np.median(apart) <= 0.01 * np.median(np.abs(total[known])) else []


def _lost_again(view: View, metric: str) -> Moved | None:
    """A score that fell from its best, beyond its noise and for good; where it left the best."""
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 5:
        return None
    smooth = running_median(values[known], 5 if len(known) >= 10 else 3)
    top = int(np.argmax(smooth))
    best, now = float(smooth[top]), float(np.median(values[known[-max(2, len(known) // 8) :]]))
    noise = max(noise_scale(values[known]), float(np.median(np.abs(values[known] - smooth))))
    if best <= 0 or best - now < max(LEAST_LOSS * best, 3.0 * noise):
        return None
    return Moved(metric, view.step_at(int(known[top])), best, now)
