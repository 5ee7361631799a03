"""Seconds and bytes of forwards and training.

    seconds of a token on one GPU = matrices + attention + memory-bound operators + exposed exchange

Matrices run at a fraction of the peak of their dtype, attention at a fraction of the bfloat16 peak, and
everything between them (norms, rotary, permutation of tokens to experts, activations) is bound by memory
traffic that grows with layers x hidden size, which is why small and sparse models reach so little of the peak.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rollbook.ledger.account import TrainSide
from rollbook.ledger.adapters import trained_params
from rollbook.ledger.assumptions import Assumptions, StackAssumptions
from rollbook.ledger.flops import attention_flops, sequence_mean_square, train_flops
from rollbook.ledger.hardware import Accelerator, Cluster
from rollbook.ledger.layout import TrainLayout
from rollbook.ledger.memory import train_memory
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.own_machine import own_seconds_width, own_training_s
from rollbook.ledger.quantity import apart_bytes, format_bytes
from rollbook.ledger.reliability import assumed_model_factor, model_traits, widening
from rollbook.ledger.traffic import dense_width, expert_width
from rollbook.ledger.workload import Workload
from rollbook.observe.numbers import counted


def token_s(
    model: ModelSpec,
    accelerator: Accelerator,
    stack: StackAssumptions,
    layout: TrainLayout,
    *,
    sequence_tokens: float,
    mean_square_tokens: float = 0.0,
    backward: bool,
) -> float:
    """GPU-seconds of one token, forward or forward and backward, pipeline full.

    Passes over the matrices: forward 1, backward 2 (1 for frozen ones), full recomputation 1 more. Attention
    backward costs 2.5 forwards (flash attention recomputes its scores), and its forward is recomputed with the rest.
    """
    spread = (mean_square_tokens / sequence_tokens**2) if mean_square_tokens else 1.0
    recomputes = backward and layout.recompute == "full"
    passes = 1.0 + (0.0 if not backward else 1.0 if layout.lora else 2.0) + recomputes
    repeats = stack.repeats_linear * (layout.tp_size * layout.cp_size - 1)
    linear = model.num_linear_layers * model.linear_params_per_layer
    weighted = (
        model.matmul_params + model.active_routed_params * (1 / stack.expert_factor - 1) + repeats * linear
    )
    rate = accelerator.peak(layout.dtype) * stack.gemm_frac_of(accelerator, layout.dtype)
    matrices_s = 2.0 * weighted * passes / rate
    attention = float(attention_flops(model, sequence_tokens)) / sequence_tokens * spread
    attention_passes = (3.5 if backward else 1.0) + recomputes
    attention_s = (
        attention * attention_passes / (accelerator.peak("bfloat16") * stack.attention_frac_of(accelerator))
    )
    between_s = _memory_bound_s(model, accelerator, stack, backward=backward, repeats=repeats)
    return matrices_s + attention_s + between_s


def _memory_bound_s(
    model: ModelSpec, accelerator: Accelerator, stack: StackAssumptions, *, backward: bool, repeats: float
) -> float:
    width = dense_width(model) + repeats * model.num_linear_layers / 2 * model.hidden_size
    seconds = max(stack.dense_bytes / accelerator.hbm_bytes_per_s, stack.least_s_per_width) * width
    seconds += max(stack.moe_bytes / accelerator.hbm_bytes_per_s, stack.moe_least_s) * expert_width(model)
    return seconds if backward else seconds * stack.forward_share


def train_tokens_per_s_per_gpu(
    model: ModelSpec,
    cluster: Cluster,
    stack: StackAssumptions,
    layout: TrainLayout,
    *,
    sequence_tokens: float,
    mean_square_tokens: float = 0.0,
) -> float:
    """Training throughput with exchange and bubble."""
    busy_s = token_s(
        model,
        cluster.accelerator,
        stack,
        layout,
        sequence_tokens=sequence_tokens,
        mean_square_tokens=mean_square_tokens,
        backward=True,
    )
    busy_s += exchange_s(model, cluster, stack, layout, backward=True)
    return (1 - bubble_frac(layout)) / busy_s


def exchange_s(
    model: ModelSpec, cluster: Cluster, stack: StackAssumptions, layout: TrainLayout, *, backward: bool
) -> float:
    """Exposed GPU-seconds a token of exchange inside the layers.

    Tensor parallelism reduces twice a block, forward and again backward. Context parallelism sends every token's keys
    and values to the other GPUs of its ring; backward they go round again, and their gradients with them. Tokens travel
    to the experts of other nodes and back.
    """
    seconds = 0.0
    share = (layout.tp_size - 1) / layout.tp_size
    if share:
        blocks = (model.num_attention_layers + model.num_linear_layers + model.num_mlp_layers) / 2
        moved = (2 if backward else 1) * blocks * 2 * 2 * model.hidden_size * 2 * share
        seconds += layout.tp_size * moved / _link(cluster, layout.tp_size)
    if layout.cp_size > 1:
        moved = (3 if backward else 1) * model.num_attention_layers * model.kv_width * 2 / layout.tp_size
        ring = _link(cluster, layout.tp_size * layout.cp_size)
        seconds += layout.tp_size * (layout.cp_size - 1) * moved / ring
    return seconds * stack.exposed_frac + _expert_exchange_s(model, cluster, stack, layout, backward=backward)


def _expert_exchange_s(
    model: ModelSpec, cluster: Cluster, stack: StackAssumptions, layout: TrainLayout, *, backward: bool
) -> float:
    """GPU-seconds a token of dispatch to other nodes and back, in bfloat16: once to a node, whatever it visits."""
    near = cluster.accelerator.scale_up_gpus
    domains = layout.ep_size * layout.tp_size / near if layout.ep_size > 1 else 1.0
    if not model.num_moe_layers or domains <= 1:
        return 0.0
    far = (domains - 1) * (1 - (1 - 1 / domains) ** model.experts_per_token)
    width = model.expert_input_size or model.hidden_size
    moved = (4 if backward else 2) * 2 * width * far * model.num_moe_layers
    return stack.expert_exchange_frac * moved / cluster.nic_bytes_per_s


def _link(cluster: Cluster, num_gpus: int) -> float:
    """Bytes a second and GPU between `num_gpus` that work on one layer."""
    crosses = num_gpus > cluster.accelerator.scale_up_gpus
    return cluster.nic_bytes_per_s if crosses else cluster.accelerator.scale_up_bytes_per_s


def gather_s(
    model: ModelSpec,
    cluster: Cluster,
    assumptions: Assumptions,
    stack: StackAssumptions,
    layout: TrainLayout,
    *,
    num_gpus: int,
    backward: bool,
) -> float:
    """Seconds in which a fully sharded trainer moves its weights for one micro batch on one GPU.

    Each GPU receives (g - 1)/g of the weights it computes with, twice with a backward, and sends as many
    gradients; experts that stay in place (expert parallelism) are not moved.
    """
    group = num_gpus // layout.model_parallel_size
    if stack.gather_passes == 0 or group <= 1:
        return 0.0
    share = (group - 1) / group
    params = model.computed_params - model.routed_params + model.routed_params / layout.ep_size
    params /= layout.tp_size * layout.pp_size
    accelerator = cluster.accelerator
    link = (
        cluster.nic_bytes_per_s if num_gpus > accelerator.scale_up_gpus else accelerator.scale_up_bytes_per_s
    )
    passes = stack.gather_passes if backward else 1.0
    return passes * assumptions.weight_bytes_per_param * params * share / (stack.link_frac * link)


def update_exchange_s(
    model: ModelSpec, cluster: Cluster, stack: StackAssumptions, layout: TrainLayout, *, num_gpus: int
) -> float:
    """Exposed seconds of one optimizer update: gradients reduced in float32 and weights gathered in bfloat16, between
    the GPUs that hold the same part of the model. Batches of few tokens a GPU spend as long on it as on computing."""
    copies = max(num_gpus // (layout.tp_size * layout.pp_size), 1)
    expert_copies = max(num_gpus // (layout.pp_size * max(layout.ep_size, layout.tp_size)), 1)
    parts = (
        ((model.computed_params - model.routed_params) / (layout.tp_size * layout.pp_size), copies),
        (model.routed_params / (layout.pp_size * max(layout.ep_size, layout.tp_size)), expert_copies),
    )
    moved = sum(6.0 * params * (1 - 1 / group) for params, group in parts)
    return stack.exposed_frac * moved / (stack.link_frac * _link(cluster, num_gpus))


def bubble_frac(layout: TrainLayout) -> float:
    """Idle share of an interleaved pipeline: (p - 1) / (v m + p - 1).

    Source: Narayanan et al., arXiv:2104.04473.
    """
    if layout.pp_size == 1 or layout.micro_batches_per_step == 0:
        return 0.0
    stages = layout.pp_size - 1
    return stages / (layout.virtual_stages * layout.micro_batches_per_step + stages)


class TrainPrices:
    """Seconds of a step's training by layout and number of GPUs. What a token takes in a layout is computed once."""

    def __init__(
        self, model: ModelSpec, workload: Workload, cluster: Cluster, assumptions: Assumptions
    ) -> None:
        self._model, self._work, self._cluster, self._assumptions = model, workload, cluster, assumptions
        self._stack = assumptions.stacks[assumptions.stack]
        self._square = sequence_mean_square(workload)
        self._token_s: dict[tuple[bool, bool, TrainLayout], float] = {}

    def seconds(self, num_gpus: int, layout: TrainLayout) -> tuple[float, float]:
        """Of one step's forwards, and of its training with the optimizer, on `num_gpus` devices."""
        model, work = self._model, self._work
        tokens_per_gpu = work.trained_tokens / num_gpus
        forwards = int(work.uses_reference) + int(work.uses_proximal)
        forwards += int(work.algorithm == "ppo")
        updates = work.num_epochs * work.num_mini_batches
        forward_token_s = self._seconds_of_token(num_gpus, layout, backward=False)
        train_s = work.num_trained_models * (
            work.num_epochs * tokens_per_gpu * self._seconds_of_token(num_gpus, layout, backward=True)
            + updates * optimizer_s(trained_params(model, work), self._cluster, num_gpus)
        )
        forward_s = forwards * tokens_per_gpu * forward_token_s
        if work.has_reward_model:
            forward_s += tokens_per_gpu * self._seconds_of_token(
                num_gpus, layout, backward=False, is_reward_model=True
            )
        measured = own_training_s(model, work, self._cluster, self._assumptions, num_gpus=num_gpus)
        if measured is not None:
            forward_s += measured.forward_s - forwards * tokens_per_gpu * forward_token_s
            train_s = measured.train_s
        return forward_s, train_s

    def _seconds_of_token(
        self, num_gpus: int, layout: TrainLayout, *, backward: bool, is_reward_model: bool = False
    ) -> float:
        """GPU-seconds, with what a pipeline and the gathering of weights add."""
        of, stack = self._read(is_reward_model), self._stack
        busy = self._alone_s(layout, backward, is_reward_model)
        layout = _with_micro_batches(layout, self._work, self._assumptions, num_gpus)
        busy = busy / (1 - bubble_frac(layout)) / stack.balance_frac
        gather = gather_s(
            of, self._cluster, self._assumptions, stack, layout, num_gpus=num_gpus, backward=backward
        )
        launches = of.num_layers / layout.pp_size * stack.micro_batch_layer_s
        launches *= 1.0 if backward else stack.forward_share
        # Gathering and launching the next layer overlap with computing this one, so the slowest sets the pace.
        micro_batch = max(self._assumptions.micro_batch_tokens, self._work.sequence_tokens)
        return max(busy, max(gather, launches) / micro_batch * layout.tp_size * layout.cp_size)

    def _alone_s(self, layout: TrainLayout, backward: bool, is_reward_model: bool) -> float:
        """The same of computing and of exchange inside the layers, whatever the number of GPUs."""
        key = (backward, is_reward_model, layout)
        if key not in self._token_s:
            of = self._read(is_reward_model)
            self._token_s[key] = token_s(
                of,
                self._cluster.accelerator,
                self._stack,
                layout,
                sequence_tokens=self._work.sequence_tokens,
                mean_square_tokens=self._square,
                backward=backward,
            ) + exchange_s(of, self._cluster, self._stack, layout, backward=backward)
        return self._token_s[key]

    def _read(self, is_reward_model: bool) -> ModelSpec:
        return (self._work.reward_model or self._model) if is_reward_model else self._model


def train_seconds(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    num_gpus: int,
    layout: TrainLayout,
) -> tuple[float, float]:
    """Seconds of one step's forwards, and of its training with the optimizer, on `num_gpus` devices."""
    return TrainPrices(model, workload, cluster, assumptions).seconds(num_gpus, layout)


def default_train_side(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    num_gpus: int,
    layout: TrainLayout,
) -> TrainSide:
    """Forwards, training and optimizer of one step on `num_gpus` devices."""
    forward_s, train_s = train_seconds(
        model, workload, cluster, assumptions, num_gpus=num_gpus, layout=layout
    )
    memory = train_memory(model, workload, assumptions, num_gpus=num_gpus, layout=layout)
    usable = cluster.accelerator.hbm_bytes * (1 - assumptions.memory_overhead_frac)
    why_not = []
    if num_gpus % layout.model_parallel_size:
        why_not.append(
            f"{num_gpus} train GPUs are no multiple of TP x PP x CP = {layout.model_parallel_size}: change the layout"
        )
    fixed, total = (apart_bytes(needed, usable) for needed in (memory.fixed, memory.total))
    if memory.fixed > usable:
        why_not.append(
            f"one micro batch{' beside the weights of a rank' if memory.whole else ''} takes "
            f"{fixed[0]} a GPU of {fixed[1]} usable, whatever the number of GPUs: "
            f"recompute fully, or raise tensor{', pipeline' if memory.whole else ''} or context parallelism"
        )
    elif memory.total > usable:
        left = usable - memory.fixed
        enough = math.ceil(num_gpus * (memory.state + memory.frozen) / left)
        more = (
            f"split like this it takes about {enough}"
            if left > _LITTLE_LEFT_FRAC * usable
            else f"of more GPUs one micro batch still takes {format_bytes(memory.fixed)} each"
        )
        why_not.append(
            f"training takes {total[0]} a GPU of {total[1]} usable "
            f"({format_bytes(memory.state)} of it training state on {counted(num_gpus, 'GPU')}): {more}"
        )
    error_frac = assumptions.train_error_frac * assumed_model_factor(model)
    notes: tuple[str, ...] = ()
    if cluster.accelerator.is_cpu:
        error_frac *= own_seconds_width(cluster)
    else:
        wider, notes = train_widening(model, cluster, assumptions, layout, stack=assumptions.stack)
        error_frac *= wider
    model_flops = train_flops(model, workload)
    peak = num_gpus * cluster.accelerator.peak("bfloat16")
    return TrainSide(
        num_gpus=num_gpus,
        forward_s=forward_s,
        train_s=train_s,
        train_state_bytes_per_gpu=memory.policy_state,
        reference_bytes_per_gpu=memory.reference,
        critic_state_bytes_per_gpu=memory.critic_state,
        reward_model_bytes_per_gpu=memory.reward_model,
        activation_bytes_per_gpu=memory.activations,
        mfu_frac=workload.num_trained_models * model_flops / (train_s * peak),
        error_frac=error_frac,
        why_not=tuple(why_not),
        notes=notes,
    )


def train_widening(
    model: ModelSpec, cluster: Cluster, assumptions: Assumptions, layout: TrainLayout, *, stack: str
) -> tuple[float, tuple[str, ...]]:
    """Factor on the error of training under a stack, with a note on each trait that nobody measured."""
    traits = {
        "device": [cluster.accelerator.chip],
        "model": model_traits(model),
        "dtype": [layout.dtype],
    }
    wider, notes = widening(assumptions, stack, traits, what=f"{stack} training")
    return wider * assumptions.stacks[stack].error_factor, notes


def _with_micro_batches(
    layout: TrainLayout, workload: Workload, assumptions: Assumptions, num_gpus: int
) -> TrainLayout:
    """`layout` with the micro batches that an update's tokens give its pipeline, where nobody said how many."""
    if layout.pp_size == 1 or layout.micro_batches_per_step:
        return layout
    copies = max(num_gpus // layout.model_parallel_size, 1)
    tokens = workload.trained_tokens / workload.num_mini_batches / copies
    micro_batch = max(assumptions.micro_batch_tokens, workload.sequence_tokens)
    return replace(layout, micro_batches_per_step=max(round(tokens / micro_batch), 1))


_LITTLE_LEFT_FRAC = 0.1
"""Of a GPU beside its micro batch: with less, hardly any number of GPUs is enough for the training state."""
_OPTIMIZER_BYTES_PER_PARAM = 34.0
"""AdamW reads gradient, master and two moments (16 B) and writes master, moments and weights (14 B); the norm
for clipping reads the gradient once more (4 B)."""


def optimizer_s(num_params: float, cluster: Cluster, num_gpus: int) -> float:
    """Seconds of one sharded optimizer update: memory traffic at 70 % of the bandwidth."""
    moved = _OPTIMIZER_BYTES_PER_PARAM * num_params / num_gpus
    return moved / (0.7 * cluster.accelerator.hbm_bytes_per_s)
