"""What a reader must know before believing a plan's numbers, and what was asked for and changes nothing of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from rollbook.ledger.lengths import DEFAULT_SIGMA
from rollbook.ledger.own_machine import own_seconds_note
from rollbook.ledger.step import is_colocated
from rollbook.ledger.sync import CHANGED_FRAC
from rollbook.observe.numbers import counted
from rollbook.planner.beside import Checkpointing, checkpointing
from rollbook.planner.candidate import Candidate, host_bytes_per_gpu
from rollbook.planner.request import HOST_BYTES_PER_GPU, PAPER_HAS_NO_RANGE, PlanRequest
from rollbook.planner.waterfall import above_peak
from rollbook.planner.words import format_bytes, percent, seconds

_VISIBLE_CHECKPOINTS_FRAC = 0.05
_SPARE_FRAC = 0.05
"""What half of the GPUs or fewer may add to a step before the others are of use."""


def spare_gpus(chosen: Candidate, num_gpus: int, step_s: Mapping[int, float]) -> list[str]:
    """That far fewer GPUs would take about as long: a step may have too little work for all of them.

    Args:
        step_s: of the best topology, by the number of GPUs.
    """
    enough = [
        n for n, other_s in step_s.items() if n < num_gpus and other_s <= (1 + _SPARE_FRAC) * chosen.step_s
    ]
    if not enough:
        return []
    fewest = min(enough)
    return [
        f"{counted(fewest, 'GPU')} would take {seconds(step_s[fewest])} a step: the step has too little work for the "
        f"other {num_gpus - fewest} (--num-gpus {fewest}, or more --prompts)"
    ]


def checkpoint_advice(request: PlanRequest, chosen: Candidate, planned: Checkpointing) -> list[str]:
    """That the step waits visibly for checkpoints which could be written beside it."""
    frac = planned.account.step_frac
    if planned.is_async or frac < _VISIBLE_CHECKPOINTS_FRAC:
        return []
    rate = f"{format_bytes(planned.storage_bytes_per_s)}/s of storage"
    if not request.storage_bytes_per_s:
        rate += ", which is assumed (--storage-gb-per-s)"
    at_once = checkpointing(replace(request, checkpoint_is_async=True), chosen).account
    return [
        f"beside its seconds the step waits for checkpoints, {percent(frac)} of the time at {rate}; written beside "
        f"training they would take {percent(at_once.step_frac)} (--checkpoint-async)"
    ]


def without_effect(request: PlanRequest, chosen: Candidate) -> list[tuple[str, str]]:
    """Options that only another topology, or another transport, would read, and why."""
    work, limit = request.workload, request.model.max_context_tokens
    longest = round(work.prompt_tokens + work.max_response_tokens + work.observation_tokens)
    fits_anyway = f"the longest sequence of {longest} tokens is within the {limit} of {request.model.name}"
    everywhere = [("--max-context", fits_anyway)] if request.max_context_tokens >= limit >= longest else []
    if request.assumptions.method == "paper":
        return everywhere  # of the rest `_unused_by_paper` tells
    shares, awake = "engine and trainer share their GPUs", "no engine sleeps where each side has its own GPUs"
    is_apart, is_cpu = not is_colocated(chosen.mode), request.cluster.accelerator.is_cpu
    stays = "each side has its own GPUs"
    if is_cpu:
        awake = stays = "on a processor nothing has to make room"
    on_hosts = host_bytes_per_gpu(request, chosen)
    idle: dict[str, tuple[bool, str]] = {
        "--idle-state": (request.idle_state != "auto" and (is_apart or is_cpu), stays),
        "--sleep-level": (request.sleep_level is not None and (is_apart or is_cpu), awake),
        "--rebuild-engine": (request.rebuilds_engine and (is_apart or is_cpu), awake),
        "--host-gb-per-gpu": (
            request.host_bytes_per_gpu > HOST_BYTES_PER_GPU >= on_hosts,
            f"its training state takes {format_bytes(on_hosts)} of it",
        ),
        "--lend": (
            request.lend_switch_s > 0 and not request.lends(chosen.mode),
            "an on-policy step is planned without" if is_apart else shares,
        ),
        "--changed-frac": (
            request.changed_frac != CHANGED_FRAC and chosen.sync_method != "delta",
            "whole weights are sent" if is_apart else f"{shares}, so no delta is sent",
        ),
        "--max-staleness": (
            request.max_staleness_steps > 1 and chosen.is_on_policy,
            "an on-policy step trains on no older token",
        ),
    }
    return everywhere + [(option, why) for option, (is_idle, why) in idle.items() if is_idle]


def idle_by_split(request: PlanRequest) -> list[str]:
    """A note of the GPUs that neither side of the asked split has."""
    if request.split is None:
        return []
    rollout_gpus, train_gpus = request.split
    idle = request.cluster.num_gpus - rollout_gpus - train_gpus
    return (
        [f"the split {rollout_gpus}:{train_gpus} leaves {counted(idle, 'GPU')} without work"] if idle else []
    )


_SEES = re.compile(r"-(VL|Omni)\b", re.IGNORECASE)
"""In the name of a model that has more than a language model: of the registry's, as a config.json says so itself."""


def warnings_of(request: PlanRequest, base: Candidate) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = [f"{request.model.name}: {note}" for note in request.model.assumed]
    if _SEES.search(request.model.name) and not request.model.assumed:
        notes.append(
            f"{request.model.name}: the plan is of its language model alone, with the figures of the text model of "
            "that shape; count an image's tokens among those of the prompt (--prompt-tokens)"
        )
    notes += [f"{request.cluster.accelerator.name}: {note}" for note in request.cluster.accelerator.assumed]
    if request.cluster.accelerator.is_cpu and request.assumptions.method != "paper":
        notes += own_seconds_note(request.cluster)
    work = request.workload
    num_cut = sum(length > work.max_response_tokens for length in work.length_samples)
    if num_cut:
        notes.append(
            f"{num_cut} of {len(work.length_samples)} measured lengths pass the limit of {work.max_response_tokens} "
            "tokens and are taken as cut there"
        )
    notes += idle_by_split(request)
    if request.assumptions.method == "paper":
        notes.append(PAPER_HAS_NO_RANGE)
        notes += _unused_by_paper(request)
        notes += [
            f"{stage} computes above the peak: the paper account has no compute roof, use --assume default"
            for stage in above_peak(base.account, request.cluster)
        ]
    return notes


def _unused_by_paper(request: PlanRequest) -> list[str]:
    """What was asked for and the paper account has no term for."""
    work = request.workload
    asked = {
        "lengths beyond their mean and limit": bool(work.length_samples)
        or work.length_sigma != DEFAULT_SIGMA,
        f"engines in {request.rollout_dtype}": request.rollout_dtype == "float8",
        f"{request.recompute} recomputation": request.recompute != "auto",
        f"a reward model of its own size ({work.reward_model.name if work.reward_model else ''})": (
            work.reward_model is not None
        ),
        "chunks of prefill": work.prefill_chunk_tokens > 0,
        "what an engine keeps asleep": request.sleep_level not in (None, 2) or request.rebuilds_engine,
        "training state that stays on shared GPUs": request.idle_state == "device",
        "the share of changed weights": request.changed_frac != CHANGED_FRAC,
    }
    return [
        f"the paper account has no term for {what}: use --assume default"
        for what, is_asked in asked.items()
        if is_asked
    ]
