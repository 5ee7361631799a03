"""The four signals that tell the faults of the night apart: the proof that "the system is well"."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.finding import Signal
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.deaths import deaths_of
from rollbook.diagnose.signs.gap import GAP_METRICS, far_from_start, gap_of
from rollbook.diagnose.signs.lengths import length_growth
from rollbook.diagnose.signs.publications import publications_of
from rollbook.diagnose.signs.rewards import REWARD, of_all_answers, reward_decline, reward_of
from rollbook.diagnose.signs.seconds import excess_of, step_seconds
from rollbook.diagnose.signs.versions import versions_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num
from rollbook.observe.numbers import counted

Verdict = Literal["well", "moved", "not collected"]


def judge(view: View) -> tuple[Signal, ...]:
    """Reward by source · version per replica · gap · staleness, lengths and sync seconds."""
    return (_reward(view), _version(view), _gap(view), _staleness(view))


def _reward(view: View) -> Signal:
    name = "reward by source"
    metric = of_all_answers(view)
    sources = view.family("reward/", "/mean") or view.family("val-core/")
    if metric is None:
        return Signal(name=name, verdict="not collected", says=_too_few(view, REWARD, "reward"))
    first, last = view.level(metric, 0, max(3, view.n // 10)), view.last(metric)
    zero = [m for m in sources if _ended_at_zero(view, m)]
    fell = reward_of(view).fall
    which = (
        f"{counted(len(sources), 'source')} logged"
        if sources
        else "not logged by source: one at zero would not show"
    )
    says = f"mean {num(first)} at first, {num(last)} now; {which}"
    if fell is not None:
        return Signal(name=name, verdict="moved", says=f"{says}; fell at step {fell.step}")
    if (decline := reward_decline(view)) is not None:
        best = f"{num(decline.before)} at its best, step {decline.step}"
        return Signal(name=name, verdict="moved", says=f"{says}; {best}")
    if zero:
        return Signal(name=name, verdict="moved", says=f"{says}, at zero now: {', '.join(zero)}")
    if sources:
        often = any(view.last(m) == 0.0 for m in sources)
        says += ", zeros come as often as before" if often else ", none fell to zero"
    return Signal(name=name, verdict="well", says=says)


LUCK = 1e-3
"""Chance of a source's last zeros in a row, at its own earlier share of zeros, below which it is no bad luck."""


def _ended_at_zero(view: View, metric: str) -> bool:
    """Whether a source that had right answers has none any more, however early they ended."""
    values = view.values[metric]
    some = finite(values) != 0.0
    if not some.any():
        return False
    num_before = int(np.flatnonzero(some)[-1]) + 1
    share_zero = (1 + int((~some[:num_before]).sum())) / (2 + num_before)
    num_since = len(some) - num_before
    return num_since >= 3 and share_zero**num_since < LUCK


def _too_few(view: View, metrics: Sequence[str], what: str) -> str:
    """Why a signal cannot be judged: it is not there, or has fewer values than a level needs."""
    some = next((m for m in metrics if view.count(m)), None)
    return (
        f"no {what} in the log"
        if some is None
        else f"{some} has {counted(view.count(some), 'value')}: too few to judge"
    )


def _version(view: View) -> Signal:
    name = "weight version"
    versions, publications = versions_of(view), publications_of(view)
    replicas = view.family("replica/", "/weight_version")
    if not replicas and versions.newest is None and publications.seconds is None:
        return Signal(name=name, verdict="not collected", says="neither versions nor publications in the log")
    if versions.standing_replicas or versions.all_standing_since is not None:
        return Signal(name=name, verdict="moved", says="versions stand still")
    gap = gap_of(view)
    confirmed = gap is None or (gap.rise is not None and gap.rise.peak_ratio >= 1.25)
    if publications.absent_since is not None and confirmed:
        at = view.step_at(publications.absent_since)
        return Signal(name=name, verdict="moved", says=f"publications {publications.how} since step {at}")
    parts = []
    if replicas:
        gone = {death.replica for death in deaths_of(view) if death.back_step is None}
        alive = [metric for metric in replicas if metric.split("/")[1] not in gone]
        which = counted(len(alive), "replica") if not gone else f"{len(alive)} of {len(replicas)} replicas"
        parts.append(f"{which} advance" + "s" * (len(alive) == 1))
    if publications.seconds is not None:
        parts.append(f"a publication takes {num(view.level(publications.seconds))} s")
    return Signal(
        name=name, verdict="well", says=", ".join(parts) or "samples do not age by a version a step"
    )


def _gap(view: View) -> Signal:
    name = "gap of trainer and engine"
    gap = gap_of(view)
    if gap is None:
        says = _too_few(view, GAP_METRICS, "difference of engine and trainer logprobs")
        return Signal(name=name, verdict="not collected", says=says)
    metric = gap.metrics[0]
    level, last = view.level(metric, 0, max(3, view.n // 10)), view.last(metric)
    rises = (gap.rise, view.rise(metric))  # freed of the samples' age, and as logged
    moved = any(_is_more(rise, 1.6) for rise in rises) or far_from_start(view) > 0.0
    says = f"{metric} {num(level)} at first, {num(last)} now"
    if not moved and gap.num_bad > gap.num_fine:
        says += ": all along as far apart as engines in 8 bits are; of bfloat16 ones that is too far"
    return Signal(name=name, verdict="moved" if moved else "well", says=says)


def _is_more(rise: Break | None, ratio: float) -> bool:
    return rise is not None and rise.peak_ratio >= ratio and rise.score >= 6


def _slower(view: View, metric: str | None, stage: str, ratio: float) -> Break | None:
    """A stage that became slower and stays so, where the step feels it."""
    rise = view.rise(metric)
    if rise is None or rise.end_idx is not None or not _is_more(rise, ratio):
        return None
    lost = view.last(stage) * (1.0 - 1.0 / rise.peak_ratio)
    return rise if lost >= 0.05 * step_seconds(view, rise.idx) else None


def _staleness(view: View) -> Signal:
    name = "staleness, lengths, sync seconds"
    versions = versions_of(view)
    parts: list[str] = []
    verdict: Verdict = "not collected"
    for metric, word in (
        (versions.mean, "staleness"),
        (view.first("response_length/mean"), "length"),
        (view.first("timing_s/update_weights"), "sync s"),
    ):
        if metric is None:
            continue
        verdict = "well" if verdict == "not collected" else verdict
        parts.append(f"{word} {num(view.level(metric, 0, max(3, view.n // 10)))} → {num(view.last(metric))}")
    rise = versions.rise
    if (
        rise is not None
        and rise.late >= rise.before + 1
        and rise.peak_ratio >= 1.5
        and np.isfinite(rise.late)
    ):
        verdict = "moved"
    if length_growth(view) is not None:
        verdict = "moved"
    for metric, stage, least, says in (
        ("timing_s/update_weights", "update_weights", 2.0, "a publication takes {} times as long"),
        (excess_of(view), "gen", 1.5, "generation takes {} times what the lengths explain"),
    ):
        if (slower := _slower(view, metric, f"timing_s/{stage}", least)) is not None:
            verdict = "moved"
            parts.append(f"{says.format(num(slower.peak_ratio))}, since step {slower.step}")
    if versions.mean is None and parts:
        parts.append("staleness not logged")
    return Signal(name=name, verdict=verdict, says=", ".join(parts) or "nothing of it in the log")
