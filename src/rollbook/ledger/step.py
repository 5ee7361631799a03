"""The account of one step under chosen assumptions: the entry points of the ledger.

rollout_side(...)   train_side(...)   ->   step_account(...)
"""

from __future__ import annotations

from rollbook.errors import PlanError
from rollbook.ledger.account import Flops, RolloutSide, StepAccount, TrainSide, combine
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.paper import (
    half_grown_tokens,
    paper_flops,
    paper_rollout_side,
    paper_switch_s,
    paper_sync_s,
    paper_train_side,
)
from rollbook.ledger.workload import MODES, Mode, Workload


def step_account(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    mode: Mode = "sync",
    num_rollout_gpus: int = 0,
    num_train_gpus: int = 0,
    rollout_tp: int = 0,
) -> StepAccount:
    """What one step costs.

    Args:
        num_rollout_gpus, num_train_gpus: of the separated modes; colocated modes use the whole cluster for both.
        rollout_tp: GPUs of one replica; 0 takes `smallest_rollout_tp`.
    Raises:
        PlanError: an unknown mode, or a split that does not add up to at most the cluster.
    """
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}", f"choose one of: {', '.join(MODES)}")
    if mode in ("sync", "colocate_async"):
        num_rollout_gpus = num_train_gpus = cluster.num_gpus
    elif num_rollout_gpus < 1 or num_train_gpus < 1 or num_rollout_gpus + num_train_gpus > cluster.num_gpus:
        raise PlanError(
            f"{mode} with {num_rollout_gpus} rollout and {num_train_gpus} train GPUs of {cluster.num_gpus}",
            "give each side at least one GPU and no more than the cluster has",
        )
    rollout = rollout_side(
        model, workload, cluster, assumptions, num_gpus=num_rollout_gpus, tp_size=rollout_tp
    )
    train = train_side(model, workload, cluster, assumptions, num_gpus=num_train_gpus)
    return join_sides(model, workload, cluster, assumptions, mode=mode, rollout=rollout, train=train)


def rollout_side(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    num_gpus: int,
    tp_size: int = 0,
) -> RolloutSide:
    """Generation on `num_gpus` devices; `tp_size` 0 takes `smallest_rollout_tp`."""
    tp_size = tp_size or smallest_rollout_tp(model, cluster, assumptions)
    return paper_rollout_side(model, workload, cluster, assumptions, num_gpus=num_gpus, tp_size=tp_size)


def train_side(
    model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions, *, num_gpus: int
) -> TrainSide:
    """Forwards and training on `num_gpus` devices."""
    return paper_train_side(model, workload, cluster, assumptions, num_gpus=num_gpus)


def step_flops(model: ModelSpec, workload: Workload, assumptions: Assumptions) -> Flops:
    """FLOPs of one step."""
    return paper_flops(model, workload)


def join_sides(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    mode: Mode,
    rollout: RolloutSide,
    train: TrainSide,
) -> StepAccount:
    """The account of two sides that were computed before: what a search over splits calls."""
    return combine(
        mode,
        cluster=cluster,
        rollout=rollout,
        train=train,
        flops=step_flops(model, workload, assumptions),
        memory=memory_account(model, workload, assumptions, rollout=rollout, train=train),
        switch_s=paper_switch_s(model, cluster, assumptions),
        sync_s=paper_sync_s(model, assumptions),
    )


def memory_account(
    model: ModelSpec, workload: Workload, assumptions: Assumptions, *, rollout: RolloutSide, train: TrainSide
) -> dict[str, float]:
    """The "memory" object of `plan --json`, in bytes.

    `kv_total_bytes` is the KV that all sequences of the step would hold half-grown at once; over the pools of
    all replicas it gives the waves. A critic's state stands apart from `train_state_bytes`.
    """
    per_token = model.kv_bytes_per_token(assumptions.kv_bytes_per_number)
    return {
        "weights_bytes": assumptions.weight_bytes_per_param * model.params,
        "train_state_bytes": train.train_state_bytes_per_gpu * train.num_gpus,
        "train_state_bytes_per_gpu": train.train_state_bytes_per_gpu,
        "critic_state_bytes_per_gpu": train.critic_state_bytes_per_gpu,
        "reference_bytes_per_gpu": train.reference_bytes_per_gpu,
        "rollout_weights_bytes_per_gpu": rollout.weights_bytes_per_gpu,
        "kv_bytes_per_token": per_token,
        "kv_total_bytes": workload.num_sequences * half_grown_tokens(workload) * per_token,
        "kv_pool_bytes": rollout.kv_pool_bytes,
        "activation_bytes_per_gpu": train.activation_bytes_per_gpu,
    }


_MOST_WEIGHTS_FRAC = 0.6
"""A replica whose weights take more than this of its memory has too little left for KV."""


def smallest_rollout_tp(model: ModelSpec, cluster: Cluster, assumptions: Assumptions) -> int:
    """Smallest power of two of GPUs whose usable memory the weights fill to at most 60 per cent."""
    usable_bytes = cluster.accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    weights_bytes = assumptions.weight_bytes_per_param * model.params
    tp_size = 1
    while weights_bytes > _MOST_WEIGHTS_FRAC * tp_size * usable_bytes:
        tp_size *= 2
    return tp_size
