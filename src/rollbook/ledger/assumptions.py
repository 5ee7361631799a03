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
