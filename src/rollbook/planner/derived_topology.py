"""Steps 4 and 5 of the derivation: which topology by time alone, and what whole nodes and memory leave of it."""

from __future__ import annotations

from dataclasses import replace

from rollbook.ledger.step import is_colocated
from rollbook.observe.numbers import counted
from rollbook.planner.candidate import (
    BACKEND_TITLES,
    Candidate,
    rollout_layout_json,
    rollout_s,
    train_layout_json,
)
from rollbook.planner.host_memory import OFFLOAD_GAIN_FRAC
from rollbook.planner.idling import sharing_sentence
from rollbook.planner.layouts import train_degrees
from rollbook.planner.offload import HELD
from rollbook.planner.reasoned import Reasoned
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.sides import fitting_layouts
from rollbook.planner.splits import node_unit
from rollbook.planner.words import MODE_TITLES, capitalized, format_bytes, percent, seconds, split, split_gpus

_MOST_SENT_BACK = 4


def step_topology(
    request: PlanRequest, search: Search, candidates: list[Candidate], base: Candidate
) -> Reasoned:
    """Colocated sums the stages, separated balances two sides."""
    gpus = request.cluster.num_gpus
    optimal = search.time_optimal_rollout_gpus()
    best_by_mode = {
        mode: min((c for c in candidates if c.mode == mode), key=lambda c: c.step_s, default=None)
        for mode in MODE_TITLES
    }
    outputs: dict[str, object] = {
        f"{mode}_step_s": c.step_s for mode, c in best_by_mode.items() if c is not None
    }
    because = (
        f"Colocated and synchronous, the stages add up to {seconds(base.step_s)}, at {percent(base.account.mfu_frac)} "
        "of peak."
    )
    if sharing := sharing_sentence(request, base):
        because += f" {sharing}"
        outputs["idle_choices"] = [idle.as_json() for idle in base.idles]
    if optimal is not None:
        at = search.candidate("separate_async", optimal, gpus - optimal)
        rollout_side_s = rollout_s(at.account.rollout, "separate_async")
        train_side_s = at.account.train.total_s
        outputs |= {
            "time_optimal_split": [optimal, gpus - optimal],
            "rollout_side_s": rollout_side_s,
            "train_side_s": train_side_s,
        }
        are_equal = abs(rollout_side_s - train_side_s) < _MEETS_FRAC * max(rollout_side_s, train_side_s)
        meet = "meet" if are_equal else "come closest"
        judging = " and judging" if at.account.rollout.reward_s else ""
        because += (
            f" Separated and asynchronous, each side computed with its own GPUs, the two sides {meet} at "
            f"{optimal}:{gpus - optimal}: {seconds(rollout_side_s)} of generation{judging} beside "
            f"{seconds(train_side_s)} of forwards and training, so a step of "
            f"{seconds(max(rollout_side_s, train_side_s))}, memory and whole nodes not yet "
            f"asked{_beyond_the_sides(at, max(rollout_side_s, train_side_s))}."
        )
    colocated = best_by_mode.get("colocate_async")
    if colocated is not None:
        because += (
            f" Keeping partial responses on shared GPUs takes {seconds(colocated.step_s)}: no tail, but generation "
            "and training still take turns."
        )
    return Reasoned(
        step=4,
        title="Which topology, by time alone",
        inputs={"num_gpus": gpus, "modes": list(MODE_TITLES)},
        outputs=outputs,
        because=because,
    )


_MEETS_FRAC = 0.1
"""Up to which two sides take equally long: whole replicas leave no finer choice."""
_VISIBLE_FRAC = 0.05
"""Share of a side's seconds from which what comes on top of it is told."""


def _beyond_the_sides(at: Candidate, side_s: float) -> str:
    """What makes the step of the time optimum longer than its slower side."""
    s = at.account.seconds
    parts = [
        ("the staleness bound", at.account.bound_s),
        ("publication", s.sync),
        ("what lies between", s.other),
    ]
    told = [f"{name} {seconds(value)}" for name, value in parts if value > _VISIBLE_FRAC * side_s]
    if not told or at.step_s < (1 + _VISIBLE_FRAC) * side_s:
        return ""
    return f"; with what a step has besides ({', '.join(told)}) it is {seconds(at.step_s)}"


def step_layouts(
    request: PlanRequest,
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    choice_because: str,
    changes: tuple[str, ...],
) -> Reasoned:
    """What is sent back, and what stands in which layouts."""
    refused = _sent_back(candidates, chosen, search.time_optimal_rollout_gpus())
    wall, enough = _memory_wall(candidates)
    outputs: dict[str, object] = {
        "sent_back": [
            {
                "mode": c.mode,
                "num_rollout_gpus": c.split[0],
                "num_train_gpus": c.split[1],
                "step_s": c.step_s,
                "why_not": list(c.why_not),
            }
            for c in refused
        ],
        "node_gpus": node_unit(request),
    }
    sentences = [
        f"{capitalized(MODE_TITLES[c.mode])} {split(*c.split, c.mode)}"
        # Of a step that can be run nowhere the seconds mean nothing.
        f"{f' ({seconds(c.step_s)})' if chosen else ''} goes back: {c.why_not[0]}."
        for c in refused
    ]
    if wall is not None:
        outputs["memory_wall"] = {"num_train_gpus": wall.split[1], "why_not": wall.account.train.why_not[0]}
        if wall not in refused:
            sentences.append(
                f"Every split with {counted(wall.split[1], 'training GPU')} or fewer goes back for memory: "
                f"{wall.account.train.why_not[0]}"
                + (f"; of the splits looked at, {enough} are the fewest that hold it." if enough else ".")
            )
    if chosen is None:
        outputs["smallest_changes"] = list(changes)
        sentences.append("Nothing fits." + (f" The smallest change: {changes[0]}." if changes else ""))
    else:
        rollout, train = chosen.split
        outputs |= {
            "mode": chosen.mode,
            "num_rollout_gpus": rollout,
            "num_train_gpus": train,
            "rollout_layout": rollout_layout_json(chosen.rollout_layout),
            "train_layout": train_layout_json(chosen.train, train),
            "offload": chosen.train.offload,
            "offloads": {result.offload: result.as_json() for result in chosen.offloads},
            "step_s": chosen.step_s,
        }
        sentences.append(
            f"What stands is {MODE_TITLES[chosen.mode]} on {split_gpus(*chosen.split, chosen.mode)}: {choice_because}."
        )
        sentences.append(_layout_sentence(request, chosen) + _other_trainer(search, chosen))
        if is_colocated(chosen.mode) and (sharing := sharing_sentence(request, chosen)):
            outputs |= {key: chosen.as_json()[key] for key in ("idle_state", "sleep_level", "idle_choices")}
            if chosen.mode != "sync":  # of that the fourth step tells
                sentences.append(sharing)
    return Reasoned(
        step=5,
        title="Whole nodes, memory and layouts",
        inputs={"gpus_per_node": request.cluster.gpus_per_node, "num_nodes": request.cluster.num_nodes},
        outputs=outputs,
        because=" ".join(sentences),
    )


def _layout_sentence(request: PlanRequest, chosen: Candidate) -> str:
    layout, replica = chosen.train.layout, chosen.rollout_layout
    split_by = ", ".join(train_degrees(layout))
    # The fewest GPUs a layer is split over may fit too, and be slower.
    at_hand = replace(request, assumptions=chosen.train.assumptions)
    least = fitting_layouts(at_hand, chosen.account.train.num_gpus)[0][0]
    batch = "one micro batch of the longest sequence"
    if chosen.train.backend == "megatron":
        batch += " beside the weights and gradients of a rank"
    why = f"because {batch} would not fit otherwise"
    if least.model_parallel_size < layout.model_parallel_size:
        why = "the fastest that fits"
        if least.recompute == "full" and layout.recompute != "full":
            why = f"because {batch} would have to recompute everything otherwise, which takes longer"
    how = f"splits by {split_by}, {why}," if split_by else "shards its state over all of its GPUs"
    backend = BACKEND_TITLES[chosen.train.backend]
    engine = f"An engine replica takes {counted(replica.num_gpus, 'GPU')}"
    if replica.num_gpus > 1:
        engine += f" (TP {replica.tp_size}" + (f", EP {replica.ep_size}" if replica.ep_size > 1 else "") + ")"
    rollout = chosen.account.rollout
    rest = (
        f", which leaves {format_bytes(rollout.kv_pool_bytes)} for KV: {counted(rollout.slots_per_replica, 'slot')}. "
        f"The trainer, {backend}, {how} with {layout.recompute} recomputation"
    )
    if chosen.train.is_offloaded:
        rest += f", and keeps {HELD[chosen.train.offload]} in host memory {_why_offloaded(request, chosen)}"
    return f"{engine}{rest}."


_VISIBLE_GAIN_FRAC = 0.1


def _other_trainer(search: Search, chosen: Candidate) -> str:
    """Why this trainer and not the other one, where that is no matter of course."""
    train, other = chosen.train, search.trainers.other(chosen.train)
    if other is None:
        return ""
    name = BACKEND_TITLES[other.backend]
    if not other.fits:
        return f" {name} does not fit: {other.side.why_not[0]}." if train.backend == "megatron" else ""
    gain = 1 - other.side.total_s / train.side.total_s
    if train.backend == "megatron":
        return f" {name}, which gathers all experts for every micro batch, would take {seconds(other.side.total_s)}."
    if gain < _VISIBLE_GAIN_FRAC:
        return ""
    return (
        f" {name}, which asks for converted checkpoints, would take {seconds(other.side.total_s)} for forwards and "
        f"training instead of {seconds(train.side.total_s)} (--stack {other.assumptions.stack})."
    )


def _why_offloaded(request: PlanRequest, chosen: Candidate) -> str:
    near = next((result for result in chosen.offloads if result.offload == "none"), None)
    if request.offload == chosen.train.offload:
        return "as was asked for"
    if near is None or near.why_not:
        return "because they do not fit on the device"
    gain = 1 - chosen.step_s / near.step_s
    return (
        f"because the step is {percent(gain)} shorter for it, at {seconds(near.step_s)} without: training then "
        f"recomputes less or is split less, and less than {percent(OFFLOAD_GAIN_FRAC)} would not pay for a moving part"
    )


def _sent_back(candidates: list[Candidate], chosen: Candidate | None, optimal: int | None) -> list[Candidate]:
    """Refused candidates that were faster than what stands, the fastest few; the time optimum is always told."""
    limit = chosen.step_s if chosen else float("inf")
    possible = [c for c in candidates if not c.fits and c.split[0] >= c.rollout_layout.num_gpus]
    faster = sorted((c for c in possible if c.step_s < limit), key=lambda c: c.step_s)[:_MOST_SENT_BACK]
    at_optimum = [c for c in possible if c.mode == "separate_async" and c.split[0] == optimal]
    return faster + [c for c in at_optimum if c not in faster]


def _memory_wall(candidates: list[Candidate]) -> tuple[Candidate | None, int]:
    """The split with the most training GPUs of those that are too few, whatever their layout, and the fewest that are
    enough; 0 where none are."""
    separated = [c for c in candidates if c.mode == "separate_async"]
    enough = min((c.split[1] for c in separated if c.train.fits), default=0)
    short = [c for c in separated if not c.train.fits and (c.split[1] < enough or not enough)]
    return max(short, key=lambda c: c.split[1], default=None), enough
