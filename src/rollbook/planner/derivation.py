"""The six steps from a workload to a topology, as one would defend them in a design review.

1 what a step must do  ─►  2 who fits where  ─►  3 how generation runs  ─►  4 which topology, by time
                                ▲                                                  │
                                └──── does not fit: sent back, visibly ◄── 5 whole nodes, memory, layouts
                                                                                   │
                                                                     6 publication and staleness
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rollbook.ledger.account import Flops
from rollbook.ledger.adapters import policy_state_bytes
from rollbook.ledger.asynchrony import AsyncAccount, async_account
from rollbook.observe.numbers import counted
from rollbook.planner.beside import Beside
from rollbook.planner.candidate import (
    BACKEND_TITLES,
    Candidate,
    rollout_layout_json,
    rollout_s,
    train_layout_json,
)
from rollbook.planner.engines import engine_sentence
from rollbook.planner.layouts import train_degrees
from rollbook.planner.offload import HELD, host_state_bytes
from rollbook.planner.publication import Publication
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import OFFLOAD_GAIN_FRAC, Search, node_unit
from rollbook.planner.sides import fitting_layouts
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    count,
    flop_count,
    format_bytes,
    percent,
    seconds,
    split,
    split_gpus,
)

_MOST_SENT_BACK = 4
_MOST_OF_READING = 0.3
"""Share of peak above which a decode step is no matter of memory alone."""
STEPS_OF_WHAT_FITS = (1, 2, 5)
"""What stays true where nothing fits: seconds of a step that cannot run mean nothing."""
_LAST_TITLE = "Publication, staleness, and what stands beside the step"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoned:
    """One step of the derivation."""

    step: int
    title: str
    inputs: dict[str, object]
    outputs: dict[str, object]
    because: str

    def as_json(self) -> dict[str, object]:
        return {
            "step": self.step,
            "title": self.title,
            "inputs": self.inputs,
            "outputs": self.outputs,
            "because": self.because,
        }


def derive(
    request: PlanRequest,
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    choice_because: str,
    publication: Publication | None,
    around: Beside,
    changes: tuple[str, ...],
) -> list[Reasoned]:
    """The six steps; the last two say what would have to change when nothing fits."""
    base = next(c for c in candidates if c.mode == "sync")
    return [
        _work(request, base),
        _memory(request, base),
        _generation(request, base),
        _topology(request, search, candidates, base),
        _layouts(request, search, candidates, chosen, choice_because, changes),
        _publication(request, search, chosen, publication, around, changes),
    ]


def _work(request: PlanRequest, base: Candidate) -> Reasoned:
    work, model, flops = request.workload, request.model, base.account.flops
    at_peak_s = flops.total / request.cluster.peak_flops_per_s
    training = flops.train + flops.critic
    return Reasoned(
        step=1,
        title="What one step has to do",
        inputs={
            "num_prompts": work.num_prompts,
            "group_size": work.group_size,
            "prompt_tokens": work.prompt_tokens,
            "response_tokens": work.response_tokens,
            "max_response_tokens": work.max_response_tokens,
            "algorithm": work.algorithm,
            "params": model.params,
            "active_params": model.active_params,
        },
        outputs={
            "num_sequences": work.num_sequences,
            "response_tokens_total": work.response_tokens_total,
            "trained_tokens": work.trained_tokens,
            "flops": flops.total,
            "generate_frac": (flops.generate + flops.prefill) / flops.total,
            "train_frac": training / flops.total,
            "at_peak_s": at_peak_s,
        },
        because=(
            f"A step samples {count(work.num_sequences)} responses ({count(work.response_tokens_total)} tokens) and "
            f"passes {count(work.trained_tokens)} tokens through the trainer: {flop_count(flops.total)} FLOPs, of "
            f"which {_shares(flops)}. At the peak of {request.cluster.num_gpus} "
            f"{request.cluster.accelerator.name} that is {seconds(at_peak_s)}; whatever the step takes beyond that "
            f"has to be explained.{_critic_note(request)}"
        ),
    )


def _shares(flops: Flops) -> str:
    """Of the step's FLOPs: all kinds of work that it has."""
    parts = {
        "training is": flops.train + flops.critic,
        "generation": flops.generate + flops.prefill,
        "the reference and proximal passes": flops.reference + flops.proximal,
        "the reward model": flops.reward_model,
    }
    *first, last = (f"{name} {percent(value / flops.total)}" for name, value in parts.items() if value)
    return f"{', '.join(first)} and {last}"


def _critic_note(request: PlanRequest) -> str:
    """What the paper account takes a critic for, which its text leaves open."""
    if request.workload.num_trained_models == 1 or request.assumptions.method != "paper":
        return ""
    return (
        f" The critic's 8 N FLOPs a token are 2 N of values at the forward MFU and 6 N of training at the training "
        f"MFU; its {request.assumptions.train_state_bytes_per_param:g} bytes a parameter cross in a colocated "
        "hand-over like the policy's."
    )


def _memory(request: PlanRequest, base: Candidate) -> Reasoned:
    cluster, assumptions, model = request.cluster, request.assumptions, request.model
    memory = base.account.memory
    usable = cluster.accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    num_models = request.workload.num_trained_models
    rank = request.workload.lora_rank
    state = num_models * policy_state_bytes(model, request.workload, assumptions)
    on_host = host_state_bytes(request, base.train.offload)
    least = max(math.ceil((state - on_host) / usable), 1)
    per_node = cluster.gpus_per_node
    nodes = math.ceil(least / per_node)
    weights = memory["weights_bytes"]
    critic = ", policy and critic," if num_models == 2 else ""
    kept = (
        f"of it {format_bytes(on_host)}, the {HELD[base.train.offload]}, are kept in host memory; "
        if on_host
        else ""
    )
    of = f" of the adapters, {assumptions.weight_bytes_per_param:g} of the frozen base" if rank else ""
    return Reasoned(
        step=2,
        title="What has to fit where",
        inputs={
            "hbm_bytes": cluster.accelerator.hbm_bytes,
            "memory_overhead_frac": assumptions.memory_overhead_frac,
            "train_state_bytes_per_param": assumptions.train_state_bytes_per_param,
        },
        outputs={
            "usable_bytes_per_gpu": usable,
            "weights_bytes": weights,
            "train_state_bytes": state,
            "host_state_bytes": on_host,
            "min_train_gpus": least,
            "replica_gpus": base.rollout_layout.num_gpus,
            "kv_bytes_per_token": memory["kv_bytes_per_token"],
        },
        because=(
            f"The training state of {model.name}{critic} is {format_bytes(state)} at "
            f"{assumptions.train_state_bytes_per_param:g} bytes a parameter{of}; {kept}with {format_bytes(usable)} "
            f"usable on a GPU {'the rest' if on_host else 'it'} needs at least {counted(least, 'GPU')}"
            + (f", so {nodes} whole nodes" if nodes > 1 and cluster.num_nodes > 1 else "")
            + f", before activations. {_replica_words(request, base)}"
        ),
    )


def _replica_words(request: PlanRequest, base: Candidate) -> str:
    """What the weights take of an engine replica: in its number format, tensors that several GPUs repeat once each."""
    rollout, num_gpus = base.account.rollout, base.rollout_layout.num_gpus
    held = num_gpus * (rollout.weights_bytes_per_gpu - rollout.judge_bytes_per_gpu)
    replica = f"replica of {counted(num_gpus, 'GPU')}"
    if rollout.why_not:
        return f"The {format_bytes(held)} of weights for generation are more than a {replica} can hold."
    judge = num_gpus * rollout.judge_bytes_per_gpu
    both = f" and the {format_bytes(judge)} of the reward model" if judge else ""
    return (
        f"A {replica} holds the {format_bytes(held)} of weights for generation{both}, with "
        f"{format_bytes(rollout.kv_pool_bytes)} left for KV{_engine_share(request)}."
    )


def _engine_share(request: PlanRequest) -> str:
    """How much of a GPU an engine may take where a trainer lives on it, which is what `base` is."""
    if request.assumptions.method == "paper" or request.cluster.accelerator.is_cpu:
        return ""
    return (
        f", of the {percent(request.assumptions.engine_memory_frac)} of a GPU that an engine beside a trainer may take "
        "(of its own GPUs it takes all that is usable)"
    )


def _generation(request: PlanRequest, base: Candidate) -> Reasoned:
    rollout, work = base.account.rollout, request.workload
    busy = base.account.seconds.generate_throughput + base.account.seconds.generate_tail
    waves = counted(rollout.num_waves, "wave")
    replicas = counted(rollout.num_replicas, "replica")
    whose = "the replica" if rollout.num_replicas == 1 else "all replicas"
    return Reasoned(
        step=3,
        title="How generation runs",
        inputs={
            "replica": rollout_layout_json(base.rollout_layout),
            "num_rollout_gpus": rollout.num_gpus,
            "response_tokens": work.response_tokens,
            "max_response_tokens": work.max_response_tokens,
        },
        outputs={
            "num_replicas": rollout.num_replicas,
            "slots_per_replica": rollout.slots_per_replica,
            "num_waves": rollout.num_waves,
            "decode_step_s": rollout.decode_step_s,
            "tokens_per_s_per_gpu": rollout.tokens_per_s_per_gpu,
            "mfu_frac": rollout.mfu_frac,
            "generate_s": busy,
            "clip_frac": work.lengths().clip_frac,
            "tail_frac": base.account.tail_frac,
        },
        because=(
            f"On all GPUs, {replicas} of {counted(rollout.slots_per_replica, 'slot')} "
            f"{'takes' if rollout.num_replicas == 1 else 'each take their share of'} the "
            f"{count(work.num_sequences)} responses in {waves}. A decode step of {seconds(rollout.decode_step_s)} "
            f"{'is spent reading memory, not computing' if rollout.mfu_frac < _MOST_OF_READING else 'computes'}: "
            f"{percent(rollout.mfu_frac)} of peak with full slots. "
            + (
                f"Of the {seconds(busy)} of decoding, {percent(base.account.tail_frac)} is the tail, in which a few "
                f"responses of up to {count(work.max_response_tokens)} tokens hold {whose}; only asynchrony can "
                "fill it."
                if base.account.seconds.generate_tail
                else f"The {seconds(busy)} of decoding have no tail: all responses end together."
            )
            + (f" {families}" if (families := engine_sentence(request, base)) else "")
        ),
    )


def _topology(request: PlanRequest, search: Search, candidates: list[Candidate], base: Candidate) -> Reasoned:
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


def _layouts(
    request: PlanRequest,
    search: Search,
    candidates: list[Candidate],
    chosen: Candidate | None,
    choice_because: str,
    changes: tuple[str, ...],
) -> Reasoned:
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
        sentences.append(_layout_sentence(request, chosen))
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
    return f"{engine}{rest}.{_other_trainer(chosen)}"


_VISIBLE_GAIN_FRAC = 0.1


def _other_trainer(chosen: Candidate) -> str:
    """Why this trainer and not the other one, where that is no matter of course."""
    train, other = chosen.train, chosen.train.instead
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


def _publication(
    request: PlanRequest,
    search: Search,
    chosen: Candidate | None,
    publication: Publication | None,
    around: Beside,
    changes: tuple[str, ...],
) -> Reasoned:
    if chosen is None or publication is None:
        return Reasoned(
            step=6,
            title=_LAST_TITLE,
            inputs={},
            outputs={},
            because="Nothing fits, so there is nothing to publish to. "
            + ("Any one of these would do: " + "; ".join(changes) + "." if changes else ""),
        )
    inputs: dict[str, object] = {"max_staleness_steps": request.max_staleness_steps}
    outputs: dict[str, object] = {
        "method": publication.method,
        "sync_s": publication.seconds,
        "bytes": publication.account.total_bytes,
        "sync_every": publication.sync_every,
    }
    because = f"{capitalized(publication.because)}."
    if chosen.is_on_policy:
        outputs["max_staleness_steps"] = 0
        because += (
            " Every token is trained by the version that sampled it, so no bound and no correction is needed."
        )
    else:
        ages = expected_staleness(request, chosen, publication)
        by_bound = step_by_bound(request, search, chosen)
        outputs |= {
            "max_staleness_steps": request.max_staleness_steps,
            "sync_frac": ages.sync_frac,
            "mean_staleness_steps": ages.bounded_staleness_steps,
            "over_bound_frac": ages.over_bound_frac,
            "max_in_flight": ages.max_in_flight,
            "step_s_by_bound": {str(bound): step_s for bound, step_s in by_bound.items()},
        }
        because += (
            f" With a bound of {counted(request.max_staleness_steps, 'version')} at most {count(ages.max_in_flight)} "
            f"trajectories are admitted and not yet trained; a token is {ages.bounded_staleness_steps:.1f} versions "
            "old on average when it trains, and the importance weights correct for it."
        )
        if ages.max_generation_steps > 1:
            because += f" The longest responses span {ages.max_generation_steps:.1f} steps"
            if request.assumptions.method == "paper":
                because += "; the paper account does not charge the wait for them (`rollbook simulate` does)."
            else:
                told = ", ".join(f"{seconds(s)} at {bound}" for bound, s in by_bound.items())
                because += f", and the trainer waits for them as far as the bound demands: {told}."
    return Reasoned(
        step=6,
        title=_LAST_TITLE,
        inputs=inputs,
        outputs=outputs | around.as_json(),
        because=f"{because} {around.sentences()}",
    )


_BOUNDS = (1, 2, 4, 8)


def step_by_bound(request: PlanRequest, search: Search, chosen: Candidate) -> dict[int, float]:
    """Step time of the chosen topology under wider staleness bounds.

    Args:
        search: whose trainers do not know the bound.
    """
    steps = {}
    for bound in _BOUNDS:
        at = chosen
        if bound != request.max_staleness_steps:
            wider = Search(replace(request, max_staleness_steps=bound), layouts=[chosen.rollout_layout])
            wider.trainers = search.trainers
            at = wider.candidate(chosen.mode, *chosen.split, chosen.train.offload)
        steps[bound] = at.step_s
    return steps


def expected_staleness(request: PlanRequest, chosen: Candidate, publication: Publication) -> AsyncAccount:
    """Ages in the steady state of an asynchronous topology."""
    rollout = chosen.account.rollout
    return async_account(
        request.workload.lengths(),
        num_sequences=request.workload.num_sequences,
        token_s=rollout.decode_step_s,
        update_s=chosen.step_s,
        publish_s=publication.seconds,
        max_staleness_steps=request.max_staleness_steps,
    )
