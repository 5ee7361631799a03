"""Words of published cases: models, devices, number formats, frameworks, counts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

from rollbook.errors import ConfigError
from rollbook.ledger.account import Range
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Accelerator, load_accelerator
from rollbook.ledger.model import ModelSpec, load_model

Case = dict[str, Any]


class NotCovered(Exception):
    """The ledger has no business predicting this case; the message says why."""


@functools.cache
def find_model(text: str) -> ModelSpec:
    """The model that a free text such as "Kimi-K2 1T" or "DeepSeek-V3/R1" names, by its longest known start."""
    if re.search(r"\bcut to\b", text):
        raise NotCovered(f"{text!r} is no whole model")
    words = re.split(r"[\s/]+", text.strip())
    for start in range(len(words)):
        for end in range(len(words), start, -1):
            try:
                return load_model("-".join(words[start:end]))
            except ConfigError:
                continue
    return load_model(text)


def middle(value: Any) -> float:
    """A number from a number, a range, or a summary that gives median or mean."""
    if isinstance(value, dict):
        for key in ("median", "mean", "p50", "avg"):
            if key in value:
                return float(value[key])
        raise ValueError(f"no single number in {value}")
    if isinstance(value, list):
        return sum(float(v) for v in value) / len(value)
    if isinstance(value, str) and (ends := re.fullmatch(r"\s*([\d.]+)\s*(?:-|to)\s*([\d.]+)\s*", value)):
        return (float(ends[1]) + float(ends[2])) / 2
    return float(value)


def count_of(value: Any) -> int:
    """A count from a number, or from a text that begins with one, such as "8 (not stated)".

    Raises:
        ValueError: no number there.
    """
    found = re.match(r"\s*(\d[\d,]*)", str(value))
    if found is None:
        raise ValueError(f"no count in {value!r}")
    return int(found[1].replace(",", ""))


def numbers(text: Any) -> list[int]:
    """Whole numbers of a text such as "[2,1]" or "16 train + 16 gen"."""
    return [int(n) for n in re.findall(r"\d+", str(text))]


_DEVICES = (
    "GB300", "GB200", "B300", "B200", "GH200", "H200", "H100 PCIe", "H100", "H800", "H20-141GB", "H20", "A100-40GB",
    "A100 PCIe", "A100", "A800", "MI355X", "MI350X", "MI325X", "MI300X", "L40S", "L40", "L20", "A10G", "A10", "A40",
    "RTX PRO 6000", "RTX 5090", "5090", "RTX 4090", "4090", "A6000", "910B", "910C",
)  # fmt: skip


@functools.cache
def accelerator_of(text: str) -> Accelerator:
    """The device that a free text such as "4x8 H100, CX-7 400 Gbps IB" names."""
    flat = re.sub(r"[ _]", "-", text.lower())
    for name in _DEVICES:
        if re.search(re.escape(name.lower().replace(" ", "-")) + r"(?![0-9])", flat):
            return load_accelerator(name.replace("A100 PCIe", "A100-PCIe"))
    raise NotCovered(f"the device {text!r} is not in the table")


_DTYPES = {
    "bf16": "bfloat16",
    "fp16": "bfloat16",
    "mxfp8": "float8",
    "fp8": "float8",
    "nvfp4": "float4",
    "mxfp4": "float4",
    "int4": "float4",
    "awq": "float4",
    "gptq": "float4",
    "w4a16": "float4",
    "int8": "float8",
}


def dtype_of(text: Any, default: str = "bfloat16") -> str:
    """Our name of a published precision; the first one in the text. Whole numbers count as floats of their size."""
    found = re.search(r"mxfp8|fp8|nvfp4|mxfp4|bf16|fp16|int8|int4|w4a16|awq|gptq", str(text).lower())
    return default if found is None else _DTYPES[found[0]]


_FRAMEWORKS = (
    (r"\bverl.*checkpoint engine", "verl_checkpoint_engine"),
    (r"\bverl|easyr1", "verl"),
    (r"skyrl", "skyrl"),
    (r"checkpoint[ -_]engine|ckpt[ -_]engine", "checkpoint_engine"),
    (r"nemo[ -_/]*rl", "nemo"),
    (r"\btrl\b", "trl"),
    (r"\bvime\b", "vime"),
    (r"\brelax\b", "relax"),
    (r"slime|miles|xorl", "slime"),
)
"""Words of a source, and the framework's name in the assumptions."""


def framework_of(case: Case) -> str:
    """The framework that a case measures, by its own words; "" where the assumptions know none by that name."""
    source = case.get("source") or {}
    named = (source.get("title"), source.get("where"), case["family"])
    text = str(case["config"].get("framework") or " ".join(str(part) for part in named if part)).lower()
    return next((name for words, name in _FRAMEWORKS if re.search(words, text)), "")


def as_published(case: Case, assumptions: Assumptions) -> Assumptions:
    """The assumptions with the numbers of the case's framework, where it has its own."""
    name = framework_of(case)
    return assumptions.for_framework(name) if name else assumptions


def first_of(measured: dict[str, Any], predicted: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """The first of these numbers that was measured: the others say the same in other units."""
    for key, value in predicted.items():
        if key in measured:
            yield key, middle(measured[key]), value
            return


def within(value: float, error_frac: float) -> Range:
    return Range.within(value, error_frac)


def first_named(config: dict[str, Any], measured: dict[str, Any], *names: str) -> Any:
    """The first of these names that a case has, as it was set or as it was measured."""
    return next(
        (part[name] for part in (config, measured) for name in names if part.get(name) is not None), None
    )


def degree_of(value: Any) -> int:
    return int(value) if str(value).isdigit() else 1


DRAFTED = "drafted tokens, of which nobody knows beforehand how many are kept"


def drafts_tokens(config: dict[str, Any]) -> bool:
    said = " ".join(
        str(value) for key, value in config.items() if re.search(r"specul|draft|mtp", str(key).lower())
    )
    return (
        re.search(r"\w", said) is not None and re.match(r"\s*(off|no|none|false|0)\b", said.lower()) is None
    )
