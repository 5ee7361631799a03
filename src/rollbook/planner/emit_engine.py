"""What several exporters say of the engine and of the trainer in the same way."""

from __future__ import annotations

import math

from rollbook.ledger.step import is_colocated, shared_memory_frac
from rollbook.planner.candidate import Candidate
from rollbook.planner.idling import held_bytes
from rollbook.planner.layouts import last_stage_layers
from rollbook.planner.request import PlanRequest


def engine_memory_frac(request: PlanRequest, chosen: Candidate) -> float:
    """Share of a GPU's memory that an engine may take: less where the trainer lives on the same GPU, by what that keeps
    there while engines generate."""
    if not is_colocated(chosen.mode):
        return 1 - request.assumptions.memory_overhead_frac
    held = held_bytes(request, chosen.train, chosen.sleep)
    return shared_memory_frac(request.cluster, request.assumptions, held)


def prompt_tokens_of_chunk(request: PlanRequest, chosen: Candidate) -> int:
    """Prompt tokens of a planned chunk, for engines that count running sequences apart; 0: prompts go whole."""
    chunk = request.workload.prefill_chunk_tokens
    return max(math.ceil(chunk) - chosen.account.rollout.slots_per_replica, 1) if chunk else 0


def uneven_last_stage(request: PlanRequest, chosen: Candidate) -> int:
    """Layers of the last pipeline stage where it holds fewer than the others, which has to be said; else 0."""
    num_layers, num_stages = request.model.num_layers, chosen.train.layout.pp_size
    return last_stage_layers(num_layers, num_stages) if num_layers % num_stages else 0


def is_megatron(chosen: Candidate) -> bool:
    """Megatron trains, not FSDP: where it was planned, and where experts are spread, which these systems' FSDP trainers
    do not do."""
    return chosen.train.backend == "megatron" or chosen.train.layout.ep_size > 1
