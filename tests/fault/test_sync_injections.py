"""A thousand random faults, each of which is refused, or changed nothing."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace
from functools import cache

import pytest
import torch
from sync_fakes import FakeSource, fused, live_digests, manifest_of, packed, tiny_tensors

from rollbook.errors import SyncError
from rollbook.sync.delta import AcknowledgedWeights
from rollbook.sync.digest import fold
from rollbook.sync.layout import MappedWeights, Place
from rollbook.sync.transaction import ReplicaTransaction, Staging, State
from rollbook.weights import Bucket, BucketEntry, Manifest


class Wire:
    """A publication in transit: what a fault may alter."""

    def __init__(self, manifest: Manifest, buckets: list[Bucket], digests: dict[str, str]) -> None:
        self.manifest, self.buckets, self.digests = manifest, buckets, digests
        self.tampered_live: tuple[str, int] | None = None

    def pick(self, draw: random.Random) -> int:
        return draw.randrange(len(self.buckets))

    def entry(self, draw: random.Random) -> tuple[int, int]:
        sizes = [
            (b, e)
            for b, bucket in enumerate(self.buckets)
            for e, x in enumerate(bucket.entries)
            if x.num_bytes
        ]
        return draw.choice(sizes)

    def alter(self, where: tuple[int, int], **change: object) -> None:
        bucket, at = self.buckets[where[0]], where[1]
        entries: list[BucketEntry] = list(bucket.entries)
        entries[at] = replace(entries[at], **change)  # type: ignore[arg-type]
        self.buckets[where[0]] = replace(bucket, entries=tuple(entries))


KINDS = (
    *("flip", "flip", "zero", "drop", "repeat", "swap", "exchange", "truncate", "rename", "offset"),
    *("part_offset", "part_length", "entry_lost", "encoding", "version", "digest", "digest_lost"),
    *("digests_swapped", "live", "base", "manifest_lost", "shape"),
)


def inject(wire: Wire, draw: random.Random) -> str:
    """One random fault; returns its name."""
    kind = draw.choice(KINDS)
    b, e = where = wire.entry(draw)
    bucket = wire.buckets[b]
    entry = bucket.entries[e]
    data = bucket.data
    assert data is not None
    span = slice(entry.offset_bytes, entry.offset_bytes + entry.num_bytes)
    if kind == "flip":
        data[draw.randrange(span.start, span.stop)] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        data[span] = 0
    elif kind == "drop":
        del wire.buckets[b]
        if draw.random() < 0.5:
            wire.buckets = [replace(x, bucket_idx=i) for i, x in enumerate(wire.buckets)]
    elif kind == "repeat":
        wire.buckets.insert(draw.randrange(b, len(wire.buckets)) + 1, bucket)
        if draw.random() < 0.5:
            wire.buckets = [replace(x, bucket_idx=i) for i, x in enumerate(wire.buckets)]
    elif kind == "swap":
        other = (b + 1) % len(wire.buckets)
        wire.buckets[b], wire.buckets[other] = wire.buckets[other], wire.buckets[b]
    elif kind == "exchange":  # two tensors trade names
        twin = wire.entry(draw)
        name = wire.buckets[twin[0]].entries[twin[1]].name
        wire.alter(twin, name=entry.name)
        wire.alter(where, name=name)
    elif kind == "truncate":
        wire.buckets[b] = replace(bucket, data=data[: draw.randrange(span.start, span.stop)])
    elif kind == "rename":
        wire.alter(where, name=entry.name + ".weight")
    elif kind == "offset":
        wire.alter(where, offset_bytes=entry.offset_bytes + draw.choice([-256, -2, 2, 256]))
    elif kind == "part_offset":
        wire.alter(where, tensor_offset_bytes=entry.tensor_offset_bytes + draw.choice([-16, 2, 16]))
    elif kind == "part_length":
        wire.alter(where, tensor_num_bytes=(entry.tensor_num_bytes or 0) + draw.choice([-16, -2, 2, 16]))
    elif kind == "entry_lost":
        wire.buckets[b] = replace(bucket, entries=bucket.entries[:e] + bucket.entries[e + 1 :])
    elif kind == "encoding":
        others = {"dense", "unchanged", "delta_positions", "delta_bitmask", "zip"} - {entry.encoding}
        wire.alter(where, encoding=draw.choice(sorted(others)))
    elif kind == "version":
        wire.buckets[b] = replace(bucket, weight_version=draw.choice([0, 1, 3]))
    elif kind == "digest":
        wire.digests[entry.name] = f"{int(wire.digests[entry.name], 16) ^ 1 << draw.randrange(128):032x}"
    elif kind == "digest_lost":
        del wire.digests[entry.name]
    elif kind == "digests_swapped":
        other = draw.choice(sorted(wire.digests))
        wire.digests[entry.name], wire.digests[other] = wire.digests[other], wire.digests[entry.name]
    elif kind == "live":  # a write that lands wrongly
        wire.tampered_live = (entry.name, draw.randrange(1 << 20))
    elif kind == "base":
        wire.manifest = replace(wire.manifest, base_version=draw.choice([0, 1, 5]), base_digest="0" * 32)
    elif kind == "manifest_lost":
        at = draw.randrange(len(wire.manifest.tensors))
        tensors = wire.manifest.tensors
        wire.manifest = replace(wire.manifest, tensors=tensors[:at] + tensors[at + 1 :])
    elif kind == "shape":
        tensors = wire.manifest.tensors
        at = next(i for i, spec in enumerate(tensors) if spec.name == entry.name)
        spec = replace(tensors[at], shape=(*tensors[at].shape, 1))
        wire.manifest = replace(wire.manifest, tensors=(*tensors[:at], spec, *tensors[at + 1 :]))
    return kind


class TamperedWeights(MappedWeights):
    """Flips one bit of one tensor after it was written."""

    def __init__(self, inner: MappedWeights) -> None:
        self.__dict__.update(inner.__dict__)
        self.target: tuple[str, int] | None = None

    def write(self, name: str, tensor: torch.Tensor) -> None:
        super().write(name, tensor)
        if self.target is not None and self.target[0] == name:
            live = self.read(name)
            flat = live.view(torch.int16).view(-1)
            flat[self.target[1] % flat.numel()] ^= 1 << self.target[1] % 15
            self.target = None  # one fault, then the engine is sound again


def small_source() -> FakeSource:
    tensors = tiny_tensors()
    return FakeSource({name: t for name, t in tensors.items() if "experts" not in name})


def small_engine() -> TamperedWeights:
    """Fused q, k, v; the rest by name."""
    shapes = {name: tuple(tensor.shape) for name, tensor in small_source().tensors.items()}
    attention = {name: shape for name, shape in shapes.items() if "self_attn" in name}
    places = fused("qkv", attention)
    places |= {n: Place(parameter=n, shape=s) for n, s in shapes.items() if n not in attention}
    parameters = {n: torch.zeros(s, dtype=torch.bfloat16) for n, s in shapes.items() if n not in attention}
    parameters["qkv"] = torch.zeros(16, 8, dtype=torch.bfloat16)
    return TamperedWeights(MappedWeights(parameters, places))


@cache
def at_version_1(staging: Staging) -> tuple[FakeSource, ReplicaTransaction, AcknowledgedWeights]:
    source = small_source()
    transaction = ReplicaTransaction(small_engine(), replica_id=0, weight_version=0, staging=staging)
    acknowledged = AcknowledgedWeights()
    acknowledged.begin(None)
    buckets, digests = packed(source, 1, 300, acknowledged)
    send(transaction, Wire(manifest_of(source, 1), buckets, digests))
    acknowledged.acknowledge(1)
    return source, transaction, acknowledged


@pytest.mark.parametrize("block", range(10))
def test_no_random_fault_is_accepted_silently(block: int) -> None:
    """100 injections a block: staged and direct, full and delta. What is accepted is bit for bit the trainer's."""
    outcomes: Counter[str] = Counter()
    for seed in range(100 * block, 100 * block + 100):
        draw = random.Random(seed)
        staging: Staging = draw.choice(["staged", "staged", "direct"])
        source, transaction, acknowledged = copy.deepcopy(at_version_1(staging))
        engine = transaction.live
        assert isinstance(engine, TamperedWeights)
        old = live_digests(engine)

        share = draw.choice([0.02, 0.5, 1])
        for tensor in source.tensors.values():
            tensor[torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share] *= -1.5
        source.tensors["model.norm.weight"][0] += 1
        is_delta = draw.random() < 0.5
        acknowledged.begin(1 if is_delta else None)
        buckets, digests = packed(source, 2, draw.choice([64, 256, 300, 700]), acknowledged)
        manifest = manifest_of(source, 2)
        if is_delta:
            manifest = replace(manifest, base_version=1, base_digest=fold(old))
        wire = Wire(manifest, buckets, dict(digests))
        kind = inject(wire, draw)
        engine.target = wire.tampered_live
        try:
            send(transaction, wire)
        except SyncError:
            transaction.abort()
            outcomes["refused"] += 1
            assert transaction.weight_version == 1
            if transaction.state is State.IDLE:
                assert live_digests(engine) == old, (seed, kind)
            else:
                assert transaction.state is State.BROKEN, (seed, kind)
        else:
            outcomes[f"harmless {kind}"] += 1
            assert live_digests(engine) == digests, (seed, kind)
            assert transaction.weight_version == 2
    assert outcomes["refused"] >= 80, outcomes


def send(transaction: ReplicaTransaction, wire: Wire) -> None:
    transaction.open(wire.manifest)
    for bucket in wire.buckets:
        transaction.receive(bucket)
    transaction.prove(wire.digests)
    transaction.commit()
