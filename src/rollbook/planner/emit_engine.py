"""What several exporters say of the engine and of the trainer in the same way."""

from __future__ import annotations

import math

from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Candidate


def engine_memory_frac(request: PlanRequest, chosen: Candidate) -> float:
    """Share of a GPU's memory that an engine may take: less where the trainer lives on the same GPU."""
    assumptions = request.assumptions
    free = 1 - assumptions.memory_overhead_frac
    return free if chosen.mode.startswith("separate") else min(free, assumptions.engine_memory_frac)


def prompt_tokens_of_chunk(request: PlanRequest, chosen: Candidate) -> int:
    """Prompt tokens of a planned chunk, for engines that count running sequences apart; 0: prompts go whole."""
    chunk = request.workload.prefill_chunk_tokens
    return max(math.ceil(chunk) - chosen.account.rollout.slots_per_replica, 1) if chunk else 0


def is_megatron(request: PlanRequest, chosen: Candidate, *, splits_tensors: bool) -> bool:
    """Megatron trains, not FSDP: where it was assumed, and for layouts that the system's FSDP trainer does not have.

    Args:
        splits_tensors: its FSDP trainer has tensor parallelism.
    """
    layout = chosen.train.layout
    needs = layout.pp_size > 1 or layout.ep_size > 1 or (layout.tp_size > 1 and not splits_tensors)
    return needs or request.assumptions.is_megatron
