"""A plan: the account of one step, the ranked topologies, the recommendation, and why.

make_plan(request) ──► search ──► recommendation ──► derivation, waterfall, sensitivity, Pareto front
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from rollbook.errors import PlanError
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import ReplicaLayout
from rollbook.planner.beside import Beside, beside
from rollbook.planner.candidate import Candidate, host_bytes_per_node
from rollbook.planner.cautions import checkpoint_advice, spare_gpus, warnings_of, without_effect
from rollbook.planner.choice import best_of, choose
from rollbook.planner.derivation import derive
from rollbook.planner.growth import Grown, growth
from rollbook.planner.layouts import trainer_stacks
from rollbook.planner.publication import Publication, choose_publication
from rollbook.planner.reasoned import Reasoned
from rollbook.planner.remedies import MOST_GPUS, may_offload_all, on_gpus, smallest_changes
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search
from rollbook.planner.sensitivity import Shift, sensitivity
from rollbook.planner.waterfall import Loss, waterfall
from rollbook.planner.words import MODE_TITLES, device_words, split


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
    if may_offload_all(request) and not any(c.fits for c in candidates):
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
    sizes = _sizes(request, search, chosen) if has_front and chosen else []
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
        sizes=tuple(sizes),
        shifts=()
        if brief or chosen is None
        else tuple(sensitivity(placed, chosen, search.layouts, search.engines)),
        growth=tuple(growth(placed, chosen, search.layouts))
        if chosen and request.length_growth_frac and not is_brief
        else (),
        smallest_changes=changes,
        warnings=tuple(warnings_of(request, base)),
        advice=(
            *spare_gpus(
                chosen,
                request.cluster.num_gpus,
                {s.num_gpus: s.best.step_s for s in sizes if s.best is not None},
            ),
            *checkpoint_advice(request, chosen, around.checkpoint),
            *(
                f"{option} changes nothing of what is recommended: {why}"
                for option, why in without_effect(request, chosen)
            ),
        )
        if chosen
        else (),
    )


def staleness_bound(chosen: Candidate, request: PlanRequest) -> int:
    """Versions that the config allows: none on-policy."""
    return 0 if chosen.is_on_policy else request.max_staleness_steps


def _sizes(request: PlanRequest, search: Search, chosen: Candidate) -> list[Size]:
    """Best step on half, twice, ... the GPUs in whole nodes, beside what is `chosen` on the cluster as it is."""
    per_node, gpus = request.cluster.gpus_per_node, request.cluster.num_gpus
    counts = {gpus, 2 * gpus}
    size = gpus
    while size > 1 and len(counts) < 7:
        size = size // 2 if size <= per_node else max(size // 2 // per_node, 1) * per_node
        counts.add(size)
    sizes = []
    for num_gpus in sorted(c for c in counts if c <= 2 * MOST_GPUS):
        if num_gpus == gpus:
            sizes.append(Size(num_gpus=num_gpus, best=chosen))
            continue
        at_size = on_gpus(request, num_gpus)
        try:
            at_size.check()
        except PlanError:
            continue
        usable = [layout for layout in search.layouts if num_gpus % layout.num_gpus == 0]
        best = best_of(_beside(search, at_size, usable))
        if best is None and may_offload_all(request):
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
