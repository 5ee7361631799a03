"""Plan against measurement: which stage lost which seconds, and where the peak of the step really went.

    plan.json, or a workload    ─►  Expectation ─┐
    expected_s/... of the run   ─►  its work ────┼─►  Reconciliation: stages, waterfall, what deserves work
    timing_s/... of a log       ─►  means a step ┘

Two causes are told apart. A step may have had other work than was planned (responses longer, groups filtered): the
run says what the ledger expects of the work each step got; of another system's log that is the account with the
lengths that it measured. And the machine may have been slower than the ledger says
for that work: this alone is a loss.

A stage's loss is its share of the step's GPU time beyond what its FLOPs need at peak. It splits into what the plan
expected to lose and what was lost beyond the plan; the shares of all stages, of uncovered time and the MFU add up
to one.
"""

from __future__ import annotations

from dataclasses import replace

from rollbook.observe.catalogue import STAGES, STAGES_OUTSIDE_STEP
from rollbook.planner.deserving import NUM_DESERVING, deserving
from rollbook.planner.expected import INSIDE_ROLLOUT, Expectation
from rollbook.planner.expected_work import as_timed, for_the_work, untimed, whole_step
from rollbook.planner.measured import Means
from rollbook.planner.reconciliation import MeasuredLoss, Reconciliation, StageResult
from rollbook.planner.words import percent


def reconcile(
    expectation: Expectation,
    means: Means,
    *,
    source: str,
    for_work: Expectation | None = None,
    first_step: int = 0,
    last_step: int = 0,
    num_steps: int = 1,
    left_out: tuple[int, ...] = (),
) -> Reconciliation:
    """Compare an expectation with mean measured seconds.

    Args:
        left_out: steps between the first and the last that the means do not hold.
        for_work: the same for the work that the steps really got, where `means` hold no `expected_s/...`.
    """
    before = as_timed(expectation, means)
    if for_work is None:
        expectation = for_the_work(before, means)
    else:
        expectation = replace(as_timed(for_work, means), notes=before.notes)
    stages = _stage_results(before, expectation, means)
    step_s = means["timing_s/step"]
    in_step = [s for s in stages if s.stage not in STAGES_OUTSIDE_STEP]
    step = StageResult(
        stage="step",
        measured_s=step_s,
        planned=whole_step(before),
        expected=whole_step(expectation),
        waited_s=sum(s.waited_s for s in in_step),
    )
    mfu_frac, losses = _waterfall(expectation, in_step, step_s)
    return Reconciliation(
        source=source,
        expectation=expectation,
        first_step=first_step,
        last_step=last_step,
        num_steps=num_steps,
        left_out=left_out,
        step=step,
        stages=tuple(stages),
        mfu_frac=mfu_frac,
        waterfall=tuple(losses),
        deserving=tuple(deserving(in_step, step)),
        notes=_of_the_machine(in_step, means)
        + _impossible(mfu_frac)
        + expectation.notes
        + tuple(_notes(expectation, stages)),
    )


_MOST_MFU_FRAC = 0.75
"""No job computes more of the peak: what was expected is not what was run."""


def _impossible(mfu_frac: float | None) -> tuple[str, ...]:
    if mfu_frac is None or mfu_frac <= _MOST_MFU_FRAC:
        return ()
    return (
        f"the expected work in the measured seconds would be {100 * mfu_frac:.0f} % of the peak, more than any job "
        "reaches: it is not the work, or not the GPUs, of this log",
    )


_VISIBLE_WAIT_FRAC = 0.05
"""Share of a step from which waiting for cores is worth a word."""
_OWN_CORE_FRAC = 0.8
"""Share of the cores' seconds from which a run that waits for them waits for itself."""


def _of_the_machine(stages: list[StageResult], means: Means) -> tuple[str, ...]:
    """That stages waited for a core: what they lost so no work on them wins back."""
    waited = sorted((s for s in stages if s.waited_s > 0), key=lambda s: -s.waited_s)
    if sum(s.waited_s for s in waited) < _VISIBLE_WAIT_FRAC * means["timing_s/step"]:
        return ()
    told = ", ".join(
        f"{s.stage} {percent(s.waited_s / s.measured_s)}"
        for s in waited[:NUM_DESERVING]
        if s.waited_s > _VISIBLE_WAIT_FRAC * s.measured_s
    )
    own_frac = means.get("host/own_core_frac", 0.0)
    if own_frac >= _OWN_CORE_FRAC:
        why = f"the run's own threads had {percent(own_frac)} of the cores' seconds: give it more, or fewer threads"
    else:
        why = f"the run itself used {percent(own_frac)} of them, others had the rest: measure again on a quiet machine"
    return (f"the machine was busy: stages waited for a core, of their seconds {told}; {why}",)


_NO_DIFFERENCE = 1e-3
"""Share of a step below which seconds are not worth a word."""


def _stage_results(before: Expectation, expectation: Expectation, means: Means) -> list[StageResult]:
    step_s = means["timing_s/step"]

    def result(stage: str, measured_s: float) -> StageResult:
        return StageResult(
            stage=stage,
            measured_s=measured_s,
            planned=before.stages.get(stage),
            expected=expectation.stages.get(stage),
            least_s=_NO_DIFFERENCE * step_s,
            waited_s=min(means.get(f"core_wait_s/{STAGES.get(stage, '')}", 0.0), measured_s),
        )

    found = []
    for stage, suffix in STAGES.items():
        measured = means.get(f"timing_s/{suffix}")
        if measured is None or (measured == 0 and stage not in expectation.stages):
            continue
        found.append(result(stage, measured))
    covered = sum(s.measured_s for s in found if s.stage not in STAGES_OUTSIDE_STEP)
    other = step_s - covered
    if other > _NO_DIFFERENCE * step_s:
        timed = {s.stage for s in found}
        found.append(
            replace(
                result("other", other),
                planned=untimed(before, timed),
                expected=untimed(expectation, timed),
            )
        )
    return found


def _waterfall(
    expectation: Expectation, stages: list[StageResult], step_s: float
) -> tuple[float | None, list[MeasuredLoss]]:
    """Losses in shares of the peak (or of the time, when the peak is not known), largest first."""
    peak, gpus = expectation.peak_flops_per_s, expectation.num_gpus
    # Where stages overlap they share the step among them.
    whole_s = max(step_s, sum(result.measured_s for result in stages))
    losses = []
    useful = expectation.hidden_rollout_flops
    for result in stages:
        planned = result.expected
        held = (planned.num_gpus if planned else _loop_gpus(expectation)) / gpus
        flops = planned.flops if planned else 0.0
        useful += flops
        ideal = flops / (peak * step_s) if peak else 0.0
        share = result.measured_s * held / whole_s
        # What the plan expected to lose, and no more than what was lost.
        beyond = min(result.beyond_s * held / whole_s, max(share - ideal, 0.0))
        losses.append(MeasuredLoss(loss=result.stage, frac=share - ideal, beyond_frac=beyond))
    if expectation.hidden_rollout_gpus:
        share = expectation.hidden_rollout_gpus / gpus
        ideal = expectation.hidden_rollout_flops / (peak * step_s)
        losses.append(MeasuredLoss(loss="rollout GPUs", frac=share - ideal, beyond_frac=0.0))
    mfu_frac = useful / (peak * step_s) if peak else None
    # Stages may hold a part of the GPUs: what nobody holds was idle.
    idle = 1 - (mfu_frac or 0.0) - sum(loss.frac for loss in losses)
    if idle > 1e-3:
        losses.append(MeasuredLoss(loss="idle", frac=idle, beyond_frac=0.0))
    return mfu_frac, sorted(losses, key=lambda loss: -loss.frac)


def _loop_gpus(expectation: Expectation) -> int:
    """GPUs that an unplanned stage of the step loop holds: all that are not a separate rollout side."""
    return expectation.num_gpus - expectation.hidden_rollout_gpus


def _notes(expectation: Expectation, stages: list[StageResult]) -> list[str]:
    measured = {s.stage for s in stages}
    silent = [n for n in expectation.stages if n not in measured | INSIDE_ROLLOUT | {"other"}]
    if not measured - {"other"}:
        return ["stages are not timed by the log: where a step's seconds went is not known"]
    return [f"planned but not timed by the log, and counted as other: {', '.join(silent)}"] if silent else []
