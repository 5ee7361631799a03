"""Which stages most deserve work: those that lost seconds against the plan, then those that take most of the step."""

from __future__ import annotations

from rollbook.planner.reconciliation import BUSY, NONE_PLANNED, Deserving, StageResult
from rollbook.planner.words import percent, seconds

NUM_DESERVING = 3


def deserving(stages: list[StageResult], step: StageResult) -> list[Deserving]:
    """Stages that took longer than planned by seconds lost; then those that take most of the step.

    Table, waterfall and this list judge by one thing, `StageResult.verdict`. What a stage waited for a core is nothing
    that work on it would win.
    """
    step_s = step.measured_s
    late = sorted((s for s in stages if s.own_beyond_s > 0.02 * step_s), key=lambda s: -s.own_beyond_s)
    chosen = [
        Deserving(stage=s.stage, seconds=s.own_beyond_s, why=_why_late(s, step)) for s in late[:NUM_DESERVING]
    ]
    taken = {d.stage for d in chosen}
    rest = sorted((s for s in stages if s.stage not in taken), key=lambda s: s.waited_s - s.measured_s)
    for s in rest[: NUM_DESERVING - len(chosen)]:
        chosen.append(Deserving(stage=s.stage, seconds=s.measured_s, why=_why_long(s, step)))
    return chosen


def _why_long(result: StageResult, step: StageResult) -> str:
    """Of a stage that lost little or nothing against the plan."""
    if result.own_beyond_s > 0:
        return _why_late(result, step)
    share = percent(result.measured_s / step.measured_s)
    if result.verdict == BUSY:
        return (
            f"{share} of the step, of which it waited {seconds(result.waited_s)} for a core: as planned without that "
            "(free the cores before you change it)"
        )
    return (
        f"{result.verdict}, and {share} of the step: to shorten it, change the plan "
        f"({_LEVERS.get(result.stage, 'its size')})"
    )


def _why_late(result: StageResult, step: StageResult) -> str:
    lever = _LOOK_AT.get(result.stage, "what it does")
    lost_s = result.beyond_s
    share = percent(lost_s / step.measured_s)
    if result.verdict == NONE_PLANNED and result.stage == "rollout":
        return (
            f"the trainer waits {seconds(result.measured_s)} for trajectories, none was planned, {share} of the step: "
            f"{_why_it_waits(step)}"
        )
    if result.expected is None or result.expected.is_none:
        return f"{seconds(result.measured_s)} that nobody planned, {share} of the step: look at {lever}"
    waited = (
        f", {seconds(result.waited_s)} of it waiting for a core" if result.waited_s > 0.1 * lost_s else ""
    )
    return (
        f"{seconds(result.measured_s)} where {seconds(result.expected.seconds)} were expected: "
        f"{seconds(lost_s)} lost, {share} of the step{waited}; look at {lever}"
    )


def _why_it_waits(step: StageResult) -> str:
    """Of a trainer that was planned to find its trajectories ready: the step takes as long as the slower side."""
    assert step.expected is not None
    if step.measured_s > step.expected.seconds:
        return (
            "the step is longer than planned, so the engines are likely slower, or their responses longer, than "
            f"planned; look at {_LOOK_AT['rollout']}"
        )
    return (
        "the step is no longer than planned, so the trainer is likely faster than planned and the engines set the "
        "pace; more of the GPUs could generate"
    )


_LOOK_AT = {
    "rollout": "response lengths against the plan's, slots in use, preemptions, environment seconds",
    "reward": "scorer time-outs and the number of workers",
    "proximal": "micro batch sizes and padding; it should take a third of training",
    "reference": "micro batch sizes, and whether the reference is offloaded",
    "values": "the critic's micro batches",
    "train": "micro batches that are not full, recomputation, gather of sharded weights",
    "critic": "the critic's micro batches",
    "sync": "bucket size, transport, and a replica that answers late",
    "checkpoint": "asynchronous saving, or a longer interval",
    "to_rollout": "pinned memory, and graphs captured again",
    "to_trainer": "pinned memory for the training state",
    "other": "what runs between the spans: logging, data loading, the interpreter",
}
_LEVERS = {
    "rollout": "asynchrony fills the tail, more replicas or float8 engines speed up decoding",
    "train": "fewer forwards, packing, more training GPUs",
    "proximal": "logprobs of the engine as the proximal ones need no forward",
    "reference": "no KL term needs no reference",
    "sync": "a delta, or publishing less often",
    "other": "after a log that times its stages",
}
