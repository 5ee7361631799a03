"""The six steps from a workload to a topology, as one would defend them in a design review.

1 what a step must do  ─►  2 who fits where  ─►  3 how generation runs  ─►  4 which topology, by time
                                ▲                                                  │
                                └──── does not fit: sent back, visibly ◄── 5 whole nodes, memory, layouts
                                                                                   │
                                                                     6 publication and staleness
"""

from __future__ import annotations

from rollbook.planner.beside import Beside
from rollbook.planner.candidate import Candidate
from rollbook.planner.derived_publication import step_publication
from rollbook.planner.derived_topology import step_layouts, step_topology
from rollbook.planner.derived_work import step_generation, step_memory, step_work
from rollbook.planner.publication import Publication
from rollbook.planner.reasoned import Reasoned
from rollbook.planner.request import PlanRequest
from rollbook.planner.search import Search

STEPS_OF_WHAT_FITS = (1, 2, 5)
"""What stays true where nothing fits: seconds of a step that cannot run mean nothing."""


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
        step_work(request, base),
        step_memory(request, base),
        step_generation(request, base),
        step_topology(request, search, candidates, base),
        step_layouts(request, search, candidates, chosen, choice_because, changes),
        step_publication(request, search, chosen, publication, around, changes),
    ]
