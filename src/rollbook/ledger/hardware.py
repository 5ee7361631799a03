"""What a device and a cluster can do: published peaks, link rates, and what `rollbook calibrate` measured.

Accelerator   one device, as published (`data/hardware.toml`) or as measured
Cluster       accelerators of one kind in nodes, with the network between them
MachineSpec   this machine as measured: ceilings, and fitted seconds of one model (see `fit.py`)
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from rollbook.errors import ConfigError, PlanError, nearest_name
from rollbook.ledger.quantity import require_number


@dataclass(frozen=True, kw_only=True)  # no slots: the chip is looked up once
class Accelerator:
    """One device. Rates are dense, per second; links are per direction and device; bytes in powers of ten."""

    name: str
    vendor: str = "nvidia"
    peak_flops_per_s: Mapping[str, float]
    """By dtype: "bfloat16", "float8", "float4". A dtype the device lacks is absent."""
    achieved_flops_per_s: Mapping[str, float] = field(default_factory=dict)
    """Best large GEMM anyone measured, by dtype; empty where nobody did."""
    hbm_bytes: int
    hbm_bytes_per_s: float
    scale_up_bytes_per_s: float
    """NVLink, xGMI or, without one, the host link."""
    scale_up_gpus: int = 8
    """Devices that share the scale-up link: 8, or 72 in an NVL72 rack."""
    gpus_per_node: int = 8
    host_link_bytes_per_s: float
    nic_bytes_per_s: float
    sources: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    """What no source gave and was filled in, with the reason."""
    is_cpu: bool = False
    """The machine's own processor, measured: no CUDA."""
    publish_base_s: float = 0.0
    """Of a publication within the process, measured; a processor only."""
    publish_bytes_per_s: float = 0.0
    """Of the same; 0: not measured."""
    fitted: MachineSpec | None = None
    """Measured seconds of the planned model's own engine and trainer on a processor; None: its ceilings alone."""

    @functools.cached_property
    def chip(self) -> str:
        """What it computes with: devices that differ in memory or links alone share one."""
        return next((chip for chip, names in _CHIPS.items() if self.name in names), self.name)

    @property
    def gemm_share(self) -> float:
        """Of the share of the peak that matrices reach on Hopper and Blackwell, whose best measured GEMM takes 0.8.

        Where another vendor's best takes less (0.51 on an MI300X), so do its matrices in training and decoding.
        """
        if self.vendor == "nvidia" or "bfloat16" not in self.achieved_flops_per_s:
            return 1.0
        best_frac = self.achieved_flops_per_s["bfloat16"] / self.peak("bfloat16")
        return min(best_frac / _BEST_GEMM_FRAC, 1.0)

    def fraction(self, by_device: Mapping[str, float]) -> float:
        """An assumption about this device: by its name, else by its chip, else "default"."""
        return by_device.get(self.name, by_device.get(self.chip, by_device["default"]))

    def peak(self, dtype: str) -> float:
        """FLOP/s of `dtype`; a dtype without its own units runs at the rate of the next wider one."""
        for candidate in (dtype, *_WIDER.get(dtype, ())):
            if candidate in self.peak_flops_per_s:
                return self.peak_flops_per_s[candidate]
        raise PlanError(
            f"{self.name} has no published rate for {dtype}",
            f"use one of: {', '.join(sorted(self.peak_flops_per_s))}",
        )


_BEST_GEMM_FRAC = 0.8
"""Of the bfloat16 peak of an H100: 794 TFLOPS (stas00/ml-engineering)."""
_CHIPS = {
    "A100": ("A100-80GB SXM", "A100-80GB PCIe", "A100-40GB SXM", "A800-80GB SXM"),
    "H100": ("H100 SXM", "H200 SXM", "H800 SXM", "GH200"),
    "H20": ("H20-96GB", "H20-141GB"),
    "B200": ("B200 SXM", "GB200 (per GPU)"),
    "B300": ("B300 SXM", "GB300 (per GPU)"),
}
_WIDER = {
    "float4": ("float8", "bfloat16", "float32"),
    "float8": ("bfloat16", "float32"),
    "float16": ("bfloat16", "float32"),
    "bfloat16": ("float32",),
    "float32": ("bfloat16",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`num_gpus` equal accelerators in nodes of `gpus_per_node`."""

    accelerator: Accelerator
    num_gpus: int
    gpus_per_node: int = 0
    """0 takes the accelerator's usual node."""
    nic_bytes_per_s: float = 0.0
    """Network rate per GPU and direction; 0 takes the accelerator's usual one."""

    def __post_init__(self) -> None:
        require_number("num_gpus", self.num_gpus, least=1, remedy="give at least one GPU")
        for name in ("gpus_per_node", "nic_bytes_per_s"):
            remedy = "give what the cluster has, or 0 for the accelerator's usual value"
            require_number(name, getattr(self, name), least=0, remedy=remedy)
        object.__setattr__(self, "gpus_per_node", self.gpus_per_node or self.accelerator.gpus_per_node)
        object.__setattr__(self, "nic_bytes_per_s", self.nic_bytes_per_s or self.accelerator.nic_bytes_per_s)

    @property
    def num_nodes(self) -> int:
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def peak_flops_per_s(self) -> float:
        """bfloat16 FLOP/s of all devices together."""
        return self.num_gpus * self.accelerator.peak("bfloat16")


def load_accelerator(name_or_path: str, model_path: str = "") -> Accelerator:
    """An accelerator by name or alias, or this machine from a `hardware.toml` of `rollbook calibrate`.

    Args:
        model_path: of the planned model, whose seconds a `hardware.toml` may hold.
    Raises:
        ConfigError: unknown name (the nearest are named), unreadable file, or facts that nobody published.
    """
    if name_or_path.endswith(".toml"):
        spec = MachineSpec.read(Path(name_or_path))
        accelerator = spec.as_accelerator()
        return replace(accelerator, fitted=spec) if spec.is_cpu and spec.knows(model_path) else accelerator
    by_name = _published_accelerators()
    entry = by_name.get(_key(name_or_path))
    if entry is None:
        names = {row["name"]: None for row in by_name.values()} | {
            a: None for row in by_name.values() for a in row["aliases"]
        }
        raise ConfigError(f"GPU {name_or_path!r} is not in the table", nearest_name(name_or_path, names))
    return _accelerator_from_row(entry)


def accelerator_names() -> list[str]:
    """Every accelerator of the table, by its main name."""
    return sorted({row["name"] for row in _published_accelerators().values()})


def _key(name: str) -> str:
    return name.lower().replace("nvidia", "").replace("-", "").replace(" ", "").replace("_", "")


@functools.cache
def _published_accelerators() -> dict[str, dict[str, Any]]:
    text = (resources.files("rollbook.ledger") / "data" / "hardware.toml").read_text()
    by_name: dict[str, dict[str, Any]] = {}
    for row in tomllib.loads(text)["accelerator"]:
        for name in (row["name"], *row["aliases"]):
            by_name[_key(name)] = row
    return by_name


def _accelerator_from_row(row: Mapping[str, Any]) -> Accelerator:
    missing = [key for key in ("hbm_gb", "hbm_tb_s") if key not in row]
    if missing:
        raise ConfigError(
            f"{row['name']}: {' and '.join(missing)} is not known ({'; '.join(row.get('assumed', []))})",
            "measure it with `rollbook calibrate` and pass the hardware.toml it writes",
        )
    dtypes = {"bfloat16": "bf16", "float8": "fp8", "float4": "fp4"}
    return Accelerator(
        name=row["name"],
        vendor=row["vendor"],
        peak_flops_per_s={d: row[f"{k}_tflops"] * 1e12 for d, k in dtypes.items() if f"{k}_tflops" in row},
        achieved_flops_per_s={
            d: row[f"{k}_achieved_tflops"] * 1e12 for d, k in dtypes.items() if f"{k}_achieved_tflops" in row
        },
        hbm_bytes=round(row["hbm_gb"] * 1e9),
        hbm_bytes_per_s=row["hbm_tb_s"] * 1e12,
        scale_up_bytes_per_s=row["scale_up_gb_s"] * 1e9,
        scale_up_gpus=row["scale_up_gpus"],
        gpus_per_node=row["gpus_per_node"],
        host_link_bytes_per_s=row["host_link_gb_s"] * 1e9,
        nic_bytes_per_s=row["nic_gb_s"] * 1e9,
        sources=tuple(row["sources"]),
        assumed=tuple(row.get("assumed", ())),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeFit:
    """Seconds of one decode step of one model here: base + per row + per row and context token."""

    base_s: float
    """Paid by every step: weights, launches, sampling."""
    per_row_s: float
    per_row_token_s: float
    """Times the sum of context lengths over the running rows."""
    prefill_tokens_per_s: float
    prefill_base_s: float = 0.0
    """Paid by every prefill call."""
    error_frac: float = 0.0
    """Root mean square relative error of the fit on its own points."""

    def scaled(self, factor: float, *, prefill: float | None = None) -> DecodeFit:
        """Every second `factor` times as long; those of prefills `prefill` times, where that is given."""
        prefill = factor if prefill is None else prefill
        return replace(
            self,
            base_s=self.base_s * factor,
            per_row_s=self.per_row_s * factor,
            per_row_token_s=self.per_row_token_s * factor,
            prefill_base_s=self.prefill_base_s * prefill,
            prefill_tokens_per_s=self.prefill_tokens_per_s / prefill,
        )

    def without_prefill(self) -> DecodeFit:
        """Decode steps alone."""
        return replace(self, prefill_base_s=0.0, prefill_tokens_per_s=math.inf)

    def step_s(self, num_rows: float, context_tokens: float) -> float:
        """Seconds of a step with `num_rows` rows that hold `context_tokens` tokens together."""
        return self.base_s + self.per_row_s * num_rows + self.per_row_token_s * context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFit:
    """Seconds of training one model here."""

    per_micro_batch_s: float
    tokens_per_s: float
    """Forward and backward; tokens that the model computes, shared prompts once."""
    forward_tokens_per_s: float
    """Logprobs only (proximal, reference, values)."""
    forward_per_micro_batch_s: float = 0.0
    optimizer_s_per_param: float = 0.0
    """One optimizer update, clipping included, per parameter."""
    error_frac: float = 0.0

    def with_forwards_scaled(self, factor: float) -> TrainFit:
        """Every forward alone `factor` times as long."""
        return replace(
            self,
            forward_per_micro_batch_s=self.forward_per_micro_batch_s * factor,
            forward_tokens_per_s=self.forward_tokens_per_s / factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PassFit:
    """Seconds of a pass of another network than the policy over packed micro batches."""

    per_micro_batch_s: float
    tokens_per_s: float
    """Tokens that the model computes, shared prompts once."""

    def scaled(self, factor: float) -> PassFit:
        """Every second `factor` times as long."""
        return PassFit(
            per_micro_batch_s=self.per_micro_batch_s * factor, tokens_per_s=self.tokens_per_s / factor
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFit:
    """Seconds of handing a batch to a trainer in other processes, and of what it writes into the batch coming back."""

    base_s: float
    """Paid by every call."""
    tokens_per_s: float
    """Tokens that the model computes, shared prompts once."""

    def seconds(self, num_tokens: float) -> float:
        """Of one call with a batch of `num_tokens`."""
        return self.base_s + num_tokens / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """How much longer each side takes while the other one works: they share cores, caches and the interpreter."""

    engine: float = 1.0
    trainer: float = 1.0
    publication: float = 1.0
    """It waits for the end of decode steps, and its probe decodes among the other rows."""

    def of(self, stage: str) -> float:
        """By which a stage takes longer."""
        if stage in ("rollout", "reward"):
            return self.engine
        return self.publication if stage == "sync" else self.trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFit:
    """Seconds of what runs between the device's stages: the interpreter, and the step's files."""

    pack_s: float = 0.0
    """Per trained sequence: filters, arrays, mini batches."""
    pack_base_s: float = 0.0
    advantage_s: float = 0.0
    """Per trained sequence: corrections and advantages."""
    advantage_base_s: float = 0.0
    report_s: float = 0.0
    """Per trajectory: metrics and its row in the step's file."""
    report_trained_s: float = 0.0
    """Per trained sequence, beside that: the gap between engine and trainer, sizes of the batch."""
    texts_s: float = 0.0
    """Per step, in the mean of a run's after its first two: texts of tokens that no step before had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineSpec:
    """What `rollbook calibrate` measured: this machine's ceilings, and this model's coefficients on it."""

    name: str
    device: str
    """"cpu", or the CUDA device's name."""
    num_threads: int = 1
    gemm_flops_per_s: Mapping[str, float]
    """Large GEMM, by dtype."""
    copy_bytes_per_s: float
    """Device copy, counting bytes read and written."""
    host_link_bytes_per_s: float = 0.0
    """Pinned host to device; 0 where there is no such link."""
    memory_bytes: int
    launch_s: float = 0.0
    """Seconds of an operator on one element."""
    model: str = ""
    """The model of `decode` and `train`; empty when only the machine was measured."""
    dtype: str = "float32"
    decode: DecodeFit | None = None
    train: TrainFit | None = None
    host: HostFit | None = None
    passes: Mapping[str, PassFit] = field(default_factory=dict)
    """By stage: "teacher", "values", "critic". The reference is as large as the policy, whose forward `train` holds."""
    call: CallFit | None = None
    """None where the trainer is in the process of the loop."""
    contention: Contention | None = None
    """None where engine and trainer take turns, or were not measured side by side."""
    digest_bytes_per_s: float = 0.0
    """Digest of live parameters, and the copy into them, per byte published."""
    sync_base_s: float = 0.0
    """Paid by every publication whose replicas have a slot to spare: the probe."""
    reward_s: float = 0.0
    """Scoring one trajectory."""
    reward_base_s: float = 0.0
    core_wait_frac: float = 0.0
    """Of the measuring, in which a thread waited for a core: that share of the seconds may be no cost of a step."""

    @property
    def is_cpu(self) -> bool:
        return self.device in ("cpu", *_CPU_NAMES)

    def knows(self, model_path: str) -> bool:
        """Whether `decode` and `train` are of the model in this folder."""
        same = bool(model_path) and Path(self.model).name == Path(model_path).name
        return same and self.decode is not None and self.train is not None

    def as_accelerator(self) -> Accelerator:
        """This machine as a device whose peaks are what was measured; of a processor, where every model is float32, by
        that alone: without bfloat16 instructions it takes tens of times as long."""
        rates = dict(self.gemm_flops_per_s)
        if self.is_cpu and "float32" in rates:
            rates = {"float32": rates["float32"]}
        return Accelerator(
            name=self.name,
            vendor="measured",
            peak_flops_per_s=rates,
            achieved_flops_per_s=rates,
            hbm_bytes=self.memory_bytes,
            hbm_bytes_per_s=self.copy_bytes_per_s,
            scale_up_bytes_per_s=self.copy_bytes_per_s,
            scale_up_gpus=1,
            gpus_per_node=1,
            host_link_bytes_per_s=self.host_link_bytes_per_s or self.copy_bytes_per_s,
            nic_bytes_per_s=self.host_link_bytes_per_s or self.copy_bytes_per_s,
            sources=("rollbook calibrate",),
            is_cpu=self.is_cpu,
            publish_base_s=self.sync_base_s,
            publish_bytes_per_s=self.digest_bytes_per_s or self.copy_bytes_per_s,
        )

    def write(self, path: Path) -> None:
        """Write `hardware.toml`; `read` gives back an equal spec."""
        path.write_text(_to_toml(self))

    @classmethod
    def read(cls, path: Path) -> MachineSpec:
        """Raises ConfigError when the file is missing, not TOML, or lacks a measured number."""
        try:
            tables = tomllib.loads(path.read_text())
        except OSError as error:
            raise ConfigError(
                f"cannot read {path}: {error.strerror}", "run `rollbook calibrate -o hardware.toml`"
            ) from error
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"{path} is not TOML: {error}", "run `rollbook calibrate` again") from error
        _require_measured(tables, path)
        try:
            decode, train = tables.pop("decode", None), tables.pop("train", None)
            host, contention = tables.pop("host", None), tables.pop("contention", None)
            call = tables.pop("call", None)
            return cls(
                **tables.pop("machine"),
                gemm_flops_per_s=tables.pop("gemm_flops_per_s"),
                decode=DecodeFit(**decode) if decode else None,
                train=TrainFit(**train) if train else None,
                host=HostFit(**host) if host else None,
                passes={stage: PassFit(**fit) for stage, fit in tables.pop("passes", {}).items()},
                call=CallFit(**call) if call else None,
                contention=Contention(**contention) if contention else None,
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{path} is no hardware.toml of this version: {_why_no_spec(error)}",
                "run `rollbook calibrate` again",
            ) from error


def _why_no_spec(error: Exception) -> str:
    return f"it has no table [{error.args[0]}]" if isinstance(error, KeyError) else str(error)


_CPU_NAMES = ("", "x86_64", "AMD64", "aarch64", "arm64")
"""What a processor calls itself where it does not say "cpu"."""
_RATES = ("gemm_flops_per_s", "copy_bytes_per_s", "memory_bytes", "tokens_per_s")
"""Ends of names of which a zero means that nothing was measured."""


def _require_measured(table: Mapping[str, Any], path: Path, prefix: str = "") -> None:
    """Refuse numbers that no measurement gives. A rate may be infinite: nothing was seen to depend on it."""
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            _require_measured(value, path, f"{name}.")
        elif isinstance(value, int | float):
            is_rate = any(part.endswith(_RATES) for part in name.split("."))
            if not value >= 0 or (value == 0 and is_rate) or (math.isinf(value) and not is_rate):
                raise ConfigError(f"{path}: {name} is {value}", "run `rollbook calibrate` again")


def _to_toml(machine: MachineSpec) -> str:
    lines = ["# Measured by `rollbook calibrate`: rates per second, times in seconds.", "[machine]"]
    tables: dict[str, Any] = {}
    for name in machine.__slots__:
        value = getattr(machine, name)
        if name in ("decode", "train", "host", "call", "contention"):
            tables[name] = value and _as_table(value)
        elif name == "passes":
            tables |= {f"passes.{stage}": _as_table(fit) for stage, fit in value.items()}
        elif name == "gemm_flops_per_s":
            tables[name] = value
        else:
            lines.append(f"{name} = {_toml_value(value)}")
    for name, table in tables.items():
        if table:
            lines += ["", f"[{name}]", *(f"{key} = {_toml_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _as_table(fit: Any) -> dict[str, Any]:
    return {key: getattr(fit, key) for key in fit.__slots__}


def _toml_value(value: str | float) -> str:
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return repr(value)
