"""A plan: the account of one step, the ranked topologies, the recommendation, and why.

make_plan(request) ──► search ──► recommendation ──► derivation, waterfall, sensitivity, Pareto front
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.errors import PlanError
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.lengths import DEFAULT_SIGMA
from rollbook.ledger.own_machine import own_seconds_note
from rollbook.ledger.step import is_colocated
from rollbook.ledger.switch import SleepChoice
from rollbook.ledger.sync import CHANGED_FRAC
from rollbook.observe.numbers import counted
from rollbook.planner.beside import Beside, Checkpointing, beside, checkpointing
from rollbook.planner.candidate import Candidate, host_bytes_per_gpu, host_bytes_per_node
from rollbook.planner.choice import best_of, choose
from rollbook.planner.derivation import Reasoned, derive
from rollbook.planner.growth import Grown, growth
from rollbook.planner.layouts import trainer_stacks
from rollbook.planner.offload import Offload
from rollbook.planner.publication import Publication, choose_publication
from rollbook.planner.request import HOST_BYTES_PER_GPU, PAPER_HAS_NO_RANGE, PlanRequest
from rollbook.planner.search import Search, node_unit
from rollbook.planner.sensitivity import Shift, sensitivity
from rollbook.planner.waterfall import Loss, above_peak, waterfall
from rollbook.planner.words import MODE_TITLES, device_words, format_bytes, percent, split

_MOST_GPUS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The best step on one number of GPUs."""

    num_gpus: int
    best: Candidate | None

    def as_json(self) -> dict[str, object]:
        best = self.best
        if best is None:
            return {"num_gpus": self.num_gpus, "fits": False}
        rollout, train = best.split
        return {
            "num_gpus": self.num_gpus,
            "fits": True,
            "mode": best.mode,
            "num_rollout_gpus": rollout,
            "num_train_gpus": train,
            "step_s": best.step_s,
            "gpu_hours": best.step_s * self.num_gpus / 3600,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything `rollbook plan` knows."""

    request: PlanRequest
    base: Candidate
    """Colocated and synchronous on all GPUs: the account that "step" shows."""
    candidates: tuple[Candidate, ...]
    """Those that fit by step time, then those that do not."""
    chosen: Candidate | None
    """The recommendation; None when nothing fits."""
    choice_because: str
    publication: Publication | None
    beside: Beside
    """Checkpoints, adapters and environments of what is recommended, or of the base."""
    derivation: tuple[Reasoned, ...]
    base_waterfall: tuple[Loss, ...]
    chosen_waterfall: tuple[Loss, ...]
    sizes: tuple[Size, ...]
    shifts: tuple[Shift, ...]
    growth: tuple[Grown, ...]
    """Moments of training as responses grow; empty where no growth was given."""
    smallest_changes: tuple[str, ...]
    """When nothing fits: changes of the question that would, the smallest first."""
    warnings: tuple[str, ...] = field(default=())
    advice: tuple[str, ...] = field(default=())
    """What would shorten the recommended topology's step and was not chosen unasked, and what was asked for and changes
    nothing of it."""

    def require_chosen(self) -> Candidate:
        """Raises PlanError when nothing fits."""
        if self.chosen is None:
            raise PlanError(self.choice_because, "; or ".join(self.smallest_changes) or _NO_CHANGE)
        return self.chosen

    @property
    def chosen_notes(self) -> tuple[str, ...]:
        """What is to be known of the recommended topology's numbers, beside the warnings about model and device."""
        notes = (*self.chosen.account.notes, *self.advice) if self.chosen else ()
        return tuple(note for note in dict.fromkeys(notes) if note not in self.request.model.assumed)

    def as_json(self) -> dict[str, object]:
        """One object, keys as in `rollbook plan --json`."""
        r = self.request
        prose = {
            "step": self._step_json(self.base),
            **self.beside.as_json(),
            "topologies": [c.as_json() for c in self.candidates],
            "recommendation": self._recommendation_json(),
            "waterfall": _losses_json(self.base, self.base_waterfall),
            "derivation": [reasoned.as_json() for reasoned in self.derivation],
            "gpus": [size.as_json() for size in self.sizes],
            "growth": [grown.as_json() for grown in self.growth],
            "sensitivity": [shift.as_json() for shift in self.shifts],
            "warnings": list(self.warnings),
        }
        return {
            "workload": r.workload.as_json(),
            "model": r.model.as_json(),
            "cluster": cluster_json(r.cluster),
            "assumptions": r.assumptions.as_json(),
            **(_about_cpus(prose) if r.cluster.accelerator.is_cpu else prose),
        }

    def _recommendation_json(self) -> dict[str, object]:
        chosen = self.chosen
        if chosen is None:
            return {
                "mode": None,
                "because": self.choice_because,
                "smallest_changes": list(self.smallest_changes),
            }
        publication = self.publication
        assert publication is not None
        return {
            **chosen.as_json(),
            "notes": list(self.chosen_notes),
            "title": _topology(chosen),
            "because": self.choice_because,
            "max_staleness_steps": staleness_bound(chosen, self.request),
            "publication": publication.as_json(),
            "host_bytes_per_node": host_bytes_per_node(self.request, chosen),
            "step": self._step_json(chosen),
            "waterfall": _losses_json(chosen, self.chosen_waterfall),
            "smallest_changes": [],
        }

    def _step_json(self, candidate: Candidate) -> dict[str, object]:
        """Its account, and which topology that is of: the one at the top is seldom the recommended one."""
        return {
            **candidate.account.as_json(),
            "topology": _topology(candidate),
            "is_recommended": candidate is self.chosen,
        }


def _topology(candidate: Candidate) -> str:
    return f"{MODE_TITLES[candidate.mode]}, {split(*candidate.split, candidate.mode)}"


def _losses_json(candidate: Candidate, losses: tuple[Loss, ...]) -> list[dict[str, object]]:
    return [{**loss.as_json(), "mode": candidate.mode, "topology": _topology(candidate)} for loss in losses]


def _about_cpus(part: Any) -> Any:
    """The same object with every text, not the keys, about processors."""
    if isinstance(part, dict):
        return {key: _about_cpus(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_about_cpus(value) for value in part]
    return device_words(part, is_cpu=True) if isinstance(part, str) else part


_NO_CHANGE = "use a smaller model, more GPUs or shorter responses"


def make_plan(request: PlanRequest, *, is_brief: bool = False) -> Plan:
    """Answer `request`.

    Args:
        is_brief: leave out the Pareto front over GPUs and the sensitivity.
    Raises:
        PlanError: a question that cannot be meant. A plan that fits nowhere is an answer, not an error.
    """
    request.check()
    search = Search(request)
    candidates = search.run()
    if _may_offload_all(request) and not any(c.fits for c in candidates):
        offloaded = Search(replace(request, offload="optimizer"), layouts=search.layouts)
        with_offload = offloaded.run()
        if any(c.fits for c in with_offload):
            search, candidates = offloaded, with_offload
    base = next(c for c in candidates if c.mode == "sync")
    chosen, because = choose(request, candidates)
    changes: tuple[str, ...] = ()
    if chosen is None:
        changes = tuple(smallest_changes(request))
    publication = choose_publication(request, chosen) if chosen else None
    around = beside(request, chosen or base)
    brief = is_brief or chosen is None
    # What-ifs keep the training state where it is.
    is_moved = chosen is not None and chosen.train.is_offloaded
    placed = replace(search.request, offload=chosen.train.offload) if chosen and is_moved else search.request
    has_front = not brief and not request.cluster.accelerator.is_cpu  # a CPU plan is of this machine
    return Plan(
        request=request,
        base=base,
        candidates=tuple(candidates),
        chosen=chosen,
        choice_because=because,
        publication=publication,
        beside=around,
        derivation=tuple(derive(request, search, candidates, chosen, because, publication, around, changes)),
        base_waterfall=tuple(waterfall(base.account, request.cluster)),
        chosen_waterfall=tuple(waterfall(chosen.account, request.cluster)) if chosen else (),
        sizes=tuple(_sizes(request, search, chosen)) if has_front and chosen else (),
        shifts=()
        if brief or chosen is None
        else tuple(sensitivity(placed, chosen, search.layouts, search.engines)),
        growth=tuple(growth(placed, chosen, search.layouts))
        if chosen and request.length_growth_frac and not is_brief
        else (),
        smallest_changes=changes,
        warnings=tuple(_warnings(request, base)),
        advice=(
            *_checkpoint_advice(request, chosen, around.checkpoint),
            *(
                f"{option} changes nothing of what is recommended: {why}"
                for option, why in without_effect(request, chosen)
            ),
        )
        if chosen
        else (),
    )


_VISIBLE_CHECKPOINTS_FRAC = 0.05


def _checkpoint_advice(request: PlanRequest, chosen: Candidate, planned: Checkpointing) -> list[str]:
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
    usual, is_apart = SleepChoice(), not is_colocated(chosen.mode)
    on_hosts = host_bytes_per_gpu(request, chosen)
    idle: dict[str, tuple[bool, str]] = {
        "--sleep-level": (request.sleep.sleep_level != usual.sleep_level and is_apart, awake),
        "--rebuild-engine": (request.sleep.rebuilds_engine and is_apart, awake),
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


def staleness_bound(chosen: Candidate, request: PlanRequest) -> int:
    """Versions that the config allows: none on-policy."""
    return 0 if chosen.is_on_policy else request.max_staleness_steps


_STATE: dict[Offload, str] = {"optimizer": "the optimizer state", "weights": "all of the training state"}
_MOST_LOOKED_AT = 32


def smallest_changes(request: PlanRequest) -> list[str]:
    """Single changes after which something fits, the least disruptive first."""
    changes = []
    if request.rollout_tp and _fits(replace(request, rollout_tp=0)):
        changes.append("leave --rollout-tp to the planner")
    chunk = request.workload.prefill_chunk_tokens
    if chunk and _fits(replace(request, workload=replace(request.workload, prefill_chunk_tokens=0))):
        changes.append("give a step a larger budget of tokens, or prefill prompts whole (--prefill-chunk 0)")
    if request.assumptions.method != "paper":
        on_hosts = _least_offload(replace(request, offload="auto")) if request.offload == "none" else None
        if on_hosts:
            changes.append(f"keep {_STATE[on_hosts]} in host memory (--offload auto)")
        if request.offload in ("optimizer", "weights") and _fits(replace(request, offload="auto")):
            changes.append("leave the place of the training state to the planner (--offload auto)")
        if enough_gb := _enough_host_gb(request):
            changes.append(f"give training state more host memory (--host-gb-per-gpu {enough_gb})")
        if request.rollout_dtype == "bfloat16" and _fits(replace(request, rollout_dtype="auto")):
            changes.append("let the engines hold float8 weights (--rollout-dtype auto)")
    enough = _smallest_cluster(request)
    if enough:
        offload = _least_offload(_on(request, enough)) if request.offload == "auto" else None
        where = f", with {_STATE[offload]} in host memory" if offload and offload != "none" else ""
        changes.append(
            f"use {counted(enough, 'GPU')} instead of {request.cluster.num_gpus}{where} (--num-gpus {enough})"
        )
    work = request.workload
    for factor in (2, 4, 8):
        longest = work.max_response_tokens // factor
        if longest <= work.response_tokens:
            break
        if _fits(replace(request, workload=replace(work, max_response_tokens=longest))):
            changes.append(f"limit responses to {longest} tokens (--max-response-tokens {longest})")
            break
    return changes


def _fits(request: PlanRequest) -> bool:
    return _least_offload(request) is not None


def _least_offload(request: PlanRequest) -> Offload | None:
    """What has to be in host memory for something to fit, as little as possible; None where nothing fits."""
    try:
        request.check()
    except PlanError:
        return None
    found = next(Search(request, is_brief=True).fitting(), None)
    if found is None and _may_offload_all(request):
        return _least_offload(replace(request, offload="optimizer"))
    return found.train.offload if found else None


def _enough_host_gb(request: PlanRequest) -> int | None:
    """Of a GPU, with which something fits; None where no host memory is enough."""
    roomy = replace(request, host_bytes_per_gpu=math.inf)
    needed = [host_bytes_per_gpu(request, c) for c in Search(roomy, is_brief=True).run() if c.fits]
    return math.ceil(min(needed) / 1e9) if needed else None


def _may_offload_all(request: PlanRequest) -> bool:
    """The paper account asks for the optimizer state in host memory only where no topology fits without."""
    return request.offload == "auto" and request.assumptions.method == "paper"


def _smallest_cluster(request: PlanRequest) -> int | None:
    unit = node_unit(request)
    size = request.cluster.num_gpus
    while size < _MOST_GPUS:
        size *= 2
        if unit == 1 and size > request.cluster.gpus_per_node:
            unit = request.cluster.gpus_per_node
            size = -(-size // unit) * unit
        if _fits(_on(request, size)):
            low, high = size // 2 // unit, size // unit
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if _fits(_on(request, middle * unit)) else (middle, high)
            # Degrees divide some counts and not others, so a smaller one may fit that was passed over.
            least = request.cluster.num_gpus // unit + 1
            looked_at = range(least, high, max((high - least) // _MOST_LOOKED_AT, 1))
            return unit * next((n for n in looked_at if _fits(_on(request, n * unit))), high)
    return None


def _on(request: PlanRequest, num_gpus: int) -> PlanRequest:
    return replace(request, cluster=replace(request.cluster, num_gpus=num_gpus), split=None)


def _sizes(request: PlanRequest, search: Search, chosen: Candidate) -> list[Size]:
    """Best step on half, twice, ... the GPUs in whole nodes, beside what is `chosen` on the cluster as it is."""
    per_node, gpus = request.cluster.gpus_per_node, request.cluster.num_gpus
    counts = {gpus, 2 * gpus}
    size = gpus
    while size > 1 and len(counts) < 7:
        size = size // 2 if size <= per_node else max(size // 2 // per_node, 1) * per_node
        counts.add(size)
    sizes = []
    for num_gpus in sorted(c for c in counts if c <= 2 * _MOST_GPUS):
        if num_gpus == gpus:
            sizes.append(Size(num_gpus=num_gpus, best=chosen))
            continue
        at_size = _on(request, num_gpus)
        try:
            at_size.check()
        except PlanError:
            continue
        usable = [layout for layout in search.layouts if num_gpus % layout.num_gpus == 0]
        best = best_of(_beside(search, at_size, usable))
        if best is None and _may_offload_all(request):
            best = best_of(Search(replace(at_size, offload="optimizer"), layouts=usable, is_brief=True))
        sizes.append(Size(num_gpus=num_gpus, best=best))
    return sizes


def _beside(search: Search, request: PlanRequest, layouts: list[ReplicaLayout]) -> Search:
    """A brief search of `request`, which differs from that of `search` in the cluster's size alone. A side knows only
    its own GPUs, so both share theirs, where both have the same software to train with."""
    beside = Search(request, layouts=layouts, is_brief=True)
    if layouts and request.offload == search.request.offload and request.assumptions.method != "paper":
        beside.engines = search.engines.in_layouts(layouts)
        if trainer_stacks(request) == trainer_stacks(search.request):
            beside.trainers = search.trainers
    return beside


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


def _warnings(request: PlanRequest, base: Candidate) -> list[str]:
    """What a reader must know before believing the numbers."""
    notes = [f"{request.model.name}: {note}" for note in request.model.assumed]
    if _SEES.search(request.model.name) and not request.model.assumed:
        notes.append(
            f"{request.model.name}: the plan is of its language model alone; count an image's tokens among those of "
            "the prompt (--prompt-tokens)"
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
        "what an engine keeps asleep": request.sleep != SleepChoice(),
        "the share of changed weights": request.changed_frac != CHANGED_FRAC,
    }
    return [
        f"the paper account has no term for {what}: use --assume default"
        for what, is_asked in asked.items()
        if is_asked
    ]


def cluster_json(cluster: Cluster) -> dict[str, object]:
    """The "cluster" object of `plan --json`."""
    a = cluster.accelerator
    return {
        "gpu": a.name,
        "num_gpus": cluster.num_gpus,
        "gpus_per_node": cluster.gpus_per_node,
        "num_nodes": cluster.num_nodes,
        "peak_flops_per_s": dict(a.peak_flops_per_s),
        "hbm_bytes": a.hbm_bytes,
        "hbm_bytes_per_s": a.hbm_bytes_per_s,
        "scale_up_bytes_per_s": a.scale_up_bytes_per_s,
        "host_link_bytes_per_s": a.host_link_bytes_per_s,
        "nic_bytes_per_s": cluster.nic_bytes_per_s,
        "sources": list(a.sources),
    }
