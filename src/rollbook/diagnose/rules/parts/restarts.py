"""Where a run may have begun again (`discontinuity_after_resume`): what the log says, counters and schedules that go
back, a clock that stood still, and what cannot happen in training: several series that jump at one step to where the
run had been. Which of these it was, what jumped there tells."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.changes import noise_scale
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.rewards import lowest_reward, reward_of
from rollbook.diagnose.view import View, spread_around
from rollbook.diagnose.wording import num
from rollbook.observe.numbers import counted

SECOND_WARMUP = "falls at once and warms up again"


@dataclass(frozen=True, slots=True)
class Restart:
    """A step at which the run began again, and how that is known."""

    idx: int
    mark: str
    """Metric, or what else, that shows it."""
    says: str
    is_certain: bool = False


def restarts_of(view: View) -> list[Restart]:
    """Those that are certain, and those that are not; of several within two steps a certain one, else the first."""
    found = [*_told(view), *_epoch_goes_back(view), *_schedule_goes_back(view), *_counter_goes_back(view)]
    found += [*_shrinks_at_once(view), *_falls_with_the_entropy(view), *_jumps_together(view)]
    found += [*_without_moments(view), *_pauses(view)]
    unique: dict[int, Restart] = {}
    for restart in found:
        if 2 <= restart.idx <= view.n - 2:
            near = next((i for i in unique if abs(i - restart.idx) <= 2), restart.idx)
            if near not in unique or restart.is_certain > unique[near].is_certain:
                unique[near] = restart
    return list(unique.values())


def _told(view: View) -> Iterator[Restart]:
    """Steps that are logged twice, and lines that say that the run was resumed."""
    for seam in view.run.seams:
        says = f"the log takes up again at step {seam.step} ({counted(seam.num_replaced, 'step')} run twice)"
        yield Restart(view.idx_of(seam.step), "log", says, is_certain=True)
    for event in view.events("resumed", "run_resumed"):
        if event.step is not None and 0 < (idx := view.idx_of(event.step + 1)) < view.n - 2:
            yield Restart(idx, "log", event.text[:120] or f"resumed after step {event.step}", is_certain=True)


def _epoch_goes_back(view: View) -> Iterator[Restart]:
    metric = "training/epoch"
    for before, idx in _goes_back(view, metric, 0.5):
        says = f"goes back from {num(before)} to {num(view.values[metric][idx])}"
        yield Restart(idx, metric, says, is_certain=True)


def _counter_goes_back(view: View) -> Iterator[Restart]:
    for _, idx in _goes_back(view, "training/global_step", 0.0):
        yield Restart(idx, "training/global_step", "goes back", is_certain=True)


def _goes_back(view: View, metric: str, by_more_than: float) -> Iterator[tuple[float, int]]:
    """(value before, position) of each step at which a counter is lower than before."""
    counter = view.values.get(metric)
    if counter is not None:
        known = np.flatnonzero(np.isfinite(counter))
        for i in np.flatnonzero(np.diff(counter[known]) < -by_more_than):
            yield float(counter[known[i]]), int(known[i + 1])


def _schedule_goes_back(view: View) -> Iterator[Restart]:
    """A learning rate that falls at once and warms up again, or goes back up at once."""
    lr = view.values.get("actor/lr")
    if lr is None:
        return
    known = np.flatnonzero(np.isfinite(lr))
    rates = lr[known]
    for i in np.flatnonzero(rates[1:] < 0.6 * rates[:-1]):
        idx = int(known[i + 1])
        if 4 < idx < view.n - 4 and np.nanmax(lr[idx : idx + 40]) >= 1.3 * lr[idx]:
            yield Restart(idx, "actor/lr", SECOND_WARMUP)
    if (anew := _schedule_begins_anew(lr)) is not None:
        yield Restart(anew, "actor/lr", "rises at once to what it was earlier")


def _schedule_begins_anew(lr: Series) -> int | None:
    """Position of the one step at which a learning rate that no longer rose goes back up to what it was earlier. What
    does so twice is a schedule with cycles."""
    known = np.flatnonzero(np.isfinite(lr))
    steps = lr[known]
    if len(steps) < 16:
        return None
    anew = [
        int(known[i])
        for i in np.flatnonzero(steps[1:] >= 1.15 * steps[:-1]) + 1
        if i > 8 and np.all(np.diff(steps[i - 6 : i]) <= 0) and steps[i] <= 1.02 * steps[:i].max()
    ]
    return anew[0] if len(anew) == 1 else None


def _shrinks_at_once(view: View) -> Iterator[Restart]:
    """A distance to the reference that shrinks at one step."""
    fall = view.fall("actor/kl_loss")
    if fall is None or fall.drop < 0.4 or fall.score < 5 or fall.rise_steps > 2:
        return
    if not _shrinks_slowly(view, fall.idx):
        yield Restart(fall.idx, "actor/kl_loss", "the distance to the reference shrinks at once")


def _shrinks_slowly(view: View, idx: int) -> bool:
    """Whether a distance to the reference that is shorter after a position goes on falling as fast for many steps: a
    policy that comes back from a blow-up."""
    values = view.values["actor/kl_loss"]
    near = np.log(np.maximum(values[max(0, idx - 6) : idx + 7], 1e-12))
    near = finite(near)
    if len(near) < 10:
        return False
    steps = -np.diff(near)
    return float(np.max(steps)) < 0.4 * float(near[0] - near[-1]) and float((steps > 0).mean()) >= 0.7


def _falls_with_the_entropy(view: View) -> Iterator[Restart]:
    """A reward that falls, to one that the run had, at the very step at which the entropy jumps."""
    reward = reward_of(view)
    if reward.fall is None or reward.metric is None:
        return
    idx = reward.fall.idx
    entropy = view.contrast("actor/entropy", idx, width=8)
    if entropy is None or abs(entropy.score) < 6:
        return
    jumps = abs(entropy.jump) >= max(0.6 * abs(entropy.diff), 0.15 * abs(entropy.before))
    if jumps and _was_there_before(view, idx):
        yield Restart(idx, reward.metric, "falls at the step at which the entropy jumps")


LEAST_JUMP = 0.12
"""Share of its level that a series must jump by to speak for a restart that nothing else marks."""
AT_ONCE = 5.0
"""Noises that a series of the trainer must jump by, from one step to the next, to be looked at as a restart."""
_LED_BY = (
    # metric, which way, least movement (a logarithm), what is said of it
    (
        "actor/kl_loss",
        -1,
        0.5,
        "the distance to the reference shrinks at the step at which the entropy jumps",
    ),
    ("actor/grad_norm", 1, 0.6, "the gradients jump at the step at which the entropy does"),
    (
        "actor/entropy",
        1,
        LEAST_JUMP,
        "the entropy rises and the reward falls at one step, to what the run had before",
    ),
)


def _jumps_together(view: View) -> Iterator[Restart]:
    """The steps at which the distance to the reference shrinks most, or the gradients or the entropy rise most, if the
    entropy and others jump at that very step. A distance that grows again, gradients that calm down, or a policy that
    learns again what it had learned leave no lasting change."""
    for metric, way, least, says in _LED_BY:
        at = _steepest(view, metric, way, least)
        near = () if at is None else (at - 1, at, at + 1)
        idx = next((i for i in near if _entropy_jumps_too(view, metric, way, i)), None)
        if idx is not None:
            yield Restart(idx, metric, says)


def _entropy_jumps_too(view: View, led_by: str, way: int, idx: int) -> bool:
    """Whether the entropy jumps at a position, others with what rises, and the reward to one that the run had."""
    reward = reward_of(view).metric or ""
    others = ("actor/entropy", reward, "response_length/mean")
    jumps = {m: jump for m in others if (jump := jump_at(view, m, idx)) is not None}
    told = {m for m, jump in jumps.items() if jump.noises >= 4 and jump.is_of_its_level(LEAST_JUMP)}
    if "actor/entropy" not in told or not _is_one_step(view, "actor/entropy", idx):
        return False
    if (way > 0 and len(told) < 2) or not _reward_was_there(view, idx):
        return False
    if led_by != "actor/entropy":
        return True
    if reward not in told or jumps[reward].size >= 0:
        return False
    return _is_one_step(view, reward, idx) and _was_there_before(view, idx)


def _is_one_step(view: View, metric: str, idx: int) -> bool:
    """Whether most of what changes around a position is there two steps after it, and none of it two steps before: a
    policy that runs away takes ten."""
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    at = int(np.searchsorted(known, idx))
    near = values[known[max(0, at - 10) : at + 8]]
    if at < 10 or len(near) < 18:
        return False
    whole = float(np.median(near[12:18]) - np.median(near[:8]))
    local = float(np.median(near[10:12]) - np.median(near[8:10]))
    return abs(whole) > 0 and local / whole >= 0.6


def _steepest(view: View, metric: str, way: int, least: float) -> int | None:
    """Position of the largest movement one way, in multiples, between the values just before and just after."""
    known = np.flatnonzero(np.isfinite(view.values.get(metric, np.zeros(0))))
    if len(known) < 16:
        return None
    values = np.log(np.maximum(view.values[metric][known], 1e-12))
    before = np.median(np.lib.stride_tricks.sliding_window_view(values, 6), axis=1)
    after = np.median(np.lib.stride_tricks.sliding_window_view(values, 4), axis=1)
    jumps = way * (after[6:] - before[: len(after) - 6])  # of position i + 6
    at = int(np.argmax(jumps))
    return int(known[at + 6]) if jumps[at] >= max(least, AT_ONCE * noise_scale(values) / 2) else None


def _reward_was_there(view: View, idx: int) -> bool:
    """Whether the reward after a step is one that the run had before: what fell lower than ever is no older policy."""
    metric = reward_of(view).metric
    c = view.contrast(metric, idx, width=8)
    if c is None or metric is None:
        return True
    low, high = _range_before(view, metric, idx)
    reach = 0.25 * max(high - lowest_reward(view), 0.0)
    return low - reach <= c.after <= high + reach


def _was_there_before(view: View, idx: int) -> bool:
    """Whether reward, entropy and length after a step are ones the run had earlier: older weights, not a collapse."""
    for metric in (reward_of(view).metric, "actor/entropy", "response_length/mean"):
        c = view.contrast(metric, idx, width=8)
        if c is None or metric is None:
            continue
        low, high = _range_before(view, metric, idx)
        reach = 0.15 * (abs(low) + abs(high))
        if not low - reach <= c.after <= high + reach:
            return False
    away = view.contrast("actor/kl_loss", idx, width=8)
    return away is None or away.ratio <= 1.3


def _range_before(view: View, metric: str, idx: int) -> tuple[float, float]:
    """What a metric was up to a position, but for the farthest fiftieth on either side."""
    low, high = np.nanquantile(view.values[metric][:idx], (0.02, 0.98))
    return float(low), float(high)


def _without_moments(view: View) -> Iterator[Restart]:
    """Gradients and the step KL jump together and the reward falls to one it had before: an optimizer that begins
    without its moments, from older weights. A bad batch takes the reward only after its update, other data leave the
    step KL, and a learning rate that is too high raises it over many steps."""
    rise = view.rise("actor/grad_norm")
    metric = reward_of(view).metric
    if rise is None or metric is None or rise.rise_steps > 2 or rise.peak_ratio < 1.8 or rise.score < 6:
        return
    for idx in (rise.idx, rise.idx + 1):
        norm, kl, reward = (jump_at(view, m, idx) for m in ("actor/grad_norm", "actor/ppo_kl", metric))
        if not 4 < idx < view.n - 4 or norm is None or kl is None or reward is None:
            continue
        together = norm.size >= 0.8 * norm.before and kl.size >= kl.before
        together &= reward.size <= -0.1 * abs(reward.before)
        # A step KL is noisy by itself: that it doubles at this very step is what counts.
        surely = min(norm.noises, 2 * kl.noises, reward.noises) >= 4
        if together and surely and _was_there_before(view, idx):
            says = (
                "gradients and step KL rise and the reward falls at one step, while the engine still agrees"
            )
            yield Restart(idx, "actor/grad_norm", says)
            return


def _pauses(view: View) -> Iterator[Restart]:
    """Steps before which much more time passed than a step takes."""
    at_s = view.run.at_s
    if view.stride != 1 or np.isfinite(at_s).sum() < 10:
        return
    passed = np.diff(at_s)
    usual = np.nanmedian(passed)
    for i in np.flatnonzero(passed > max(8 * usual, 300.0)):
        yield Restart(int(i) + 1, "clock", f"{num(float(passed[i]))} s without a step")


@dataclass(frozen=True, slots=True)
class Jump:
    """What a series did from one step to the next, beyond its slope."""

    before: float
    after: float
    size: float
    noises: float
    """Size over what chance brings."""

    def is_of_its_level(self, least: float) -> bool:
        return abs(self.size) >= least * abs(self.before)


def jump_at(view: View, metric: str, idx: int) -> Jump | None:
    """The jump of a metric at a restart; the first values after count, and the noise of those before: what a restart
    shakes calms down again."""
    c = view.contrast(metric, idx, width=10)
    if c is None:
        return None
    first = view.level(metric, idx, idx + 3)
    if not np.isfinite(first):
        return None
    jump = first - c.before
    slope = c.diff - c.jump  # what both sides' slopes explain
    if slope * jump > 0:  # a slope the other way, by chance, would only add to it
        jump -= slope * 0.5
    # Ten values may lie close together by chance: those of forty before tell how far they usually scatter.
    at = np.flatnonzero(np.isfinite(view.values[metric][:idx]))[-10:]
    spread = spread_around(at.astype(np.float64), view.values[metric][at])
    noise = max(spread, view.noise_before(metric, idx))
    error = max(noise, 1e-12 + 1e-3 * abs(c.before)) * 1.25 * np.sqrt(1 / c.num_before + 1 / 3)
    return Jump(c.before, first, float(jump), float(abs(jump) / error))
