"""Faults of a publication by name: what becomes of its buckets and its manifest on their way."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

from rollbook.errors import SyncError
from rollbook.sync.transport import arrived
from rollbook.weights import Bucket, Manifest, Receiving, TensorSpec

Q = "model.layers.0.self_attn.q_proj.weight"
HIT = 1
"""The bucket that a fault is done to."""


class Fault:
    """What becomes of the buckets and the manifest on their way; switched on for one publication."""

    told = ""
    """What the publication says of it."""
    is_on = False

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        yield bucket

    def manifest(self, manifest: Manifest) -> Manifest:
        return manifest

    async def passed(self, bucket: Bucket, deliver: Callable[[Bucket], Receiving]) -> None:
        for each in self.buckets(bucket) if self.is_on and bucket.bucket_idx == HIT else [bucket]:
            await arrived(deliver(each))


class Missing(Fault):
    told = "too early"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        yield from ()


class Truncated(Fault):
    told = "ends at byte|bytes"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        assert bucket.data is not None
        yield replace(bucket, data=bucket.data[: bucket.entries[-1].offset_bytes + 1])


class Duplicated(Fault):
    told = "twice"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        yield from (bucket, bucket)


class Flipped(Fault):
    told = "altered"

    def buckets(self, bucket: Bucket) -> Iterator[Bucket]:
        assert bucket.data is not None
        data = bucket.data.clone()
        data[bucket.entries[0].offset_bytes] ^= 1
        yield replace(bucket, data=data)


class Reordered(Fault):
    """The bucket comes behind the next one."""

    told = "too early"
    held: Bucket | None = None

    async def passed(self, bucket: Bucket, deliver: Callable[[Bucket], Receiving]) -> None:
        if self.is_on and bucket.bucket_idx == HIT:
            self.held = bucket
            return
        try:
            await arrived(deliver(bucket))
        finally:
            if self.held is not None and bucket.bucket_idx == HIT + 1:
                late, self.held = self.held, None
                with contextlib.suppress(SyncError):
                    await arrived(deliver(late))


class WrongBase(Fault):
    told = "holds version 1 and was sent a delta against 0"

    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, base_version=0, base_digest="0" * 32)


class UnknownName(Fault):
    told = "model.layers.7.weight"

    def manifest(self, manifest: Manifest) -> Manifest:
        spec = TensorSpec(name="model.layers.7.weight", shape=(2,), dtype="bfloat16", num_bytes=4)
        return replace(manifest, tensors=(*manifest.tensors, spec))


class MissingName(Fault):
    told = Q

    def manifest(self, manifest: Manifest) -> Manifest:
        return replace(manifest, tensors=tuple(spec for spec in manifest.tensors if spec.name != Q))


OF_BUCKETS = [Missing, Truncated, Duplicated, Reordered, Flipped]
OF_MANIFESTS = [WrongBase, UnknownName, MissingName]
