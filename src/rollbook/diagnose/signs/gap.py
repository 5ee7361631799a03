"""The gap: how far the trainer's logprobs and the engine's are apart, all metrics of it in one series."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.changes import noise_scale, running_median, spearman
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.versions import STALENESS
from rollbook.diagnose.view import View, once

GAP = "gap"
"""Derived: disagreement of trainer and engine, all its metrics in one, as a multiple of its own median."""

_GAP_METRICS: tuple[tuple[str, float, float], ...] = (
    # metric, power that makes it an amplitude (a KL grows with the square of a probability difference), and what
    # rounding in float32 alone makes of it: below that no change means anything
    ("training/logprob_gap/mean", 1.0, 1e-5),
    ("training/logprob_gap_all/mean", 1.0, 1e-5),
    ("training/rollout_probs_diff_mean", 1.0, 1e-5),
    ("rollout_corr/k3_kl", 0.5, 1e-7),
    ("rollout_corr/kl", 0.5, 1e-7),
    ("rollout_corr/log_ppl_diff", 0.5, 1e-7),
    ("training/rollout_actor_probs_pearson_corr", 0.5, 1e-7),
)

GAP_METRICS = tuple(metric for metric, _, _ in _GAP_METRICS)


@dataclass(frozen=True, slots=True)
class Gap:
    """What the disagreement of trainer and engine did."""

    metrics: tuple[str, ...]
    rise: Break | None
    """Of the derived amplitude; its levels are multiples of the run's median."""
    overall_ratio: float
    """Amplitude of the last fifth over that of the first steps."""
    steadiness: float
    """Rank correlation of amplitude and step: near 1 when it only ever grows."""
    num_bad: int
    """Metrics whose level would be wrong for any healthy pair of engines, in the first tenth of the run."""
    num_fine: int
    """Metrics whose level is that of a healthy pair, in the first tenth."""
    num_bad_late: int
    num_fine_late: int


_LEVELS: dict[str, tuple[float, float]] = {
    # metric -> (usual for bfloat16 engines, too much for any). Published verl runs: dense bf16 probability
    # difference 0.003-0.016 and KL 0.0005-0.009; fp8 that later diverged began at KL 0.010 and r 0.986; an engine
    # with wrong expert weights stood at KL 0.047. slime reports 0.010-0.017 nats for healthy pairs.
    "training/rollout_probs_diff_mean": (0.016, 0.026),
    "training/logprob_gap/mean": (0.030, 0.080),
    "rollout_corr/kl": (0.010, 0.025),
    "rollout_corr/k3_kl": (0.010, 0.025),
    "rollout_corr/log_ppl_diff": (0.010, 0.025),
    "training/rollout_actor_probs_pearson_corr": (0.985, 0.975),
    "rollout_corr/rollout_is_eff_sample_size": (0.90, 0.60),
}


FAR_OFF = 2.5
"""Times the level that is too much from which on a metric counts twice."""


def usual_level(metric: str) -> float:
    """What a gap metric reads for a healthy pair of engines."""
    return _LEVELS.get(metric, (float("nan"), 0.0))[0]


@once("gap")
def gap_of(view: View) -> Gap | None:
    """The disagreement of trainer and engine, None when nothing of it was logged."""
    parts: list[Series] = []
    used: list[str] = []
    stands: list[bool] = []
    for metric, power, rounding in _freed_of_age(view):
        values = view.values.get(metric)
        if values is None:
            continue
        amplitude = 1.0 - values if "pearson" in metric else np.abs(values)
        known = np.isfinite(amplitude)
        if known.sum() < 5:
            continue
        resolution = view.resolution(metric)
        floor = max(resolution, rounding)
        at_floor = float((amplitude[known] <= floor * (1 + 1e-9)).mean()) >= 0.5
        amplitude = np.maximum(amplitude, floor)
        typical = float(np.median(amplitude[known]))
        away = amplitude - typical  # a unit of the last decimal that was printed is no movement
        amplitude = typical + np.sign(away) * np.maximum(np.abs(away) - 1.2 * resolution, 0.0)
        if typical <= 0.0:
            typical = float(amplitude[known].mean())
        if typical <= 0.0:
            continue
        scaled = np.full(view.n, np.nan)
        scaled[known] = power * np.log(np.maximum(amplitude[known] / typical, 1e-3))
        parts.append(scaled)
        used.append(metric)
        stands.append(at_floor)
    if not parts:
        return None
    most = max(int(np.isfinite(p).sum()) for p in parts)
    by_age = used[0].startswith("training/logprob_gap_by_staleness/")
    keep = [i for i, p in enumerate(parts) if by_age or np.isfinite(p).sum() >= 0.8 * most]
    if not by_age:
        keep = _telling(parts, keep, stands)
    stack = np.stack([parts[i] for i in keep])
    some = np.isfinite(stack).any(axis=0)
    amplitude = np.full(view.n, np.nan)
    amplitude[some] = np.exp(np.nanmedian(stack[:, some], axis=0))
    view.derive(GAP, amplitude, of=tuple(used[i] for i in keep))
    head, tail = max(3, view.n // 20), max(3, view.n // 5)
    first, last = view.level(GAP, 0, head), view.level(GAP, view.n - tail)
    tenth = max(5, view.n // 10)
    bad, fine = _judge_levels(view, 0, tenth)
    bad_late, fine_late = _judge_levels(view, view.n - tail, view.n)
    return Gap(
        metrics=tuple(used[i] for i in keep),
        rise=view.rise(GAP),
        overall_ratio=last / first if first > 0 else 1.0,
        steadiness=_steadiness(amplitude),
        num_bad=bad,
        num_fine=fine,
        num_bad_late=bad_late,
        num_fine_late=fine_late,
    )


def metrics_of_gap(view: View) -> tuple[str, ...]:
    """The metrics of the gap that are listened to; none where nothing of it was logged."""
    gap = gap_of(view)
    return gap.metrics if gap is not None else ()


PARTED = 1.6
"""The gap of the end over that at first from which on engine and trainer have parted."""


def has_parted(view: View) -> bool:
    """Whether engine and trainer are further apart in the end: then the policy, or the engine, changed as well."""
    gap = gap_of(view)
    return gap is not None and gap.overall_ratio >= PARTED


def parts_at(view: View, idx: int) -> bool:
    """Whether the gap doubles at a position."""
    return gap_of(view) is not None and view.moved(GAP, idx, 1, factor=2.0)


def _telling(parts: list[Series], among: list[int], stands: list[bool]) -> list[int]:
    """Which amplitudes to listen to: not those whose own noise is several times that of the quietest (a correlation
    near 1, a divergence near nothing), nor those that mostly stand where rounding holds them, if there are others."""
    noises = []
    for i in among:
        known = parts[i][np.isfinite(parts[i])]
        noisiest = max(noise_scale(third) for third in np.array_split(known, 3))
        noises.append(np.inf if stands[i] else max(noisiest, LEAST_GAP_NOISE))
    least = min(noises)
    return [i for i, noise in zip(among, noises) if noise <= 3 * least]


LEAST_GAP_NOISE = 0.03
"""Noise of an amplitude, as a share of it, below which no metric is better than another."""


def _freed_of_age(view: View) -> tuple[tuple[str, float, float], ...]:
    """The gap metrics to look at. Stale samples hold the policy's own movement as well, which may hide what the engine
    does: where they are trained, the gap on fresh samples alone tells, else the gaps of each age by themselves."""
    own = "training/logprob_gap/mean"
    if view.level(f"{STALENESS}/mean") >= 0.5:
        if view.count(own) >= max(8, view.n // 2):
            return ((own, 1.0, 1e-5),)
        ages = [m for m in view.family("training/logprob_gap_by_staleness/", "/mean") if view.count(m) >= 8]
        if any(view.count(m) >= view.n // 2 for m in ages):
            return tuple((m, 1.0, 1e-5) for m in ages)
    return tuple(m for m in _GAP_METRICS if "gap_all" not in m[0] or view.count(own) < view.n // 2)


LEAST_STEPS = 8
"""Steps below which a level is not judged: a first update at a large learning rate moves more than any numerics."""


def far_from_start(view: View) -> float:
    """How surely engine and trainer are too far apart for any healthy pair from the first step on, 0 where they are
    not: two metrics must say so, and no more that they are near, or the only one there is."""
    gap = gap_of(view)
    if gap is None or view.n < LEAST_STEPS or _own_gap_is_fine(view):
        return 0.0
    if gap.num_bad >= 2 and gap.num_bad >= gap.num_fine:
        return 0.6 if gap.num_bad == gap.num_fine else 0.85 if gap.num_bad >= 3 else 0.75
    is_the_only_one = gap.num_bad == 1 and gap.num_fine == 0 and len(gap.metrics) == 1
    return 0.65 if is_the_only_one and not _is_lived_with(view, gap) else 0.0


FLAT = 1.25
"""Times by which a gap that stands wanders, at the most."""
LEARNS = 0.75
"""Rank correlation of reward and step from which on a run learns."""


def _is_lived_with(view: View, gap: Gap) -> bool:
    """Whether a gap that is not far beyond what is too much stands where it was from the first step on, and the run
    learns all along: so does one whose engine computes in eight bits by intention."""
    reward = view.first("critic/score/mean", "critic/rewards/mean")
    stands = 1 / FLAT <= gap.overall_ratio <= FLAT and gap.rise is None
    return stands and reward is not None and view.trend(reward)[1] >= LEARNS


def _own_gap_is_fine(view: View) -> bool:
    """Whether the gap on tokens of the trainer's own version is that of a healthy pair: rollbook logs it apart from
    what staleness adds, so that it alone decides."""
    metric = "training/logprob_gap/mean"
    if view.run.format not in ("rollbook", "prometheus") or not view.has(metric):
        return False
    return view.level(metric) <= _LEVELS[metric][0] and view.last(metric) <= _LEVELS[metric][0]


def _judge_levels(view: View, start: int, end: int) -> tuple[int, int]:
    """How many gap metrics are too large for any healthy pair of engines, and how many are usual."""
    behind = view.level(f"{STALENESS}/mean", start, end)
    freshest = _freshest(view, start, end)
    if freshest is not None:  # some steps trained on fresh samples: they tell what age has no part in
        behind = 0.0
    slack = 1.0 + 0.25 * behind if np.isfinite(behind) else 1.0
    bad = fine = 0
    for metric, (usual, too_much) in _LEVELS.items():
        level = view.level(metric, start, end) if freshest is None else _level_at(view, metric, freshest)
        if not np.isfinite(level):
            continue
        if usual > too_much:  # correlations: 1 is perfect
            level, usual, too_much = 1 - level, 1 - usual, 1 - too_much
        allowed = (
            slack if metric in ("training/rollout_probs_diff_mean", "training/logprob_gap/mean") else slack**2
        )
        bad += abs(level) >= too_much * allowed
        bad += abs(level) >= FAR_OFF * too_much * allowed  # no correlation makes up for that
        fine += abs(level) <= usual * allowed
    return bad, fine


def begins_fine(view: View) -> bool:
    """Whether the gap of the first three steps is that of a healthy pair: what is never published grows from there,
    and may be far off before the first tenth of the run is over."""
    known = np.flatnonzero(np.isfinite(view.values[GAP]))[:3]
    bad, fine = _judge_levels(view, 0, int(known[-1]) + 1) if len(known) == 3 else (0, 0)
    return fine > 0 and bad == 0


FASTER = 1.65
"""Growth over the last third of a ramp, over that of its first third, from which on it feeds on itself: engines that
keep their weights part by the policy's steps, which add up to a straight line at the most (1.3 in published shapes)."""
LEAST_RAMP = 12
"""Values that such a ramp must have."""


def accelerates(view: View, rise: Break) -> bool:
    """Whether a gap grows ever faster, at a learning rate that does not rise meanwhile."""
    known = np.flatnonzero(np.isfinite(view.values[GAP][: rise.end_idx]))
    ramp = view.values[GAP][known[known >= rise.idx]]
    if len(ramp) < LEAST_RAMP:
        return False
    third = len(ramp) // 3
    before = view.level(GAP, max(0, rise.idx - 20), rise.idx)
    one, two = (float(np.median(ramp[at - 2 : at + 3])) for at in (third, 2 * third))
    last = float(np.median(ramp[-4:]))
    rates = view.level("actor/lr", rise.idx - 3, rise.idx + 3), view.last("actor/lr", third)
    is_warming = rates[1] > 1.3 * rates[0]
    return not is_warming and last >= 2.0 * before and last - two >= FASTER * max(one - before, 0.0)


LEVEL = 1.08
"""Distance from before in the last quarter of a ramp over that in the third one, below which it has levelled off: it is
1.4 for one that grows with the steps, 1.2 for one that grows with their root."""
LEAST_RISE = 0.3
"""Share of what it was that a gap must have risen by."""


def levels_off(view: View, rise: Break) -> bool:
    """Whether a gap that grew stays where it came to, at a learning rate that does not fall meanwhile: what was never
    published goes ever further away, what is a few versions old does not."""
    if rise.end_idx is not None:
        return False
    known = np.flatnonzero(np.isfinite(view.values[GAP]))
    ramp = view.values[GAP][known[known >= rise.idx]]
    quarter = len(ramp) // 4
    if quarter < LEAST_RAMP // 4:
        return False
    before = view.level(GAP, max(0, rise.idx - 40), rise.idx)
    third, last = float(np.median(ramp[-2 * quarter : -quarter])), float(np.median(ramp[-quarter:]))
    falls = view.last("actor/lr", quarter) < 0.7 * view.level("actor/lr", rise.idx - 3, rise.idx + 3)
    return third >= (1.0 + LEAST_RISE) * before and last - before <= LEVEL * (third - before) and not falls


LED_STEPS = 4
LED_RATIO = 2.5
"""Steps before the policy's own movement, and growth by then, from which on the gap came first."""


def gap_led(view: View, blow_up_idx: int) -> bool:
    """Whether the gap had grown well before a position, by so much that nothing that began there explains it."""
    found = gap_of(view)
    rise = found.rise if found is not None else None
    if rise is None or rise.score < 6 or rise.idx + LED_STEPS > blow_up_idx:
        return False
    return view.level(GAP, blow_up_idx - 3, blow_up_idx) >= LED_RATIO * view.level(
        GAP, max(0, rise.idx - 20), rise.idx
    )


def _freshest(view: View, start: int, end: int) -> NDArray[np.intp] | None:
    """Positions whose samples are nearly fresh, where others are not; None when all are alike."""
    staleness = view.values.get(f"{STALENESS}/mean")
    if staleness is None:
        return None
    piece = np.nan_to_num(staleness[start:end], nan=np.inf)
    fresh = np.flatnonzero(piece <= 0.3) + start
    typical = view.level(f"{STALENESS}/mean")
    return fresh if len(fresh) and typical >= 0.8 else None


def _level_at(view: View, metric: str, at: NDArray[np.intp]) -> float:
    values = view.values.get(metric)
    if values is None or not np.isfinite(values[at]).any():
        return np.nan
    return float(np.nanmedian(values[at]))


def _steadiness(values: Series) -> float:
    known = finite(values)
    smooth = running_median(known, 7)
    return spearman(smooth, np.arange(len(smooth), dtype=np.float64))
