"""The run was taken up again without a part of its state: older weights, no optimizer moments, a schedule or a data
position that begins anew. Several series of the trainer jump at the very step of the restart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rollbook.diagnose.changes import noise_scale
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.parts.back_at_the_start import back_at_the_start
from rollbook.diagnose.series import Series, finite
from rollbook.diagnose.signs.gap import GAP, gap_of
from rollbook.diagnose.signs.policy import policy_of
from rollbook.diagnose.signs.rewards import lowest_reward, other_prompts, reward_of
from rollbook.diagnose.view import View, spread_around
from rollbook.diagnose.wording import num, share
from rollbook.observe.numbers import counted

RULE = "discontinuity_after_resume"


SECOND_WARMUP = "falls at once and warms up again"
LONE_JUMP = 7.0
"""Noises that a series must jump by when it is the only one: of eight at many restarts, some jump by chance."""


@dataclass(frozen=True, slots=True)
class Restart:
    """A step at which the run began again, and how that is known."""

    idx: int
    mark: str
    says: str
    is_certain: bool


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
)


ACTION = (
    "take the run up again from the last whole checkpoint with weights, optimizer, schedule, data position and "
    "random state, and compare the first step with the one that was logged"
)
CHECK = (
    "what the checkpoint holds against what the trainer loads: optimizer state, scheduler step, data cursor"
)


def judge(view: View) -> Finding | NotJudged | None:
    best: Finding | None = _other_weights(view)
    for restart in _restarts(view):
        found = _at(view, restart)
        if found is not None and (best is None or found.confidence > best.confidence):
            best = found
    return best or _back_at_the_start(view)


def _back_at_the_start(view: View) -> Finding | None:
    """The whole run is where it was in its first steps, by more than one measure: what it had learned is gone."""
    for seam in view.run.seams:
        idx = view.idx_of(seam.step)
        if (evidence := back_at_the_start(view, idx, seam.replaced)) != ():
            return Finding(
                rule=RULE,
                title="the run did not take up where it had stopped: the weights are those that it began with",
                area="version",
                confidence=0.85,
                step=seam.step,
                evidence=evidence,
                action=ACTION,
                next_check=CHECK,
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
            return Finding(
                rule=RULE,
                title="the run did not take up where it had stopped: the weights are not those of the checkpoint",
                area="version",
                confidence=0.98,
                step=step,
                evidence=(Evidence(metric="publication", step=step, says=says),),
                action=ACTION,
                next_check=CHECK,
            )
        is_first = False
        digest_of[version] = digest
    return None


def _restarts(view: View) -> list[Restart]:
    restarts = [
        Restart(
            view.idx_of(seam.step),
            "log",
            f"the log takes up again at step {seam.step} ({counted(seam.num_replaced, 'step')} run twice)",
            True,
        )
        for seam in view.run.seams
    ]
    for event in view.events("resumed", "run_resumed"):
        if event.step is not None and 0 < (idx := view.idx_of(event.step + 1)) < view.n - 2:
            restarts.append(Restart(idx, "log", event.text[:120] or f"resumed after step {event.step}", True))
    epoch = view.values.get("training/epoch")
    if epoch is not None:
        known = np.flatnonzero(np.isfinite(epoch))
        for i in np.flatnonzero(np.diff(epoch[known]) < -0.5):
            idx = int(known[i + 1])
            restarts.append(
                Restart(
                    idx, "training/epoch", f"goes back from {num(epoch[known[i]])} to {num(epoch[idx])}", True
                )
            )
    lr = view.values.get("actor/lr")
    if lr is not None:
        known = np.flatnonzero(np.isfinite(lr))
        steps = lr[known]
        for i in np.flatnonzero(steps[1:] < 0.6 * steps[:-1]):
            idx = int(known[i + 1])
            if 4 < idx < view.n - 4 and np.nanmax(lr[idx : idx + 40]) >= 1.3 * lr[idx]:
                restarts.append(Restart(idx, "actor/lr", SECOND_WARMUP, False))
        anew = _schedule_begins_anew(lr)
        if anew is not None:
            restarts.append(Restart(anew, "actor/lr", "rises at once to what it was earlier", False))
    restarts += _unmarked(view)
    pause = _pauses(view)
    restarts += [Restart(i, "clock", f"{num(s)} s without a step", False) for i, s in pause]
    unique: dict[int, Restart] = {}
    for restart in restarts:
        if 2 <= restart.idx <= view.n - 2:
            near = next((i for i in unique if abs(i - restart.idx) <= 2), restart.idx)
            if near not in unique or restart.is_certain > unique[near].is_certain:
                unique[near] = restart
    return list(unique.values())


def _unmarked(view: View) -> list[Restart]:
    """What cannot happen in training: a step counter that goes back, a distance to the reference that shrinks at once,
    a reward that falls at the very step at which the entropy jumps while the engine still agrees."""
    restarts = []
    counter = view.values.get("training/global_step")
    if counter is not None:
        known = np.flatnonzero(np.isfinite(counter))
        for i in np.flatnonzero(np.diff(counter[known]) < 0):
            restarts.append(Restart(int(known[i + 1]), "training/global_step", "goes back", True))
    fall = view.fall("actor/kl_loss")
    is_shrunk = fall is not None and fall.drop >= 0.4 and fall.score >= 5 and fall.rise_steps <= 2
    if fall is not None and is_shrunk and not _shrinks_slowly(view, fall.idx):
        says = "the distance to the reference shrinks at once"
        restarts.append(Restart(fall.idx, "actor/kl_loss", says, False))
    reward = reward_of(view)
    if reward.fall is not None and reward.metric is not None:
        idx = reward.fall.idx
        entropy = view.contrast("actor/entropy", idx, width=8)
        jumps = (
            entropy is not None
            and abs(entropy.score) >= 6
            and abs(entropy.jump) >= max(0.6 * abs(entropy.diff), 0.15 * abs(entropy.before))
        )
        if jumps and _was_there_before(view, idx):
            restarts.append(
                Restart(idx, reward.metric, "falls at the step at which the entropy jumps", False)
            )
    restarts += _jumps_together(view)
    without = _without_moments(view)
    if without is not None:
        says = "gradients and step KL rise and the reward falls at one step, while the engine still agrees"
        restarts.append(Restart(without, "actor/grad_norm", says, False))
    return restarts


LEAST_JUMP = 0.12
"""Share of its level that a series must jump by to speak for a restart that nothing else marks."""
AT_ONCE = 5.0
"""Noises that a series of the trainer must jump by, from one step to the next, to be looked at as a restart."""


def _jumps_together(view: View) -> list[Restart]:
    """The steps at which the distance to the reference shrinks most, or the gradients or the entropy rise most, if the
    entropy and others jump at that very step. A distance that grows again, gradients that calm down, or a policy that
    learns again what it had learned leave no lasting change."""
    restarts = []
    for metric, way, least in (
        ("actor/kl_loss", -1, 0.5),
        ("actor/grad_norm", 1, 0.6),
        ("actor/entropy", 1, LEAST_JUMP),
    ):
        at = _steepest(view, metric, way, least)
        if at is None:
            continue
        for idx in (at - 1, at, at + 1):
            others = [
                m for m in ("actor/entropy", reward_of(view).metric, "response_length/mean") if m is not None
            ]
            jumps = {m: j for m in others if (j := _jump(view, m, idx)) is not None}
            told = {
                m
                for m, (before, _, size, score) in jumps.items()
                if score >= 4 and abs(size) >= LEAST_JUMP * abs(before)
            }
            if "actor/entropy" not in told or not _is_one_step(view, "actor/entropy", idx):
                continue
            if (way > 0 and len(told) < 2) or not _reward_was_there(view, idx):
                continue
            if metric == "actor/entropy" and not _falls_back(view, jumps, idx):
                continue
            restarts.append(Restart(idx, metric, _SAYS[metric], False))
            break
    return restarts


_SAYS = {
    "actor/kl_loss": "the distance to the reference shrinks at the step at which the entropy jumps",
    "actor/grad_norm": "the gradients jump at the step at which the entropy does",
    "actor/entropy": "the entropy rises and the reward falls at one step, to what the run had before",
}


def _falls_back(view: View, jumps: dict[str, tuple[float, float, float, float]], idx: int) -> bool:
    """Whether the reward falls at the very step, to one that the run had on its way up."""
    metric = reward_of(view).metric
    jump = jumps.get(metric) if metric is not None else None
    if metric is None or jump is None:
        return False
    before, _, size, score = jump
    fell = score >= 4 and size <= -LEAST_JUMP * abs(before)
    return fell and _is_one_step(view, metric, idx) and _was_there_before(view, idx)


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
    past = view.values[metric][:idx]
    low, high = np.nanquantile(past, 0.02), np.nanquantile(past, 0.98)
    reach = 0.25 * max(float(high) - lowest_reward(view), 0.0)
    return bool(low - reach <= c.after <= high + reach)


def _without_moments(view: View) -> int | None:
    """Position at which gradients and the step KL jump together and the reward falls to one it had before: an
    optimizer that begins without its moments, from older weights. A bad batch takes the reward only after its update,
    other data leave the step KL, and a learning rate that is too high raises it over many steps."""
    rise = view.rise("actor/grad_norm")
    metric = reward_of(view).metric
    if rise is None or metric is None or rise.rise_steps > 2 or rise.peak_ratio < 1.8 or rise.score < 6:
        return None
    for idx in (rise.idx, rise.idx + 1):
        jumps = [_jump(view, m, idx) for m in ("actor/grad_norm", "actor/ppo_kl", metric)]
        if not 4 < idx < view.n - 4 or None in jumps:
            continue
        (g0, _, g, g_score), (k0, _, k, k_score), (r0, _, r, r_score) = (j for j in jumps if j is not None)
        together = g >= 0.8 * g0 and k >= k0 and r <= -0.1 * abs(r0)
        # A step KL is noisy by itself: that it doubles at this very step is what counts.
        if together and min(g_score, 2 * k_score, r_score) >= 4 and _was_there_before(view, idx):
            return idx
    return None


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


def _was_there_before(view: View, idx: int) -> bool:
    """Whether reward and entropy after a step are ones the run had earlier: older weights, not a collapse."""
    for metric in (reward_of(view).metric, "actor/entropy", "response_length/mean"):
        c = view.contrast(metric, idx, width=8)
        if c is None or metric is None:
            continue
        past = view.values[metric][:idx]
        past = finite(past)
        low, high = float(np.quantile(past, 0.02)), float(np.quantile(past, 0.98))
        reach = 0.15 * (abs(low) + abs(high))
        if not low - reach <= c.after <= high + reach:
            return False
    away = view.contrast("actor/kl_loss", idx, width=8)
    return away is None or away.ratio <= 1.3


def _pauses(view: View) -> list[tuple[int, float]]:
    """Positions before which much more time passed than the step took."""
    at_s = view.run.at_s
    if view.stride != 1 or np.isfinite(at_s).sum() < 10:
        return []
    passed = np.diff(at_s)
    usual = np.nanmedian(passed)
    return [(int(i) + 1, float(passed[i])) for i in np.flatnonzero(passed > max(8 * usual, 300.0))]


def _at(view: View, restart: Restart) -> Finding | None:
    evidence = [Evidence(metric=restart.mark, step=view.step_at(restart.idx), says=restart.says)]
    meanings: dict[str, None] = {}
    surest = 0.0
    for metric, name, least, way, meaning in _STATE:
        if metric == "critic/rewards/mean" and view.has("critic/score/mean"):
            continue
        if metric == "actor/lr" and _schedule_goes_on(view, restart.idx):
            continue
        jump = _jump(view, metric, restart.idx)
        if jump is None:
            continue
        before, after, jump_size, score = jump
        scale = max(abs(before), 1e-12)
        is_seen = abs(jump_size) >= max(least * scale, 2.0 * view.resolution(metric))
        is_this_way = way == 0 or (jump_size > 0) == (way > 0)
        if score >= 4 and is_seen and is_this_way:
            says = f"{name} {num(before)} before the restart, {num(after)} after"
            evidence.append(
                Evidence(metric=metric, step=view.step_at(restart.idx), before=before, after=after, says=says)
            )
            meanings[meaning] = None
            surest = max(surest, score)
    anew = _begins_anew(view, restart.idx) if restart.is_certain else []
    if any(item.metric == "actor/lr" for item in evidence[1:]):
        anew = [item for item in anew if item.metric != "actor/lr"]
    for item in anew:  # counted, not measured: no noise is in them
        evidence.append(item)
        meanings["the schedule began anew" if item.metric == "actor/lr" else "the data began anew"] = None
        surest = max(surest, LONE_JUMP)
    if not restart.is_certain and (other_prompts(view, restart.idx) or _runs_away(view, restart.idx)):
        return None
    num_jumps = len(evidence) - 1
    anew_alone = restart.says == SECOND_WARMUP and _warms_up_once(view, restart.idx)
    if num_jumps < (1 if restart.is_certain or anew_alone else 2):
        return None
    if num_jumps == 1 and surest < LONE_JUMP:
        return None
    only_lr = num_jumps == 1 and evidence[1].metric == "actor/lr"
    gap = view.contrast(GAP, restart.idx, width=8) if gap_of(view) else None
    if gap is not None and gap.ratio >= 3 and gap.score >= 8:
        return None  # the engine is not the trainer's: another rule's
    if not restart.is_certain and gap is not None and _gap_leaps(view, restart.idx, gap.before):
        return None
    rise = found.rise if (found := gap_of(view)) is not None else None
    if rise is not None and rise.peak_ratio >= 3 and rise.score >= 8 and abs(rise.idx - restart.idx) <= 2:
        return None
    confidence = 0.55 + 0.13 * num_jumps + (0.1 if restart.is_certain else -0.05) - 0.15 * only_lr
    confidence = max(confidence, 0.72) if anew_alone else confidence
    reward = view.contrast(reward_of(view).metric, restart.idx)
    return Finding(
        rule=RULE,
        title="the run did not take up where it had stopped: " + ", ".join(list(meanings)[:2]),
        area="version",
        confidence=share(confidence),
        step=view.step_at(restart.idx),
        evidence=tuple(evidence),
        cost_reward=max(0.0, -reward.diff) if reward is not None else None,
        action=ACTION,
        next_check=CHECK,
    )


ENGINE_IS_OFF = 8.0
"""Gap of two steps over that before them from which on the engine samples something else, however few they are."""


def _gap_leaps(view: View, idx: int, before: float) -> bool:
    """Whether the gap leaps at a position, for the whole rest or for two steps."""
    near = view.values[GAP][max(0, idx - 1) : idx + 3]
    near = np.sort(finite(near))
    return len(near) >= 2 and bool(near[-2] >= ENGINE_IS_OFF * before > 0.0)


def _warms_up_once(view: View, idx: int) -> bool:
    """Whether a rate that stood, or had only fallen, is a small part of itself at one step of the run alone, and climbs
    from there step by step: no schedule with cycles does so."""
    lr = view.values["actor/lr"]
    known = finite(lr)
    falls = int((known[1:] < 0.3 * known[:-1]).sum())
    after = lr[idx : idx + 6]
    before = lr[max(0, idx - 6) : idx]
    return bool(
        falls == 1
        and lr[idx] <= 0.3 * lr[idx - 1]
        and np.all(np.diff(finite(before)) <= 0)
        and np.all(np.diff(finite(after)) > 0)
    )


def _runs_away(view: View, idx: int) -> bool:
    """Whether the policy had left its range before a position: what jumps then goes on from there."""
    since = policy_of(view).blow_up_idx
    return since is not None and since < idx - 2


def _begins_anew(view: View, idx: int) -> list[Evidence]:
    """What is counted and begins anew at a restart: the epochs at 0, the schedule at the foot of its warm-up."""
    found = []
    step = view.step_at(idx)
    epoch = view.values.get("training/epoch")
    if epoch is not None and np.isfinite(epoch[idx - 1 : idx + 1]).all():
        before, after = float(epoch[idx - 1]), float(epoch[idx])
        if before >= 1 and after == np.nanmin(epoch) and after < before:
            says = f"epoch {num(before)} before the restart, {num(after)} after: the data began anew"
            found.append(Evidence(metric="training/epoch", step=step, before=before, after=after, says=says))
    lr = view.values.get("actor/lr")
    if (
        lr is not None
        and idx >= 6
        and np.isfinite(lr[idx - 6 : idx + 1]).all()
        and np.all(lr[idx - 6 : idx] > 0)
        and not _schedule_goes_on(view, idx)
    ):
        usual = float(np.max(np.abs(np.diff(np.log(lr[idx - 6 : idx])))))
        jump = float(np.log(max(lr[idx], 1e-30) / lr[idx - 1]))
        if abs(jump) >= max(0.1, 4 * usual):
            says = f"learning rate {num(float(lr[idx - 1]))} before the restart, {num(float(lr[idx]))} after"
            found.append(
                Evidence(
                    metric="actor/lr", step=step, before=float(lr[idx - 1]), after=float(lr[idx]), says=says
                )
            )
    return found


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


def _jump(view: View, metric: str, idx: int) -> tuple[float, float, float, float] | None:
    """(before, after, jump, jump in noises) of a metric at a restart; the first values after count, and the noise of
    those before: what a restart shakes calms down again."""
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
    return c.before, first, float(jump), float(abs(jump) / error)
