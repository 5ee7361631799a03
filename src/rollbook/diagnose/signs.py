"""Signs that several rules need: the gap, staleness, publications, the policy's own movement, rewards, environments,
waiting. Each is worked out once a run. A sign states what a group of metrics did; it never names a fault."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from rollbook.diagnose.changes import noise_scale, running_median
from rollbook.diagnose.series import Series
from rollbook.diagnose.spells import Spells, follow
from rollbook.diagnose.view import BASELINE, Break, View

T = TypeVar("T")

REWARD = ("critic/score/mean", "critic/rewards/mean")
STALENESS = "training/off_policy/trajectory_staleness"
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


def once(name: str) -> Callable[[Callable[[View], T]], Callable[[View], T]]:
    """Remember a sign in the view under `name`."""

    def wrap(work_out: Callable[[View], T]) -> Callable[[View], T]:
        def sign(view: View) -> T:
            if name not in view.signs:
                view.signs[name] = work_out(view)
            return cast(T, view.signs[name])

        sign.__doc__ = work_out.__doc__
        return sign

    return wrap


# ---- the gap between trainer and engine ------------------------------------------------------------------------


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
    "training/rollout_actor_probs_pearson_corr": (0.985, 0.965),
    "rollout_corr/rollout_is_eff_sample_size": (0.90, 0.60),
}


def usual_level(metric: str) -> float:
    """What a gap metric reads for a healthy pair of engines."""
    return _LEVELS.get(metric, (float("nan"), 0.0))[0]


@once("gap")
def gap(view: View) -> Gap | None:
    """The disagreement of trainer and engine, None when nothing of it was logged."""
    parts: list[Series] = []
    used: list[str] = []
    for metric, power, rounding in _freed_of_age(view):
        values = view.values.get(metric)
        if values is None:
            continue
        amplitude = 1.0 - values if "pearson" in metric else np.abs(values)
        known = np.isfinite(amplitude)
        if known.sum() < 5:
            continue
        resolution = view.resolution(metric)
        amplitude = np.maximum(amplitude, max(4.0 * resolution, rounding))
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
    if not parts:
        return None
    most = max(int(np.isfinite(p).sum()) for p in parts)
    by_age = used[0].startswith("training/logprob_gap_by_staleness/")
    keep = [i for i, p in enumerate(parts) if by_age or np.isfinite(p).sum() >= 0.8 * most]
    if not by_age:
        keep = _telling(parts, keep)
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


def _telling(parts: list[Series], among: list[int]) -> list[int]:
    """Which amplitudes to listen to: not those whose own noise is several times that of the quietest (a correlation
    near 1, a divergence near nothing), nor those that mostly stand where rounding holds them, if there are others."""
    noises = []
    for i in among:
        known = parts[i][np.isfinite(parts[i])]
        stands = float((known <= known.min() + 1e-9).mean()) >= 0.5
        noisiest = max(noise_scale(third) for third in np.array_split(known, 3))
        noises.append(np.inf if stands else max(noisiest, LEAST_GAP_NOISE))
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


def own_gap_is_fine(view: View) -> bool:
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
        fine += abs(level) <= usual * allowed
    return bad, fine


def begins_fine(view: View) -> bool:
    """Whether the gap of the first three steps is that of a healthy pair: what is never published grows from there,
    and may be far off before the first tenth of the run is over."""
    known = np.flatnonzero(np.isfinite(view.values[GAP]))[:3]
    bad, fine = _judge_levels(view, 0, int(known[-1]) + 1) if len(known) == 3 else (0, 0)
    return fine > 0 and bad == 0


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
    from rollbook.diagnose.view import spearman

    known = values[np.isfinite(values)]
    smooth = running_median(known, 7)
    return spearman(smooth, np.arange(len(smooth), dtype=np.float64))


# ---- versions and staleness ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Versions:
    """What the labels of weight versions say."""

    mean: str | None
    oldest: str | None
    newest: str | None
    """Metrics of staleness: mean, largest, smallest."""
    rise: Break | None
    """Of the mean staleness."""
    oldest_rise: Break | None
    all_standing_since: int | None
    """Position from which every sample grows older by about a version a step."""
    some_standing_since: int | None
    """The same for the oldest samples only."""
    standing_replicas: tuple[str, ...]
    """Replicas that keep their version while the trainer's goes on."""
    standing_since: int | None


@once("versions")
def versions(view: View) -> Versions:
    mean = view.first(f"{STALENESS}/mean", f"{STALENESS}_worst/mean")
    once_full = _once_full(view, mean)
    oldest = view.first(f"{STALENESS}_worst/max", f"{STALENESS}/max")
    newest = view.first(f"{STALENESS}/min", f"{STALENESS}_worst/min")
    replicas, since = _standing_replicas(view)
    rise = view.rise(once_full, log=False)
    return Versions(
        mean=mean,
        oldest=oldest,
        newest=newest,
        rise=None if rise is None else replace(rise, metric=mean or ""),
        oldest_rise=view.rise(oldest, log=False),
        all_standing_since=unit_ramp(view, newest or mean),
        some_standing_since=unit_ramp(view, f"{STALENESS}/max" if view.has(f"{STALENESS}/max") else oldest),
        standing_replicas=replicas,
        standing_since=since,
    )


def _once_full(view: View, mean: str | None) -> str | None:
    """Name of the mean staleness once the pipeline is full: from step 0 it grows by one a step up to its bound."""
    if mean is None:
        return None
    values = view.values[mean].copy()
    known = np.flatnonzero(np.isfinite(values))
    end = 0
    while end + 1 < len(known) and values[known[end + 1]] >= values[known[end]] + 0.3:
        end += 1
    if end and values[known[0]] <= 1.0:
        values[: known[end]] = np.nan
    return view.derive(f"{mean} once full", values)


@dataclass(frozen=True, slots=True)
class Death:
    """A replica whose process or engine was gone."""

    replica: str
    step: int
    why: str
    back_step: int | None
    """The step in which it served again; None: it did not."""
    away_s: float | None
    """Seconds until then, where the log's clock tells."""


_DIED = re.compile(
    r"process is gone|\bdied\b|the engine of replica \d+ (?:failed|was closed)|actor (?:died|is dead)"
    r"|failed \d+ times, at last with"
)
"""Why a replica serves nothing, where it is not its weights or its logprobs."""


@once("deaths")
def deaths(view: View) -> tuple[Death, ...]:
    """Replicas that died, in order, from the events of our run directories."""
    found: list[Death] = []
    open_since: dict[str, int] = {}
    """Replica -> position in `found` of the death that it has not come back from."""
    died_at_s: dict[str, float | None] = {}
    for event in view.run.events:
        step = int(view.run.steps[-1]) if event.step is None else event.step
        replica = str(event.fields.get("replica_id"))
        if event.kind == "quarantined" and replica not in open_since and _DIED.search(event.text):
            open_since[replica] = len(found)
            died_at_s[replica] = event.at_s
            found.append(Death(replica, step, event.text, None, None))
        back = [replica] if event.kind == "back_in_service" else []
        if event.kind == "run_resumed":  # every replica is started anew
            back = list(open_since)
        for name in back:
            if (i := open_since.pop(name, None)) is not None:
                began, ended = died_at_s[name], event.at_s
                away_s = max(ended - began, 0.0) if began is not None and ended is not None else None
                found[i] = replace(found[i], back_step=step, away_s=away_s)
    return tuple(found)


STANDSTILL_STEPS = 6
"""Steps in a row over which samples must age by one version a step."""


def unit_ramp(view: View, metric: str | None) -> int | None:
    """Where a staleness begins to grow by one version with every step, to beyond what it ever was before."""
    if metric is None:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < STANDSTILL_STEPS + 4:
        return None
    gained = np.diff(values[known])
    passed = np.diff(view.steps[known])
    is_unit = (np.abs(gained - passed) < 0.35 * np.maximum(passed, 1)).astype(np.int64)
    reach = STANDSTILL_STEPS + 2
    enough = np.convolve(is_unit, np.ones(reach, np.int64), "valid") >= STANDSTILL_STEPS
    for i in np.flatnonzero(enough):
        start, end = int(i), min(int(i) + reach, len(known) - 1)
        if start <= 3 and values[known[-1]] < 0.7 * (view.steps[known[-1]] - view.steps[known[0]]):
            continue  # the pipeline fills up to its bound
        before = float(np.max(values[known[max(0, start - 20) : start + 1]]))
        rise = values[known[end]] - values[known[start]]
        if (
            rise >= 0.75 * (view.steps[known[end]] - view.steps[known[start]])
            and values[known[end]] >= before + 4
            and not _levels_off(values[known[end:]])
        ):
            return int(known[start]) + 1
    return None


def _levels_off(values: Series) -> bool:
    """Whether an age stops growing at its height: a bound holds it, so somebody still takes new versions."""
    top = int(np.argmax(values))
    after = values[top:]
    return len(after) >= 6 and bool(after.min() >= 0.75 * values[top] and values[top] - after[-1] <= 2)


def _standing_replicas(view: View) -> tuple[tuple[str, ...], int | None]:
    trainer = view.values.get("training/weight_version")
    standing: list[str] = []
    since: int | None = None
    every = view.family("replica/", "/weight_version")
    gone = {death.replica: death for death in deaths(view) if death.back_step is None}
    for metric in every:
        values = view.values[metric]
        known = np.flatnonzero(np.isfinite(values))
        if len(known) < 4:
            continue
        last = values[known[-1]]
        same = known[values[known] == last]
        begin = int(same[0])
        if trainer is not None:
            behind = np.nanmax(trainer) - last
        else:
            behind = max(np.nanmax(view.values[m]) for m in every) - last
        replica = metric.split("/")[1]
        is_dead = replica in gone and gone[replica].step <= view.step_at(begin) + 1
        if behind >= 3 and len(same) >= 3 and not is_dead:
            standing.append(replica)
            since = begin if since is None else min(since, begin)
    return tuple(standing), since


@dataclass(frozen=True, slots=True)
class Publications:
    """What is known of weight publications."""

    seconds: str | None
    size: str | None
    absent_since: int | None
    """Position from which they carry nothing or take a fraction of their time."""
    absent_until: int | None
    failed: str | None
    how: str


@once("publications")
def publications(view: View) -> Publications:
    seconds = view.first("timing_s/update_weights")
    size = view.first(
        "sync/num_bytes",
        "checkpoint_engine/payload_mbytes",
        "checkpoint_engine/changed_elems",
        "sync/num_publications",
    )
    failed = view.first("sync/num_failed")
    silent = _no_longer_logged(view, seconds)
    if silent is not None:
        return Publications(seconds, size, silent, None, failed, "are no longer logged")
    says_bytes = size == "sync/num_bytes" and np.isfinite(view.values[size][-3:]).any()
    for metric, least, how in ((size, 0.7, "carry less"), (seconds, 0.45, "take less time")):
        if metric == seconds and says_bytes:
            continue  # what was sent is known: fewer seconds are only a quieter host
        fall = view.fall(metric)
        if fall is not None and fall.drop >= least and fall.score >= 5 and fall.rise_steps <= 3:
            return Publications(seconds, size, fall.idx, fall.end_idx, failed, how)
    rise = view.rise(failed, log=False)
    if rise is not None and rise.late >= 1:
        return Publications(seconds, size, rise.idx, rise.end_idx, failed, "fail")
    ratio = view.first("checkpoint_engine/changed_ratio")
    fall = view.fall(ratio)
    if fall is not None and fall.drop >= 0.9 and fall.score >= 5:
        return Publications(seconds, size, fall.idx, fall.end_idx, failed, "change nothing")
    return Publications(seconds, size, None, None, failed, "")


def _no_longer_logged(view: View, metric: str | None) -> int | None:
    """Where a metric that every step (or every k-th) had stops while the steps go on."""
    if metric is None:
        return None
    known = np.flatnonzero(np.isfinite(view.values[metric]))
    if len(known) < 8:
        return None
    usual = int(np.max(np.diff(known)[-20:]))
    missing = view.n - 1 - int(known[-1])
    return int(known[-1]) + 1 if missing >= max(5, 3 * usual) else None


# ---- the policy's own movement ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Policy:
    """Whether the optimizer itself makes the policy move too fast, fall silent, or break."""

    blow_up_idx: int | None
    """First sign of a blow-up among the signals below."""
    blow_up: tuple[Break, ...]
    """Gradient norm, step KL, clip fraction and entropy that left their range."""
    update_ratio: float
    """Growth of a step's movement (root of the step KL, clip fraction), late over baseline."""
    nan_step: int | None
    """First step from which losses or gradients are not finite."""
    nan_metrics: tuple[str, ...]


@once("policy")
def policy(view: View) -> Policy:
    """The optimizer's own signs. Gradient norm and clip fraction follow any disturbance; the step KL (trainer
    against trainer) and the entropy are the policy's own, and without one of them there is no blow-up. Where the
    engine's logprobs stand for the old ones, step KL and clip fraction hold the gap: gradients and entropy date it."""
    own: list[Break] = []
    shared: list[Break] = []
    ratios: list[float] = []
    with_gap: list[Break] = []
    is_bypass = _trains_on_the_engines_logprobs(view)
    for metric, least, power, into in (
        ("actor/ppo_kl", 3.0, 0.5, own),
        ("actor/pg_clipfrac", 2.2, 1.0, shared),
        ("actor/grad_norm", 2.2, 1.0, shared),
    ):
        rise = view.rise(_after_warmup(view, metric))
        # A step KL scatters around nothing: a rise to many times that is one, though single steps say little.
        if rise is not None and (
            (rise.peak_ratio >= least and rise.score >= 4)
            or (rise.peak_ratio >= 3 * least and rise.score >= 2.5)
        ):
            holds_gap = is_bypass and metric != "actor/grad_norm"
            (with_gap if holds_gap else into).append(replace(rise, metric=metric))
            if is_bypass != (metric != "actor/grad_norm"):
                ratios.append(rise.peak_ratio**power)
    up, down = view.rise("actor/entropy"), view.fall("actor/entropy", log=True)
    if up is not None and up.peak_ratio >= 1.5 and up.score >= 5:
        own.append(up)
        ratios.append(up.peak_ratio)
    elif down is not None and down.ratio <= 0.5 and down.score >= 5 and shared:
        # Entropy falls in every healthy run: here it must fall with the rest.
        apart = abs(down.idx - min(b.idx for b in shared))
        own += [down] if apart <= max(6, view.n // 12) else []
    if not ratios and all(_is_coarse(view, m) for m in ("actor/ppo_kl", "actor/pg_clipfrac")):
        # Printed with too few decimals to show a step's movement: the gradients tell the most that can be told.
        ratios += [rise.peak_ratio for rise in shared]
    nan_step, nan_metrics = _not_finite(view)
    has_own = bool(own or with_gap) or not (view.has("actor/ppo_kl") or view.has("actor/entropy"))
    dated = [*own, *shared]
    is_blow_up = has_own and len(dated) >= 1 and len(dated) + len(with_gap) >= 2
    return Policy(
        blow_up_idx=min(b.idx for b in dated) if is_blow_up else None,
        blow_up=(*own, *with_gap, *shared) if is_blow_up else (),
        update_ratio=float(np.median(ratios)) if ratios else 1.0,
        nan_step=nan_step,
        nan_metrics=nan_metrics,
    )


def _trains_on_the_engines_logprobs(view: View) -> bool:
    """Whether the trainer computes no old logprobs of its own: verl then takes the engine's for them."""
    stages = view.has("timing_s/update_actor") and not view.count("timing_s/old_log_prob")
    return stages and view.run.format.startswith("verl") and bool(view.family("rollout_corr/"))


def is_broken_update(view: View, idx: int) -> bool:
    """Whether losses or gradients had ceased to be numbers by the step after: what the policy does since is noise."""
    nan_step = policy(view).nan_step
    return nan_step is not None and view.idx_of(nan_step) <= idx + 1


def _is_coarse(view: View, metric: str) -> bool:
    """Whether a metric is not logged, or with so few decimals that its values are a few steps of the last one."""
    if not view.has(metric):
        return True
    values = np.abs(view.values[metric])
    return float(np.nanquantile(values, 0.9)) <= 12.0 * view.resolution(metric)


def _after_warmup(view: View, metric: str) -> str | None:
    """Name of the metric's size once the learning rate has warmed up: before, a step's movement only follows it."""
    if not view.has(metric):
        return None
    values = np.abs(view.values[metric])
    begin = 3
    lr = view.values.get("actor/lr")
    if lr is not None and np.isfinite(lr).any():
        early = lr[: max(5, view.n // 3)]
        top = float(np.nanmax(early)) if np.isfinite(early).any() else 0.0
        warm = np.flatnonzero(np.nan_to_num(early, nan=0.0) >= 0.95 * top)
        begin = max(begin, int(warm[0]) + 1) if top > 0 and len(warm) else begin
    values[:begin] = np.nan
    return view.derive(f"abs({metric}) after the warm-up", values)


_MUST_BE_FINITE = (
    "actor/loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/kl_loss",
    "critic/vf_loss",
)


def _not_finite(view: View) -> tuple[int | None, tuple[str, ...]]:
    """First step after which at least one loss is never finite again, or two are not in three steps."""
    last_step = int(view.run.steps[-1])
    broken: dict[str, int] = {}
    for metric in _MUST_BE_FINITE:
        steps = view.run.non_finite.get(metric)
        if not steps:
            continue
        values = view.run.values[metric]
        known = view.run.steps[np.isfinite(values)]
        if not len(known):
            continue  # never a number: not computed here
        last_known = int(known[-1])
        tail = [s for s in steps if s > last_known]
        if tail and tail[-1] >= last_step - 2 and (len(tail) >= 2 or tail[-1] == last_step):
            broken[metric] = tail[0]
    if not broken:
        return None, ()
    return min(broken.values()), tuple(sorted(broken))


# ---- rewards ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reward:
    metric: str | None
    fall: Break | None
    """A fall of at least a fifth of the reward above its lowest possible value, at once."""
    drop_frac: float
    """Share of the reward that was lost at that step."""


@once("bottom")
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


def other_prompts(view: View, idx: int) -> bool:
    """Whether the prompts themselves changed at a step: a run that goes on with other data does all else."""
    prompts = view.contrast("prompt_length/mean", idx, width=8)
    return prompts is not None and abs(prompts.score) >= 6 and not 0.93 <= prompts.ratio <= 1.07


@once("reward")
def reward(view: View) -> Reward:
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


@once("length growth")
def length_growth(view: View) -> Moved | None:
    """The answers become several times as long, and more of them are cut off (or the reward goes with it)."""
    metric = "response_length/mean"
    if view.count(metric) < 30:
        return None
    tenth = max(3, view.n // 10)
    first, last = view.level(metric, 0, tenth), view.level(metric, view.n - tenth)
    if not first > 0 or last < 2.5 * first:
        return None
    clip = "response_length/clip_ratio"
    cut = view.level(clip, view.n - tenth) - view.level(clip, 0, tenth)
    if not (np.isfinite(cut) and cut >= 0.15) and reward_decline(view) is None:
        return None
    values = view.values[metric]
    known = np.flatnonzero(np.isfinite(values))
    smooth = running_median(values[known], 7)
    low = np.flatnonzero(smooth <= first + 0.1 * (last - first))
    return Moved(metric, view.step_at(int(known[low[-1]]) if len(low) else 0), first, last)


# ---- environments ----------------------------------------------------------------------------------------------

ENV_LOAD = ("env/turn_s/mean", "env/turn_s/p99", "env/turn_s/max", "env/queue_depth")
ENV_FAILURES = (
    "failures/frac",
    "failures/num",
    "failures/sandbox_lost/num",
    "failures/timeout/num",
    "failures/environment/num",
    "training/rollout_failure/evicted_samples",
    "response/aborted_ratio",
    "env/num_timeouts",
    "env/num_errors",
    "rollout/sandbox_error_ratio",
    "rollout/timeout_sample_ratio",
)
TURNS = "num_turns/mean"
SANDBOX_S = 1e-3
"""Seconds a turn below which the environment answers from its own process, and only the host's noise shows."""


def failures_rise(view: View, idx: int) -> list[str]:
    """Failure counts and shares that rise at a position."""
    risen = []
    extra = [m for m in view.family("failures/", "/num") if m not in ENV_FAILURES]
    for metric in (*ENV_FAILURES, *extra):
        c = view.contrast(metric, idx)
        if c is None:
            continue
        least = 0.03 if metric.endswith(("frac", "ratio")) else 3.0
        if c.after >= 2.0 * c.before + least and c.score >= 4:
            risen.append(metric)
    return risen


@dataclass(frozen=True, slots=True)
class FailureKinds:
    """Failed trajectories by class, where the log tells classes."""

    counts: dict[str, float]
    """Class -> failures over the whole log."""
    main: str | None
    """The class of most of them."""


@once("failure kinds")
def failure_kinds(view: View) -> FailureKinds:
    """What the failures were."""
    counts = {
        metric.split("/")[1]: float(np.nansum(view.values[metric]))
        for metric in view.values
        if metric.startswith("failures/") and metric.endswith("/num") and metric.count("/") == 2
    }
    counts = {kind: count for kind, count in counts.items() if count > 0}
    return FailureKinds(counts, max(counts, key=lambda kind: counts[kind], default=None))


# ---- seconds ---------------------------------------------------------------------------------------------------

TRAINER_STAGES = ("update_actor", "old_log_prob", "ref", "values", "update_critic", "update_weights", "adv")
EXCESS = "gen beyond length"
"""Derived: generation seconds over what the lengths explain, as a multiple of its own median."""


@once("excess")
def excess(view: View) -> str | None:
    """Name of the derived series of generation seconds beyond what mean lengths explain.

    Responses of less than half the usual length make a step no cheaper: what is left then are prompts and calls.
    """
    gen = view.values.get("timing_s/gen")
    if gen is None or np.isfinite(gen).sum() < 8:
        return None
    out = np.log(np.maximum(gen, 1e-6))
    length = view.values.get("response_length/mean")
    if length is not None:
        size = np.log(np.maximum(length, 1.0))
        known = np.isfinite(size)
        if known.any():
            size = np.where(known, size, np.median(size[known]))
            usual = np.median(size)
            out = out - 1.1 * (np.maximum(size, usual - np.log(2.0)) - usual)
    known = np.isfinite(out)
    return view.derive(EXCESS, np.exp(out - np.median(out[known])))


def host_slowdown(view: View, idx: int) -> float:
    """How many times slower what waits for nobody became at the same lengths: a slow host; 1 where it is none."""
    length = view.contrast("response_length/mean", idx)
    if length is not None and length.ratio >= 1.25:
        return 1.0
    least_s = 0.01 * step_seconds(view)  # less is the noise of a call
    known = [m for s in _ALONE if view.has(m := f"timing_s/{s}") and view.level(m) >= least_s]
    known += [_DECODE] if view.has(_DECODE) else []
    # The seconds of a busy host wobble in proportion to what they are.
    changes = [view.contrast(metric, idx, log=True) for metric in known]
    slower = [c.ratio for c in changes if c is not None and c.ratio >= 1.4 and c.score >= 4]
    return float(np.median(slower)) if len(slower) >= 2 or (len(slower) == len(known) == 1) else 1.0


_ALONE = ("update_actor", "old_log_prob", "ref", "adv", "values", "update_critic")
"""Stages that wait for nobody."""
_DECODE = "rollout/decode_step_s"
"""Neither does a decode step."""


def validations(view: View) -> NDArray[np.intp]:
    """Positions of the steps that validated."""
    marks = ["timing_s/testing", *view.family("val-core/"), *view.family("val/")]
    metric = next((m for m in marks if 3 <= view.count(m) < 0.7 * view.n), None)
    return np.flatnonzero(np.isfinite(view.values[metric])) if metric else np.zeros(0, np.intp)


def is_of_the_schedule(view: View, found: Spells) -> bool:
    """Whether spells of seconds are the steps that validate or save, or those just after: their work, not a fault."""
    saves = view.values.get("timing_s/save_checkpoint")
    saved = np.flatnonzero(np.isfinite(saves)) if saves is not None else np.zeros(0, np.intp)
    return follow(found, validations(view)) or (len(saved) < 0.7 * view.n and follow(found, saved))


RESIDUAL = "seconds of no stage"
_STAGES = (
    "gen",
    "reward",
    "filter",
    "pack",
    "old_log_prob",
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
    "update_weights",
    "save_checkpoint",
    "switch_wait",
    "switch_to_rollout",
    "switch_to_trainer",
)


@once("residual")
def residual(view: View) -> str | None:
    """Name of the series of step seconds that no stage accounts for (logged, or derived)."""
    if view.has("timing_s/other"):
        return "timing_s/other"
    step = view.values.get("timing_s/step")
    stages = [f"timing_s/{s}" for s in _STAGES if f"timing_s/{s}" in view.values]
    if step is None or "timing_s/gen" not in stages or len(stages) < 3:
        return None
    total = np.sum([np.nan_to_num(view.values[s]) for s in stages], axis=0)
    return view.derive(RESIDUAL, np.maximum(step - total, 0.0))


def step_seconds(view: View, start: int = 0, end: int | None = None) -> float:
    """Median seconds of a step, from its stages where the step itself was not logged."""
    logged = view.level("timing_s/step", start, end)
    if np.isfinite(logged):
        return logged
    return float(sum(v for s in _STAGES if np.isfinite(v := view.level(f"timing_s/{s}", start, end))))


def lost_seconds(view: View, metric: str, found: Break) -> float:
    """Seconds lost since a break of a metric of seconds: the excess over the baseline, summed over the steps after."""
    values = view.values[metric][found.idx : found.end_idx]
    over = np.clip(values[np.isfinite(values)] - found.before, 0, None)
    return float(over.sum()) * view.stride


def lost_in_steps(view: View, idx: int) -> float | None:
    """Seconds by which whole steps from position `idx` on took longer than those before, beyond what longer responses
    explain; None where too few steps were timed on either side."""
    step = view.values.get("timing_s/step")
    if step is None:
        stages = [view.values[name] for s in _STAGES if (name := f"timing_s/{s}") in view.values]
        step = np.sum(np.nan_to_num(stages), axis=0) if stages else np.full(view.n, np.nan)
    start = max(idx, 3)  # a growth that is there from the first step has only those as its past
    past = slice(max(0, start - BASELINE), start)
    known = np.isfinite(step[past])
    if known.sum() < 3 or np.isfinite(step[idx:]).sum() < 3:
        return None
    usual = np.median(step[past][known])
    work = np.ones(view.n)
    length = view.values.get("response_length/mean")
    if length is not None and np.isfinite(length[past]).any():
        grown = length / np.nanmedian(length[past])
        work = np.where(np.isfinite(grown), np.maximum(grown, 1.0), 1.0)
    return max(float(np.nansum(step[idx:] - usual * work[idx:])) * view.stride, 0.0)


def over_the_others(view: View, metric: str, family: Sequence[str]) -> str:
    """A derived series: one replica's values over the median of the others' in the same step."""
    others = np.stack([view.values[m] for m in family if m != metric])
    known = np.isfinite(others).any(axis=0)
    usual = np.full(view.n, np.nan)
    usual[known] = np.nanmedian(others[:, known], axis=0)
    relative = np.divide(view.values[metric], usual, out=np.full(view.n, np.nan), where=usual > 0)
    return view.derive(f"{metric} over the others'", relative)
