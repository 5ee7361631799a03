"""Bytes of every role on every GPU.

training   weights, gradients, master weights, moments (sharded) + activations + logits chunk + buffers
rollout    weights + KV pool + CUDA graphs
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rollbook.ledger.account import RolloutSide, TrainSide
from rollbook.ledger.adapters import policy_state_bytes, trained_params
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.workload import Workload

LOGITS_CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once when logprobs are computed in chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainMemory:
    """Bytes on one GPU while the trainer runs."""

    policy_state: float
    """Weights, gradients, float32 master weights, two moments."""
    critic_state: float
    reference: float
    reward_model: float
    activations: float
    logits: float
    buffers: float
    """Gathered layers of FSDP, gradient buckets."""
    whole: float
    """Beyond an even share: weights and gradients of Megatron's ranks, which data parallelism repeats."""

    @property
    def state(self) -> float:
        return self.policy_state + self.critic_state

    @property
    def frozen(self) -> float:
        """Weights that only pass forward: reference and reward model."""
        return self.reference + self.reward_model

    @property
    def fixed(self) -> float:
        """What more GPUs do not shrink."""
        return self.activations + self.logits + self.buffers + self.whole

    @property
    def total(self) -> float:
        return self.state + self.frozen + self.fixed


def train_memory(
    model: ModelSpec, workload: Workload, assumptions: Assumptions, *, num_gpus: int, layout: TrainLayout
) -> TrainMemory:
    """Bytes on one of `num_gpus` training GPUs, state sharded evenly over all of them but for Megatron's ranks.

    A micro batch holds at least one longest sequence, divided by tensor and context parallelism.
    """
    longest = workload.prompt_tokens + workload.max_response_tokens + workload.observation_tokens
    tokens = max(longest, assumptions.micro_batch_tokens) / (layout.tp_size * layout.cp_size)
    state = policy_state_bytes(model, workload, assumptions) / num_gpus
    weights = assumptions.weight_bytes_per_param * model.params / num_gpus
    copied = (
        max(rank_params(model, layout) - model.params / num_gpus, 0.0) if assumptions.is_megatron else 0.0
    )
    return TrainMemory(
        policy_state=state,
        critic_state=state * (workload.num_trained_models - 1),
        # The base under adapters is the reference.
        reference=weights if workload.uses_reference and not workload.lora_rank else 0.0,
        reward_model=(
            assumptions.weight_bytes_per_param * (workload.reward_model or model).params / num_gpus
            if workload.has_reward_model
            else 0.0
        ),
        activations=activation_bytes(model, tokens, layout),
        logits=logits_bytes(model, min(tokens, LOGITS_CHUNK_TOKENS), layout),
        # Megatron gathers no layers: its ranks hold theirs.
        buffers=0.0 if assumptions.is_megatron else gathered_bytes(model, assumptions, layout),
        whole=copied * _whole_bytes_per_param(workload, assumptions),
    )


def rank_params(model: ModelSpec, layout: TrainLayout) -> float:
    """Parameters that the fullest rank of Megatron holds whole.

    With pipeline stages that is a rank of the first one: as many layers as any, and the embedding.
    """
    stage_frac = math.ceil(model.num_layers / layout.pp_size) / model.num_layers
    dense = float(model.params - model.routed_params)
    if layout.pp_size > 1:
        dense = stage_frac * model.body_params + model.embedding_params
    return dense / layout.tp_size + stage_frac * model.routed_params / layout.ep_size


def _whole_bytes_per_param(workload: Workload, assumptions: Assumptions) -> float:
    """Of what a rank of Megatron holds whole: weights and gradients of what trains, and the weights of a reference."""
    weights = assumptions.weight_bytes_per_param
    if workload.lora_rank:
        return weights
    of_state = min(2 * weights, assumptions.train_state_bytes_per_param) * workload.num_trained_models
    return of_state + weights * workload.uses_reference


def activation_bytes(model: ModelSpec, num_tokens: float, layout: TrainLayout) -> float:
    """Activations kept for the backward on a GPU of the first pipeline stage, by micro batches of `num_tokens`.

    The first of p stages has L/p layers of p micro batches under way: as much as L layers of one.
    Full recomputation keeps one hidden state a layer and the inside of the layer being recomputed; selective
    keeps 34 bytes per token and hidden unit a layer, attention scores recomputed; none is the same here because
    flash attention never keeps scores.

    Source: Korthikanti et al., arXiv:2205.05198, equations 2 and 4 (34 s b h a layer) and 5 (the first stage).
    """
    layers = model.num_layers
    per_layer = 34.0 * num_tokens * model.hidden_size
    if layout.recompute == "full":
        return layers * 2.0 * num_tokens * model.hidden_size + per_layer
    return layers * per_layer


def logits_bytes(model: ModelSpec, num_tokens: float, layout: TrainLayout) -> float:
    """Logits of a chunk in bfloat16, their float32 copy and gradient."""
    return 10.0 * num_tokens * model.vocab_size / layout.tp_size


def gathered_bytes(model: ModelSpec, assumptions: Assumptions, layout: TrainLayout) -> float:
    """Two layers' weights gathered at once (one in use, one prefetched), and one layer's gradients."""
    per_layer = (model.body_params + model.routed_params / layout.ep_size) / model.num_layers
    largest = max(per_layer, model.embedding_params)
    return 3 * assumptions.weight_bytes_per_param * largest / layout.tp_size


Place = Literal["train device", "rollout device", "train host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryItem:
    """One owner of bytes on one GPU, or of the host memory that belongs to one GPU."""

    place: Place
    name: str
    bytes: float
    formula: str


_CONTEXT_BYTES = 0.6e9
"""CUDA context and libraries. Source: nvidia-smi of an idle process on H100 and H200."""
_GRAPHS_BYTES = 1.0e9
"""CUDA graphs of an engine over its batch sizes; vLLM logs 0.3 to 1.5 GiB at start."""
_COMMUNICATION_BYTES = 1.0e9
"""NCCL buffers of a handful of process groups."""


def memory_items(
    model: ModelSpec,
    workload: Workload,
    cluster: Cluster,
    assumptions: Assumptions,
    *,
    rollout: RolloutSide,
    train: TrainSide,
    layout: TrainLayout,
    waits_on_host: bool = False,
    keeps_state: bool = False,
    keeps_engine: bool = False,
    offloaded_bytes: float = 0.0,
    offloaded_what: str = "",
) -> list[MemoryItem]:
    """Who owns which bytes of each role's GPU, largest first within a place.

    Where both roles share a device, "rollout device" is it while the engine generates, "train device" while the trainer
    works.

    Args:
        waits_on_host: the training state is in host memory while an engine has the device.
        keeps_state: it stays on the device instead.
        keeps_engine: and the engine, awake, while the trainer works.
        offloaded_bytes: training state of one GPU that lives in host memory; `assumptions` hold what is left on the
            device.
        offloaded_what: that state in words.
    """
    memory = train_memory(model, workload, assumptions, num_gpus=train.num_gpus, layout=layout)
    # On a processor: no context, no graphs, no collectives.
    is_cpu = cluster.accelerator.is_cpu
    overhead = 0.0 if is_cpu else assumptions.memory_overhead_frac * cluster.accelerator.hbm_bytes
    fixed = min(_CONTEXT_BYTES + _COMMUNICATION_BYTES, overhead)
    context: _Row = ("context and communication", fixed, "CUDA context, NCCL buffers")
    state = _state_rows(model, workload, assumptions, memory, num_gpus=train.num_gpus)
    engine = [
        *_engine_rows(rollout),
        ("CUDA graphs", min(_GRAPHS_BYTES, overhead - fixed), "one per batch size"),
    ]
    places: dict[Place, list[_Row]] = {
        "train device": [
            *state,
            *_work_rows(memory, layout),
            *(engine if keeps_engine else []),
            context,
        ],
        "rollout device": [
            *engine,
            *(state if keeps_state else []),
            context,
        ],
        "train host": [
            (f"{_ON_HOST}, always", offloaded_bytes, f"{offloaded_what}, not on the device"),
            (
                f"{_ON_HOST}, while engines generate",
                (memory.state + memory.frozen) * waits_on_host,
                "state, reference and reward model",
            ),
        ],
    }
    items = [
        MemoryItem(place=place, name=name, bytes=num_bytes, formula=formula)
        for place, rows in places.items()
        for name, num_bytes, formula in rows
        if num_bytes >= 1
    ]
    return sorted(items, key=lambda item: (item.place, -item.bytes))


_ON_HOST = "training state (pinned)"
_Row = tuple[str, float, str]
"""Owner, bytes on one GPU, and their formula."""


def _state_rows(
    model: ModelSpec, workload: Workload, assumptions: Assumptions, memory: TrainMemory, *, num_gpus: int
) -> list[_Row]:
    """The policy's state in its parts, and the other models of a training GPU."""
    trained = trained_params(model, workload) / num_gpus
    on_device = min(assumptions.train_state_bytes_per_param / 4, 1.0)  # of weights and gradients
    weights = 2 * (model.params / num_gpus * on_device + (trained if workload.lora_rank else 0.0))
    gradients = 2 * trained * on_device
    kept = max(memory.policy_state - weights - gradients, 0.0)  # master weights and moments on the device
    master = min(4 * trained, kept)
    params = "adapters" if workload.lora_rank else "N"
    return [
        ("weights", weights, "2 N / GPUs"),
        ("gradients", gradients, f"2 {params} / GPUs"),
        ("master weights", master, f"4 {params} / GPUs"),
        ("optimizer moments", kept - master, f"8 {params} / GPUs"),
        ("critic", memory.critic_state, "as the policy's state"),
        ("reference", memory.reference, "2 N / GPUs"),
        ("reward model", memory.reward_model, "2 N / GPUs, its own N"),
        (
            "weights and gradients of the rank",
            memory.whole,
            "4 N / (TP x PP), experts / (EP x PP), and 2 of the reference, beyond the shares above",
        ),
    ]


def _work_rows(memory: TrainMemory, layout: TrainLayout) -> list[_Row]:
    """What a micro batch takes on a training GPU."""
    return [
        ("activations", memory.activations, f"{layout.recompute} recomputation of one micro batch"),
        ("logits chunk", memory.logits, f"10 B x {LOGITS_CHUNK_TOKENS} tokens x vocabulary"),
        ("gathered layers", memory.buffers, "2 layers of weights, 1 of gradients"),
    ]


def _engine_rows(rollout: RolloutSide) -> list[_Row]:
    judge = rollout.judge_bytes_per_gpu
    return [
        ("rollout weights", rollout.weights_bytes_per_gpu - judge, "weights / GPUs of a replica"),
        ("reward model", judge, "its weights / GPUs of a replica"),
        ("KV pool", rollout.kv_pool_bytes / rollout.tp_size, "what weights and overhead leave"),
    ]
