"""From a planned topology to a scenario of the simulator: the same seconds, event by event instead of summed."""

from __future__ import annotations

import math
from dataclasses import replace

from rollbook.ledger.agents import env_sigma
from rollbook.ledger.decode import kv_shards
from rollbook.ledger.workload import AgentWork
from rollbook.planner.candidate import Candidate
from rollbook.planner.decoding import decode_step_s, prefill_token_s
from rollbook.planner.request import PlanRequest
from rollbook.planner.sim_draws import Draw, constant, lengths, lognormal_of
from rollbook.planner.sim_scenario import DecodeTable, Scenario
from rollbook.planner.staleness import in_flight_slots

_AFFORDABLE_SEQUENCES = 100_000
"""A few seconds of simulation."""
_LEAST_CYCLES, _MOST_CYCLES = 4, 16
"""After the warm-up, where nobody says how many steps. A cycle of few trajectories differs by a sixth from the next."""


def scenario_of(
    request: PlanRequest, candidate: Candidate, *, num_steps: int = 0, is_brief: bool = False
) -> Scenario:
    """The scenario of a candidate: its replicas, slots, decode seconds and trainer seconds.

    Args:
        num_steps: 0 takes enough for the averages: batches admitted together at the start stay together for a
            while, in cycles of the staleness bound + 1 steps, and each waits for the longest of few or many.
        is_brief: no more than a timeline needs.
    """
    work, account = request.workload, candidate.account
    cycle = 1 if candidate.is_on_policy else request.max_staleness_steps + 1
    warmup = 1 + 2 * cycle if cycle > 1 else 1
    affordable = 0 if is_brief else round(_AFFORDABLE_SEQUENCES / (cycle * work.num_sequences))
    num_steps = num_steps or warmup + min(max(affordable, _LEAST_CYCLES), _MOST_CYCLES) * cycle
    rollout, train = account.rollout, account.train
    agent = work.agent
    is_agent = agent.num_turns > 1
    slots = rollout.slots_per_replica if candidate.is_on_policy else in_flight_slots(request, rollout)
    context = work.prompt_tokens + work.response_tokens
    # The pool in tokens of typical sequences: with windows or a latent cache a token's bytes depend on its place.
    layout, held = candidate.rollout_layout, work.prompt_tokens + work.response_tokens / 2
    copies = layout.tp_size / kv_shards(request.model, layout.tp_size)
    if request.assumptions.method == "paper":
        copies = 1.0
    token_bytes = request.model.kv_bytes(held, request.assumptions.kv_bytes_per_number) / held * copies
    return Scenario(
        mode=candidate.mode,
        num_replicas=rollout.num_replicas,
        slots_per_replica=slots,
        rollout_used_frac=rollout.used_gpus / rollout.num_gpus,
        decode=DecodeTable.of(
            decode_step_s(request, candidate.rollout_layout), num_slots=slots, context_tokens=context
        ),
        groups_per_step=work.num_prompts,
        group_size=work.group_size,
        prompt_tokens=work.prompt_tokens,
        kv_pool_tokens=max(rollout.kv_pool_bytes / token_bytes, 1.0) if token_bytes else math.inf,
        response_tokens=lengths(work.lengths()),
        max_response_tokens=float(work.max_response_tokens),
        prefill_token_s=_prefill_token_s(request, candidate),
        shares_prompt=work.shares_prompt,
        num_turns=constant(agent.num_turns) if is_agent else None,
        env_s=_env_seconds(agent) if is_agent and agent.env_s > 0 else None,
        observation_tokens=agent.observation_tokens if is_agent else 0.0,
        holds_slot_in_env=agent.keeps_prefix,
        judge_s=rollout.reward_s * rollout.num_replicas / work.num_sequences,
        forward_s=train.forward_s,
        train_s=train.train_s,
        switch_s=account.seconds.switch,
        gather_s=0.0
        if request.assumptions.method == "paper"
        else request.assumptions.base_s(work.num_sequences),
        sync_pause_s=account.seconds.sync,
        max_staleness_steps=request.max_staleness_steps,
        num_steps=num_steps,
        num_warmup_steps=min(warmup, num_steps - 1),
    )


def _env_seconds(agent: AgentWork) -> Draw:
    """Log-normal, of the mean and whatever else is known of a call."""
    sigma = env_sigma(agent.env_s, agent.env_p50_s, agent.env_p99_s)
    return lognormal_of(agent.env_s, sigma)


def _prefill_token_s(request: PlanRequest, candidate: Candidate) -> float:
    """Of a prompt that is prefilled whole or, in chunks, what a token adds to the step that carries it."""
    prefill = candidate.account.rollout.prefill
    if prefill is None or not prefill.mixed_step_s:
        return prefill_token_s(request, candidate.rollout_layout)
    return (prefill.mixed_step_s - prefill.plain_step_s) / prefill.chunk_tokens


def with_lending(scenario: Scenario, candidate: Candidate, switch_s: float) -> Scenario:
    """The trainer's GPUs form replicas of their own while they wait."""
    lent = candidate.split[1] // candidate.rollout_layout.num_gpus
    return replace(scenario, num_lent_replicas=lent, lend_switch_s=switch_s)
