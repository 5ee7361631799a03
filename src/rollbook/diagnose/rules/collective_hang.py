"""One rank stopped and the others wait in a collective: a trainer stage runs into its time-out, and the log ends."""

from __future__ import annotations

import numpy as np

from rollbook.diagnose import signs
from rollbook.diagnose.finding import Evidence, Finding, NotJudged
from rollbook.diagnose.rules.wording import num, share
from rollbook.diagnose.view import View

RULE = "collective_hang"


def judge(view: View) -> Finding | NotJudged | None:
    said = view.events("collective_timeout")
    stages = [f"timing_s/{s}" for s in signs.TRAINER_STAGES if view.has(f"timing_s/{s}")]
    evidence: list[Evidence] = []
    confidence = 0.0
    step = view.step_at(view.n - 1)
    if said:
        first = said[0]
        step = first.step if first.step is not None else step
        evidence.append(Evidence(metric="log", step=step, says=first.text))
        confidence = 0.9
    for event in view.events("open_span"):
        usual = view.level(f"timing_s/{event.fields.get('metric', event.text)}")
        open_s = float(event.fields.get("open_s", 0.0))
        if open_s >= max(60.0, 10 * usual if np.isfinite(usual) else 600.0) and event.text not in (
            "step",
            "rollout",
        ):
            says = f"stage {event.text} is open for {num(open_s)} s, {num(usual)} s is usual"
            evidence.append(Evidence(metric=f"timing_s/{event.text}", step=event.step or step, says=says))
            confidence = max(confidence, 0.85)
    if not view.has(f"{signs.STALENESS}/mean") and not view.family("buffer/"):
        stages.append("timing_s/gen")  # in an asynchronous run that one is a wait for samples
    for stage in [s for s in stages if view.has(s)]:
        found = _stalls_at_end(view, stage)
        if found is None:
            continue
        idx, usual, seconds = found
        says = f"{num(seconds)} s in step {view.step_at(idx)}, {num(usual)} s is usual"
        evidence.append(
            Evidence(metric=stage, step=view.step_at(idx), before=usual, after=seconds, says=says)
        )
        step = min(step, view.step_at(idx))
        confidence = max(confidence, 0.8) if not said else 0.97
    if not evidence:
        return (
            None
            if stages or said
            else NotJudged(
                rule=RULE,
                missing=("timing_s/update_actor", "timing_s/old_log_prob", "timing_s/update_weights"),
                collect="log the seconds of each trainer stage, and keep the console log (the watchdog writes there)",
            )
        )
    imbalance = view.contrast("global_seqlen/minmax_diff", view.idx_of(step))
    if imbalance is not None and imbalance.ratio >= 3:
        says = "tokens of the ranks differ more than before"
        evidence.append(
            Evidence(
                metric="global_seqlen/minmax_diff",
                step=step,
                before=imbalance.before,
                after=imbalance.after,
                says=says,
            )
        )
    stalled = [e.after - e.before for e in evidence if e.after is not None and e.before is not None]
    return Finding(
        rule=RULE,
        title="a collective hangs: one rank does not take part",
        area="implementation",
        confidence=share(confidence),
        step=step,
        evidence=tuple(evidence),
        cost_s=float(sum(stalled)) if stalled else None,
        action="dump the stacks of all ranks (py-spy, or TORCH_NCCL_TRACE_BUFFER_SIZE) before killing "
        "the job; the rank that is "
        "elsewhere is the cause: fewer micro batches, an exception, a dead host",
        next_check="number of micro batches per rank in that step, and the kernel log of each host",
    )


def _stalls_at_end(view: View, stage: str) -> tuple[int, float, float] | None:
    """(position, usual seconds, seconds) of a stage that takes many times its usual time in the last three steps."""
    values = view.values[stage]
    known = np.flatnonzero(np.isfinite(values))
    if len(known) < 6:
        return None
    past = values[known[:-3]]
    usual, largest = float(np.median(past)), float(np.max(past))
    for idx in known[-3:]:
        if values[idx] >= max(6 * usual, 3 * largest, usual + 90.0):
            return int(idx), usual, float(values[idx])
    top = int(known[np.argmax(values[known])])
    if values[top] >= max(15 * usual, usual + 500.0):  # it timed out, and the run was started again
        return top, usual, float(values[top])
    return None
