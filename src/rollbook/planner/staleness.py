"""What a bound on staleness costs: a batch has only so many steps from its admission to its use.

The groups of step s are admitted when version s - bound is published, and must be generated and trained by the
time version s + 1 is. With G the seconds from a batch's admission to its last response, t those of its training
and T those of a step,

    separated:   (bound + 1) T >= G + t + sync         colocated:   (bound + 1) R >= G,  T = R + t + switch + sync

so T is the largest of this, the pace of generation and the pace of training. At a bound of 0 it is the
synchronous step. Long-tailed lengths make G several steps long; a wider bound, not more GPUs, shortens it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rollbook.ledger.account import Range, RolloutSide, StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.planner.decoding import decode_step_s
from rollbook.planner.request import PlanRequest


def within_bound(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> StepAccount:
    """`account` with the step time that the staleness bound allows; unchanged where the bound does not bind."""
    total_s, _ = bounded_step_s(request, account, layout)
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
    )


def bounded_step_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> tuple[float, float]:
    """Step time under the staleness bound, and G. The pace of both sides is the ledger's.

    The speed of a token depends on how many sequences run beside it, and that on the step time (Little's law:
    live sequences = trajectories a second x seconds each takes), so the two are solved together, by bisection.
    """
    s, bound = account.seconds, request.max_staleness_steps
    latency = _Latency(request, account.rollout, layout, prefill_s=s.prefill)
    pace_s = s.prefill + s.generate_throughput
    own_s = 0.0
    if account.mode == "separate_async":
        own_s = account.train.total_s
        pace_s = max(pace_s, own_s)

    def is_enough(decode_s: float) -> bool:
        return (bound + 1) * decode_s >= latency.at(decode_s) + own_s

    low, high = pace_s, max(pace_s, latency.at(pace_s) + own_s)
    if is_enough(low):
        return s.total, latency.at(low)
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return s.total + high - pace_s, latency.at(high)


def batch_latency_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> float:
    """G of any mode: seconds from the admission of a step's groups to their last response."""
    decode_s = account.seconds.prefill + account.seconds.generate_throughput + account.seconds.generate_tail
    return _Latency(request, account.rollout, layout, prefill_s=account.seconds.prefill).at(decode_s)


class _Latency:
    """G as a function of the seconds in which the engines decode one step's worth of tokens."""

    def __init__(
        self, request: PlanRequest, rollout: RolloutSide, layout: ReplicaLayout, *, prefill_s: float
    ) -> None:
        work = request.workload
        self.lengths = work.lengths()
        self.slots = in_flight_slots(request, rollout)
        self.per_replica = work.num_sequences / rollout.num_replicas
        self.longest = self.lengths.expected_max(work.num_sequences)
        self.bound = request.max_staleness_steps
        self.fixed_s = prefill_s
        # Of the slowest trajectory; the paper account has no environments, so their mean stands in.
        self.fixed_s += rollout.env_wait_s or (work.agent.num_turns - 1) * work.agent.env_s
        mean_age = self.lengths.mean_square() / (2 * self.lengths.mean_tokens)
        context = work.prompt_tokens + work.observation_tokens / 2 + mean_age
        step_s = decode_step_s(request, layout)
        # Seconds of a token are nearly a line in the sequences beside it.
        self.row_s = (step_s(self.slots, context) - step_s(1, context)) / max(self.slots - 1, 1)
        self.base_s = step_s(1, context) - self.row_s

    def at(self, decode_s: float) -> float:
        """G when a step's tokens are decoded in `decode_s`."""
        work_tokens = self.per_replica * self.lengths.mean_tokens / max(decode_s, 1e-9)
        left = 1 - work_tokens * self.row_s
        rows = work_tokens * self.base_s / left if left > 0 else float(self.slots)
        token_s = self.base_s + self.row_s * min(max(rows, 1.0), self.slots)
        ages = decode_s / token_s * np.arange(1, self.bound + 1)
        unfinished = self.per_replica * float(self.lengths.survival(ages).sum())
        waiting = max(self.per_replica + unfinished - self.slots, 0.0)
        queue_s = waiting * self.lengths.mean_tokens / self.slots * token_s
        return self.fixed_s + queue_s / 2 + self.longest * token_s


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
