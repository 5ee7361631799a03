"""Every number the ledger has to believe, with where it comes from.

`paper` is the plain account that a person can follow with a pocket calculator; `default` is the better model,
fitted to published measurements. Both live in `data/default.toml`, with what single frameworks do differently (`verl`,
`nemo`). `rollbook` (`data/rollbook.toml`) is `default` with what was measured of our own loop. A file changes single
numbers of any of these:

    base = "default"
    train_mfu_frac = { value = 0.36, source = "our run of May, 64 H100" }

    [decode.hbm_frac]
    "H100 SXM" = 0.8
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from rollbook.errors import ConfigError, nearest_name
from rollbook.ledger.hardware import Accelerator

PRESETS = ("default", "paper", "rollbook")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAssumptions:
    """Generation. Fractions are of published peaks."""

    hbm_frac: Mapping[str, float]
    """Bandwidth that reading weights reaches, by accelerator."""
    kv_frac: Mapping[str, float]
    """Bandwidth that reading KV reaches, by accelerator."""
    gemm_frac: float
    """Of the peak of the dtype, for matrices and attention."""
    prefill_bytes: Mapping[str, float]
    """Memory traffic of a prompt token beside its matrices: per layer and hidden unit of dense layers, and per unit of
    input, output and middle of the experts it visits."""
    layer_s: Mapping[str, float]
    """Gaps and small operators of one attention and one feed-forward block on the device, by engine."""
    launch_layer_s: Mapping[str, float]
    """Of the host for launching the operators of those two blocks, by engine: it runs ahead of the device, so a step
    takes the longer of both. A CUDA graph is launched at once."""
    latent_layer_s: float
    """On top, for latent attention: compressions, absorbed products and their norms."""
    expert_frac: Mapping[str, float]
    """On bandwidth and matrices, for the grouped kernels of experts, by accelerator."""
    young_factor: Mapping[str, float]
    """On the device's seconds of "engine/chip", but for float4: an engine whose kernels were not yet at home there."""
    moe_layer_s: Mapping[str, float]
    """On top, for routing and grouped kernels, by accelerator."""
    step_s: float
    """Sampling and scheduling."""
    host_s: Mapping[str, float]
    """Of the host for one decode step, by engine: it prepares the next step while the device computes this one, and
    small models wait for it."""
    host_row_s: Mapping[str, float]
    """The same for each sequence in it: scheduled, given blocks, its token and logprob handed out."""
    waiting_frac: Mapping[str, float]
    """Of the host's seconds, how much the device waits for, by engine: 0 where the host prepares the next step beside
    this one, 1 where it works between the steps."""
    prefill_layer_s: float
    """Of one call that prefills, per layer, whatever its tokens: launched operator by operator, outside CUDA graphs."""
    exchange_frac: Mapping[str, float]
    """Of the scale-up link, for the few megabytes that a decode step reduces, by accelerator."""
    all_reduce_latency_s: float
    cross_node_latency_s: float

    def hbm_frac_of(self, accelerator: Accelerator) -> float:
        """Fraction for this device."""
        return accelerator.fraction(self.hbm_frac)

    def layer_s_of(self, engine: str) -> float:
        """Seconds for this engine."""
        return self.layer_s.get(engine, self.layer_s["default"])

    def launch_layer_s_of(self, engine: str) -> float:
        """Seconds for this engine."""
        return self.launch_layer_s.get(engine, self.launch_layer_s["default"])

    def for_engine(self, engine: str) -> DecodeAssumptions:
        """The same with that engine's seconds as the default."""
        step_s, row_s = self.host_s_of(engine)
        return replace(
            self,
            layer_s={"default": self.layer_s_of(engine)},
            launch_layer_s={"default": self.launch_layer_s_of(engine)},
            host_s={"default": step_s},
            host_row_s={"default": row_s},
            waiting_frac={"default": self.waiting_frac_of(engine)},
        )

    def waiting_frac_of(self, engine: str) -> float:
        """Share of the host's seconds that the device waits for, for this engine."""
        return self.waiting_frac.get(engine, self.waiting_frac["default"])

    def host_s_of(self, engine: str) -> tuple[float, float]:
        """Seconds of the host for a step and for each of its sequences, for this engine."""
        step_s, row_s = (table.get(engine, table["default"]) for table in (self.host_s, self.host_row_s))
        return step_s, row_s

    def moe_layer_s_of(self, accelerator: Accelerator) -> float:
        """Seconds for this device."""
        return accelerator.fraction(self.moe_layer_s)

    def gemm_frac_of(self, accelerator: Accelerator) -> float:
        """Fraction for this device."""
        return self.gemm_frac * accelerator.gemm_share

    def young_factor_of(self, engine: str, accelerator: Accelerator, dtype: str) -> float:
        """Factor for this engine on this device in these numbers."""
        return 1.0 if dtype == "float4" else self.young_factor.get(f"{engine}/{accelerator.chip}", 1.0)

    def kv_frac_of(self, accelerator: Accelerator) -> float:
        """Fraction for this device."""
        return accelerator.fraction(self.kv_frac)


@dataclass(frozen=True, slots=True, kw_only=True)
class StackAssumptions:
    """Forwards and training under one software stack ("fsdp" or "megatron")."""

    gemm_frac: Mapping[str, float]
    """Of the dtype's peak, for the matrices alone."""
    expert_factor: float
    """On `gemm_frac`, for the grouped matrices of experts."""
    attention_frac: Mapping[str, float]
    """Of the bfloat16 peak, by accelerator."""
    dense_bytes: float
    """Memory traffic of a token, forward and backward, per layer and hidden unit of dense layers."""
    moe_bytes: float
    """The same for layers of experts, per expert of a token and unit of its input, output and middle."""
    least_s_per_width: float
    """Seconds per layer and hidden unit below which faster memory does not help."""
    moe_least_s: float
    """The same for experts, per unit of `moe_bytes`."""
    generation_factor: Mapping[str, float]
    """On matrices, by accelerator: 1 where the stack's kernels are at home."""
    expert_exchange_frac: float
    """Of the exchange of tokens between experts on other nodes, not hidden behind computation."""
    forward_share: float
    """Of the traffic, when there is no backward."""
    exposed_frac: float
    """Of tensor-parallel exchange, not hidden behind computation."""
    gather_passes: float
    """Times that a micro batch moves the weights: 3 for fully sharded training, 0 where they stay in place."""
    link_frac: float
    """Of a link's rate, for gathering weights."""
    micro_batch_layer_s: float
    """Least seconds of one layer for one micro batch, forward and backward: its launches and the hooks of sharding."""
    repeats_linear: float
    """1 where linear-attention layers are computed whole on every rank of tensor and context parallelism, 0 where they
    are divided; between where frameworks differ."""
    error_factor: float
    """On the error of training: 1, or more where published runs of the stack differ by more."""
    balance_frac: float
    """Work of the mean GPU over work of the fullest, with sequences packed by length."""

    def attention_frac_of(self, accelerator: Accelerator) -> float:
        """Fraction for this device."""
        return accelerator.fraction(self.attention_frac)

    def gemm_frac_of(self, accelerator: Accelerator, dtype: str) -> float:
        """Fraction for this device and dtype."""
        factor = self.generation_factor.get(accelerator.name, 1.0)
        return self.gemm_frac[dtype] * factor * accelerator.gemm_share


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAssumptions:
    """Weight publication. Rates are of one copy of the weights unless they say per GPU."""

    base_s: float
    """Pausing, opening, committing, resuming, for a broadcast between nodes."""
    near_base_s: float
    """The same within a node."""
    process_base_s: float
    """The same inside one process."""
    handle_base_s: float
    """The same between processes that share devices: engines woken, memory mapped, handles opened."""
    slices_base_s: float
    """The same where every receiver takes its own slices: memory registered, a barrier."""
    slices_experts_s: float
    """What that takes longer where layers have experts: their slices planned, and sent rank by rank."""
    gather_bytes_per_s: float
    """Making full tensors in buckets and packing them."""
    far_gather_bytes_per_s: float
    """The same on one rank, for engines of other nodes."""
    load_bytes_per_s: float
    """Per GPU of a replica."""
    shard_gather_bytes_per_s: float
    """Trainers of one pipeline stage making the tensors whose slices each receiver takes; huge where slices go from
    shard to shard."""
    stages_in_turn: float
    """1 where the trainer's pipeline stages send their slices one after the other, 0 where they do at once."""
    disk_bytes_per_s: float
    """Gathering, writing and reading on a shared file system."""
    overlap_frac: float
    """Of the faster stages, beside the slowest: 0 where a bucket is sent when the one before is in place, 1 where there
    are two buffers."""
    per_tensor_s: float
    """Naming one tensor and announcing it, on one node of trainers; once more for each doubling of nodes."""
    gather_call_s: float
    """One gather of a tensor, or of one expert's matrix from each rank; once more for each doubling of nodes."""
    splits_experts: float
    """1 where every expert's matrices are tensors of their own, as in Hugging Face checkpoints, 0 where a layer's
    are stacked in one."""
    handle_tensor_s: float
    """Of one tensor that changes hands on its own device by a message of its own."""
    expert_load_s: float
    """Of the engine, for one expert's matrix: found among the names of all experts, and copied into its layer's."""
    slices_loaded_frac: float
    """Of that, where GPUs are sent slices: 0 where they are written into place, 1 where a loader reads them."""
    quantize_tensor_s: float
    """Of one tensor that is quantised, scaled and shuffled on its own."""
    host_copy_bytes_per_s: float
    """Per GPU, as frameworks copy weights from and to pageable host memory."""
    delta_bytes_per_s: float
    """Positions and values of changed numbers: gathered on one rank, checked, broadcast and written into place."""
    delta_tensor_s: float
    """Of a delta, for each tensor: its own count, entry and write."""
    error_frac: Mapping[str, float]
    """By method."""
    most_gpus: float
    """Of any measured publication, both sides together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchAssumptions:
    """Hand-over of a colocated device."""

    state_bytes_per_s: float
    """Training state, per GPU and direction, as frameworks copy it; pinned memory reaches the link's rate."""
    engine_bytes_per_s: float
    """The engine's weights at sleep level 1, per GPU and direction."""
    sleep_s: float
    wake_s: float
    base_s: float
    """Everything else of one hand-over and back: caches dropped, pools mapped, processes told."""
    pool_s: float
    """Making the KV pool again, where it does not keep its addresses."""
    graphs_s: float
    """Capturing CUDA graphs again, for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers of one account. Fractions are of published peaks."""

    name: str
    method: Literal["paper", "default"]
    weight_bytes_per_param: float
    train_state_bytes_per_param: float
    """bfloat16 weights and gradients, float32 master weights and two moments."""
    kv_bytes_per_number: float
    offload_bytes_per_param: float
    """Moved each way when trainer and engine hand over the device."""
    offload_bytes_per_s: float
    """Per GPU."""
    sync_bytes_per_s: float
    train_mfu_frac: float
    forward_mfu_frac: float
    """Forward passes and prefill."""
    decode_hbm_frac: float
    """Bytes a decode step must read over what it takes, as a fraction of the memory bandwidth."""
    memory_overhead_frac: float
    """Device memory lost to runtime, graphs, buffers and fragmentation."""
    decode: DecodeAssumptions
    sync: SyncAssumptions
    switch: SwitchAssumptions
    engine_memory_frac: float
    """Share of a colocated device that the engine may take: the trainer's runtime keeps the rest."""
    step_base_s: float
    """Rewards, data, logging and scheduling of a step, beside the stages."""
    step_sequence_s: float
    """The same for each sequence of the step."""
    flash2_attention_frac: float
    """Of the bfloat16 peak on Hopper, for stacks still on FlashAttention 2."""
    stack: str
    """Software that trains: a key of `stacks`."""
    stacks: Mapping[str, StackAssumptions]
    max_slots: int
    """Most sequences that an engine runs at once, whatever the memory."""
    micro_batch_tokens: int
    rollout_error_frac: float
    train_error_frac: float
    step_error_factor: float
    """On the error of a whole step: its stages share what a run's settings hide, such as padding and small batches."""
    most_step_gpus: int
    """Of any measured RL step."""
    most_sequence_tokens: int
    """Of any measured training or decoding."""
    frameworks: Mapping[str, Mapping[str, Any]]
    """Numbers that one published framework has differently, as in a file of assumptions; see `for_framework`."""
    measured: Mapping[str, Mapping[str, tuple[str, ...]]]
    """Part of the ledger -> kind of trait -> what the measurements behind it have of it; see `reliability`."""
    sources: Mapping[str, str]
    """Where each number comes from."""

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, str) or not isinstance(value, float | int):
                continue
            if value <= 0 or (f.name.endswith("_frac") and value > 1):
                raise ConfigError(
                    f"assumption {f.name} is {value}",
                    "give a fraction in (0, 1]" if f.name.endswith("_frac") else "give a number above 0",
                )

    @property
    def is_megatron(self) -> bool:
        """The trainer keeps weights and gradients whole on each rank of tensor, pipeline and expert parallelism, and
        shards only master weights and moments over the rest."""
        return self.stack.startswith("megatron")

    def base_s(self, num_sequences: float) -> float:
        """Seconds of a step beside its stages."""
        return self.step_base_s + self.step_sequence_s * num_sequences

    def for_framework(self, name: str) -> Assumptions:
        """These with the numbers of one framework's implementation over them.

        Raises:
            ConfigError: nobody measured that framework.
        """
        if name not in self.frameworks:
            raise ConfigError(f"framework {name!r} has no numbers", nearest_name(name, self.frameworks))
        sources = dict(self.sources)
        origin = self.sources.get(f"frameworks.{name}", f"frameworks.{name}")
        changed: Assumptions = _merged(self, self.frameworks[name], "", origin, sources)
        return replace(changed, sources=sources)

    def as_json(self) -> dict[str, object]:
        """Each number with its source, parts under dotted names."""
        return {
            "name": self.name,
            "method": self.method,
            "stack": self.stack,
            **_flat(self, "", self.sources),
        }


def _flat(part: Any, prefix: str, sources: Mapping[str, str]) -> dict[str, object]:
    items = (
        part.items() if isinstance(part, Mapping) else ((f.name, getattr(part, f.name)) for f in fields(part))
    )
    flat: dict[str, object] = {}
    for name, value in items:
        path = f"{prefix}{name}"
        if path in ("name", "method", "stack", "sources", "measured", "frameworks"):
            continue
        if is_dataclass(value) or isinstance(value, Mapping):
            flat |= _flat(value, f"{path}.", sources)
        else:
            flat[path] = {"value": value, "source": _source_of(path, sources)}
    return flat


def _source_of(path: str, sources: Mapping[str, str]) -> str:
    """Source of a number or, failing that, of the part it belongs to."""
    while path:
        if path in sources:
            return sources[path]
        path = path.rpartition(".")[0]
    return ""


def has_assumptions(name: str) -> bool:
    """Whether it is a preset or a framework that was measured."""
    return name in PRESETS or name in _preset("default").frameworks


def load_assumptions(name_or_path: str) -> Assumptions:
    """A preset or a measured framework by name, or a TOML file that changes single numbers of one.

    Raises:
        ConfigError: neither a preset nor a readable file; an unknown or impossible number.
    """
    if name_or_path in PRESETS:
        return _preset(name_or_path)
    frameworks = _preset("default").frameworks
    if name_or_path in frameworks:
        return replace(_preset("default").for_framework(name_or_path), name=name_or_path)
    path = Path(name_or_path)
    if not path.exists():
        raise ConfigError(
            f"assumptions {name_or_path!r} are neither a preset nor a file",
            f"choose one of: {', '.join((*PRESETS, *frameworks))}; or give a TOML file",
        )
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", "write lines such as: train_mfu_frac = 0.36"
        ) from error
    base_name = table.pop("base", "default")
    if not isinstance(base_name, str) or not has_assumptions(base_name):
        raise ConfigError(
            f"{path}: base is {base_name!r}", f"choose one of: {', '.join((*PRESETS, *frameworks))}"
        )
    return _changed(load_assumptions(base_name), table, str(path))


def _changed(base: Assumptions, table: Mapping[str, Any], origin: str) -> Assumptions:
    sources = dict(base.sources)
    changed: Assumptions = _merged(base, table, "", origin, sources)
    return replace(changed, name=origin, sources=sources)


@functools.cache
def _preset(name: str) -> Assumptions:
    if name == "rollbook":
        own = tomllib.loads((resources.files("rollbook.ledger") / "data" / "rollbook.toml").read_text())
        return _changed(_preset(own.pop("base")), own, name)
    text = (resources.files("rollbook.ledger") / "data" / "default.toml").read_text()
    table = tomllib.loads(text)
    stacks = {key: StackAssumptions(**values) for key, values in table.pop("stacks").items()}
    base = Assumptions(
        name="default",
        method="default",
        decode=DecodeAssumptions(**table.pop("decode")),
        sync=SyncAssumptions(**table.pop("sync")),
        switch=SwitchAssumptions(**table.pop("switch")),
        stacks=stacks,
        measured={
            part: {kind: tuple(values) for kind, values in kinds.items()}
            for part, kinds in table.pop("measured").items()
        },
        **table,
    )
    return base if name == "default" else replace(base, name="paper", method="paper")


_NEVER_ZERO = ("_frac", "_per_s", "_factor")
_SET_BY_NAME = ("name", "method", "sources", "measured", "frameworks")


def _merged(part: Any, table: Mapping[str, Any], prefix: str, origin: str, sources: dict[str, str]) -> Any:
    """`part`, a dataclass or a mapping, with the values of `table` over its own."""
    is_mapping = isinstance(part, Mapping)
    known = part if is_mapping else {f.name: getattr(part, f.name) for f in fields(part)}
    whole = () if is_mapping else {f.name for f in fields(part) if f.type in (int, "int")}
    changed: dict[str, Any] = {}
    for key, entry in table.items():
        path = f"{prefix}{key}"
        # A table of numbers by accelerator or engine takes new keys; everything else is closed.
        is_open = is_mapping and all(isinstance(value, float | int) for value in known.values())
        if (key not in known and not is_open) or path in _SET_BY_NAME:
            raise ConfigError(
                f"{origin}: {path} is no assumption", nearest_name(key, set(known) - set(_SET_BY_NAME))
            )
        old = known.get(key, 1.0)
        value, source = entry, origin
        if isinstance(entry, Mapping) and "value" in entry:
            value, source = entry["value"], str(entry.get("source", origin))
        if is_dataclass(old) or isinstance(old, Mapping):
            if not isinstance(value, Mapping):
                raise ConfigError(f"{origin}: {path} is {value!r}", "it is a table: give its entries")
            changed[key] = _merged(old, value, f"{path}.", origin, sources)
            continue
        if isinstance(old, str) != isinstance(value, str) or isinstance(value, bool | Mapping | list):
            raise ConfigError(
                f"{origin}: {path} is {value!r}", f"give a {'name' if isinstance(old, str) else 'number'}"
            )
        if isinstance(value, float | int) and not 0 <= value < math.inf:
            raise ConfigError(f"{origin}: {path} is {value}", "give a finite number of 0 or more")
        if value == 0 and any(part.endswith(_NEVER_ZERO) for part in path.split(".")):
            raise ConfigError(f"{origin}: {path} is 0", "give a number above 0: the ledger divides by it")
        if key in whole and (value < 1 or value != int(value)):
            raise ConfigError(f"{origin}: {path} is {value}", "it counts: give a whole number of 1 or more")
        if key in whole:
            value = int(value)
        is_share = any(part.endswith("_frac") and part != "error_frac" for part in path.split("."))
        if is_share and not path.endswith("error_frac") and value > 1:
            raise ConfigError(f"{origin}: {path} is {value}", "it is a share: give a number from 0 to 1")
        changed[key] = value
        sources[path] = source
    return {**part, **changed} if is_mapping else replace(part, **changed)
