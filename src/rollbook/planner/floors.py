"""What a step does not go below, whatever it is followed through: what is beaten by that need not be followed."""

from __future__ import annotations

import functools

import numpy as np

from rollbook.ledger.account import StepAccount
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.residence import Residence
from rollbook.ledger.step import is_colocated
from rollbook.ledger.workload import Workload
from rollbook.planner.candidate import ON_POLICY
from rollbook.planner.decoding import decode_steps_s
from rollbook.planner.request import PlanRequest
from rollbook.planner.staleness import in_flight_slots, mean_context


def floor_step_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> float:
    """Below the step of `account` with all that its environments and the staleness bound add to it.

    Args:
        account: two sides, joined, neither of them followed.
    """
    if request.assumptions.method == "paper":
        return account.seconds.total
    s, stay_s = account.seconds, _least_stay_s(request, layout)
    if account.mode in ON_POLICY:
        return s.total + max(_STAY_FRAC * stay_s - s.generate_throughput - s.generate_tail, 0.0)
    # From the admission of a batch to the version that it makes are bound + 1 steps, in which it is generated and
    # trained; each publication keeps the engines, and each training those that share its GPUs.
    generated_s = _FLOOR_FRAC * (_least_decode_s(request, account, layout) + s.prefill + s.reward)
    generated_s = max(generated_s, _STAY_AT_ONE_CLOCK_FRAC * stay_s)
    own_s, steps = account.train.total_s + s.other + s.switch, request.max_staleness_steps + 1
    if is_colocated(account.mode):
        return max(s.total, generated_s / steps + own_s + s.sync)
    return max(s.total, (generated_s + own_s) / steps + s.sync)


_FLOOR_FRAC = 0.9
"""Of the seconds of the longest response, which `fluid` follows in a dozen cells."""
_STAY_FRAC = 0.97
"""Of the seconds of the slowest agent, which `Residence` follows in 400 cells."""
_STAY_AT_ONE_CLOCK_FRAC = 0.85
"""The same in `fluid`, which has one clock for decoding and waiting."""
_NUM_ROWS = 16


def _least_decode_s(request: PlanRequest, account: StepAccount, layout: ReplicaLayout) -> float:
    """Of one batch: one trajectory makes the longest response, and a replica makes all its tokens; engines that make
    more of these at a time give fewer to each."""
    work = request.workload
    slots = in_flight_slots(request, account.rollout)
    rows = np.geomspace(1.0, max(slots, 2), _NUM_ROWS)
    token_s = decode_steps_s(request, layout, rows, mean_context(request))
    # Agents decode beside others' calls, at a pace that this line does not know.
    tokens = work.response_tokens_total / account.rollout.num_replicas if not work.agent.env_s else 0.0
    # No mixture of paces is above the lines through two neighbours of (tokens of all, tokens of one) a second.
    of_all, of_one = rows / token_s, 1 / token_s
    slope = np.maximum(-np.diff(of_one) / np.maximum(np.diff(of_all), 1e-12), 0.0)
    height = (of_one + slope[:, None] * of_all).max(axis=1)
    longest = _longest_tokens(work.lengths(), work.num_sequences)
    return float(((longest + slope * tokens) / height).max())


def _least_stay_s(request: PlanRequest, layout: ReplicaLayout) -> float:
    """Of the slowest agent of a batch, were each alone on its replica; 0 without environments."""
    agent = request.workload.agent
    if agent.env_s <= 0 or agent.num_turns <= 1:
        return 0.0
    return _slowest_s(request.workload, float(decode_steps_s(request, layout, 1.0, mean_context(request))))


@functools.lru_cache(maxsize=64)
def _slowest_s(work: Workload, token_s: float) -> float:
    stays = Residence(workload=work, rows=np.ones(1), step_s=np.full(1, token_s))
    at_s = np.linspace(0.0, stays.longest_s(token_s), _NUM_TIMES)
    return float(np.trapezoid(1 - stays.ended(at_s, token_s) ** work.num_sequences, at_s))


_NUM_TIMES = 513


@functools.lru_cache(maxsize=64)
def _longest_tokens(lengths: LengthDistribution, num_sequences: int) -> float:
    """Expected longest of so many responses, none of which is rarer than one in a hundred steps."""
    tokens = np.linspace(0.0, float(lengths.quantile(1 - 0.01 / num_sequences)), _NUM_TIMES)
    return float(np.trapezoid(1 - (1 - lengths.survival(tokens)) ** num_sequences, tokens))
