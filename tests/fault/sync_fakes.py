"""Tiny models and engines for the publication tests: real tensors, no network, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollbook.sync.bucket import Packer, SlotBuffers
from rollbook.sync.delta import AcknowledgedWeights
from rollbook.sync.digest import digests
from rollbook.sync.layout import MappedWeights, Place
from rollbook.sync.transaction import ReplicaTransaction
from rollbook.weights import Bucket, Manifest, TensorSpec

HIDDEN, HEADS, KV, FFN, VOCAB, EXPERTS = 8, 8, 4, 6, 11, 3


def tiny_tensors(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """One layer of a mixture-of-experts model in Hugging Face names, a tied head included."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HEADS, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (KV, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (KV, HIDDEN),
        "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
    }
    for i in range(EXPERTS):
        shapes[f"model.layers.0.mlp.experts.{i}.gate_proj.weight"] = (FFN, HIDDEN)
        shapes[f"model.layers.0.mlp.experts.{i}.up_proj.weight"] = (FFN, HIDDEN)
        shapes[f"model.layers.0.mlp.experts.{i}.down_proj.weight"] = (HIDDEN, FFN)
    shapes["model.norm.weight"] = (HIDDEN,)
    tensors = {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return tensors


def fused(parameter: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Place]:
    """Tensors laid end to end along the rows of one parameter, as in fused q, k, v."""
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = Place(parameter=parameter, box=(slice(start, start + shape[0]),), shape=shape)
        start += shape[0]
    return places


def stacked(parameter: str, names: Sequence[str], shape: tuple[int, ...], *, rows: slice) -> dict[str, Place]:
    """One tensor per expert: expert i fills `rows` of `parameter[i]`."""
    return {
        name: Place(parameter=parameter, box=(slice(i, i + 1), rows), shape=shape)
        for i, name in enumerate(names)
    }


def fused_engine(
    dtype: torch.dtype = torch.bfloat16, *, is_tied: bool = True, device: str = "cpu"
) -> MappedWeights:
    """An engine with fused q, k, v and gate, up, stacked experts, a padded vocabulary and a tied head."""
    tensors = tiny_tensors(dtype=dtype)
    shape = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    layer = "model.layers.0."
    places = {
        "model.embed_tokens.weight": Place(parameter="embed", box=(slice(0, VOCAB),), shape=(VOCAB, HIDDEN)),
        layer + "input_layernorm.weight": Place(parameter="ln", shape=(HIDDEN,)),
        layer + "mlp.gate.weight": Place(parameter="router", shape=(EXPERTS, HIDDEN)),
        "model.norm.weight": Place(parameter="model.norm.weight", shape=(HIDDEN,)),
    }
    attention = [layer + f"self_attn.{x}_proj.weight" for x in "qkv"]
    places |= fused("qkv", {name: shape[name] for name in attention})
    for half, rows in (("gate", slice(0, FFN)), ("up", slice(FFN, 2 * FFN))):
        names = [layer + f"mlp.experts.{i}.{half}_proj.weight" for i in range(EXPERTS)]
        places |= stacked("w13", names, (FFN, HIDDEN), rows=rows)
    names = [layer + f"mlp.experts.{i}.down_proj.weight" for i in range(EXPERTS)]
    places |= stacked("w2", names, (HIDDEN, FFN), rows=slice(0, HIDDEN))
    sizes = {
        "embed": (16, HIDDEN),
        "ln": (HIDDEN,),
        "router": (EXPERTS, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "qkv": (HEADS + 2 * KV, HIDDEN),
        "w13": (EXPERTS, 2 * FFN, HIDDEN),
        "w2": (EXPERTS, HIDDEN, FFN),
    }
    if not is_tied:
        sizes["lm_head.weight"] = (VOCAB, HIDDEN)
        places["lm_head.weight"] = Place(parameter="lm_head.weight", shape=(VOCAB, HIDDEN))
    return MappedWeights(
        {name: torch.zeros(size, dtype=dtype, device=device) for name, size in sizes.items()},
        places,
        dropped=["lm_head.weight"] if is_tied else [],
        padding={"embed": [(slice(VOCAB, 16),)]},
    )


class FakeSource:
    """A trainer that exports a dict of tensors, in any order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def weight_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(
            TensorSpec(
                name=name,
                shape=tuple(t.shape),
                dtype=str(t.dtype).removeprefix("torch."),
                num_bytes=t.numel() * t.element_size(),
            )
            for name, t in self.tensors.items()
        )

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def step(self, scale: float = 1.5) -> None:
        """An optimizer step that moves every parameter."""
        for name, tensor in self.tensors.items():
            if name != "lm_head.weight":
                tensor.mul_(scale)


def manifest_of(
    source: FakeSource, version: int, *, base: int | None = None, base_digest: str | None = None
) -> Manifest:
    return Manifest(
        weight_version=version,
        base_version=base,
        tensors=source.weight_specs(),
        base_digest=base_digest,
    )


def packed(
    source: FakeSource, version: int, bucket_bytes: int, acknowledged: AcknowledgedWeights | None = None
) -> tuple[list[Bucket], dict[str, str]]:
    """All buckets of a publication, each with a buffer of its own, and the trainer's digests."""
    buffers = SlotBuffers()
    packer = Packer(
        specs={spec.name: spec for spec in source.weight_specs()},
        stream=source.export_weights(),
        weight_version=version,
        bucket_bytes=bucket_bytes,
        buffers=buffers,
        acknowledged=acknowledged,
    )
    buckets = []
    for bucket in packer.buckets():
        assert bucket.data is not None
        buckets.append(
            Bucket(
                weight_version=version,
                bucket_idx=bucket.bucket_idx,
                entries=bucket.entries,
                data=bucket.data.clone(),
            )
        )
    return buckets, dict(packer.digests())


def publish(
    transaction: ReplicaTransaction,
    source: FakeSource,
    version: int,
    *,
    bucket_bytes: int = 512,
    tamper: Callable[[list[Bucket]], list[Bucket]] = lambda buckets: buckets,
) -> dict[str, str]:
    """A whole publication without a publisher; returns the trainer's digests."""
    buckets, digests = packed(source, version, bucket_bytes)
    transaction.open(manifest_of(source, version))
    for bucket in tamper(buckets):
        transaction.receive(bucket)
    transaction.prove(digests)
    transaction.commit()
    return digests


def live_digests(engine: MappedWeights) -> dict[str, str]:
    names = list(engine.specs())
    return dict(zip(names, digests([engine.read(name) for name in names]), strict=True))
