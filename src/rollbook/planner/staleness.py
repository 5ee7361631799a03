"""What a bound on staleness costs: a batch has only so many steps from its admission to its use.

The groups of step s are admitted when version s - bound is published, and must be generated and trained by the
time version s + 1 is. With G the seconds from a batch's admission to its last response, t those of its training
and T those of a step,

    separated:   (bound + 1) T >= G + t + sync         colocated:   (bound + 1) R >= G,  T = R + t + switch + sync

At a bound of 0 it is the synchronous step. Long-tailed lengths make G several steps long; a wider bound, not more
GPUs, shortens it. Evenly spread batches are the least that a bound costs (`least_step_s`), but batches bunch: `fluid`
follows them until their cycle repeats, and says when the engines stand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from rollbook.ledger.account import Range, RolloutSide, StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.step import is_colocated
from rollbook.planner.decoding import decode_steps_s
from rollbook.planner.fluid import steady_step
from rollbook.planner.request import PlanRequest


def within_bound(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> StepAccount:
    """`account` with the step time that the staleness bound allows, and the idle shares that come of it."""
    num_lent = account.train.num_gpus // layout.num_gpus if request.lends(account.mode) else 0
    slots = in_flight_slots(request, account.rollout)
    found = steady_step(request, account, layout, slots=slots, num_lent=num_lent)
    if found is None:
        return stretched(account, least_step_s(request, account, layout))
    account = stretched(account, found.step_s)
    rollout, own_s, total_s = account.rollout, account.train.total_s, account.seconds.total
    busy = found.busy_s / found.step_s * rollout.used_gpus / rollout.num_gpus
    if is_colocated(account.mode):
        idle = dict.fromkeys(("rollout", "train"), max(1 - busy - own_s / total_s, 0.0))
    else:
        idle = {**account.idle_frac, "rollout": max(1 - busy, 0.0)}
    return replace(account, idle_frac=idle)


def stretched(account: StepAccount, total_s: float) -> StepAccount:
    """`account` with a longer step; unchanged where it is none."""
    stretch = total_s / account.seconds.total
    if stretch <= 1 + _VISIBLE_FRAC:
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


def mean_context(request: PlanRequest) -> float:
    """Tokens behind which the mean token of a response is sampled."""
    work = request.workload
    lengths = work.lengths()
    mean_age = lengths.mean_square() / (2 * lengths.mean_tokens)
    return work.prompt_tokens + work.observation_tokens / 2 + mean_age


def least_step_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> float:
    """Step time under the staleness bound where batches are evenly spread: the least that it allows.

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

    if is_enough(pace_s):
        return s.total
    low, high = pace_s, max(pace_s, latency.at(pace_s) + own_s)
    for _ in range(_NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return s.total + low - pace_s


_VISIBLE_FRAC = 0.005
"""Share of a step below which what the bound adds is within the width of a cell."""
_NUM_HALVINGS = 8


def batch_latency_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> float:
    """G of any mode: seconds from the admission of a step's groups to their last response."""
    s = account.seconds
    latency = _Latency(request, account.rollout, layout, prefill_s=s.prefill, judge_s=s.reward)
    return latency.at(s.prefill + s.reward + s.generate_throughput + s.generate_tail)


_NUM_ROWS = 16


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
        self.env_s = rollout.env_wait_s or work.agent.num_calls * work.agent.env_s
        self.rows = np.geomspace(1.0, max(self.slots, 1), _NUM_ROWS)
        self.token_s = decode_steps_s(request, layout, self.rows, mean_context(request))
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
