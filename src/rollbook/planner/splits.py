"""How the GPUs of separated sides are shared out: where both take equally long, and the splits worth joining."""

from __future__ import annotations

from rollbook.ledger.layout import ReplicaLayout
from rollbook.planner.candidate import rollout_s
from rollbook.planner.request import PlanRequest
from rollbook.planner.sides import RolloutSides, TrainSides

_MOST_UNITS_LISTED = 64
"""Above this many nodes only a grid and the neighbourhood of the optimum are joined."""


def node_unit(request: PlanRequest) -> int:
    """GPUs that a separated side is made of: whole nodes, or single GPUs inside one node."""
    return request.cluster.gpus_per_node if request.cluster.num_nodes > 1 else 1


def time_optimum(request: PlanRequest, engines: RolloutSides, trainers: TrainSides) -> int | None:
    """Rollout GPUs at which both asynchronous sides take equally long; whole replicas, not whole nodes."""
    gpus = request.cluster.num_gpus
    step = min(layout.num_gpus for layout in engines.layouts)
    low, high = 1, (gpus - 1) // step  # in replicas: low is too few for generation, high too many
    if high < 1:
        return None

    def sides_s(count: int) -> tuple[float, float]:
        side, _ = engines.best(count * step, "separate_async")
        return rollout_s(side, "separate_async"), trainers.best(gpus - count * step).side.total_s

    while high - low > 1:
        middle = (low + high) // 2
        rollout_side_s, train_side_s = sides_s(middle)
        low, high = (middle, high) if rollout_side_s > train_side_s else (low, middle)
    return min((low, high), key=lambda count: max(sides_s(count))) * step


def rollout_counts(
    request: PlanRequest, layouts: list[ReplicaLayout], optimal: int | None, *, is_brief: bool
) -> list[int]:
    """Splits to join: whole nodes, thinned on large clusters except around the optimum; brief, those next to it."""
    unit = node_unit(request)
    num_units = request.cluster.num_gpus // unit
    at = (optimal or 0) // unit
    if is_brief:
        beside = {u * unit for u in range(max(at - 1, 1), min(at + 3, num_units))}
        # Between whole replicas of the larger layouts some of a side's GPUs belong to none.
        sizes = {layout.num_gpus for layout in layouts}
        beside |= {(at * unit // size + more) * size for size in sizes for more in (0, 1)}
        whole = (n for n in beside if n % unit == 0 and 0 < n < num_units * unit)
        return sorted(whole, key=lambda n: abs(n - (optimal or 0)))  # the best first: it spares the others
    counts = list(range(1, num_units))
    if num_units > _MOST_UNITS_LISTED:
        stride = num_units // (_MOST_UNITS_LISTED // 2)
        near = range(-2, 4)
        every = {*range(stride, num_units, stride), *(at + d for d in near), num_units // 2}
        counts = sorted(u for u in every if 0 < u < num_units)
    return [u * unit for u in counts]
