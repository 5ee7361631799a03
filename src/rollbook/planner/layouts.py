"""Which parallel layouts a model admits on a number of GPUs, before anyone asks what they cost.

Trainers differ in what they can divide:

    FSDP2      shards every tensor over all training GPUs; context parallelism divides sequences
    Megatron   besides divides tensors, layers and experts between ranks, which hold their part whole
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.decode import replica_weight_bytes
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import Recompute, ReplicaLayout, TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.planner.request import PlanRequest

_MOST_REPLICA_GPUS = 64
_MOST_WEIGHTS_FRAC = 0.85
"""A replica whose weights fill more than this of its usable memory is not worth asking about."""


def replica_layouts(request: PlanRequest) -> list[ReplicaLayout]:
    """Engine layouts to try, smallest first; at least one, whether it fits or not.

    Dense models take tensor parallelism within the scale-up domain and beyond it only where weights demand it;
    mixtures of experts may spread experts wider than attention.
    """
    model, cluster = request.model, request.cluster
    dtypes = ["bfloat16"] if request.rollout_dtype == "auto" else [request.rollout_dtype]
    if request.rollout_dtype == "auto" and "float8" in cluster.accelerator.peak_flops_per_s:
        dtypes.append("float8")
    found: list[ReplicaLayout] = []
    for dtype in dtypes:
        shapes = [
            ReplicaLayout(tp_size=tp, ep_size=ep, weight_dtype=dtype, engine=request.engine)
            for tp, ep in _degrees(model, cluster, request.rollout_tp)
        ]
        holds = [s for s in shapes if _holds_weights(model, cluster, request.assumptions, s)]
        found += holds or shapes[-1:]
    return found


def _degrees(model: ModelSpec, cluster: Cluster, fixed_gpus: int) -> list[tuple[int, int]]:
    domain = min(cluster.accelerator.scale_up_gpus, max(cluster.gpus_per_node, 1), cluster.num_gpus)
    most = min(cluster.num_gpus, _MOST_REPLICA_GPUS)
    sizes = [fixed_gpus] if fixed_gpus else [2**i for i in range(7) if 2**i <= most]
    degrees: list[tuple[int, int]] = []
    for num_gpus in sizes:
        tps = [tp for tp in _powers(num_gpus) if model.num_heads % tp == 0]
        if not model.num_experts:
            degrees += [(num_gpus, 1)] if num_gpus in tps else []
            continue
        if model.num_experts % num_gpus:
            continue
        # Experts over the whole replica; attention repeated or split within the scale-up domain.
        degrees += [(tp, num_gpus) for tp in tps if tp <= domain or tp == num_gpus]
    return degrees or [(max(fixed_gpus, 1), 1)]


def _powers(num_gpus: int) -> list[int]:
    return [2**i for i in range(num_gpus.bit_length()) if num_gpus % 2**i == 0] or [1]


def _holds_weights(
    model: ModelSpec, cluster: Cluster, assumptions: Assumptions, layout: ReplicaLayout
) -> bool:
    usable = cluster.accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    return replica_weight_bytes(model, layout) <= _MOST_WEIGHTS_FRAC * usable


def trainer_stacks(request: PlanRequest) -> tuple[str, ...]:
    """Training software worth pricing, the plainest first: FSDP2 and Megatron, unless one was asked for."""
    stack = request.assumptions.stack
    is_asked_for = "stack" in request.assumptions.sources
    is_one_kind = request.assumptions.method == "paper" or request.cluster.num_gpus == 1
    return (stack,) if is_asked_for or is_one_kind else (stack, "megatron")


def train_layouts(request: PlanRequest, num_gpus: int) -> list[TrainLayout]:
    """Layouts of the trainer that `request.assumptions` name which divide `num_gpus`, the model's heads, layers and
    experts; plain sharding first."""
    model, cluster, assumptions = request.model, request.cluster, request.assumptions
    stack = assumptions.stacks.get(assumptions.stack)
    divides = assumptions.is_megatron
    # An FSDP2 trainer whose weights stay in place is one with expert parallelism.
    spreads_experts = model.num_experts and (divides or (stack is not None and stack.gather_passes == 0))
    domain = min(cluster.gpus_per_node, cluster.accelerator.scale_up_gpus)
    eps = [ep for ep in (1, 8, 16, 32, 64) if spreads_experts and model.num_experts % ep == 0] or [1]
    layouts = []
    for tp in (1, 2, 4, 8) if divides else (1,):
        if tp > domain or model.num_heads % tp or num_gpus % tp:
            continue
        for pp in (1, 2, 4, 8, 16) if divides else (1,):
            if last_stage_layers(model.num_layers, pp) < 1 or num_gpus % (tp * pp):
                continue
            for cp in (1, 2, 4, 8):
                if num_gpus % (tp * pp * cp) or tp * cp > domain:
                    continue
                layouts += [
                    TrainLayout(
                        tp_size=tp,
                        pp_size=pp,
                        cp_size=cp,
                        ep_size=max(e for e in eps if num_gpus % (pp * e) == 0),
                        recompute=recompute,
                        lora=request.workload.lora_rank > 0,
                    )
                    for recompute in _RECOMPUTE
                    if request.recompute in ("auto", recompute)
                ]
    return layouts


def train_degrees(layout: TrainLayout) -> list[str]:
    """Degrees above 1 of a trainer, in words: "TP 4", "PP 2"."""
    return degrees({"TP": layout.tp_size, "PP": layout.pp_size, "CP": layout.cp_size, "EP": layout.ep_size})


def degrees(sizes: Mapping[str, int]) -> list[str]:
    return [f"{name} {size}" for name, size in sizes.items() if size > 1]


def last_stage_layers(num_layers: int, num_stages: int) -> int:
    """Layers of the last pipeline stage, where all before it hold equally many: 61 in 16 stages are 15 x 4 + 1.

    >>> last_stage_layers(61, 16), last_stage_layers(64, 16), last_stage_layers(36, 16)
    (1, 4, -9)
    """
    return num_layers - (num_stages - 1) * math.ceil(num_layers / num_stages)


_RECOMPUTE: tuple[Recompute, ...] = ("selective", "full")
