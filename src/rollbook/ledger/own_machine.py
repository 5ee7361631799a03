"""A plan for this machine's processor: the seconds that `rollbook calibrate` measured of the planned model on it.

Ceilings of a processor say little of a small model, whose step is the interpreter's and the operators' launches.
Where `calibrate` was given the run's config, its `hardware.toml` holds the seconds of that model's own engine and
trainer, and a plan takes those, as the run itself does. Where it was not, the plan says so, and its ranges are wide.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.entry import Entry
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.predict import StepWork, stages_after_rollout
from rollbook.ledger.workload import Workload

_WIDTH_OF_CEILINGS = 20.0
"""Times that a range is wider where the machine alone was measured: steps of models of 0.1 to 1 million parameters took
3 to 15 times what the ceilings give."""
_FORWARDS = ("proximal", "reference", "values")
_HOST = ("pack", "adv", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTraining:
    """Seconds of one step's trainer."""

    forward_s: float
    train_s: float


def own_training_s(
    model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions, *, num_gpus: int
) -> OwnTraining | None:
    """Forwards and updates of a step divided over `num_gpus`; None where the model was not measured here."""
    stages = _stages(model, workload, cluster, assumptions)
    if not stages:
        return None
    forward_s = sum(stages[name].seconds for name in _FORWARDS if name in stages)
    train_s = sum(stages[name].seconds for name in ("train", "critic") if name in stages)
    return OwnTraining(forward_s=forward_s / num_gpus, train_s=train_s / num_gpus)


def own_host_s(model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions) -> float:
    """Seconds of a step that the interpreter takes: asking for trajectories and scoring them, packing, reports.

    0 where they were not measured.
    """
    machine = cluster.accelerator.fitted
    if machine is None:
        return 0.0
    stages = _stages(model, workload, cluster, assumptions)
    scoring_s = machine.reward_base_s + workload.num_sequences * machine.reward_s
    return scoring_s + sum(stages[name].seconds for name in _HOST if name in stages)


def own_seconds_note(cluster: Cluster) -> list[str]:
    """Why a plan for a processor is not to be trusted; empty where the model was measured on it."""
    if cluster.accelerator.fitted is not None:
        return []
    return [
        f"{cluster.accelerator.name} was measured without this model: its engine and trainer take longer than the "
        "processor's ceilings say, small models many times as long; `rollbook calibrate CONFIG` with the run's config "
        "measures them"
    ]


def own_seconds_width(cluster: Cluster) -> float:
    """By which the range of a stage is wider on a processor that was measured without the model."""
    accelerator = cluster.accelerator
    return _WIDTH_OF_CEILINGS if accelerator.is_cpu and accelerator.fitted is None else 1.0


def _stages(
    model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions
) -> dict[str, Entry]:
    machine = cluster.accelerator.fitted
    if machine is None:
        return {}
    longest = workload.prompt_tokens + workload.max_response_tokens + workload.observation_tokens
    work = StepWork(
        num_groups=workload.num_prompts,
        group_size=workload.group_size,
        prompt_tokens=workload.prompt_tokens + workload.observation_tokens,
        lengths=workload.lengths(),
        num_slots=1,  # of generation, which is not asked about
        micro_batch_tokens=max(assumptions.micro_batch_tokens, round(longest)),
        num_mini_batches=workload.num_mini_batches,
        num_epochs=workload.num_epochs,
        uses_proximal=workload.uses_proximal,
        uses_reference=workload.uses_reference,
        uses_critic=workload.algorithm == "ppo",
    )
    return stages_after_rollout(model, machine, work)
