"""Most groups are flat (all members right, or all wrong), the filter drops them, and generation runs again and again
to fill a batch. The seconds go where the dropped samples go."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose import signs
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.wording import num, of_break, share
from rollbook.diagnose.stops import stopped_by
from rollbook.diagnose.view import View

RULE = "filter_starvation"

DROPPED = ("training/filter_groups/evicted_samples", "filter/flat/num_groups", "train/num_gen_batches")
EVICTED = "evicted/flat/num_groups"
"""Groups that our own filter dropped; logged in the steps that have some."""
KEPT = ("filter/kept_frac", "batch/effective_frac")


def judge(view: View) -> Finding | NotJudged | None:
    dropped, kept = view.first(*DROPPED) or _evicted(view), view.first(*KEPT)
    starved = stopped_by(view, RULE)
    if dropped is None and kept is None and starved is None:
        return NotJudged(
            rule=RULE,
            missing=(DROPPED[0], KEPT[0]),
            collect="only with a filter of flat groups (DAPO): log how many samples it drops",
        )
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
    excess = signs.excess(view)
    slower = view.rise(excess)
    costs = slower is not None and slower.peak_ratio >= 1.4 and slower.idx >= idx - max(8, view.n // 10)
    grown, steadiness = view.trend(excess)
    costs |= grown >= 1.4 and steadiness >= 0.6  # with the drops, so slowly that no step stands out
    costs &= not _asks_for_no_more(view, idx)
    smaller = view.fall(view.first("batch/num_groups", "batch/num_sequences"))
    shrinks = smaller is not None and smaller.ratio <= 0.6 and smaller.score >= 5
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
    reward = view.last(signs.reward(view).metric or "", 10)
    side = ""
    if np.isfinite(reward):
        side = (
            " (most answers are right)"
            if reward > 0.6
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


def _asks_for_no_more(view: View, idx: int) -> bool:
    """Whether a step generates as many responses as before: flat groups are then left out and nothing is made again,
    which is what a solved task looks like."""
    made = view.contrast("generated/num_trajectories", idx, width=20)
    return made is not None and made.ratio < 1.15


def _evicted(view: View) -> str | None:
    """Name of the groups dropped a step, 0 in the steps that say nothing of it; None where none was ever dropped."""
    values = view.values.get(EVICTED)
    if values is None or view.n < 3:
        return None
    return view.derive(f"{EVICTED}, all steps", np.nan_to_num(values))


def _dropped_share(view: View, dropped: str) -> float | None:
    """Late share of the generated samples that the filter drops; None when the batch size cannot be told."""
    if dropped == "train/num_gen_batches":
        return None
    late = view.last(dropped)
    batch = view.last("batch/num_groups" if dropped.startswith(EVICTED) else "batch/num_sequences")
    if not np.isfinite(batch):
        length, prompt = view.last("response_length/mean"), view.last("prompt_length/mean")
        tokens = view.last("perf/total_num_tokens")
        batch = tokens / (length + (prompt if np.isfinite(prompt) else 0.0))
    return (
        float(late / (late + batch))
        if np.isfinite(batch) and np.isfinite(late) and late + batch > 0
        else None
    )
