"""From the trainer's shards to the engine's: which bytes of a publication cross which link, by kind of tensor.

    trainer GPU ──gather──► one full tensor ──transfer──► engine GPU ──load──► the slice it holds
       1/pieces            bucket by bucket                                    1/cuts, or a copy

FSDP2 cuts every tensor by rows over the whole group. Megatron cuts by tensor parallelism, keeps layers on pipeline
stages and experts on expert ranks, and repeats the rest. An engine cuts by tensor parallelism, at most as often as
there are KV heads, and puts experts whole on the GPUs of its expert parallelism.

All bytes are of the busiest GPU of a role in one publication; `seconds_at_rate` is what the link's published rate
would take and no prediction: that is `SyncAccount.seconds`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rollbook.errors import PlanError
from rollbook.ledger.adapters import lora_params
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import DTYPE_BYTES, ReplicaLayout, TrainLayout
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.tensors import TensorKind, tensor_kinds
from rollbook.observe.numbers import counted

Link = Literal["same GPU", "scale-up", "network", "host link", "storage"]
Stage = Literal["gather", "transfer", "load"]
Route = Literal["in_process", "ipc", "broadcast", "sharded", "disk", "delta"]
ROUTES: tuple[Route, ...] = ("in_process", "ipc", "broadcast", "sharded", "disk", "delta")
"""By reference in one process; CUDA IPC between two of one GPU; full tensors to all; each shard to its place; files;
changed numbers to all."""
POSITION_BYTES = 4.0
"""Of a changed number in a delta, beside its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """How the trainer holds its weights."""

    num_gpus: int
    layout: TrainLayout = field(default_factory=TrainLayout)
    is_sharded: bool = True
    """FSDP2: what parallelism leaves is cut by rows. False: Megatron, where it is repeated."""

    def __post_init__(self) -> None:
        if self.num_gpus % (self.layout.tp_size * self.layout.pp_size):
            raise PlanError(
                f"{self.num_gpus} train GPUs are no multiple of TP x PP = "
                f"{self.layout.tp_size * self.layout.pp_size}",
                "change the layout or the number of GPUs",
            )

    @property
    def name(self) -> str:
        """
        >>> Trainer(num_gpus=32, layout=TrainLayout(tp_size=4, ep_size=8), is_sharded=False).name
        'Megatron on 32 GPUs, TP 4, EP 8'
        """
        layout = self.layout
        degrees = {"TP": layout.tp_size, "PP": layout.pp_size, "CP": layout.cp_size, "EP": layout.ep_size}
        used = "".join(f", {name} {size}" for name, size in degrees.items() if size > 1)
        gpus = counted(self.num_gpus, "GPU")
        return f"{'FSDP2' if self.is_sharded else 'Megatron'} on {gpus}{used}"

    def pieces(self, kind: TensorKind) -> int:
        """Pieces, each on a GPU of its own, that make up one tensor of the kind."""
        layout, stage = self.layout, self.num_gpus // self.layout.pp_size
        if kind.cut == "experts":
            if self.is_sharded:
                return max(stage // layout.ep_size, 1)
            return layout.tp_size if layout.ep_size == 1 else 1
        tp_size = 1 if kind.cut == "whole" else layout.tp_size
        return max(stage // layout.tp_size, 1) * tp_size if self.is_sharded else tp_size

    def holders(self, kind: TensorKind) -> int:
        """GPUs over which one copy of all tensors of the kind is spread, pipeline stages and experts included."""
        experts = self.layout.ep_size if kind.cut == "experts" else 1
        return min(self.pieces(kind) * self.layout.pp_size * experts, self.num_gpus)


@dataclass(frozen=True, slots=True, kw_only=True)
class KindMove:
    """One kind of tensor on its way. Bytes of one GPU, where they say so."""

    name: str
    num_tensors: int
    params: float
    trainer_pieces: int
    """GPUs that hold a piece of one tensor."""
    trainer_holders: int
    """GPUs over which one copy of all its tensors is spread."""
    trainer_cut: str
    engine_cuts: int
    """Different pieces of it in a replica."""
    engine_copies: int
    """GPUs of a replica that hold the same piece."""
    engine_cut: str
    engine_dtype: str
    bytes: float
    """One copy, as the engine holds it."""
    gathered_bytes: float
    """That a gathering trainer GPU receives from the others of its pipeline stage, in the trainer's dtype."""
    landed_bytes: float
    """That one engine GPU ends up with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLoad:
    """Bytes of the busiest GPU of a role over one link."""

    stage: Stage
    link: Link
    what: str
    bytes: float
    seconds_at_rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLoad:
    """One way from trainer to engine."""

    route: Route
    links: tuple[LinkLoad, ...]
    sender_peak_bytes: float
    """Extra device memory on a trainer GPU: buckets, and the largest tensor while it is whole."""
    receiver_peak_bytes: float
    """Extra device memory on an engine GPU."""

    def bytes_over(self, link: Link) -> float:
        return sum(load.bytes for load in self.links if load.link == link)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncMapping:
    """Every kind of tensor, and every route that the placement allows."""

    trainer: str
    engine: str
    kinds: tuple[KindMove, ...]
    routes: tuple[RouteLoad, ...]

    @property
    def total_bytes(self) -> float:
        return sum(kind.bytes for kind in self.kinds)

    @property
    def landed_bytes(self) -> float:
        return sum(kind.landed_bytes for kind in self.kinds)

    def route(self, route: Route) -> RouteLoad:
        """Raises PlanError for a route that the placement does not allow."""
        for load in self.routes:
            if load.route == route:
                return load
        raise PlanError(
            f"weights do not go {route} here", f"use one of: {', '.join(r.route for r in self.routes)}"
        )


def sync_mapping(
    model: ModelSpec,
    cluster: Cluster,
    trainer: Trainer,
    engine: ReplicaLayout,
    *,
    num_rollout_gpus: int,
    shares_devices: bool,
    trainer_dtype: str = "bfloat16",
    lora_rank: int = 0,
    changed_frac: float = 0.02,
    bucket_bytes: float = 256 * 2**20,
    max_buckets: int = 2,
    splits_experts: bool = True,
) -> SyncMapping:
    """The mapping of one publication.

    Args:
        trainer_dtype: in which weights are gathered; the engine's dtype is its layout's.
        lora_rank: above 0, adapters alone travel, in bfloat16, whole to every engine GPU.
        changed_frac: share of the numbers whose bits changed, for "delta".
        bucket_bytes, max_buckets: of the publication; a tensor larger than a bucket is still gathered whole.
        splits_experts: False where a layer's experts are one stacked tensor.
    Raises:
        PlanError: a layout that does not divide its GPUs, a share outside 0 to 1.
    """
    if not 0 <= changed_frac <= 1:
        raise PlanError(f"changed_frac is {changed_frac}", "give a share between 0 and 1")
    kinds = _adapters(model, lora_rank) if lora_rank else tensor_kinds(model)
    moves = [_move(kind, trainer, engine, trainer_dtype, is_adapter=lora_rank > 0) for kind in kinds]
    largest = max(kind.largest(splits_experts=splits_experts) for kind in kinds) * DTYPE_BYTES[trainer_dtype]
    roads = _Roads(
        cluster=cluster,
        trainer=trainer,
        engine=engine,
        num_rollout_gpus=num_rollout_gpus,
        shares_devices=shares_devices,
        moves=moves,
        changed_frac=changed_frac,
        bucket=min(bucket_bytes, sum(move.bytes for move in moves)),
        max_buckets=max_buckets,
        largest=largest,
    )
    routes: tuple[Route, ...]
    routes = ("in_process", "ipc", "sharded") if shares_devices else ("broadcast", "sharded", "disk", "delta")
    if cluster.accelerator.is_cpu:
        routes = ("in_process",)
    degrees = f"TP {engine.tp_size}" + (f", EP {engine.ep_size}" if engine.ep_size > 1 else "")
    count = max(num_rollout_gpus // engine.num_gpus, 1)
    return SyncMapping(
        trainer=trainer.name,
        engine=f"{count} replica{'s' if count > 1 else ''} of {degrees}, {engine.weight_dtype}",
        kinds=tuple(moves),
        routes=tuple(roads.route(r) for r in ROUTES if r in routes),
    )


def _adapters(model: ModelSpec, rank: int) -> tuple[TensorKind, ...]:
    matrices = sum(kind.num_tensors for kind in tensor_kinds(model) if kind.is_quantized)
    kind = TensorKind(
        name="adapters",
        params=round(lora_params(model, rank)),
        num_tensors=2 * matrices,
        cut="whole",
        is_quantized=False,
    )
    return (kind,)


_ENGINE_CUTS = {"rows": "rows over TP", "columns": "columns over TP", "whole": "a copy on every GPU"}


def _move(
    kind: TensorKind, trainer: Trainer, engine: ReplicaLayout, trainer_dtype: str, *, is_adapter: bool
) -> KindMove:
    pieces, holders = trainer.pieces(kind), trainer.holders(kind)
    stages = min(trainer.layout.pp_size, holders)
    cuts = kind.engine_cuts(engine)
    if kind.cut == "whole":
        where = _ENGINE_CUTS["whole"]
    elif kind.cut == "experts":
        where = "whole experts over EP" if engine.ep_size > 1 else "each expert over TP"
    else:
        where = _ENGINE_CUTS[kind.cut] if engine.tp_size > 1 else "whole on its GPU"
        if cuts < engine.tp_size:
            where = f"{cuts} KV heads, repeated"
    dtype = "bfloat16" if is_adapter else engine.weight_dtype
    in_bytes = kind.bytes_in(dtype)
    return KindMove(
        name=kind.name,
        num_tensors=kind.num_tensors,
        params=kind.params,
        trainer_pieces=pieces,
        trainer_holders=holders,
        trainer_cut=_trainer_cut(kind, trainer, pieces),
        engine_cuts=cuts,
        engine_copies=engine.num_gpus // cuts,
        engine_cut=where,
        engine_dtype=dtype if kind.is_quantized or dtype == "float32" else "bfloat16",
        bytes=in_bytes,
        gathered_bytes=kind.params / stages * DTYPE_BYTES[trainer_dtype] * (1 - stages / holders),
        landed_bytes=in_bytes / cuts,
    )


def _trainer_cut(kind: TensorKind, trainer: Trainer, pieces: int) -> str:
    if kind.cut == "experts" and trainer.layout.ep_size > 1:
        where = f"whole experts over EP {trainer.layout.ep_size}"
        return f"{where}, rows over {pieces}" if pieces > 1 else where
    if trainer.is_sharded:
        return f"rows over {pieces}" if pieces > 1 else "whole"
    if pieces == 1:
        return "a copy on every GPU of its stage" if trainer.num_gpus > 1 else "whole"
    return f"{'columns' if kind.cut == 'columns' else 'rows'} over TP {pieces}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Roads:
    """Loads of each route, from the moves of all kinds."""

    cluster: Cluster
    trainer: Trainer
    engine: ReplicaLayout
    num_rollout_gpus: int
    shares_devices: bool
    moves: list[KindMove]
    changed_frac: float
    bucket: float
    max_buckets: int
    largest: float

    def route(self, route: Route) -> RouteLoad:
        loads = {
            "in_process": self._shared,
            "ipc": self._shared,
            "broadcast": self._broadcast,
            "sharded": self._sharded,
            "disk": self._disk,
            "delta": self._delta,
        }[route]()
        buckets = self.max_buckets * self.bucket
        gathered = max(self.bucket, self.largest)
        sender, receiver = {
            # By reference: what a bucket gathers is all there is. Between processes the next one is filled meanwhile.
            "in_process": (gathered, 0.0),
            "ipc": (buckets + self.largest, 0.0),
            "broadcast": (buckets + self.largest, buckets),
            "sharded": (0.0 if self.shares_devices else self.bucket, buckets / self.engine.num_gpus),
            "disk": (gathered, self.bucket),
            "delta": (min(buckets, self._changed_bytes), min(buckets, self._changed_bytes)),
        }[route]
        return RouteLoad(
            route=route,
            links=tuple(load for load in loads if load.bytes > 0),
            sender_peak_bytes=sender,
            receiver_peak_bytes=receiver,
        )

    @property
    def _total(self) -> float:
        return sum(move.bytes for move in self.moves)

    @property
    def _landed(self) -> float:
        return sum(move.landed_bytes for move in self.moves)

    @property
    def _changed_bytes(self) -> float:
        return sum(
            move.params * self.changed_frac * (POSITION_BYTES + DTYPE_BYTES[move.engine_dtype])
            for move in self.moves
        )

    def _load(self, stage: Stage, link: Link, what: str, num_bytes: float) -> LinkLoad:
        accelerator = self.cluster.accelerator
        rate = {
            "same GPU": accelerator.hbm_bytes_per_s / 2,  # read and written
            "scale-up": accelerator.scale_up_bytes_per_s,
            "network": self.cluster.nic_bytes_per_s,
            "host link": accelerator.host_link_bytes_per_s,
            "storage": 0.0,  # nobody publishes it with the GPU
        }[link]
        return LinkLoad(
            stage=stage,
            link=link,
            what=what,
            bytes=num_bytes,
            seconds_at_rate=num_bytes / rate if rate else 0.0,
        )

    def _gather(self) -> list[LinkLoad]:
        """Pipeline stages gather what they hold at the same time: of the other holders in a stage, those in the same
        scale-up domain send over it, the rest over the network."""
        domain, stages = self.cluster.accelerator.scale_up_gpus, self.trainer.layout.pp_size
        near = far = 0.0
        for move in self.moves:
            holders = max(move.trainer_holders // stages, 1)
            inside = min(holders, domain)
            full = move.gathered_bytes / max(holders - 1, 1)
            near += full * (inside - 1)
            far += full * (holders - inside)
        of_stage = " of each stage" if stages > 1 else ""
        what = f"a gathering trainer GPU{of_stage} receives the others' shards"
        return [self._load("gather", "scale-up", what, near), self._load("gather", "network", what, far)]

    def _into_place(self) -> LinkLoad:
        return self._load("load", "same GPU", "an engine GPU copies its slices into place", self._landed)

    def _between(self) -> Link:
        """Between the sides: a scale-up domain that holds both, or the network."""
        devices = self.num_rollout_gpus + (0 if self.shares_devices else self.trainer.num_gpus)
        return "scale-up" if devices <= self.cluster.accelerator.scale_up_gpus else "network"

    def _shared(self) -> list[LinkLoad]:
        return [*self._gather(), self._into_place()]

    def _broadcast(self) -> list[LinkLoad]:
        return [
            *self._gather(),
            self._load(
                "transfer", self._between(), "every engine GPU receives whole tensors", self._total
            ),
            self._into_place(),
        ]  # fmt: skip

    def _sharded(self) -> list[LinkLoad]:
        """Each engine GPU takes its own slices from whoever holds them; on shared devices a part is already there."""
        here = self._already_here() if self.shares_devices else 0.0
        what = "an engine GPU receives its slices"
        return [
            self._load("transfer", self._between(), what, self._landed - here),
            self._load("load", "same GPU", "an engine GPU copies its slices into place", self._landed),
        ]

    def _already_here(self) -> float:
        """Bytes of an engine GPU's slices that its own trainer shard holds, on average over the GPUs.

        Trainer GPU g holds rows [g/n, (g + 1)/n); engine rank g mod t holds rows [t'/t, (t' + 1)/t) where its kind is
        cut by rows, and 1/t of every row where it is cut by columns. Experts and stages: a share of 1/(n t).
        """
        size = self.engine.tp_size
        here = 0.0
        for move in self.moves:
            holders, cuts = move.trainer_holders, move.engine_cuts
            if move.engine_cut == _ENGINE_CUTS["rows"] and self.trainer.is_sharded and cuts == size:
                matched = sum(int(g * size // holders) == g % size for g in range(holders)) / holders
                here += move.bytes / holders * matched
            else:
                here += move.bytes / holders / cuts
        return here

    def _disk(self) -> list[LinkLoad]:
        return [
            *self._gather(),
            self._load("transfer", "storage", "one trainer writes a copy", self._total),
            self._load("transfer", "storage", "every host of engines reads it", self._total),
            self._load("load", "host link", "an engine GPU takes its slices", self._landed),
        ]

    def _delta(self) -> list[LinkLoad]:
        """Positions and values of changed numbers go to every engine GPU; nothing is gathered."""
        held = sum(m.params * DTYPE_BYTES["bfloat16"] / m.trainer_holders for m in self.moves)
        changed = self._changed_bytes
        return [
            self._load("gather", "same GPU", "a trainer GPU compares its shard with the base version", held),
            self._load(
                "transfer", self._between(), "every engine GPU receives positions and values", changed
            ),
            self._load("load", "same GPU", "an engine GPU writes what falls into its slices", changed),
        ]
