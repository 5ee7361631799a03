"""The account of one step under chosen assumptions: the entry points of the ledger.

rollout_side(...)   train_side(...)   ->   join_sides(...)        what a search over splits calls
step_account(...)                                                 all three in one call
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from rollbook.errors import ConfigError, PlanError, nearest_name
from rollbook.ledger.account import Flops, RolloutSide, StepAccount, TrainSide, combine
from rollbook.ledger.adapters import trained_params
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.flops import default_flops, forward_flops, sequence_mean_square
from rollbook.ledger.generation import default_rollout_side
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.own_machine import own_host_s
from rollbook.ledger.paper import (
    half_grown_tokens,
    paper_flops,
    paper_rollout_side,
    paper_switch_s,
    paper_sync_s,
    paper_train_side,
)
from rollbook.ledger.reliability import scale_factor, widening
from rollbook.ledger.switch import BASE_MOVE, Move, SleepChoice, hand_over
from rollbook.ledger.sync import CHANGED_FRAC, SyncMethod, SyncWork, sync_account
from rollbook.ledger.train import default_train_side
from rollbook.ledger.workload import MODES, Mode, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """How both roles are spread and connected; `paper` reads only the replica's number of GPUs."""

    replica: ReplicaLayout
    train: TrainLayout = field(default_factory=TrainLayout)
    sync_method: SyncMethod | None = None
    """None: in process where the roles share devices, broadcast where they do not."""
    max_staleness_steps: int = 1
    sleep: SleepChoice = field(default_factory=SleepChoice)
    changed_frac: float = CHANGED_FRAC
    """Share of the weights that a delta sends."""
    state_is_offloaded: bool = False
    """The trainer's weights lie in host memory when a publication starts."""


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
    layouts: Layouts | None = None,
) -> StepAccount:
    """What one step costs.

    Args:
        num_rollout_gpus, num_train_gpus: of the separated modes; colocated modes use the whole cluster for both.
        rollout_tp: GPUs of one replica when no `layouts` are given; 0 takes `smallest_rollout_tp`.
        layouts: both roles' layouts; left out, replicas of `rollout_tp` and fully sharded training.
    Raises:
        PlanError: an unknown mode, or a split that does not add up to at most the cluster.
    """
    if mode not in MODES:
        raise PlanError(f"mode is {mode!r}", nearest_name(mode, MODES))
    if rollout_tp < 0:
        raise PlanError(f"rollout TP is {rollout_tp}", "give a number of GPUs of at least 1")
    if is_colocated(mode):
        num_rollout_gpus = num_train_gpus = cluster.num_gpus
    elif num_rollout_gpus < 1 or num_train_gpus < 1 or num_rollout_gpus + num_train_gpus > cluster.num_gpus:
        raise PlanError(
            f"{mode} with {num_rollout_gpus} rollout and {num_train_gpus} train GPUs of {cluster.num_gpus}",
            "give each side at least one GPU and no more than the cluster has",
        )
    if layouts is None:
        tp_size = rollout_tp or smallest_rollout_tp(model, cluster, assumptions)
        layouts = Layouts(replica=ReplicaLayout(tp_size=tp_size))
    rollout = rollout_side(
        model, workload, cluster, assumptions, mode=mode, num_gpus=num_rollout_gpus, layouts=layouts
    )
    train = train_side(model, workload, cluster, assumptions, num_gpus=num_train_gpus, layout=layouts.train)
    return join_sides(
        model, workload, cluster, assumptions, mode=mode, layouts=layouts, rollout=rollout, train=train
    )


def is_colocated(mode: Mode) -> bool:
    """True where engine and trainer share their devices."""
    return mode in ("sync", "colocate_async")


def rollout_side(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    mode: Mode = "sync",
    num_gpus: int,
    layouts: Layouts,
    held_bytes: float = 0.0,
    follows_environments: bool = True,
) -> RolloutSide:
    """Generation on `num_gpus` devices. Under `default` a colocated engine gets part of the memory only.

    Args:
        held_bytes: of each device, those that a trainer keeps while the engine is awake; the paper account knows none.
        follows_environments: False leaves out what agents' calls add to a step (`env_wait_s`, and of `busy_s`), which
            takes far longer to find than all the rest.
    """
    if assumptions.method == "paper":
        return paper_rollout_side(
            model, workload, cluster, assumptions, num_gpus=num_gpus, tp_size=layouts.replica.num_gpus
        )
    return default_rollout_side(
        model,
        workload,
        cluster,
        assumptions,
        num_gpus=num_gpus,
        layout=layouts.replica,
        memory_frac=shared_memory_frac(cluster, assumptions, held_bytes) if is_colocated(mode) else 1.0,
        max_staleness_steps=layouts.max_staleness_steps,
        follows_environments=follows_environments,
    )


def shared_memory_frac(cluster: Cluster, assumptions: Assumptions, held_bytes: float = 0.0) -> float:
    """Share of a shared device's memory that engines may take beside what a trainer keeps there meanwhile."""
    held_frac = held_bytes / cluster.accelerator.hbm_bytes
    return max(min(assumptions.engine_memory_frac, 1 - assumptions.memory_overhead_frac - held_frac), 0.0)


def train_side(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    num_gpus: int,
    layout: TrainLayout,
) -> TrainSide:
    """Forwards and training on `num_gpus` devices.

    Raises:
        ConfigError: the assumptions name a training stack that they do not describe.
    """
    if assumptions.method == "paper":
        return paper_train_side(model, workload, cluster, assumptions, num_gpus=num_gpus)
    if assumptions.stack not in assumptions.stacks:
        raise ConfigError(
            f"assumptions.stack is {assumptions.stack!r}", nearest_name(assumptions.stack, assumptions.stacks)
        )
    return default_train_side(model, workload, cluster, assumptions, num_gpus=num_gpus, layout=layout)


def step_flops(model: ModelSpec, workload: Workload, assumptions: Assumptions) -> Flops:
    """FLOPs of one step."""
    if assumptions.method == "paper":
        return paper_flops(model, workload)
    return default_flops(model, workload)


def join_sides(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    mode: Mode,
    layouts: Layouts,
    rollout: RolloutSide,
    train: TrainSide,
) -> StepAccount:
    """The account of two sides that were computed before."""
    flops = step_flops(model, workload, assumptions)
    if layouts.train.recompute == "full" and assumptions.method != "paper":
        passes = workload.num_trained_models * workload.num_epochs
        one_pass = workload.num_sequences * forward_flops(
            model, workload.sequence_tokens, sequence_mean_square(workload)
        )
        flops = replace(flops, recomputed=passes * one_pass)
    memory = memory_account(model, workload, assumptions, rollout=rollout, train=train)
    if assumptions.method == "paper":
        return combine(
            mode,
            cluster=cluster,
            rollout=rollout,
            train=train,
            flops=flops,
            memory=memory,
            switch_s=paper_switch_s(model, workload, cluster, assumptions),
            sync_s=paper_sync_s(model, assumptions),
        )
    published = sync_account(
        model,
        cluster,
        assumptions.sync,
        publication_work(
            layouts,
            assumptions,
            mode=mode,
            num_train_gpus=train.num_gpus,
            num_rollout_gpus=rollout.num_gpus,
            lora_rank=workload.lora_rank if workload.publishes_adapters else 0,
        ),
    )
    moves = hand_over_moves(
        model, workload, cluster, assumptions, rollout=rollout, train=train, sleep=layouts.sleep
    )
    wider, notes = step_widening(cluster, workload, assumptions, mode)
    beside_s = 0.0 if cluster.accelerator.is_cpu else assumptions.base_s(workload.num_sequences)
    base_s = beside_s + sum(move.seconds for move in moves if move.name == BASE_MOVE and is_colocated(mode))
    account = combine(
        mode,
        cluster=cluster,
        rollout=rollout,
        train=train,
        flops=flops,
        memory=memory,
        switch_s=sum(move.seconds for move in moves),
        sync_s=published.seconds,
        overlaps_sync=False,
        other_s=own_host_s(model, workload, cluster, assumptions) if cluster.accelerator.is_cpu else beside_s,
        sync_error_frac=published.error_frac,
        widening=wider,
        notes=notes,
    )
    return with_base_note(account, base_s, assumptions.name)


def publication_work(
    layouts: Layouts,
    assumptions: Assumptions,
    *,
    mode: Mode,
    num_train_gpus: int,
    num_rollout_gpus: int,
    lora_rank: int = 0,
) -> SyncWork:
    """What a publication between these layouts moves, and how; plans and published measurements are described by it.

    Args:
        lora_rank: above 0, adapters alone are sent.
    """
    train, replica = layouts.train, layouts.replica
    return SyncWork(
        method=layouts.sync_method or ("in_process" if is_colocated(mode) else "broadcast"),
        num_train_gpus=num_train_gpus,
        num_rollout_gpus=num_rollout_gpus,
        replica_gpus=replica.num_gpus,
        weight_dtype=replica.weight_dtype,
        changed_frac=layouts.changed_frac,
        state_is_offloaded=layouts.state_is_offloaded,
        lora_rank=lora_rank,
        splits_experts=assumptions.sync.splits_experts > 0,
        shares_devices=is_colocated(mode),
        quantizes_tensors=replica.weight_dtype == "float8",
        pp_size=train.pp_size,
        ep_size=train.ep_size,
        engine_ep_size=replica.ep_size,
        dense_copies=replica.attention_copies,
        # torch FSDP cuts every tensor over all its ranks, Megatron over those of a tensor group.
        shard_gpus=train.tp_size if assumptions.is_megatron else 0,
    )


def with_base_note(account: StepAccount, base_s: float, assumed: str) -> StepAccount:
    """`account`, with a note and a range down to what is left where costs that no work explains are most of the step.

    They were fitted on frameworks' jobs of many GPUs; a small job, or a leaner loop, has less of them.
    """
    value = account.step_s.value
    if base_s <= _MOST_BASE_FRAC * value:
        return account
    note = (
        f"{base_s:.1f} s of the step are base costs of other frameworks' loops, measured on 8 GPUs and more; a leaner "
        "loop has less (--assume rollbook, or a file)"
        if assumed == "default"
        else f"{base_s:.1f} s of the step are base costs that no work explains, as `{assumed}` has them"
    )
    span = replace(account.step_s, low=min(account.step_s.low, value - base_s))
    return replace(account, step_s=span, notes=(*account.notes, note))


_MOST_BASE_FRAC = 0.35
"""Share of a step above which base costs decide it."""


def step_widening(
    cluster: Cluster, workload: Workload, assumptions: Assumptions, mode: Mode
) -> tuple[float, tuple[str, ...]]:
    """Factor on the error of a whole step, with a note on what nobody measured."""
    if cluster.accelerator.is_cpu:
        return 1.0, ()
    wider, notes = widening(assumptions, "step", {"mode": [mode]}, what="RL steps")
    wider *= assumptions.step_error_factor
    longest = workload.prompt_tokens + workload.max_response_tokens + workload.observation_tokens
    for size, most, what in (
        (cluster.num_gpus, assumptions.most_step_gpus, "an RL step on more than {:,} GPUs"),
        (longest, assumptions.most_sequence_tokens, "sequences of more than {:,} tokens"),
    ):
        scale = scale_factor(size, most)
        if scale > 1:
            wider *= scale
            notes += (
                f"no published measurement of {what.format(most)}: the step's range is {scale:g} times as wide",
            )
    return wider, notes


def hand_over_moves(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    rollout: RolloutSide,
    train: TrainSide,
    sleep: SleepChoice | None = None,
) -> list[Move]:
    """Every move of a step's hand-overs on one GPU that both roles share, under the default account.

    Training state counts as an even share of all GPUs under Megatron, too: with what its ranks hold whole besides, the
    open steps of NeMo RL with Megatron, within 5 % as it is, would come out 13 to 43 % too long.

    On a processor engine and trainer share one process and its memory: nothing is handed over or waited for.
    """
    if cluster.accelerator.is_cpu:
        return []
    return hand_over(
        model,
        cluster,
        assumptions.switch,
        num_gpus=train.num_gpus,
        choice=sleep,
        rollout_weights_bytes_per_gpu=rollout.weights_bytes_per_gpu,
        state_bytes_per_param=workload.num_trained_models
        * assumptions.train_state_bytes_per_param
        * trained_params(model, workload)
        / model.params,
        frozen_bytes_per_param=assumptions.weight_bytes_per_param
        * int(workload.uses_reference or workload.lora_rank > 0)
        + train.reward_model_bytes_per_gpu * train.num_gpus / model.params,
    )


def memory_account(
    model: ModelSpec, workload: Workload, assumptions: Assumptions, *, rollout: RolloutSide, train: TrainSide
) -> dict[str, float]:
    """The "memory" object of `plan --json`, in bytes.

    `kv_total_bytes` is the KV that all sequences of the step would hold half-grown at once; over the pools of
    all replicas it gives the waves. A critic's state stands apart from `train_state_bytes`.
    """
    number = assumptions.kv_bytes_per_number
    per_token, tokens = model.kv_bytes_per_token(number), half_grown_tokens(workload)
    # Windows cap their layers, and linear layers hold a state; the paper account has one KV for every token.
    per_sequence = tokens * per_token if assumptions.method == "paper" else model.kv_bytes(tokens, number)
    return {
        "weights_bytes": assumptions.weight_bytes_per_param * model.params,
        "train_state_bytes": train.train_state_bytes_per_gpu * train.num_gpus,
        "train_state_bytes_per_gpu": train.train_state_bytes_per_gpu,
        "critic_state_bytes_per_gpu": train.critic_state_bytes_per_gpu,
        "reference_bytes_per_gpu": train.reference_bytes_per_gpu,
        "reward_model_bytes_per_gpu": train.reward_model_bytes_per_gpu,
        "rollout_weights_bytes_per_gpu": rollout.weights_bytes_per_gpu,
        "kv_bytes_per_token": per_token,
        "kv_total_bytes": workload.num_sequences * per_sequence,
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
