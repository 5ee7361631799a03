"""What turns, tools and sandboxes add to a step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rollbook.errors import PlanError
from rollbook.ledger.flops import turn_prefill_tokens
from rollbook.ledger.lengths import normal_quantile
from rollbook.ledger.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAccount:
    """Environment side of one step."""

    num_calls: float
    """Of all trajectories: one between two turns, so one fewer than turns (`AgentWork.num_calls`)."""
    env_busy_s: float
    """Seconds of all environment calls together."""
    trajectory_env_s: float
    """Mean seconds that one trajectory spends in its environment."""
    slowest_env_s: float
    """The same for the slowest trajectory of the step."""
    cpu_core_hours: float
    gpu_idle_s: float
    """GPU waiting when a slot is held while its environment works, per slot and trajectory."""
    prefilled_tokens: float
    """Tokens prefilled in the step, prompts once per group where groups share them."""
    prefilled_tokens_kept: float
    """The same if engines keep the prefix over a turn: linear in the turns."""
    prefilled_tokens_lost: float
    """If every turn prefills all before it again: quadratic."""
    effective_tokens_per_response_token: float
    """All tokens that pass through the model, per sampled token."""


def env_sigma(mean_s: float, p50_s: float, p99_s: float) -> float:
    """Standard deviation of ln(seconds) of a log-normal from two of its mean, median and 99th percentile.

    0 is "not known". Of mean and 99th percentile, p99 / mean = exp(z s - s² / 2), the smaller root counts.

    >>> round(env_sigma(2.0, 1.0, 0.0), 3)  # mean / median = exp(s² / 2)
    1.177
    >>> round(env_sigma(10.0, 0.0, 10.0 * math.exp(2.326 - 0.5)), 2)
    1.0
    """
    z = float(normal_quantile(0.99))
    if p50_s > 0 and p99_s > p50_s:
        return math.log(p99_s / p50_s) / z
    if p50_s == 0 and 0 < mean_s < p99_s:
        return z - math.sqrt(max(z * z - 2 * math.log(p99_s / mean_s), 0.0))
    if p50_s > 0 and mean_s > p50_s:
        return math.sqrt(2 * math.log(mean_s / p50_s))
    return 0.0


def agent_account(workload: Workload) -> AgentAccount:
    """Environment side of one step of `workload`."""
    agent = workload.agent
    calls = agent.num_calls * workload.num_sequences
    trajectory_s = agent.num_calls * agent.env_s
    sigma = env_sigma(agent.env_s, agent.env_p50_s, agent.env_p99_s)
    # The sum over calls narrows: relative variance falls with their number.
    spread = math.sqrt(math.expm1(sigma**2) / max(agent.num_calls, 1.0))
    quantile = float(normal_quantile(np.float64(0.5 ** (1.0 / workload.num_sequences))))
    slowest = trajectory_s * math.exp(math.sqrt(math.log1p(spread**2)) * quantile)
    by_prefix = {
        keeps: workload.num_prefills * workload.prompt_tokens
        + workload.num_sequences
        * turn_prefill_tokens(replace(workload, agent=replace(agent, keeps_prefix=keeps)))
        for keeps in (True, False)
    }
    prefilled = by_prefix[agent.keeps_prefix]
    through = prefilled + workload.response_tokens_total
    return AgentAccount(
        num_calls=calls,
        env_busy_s=calls * agent.env_s,
        trajectory_env_s=trajectory_s,
        slowest_env_s=slowest,
        cpu_core_hours=workload.num_sequences
        * (trajectory_s + agent.sandbox_start_s)
        * agent.cpu_cores_per_sandbox
        / 3600,
        gpu_idle_s=trajectory_s,
        prefilled_tokens=prefilled,
        prefilled_tokens_kept=by_prefix[True],
        prefilled_tokens_lost=by_prefix[False],
        effective_tokens_per_response_token=through / workload.response_tokens_total,
    )


def sandboxes_needed(workload: Workload, *, target_s: float) -> int:
    """Sandboxes that finish one step's environment calls within `target_s`, start-up included.

    Raises:
        PlanError: one trajectory alone takes longer than the target.
    """
    agent = workload.agent
    one = agent.num_calls * agent.env_s + agent.sandbox_start_s
    if one > target_s:
        raise PlanError(
            f"one trajectory holds its sandbox for {one:.0f} s, the target is {target_s:.0f} s",
            "raise the target, or make the environment faster",
        )
    return max(1, math.ceil(workload.num_sequences * one / target_s))
