"""The run was taken up again without a part of its state: older weights, no optimizer moments, a schedule or a data
position that begins anew. Several series of the trainer jump at the very step of the restart.

Where a run may have begun again is in `parts/restarts.py`, what jumps there in `_changes`. Other prompts, a policy that
runs away and an engine that is off jump as well, and are other causes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding
from rollbook.diagnose.rules.parts.back_at_the_start import back_at_the_start
from rollbook.diagnose.rules.parts.restarts import SECOND_WARMUP, Restart, jump_at, restarts_of
from rollbook.diagnose.series import finite
from rollbook.diagnose.signs.gap import GAP, gap_of
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import other_prompts, reward_cost
from rollbook.diagnose.view import View
from rollbook.diagnose.wording import num, share

RULE = "discontinuity_after_resume"
ACTION = (
    "take the run up again from the last whole checkpoint with weights, optimizer, schedule, data position and "
    "random state, and compare the first step with the one that was logged"
)
CHECK = (
    "what the checkpoint holds against what the trainer loads: optimizer state, scheduler step, data cursor"
)
finding = partial(Finding, rule=RULE, area="version", action=ACTION, next_check=CHECK)
NOT_TAKEN_UP = "the run did not take up where it had stopped"
_STATE = (
    # metric, name in words, least relative jump, which way (0: either), what it means
    ("actor/lr", "learning rate", 0.3, -1, "the schedule began anew"),
    ("actor/grad_norm", "gradient norm", 0.5, 1, "the optimizer lost its moments"),
    ("actor/kl_loss", "KL to the reference", 0.35, -1, "the weights are older"),
    ("actor/entropy", "entropy", 0.12, 0, "the weights are older"),
    ("critic/rewards/mean", "reward", 0.10, -1, "the weights are older"),
    ("critic/score/mean", "reward", 0.10, -1, "the weights are older"),
    ("response_length/mean", "response length", 0.15, 0, "the weights are older"),
    ("actor/ppo_kl", "step KL", 0.8, 1, "the optimizer lost its moments"),
    ("actor/pg_clipfrac", "clipped share", 1.0, 1, "the optimizer lost its moments"),
)
LONE_JUMP = 7.0
"""Noises that a series must jump by when it is the only one: of eight at many restarts, some jump by chance."""


def judge(view: View) -> Finding | None:
    best: Finding | None = _other_weights(view)
    for restart in restarts_of(view):
        found = _at(view, restart)
        if found is not None and (best is None or found.confidence > best.confidence):
            best = found
    return best or _back_at_the_start(view)


def _back_at_the_start(view: View) -> Finding | None:
    """The whole run is where it was in its first steps, by more than one measure: what it had learned is gone."""
    for seam in view.run.seams:
        idx = view.idx_of(seam.step)
        if (evidence := back_at_the_start(view, idx, seam.replaced)) != ():
            return finding(
                title=f"{NOT_TAKEN_UP}: the weights are those that it began with",
                confidence=0.85,
                step=seam.step,
                evidence=evidence,
            )
    return None


def _other_weights(view: View) -> Finding | None:
    """The first publication after a restart has the version of an earlier one and other weights: told by digests."""
    digest_of: dict[int, str] = {}
    is_first = False
    for event in view.events("publication", "run_resumed"):
        if event.kind == "run_resumed":
            is_first = True
            continue
        version, digest = event.fields.get("weight_version"), event.fields.get("digest")
        if not isinstance(version, int) or not isinstance(digest, str):
            continue
        if is_first and digest_of.get(version, digest) != digest:
            restarted = [e.step for e in view.events("run_resumed") if e.step is not None]
            step = restarted[-1] + 1 if restarted else view.step_at(0)
            says = f"version {version} was published with digest {digest_of[version][:8]}…, and now with {digest[:8]}…"
            return finding(
                title=f"{NOT_TAKEN_UP}: the weights are not those of the checkpoint",
                confidence=0.98,
                step=step,
                evidence=(Evidence(metric="publication", step=step, says=says),),
            )
        is_first = False
        digest_of[version] = digest
    return None


def _at(view: View, restart: Restart) -> Finding | None:
    """What jumped at one restart, if it is enough and nothing else explains it."""
    idx, changes = restart.idx, [*_changes(view, restart)]
    warms_up = restart.says == SECOND_WARMUP and _warms_up_once(view, idx)
    if len(changes) < (1 if restart.is_certain or warms_up else 2):
        return None
    if len(changes) == 1 and changes[0].noises < LONE_JUMP:
        return None
    if not restart.is_certain and (other_prompts(view, idx) or _runs_away(view, idx)):
        return None
    if _engine_is_off(view, restart):
        return None  # another rule's
    only_lr = len(changes) == 1 and changes[0].evidence.metric == "actor/lr"
    confidence = 0.55 + 0.13 * len(changes) + (0.1 if restart.is_certain else -0.05) - 0.15 * only_lr
    confidence = max(confidence, 0.72) if warms_up else confidence
    mark = Evidence(metric=restart.mark, step=view.step_at(idx), says=restart.says)
    meanings = [*dict.fromkeys(change.meaning for change in changes)]
    return finding(
        title=f"{NOT_TAKEN_UP}: {', '.join(meanings[:2])}",
        confidence=share(confidence),
        step=view.step_at(idx),
        evidence=(mark, *(change.evidence for change in changes)),
        cost_reward=reward_cost(view, idx),
    )


@dataclass(frozen=True, slots=True)
class Change:
    """A part of the state that was not taken up."""

    evidence: Evidence
    meaning: str
    noises: float


def _changes(view: View, restart: Restart) -> Iterator[Change]:
    """What jumped at a restart, and what was counted and begins anew."""
    idx, lr_jumps = restart.idx, False
    for metric, name, least, way, meaning in _STATE:
        if metric == "critic/rewards/mean" and view.has("critic/score/mean"):
            continue
        if metric == "actor/pg_clipfrac" and not restart.is_certain:
            continue  # it jumps for one bad batch, too
        if metric == "actor/lr" and _schedule_goes_on(view, idx):
            continue
        jump = jump_at(view, metric, idx)
        if jump is None or jump.noises < 4 or (way != 0 and (jump.size > 0) != (way > 0)):
            continue
        if abs(jump.size) < max(least * max(abs(jump.before), 1e-12), 2.0 * view.resolution(metric)):
            continue
        says = f"{name} {num(jump.before)} before the restart, {num(jump.after)} after"
        step = view.step_at(idx)
        evidence = Evidence(metric=metric, step=step, before=jump.before, after=jump.after, says=says)
        yield Change(evidence, meaning, jump.noises)
        lr_jumps |= metric == "actor/lr"
    if restart.is_certain:
        yield from _data_begin_anew(view, idx)
        yield from () if lr_jumps else _schedule_begins_anew(view, idx)


def _engine_is_off(view: View, restart: Restart) -> bool:
    """Whether the engine parts from the trainer at a restart."""
    found, gap = gap_of(view), view.contrast(GAP, restart.idx, width=8)
    if found is None:
        return False
    if gap is not None and gap.ratio >= 3 and gap.score >= 8:
        return True
    if gap is not None and not restart.is_certain and _gap_leaps(view, restart.idx, gap.before):
        return True
    rise = found.rise
    is_large = rise is not None and rise.peak_ratio >= 3 and rise.score >= 8
    return rise is not None and is_large and abs(rise.idx - restart.idx) <= 2


ENGINE_IS_OFF = 8.0
"""Gap of two steps over that before them from which on the engine samples something else, however few they are."""


def _gap_leaps(view: View, idx: int, before: float) -> bool:
    """Whether the gap leaps at a position, for the whole rest or for two steps."""
    near = view.values[GAP][max(0, idx - 1) : idx + 3]
    near = np.sort(finite(near))
    return len(near) >= 2 and bool(near[-2] >= ENGINE_IS_OFF * before > 0.0)


WARMS_UP_FROM = 0.5
"""Share of the rate before it at which a second warm-up begins at the most: a rate that has decayed is low as well."""


def _warms_up_once(view: View, idx: int) -> bool:
    """Whether a rate that stood, or had only fallen, is a small part of itself at one step of the run alone, and climbs
    from there step by step: no schedule with cycles does so."""
    lr = view.values["actor/lr"]
    known = finite(lr)
    falls = int((known[1:] < WARMS_UP_FROM * known[:-1]).sum())
    after = lr[idx : idx + 6]
    before = lr[max(0, idx - 6) : idx]
    return bool(
        falls == 1
        and lr[idx] <= WARMS_UP_FROM * lr[idx - 1]
        and np.all(np.diff(finite(before)) <= 0)
        and np.all(np.diff(finite(after)) > 0)
    )


def _runs_away(view: View, idx: int) -> bool:
    """Whether the policy had left its range before a position: what jumps then goes on from there."""
    since = policy_of(view).blow_up_idx
    return since is not None and since < idx - 2


def _data_begin_anew(view: View, idx: int) -> Iterator[Change]:
    """Epochs that begin at the first again. They are counted, not measured: no noise is in them."""
    epoch = view.values.get("training/epoch")
    if epoch is None or not np.isfinite(epoch[idx - 1 : idx + 1]).all():
        return
    before, after = float(epoch[idx - 1]), float(epoch[idx])
    if before >= 1 and after == np.nanmin(epoch) and after < before:
        says = f"epoch {num(before)} before the restart, {num(after)} after: the data began anew"
        step = view.step_at(idx)
        evidence = Evidence(metric="training/epoch", step=step, before=before, after=after, says=says)
        yield Change(evidence, "the data began anew", LONE_JUMP)


def _schedule_begins_anew(view: View, idx: int) -> Iterator[Change]:
    """A learning rate that leaves its smooth way at a restart."""
    lr = view.values.get("actor/lr")
    if (
        lr is None
        or idx < 6
        or not np.isfinite(lr[idx - 6 : idx + 1]).all()
        or not np.all(lr[idx - 6 : idx] > 0)
    ):
        return
    usual = float(np.max(np.abs(np.diff(np.log(lr[idx - 6 : idx])))))
    before, after = float(lr[idx - 1]), float(lr[idx])
    if abs(float(np.log(max(after, 1e-30) / before))) < max(0.1, 4 * usual) or _schedule_goes_on(view, idx):
        return
    says = f"learning rate {num(before)} before the restart, {num(after)} after"
    evidence = Evidence(metric="actor/lr", step=view.step_at(idx), before=before, after=after, says=says)
    yield Change(evidence, "the schedule began anew", LONE_JUMP)


def _schedule_goes_on(view: View, idx: int) -> bool:
    """Whether the learning rate after a restart follows the last one of the steps that are run again: a schedule that
    counts them twice is a few steps ahead, and no other."""
    lr = view.values.get("actor/lr")
    before = next((s.replaced.get("actor/lr") for s in view.run.seams if s.step == view.step_at(idx)), None)
    if lr is None or before is None or len(before) < 2 or min(before[-2:]) <= 0 or not lr[idx] > 0:
        return False
    ahead = before[-1] ** 2 / before[-2]
    return bool(abs(np.log(lr[idx] / ahead)) <= SAME_RATE)


SAME_RATE = 0.03
"""Logarithm by which a learning rate may differ from the next one of its schedule."""
