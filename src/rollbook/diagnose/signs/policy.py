"""The policy's own movement: whether the optimizer makes it run away, fall silent or break."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollbook.diagnose.breaks import Break
from rollbook.diagnose.signs.gap import GAP, gap_of
from rollbook.diagnose.view import View, once


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
def policy_of(view: View) -> Policy:
    """The optimizer's own signs. Gradient norm and clip fraction follow any disturbance; the step KL (trainer
    against trainer) and the entropy are the policy's own, and without one of them there is no blow-up. Where the
    engine's logprobs stand for the old ones, step KL and clip fraction hold the gap: gradients and entropy date it."""
    own: list[Break] = []
    shared: list[Break] = []
    ratios: dict[str, float] = {}
    with_gap: list[Break] = []
    is_bypass = _trains_on_the_engines_logprobs(view) or step_kl_holds_the_gap(view)
    for metric, least, power, of_lr, into in (
        ("actor/ppo_kl", 3.0, 0.5, 2.0, own),
        ("actor/pg_clipfrac", 2.2, 1.0, 1.0, shared),
        ("actor/grad_norm", 2.2, 1.0, 0.0, shared),
    ):
        rise = view.rise(_freed_of_warmup(view, metric, of_lr))
        # A step KL scatters around nothing: a rise to many times that is one, though single steps say little.
        if rise is not None and (
            (rise.peak_ratio >= least and rise.score >= 4)
            or (rise.peak_ratio >= 3 * least and rise.score >= 2.5)
        ):
            holds_gap = is_bypass and metric != "actor/grad_norm"
            (with_gap if holds_gap else into).append(replace(rise, metric=metric))
            if is_bypass != (metric != "actor/grad_norm"):
                ratios[metric] = rise.peak_ratio**power
    up, down = view.rise("actor/entropy"), view.fall("actor/entropy", log=True)
    if up is not None and up.peak_ratio >= 1.5 and up.score >= 5:
        own.append(up)
        ratios["actor/entropy"] = up.peak_ratio
    elif down is not None and down.ratio <= 0.5 and down.score >= 5 and shared:
        # Entropy falls in every healthy run: here it must fall with the rest.
        apart = abs(down.idx - min(b.idx for b in shared))
        own += [down] if apart <= max(6, view.n // 12) else []
    if not ratios and all(_is_coarse(view, m) for m in ("actor/ppo_kl", "actor/pg_clipfrac")):
        # Printed with too few decimals to show a step's movement: the gradients tell the most that can be told.
        ratios |= {rise.metric: rise.peak_ratio for rise in shared}
    if "actor/ppo_kl" in ratios:  # the distance itself; the clipped share is one of a tail, and grows by more
        ratios = {"actor/ppo_kl": ratios["actor/ppo_kl"]}
    nan_step, nan_metrics = _not_finite(view)
    has_own = bool(own or with_gap) or not (view.has("actor/ppo_kl") or view.has("actor/entropy"))
    dated = [*own, *shared]
    is_blow_up = has_own and len(dated) >= 1 and len(dated) + len(with_gap) >= 2
    return Policy(
        blow_up_idx=min(b.idx for b in dated) if is_blow_up else None,
        blow_up=(*own, *with_gap, *shared) if is_blow_up else (),
        update_ratio=float(np.median(list(ratios.values()))) if ratios else 1.0,
        nan_step=nan_step,
        nan_metrics=nan_metrics,
    )


def _trains_on_the_engines_logprobs(view: View) -> bool:
    """Whether the trainer computes no old logprobs of its own: verl then takes the engine's for them."""
    stages = view.has("timing_s/update_actor") and not view.count("timing_s/old_log_prob")
    return stages and view.run.format.startswith("verl") and bool(view.family("rollout_corr/"))


KEPT = 0.5
"""Share of the gap's growth that gradients may reach where the policy is not what moves."""
QUIET_NATS = 0.25
"""Logarithm by which the entropy may move there."""
ALIKE_NATS = 0.9
"""Logarithm by which the root of the step KL may grow otherwise than the gap: it is the same distance."""


def step_kl_holds_the_gap(view: View) -> bool:
    """Whether step KL and clip fraction go with the gap while gradients and entropy hardly move: they are taken against
    the engine's logprobs, whatever the log says of old ones."""
    found = gap_of(view)
    rise = found.rise if found is not None else None
    if rise is None or rise.peak_ratio < 2.0 or rise.score < 6:
        return False
    width = max(8, view.n // 8)
    moved = {}
    for metric in ("actor/ppo_kl", "actor/grad_norm", "actor/entropy"):
        before = view.level(metric, max(0, rise.idx - width), max(rise.idx, 3))
        after = view.level(metric, rise.idx, rise.end_idx)
        if not (before > 0 and after > 0):
            return False
        moved[metric] = float(np.log(after / before))
    apart = 0.5 * moved["actor/ppo_kl"] - float(np.log(rise.peak_ratio))
    first = max(3, view.n // 12)
    ends = [(view.level(m, 0, first), view.last(m)) for m in ("actor/ppo_kl", GAP)]
    if min(min(pair) for pair in ends) <= 0.0:
        return False
    since = [float(np.log(late / early)) for early, late in ends]
    if rise.end_idx is None and abs(0.5 * since[0] - since[1]) > ALIKE_NATS:
        return False  # a policy that warms up
    most = float(np.log(1 + KEPT * (rise.peak_ratio - 1)))
    return (
        abs(apart) <= ALIKE_NATS
        and abs(moved["actor/grad_norm"]) <= most
        and abs(moved["actor/entropy"]) <= QUIET_NATS
    )


def is_broken_update(view: View, idx: int) -> bool:
    """Whether losses or gradients had ceased to be numbers by the step after: what the policy does since is noise."""
    nan_step = policy_of(view).nan_step
    return nan_step is not None and view.idx_of(nan_step) <= idx + 1


def _is_coarse(view: View, metric: str) -> bool:
    """Whether a metric is not logged, or with so few decimals that its values are a few steps of the last one."""
    if not view.has(metric):
        return True
    values = np.abs(view.values[metric])
    return float(np.nanquantile(values, 0.9)) <= 12.0 * view.resolution(metric)


WARM_FRAC = 0.25
"""Share of the full learning rate below which a step's movement says nothing."""


def _freed_of_warmup(view: View, metric: str, power: float) -> str | None:
    """Name of the metric's size at the full learning rate: while that warms up, a movement that goes with its `power`
    is scaled up to what it would be, and the first steps are left out."""
    if not view.has(metric):
        return None
    values = np.abs(view.values[metric])
    values[:3] = np.nan
    lr = view.values.get("actor/lr")
    if lr is not None and np.isfinite(lr).any() and (top := float(np.nanmax(lr))) > 0:
        until = int(np.flatnonzero(np.nan_to_num(lr, nan=0.0) >= 0.95 * top)[0])
        warmth = np.nan_to_num(lr[:until], nan=0.0) / top
        values[:until][warmth < WARM_FRAC] = np.nan
        values[:until] /= np.maximum(warmth, WARM_FRAC) ** power
    return view.derive(f"abs({metric}) at the full learning rate", values)


MUST_BE_FINITE = (
    "actor/loss",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/ppo_kl",
    "actor/entropy",
    "actor/kl_loss",
    "critic/vf_loss",
    "critic/grad_norm",
)
"""What a step computes, and is a number in every healthy one."""


def _not_finite(view: View) -> tuple[int | None, tuple[str, ...]]:
    """First step after which at least one loss is never finite again, or two are not in three steps."""
    last_step = int(view.run.steps[-1])
    broken: dict[str, int] = {}
    for metric in MUST_BE_FINITE:
        steps = view.run.non_finite.get(metric)
        if not steps:
            continue
        values = view.run.values[metric]
        known = view.run.steps[np.isfinite(values)]
        if not len(known):
            continue  # never a number: not computed here
        last_known = int(known[-1])
        tail = [s for s in steps if s > last_known]
        came_and_went = len(steps) > len(tail)  # a logger that loses values now and then
        if (
            tail
            and tail[-1] >= last_step - 2
            and (len(tail) >= 2 or (tail[-1] == last_step and not came_and_went))
        ):
            broken[metric] = tail[0]
    if not broken:
        return None, ()
    return min(broken.values()), tuple(sorted(broken))
