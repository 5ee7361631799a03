"""What a bound on staleness costs: a batch has only so many steps from its admission to its use.

The groups of step s are admitted when version s - bound is published, and must be generated and trained by the
time version s + 1 is. With G the seconds from a batch's admission to its last response, t those of its training
and T those of a step,

    separated:   (bound + 1) T >= G + t + sync         colocated:   (bound + 1) R >= G,  T = R + t + switch + sync

so T is the largest of this, the pace of generation and the pace of training. At a bound of 0 it is the
synchronous step. Long-tailed lengths make G several steps long; a wider bound, not more GPUs, shortens it.

G is not the same for all batches. Where the bound binds they bunch, as buses do: a batch that waits for its last
response lets the next one catch up, both are trained at once, and the batches after them are admitted together, run as
one crowd and wait for the longest of all. In the simulator a bound of 1 alternates a long step with a short one. Evenly
spread batches are one end of what can happen, a crowd of bound + 1 is the other. A step is taken to lie 0.7^bound of
the way where a crowd has a slot for every sequence, and less far where they queue, which spreads them. A trainer that
all wait for takes one batch after the other at its own pace and spreads them: they bunch only where even spread ones
would keep it waiting. On 78 topologies that is 1.4 % from long simulations at the median, 6 % at the 90th percentile
and 11 % at worst (16 % while the trainer's own pace was left out).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rollbook.ledger.account import Range, RolloutSide, StepAccount
from rollbook.ledger.generation import generation_curve
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.residence import Residence
from rollbook.ledger.step import is_colocated
from rollbook.planner.decoding import decode_steps_s
from rollbook.planner.request import PlanRequest


def within_bound(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> StepAccount:
    """`account` with the step time that the staleness bound allows; unchanged where the bound does not bind."""
    total_s, _ = bounded_step_s(request, account, layout)
    account = _stretched(account, total_s)
    s, agent = account.seconds, request.workload.agent
    sets_pace = not account.bound_s and s.prefill + s.generate_throughput + s.reward >= account.train.total_s
    # Engines that everything else waits for have a queue before their slots.
    if agent.env_s and agent.num_turns > 1 and (is_colocated(account.mode) or not sets_pace):
        return replace(account, idle_frac=_idle_of_agents(request, account, layout))
    return account


def _idle_of_agents(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> dict[str, float]:
    """Engines stand only while every trajectory of a replica is in its environment."""
    work, rollout, total_s = request.workload, account.rollout, account.seconds.total
    is_shared = is_colocated(account.mode)
    own_s = account.train.total_s if is_shared else 0.0
    held_s = own_s + account.seconds.switch + account.seconds.sync + account.seconds.other * is_shared
    open_s = max(total_s - held_s, 1e-9)  # engines may decode
    per_replica = work.num_sequences / rollout.num_replicas
    rows = np.geomspace(1.0, max(in_flight_slots(request, rollout), 2), _NUM_ROWS)
    context = work.prompt_tokens + work.observation_tokens / 2 + work.response_tokens / 2
    agents = Residence(workload=work, rows=rows, step_s=decode_steps_s(request, layout, rows, context))
    busy = agents.busy_frac(period_s=open_s, per_replica=per_replica)
    used = rollout.used_gpus / rollout.num_gpus
    idle = max(1 - (busy * open_s * used + own_s) / total_s, 0.0)
    return {"rollout": idle, "train": idle if is_shared else account.idle_frac["train"]}


def _stretched(account: StepAccount, total_s: float) -> StepAccount:
    """`account` with a longer step; unchanged where it is none."""
    stretch = total_s / account.seconds.total
    if stretch <= 1.0 + 1e-9:
        return account
    span, idle = account.step_s, account.idle_frac
    # What the bound adds, engines spend on fewer sequences at a time; training GPUs of their own wait for it.
    idle_frac = {side: frac / stretch for side, frac in idle.items()}
    if account.mode == "separate_async":
        idle_frac["train"] = 1 - (1 - idle["train"]) / stretch
    return replace(
        account,
        seconds=replace(account.seconds, total=total_s),
        mfu_frac=account.mfu_frac / stretch,
        idle_frac=idle_frac,
        step_s=Range(value=total_s, low=span.low * stretch, high=span.high * stretch),
        bound_s=total_s - account.seconds.total,
    )


def bounded_step_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> tuple[float, float]:
    """Step time under the staleness bound, and G. The pace of both sides is the ledger's.

    The speed of a token depends on how many sequences run beside it, and that on the step time (Little's law:
    live sequences = trajectories a second x seconds each takes), so the two are solved together, by bisection.
    """
    s, bound = account.seconds, request.max_staleness_steps
    latency = _Latency(request, account.rollout, layout, prefill_s=s.prefill, judge_s=s.reward)
    pace_s = s.prefill + s.generate_throughput + s.reward
    own_s = 0.0
    if account.mode == "separate_async":
        own_s = account.train.total_s
        pace_s = max(pace_s, own_s)

    def is_enough(decode_s: float) -> bool:
        return (bound + 1) * decode_s >= latency.at(decode_s) + own_s

    low, high = 0.0, max(pace_s, latency.at(pace_s) + own_s)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    bunched_s = max((latency.of_crowd() + own_s) / (bound + 1), high)
    crowding = latency.crowding()
    if own_s >= pace_s:
        # A trainer that everything waits for spreads what it takes, unless the bound keeps it waiting.
        crowding *= min(max((high / own_s - 1) / _FULL_CROWDING_FRAC, 0.0), 1.0)
    decode_s = max(high + crowding * (bunched_s - high), pace_s)
    return s.total + decode_s - pace_s, latency.at(max(high, pace_s))


def batch_latency_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> float:
    """G of any mode: seconds from the admission of a step's groups to their last response."""
    s = account.seconds
    latency = _Latency(request, account.rollout, layout, prefill_s=s.prefill, judge_s=s.reward)
    return latency.at(s.prefill + s.reward + s.generate_throughput + s.generate_tail)


_NUM_ROWS = 16
_NUM_HALVINGS = 13
"""To a ten-thousandth of a step."""
_CROWDING = 0.7
_FULL_CROWDING_FRAC = 0.04
"""By which batches evenly spread must keep the trainer waiting for them to bunch as elsewhere."""


class _Latency:
    """G as a function of the seconds in which the engines decode one step's worth of tokens."""

    def __init__(
        self,
        request: PlanRequest,
        rollout: RolloutSide,
        layout: ReplicaLayout,
        *,
        prefill_s: float,
        judge_s: float,
    ) -> None:
        work = request.workload
        self.lengths = work.lengths()
        self.slots = in_flight_slots(request, rollout)
        self.per_replica = work.num_sequences / rollout.num_replicas
        self.longest = self.lengths.expected_max(work.num_sequences)
        self.bound = request.max_staleness_steps
        self.prefill_s, self.judge_s = prefill_s, judge_s
        # Of the slowest trajectory; the paper account has no environments, so their mean stands in.
        self.env_s = rollout.env_wait_s or (work.agent.num_turns - 1) * work.agent.env_s
        mean_age = self.lengths.mean_square() / (2 * self.lengths.mean_tokens)
        context = work.prompt_tokens + work.observation_tokens / 2 + mean_age
        self.context = work.prompt_tokens + work.observation_tokens / 2
        self.num_replicas = rollout.num_replicas
        self.rows = np.geomspace(1.0, max(self.slots, 1), _NUM_ROWS)
        self.token_s = decode_steps_s(request, layout, self.rows, context)
        """Seconds of a token beside so many sequences."""

    def at(self, decode_s: float) -> float:
        """G when a step's tokens are decoded, and its trajectories judged, in `decode_s`."""
        own_s = max(
            decode_s - self.judge_s, 1e-9
        )  # decoding stands while the engines judge, which stretches it
        work_tokens = self.per_replica * self.lengths.mean_tokens / own_s
        # As many run as pass in their time, up to all slots: n = tokens a second x seconds of a token beside n.
        rows = np.interp(work_tokens, self.rows / self.token_s, self.rows)
        token_s = float(np.interp(rows, self.rows, self.token_s))
        ages = own_s / token_s * np.arange(1, self.bound + 1)
        unfinished = self.per_replica * float(self.lengths.survival(ages).sum())
        waiting = max(self.per_replica + unfinished - self.slots, 0.0)
        queue_s = waiting * self.lengths.mean_tokens / self.slots * token_s
        stretch = max(decode_s, own_s) / own_s
        return self.prefill_s + self.env_s + stretch * (queue_s / 2 + self.longest * token_s)

    def crowding(self) -> float:
        """How far batches bunch, from evenly spread (0) to one crowd (1): fitted to the simulator."""
        seated = min(self.slots / ((self.bound + 1) * self.per_replica), 1.0)
        return float(_CROWDING**self.bound * math.sqrt(seated))

    def of_crowd(self) -> float:
        """G of the longest of bound + 1 steps' batches that were admitted together."""
        num_steps = self.bound + 1
        curve = generation_curve(
            self.lengths,
            prompt_tokens=self.context,
            num_sequences=round(num_steps * self.per_replica * self.num_replicas),
            num_replicas=self.num_replicas,
            num_slots=self.slots,
        )
        decode_s = (curve.num_steps * np.interp(curve.rows, self.rows, self.token_s)).sum()
        return num_steps * (self.prefill_s + self.judge_s) + self.env_s + float(decode_s)


def in_flight_slots(request: PlanRequest, rollout: RolloutSide) -> int:
    """Slots of a replica by memory, when more than one step's share of sequences may be in flight."""
    work = request.workload
    per_replica = math.ceil(work.num_sequences / rollout.num_replicas)
    if rollout.slots_per_replica < per_replica:  # memory is the limit already
        return rollout.slots_per_replica
    wanted = per_replica * (request.max_staleness_steps + 1)
    held = work.prompt_tokens + work.response_tokens / 2
    per_sequence = request.model.kv_bytes(held, request.assumptions.kv_bytes_per_number)
    fitting = math.floor(rollout.kv_pool_bytes / max(per_sequence, 1.0))
    return max(min(wanted, fitting, request.assumptions.max_slots), rollout.slots_per_replica)
