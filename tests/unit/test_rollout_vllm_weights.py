"""Where Hugging Face tensors lie in vLLM's parameters, on layers that only look like vLLM's. Needs no vLLM.

A publication writes numbered tensors through the table; what each rank then holds is worked out by hand.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollbook.errors import EngineError, SyncError
from rollbook.rollout.vllm.weights import VllmWeights


class LinearBase(nn.Module):
    def __init__(self, rows: int, columns: int, *, bias: bool = False, rank: int = 0, size: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns), requires_grad=False)
        if bias:
            self.bias = nn.Parameter(torch.zeros(rows), requires_grad=False)
        self.tp_rank, self.tp_size = rank, size


class ColumnParallelLinear(LinearBase): ...


class RowParallelLinear(LinearBase): ...


class MergedColumnParallelLinear(ColumnParallelLinear):
    output_sizes: list[int]


class QKVParallelLinear(ColumnParallelLinear):
    total_num_heads: int
    total_num_kv_heads: int
    num_heads: int
    num_kv_heads: int
    num_kv_head_replicas: int
    head_size = v_head_size = 2


class Shard:
    def __init__(self, first: int, last: int) -> None:
        self.org_vocab_start_index, self.org_vocab_end_index = first, last


class VocabParallelEmbedding(nn.Module):
    def __init__(self, rows: int, *, vocab: int, first: int, last: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((rows, 4), -1.0), requires_grad=False)
        self.org_vocab_size, self.num_added_embeddings = vocab, 0
        self.shard_indices = Shard(first, last)


class Model(nn.Module):
    packed_modules_mapping = {  # noqa: RUF012 (as vLLM has it)
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }


def qkv(rank: int, size: int, *, kv_heads: int) -> QKVParallelLinear:
    """Four query heads and `kv_heads` key heads of width 2, cut over `size` ranks."""
    held_kv = max(1, kv_heads // size)
    layer = QKVParallelLinear(2 * (4 // size + 2 * held_kv), 4, bias=True, rank=rank, size=size)
    layer.total_num_heads, layer.total_num_kv_heads = 4, kv_heads
    layer.num_heads, layer.num_kv_heads, layer.num_kv_head_replicas = (
        4 // size,
        held_kv,
        max(1, size // kv_heads),
    )
    return layer


def holding(**layers: nn.Module) -> Model:
    model = Model()
    model.at = nn.ModuleDict(layers)
    return model


def publish(model: Model, first_rows: dict[str, int]) -> VllmWeights:
    """Write every tensor of the table; row r of a tensor holds `first_rows[its last parts] + r`."""
    weights = VllmWeights(model)
    for name, spec in weights.specs().items():
        rows = torch.arange(spec.shape[0], dtype=torch.float32) + first_rows[name.removeprefix("at.")]
        tensor = rows.view(-1, *(1,) * (len(spec.shape) - 1)).expand(spec.shape).contiguous()
        weights.write(name, tensor)
        assert torch.equal(weights.read(name), weights.part(name, tensor))
    return weights


def rows_of(parameter: Tensor) -> list[int]:
    return [int(row) for row in parameter.reshape(len(parameter), -1)[:, 0]]


@pytest.mark.parametrize(
    ("rank", "size", "kv_heads", "held"),
    [
        (0, 1, 2, [100, 101, 102, 103, 104, 105, 106, 107, 200, 201, 202, 203, 300, 301, 302, 303]),
        (1, 2, 2, [104, 105, 106, 107, 202, 203, 302, 303]),
        (3, 4, 2, [106, 107, 202, 203, 302, 303]),  # ranks 2 and 3 hold the same key head
        (2, 4, 1, [104, 105, 200, 201, 300, 301]),  # one key head on every rank
    ],
)
def test_heads_of_q_k_and_v_on_each_rank(rank: int, size: int, kv_heads: int, held: list[int]) -> None:
    model = holding(qkv_proj=qkv(rank, size, kv_heads=kv_heads))
    first_rows = {
        f"{p}_proj.{k}": n for p, n in (("q", 100), ("k", 200), ("v", 300)) for k in ("weight", "bias")
    }
    weights = publish(model, first_rows)
    assert rows_of(model.at["qkv_proj"].weight) == held
    assert rows_of(model.at["qkv_proj"].bias) == held
    assert weights.specs()["at.q_proj.weight"].shape == (8, 4)
    assert weights.kind("at.k_proj.weight") == "fused"


def test_gate_lies_above_up_on_each_rank() -> None:
    layer = MergedColumnParallelLinear(4, 4, rank=1, size=2)
    layer.output_sizes = [4, 4]
    publish(holding(gate_up_proj=layer), {"gate_proj.weight": 100, "up_proj.weight": 200})
    assert rows_of(layer.weight) == [102, 103, 202, 203]


def test_rows_and_columns_of_single_linears() -> None:
    column, row, whole = (
        ColumnParallelLinear(2, 4, rank=1, size=3),
        RowParallelLinear(4, 2, rank=1, size=3),
        nn.LayerNorm(4),
    )
    model = holding(column=column, row=row, norm=whole)
    weights = VllmWeights(model)
    shapes = {name: spec.shape for name, spec in weights.specs().items()}
    assert shapes == {
        "at.column.weight": (6, 4),
        "at.row.weight": (4, 6),
        "at.norm.weight": (4,),
        "at.norm.bias": (4,),
    }
    full = torch.arange(24.0).view(4, 6)
    weights.write("at.row.weight", full)
    assert torch.equal(row.weight, full[:, 2:4])


@pytest.mark.parametrize(
    ("first", "last", "held"), [(0, 5, [100, 101, 102, 103, 104, -1, -1, -1]), (3, 5, [103, 104, -1, -1])]
)
def test_padded_rows_of_the_vocabulary_are_left_alone(first: int, last: int, held: list[int]) -> None:
    layer = VocabParallelEmbedding(len(held), vocab=5, first=first, last=last)
    weights = publish(holding(embed_tokens=layer), {"embed_tokens.weight": 100})
    assert rows_of(layer.weight) == held and weights.specs()["at.embed_tokens.weight"].shape == (5, 4)


def test_a_tied_head_is_no_tensor_of_its_own() -> None:
    embed, head = (VocabParallelEmbedding(5, vocab=5, first=0, last=5) for _ in range(2))
    head.weight = embed.weight
    weights = VllmWeights(holding(embed_tokens=embed, lm_head=head))
    assert list(weights.specs()) == ["at.embed_tokens.weight"] and weights.dropped == {"at.lm_head.weight"}


def test_experts_keep_transformers_stacked_names() -> None:
    experts = nn.Module()
    experts.w13_weight = nn.Parameter(torch.zeros(2, 8, 4), requires_grad=False)
    experts.w2_weight = nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    model = Model()
    model.block_sparse_moe = nn.ModuleDict({"experts": nn.ModuleDict({"routed_experts": experts})})
    model = holding(block_sparse_moe=model.block_sparse_moe)
    names = {name: spec.shape for name, spec in VllmWeights(model).specs().items()}
    assert names == {"at.mlp.experts.gate_up_proj": (2, 8, 4), "at.mlp.experts.down_proj": (2, 4, 4)}


def test_what_the_table_does_not_know_is_refused_before_anything_is_written() -> None:
    layer = ColumnParallelLinear(4, 4)
    layer.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
    with pytest.raises(EngineError, match="at.fc.weight as torch.int8"):
        VllmWeights(holding(fc=layer))
    unnamed = QKVParallelLinear(12, 4, size=2)
    model = holding(qkv_proj=unnamed)
    model.packed_modules_mapping = {}  # type: ignore[assignment]
    with pytest.raises(EngineError, match="over 2 ranks and names no parts"):
        VllmWeights(model)
    experts: Any = nn.Module()
    experts.w2_weight = nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    experts.tp_size = 2
    with pytest.raises(EngineError, match="cuts the experts"):
        VllmWeights(holding(experts=experts))


def test_a_head_that_the_table_would_leave_half_written_is_an_error() -> None:
    layer = qkv(0, 1, kv_heads=2)
    layer.num_kv_heads = 1  # the table covers 12 of 16 rows
    with pytest.raises(SyncError, match="belong to no tensor"):
        VllmWeights(holding(qkv_proj=layer))
