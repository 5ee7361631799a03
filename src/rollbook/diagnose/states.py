"""States of the algorithm or the data that limit a run while the system is well. They are advice, never alarms."""

from __future__ import annotations

import re

import numpy as np

from rollbook.diagnose import exploding_ratios
from rollbook.diagnose.changes import noise_scale, running_median
from rollbook.diagnose.finding import Evidence, State
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.gap import gap_led, gap_of
from rollbook.diagnose.signs.lengths import length_growth
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import REWARD, Moved, reward_decline, reward_of
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, of_break

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


def judge(view: View) -> list[State]:
    """The states that hold, the gravest first."""
    found = [
        state
        for state in (
            _learning_rate_too_high(view),
            exploding_ratios.judge(view),
            _lengths_explode(view),
            _entropy_collapse(view),
            _cut_off(view),
            _no_signal(view),
            _data_exhausted(view),
            _overoptimised(view),
            _reward_saturates(view),
        )
        if state is not None
    ]
    for one, leaves_out in (("reward_saturates", "entropy_collapse"), ("data_exhausted", "overoptimised")):
        if one in {
            state.name for state in found
        }:  # a solved task is answered alike; old data are known by heart
            found = [state for state in found if state.name != leaves_out]
    if not found and (falls := _reward_falls(view)) is not None:
        found.append(falls)
    if not found and (flat := _plateau(view)) is not None:
        found.append(flat)
    return found


def _learning_rate_too_high(view: View) -> State | None:
    policy = policy_of(view)
    if policy.blow_up_idx is None:
        return None
    gap = gap_of(view)
    rise = gap.rise if gap is not None else None
    if rise is not None and rise.peak_ratio >= 1.6 and rise.score >= 6:
        leads = rise.idx <= policy.blow_up_idx + max(3, view.n // 40)
        if leads and policy.update_ratio < 0.8 * rise.peak_ratio:
            return None  # the engine went its own way first, and further
        if gap_led(view, policy.blow_up_idx):
            return None  # it was far off before the policy moved at all
    moved = {b.metric for b in policy.blow_up}
    reward = view.fall(reward_of(view).metric)
    fell = (
        reward is not None
        and reward.drop >= 0.2
        and reward.score >= 4
        and reward.idx >= policy.blow_up_idx - 3
    )
    if len(moved) < 3 and not fell and policy.nan_step is None:
        return None
    evidence = [of_break(b) for b in policy.blow_up]
    if reward is not None and fell:
        evidence.append(of_break(reward))
    lr = view.last("actor/lr")
    return State(
        name="learning_rate_too_high",
        title="the policy moves too fast: learning rate too high, or the trust region too wide",
        step=view.step_at(policy.blow_up_idx),
        evidence=tuple(evidence),
        advice=f"go back before step {view.step_at(policy.blow_up_idx)} and lower the learning rate (now "
        f"{num(lr)}) by 3 to "
        "10 times, or tighten the clip and the gradient norm",
    )


def answers_grow(view: View, step: int) -> bool:
    """Whether answers became longer since a step, as far as is logged."""
    idx, length = view.idx_of(step), view.first("response_length/mean")
    if length is None:
        return True
    before = view.level(length, max(0, idx - 40), idx)
    late = np.nanmax([view.level(length, idx, (idx + view.n) // 2), view.level(length, (idx + view.n) // 2)])
    return not late < LONGER * before


def _lengths_explode(view: View) -> State | None:
    grown = length_growth(view)
    if grown is None:
        return None
    evidence = [_of(grown)]
    tenth = max(3, view.n // 10)
    clip = "response_length/clip_ratio"
    if view.count(clip) >= 3:
        first, last = view.level(clip, 0, tenth), view.level(clip, view.n - tenth)
        says = f"{num(first)} of the answers cut off at first, {num(last)} now"
        evidence.append(Evidence(metric=clip, step=grown.step, before=first, after=last, says=says))
    falls = reward_decline(view)
    if falls is not None:
        evidence.append(_of(falls))
    lost = ", and the reward falls" if falls is not None else ""
    return State(
        name="lengths_explode",
        title=f"the answers grow until they are cut off{lost}",
        step=grown.step,
        evidence=tuple(evidence),
        advice=f"read long answers of step {view.step_at(view.n - 1)} first: if they repeat themselves, go back before "
        f"step {grown.step}; penalise overlong answers, leave cut-off ones out of the loss, and average the loss "
        "over tokens instead of sequences; if they reason, raise the limit",
    )


def _reward_falls(view: View) -> State | None:
    falls = reward_decline(view)
    if falls is None:
        return None
    return State(
        name="reward_falls",
        title=f"the reward falls, from {num(falls.before)} to {num(falls.after)}",
        step=falls.step,
        evidence=(_of(falls),),
        advice=f"go back before step {falls.step}; lower the learning rate or add a KL term, and compare answers of "
        "then and now: has the mix of prompts become harder, or has the policy unlearned?",
    )


def _of(moved: Moved) -> Evidence:
    says = f"{num(moved.before)} until step {moved.step}, {num(moved.after)} now"
    return Evidence(metric=moved.metric, step=moved.step, before=moved.before, after=moved.after, says=says)


CUT_OFF = 0.5
"""Share of the answers that end at the limit from which on most of what is scored is unfinished."""


def _cut_off(view: View) -> State | None:
    """Most answers are cut off at the limit, and were from early on: growing ones are another state."""
    clip = "response_length/clip_ratio"
    if view.count(clip) < 5:
        return None
    third = max(2, view.n // 3)
    early, late = view.level(clip, 0, third), view.level(clip, view.n - third)
    if not min(early, late) >= CUT_OFF:
        return None
    limit = view.last("response_length/max")
    of = f" of {num(limit)} tokens" if np.isfinite(limit) else ""
    says = f"{num(early)} of the answers at first, {num(late)} now"
    return State(
        name="answers_cut_off",
        title=f"most answers are cut off at the limit{of}",
        step=view.step_at(0),
        evidence=(Evidence(metric=clip, step=view.step_at(0), before=early, after=late, says=says),),
        advice="raise the limit, or train shorter answers first: what is cut off is scored unfinished; leave it out "
        "of the loss; if no answer ever ends, look whether the template has its end-of-sequence token",
    )


NO_SIGNAL = 0.4
"""Share of the steps without a gradient from which on the job hardly trains."""
NOTHING = 1e-3
"""Gradient over its median where there is one, below which a step taught nothing."""


def _no_signal(view: View) -> State | None:
    """Many steps teach nothing: all answers of each of their groups were scored alike, so that no advantage is left."""
    metric, few = "actor/grad_norm", "batch/effective_frac"
    if (told := _told_without_signal(view, few)) is not None:
        return told
    if view.count(metric) < 10:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    some = values[known][values[known] > 0]
    alike = view.level(few)
    if not len(some) and not alike <= 1 - 2 * NO_SIGNAL:
        return None  # a gradient of nothing at different rewards is no matter of the prompts (`no_update`)
    usual = float(np.median(some[some >= 0.1 * np.max(some)])) if len(some) else 0.0
    empty = values[known] <= max(NOTHING * usual, 0.0)
    part = float(empty.mean())
    if part < NO_SIGNAL and not (alike <= 1 - 2 * NO_SIGNAL and part >= 0.1):
        return None
    step = view.step_at(int(known[empty][0])) if empty.any() else view.step_at(0)
    evidence = [Evidence(metric=metric, step=step, after=part, says=f"nothing in {num(part)} of the steps")]
    if np.isfinite(alike):
        says = f"{num(alike)} of the groups have two different rewards"
        evidence.append(Evidence(metric=few, step=step, after=alike, says=says))
    return _without_signal(step, tuple(evidence))


def _without_signal(step: int, evidence: tuple[Evidence, ...]) -> State:
    return State(
        name="no_signal",
        title="many steps teach nothing: the answers of a group are all scored alike",
        step=step,
        evidence=evidence,
        advice="more prompts a step and more answers a prompt, prompts of middling difficulty, a reward that tells "
        "more than right or wrong; drop flat groups and sample others in their place",
    )


def _told_without_signal(view: View, metric: str) -> State | None:
    """Steps in which not one group has two different rewards; a KL term may have a gradient all the same."""
    values = view.values.get(metric)
    if values is None or view.count(metric) < 10:
        return None
    known = np.isfinite(values)
    flat = known & (values <= 1e-9)
    part = float(flat.sum() / known.sum())
    if part < NO_SIGNAL:
        return None
    step = view.step_at(int(np.flatnonzero(flat)[0]))
    says = f"in {num(part)} of the steps no group has two different rewards"
    return _without_signal(step, (Evidence(metric=metric, step=step, after=part, says=says),))


def _entropy_collapse(view: View) -> State | None:
    if not view.has("actor/entropy") or view.count("actor/entropy") < 12:
        return None
    first, last = view.level("actor/entropy", 0, max(3, view.n // 20)), view.last("actor/entropy")
    if not (first > 0 and last <= 0.12 * first and last < 0.08):
        return None
    values = view.values["actor/entropy"]
    at = int(np.flatnonzero(np.nan_to_num(values, nan=np.inf) <= 0.25 * first)[0])
    says = f"{num(first)} at first, {num(last)} nats now"
    return State(
        name="entropy_collapse",
        title="the entropy has collapsed: answers hardly differ any more",
        step=view.step_at(at),
        evidence=(
            Evidence(metric="actor/entropy", step=view.step_at(at), before=first, after=last, says=says),
        ),
        advice="raise the upper clip (clip-higher), add a KL or entropy term, or go back and lower the learning rate",
    )


def _data_exhausted(view: View) -> State | None:
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


_HELD_OUT = re.compile(r"val-core/.+|val/.+/(?:exact_match|reward)")
LEAST_GAIN = 0.1
"""Rise of the reward in training over the range it has, from which on something was learned."""
LEAST_LOSS = 0.05
"""Fall of what it stands for, over the best it was, beyond a held-out score that wavers."""


def _overoptimised(view: View) -> State | None:
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
        Evidence(
            metric=worst.metric,
            step=worst.step,
            before=worst.before,
            after=worst.after,
            says=f"{num(worst.before)} at its best, {num(worst.after)} now",
        ),
    ]
    length = "response_length/mean"
    short, long = view.level(length, 0, part), view.last(length, part)
    if long >= 1.3 * short:
        says = f"{num(short)} tokens at first, {num(long)} now: it may be length that is paid"
        evidence.append(Evidence(metric=length, step=worst.step, before=short, after=long, says=says))
    why = (
        "the scorer is gamed"
        if worst.metric in terms
        else "the scorer is gamed, or the data are known by heart"
    )
    title = f"the reward rises and what it stands for falls: {why}"
    return State(
        name="overoptimised",
        title=title,
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


def _parts_from(view: View, train: str, held_out: str) -> bool:
    """Whether the reward in training rose from the third quarter to the fourth, and the held-out score did not."""
    width = max(3, view.n // 4)
    start, end = view.n - 2 * width, view.n - width
    gained = [view.level(m, end) - view.level(m, start, end) for m in (train, held_out)]
    least = max(0.01, 3 * view.noise_before(train, view.n) / np.sqrt(width))
    return gained[0] > least and gained[1] <= 0.25 * gained[0]


def _is_a_function(view: View, metric: str) -> bool:
    """Whether what the catalogue has for the reward of a source is that of a reward function in the log, as TRL calls
    it: a part of the reward, whose format may long be right while the answers are not."""
    return view.run.in_log.get(metric, metric).removeprefix("train/").startswith("rewards/")


def _reward_saturates(view: View) -> State | None:
    metric = view.first(*REWARD)
    if metric is None or view.n < 12:
        return None
    top = _best_of(view, metric.replace("/mean", "/max"))
    sources = view.family("reward/", "/mean")
    if len(sources) == 1 and not _is_a_function(view, sources[0]):
        metric = sources[0]  # of all that was generated: groups that were all right are not trained
    last = view.last(metric, max(5, view.n // 10))
    if not np.isfinite(top):
        top = _best_of(view, "critic/rewards/max")  # of a score it lacks the KL term, and may lie below it
        top = top if top >= last else np.nan
    if not np.isfinite(top) and float(np.nanmax(view.values[metric])) > 1.02:
        return None  # a sum of parts: nobody knows its top
    top = top if np.isfinite(top) and top > 0 else 1.0
    if last < 0.9 * top:
        return None
    at = int(np.flatnonzero(np.nan_to_num(view.values[metric], nan=-np.inf) >= 0.9 * top)[0])
    return State(
        name="reward_saturates",
        title="the reward is near its top: little is left to learn from these prompts",
        step=view.step_at(at),
        evidence=(
            Evidence(
                metric=metric, step=view.step_at(at), after=last, says=f"{num(last)} of at most {num(top)}"
            ),
        ),
        advice="take harder prompts, or stop",
    )


def _best_of(view: View, metric: str) -> float:
    """The most that an answer ever got: a step without a right one has a lower best."""
    return float(np.nanmax(view.values[metric])) if view.count(metric) else np.nan


def _plateau(view: View) -> State | None:
    metric = view.first(*REWARD)
    if metric is None or view.n < 40:
        return None
    half = view.n // 2
    early, late = view.level(metric, half, half + view.n // 8), view.last(metric, view.n // 8)
    c = view.contrast(metric, half, width=view.n // 4)
    if c is None or abs(late - early) > max(0.02 * max(abs(early), 0.1), 0.7 * c.noise):
        return None
    says = f"{num(early)} half-way, {num(late)} now"
    return State(
        name="plateau",
        title="the reward stands still",
        step=view.step_at(half),
        evidence=(Evidence(metric=metric, step=view.step_at(half), before=early, after=late, says=says),),
        advice="a question of data and algorithm: difficulty of the prompts, group size, learning rate, exploration",
    )
