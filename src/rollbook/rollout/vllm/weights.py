"""vLLM's live parameters under Hugging Face names: fused, stacked, padded, tied, cut over ranks.

    q_proj, k_proj, v_proj        qkv_proj          rows end to end; under tensor parallelism each rank's heads
    gate_proj, up_proj            gate_up_proj      rows end to end
    mlp.experts.gate_up_proj      experts...w13     [E, 2 x intermediate, hidden], the whole parameter
    mlp.experts.down_proj         experts...w2      [E, hidden, intermediate]
    embed_tokens, lm_head         padded to a multiple of 64 rows; tied heads share one parameter

Names are those of transformers' own modules (what our trainer exports), so experts are stacked on both sides.
vLLM's layers are told apart by the names of their classes, and every element of every parameter must find its place:
an architecture that this table does not know is refused at the first publication instead of half written.

What a digest proves. On CUDA the parameters are what the kernels read (bf16, fp16 or fp32 weights; experts with the
Triton kernels, which the engine asks for). On a CPU the same is true because `cpu_worker.py` keeps vLLM from packing
them. Derived state is not covered by digests: the rotary tables do not depend on weights, and quantized scales are
refused; the probe after a publication compares logprobs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rollbook.errors import EngineError
from rollbook.sync.layout import Box, MappedWeights, Place

RENAMED = ((".block_sparse_moe.", ".mlp."),)
"""Parts of vLLM's names that differ from transformers'."""
EXPERT_PARTS = (".experts.routed_experts.", ".experts.")
EXPERT_NAMES = {"w13_weight": "gate_up_proj", "w2_weight": "down_proj"}


class VllmWeights(MappedWeights):
    """`LiveWeights` of a vLLM model of this process (all of it, or this rank's part)."""

    def __init__(self, model: Any) -> None:
        """
        Args:
            model: vLLM's model, an nn.Module.
        Raises:
            EngineError: a parameter in a layout that this table does not know.
            SyncError: an element of a parameter belongs to no tensor.
        """
        packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
        parameters: dict[str, Any] = {}
        places: dict[str, Place] = {}
        padding: dict[str, list[Box]] = {}
        dropped: set[str] = set()
        name_of: dict[int, str] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for key, parameter in module.named_parameters(recurse=False):
                name = f"{prefix}.{key}"
                if id(parameter) in name_of:
                    if name_of[id(parameter)] != name:
                        dropped.add(_hugging_face(name))
                    continue
                name_of[id(parameter)] = name
                parameters[name] = parameter
                places |= dict(_places(name, module, parameter, packed))
                padding |= _padding(name, module, parameter)
        super().__init__(parameters, places, dropped=dropped, padding=padding)


def _places(
    name: str, module: Any, parameter: Any, packed: Mapping[str, list[str]]
) -> Iterator[tuple[str, Place]]:
    """The Hugging Face tensors that lie in one parameter."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    prefix, _, key = name.rpartition(".")
    own = prefix.rpartition(".")[2]
    if str(parameter.dtype) not in ("torch.float32", "torch.bfloat16", "torch.float16"):
        raise EngineError(
            f"vLLM holds {name} as {parameter.dtype}",
            "publications into quantized vLLM engines are not supported: load the model unquantized",
        )
    if key in EXPERT_NAMES:
        yield from _expert_places(name, module, parameter)
    elif own in packed and "QKVParallelLinear" in kinds:
        yield from _cut_rows(name, _siblings(prefix, packed[own], key), parameter, _qkv_rows(module))
    elif own in packed and "MergedColumnParallelLinear" in kinds:
        rank, size = _ranks(module)
        rows = [(full, full // size, rank) for full in module.output_sizes]
        yield from _cut_rows(name, _siblings(prefix, packed[own], key), parameter, rows)
    elif "VocabParallelEmbedding" in kinds:
        yield _hugging_face(name), _vocabulary_place(name, module, parameter)
    elif "RowParallelLinear" in kinds and key == "weight":
        rank, size = _ranks(module)
        columns = parameter.shape[1]
        part = () if size == 1 else (slice(None), slice(rank * columns, (rank + 1) * columns))
        shape = (parameter.shape[0], columns * size)
        yield _hugging_face(name), Place(parameter=name, shape=shape, part=part)
    elif kinds & {"QKVParallelLinear", "MergedColumnParallelLinear"} and _ranks(module)[1] > 1:
        raise EngineError(
            f"vLLM cuts {name} over {_ranks(module)[1]} ranks and names no parts of it",
            "set rollout.vllm.tp_size = 1 for this architecture",
        )
    elif "ColumnParallelLinear" in kinds:
        rank, size = _ranks(module)
        rows = [(parameter.shape[0] * size, parameter.shape[0], rank)]
        yield from _cut_rows(name, [_hugging_face(name)], parameter, rows)
    else:
        yield _hugging_face(name), Place(parameter=name, shape=tuple(parameter.shape))


def _hugging_face(name: str) -> str:
    for ours, theirs in RENAMED:
        name = name.replace(ours, theirs)
    return name


def _siblings(prefix: str, parts: list[str], key: str) -> list[str]:
    parent = prefix.rpartition(".")[0]
    return [_hugging_face(f"{parent}.{part}.{key}") for part in parts]


def _ranks(module: Any) -> tuple[int, int]:
    return int(getattr(module, "tp_rank", 0)), int(getattr(module, "tp_size", 1))


def _qkv_rows(module: Any) -> list[tuple[int, int, int]]:
    """For q, k and v: rows of the whole tensor, rows on this rank, and which such piece they are. With more ranks
    than key heads several ranks hold the same piece."""
    rank, _ = _ranks(module)
    kv_rank = rank // int(module.num_kv_head_replicas)
    sizes = [
        (module.total_num_heads, module.num_heads, module.head_size, rank),
        (module.total_num_kv_heads, module.num_kv_heads, module.head_size, kv_rank),
        (module.total_num_kv_heads, module.num_kv_heads, module.v_head_size, kv_rank),
    ]
    return [(total * width, held * width, piece) for total, held, width, piece in sizes]


def _cut_rows(
    name: str, tensors: list[str], parameter: Any, rows: list[tuple[int, int, int]]
) -> Iterator[tuple[str, Place]]:
    """Tensors end to end along the rows of `parameter`, each whole or one piece of it."""
    start, rest = 0, tuple(parameter.shape[1:])
    for tensor, (full, held, piece) in zip(tensors, rows, strict=True):
        part = () if held == full else (slice(piece * held, (piece + 1) * held),)
        box = () if held == parameter.shape[0] else (slice(start, start + held),)
        yield tensor, Place(parameter=name, box=box, shape=(full, *rest), part=part)
        start += held


def _vocabulary_place(name: str, module: Any, parameter: Any) -> Place:
    shard = module.shard_indices
    first, last = int(shard.org_vocab_start_index), int(shard.org_vocab_end_index)
    if module.num_added_embeddings:
        raise EngineError(
            f"vLLM added {module.num_added_embeddings} rows to {name}",
            "load the model without vocabulary additions",
        )
    shape = (int(module.org_vocab_size), *parameter.shape[1:])
    part = () if last - first == shape[0] else (slice(first, last),)
    box = () if last - first == parameter.shape[0] else (slice(0, last - first),)
    return Place(parameter=name, box=box, shape=shape, part=part)


def _padding(name: str, module: Any, parameter: Any) -> dict[str, list[Box]]:
    shard = getattr(module, "shard_indices", None)
    if shard is None:
        return {}
    used = int(shard.org_vocab_end_index) - int(shard.org_vocab_start_index)
    return {name: [(slice(used, parameter.shape[0]),)]} if used < parameter.shape[0] else {}


def _expert_places(name: str, module: Any, parameter: Any) -> Iterator[tuple[str, Place]]:
    prefix, _, key = name.rpartition(".")
    if _ranks(module)[1] > 1 or int(getattr(module, "ep_size", 1)) > 1:
        raise EngineError(
            f"vLLM cuts the experts of {prefix} over ranks",
            "publications into cut experts are not supported yet: set rollout.vllm.tp_size = 1",
        )
    path = f"{prefix}."
    for part in EXPERT_PARTS:
        if path.endswith(part):
            path = path.removesuffix(part) + ".experts."
            break
    yield _hugging_face(path + EXPERT_NAMES[key]), Place(parameter=name, shape=tuple(parameter.shape))
