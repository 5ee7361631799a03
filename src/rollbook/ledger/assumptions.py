"""Every number the ledger has to believe, with where it comes from.

`paper` is the plain account that a person can follow with a pocket calculator; `default` is the better model,
fitted to published measurements. A file changes single numbers of either:

    base = "default"
    train_mfu_frac = { value = 0.36, source = "our run of May, 64 H100" }
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from rollbook.errors import ConfigError, nearest_name
from rollbook.ledger.hardware import Accelerator
from rollbook.ledger.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeAssumptions:
    """Generation. Fractions are of published peaks."""

    hbm_frac: Mapping[str, float] = field(default_factory=lambda: {"default": 0.7})
    """Bandwidth that reading weights reaches, by accelerator."""
    kv_frac: Mapping[str, float] = field(default_factory=lambda: {"default": 0.7})
    """Bandwidth that reading KV reaches, by accelerator."""
    float8_gain: Mapping[str, float] = field(default_factory=lambda: {"dense": 1.0, "experts": 1.0})
    """Factor on `hbm_frac` where weights are float8."""
    gemm_frac: float = 0.6
    prefill_frac: Mapping[str, float] = field(default_factory=lambda: {"dense": 0.6, "moe": 0.4})
    """Of the peak of the weights' dtype, by model kind."""
    layer_s: Mapping[str, float] = field(default_factory=lambda: {"default": 25e-6})
    """Launches and small operators of one attention and one feed-forward block, by engine."""
    moe_layer_s: float = 10e-6
    """On top, for routing."""
    step_s: float = 0.2e-3
    """Sampling and scheduling."""
    all_reduce_latency_s: float = 10e-6
    cross_node_latency_s: float = 40e-6

    def hbm_frac_of(self, accelerator: Accelerator, weight_dtype: str, part: str) -> float:
        """Fraction for this device, dtype and part ("dense" or "experts") of the weights."""
        frac = self.hbm_frac.get(accelerator.name, self.hbm_frac["default"])
        return min(frac * (self.float8_gain[part] if weight_dtype == "float8" else 1.0), 0.95)

    def layer_s_of(self, engine: str) -> float:
        """Seconds for this engine."""
        return self.layer_s.get(engine, self.layer_s["default"])

    def kv_frac_of(self, accelerator: Accelerator) -> float:
        """Fraction for this device."""
        return self.kv_frac.get(accelerator.name, self.kv_frac["default"])

    def prefill_frac_of(self, accelerator: Accelerator, model: ModelSpec) -> float:
        """Fraction for this model."""
        return self.prefill_frac.get(accelerator.name, self.prefill_frac[model.kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class StackAssumptions:
    """Forwards and training under one software stack ("fsdp" or "megatron")."""

    gemm_frac: Mapping[str, float] = field(
        default_factory=lambda: {"bfloat16": 0.6, "float8": 0.5, "float4": 0.35}
    )
    """Of the dtype's peak, for the matrices alone."""
    attention_frac: Mapping[str, float] = field(default_factory=lambda: {"default": 0.5})
    """Of the bfloat16 peak, by accelerator."""
    dense_bytes: float = 570.0
    """Memory traffic of a token, forward and backward, per layer and hidden unit of dense layers."""
    moe_bytes: float = 160.0
    """The same for layers of experts, per expert of a token and unit of its input, output and middle."""
    least_s_per_width: float = 0.0
    """Seconds per layer and hidden unit below which faster memory does not help."""
    moe_least_s: float = 0.0
    """The same for experts, per unit of `moe_bytes`."""
    generation_factor: Mapping[str, float] = field(default_factory=dict)
    """On matrices, by accelerator: 1 where the stack's kernels are at home."""
    rack_scale_factor: float = 0.5
    """On the traffic of experts where one scale-up domain holds more than a node."""
    forward_share: float = 0.3
    """Of the traffic, when there is no backward."""
    exposed_frac: float = 0.4
    """Of tensor-parallel exchange, not hidden behind computation."""
    balance_frac: float = 0.9
    """Work of the mean GPU over work of the fullest, with sequences packed by length."""

    def attention_frac_of(self, accelerator: Accelerator) -> float:
        """Fraction for this device."""
        return self.attention_frac.get(accelerator.name, self.attention_frac["default"])

    def gemm_frac_of(self, accelerator: Accelerator, dtype: str) -> float:
        """Fraction for this device and dtype."""
        return self.gemm_frac[dtype] * self.generation_factor.get(accelerator.name, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncAssumptions:
    """Weight publication. Rates are of one copy of the weights unless they say per GPU."""

    base_s: float = 2.0
    """Pausing, opening, committing, resuming."""
    stream_bytes_per_s: float = 5.5e9
    """One sender broadcasting full tensors through the engines' loader."""
    receiver_bytes_per_s: float = 8.5e9
    """Each receiving GPU taking its own shard, inside a node."""
    receiver_cross_bytes_per_s: float = 4.2e9
    """The same between nodes."""
    gather_bytes_per_s: float = 60e9
    load_bytes_per_s: float = 40e9
    """Per GPU of a replica."""
    disk_bytes_per_s: float = 3.6e9
    """Gathering, writing and reading on a shared file system."""
    per_tensor_s: float = 1e-3
    offloaded_bytes_per_s: float = 2.5e9
    """Per GPU, weights that lie in host memory first."""
    delta_base_s: float = 0.5
    delta_scan_bytes_per_s: float = 1.2e9
    """Per GPU: compare with the base version and compress."""
    delta_apply_bytes_per_s: float = 6e9
    """Per GPU of a replica, of its full shard."""
    error_frac: Mapping[str, float] = field(
        default_factory=lambda: {
            "in_process": 0.5,
            "broadcast": 0.6,
            "sharded": 0.35,
            "disk": 0.4,
            "delta": 0.6,
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchAssumptions:
    """Hand-over of a colocated device."""

    copy_bytes_per_s: float = 5e9
    """Per GPU and direction, as frameworks copy; pinned memory reaches the link's rate."""
    sleep_s: float = 1.0
    wake_s: float = 1.5
    graphs_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """Numbers of one account. Fractions are of published peaks."""

    name: str
    method: Literal["paper", "default"]
    weight_bytes_per_param: float = 2.0
    train_state_bytes_per_param: float = 16.0
    """bfloat16 weights and gradients, float32 master weights and two moments."""
    kv_bytes_per_number: float = 2.0
    offload_bytes_per_param: float = 18.0
    """Moved each way when trainer and engine hand over the device."""
    offload_bytes_per_s: float = 25e9
    """Per GPU."""
    sync_bytes_per_s: float = 50e9
    train_mfu_frac: float = 0.40
    forward_mfu_frac: float = 0.50
    """Forward passes and prefill."""
    decode_hbm_frac: float = 0.60
    """Bytes a decode step must read over what it takes, as a fraction of the memory bandwidth."""
    memory_overhead_frac: float = 0.10
    """Device memory lost to runtime, graphs, buffers and fragmentation."""
    decode: DecodeAssumptions = field(default_factory=DecodeAssumptions)
    sync: SyncAssumptions = field(default_factory=SyncAssumptions)
    switch: SwitchAssumptions = field(default_factory=SwitchAssumptions)
    engine_memory_frac: float = 0.55
    """Share of a colocated device that the engine may take: the trainer's runtime keeps the rest."""
    step_base_s: float = 15.0
    """Rewards, data, logging and scheduling of a step, beside the stages."""
    stack: str = "fsdp"
    """Software that trains: a key of `stacks`."""
    stacks: Mapping[str, StackAssumptions] = field(default_factory=dict)
    max_slots: int = 1024
    """Most sequences that an engine runs at once, whatever the memory."""
    micro_batch_tokens: int = 16384
    rollout_error_frac: float = 0.3
    train_error_frac: float = 0.25
    sources: Mapping[str, str] = field(default_factory=dict)
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

    def as_json(self) -> dict[str, object]:
        """Each number with its source."""
        numbers = {
            f.name: {
                "value": getattr(self, f.name),
                "source": self.sources.get(f.name, "DESIGN: paper account"),
            }
            for f in fields(self)
            if f.name not in ("name", "method", "sources")
        }
        return {"name": self.name, "method": self.method, **numbers}


_PAPER_SOURCE = "convention of the paper account: round numbers a person can check by hand"

PAPER = Assumptions(
    name="paper",
    method="paper",
    sources={
        f.name: _PAPER_SOURCE for f in fields(Assumptions) if f.name not in ("name", "method", "sources")
    },
)
DEFAULT = replace(PAPER, name="default", method="default")
PRESETS = {"paper": PAPER, "default": DEFAULT}


def load_assumptions(name_or_path: str) -> Assumptions:
    """A preset by name, or a TOML file that changes single numbers of one.

    Raises:
        ConfigError: neither a preset nor a readable file; an unknown or impossible number.
    """
    if name_or_path in PRESETS:
        return PRESETS[name_or_path]
    path = Path(name_or_path)
    if not path.exists():
        raise ConfigError(
            f"assumptions {name_or_path!r} are neither a preset nor a file",
            f"choose one of: {', '.join(PRESETS)}; or give a TOML file",
        )
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}", "write lines such as: train_mfu_frac = 0.36"
        ) from error
    base_name = table.pop("base", "default")
    if base_name not in PRESETS:
        raise ConfigError(f"{path}: base is {base_name!r}", f"choose one of: {', '.join(PRESETS)}")
    base = PRESETS[base_name]
    known = {f.name for f in fields(base)} - {"name", "method", "sources"}
    values: dict[str, float] = {}
    sources = dict(base.sources)
    for key, entry in table.items():
        if key not in known:
            raise ConfigError(f"{path}: {key} is no assumption", nearest_name(key, known))
        value = entry.get("value") if isinstance(entry, dict) else entry
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: {key} is {value!r}", "give a number")
        values[key] = float(value)
        sources[key] = str(entry.get("source", path)) if isinstance(entry, dict) else str(path)
    return _with_numbers(base, str(path), values, sources)


def _with_numbers(
    base: Assumptions, name: str, values: Mapping[str, float], sources: Mapping[str, str]
) -> Assumptions:
    numbers: dict[str, Any] = dict(values)
    return replace(base, name=name, sources=sources, **numbers)
