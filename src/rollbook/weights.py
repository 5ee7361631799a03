"""Nouns of a weight publication, shared by the trainer (export), `sync` (transaction) and the engines.

    trainer.export() ──► Publisher ──► buckets ──► WeightPort (one per replica)
                             │                         │  open(manifest) · receive(bucket) · commit() · abort()
                             └── digests of what was   └─ ReplicaTransaction writes into LiveWeights and proves
                                 sent, per tensor         each tensor by a digest of the live parameters

Tensor names are Hugging Face names everywhere; an engine with fused or stacked parameters maps them itself.
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a manifest, in Hugging Face names and shapes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """torch's name without the prefix: "bfloat16", "float32", ..."""
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a publication will deliver: every tensor an engine must hold at `weight_version`."""

    weight_version: int
    base_version: int | None
    """Version a delta applies to, proven on the replica before anything is written; None: self-contained."""
    tensors: tuple[TensorSpec, ...]
    base_digest: str | None = None
    """`sync.digest.fold` of the base version's digests: what the replica must hold for a delta to apply."""
    is_resync: bool = False
    """Replaces whatever the replica holds, at whatever version: the way back from quarantine. Never a delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """Where one tensor (or one part of it) lies in a bucket."""

    name: str
    offset_bytes: int
    num_bytes: int
    encoding: str = "dense"
    """"dense": the tensor's bytes. Other encodings (delta) are named by the file that owns them."""
    tensor_offset_bytes: int = 0
    """Where the part begins in the tensor; parts of one tensor arrive in order."""
    tensor_num_bytes: int | None = None
    """Bytes of the tensor that the entry stands for; None: `num_bytes`, as in every dense entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A contiguous buffer that carries many tensors in one transfer."""

    weight_version: int
    bucket_idx: int
    entries: tuple[BucketEntry, ...]
    data: torch.Tensor | None
    """[bytes] uint8; None when `shared` carries references instead (one process, nothing is copied)."""
    shared: Mapping[str, torch.Tensor] | None = None
    """Tensors by reference: the transport inside one process."""
    attempt: int = 0
    """Publication that it belongs to, counted by the publisher: a version may be sent more than once."""
    replica_ids: tuple[int, ...] = ()
    """Replicas that it is sent to: those still in the publication; empty: all."""
    ready: torch.cuda.Event | None = None
    """The bytes are there once the device has come to this point; None: they are there."""


Digests = Mapping[str, str]
"""Tensor name -> hex digest of its bytes, computed on the device that holds it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitReport:
    """What a replica proved when it advanced its version."""

    replica_id: int
    weight_version: int
    num_tensors: int
    num_bytes: int
    write_s: float
    digest_s: float
    coverage: Mapping[str, int] = field(default_factory=dict)
    """Tensors of the manifest by what became of them: matched, renamed, fused, dropped."""


class LiveWeights(Protocol):
    """An engine's live parameters, addressed by Hugging Face tensor names. Called on the engine's thread."""

    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor a complete publication must carry; tied tensors appear once."""

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy `tensor` into the live parameters, in the engine's own layout."""

    def read(self, name: str) -> torch.Tensor:
        """The live bytes of `name`: a view where the layout allows, so that the digest proves them."""


class Arrival(Protocol):
    """A bucket on its way to one replica; a `concurrent.futures.Future` is one."""

    def result(self, timeout: float | None = None) -> object:
        """Wait until the replica has it.

        Raises:
            TimeoutError: it has not after `timeout` seconds.
            RunError: it was not taken.
        """

    def cancel(self) -> object:
        """Nobody waits for it any more."""


Receiving = Arrival | Coroutine[Any, Any, None]
"""A bucket that is on its way already, or the coroutine that takes it in."""


class WeightPort(Protocol):
    """One replica as the publisher sees it. Every call has a deadline; an error quarantines the replica."""

    replica_id: int

    async def weight_version(self) -> int: ...

    async def open(self, manifest: Manifest) -> None:
        """Begin a publication: names, shapes and dtypes must match, the base version must be held."""

    def receive(self, bucket: Bucket) -> Receiving:
        """Take a bucket in: the only way to the replica, called from a thread that waits for many buckets, in their
        order. Work that may keep that thread goes into a coroutine (`async def` is one), which the caller runs on the
        event loop; what is begun at once needs no loop."""

    async def prove(self, digests: Digests) -> None:
        """Phase one: everything arrived and its digests equal the trainer's; nothing serves it yet."""

    async def commit(self) -> CommitReport:
        """Phase two: swap in between decode steps, prove the live parameters, advance the version."""

    async def abort(self) -> None:
        """Drop the open publication; the replica keeps serving the version it held, if it still holds it."""


class WeightSource(Protocol):
    """The trainer's side: weights as a stream of named tensors, one bucket gathered at a time."""

    def weight_specs(self) -> tuple[TensorSpec, ...]: ...

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, in the order of `weight_specs`, in the dtype the engines use."""
