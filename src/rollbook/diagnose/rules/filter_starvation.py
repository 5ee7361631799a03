"""Most groups are flat (all members right, or all wrong), the filter drops them, and generation runs again and again
to fill a batch. The seconds go where the dropped samples go."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.wording import num, of_break, share
from rollbook.diagnose.series import Series
from rollbook.diagnose.signs.rewards import reward_of
from rollbook.diagnose.signs.seconds import excess_of
from rollbook.diagnose.stops import Stop, stopped_by
from rollbook.diagnose.view import View

RULE = "filter_starvation"

DROPPED = ("training/filter_groups/evicted_samples", "filter/flat/num_groups", "train/num_gen_batches")
EVICTED = "evicted/flat/num_groups"
"""Groups that our own filter dropped; logged in the steps that have some."""
KEPT = ("filter/kept_frac", "batch/effective_frac")

MOSTLY_RIGHT = 0.6
"""Mean reward from which on most flat groups are solved ones."""


def judge(view: View) -> Finding | NotJudged | None:
    dropped, kept = view.first(*DROPPED) or _evicted(view), view.first(*KEPT)
    starved = stopped_by(view, RULE)
    if dropped is None and kept is None and starved is None:
        return NotJudged(
            rule=RULE,
            missing=(DROPPED[0], KEPT[0]),
            collect="only with a filter of flat groups (DAPO): log how many samples it drops",
        )
    lasting = _for_good(view, dropped, kept, starved)
    return lasting if lasting is not None or starved is not None else _in_some_steps(view, dropped)


def _for_good(view: View, dropped: str | None, kept: str | None, starved: Stop | None) -> Finding | None:
    """From a step on the filter drops most of what is generated, or that ended the run."""
    evidence: list[Evidence] = [] if starved is None else [starved.evidence()]
    idx: int | None = None
    if (
        (rise := view.rise(dropped)) is not None
        and rise.peak_ratio >= 2.0
        and rise.score >= 5
        and rise.late >= 2
    ):
        evidence.append(of_break(rise, "samples dropped a step"))
        idx = rise.idx
    fall = view.fall(kept)
    if fall is not None and fall.late <= 0.4 and fall.ratio <= 0.6 and fall.score >= 5:
        evidence.append(of_break(fall, "share of groups that is left"))
        idx = fall.idx if idx is None else min(idx, fall.idx)
    if idx is None and starved is not None:
        some = np.flatnonzero(np.nan_to_num(view.values[dropped]) > 0).tolist() if dropped is not None else []
        idx = some[0] if some else view.n - 1  # from the first steps on, or in the last one alone
    if idx is None:
        return None
    if (
        starved is None
        and dropped is not None
        and (share_dropped := _dropped_share(view, dropped)) is not None
        and share_dropped < 0.55
    ):
        return None  # most of what is generated is trained
    excess = excess_of(view)
    slower = view.rise(excess)
    costs = slower is not None and slower.peak_ratio >= 1.4 and slower.idx >= idx - max(8, view.n // 10)
    grown, steadiness = view.trend(excess)
    costs |= grown >= 1.4 and steadiness >= 0.6  # with the drops, so slowly that no step stands out
    makes_no_more = _asks_for_no_more(view, idx)
    costs &= not makes_no_more
    reward = view.last(reward_of(view).metric or "", 10)
    smaller = view.fall(view.first("batch/num_groups", "batch/num_sequences"))
    shrinks = smaller is not None and smaller.ratio <= 0.6 and smaller.score >= 5
    shrinks &= not (makes_no_more and reward > MOSTLY_RIGHT)  # a task that is solved leaves little to train
    if not (costs or shrinks or starved is not None):
        return None
    cost_s = None
    if slower is not None and costs:
        now = view.level("timing_s/gen", slower.idx)
        cost_s = float(now * (1 - 1 / slower.peak_ratio) * (view.n - slower.idx) * view.stride)
        says = f"generation takes {num(slower.peak_ratio)} times what the lengths explain"
        evidence.append(Evidence(metric="timing_s/gen", step=slower.step, after=now, says=says))
    if smaller is not None and shrinks:
        evidence.append(of_break(smaller))
    side = ""
    if np.isfinite(reward):
        side = (
            " (most answers are right)"
            if reward > MOSTLY_RIGHT
            else " (most answers are wrong)"
            if reward < 0.3
            else ""
        )
    return Finding(
        rule=RULE,
        title=f"the filter of flat groups drops most of what is generated{side}",
        area="data",
        confidence=share(0.96 if starved is not None else 0.9 if costs else 0.75),
        step=view.step_at(idx),
        evidence=tuple(evidence),
        cost_s=cost_s,
        action="sample prompts by difficulty (leave out those solved always or never), mix in others, or "
        "cap the refills",
        next_check="share of right answers per prompt over the last steps: how many prompts are neither 0 nor 1?",
    )


MOST_DROPPED = 0.72
"""Share of what a step generates that is dropped from which on it starves: a filter of a sound mix makes one batch more
and drops half."""
LEAST_STARVED = 6
"""Steps that starve before it is called one."""


def _in_some_steps(view: View, dropped: str | None) -> Finding | None:
    """Steps in which most of what is generated is dropped and generation takes longer at the same lengths, among others
    in which it is not: by the shard, or more and more often."""
    excess = excess_of(view)
    if dropped is None or excess is None:
        return None
    values, pace = view.values[dropped], view.values[excess]
    known = np.isfinite(values) & np.isfinite(pace)
    starved = known & (_share_of_made(view, dropped) >= MOST_DROPPED)
    if starved.sum() < max(LEAST_STARVED, 0.04 * view.n):
        return None
    then = float(np.median(values[starved]))
    calm = known & ~starved & (values <= 0.6 * then)
    if calm.sum() < 0.25 * view.n:
        return None
    usual = float(np.median(values[calm]))
    slower = float(np.median(pace[starved])) / float(np.median(pace[calm]))
    idx = int(np.flatnonzero(starved)[0])
    if then < 2.0 * usual or slower < 1.35 or _asks_for_no_more(view, idx):
        return None
    gen = view.values["timing_s/gen"]
    usual_s, then_s = float(np.nanmedian(gen[calm])), float(np.nanmedian(gen[starved]))
    cost = float(np.nansum(np.clip(gen[starved] * (1 - 1 / slower), 0, None))) * view.stride
    step, count = view.step_at(idx), int(starved.sum())
    return Finding(
        rule=RULE,
        title="the filter of flat groups drops most of what is generated in a part of the steps",
        area="data",
        confidence=0.85,
        step=step,
        evidence=(
            Evidence(
                metric=dropped,
                step=step,
                before=usual,
                after=then,
                says=f"{num(then)} dropped in {count} steps, {num(usual)} in the others",
            ),
            Evidence(
                metric="timing_s/gen",
                step=step,
                before=usual_s,
                after=then_s,
                says=f"{num(then_s)} s in those steps, {num(usual_s)} s in the others, at such lengths",
            ),
        ),
        cost_s=cost,
        action="sample prompts by difficulty across shards: leave out those that are solved always or never, or cap "
        "the refills",
        next_check="share of right answers by shard or source in one of those steps",
    )


def _share_of_made(view: View, dropped: str) -> Series:
    """[n] share of a step's generated samples that the filter drops; NaN where it cannot be told."""
    values = view.values[dropped]
    if dropped == "train/num_gen_batches":  # of a usual step half is kept at the least
        usual = max(float(np.nanquantile(values, 0.25)), 1.0)
        return np.asarray(1.0 - 0.65 / np.maximum(values / usual, 0.65))
    batch = batch_of(view, dropped)
    return np.asarray(values / (values + batch)) if np.isfinite(batch) else np.full(view.n, np.nan)


def _asks_for_no_more(view: View, idx: int) -> bool:
    """Whether a step generates as many responses as before: flat groups are then left out and nothing is made again,
    which is what a solved task looks like."""
    metric = "generated/num_trajectories"
    made = view.contrast(metric, idx, width=20)
    if made is None:
        return False
    return max(made.ratio, view.last(metric, 20) / max(made.before, 1.0)) < 1.15  # drops may grow from little


def _evicted(view: View) -> str | None:
    """Name of the groups dropped a step, 0 in the steps that say nothing of it; None where none was ever dropped."""
    values = view.values.get(EVICTED)
    if values is None or view.n < 3:
        return None
    return view.derive(f"{EVICTED}, all steps", np.nan_to_num(values))


def _dropped_share(view: View, dropped: str) -> float | None:
    """Late share of the generated samples that the filter drops; None when the batch size cannot be told."""
    late, batch = view.last(dropped), batch_of(view, dropped)
    known = (
        dropped != "train/num_gen_batches" and np.isfinite(batch) and np.isfinite(late) and late + batch > 0
    )
    return float(late / (late + batch)) if known else None


def batch_of(view: View, dropped: str) -> float:
    """What a step trains on, in the unit of what is dropped; NaN when it cannot be told."""
    batch = view.last("batch/num_groups" if dropped.startswith(EVICTED) else "batch/num_sequences")
    if np.isfinite(batch):
        return batch
    length, prompt = view.last("response_length/mean"), view.last("prompt_length/mean")
    tokens = view.last("perf/total_num_tokens")
    return tokens / (length + (prompt if np.isfinite(prompt) else 0.0))
