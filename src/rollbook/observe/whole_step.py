"""Where the peak of a step went: its MFU, and a share for what each stage lost, from seconds and counted FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollbook.observe.values import Ratio, Values


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step computed."""

    flops: Mapping[str, float]
    """Stage (a span's name) -> model FLOPs, without recomputation."""
    peak_flops_per_s: float
    """Of all devices together: a GPU's data sheet, or a processor's measured ceiling."""


def whole_step(work: Work, stage_s: Mapping[str, float], step_s: float) -> Values:
    """`perf/mfu/step` and `waterfall/<loss>`, which add up to 1.

    A stage loses the seconds that its FLOPs do not need at peak. Where generation goes on beside the other stages, it
    computes in their seconds: what it needs there is taken off what they lose, in proportion.

    Args:
        stage_s: measured seconds of the stages in the step loop; stages do not overlap each other.
        step_s: seconds of the step.
    """
    if step_s <= 0 or work.peak_flops_per_s <= 0 or not sum(work.flops.values()):
        return {}
    whole = work.peak_flops_per_s * step_s
    useful = sum(work.flops.values())
    needs_s = {stage: flops / work.peak_flops_per_s for stage, flops in work.flops.items()}
    lost_s = {stage: seconds - needs_s.get(stage, 0.0) for stage, seconds in stage_s.items()}
    lost_s["other"] = max(step_s - sum(stage_s.values()), 0.0)
    beside_s = -sum(seconds for seconds in lost_s.values() if seconds < 0)
    beside_s += sum(seconds for stage, seconds in needs_s.items() if stage not in stage_s)
    idle_s = sum(seconds for seconds in lost_s.values() if seconds > 0)
    left = max(1.0 - beside_s / idle_s, 0.0) if idle_s else 0.0
    values: Values = {"perf/mfu/step": Ratio(useful, whole)}
    values |= {
        f"waterfall/{stage}": Ratio(seconds * left, step_s)
        for stage, seconds in lost_s.items()
        if seconds > 0
    }
    return values
