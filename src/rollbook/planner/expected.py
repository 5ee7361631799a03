"""What was expected of a step, stage by stage: a run's own plan, or the ledger's account of a described workload."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollbook.errors import ConfigError, DataError
from rollbook.ledger.account import StepAccount
from rollbook.ledger.hardware import MachineSpec
from rollbook.ledger.step import is_colocated
from rollbook.observe.catalogue import STAGES_OUTSIDE_STEP
from rollbook.observe.run_dir import CONFIG, PLAN
from rollbook.planner.beside import moves_of
from rollbook.planner.candidate import Candidate
from rollbook.planner.request import PAPER_HAS_NO_RANGE, PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.words import percent

INSIDE_ROLLOUT = frozenset({"reward"})
"""Planned for, but hidden behind generation: not part of the expected step."""

_NONE_S = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What was expected of one stage of a step."""

    seconds: float
    low: float
    high: float
    flops: float = 0.0
    num_gpus: int = 1
    """GPUs that the stage holds."""

    @property
    def is_none(self) -> bool:
        """Whether no time was expected: zero, or what rounding left of a difference of seconds."""
        return self.seconds < _NONE_S

    @property
    def has_range(self) -> bool:
        """Whether it says how far it may be off."""
        return self.high > self.low


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What was expected of a step, by stage."""

    source: str
    stages: dict[str, Expected]
    step_s: float
    num_gpus: int = 1
    peak_flops_per_s: float = 0.0
    """Of all GPUs; 0 when unknown."""
    hidden_rollout_gpus: int = 0
    """GPUs of a rollout side that works beside the trainer, whose stages no step loop times."""
    hidden_rollout_flops: float = 0.0
    hand_over_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of a step's hand-overs by the stage inside which they happen, for logs that do not time them apart."""
    notes: tuple[str, ...] = ()


def is_in_step(stage: str) -> bool:
    """Whether its seconds add to the step's: not inside another stage, nor outside of steps."""
    return stage not in INSIDE_ROLLOUT and stage not in STAGES_OUTSIDE_STEP


def expectation_of_run(folder: Path) -> Expectation:
    """From a run directory's `plan.json`.

    Raises:
        DataError: there is none, or it has no stages.
    """
    path = folder / PLAN
    try:
        plan = json.loads(path.read_text())
        entries: dict[str, dict[str, Any]] = plan["stages"]
    except OSError:
        raise DataError(
            f"{folder} has no {PLAN}: the run was not planned",
            "run with plan.is_on = true, or give --workload with the model, GPUs and lengths",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no plan: {error!r}", "give --workload instead") from None
    stages = {
        name: Expected(
            seconds=float(entry["seconds"]),
            low=float(entry["low"]),
            high=float(entry["high"]),
            flops=float(entry.get("flops", 0.0)),
        )
        for name, entry in entries.items()
        if name != "step"
    }
    step = entries.get("step")
    step_s = (
        float(step["seconds"])
        if step is not None
        else sum(e.seconds for name, e in stages.items() if is_in_step(name))
    )
    peak, note = _peak_of_run(folder, plan)
    notes = tuple(note for note in (_busy_then(plan), note) if note)
    return Expectation(source=str(path), stages=stages, step_s=step_s, peak_flops_per_s=peak, notes=notes)


_VISIBLE_WAIT_FRAC = 0.25
"""Share of the measuring of a plan from which waiting for cores is worth a word."""


def _busy_then(plan: Mapping[str, Any]) -> str:
    """That a plan was measured while others had the cores, so that it expects too many seconds."""
    frac = plan.get("core_wait_frac")
    if not isinstance(frac, int | float) or frac < _VISIBLE_WAIT_FRAC:
        return ""
    return (
        f"the plan was measured on a busy machine: a thread waited for a core {percent(frac)} of that time, so stages "
        "may be faster than planned for that alone; plan again on a quiet one"
    )


def _peak_of_run(folder: Path, plan: Mapping[str, Any]) -> tuple[float, str]:
    """The machine's best GEMM rate: from the plan, or from the hardware.toml its config names."""
    machine = plan.get("machine")
    if isinstance(machine, dict) and isinstance(machine.get("peak_flops_per_s"), int | float):
        return float(machine["peak_flops_per_s"]), ""
    try:
        config = tomllib.loads((folder / CONFIG).read_text())
        hardware = str(config.get("plan", {}).get("hardware", ""))
        spec = MachineSpec.read(Path(hardware)) if hardware else None
    except (OSError, tomllib.TOMLDecodeError, ConfigError):
        spec = None
    if spec is None or not spec.gemm_flops_per_s:
        return 0.0, "the machine's peak is not known: losses are shares of the step's time"
    rates = spec.gemm_flops_per_s
    return float(rates.get(spec.dtype, max(rates.values()))), ""


def expectation_of_request(request: PlanRequest, *, mode: str = "sync") -> tuple[Expectation, Candidate]:
    """From a workload's description: the ledger's account of the named topology.

    Raises:
        PlanError: an unknown mode, or a separated one without a split.
    """
    request.check()
    search = Search(request)
    gpus = request.cluster.num_gpus
    if mode in ("sync", "colocate_async"):
        candidate = search.candidate(mode, gpus, gpus)  # type: ignore[arg-type]
    else:
        if request.split is None:
            raise ConfigError(f"mode is {mode!r} without a split", 'add split = "rollout:train" GPUs')
        candidate = search.candidate(mode, *request.split)  # type: ignore[arg-type]
    account = candidate.account
    r = request.workload
    reference_and_proximal = account.flops.reference + account.flops.proximal
    name = (
        f"{request.model.name} on {gpus} {request.cluster.accelerator.name}, {mode}, "
        f"assumptions {request.assumptions.name}"
    )
    notes = list(candidate.why_not)
    if request.assumptions.method == "paper":
        notes.append(PAPER_HAS_NO_RANGE)
    if candidate.idle_state == "device" and request.idle_state == "auto":
        notes.append(
            "hand-overs are expected with the training state on the devices, where it fits beside the engines "
            '(idle_state = "host": it waits in host memory)'
        )
    if not reference_and_proximal and account.seconds.forward and r.algorithm == "grpo":
        notes.append("forward passes are planned as one stage")
    beside = mode == "separate_async"
    return (
        Expectation(
            source=name,
            stages=_stages(request, account),
            step_s=account.seconds.total,
            num_gpus=account.num_gpus,
            peak_flops_per_s=account.num_gpus * request.cluster.accelerator.peak("bfloat16"),
            hidden_rollout_gpus=account.rollout.num_gpus if beside else 0,
            hidden_rollout_flops=account.flops.generate + account.flops.prefill if beside else 0.0,
            hand_over_s=_hand_over_s(request, candidate),
            notes=tuple(notes),
        ),
        candidate,
    )


def _stages(request: PlanRequest, account: StepAccount) -> dict[str, Expected]:
    s, f = account.seconds, account.flops
    rollout_error, train_error = account.rollout.error_frac, account.train.error_frac
    has_range = account.step_s.high > account.step_s.low  # the paper account has none
    other_error = max(account.stage_error_frac.get("sync", 0.0), 0.5) if has_range else 0.0
    train_gpus, everyone = account.train.num_gpus, account.num_gpus
    parts: dict[str, tuple[float, float, float, int]] = {}
    rollout_s = s.prefill + s.generate_throughput + s.generate_tail
    if account.mode == "separate_async":
        # The step loop times its own wait for groups, on the training GPUs.
        parts["rollout"] = (
            max(s.total - account.train.total_s - s.sync - s.other, 0.0),
            0.0,
            rollout_error,
            train_gpus,
        )
    else:
        gpus = everyone if is_colocated(account.mode) else account.rollout.num_gpus
        # A reward model that writes its verdict is served by the same engines.
        verdicts = f.reward_model if s.reward else 0.0
        parts["rollout"] = (
            rollout_s + s.env + s.reward,
            f.generate + f.prefill + verdicts,
            rollout_error,
            gpus,
        )
    forwards = {
        "proximal": f.proximal,
        "reference": f.reference,
        "reward": 0.0 if s.reward else f.reward_model,
        "values": f.critic_values,
    }
    total = sum(forwards.values())
    for name, flops in forwards.items():
        if flops:
            parts[name] = (s.forward * flops / total, flops, train_error, train_gpus)
    policy_share = f.train / (f.train + f.critic - f.critic_values)
    parts["train"] = (s.train * policy_share, f.train, train_error, train_gpus)
    if f.critic:
        parts["critic"] = (s.train * (1 - policy_share), f.critic - f.critic_values, train_error, train_gpus)
    if s.switch:
        parts["to_trainer"] = (s.switch / 2, 0.0, other_error, everyone)
        parts["to_rollout"] = (s.switch / 2, 0.0, other_error, everyone)
    parts["sync"] = (s.sync, 0.0, other_error, everyone if account.mode != "separate_async" else train_gpus)
    if s.other:
        parts["other"] = (
            s.other,
            0.0,
            other_error,
            everyone if account.mode != "separate_async" else train_gpus,
        )
    return {
        name: Expected(
            seconds=value, low=value / (1 + error), high=value * (1 + error), flops=flops, num_gpus=gpus
        )
        for name, (value, flops, error, gpus) in parts.items()
    }


_HELD_BY = {
    "engine sleeps": "rollout",
    "training state to device": "train",
    "training state to host": "train",
    "frozen models to device": "reference",
}
"""Moves of a hand-over by the stage inside which verl 0.9 makes them: engines sleep at the end of its `gen`, the
trainer loads and offloads around its updates, and everything that wakes engines is part of `update_weights`."""


def _hand_over_s(request: PlanRequest, candidate: Candidate) -> dict[str, float]:
    held: dict[str, float] = {}
    for move in moves_of(request, candidate):
        stage = _HELD_BY.get(move.name, "sync")
        held[stage] = held.get(stage, 0.0) + move.seconds
    return held
