"""Seconds of every stage of one of our own steps, on a machine that was calibrated.

    predict_stages    before the run: from means and a distribution of lengths
    rollout_of        of one step, from the lengths that its responses had
    update_s          of one step, from the micro batches and tokens that its updates had

The first is the plan. The others price what a step really had to do with the same coefficients, so that
`rollbook reconcile` can tell other work from a slower machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import PlanError
from rollbook.ledger.curve import draw_lengths, row_curve
from rollbook.ledger.entry import Entry, entry
from rollbook.ledger.hardware import Contention, DecodeFit, HostFit, MachineSpec, PassFit, TrainFit
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import ModelSpec

_NUM_DRAWS = 16
_FLOOR_ERROR_FRAC = 0.10
"""Width of the interval when fit and draw add nothing: repeat runs of one machine differ by this much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """One step of our loop, in numbers known before it runs. Tokens are means unless they say otherwise."""

    num_groups: int
    group_size: int
    prompt_tokens: float
    lengths: LengthDistribution
    """Response lengths."""
    num_slots: int
    """Sequences that one replica runs at once."""
    num_replicas: int = 1
    shares_prompt: bool = True
    """Members of a group share one prefill of their prompt."""
    first_token_from_prefill: bool = False
    """The first response token comes out of the prefill, so n tokens take n - 1 decode steps. The native engine
    prefills all but the last prompt token and takes n."""
    max_prefill_tokens: int = 4096
    """Most prompt tokens of one prefill call."""
    micro_batch_tokens: int
    num_mini_batches: int = 1
    num_epochs: int = 1
    shares_prompt_in_training: bool = True
    """The trainer computes a group's prompt once."""
    trained_frac: float = 1.0
    """Share of the sequences that reach the trainer after filters."""
    uses_proximal: bool = True
    uses_reference: bool = False
    uses_critic: bool = False
    uses_teacher: bool = False
    """A teacher beside the policy gives logprobs, on the trainer's own device."""
    most_running: int = 0
    """Sequences under way at most where engines run ahead, so that a slot which comes free is refilled from the next
    step; 0: every step ends with its own."""
    generates_beside: bool = False
    """Engines go on while the trainer works."""
    param_bytes: float = 4.0
    """Of one published parameter."""
    trained_params: float = 0.0
    """That the optimizer moves, such as those of adapters; 0: all of the model."""
    published_params: float = 0.0
    """Of one publication to one replica: all of them, or of adapters alone; 0: all of the model."""

    def __post_init__(self) -> None:
        for name in ("trained_params", "published_params"):
            if getattr(self, name) < 0:
                raise PlanError(f"{name} is {getattr(self, name)}", f"give {name} of 0 (all) or more")
        for name in ("num_groups", "group_size", "num_slots", "num_replicas", "micro_batch_tokens"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", f"give {name} of at least 1")
        if not 0 <= self.trained_frac <= 1:
            raise PlanError(f"trained_frac is {self.trained_frac}", "give a fraction between 0 and 1")

    @property
    def num_sequences(self) -> int:
        return self.num_groups * self.group_size

    @property
    def unit_tokens(self) -> float:
        """Tokens that the model computes for a group that shares its prompt, or for one sequence.

        The last token of a sequence predicts nothing and is not computed.
        """
        own = self.lengths.mean_tokens - 1
        return self.prompt_tokens + (self.group_size if self.shares_prompt_in_training else 1) * own

    @property
    def computed_tokens(self) -> float:
        """Tokens of one pass of the trainer over the step."""
        units = self.num_groups if self.shares_prompt_in_training else self.num_sequences
        return units * self.trained_frac * self.unit_tokens


def predict_stages(model: ModelSpec, machine: MachineSpec, work: StepWork) -> dict[str, Entry]:
    """Entries of one step by span name: rollout, reward, proximal, reference, teacher, values, train, critic, sync;
    pack, adv and other where the host was measured.

    Where engines generate beside the trainer, both sides take longer by the measured contention, and "rollout" is
    what the step loop waits: what generating a step takes beyond everything else.

    Stages that the step does not have are absent. No stage of the device is expected to take less than the launches
    of its operators.

    Raises:
        PlanError: the machine was measured without this model.
    """
    if machine.decode is None or machine.train is None:
        raise PlanError(
            f"{machine.name} was calibrated without a model", "run `rollbook calibrate` with the run's config"
        )
    source = _source(machine)
    rollout = _rollout(model, machine.decode, work, source)
    rollout = _at_least(rollout, _launches_s(model, machine) * work.lengths.mean_tokens)
    stages = {"rollout": rollout, "reward": _reward(machine, work)} | stages_after_rollout(
        model, machine, work
    )
    if not work.generates_beside:
        return stages
    return _side_by_side(
        stages,
        machine.contention or Contention(),
        has_full_slots=work.most_running - work.num_sequences >= work.num_slots * work.num_replicas,
        probe_s=machine.sync_base_s,
    )


def stages_after_rollout(model: ModelSpec, machine: MachineSpec, work: StepWork) -> dict[str, Entry]:
    """`predict_stages` without generation and scoring, and as if nothing else ran."""
    source = _source(machine)
    forwards = {
        "proximal": work.uses_proximal,
        "reference": work.uses_reference,
        "teacher": work.uses_teacher and "teacher" in machine.passes,
        "values": work.uses_critic,
    }
    stages = [_forward(name, model, machine, work, source) for name, is_made in forwards.items() if is_made]
    stages.append(_train("train", model, machine, work, source))
    if work.uses_critic:
        stages.append(_train("critic", model, machine, work, source))
    if machine.host is not None:
        stages += _host(machine.host, work, source)
    stages.append(_sync(model, machine, work, source))
    return {stage.name: stage for stage in stages}


def _source(machine: MachineSpec) -> str:
    return f"rollbook calibrate: {machine.name}, {machine.model}, {machine.dtype}"


def rollout_wait_s(generation_s: float, beside_s: float, contention: Contention) -> float:
    """Seconds that the step loop waits for a step's responses, which engines alone generate in `generation_s`, after
    it did something else for `beside_s`."""
    return max(generation_s - beside_s / contention.engine, 0.0)


def _side_by_side(
    stages: dict[str, Entry], contention: Contention, *, has_full_slots: bool, probe_s: float
) -> dict[str, Entry]:
    """What the step loop sees of sides that work at the same time. While the loop waits, the engines are alone. They do
    not wait for requests to be made and responses scored: others run meanwhile. Engines that are waited for and have
    every slot taken by later steps are not probed."""
    slower = {name: stage.scaled(contention.of(name)) for name, stage in stages.items()}
    rollout = stages["rollout"]

    def beside() -> float:
        """Seconds of all other stages."""
        return sum(stage.seconds for name, stage in slower.items() if name not in ("rollout", "reward"))

    if has_full_slots and rollout_wait_s(rollout.seconds, beside(), contention) > 0:
        slower["sync"] = slower["sync"].at(slower["sync"].seconds - probe_s * contention.publication)
    trainer_s = beside()
    wait_s = rollout_wait_s(rollout.seconds, trainer_s, contention)
    beside_s = trainer_s / contention.engine
    slower["rollout"] = replace(
        rollout,
        seconds=wait_s,
        seconds_low=0.0,
        seconds_high=max(rollout.seconds_high - beside_s, wait_s, _FLOOR_ERROR_FRAC * trainer_s),
        formula=f"wait of the step loop: ({rollout.formula}), less all other stages / contention",
    )
    slower["reward"] = stages["reward"].scaled(0.0)  # within what is generated beside
    return slower


def rollout_of(
    model: ModelSpec, machine: MachineSpec, work: StepWork, lengths: Sequence[int]
) -> tuple[float, float]:
    """Seconds of decoding and prefilling, and of the host's share, for responses of these `lengths` in the order of
    their admission."""
    if machine.decode is None:
        raise PlanError(
            f"{machine.name} was calibrated without a model", "run `rollbook calibrate` with the run's config"
        )
    engine_s = _engine_s(machine.decode, work, np.asarray(lengths, np.int64))
    engine_s = max(engine_s, _launches_s(model, machine) * float(np.mean(lengths)))
    return engine_s, machine.reward_base_s + len(lengths) * machine.reward_s


def refilled_ratio(fit: DecodeFit, work: StepWork, lengths: Sequence[int]) -> float:
    """By how much longer engines that run ahead take for responses of these `lengths` than for the planned ones: their
    slots are full, so every token has its share of a decode step, and each response reads its prompt once."""
    rows = min(work.num_slots, math.ceil(work.most_running / work.num_replicas))
    prompts = work.prompt_tokens / (work.group_size if work.shares_prompt else 1)

    def response_s(mean: float, mean_square: float) -> float:
        token_s = fit.base_s / rows + fit.per_row_s + fit.per_row_token_s * work.prompt_tokens
        read_s = prompts / fit.prefill_tokens_per_s
        return token_s * mean + fit.per_row_token_s * mean_square / 2 + read_s

    got = np.asarray(lengths, np.float64)
    planned_s = response_s(work.lengths.mean_tokens, work.lengths.mean_square())
    return response_s(float(got.mean()), float((got**2).mean())) / planned_s


def update_s(
    model: ModelSpec,
    machine: MachineSpec,
    work: StepWork,
    *,
    num_micro_batches: float,
    num_tokens: float,
    num_updates: float,
) -> float:
    """Seconds of the policy's forwards, backwards and optimizer updates."""
    fit = _train_fit(machine)
    pass_s = fit.per_micro_batch_s * num_micro_batches + num_tokens / fit.tokens_per_s
    seconds = pass_s + num_updates * fit.optimizer_s_per_param * _trained_params(model, work, "train")
    return max(seconds, 3 * num_micro_batches * _launches_s(model, machine)) + _call_s(machine, num_tokens)


def _call_s(machine: MachineSpec, num_tokens: float) -> float:
    """Seconds that a batch and its answer are on their way between the loop and a trainer in other processes."""
    return 0.0 if machine.call is None else machine.call.seconds(num_tokens)


_FORWARD_OPERATORS = 8
"""Least operators of one layer: two norms, four products, attention, activation. A backward has twice as many."""


def _launches_s(model: ModelSpec, machine: MachineSpec) -> float:
    """Seconds that launching one forward takes, whatever the work."""
    return model.num_layers * _FORWARD_OPERATORS * machine.launch_s


def _at_least(stage: Entry, least_s: float) -> Entry:
    """`stage`, raised to `least_s` where a fit on noise came out below."""
    if stage.seconds >= least_s:
        return stage
    return replace(
        stage,
        seconds=least_s,
        seconds_low=min(stage.seconds_low, least_s),
        seconds_high=max(stage.seconds_high, least_s * (1 + _FLOOR_ERROR_FRAC)),
        formula=f"{stage.formula}; at least the launches of its operators",
    )


def _host(host: HostFit, work: StepWork, source: str) -> list[Entry]:
    """Stages of the interpreter: seconds of a trajectory x trajectories."""
    num_trained = work.num_sequences * work.trained_frac
    seconds = {
        "pack": host.pack_base_s + host.pack_s * num_trained,
        "adv": host.advantage_base_s + host.advantage_s * num_trained,
        "other": host.report_s * work.num_sequences + host.report_trained_s * num_trained + host.texts_s,
    }
    formula = "base + host seconds of a trajectory x trajectories"
    return [
        entry(name, value, error_frac=0.5, formula=formula, source=source) for name, value in seconds.items()
    ]


def _rollout(model: ModelSpec, fit: DecodeFit, work: StepWork, source: str) -> Entry:
    """Sum of the decode steps over the curve of running rows, the slowest replica of a typical draw."""
    draws = [
        _refilled_s(fit, work, seed)
        if work.most_running
        else _engine_s(fit, work, draw_lengths(work.lengths, work.num_sequences, seed))
        for seed in range(_NUM_DRAWS)
    ]
    seconds = float(np.mean(draws))
    spread = float(np.std(draws)) / seconds if seconds > 0 else 0.0
    tokens = work.num_sequences * work.lengths.mean_tokens
    prompts = work.num_groups if work.shares_prompt else work.num_sequences
    return entry(
        "rollout",
        seconds,
        error_frac=math.hypot(_FLOOR_ERROR_FRAC, fit.error_frac, 1.64 * spread),
        flops=2.0 * model.matmul_params * (tokens + prompts * work.prompt_tokens),
        formula=(
            "sum over decode steps of base + per_row x rows + per_row_token x context, rows and context from "
            "the length distribution through the slots; + prefill calls x base + prompt tokens / rate"
        ),
        source=source,
    )


_NUM_STEPS_AHEAD = 8
"""Steps that are generated as one stream to see what one of them costs once slots are refilled."""


def _refilled_s(fit: DecodeFit, work: StepWork, seed: int) -> float:
    """Seconds of generating one step of many, where only the last one of all has a tail."""
    running = math.ceil(work.most_running / work.num_replicas)
    stream = replace(work, num_slots=min(work.num_slots, running))
    one, many = (
        _engine_s(fit, stream, draw_lengths(work.lengths, work.num_sequences * num_steps, seed))
        for num_steps in (_NUM_STEPS_AHEAD, 2 * _NUM_STEPS_AHEAD)
    )
    return max(many - one, 0.0) / _NUM_STEPS_AHEAD


def _engine_s(fit: DecodeFit, work: StepWork, lengths: NDArray[np.int64]) -> float:
    """Decode steps and prefills of the slowest replica, for responses of these lengths."""
    per_replica = math.ceil(len(lengths) / work.num_replicas)
    steps = lengths - int(work.first_token_from_prefill)
    slowest = 0.0
    for replica in range(work.num_replicas):
        mine = steps[replica * per_replica : (replica + 1) * per_replica]
        if len(mine) == 0:
            continue
        curve = row_curve(mine, work.num_slots)
        context = curve.response_tokens + curve.rows * work.prompt_tokens
        decode_s = (
            fit.base_s * curve.num_steps
            + fit.per_row_s * float(curve.rows.sum())
            + fit.per_row_token_s * float(context.sum())
        )
        num_prompts = len(mine) / (work.group_size if work.shares_prompt else 1)
        prompt_tokens = num_prompts * (work.prompt_tokens - (not work.first_token_from_prefill))
        num_calls = max(curve.num_admissions, math.ceil(prompt_tokens / work.max_prefill_tokens))
        prefill_s = fit.prefill_base_s * num_calls + prompt_tokens / fit.prefill_tokens_per_s
        slowest = max(slowest, decode_s + prefill_s)
    return slowest


def _reward(machine: MachineSpec, work: StepWork) -> Entry:
    return entry(
        "reward",
        machine.reward_base_s + work.num_sequences * machine.reward_s,
        error_frac=0.5,
        formula="base + trajectories x seconds of one",
        source=f"rollbook calibrate: {machine.name}",
    )


_BEST_FIT_FILL = 0.9
"""Share of the token budget that best-fit packing fills when units of several sizes go into a micro batch."""


def _micro_batches(work: StepWork, num_mini_batches: int) -> int:
    """Micro batches of a step: whole ones per mini batch.

    A unit is what packing keeps together: a group that shares its prompt, or one sequence. Equal units leave the
    budget's remainder empty; sizes that differ fill at least nine tenths of it.
    """
    unit = work.unit_tokens
    per_bin = work.micro_batch_tokens / unit
    fill = (
        max(math.floor(per_bin) / per_bin, _BEST_FIT_FILL if per_bin >= 2 else 0.0) if per_bin >= 1 else 1.0
    )
    tokens = work.computed_tokens / num_mini_batches
    return num_mini_batches * max(math.ceil(tokens / (work.micro_batch_tokens * fill) - 1e-9), 1)


def _forward(name: str, model: ModelSpec, machine: MachineSpec, work: StepWork, source: str) -> Entry:
    fit, num_micro = _train_fit(machine), _micro_batches(work, 1)
    of_policy = PassFit(
        per_micro_batch_s=fit.forward_per_micro_batch_s, tokens_per_s=fit.forward_tokens_per_s
    )
    own = machine.passes.get(name, of_policy)
    stage = entry(
        name,
        own.per_micro_batch_s * num_micro + work.computed_tokens / own.tokens_per_s,
        error_frac=math.hypot(_FLOOR_ERROR_FRAC, fit.error_frac),
        flops=2.0 * model.matmul_params * work.computed_tokens,
        formula="per_micro_batch x micro batches + tokens / forward rate",
        source=source,
    )
    return _called(_at_least(stage, num_micro * _launches_s(model, machine)), machine, work)


def _called(stage: Entry, machine: MachineSpec, work: StepWork) -> Entry:
    """`stage` of the trainer, as the loop sees it: with the way there and back."""
    call_s = _call_s(machine, work.computed_tokens)
    if not call_s:
        return stage
    return replace(
        stage,
        seconds=stage.seconds + call_s,
        seconds_low=stage.seconds_low + call_s,
        seconds_high=stage.seconds_high + call_s,
        formula=f"{stage.formula}; + the call of another process",
    )


def _train_fit(machine: MachineSpec) -> TrainFit:
    assert machine.train is not None
    return machine.train


def _train(name: str, model: ModelSpec, machine: MachineSpec, work: StepWork, source: str) -> Entry:
    """Span "train" for the policy and "critic", whose optimizer has as many parameters."""
    fit, num_micro = _train_fit(machine), _micro_batches(work, work.num_mini_batches)
    updates = work.num_epochs * work.num_mini_batches
    trained = _trained_params(model, work, name)
    of_policy = PassFit(per_micro_batch_s=fit.per_micro_batch_s, tokens_per_s=fit.tokens_per_s)
    own = machine.passes.get(name, of_policy)
    pass_s = own.per_micro_batch_s * num_micro + work.computed_tokens / own.tokens_per_s
    stage = entry(
        name,
        work.num_epochs * pass_s + updates * fit.optimizer_s_per_param * trained,
        error_frac=math.hypot(_FLOOR_ERROR_FRAC, fit.error_frac),
        flops=_train_flops_per_token(model, work, name) * work.computed_tokens * work.num_epochs,
        formula=(
            "epochs x (per_micro_batch x micro batches + tokens / rate) + updates x trained parameters x optimizer "
            "seconds"
        ),
        source=source,
    )
    stage = _at_least(stage, 3 * work.num_epochs * num_micro * _launches_s(model, machine))
    return _called(stage, machine, work)


def _trained_params(model: ModelSpec, work: StepWork, name: str) -> float:
    """A critic trains whole, whatever of the policy is frozen."""
    return work.trained_params if name == "train" and work.trained_params else float(model.computed_params)


def _train_flops_per_token(model: ModelSpec, work: StepWork, name: str) -> float:
    """6 a parameter; 4 where it is frozen, which has no weight gradient, and 6 of each adapter beside it."""
    trained = _trained_params(model, work, name)
    if trained >= model.computed_params:
        return 6.0 * model.matmul_params
    return 4.0 * model.matmul_params + 6.0 * trained


def _sync(model: ModelSpec, machine: MachineSpec, work: StepWork, source: str) -> Entry:
    moved = (work.published_params or model.computed_params) * work.param_bytes * work.num_replicas
    rate = machine.digest_bytes_per_s or machine.copy_bytes_per_s
    return entry(
        "sync",
        machine.sync_base_s + moved / rate,
        error_frac=_FLOOR_ERROR_FRAC * 2,
        bytes=moved,
        formula="base + bytes of all replicas / digest rate",
        source=source,
    )
