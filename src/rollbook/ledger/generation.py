"""Seconds of one step's generation under the default assumptions: the decode model over the curve of lengths.

The number of running sequences falls as responses end, so a step that starts with full slots ends with a few
long responses that read all weights for themselves. Throughput, waves and tail all come out of one integral.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from rollbook.ledger.account import RolloutSide
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.decode import decode_step, kv_bytes_of, kv_shards, prefill_s, replica_weight_bytes
from rollbook.ledger.flops import attention_flops, prefill_flops
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import DTYPE_BYTES, ReplicaLayout
from rollbook.ledger.lengths import Curve, LengthDistribution
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.own_machine import own_seconds_width
from rollbook.ledger.prefill import prefill_account
from rollbook.ledger.quantity import format_bytes
from rollbook.ledger.reliability import assumed_model_factor, model_traits, widening
from rollbook.ledger.residence import Residence
from rollbook.ledger.workload import Workload
from rollbook.observe.numbers import counted

_NUM_POINTS = 128
_TAIL_FRAC = 0.1
"""The tail begins when this share of a step's trajectories is unfinished."""


@dataclass(frozen=True, slots=True)
class GenerationCurve:
    """Decode steps of the slowest replica: `num_steps` steps with `rows` running at `context` tokens each."""

    num_steps: Curve
    rows: Curve
    context: Curve
    is_tail: Curve
    """1.0 where fewer than a tenth of the trajectories are unfinished."""
    busy_share: Curve
    """Share of the replicas that still run a sequence."""


def generation_curve(
    lengths: LengthDistribution,
    *,
    prompt_tokens: float,
    num_sequences: int,
    num_replicas: int,
    num_slots: int,
) -> GenerationCurve:
    """Expected curve of running sequences.

    When every sequence has a slot, a replica runs n S(t) rows at step t, as long as any sequence of the whole
    step runs: the probability 1 - (1 - S(t))^N. When sequences queue, the slots stay full until the queue is
    empty and then drain with the residual lifetimes of a renewal process, S_r(t) = (integral of S from t) / mean.

    Source: renewal theory; the test compares it with `row_curve` on drawn lengths.
    """
    per_replica = num_sequences / num_replicas
    longest = float(lengths.quantile(1 - 0.01 / num_sequences))
    width = longest / _NUM_POINTS
    at = (np.arange(_NUM_POINTS) + 0.5) * width
    alive = lengths.survival(at)
    if per_replica <= num_slots:
        any_runs, one_runs = (1 - (1 - alive) ** n for n in (num_sequences, per_replica))
        return GenerationCurve(
            num_steps=any_runs * width,
            rows=np.maximum(per_replica * alive, 1.0),
            context=prompt_tokens + at,
            is_tail=(alive < _TAIL_FRAC).astype(np.float64),
            busy_share=one_runs / any_runs,
        )
    mean = float(alive.sum()) * width
    age = float((at * alive).sum()) * width / mean
    full_steps = max(per_replica * mean / num_slots - age, 0.0)
    residual = (np.cumsum(alive[::-1])[::-1] - alive / 2) * width / mean
    left = np.clip(residual, 0.0, 1.0)
    any_runs, one_runs = (1 - (1 - left) ** n for n in (num_replicas * num_slots, num_slots))
    unfinished = num_slots * residual / per_replica
    return GenerationCurve(
        num_steps=np.concatenate([[full_steps], any_runs * width]),
        rows=np.concatenate([[float(num_slots)], np.maximum(num_slots * residual, 1.0)]),
        context=np.concatenate([[prompt_tokens + age], prompt_tokens + np.minimum(age + at / 2, longest)]),
        is_tail=np.concatenate([[0.0], (unfinished < _TAIL_FRAC).astype(np.float64)]),
        busy_share=np.concatenate([[1.0], one_runs / any_runs]),
    )


def default_rollout_side(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    num_gpus: int,
    layout: ReplicaLayout,
    memory_frac: float = 1.0,
    max_staleness_steps: int = 1,
    follows_environments: bool = True,
) -> RolloutSide:
    """Generation of one step on `num_gpus` devices in replicas of `layout`.

    Args:
        memory_frac: share of the device's memory that the engine may take; below 1 where it shares the device.
        max_staleness_steps: of asynchronous modes: each step of age keeps one more step's prompts running.
        follows_environments: see `rollout_side`.
    """
    accelerator = cluster.accelerator
    num_replicas = max(num_gpus // layout.num_gpus, 1)
    room = kv_room(
        model, workload, cluster, assumptions, layout, num_replicas=num_replicas, memory_frac=memory_frac
    )
    curve = generation_curve(
        workload.lengths(),
        prompt_tokens=workload.prompt_tokens + workload.observation_tokens / 2,
        num_sequences=workload.num_sequences,
        num_replicas=num_replicas,
        num_slots=room.slots,
    )
    # One call for the full step, the steady step of asynchronous modes, and the curve.
    agents = _residence(model, workload, cluster, assumptions, layout, room, num_replicas=num_replicas)
    steady_rows = _steady_rows(workload, num_replicas, room.most_slots, max_staleness_steps, agents)
    steps = decode_step(
        model,
        cluster,
        assumptions.decode,
        layout,
        num_rows=np.concatenate([[room.slots, steady_rows], curve.rows]),
        context_tokens=np.concatenate([[room.held_tokens] * 2, curve.context]),
    ).seconds
    full_s, steady_step_s = float(steps[0]), float(steps[1])
    seconds = steps[2:] * curve.num_steps
    tail_s = float((seconds * curve.is_tail).sum())
    generate_s, busy_s, env_wait_s = float(seconds.sum()), float((seconds * curve.busy_share).sum()), 0.0
    if agents is not None and follows_environments:
        per_replica = workload.num_sequences / num_replicas
        stay = agents.stay(per_replica=per_replica, num_slots=room.slots, num_replicas=num_replicas)
        env_wait_s, busy_s = max(stay.last_s - generate_s, 0.0), max(stay.busy_s, busy_s)
    rate = room.slots / full_s / layout.num_gpus
    prefill = prefill_account(
        model,
        workload,
        cluster,
        assumptions,
        layout,
        num_replicas=num_replicas,
        num_rows=float(room.slots),
        context_tokens=room.held_tokens,
        plain_step_s=full_s,
    )
    notes, error_frac = _reliability(model, cluster, assumptions, layout)
    idle_gpus = num_gpus - num_replicas * layout.num_gpus
    if idle_gpus > 0:
        notes.append(
            f"{idle_gpus} of {counted(num_gpus, 'rollout GPU')} {'is' if idle_gpus == 1 else 'are'} left over"
        )
    return RolloutSide(
        num_gpus=num_gpus,
        tp_size=layout.num_gpus,
        num_replicas=num_replicas,
        slots_per_replica=room.slots,
        num_waves=math.ceil(workload.num_sequences / (num_replicas * room.slots)),
        decode_step_s=full_s,
        throughput_s=generate_s - tail_s,
        tail_s=tail_s,
        busy_s=busy_s,
        steady_s=workload.response_tokens_total * steady_step_s / (num_replicas * steady_rows),
        prefill=prefill,
        prefill_s=prefill.seconds,
        tokens_per_s_per_gpu=rate,
        mfu_frac=rate * _token_flops(model, room.held_tokens) / accelerator.peak(layout.weight_dtype),
        weights_bytes_per_gpu=room.weights_bytes_per_gpu,
        judge_bytes_per_gpu=room.judge_bytes_per_gpu,
        kv_pool_bytes=room.pool_bytes,
        reward_s=_reward_s(
            model,
            workload,
            cluster,
            assumptions,
            layout,
            num_replicas=num_replicas,
            num_rows=steady_rows,
            context_tokens=room.held_tokens,
            policy_row_s=steady_step_s / steady_rows,
        ),
        env_wait_s=env_wait_s,
        error_frac=error_frac,
        why_not=_why_not(workload, layout, room, num_gpus=num_gpus),
        notes=tuple(notes),
    )


def _why_not(workload: Workload, layout: ReplicaLayout, room: KvRoom, *, num_gpus: int) -> tuple[str, ...]:
    """Why these replicas cannot run on `num_gpus`; empty where they can."""
    reasons = list(room.why_not)
    if num_gpus < layout.num_gpus:
        reasons.append(f"a replica takes {counted(layout.num_gpus, 'GPU')}, the rollout side has {num_gpus}")
    if 0 < workload.prefill_chunk_tokens <= room.slots:
        reasons.append(
            f"{room.slots} running sequences leave nothing of a step's {workload.prefill_chunk_tokens} tokens for "
            f"prompts: more than {room.slots} would"
        )
    return tuple(reasons)


def _token_flops(model: ModelSpec, context_tokens: float) -> float:
    """Of one decoded token behind so much context, attention with it."""
    grown = attention_flops(model, context_tokens + 1) - attention_flops(model, context_tokens)
    return 2.0 * model.matmul_params + float(grown)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRoom:
    """How many sequences a replica can run at once, and why not more."""

    slots: int
    """Of one step's prompts on one replica."""
    most_slots: int
    """With prompts of more than one step."""
    held_tokens: float
    """Mean context of a running sequence."""
    weights_bytes_per_gpu: float
    judge_bytes_per_gpu: float
    """Of these, a reward model's that writes its verdict."""
    pool_bytes: float
    """Of the whole replica."""
    why_not: tuple[str, ...]


def kv_room(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    layout: ReplicaLayout,
    *,
    num_replicas: int,
    memory_frac: float,
) -> KvRoom:
    """Slots of a replica from the memory that weights leave.

    A running sequence has E[l²] / 2 E[l] response tokens on average, more than half the mean length: long ones
    run longer.
    """
    usable = cluster.accelerator.hbm_bytes * min(1 - assumptions.memory_overhead_frac, memory_frac)
    # A reward model that writes its verdict is served beside the policy, by the same engines.
    judge = 0.0
    if workload.reward == "generative":
        judge = replica_weight_bytes(workload.reward_model or model, layout)
    weights = replica_weight_bytes(model, layout) + judge
    pool = max(usable - weights, 0.0) * layout.num_gpus
    lengths = workload.lengths()
    held = workload.prompt_tokens + lengths.mean_square() / (2 * lengths.mean_tokens)
    held += workload.observation_tokens / 2
    per_sequence = float(kv_bytes_of(model, held, DTYPE_BYTES[layout.kv_dtype]))
    copies = layout.tp_size / kv_shards(model, layout.tp_size)
    fitting = math.floor(pool / (per_sequence * copies))
    most = max(min(fitting, assumptions.max_slots * layout.attention_copies), 1)
    why_not: tuple[str, ...] = ()
    if fitting < 1:
        why_not = (
            f"a GPU holds {format_bytes(usable)} of which weights take {format_bytes(weights)}: no room for "
            f"the {format_bytes(per_sequence)} of one sequence",
        )
    return KvRoom(
        slots=min(most, math.ceil(workload.num_sequences / num_replicas)),
        most_slots=most,
        held_tokens=held,
        weights_bytes_per_gpu=weights,
        judge_bytes_per_gpu=judge,
        pool_bytes=pool,
        why_not=why_not,
    )


def _steady_rows(
    workload: Workload, num_replicas: int, most_slots: int, max_staleness_steps: int, agents: Residence | None
) -> float:
    """Decoding sequences while the prompts of the steps within the staleness bound fill the slots.

    Of the trajectories in flight, those of the oldest step are nearly finished: half of them still run. Those whose
    environment works hold a slot, if their prefix is kept, and decode nothing.
    """
    in_flight = workload.num_sequences / num_replicas * (max_staleness_steps + 0.5)
    if agents is None:
        return min(float(most_slots), in_flight)
    held = min(float(most_slots), in_flight) if workload.agent.keeps_prefix else in_flight
    return min(float(most_slots), max(float(agents.live(held)), 1.0))


_NUM_ROWS = 16


def _residence(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    layout: ReplicaLayout,
    room: KvRoom,
    *,
    num_replicas: int,
) -> Residence | None:
    """Stays of the trajectories on one replica; None where no environment keeps them waiting."""
    if workload.agent.env_s <= 0 or workload.agent.num_turns <= 1:
        return None
    most = max(room.most_slots, workload.num_sequences / num_replicas, 2.0)
    rows = np.geomspace(1.0, most, _NUM_ROWS)
    steps = decode_step(
        model, cluster, assumptions.decode, layout, num_rows=rows, context_tokens=room.held_tokens
    )
    return Residence(workload=workload, rows=rows, step_s=steps.seconds)


def decode_widening(
    model: ModelSpec, cluster: Cluster, assumptions: Assumptions, layout: ReplicaLayout
) -> tuple[float, tuple[str, ...]]:
    """Factor on the error of decoding, with a note on each trait that nobody measured."""
    traits = {
        "device": [cluster.accelerator.chip],
        "model": model_traits(model),
        "dtype": [layout.weight_dtype],
        "engine": [layout.engine],
    }
    return widening(assumptions, "decode", traits, what="decoding")


def _reliability(
    model: ModelSpec, cluster: Cluster, assumptions: Assumptions, layout: ReplicaLayout
) -> tuple[list[str], float]:
    """Notes on what nobody measured, and the error that follows."""
    error_frac = assumptions.rollout_error_frac * assumed_model_factor(model)
    if cluster.accelerator.is_cpu:
        return list(model.assumed), error_frac * own_seconds_width(cluster)
    wider, notes = decode_widening(model, cluster, assumptions, layout)
    return [*model.assumed, *notes], error_frac * wider


def _reward_s(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    layout: ReplicaLayout,
    *,
    num_replicas: int,
    num_rows: float,
    context_tokens: float,
    policy_row_s: float,
) -> float:
    """A generative reward model in replicas like the policy's: prefill of every trajectory, and its verdict's tokens.

    Args:
        policy_row_s: seconds of a decode step over its rows, of the policy; the judge's where it has its shape.
    """
    if workload.reward != "generative":
        return 0.0
    judge, tokens = workload.reward_model or model, workload.sequence_tokens
    flops = workload.num_sequences * float(prefill_flops(judge, tokens))
    pairs = workload.num_sequences * float(attention_flops(judge, tokens))
    read_s = float(prefill_s(judge, cluster, assumptions.decode, layout, flops=flops, attention_flops=pairs))
    row_s = policy_row_s
    if workload.reward_model is not None:
        step = decode_step(
            judge, cluster, assumptions.decode, layout, num_rows=num_rows, context_tokens=context_tokens
        )
        row_s = float(step.seconds) / num_rows
    verdict_s = workload.num_sequences * workload.reward_response_tokens * row_s
    return (read_s + verdict_s) / num_replicas
