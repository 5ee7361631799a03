"""What a measured name measures, by its words, and the value in the adapters' unit."""

from __future__ import annotations

import re
from typing import Any

from ledger_names import flat
from ledger_numbers import UNITS, figure, seconds_of

Part = dict[str, Any]


_LOOSE = frozenset(
    [
        "time",
        "times",
        "duration",
        "latency",
        "wall",
        "wallclock",
        "clock",
        "elapsed",
        "mean",
        "avg",
        "average",
        "median",
        "p50",
        "per",
        "steady",
        "total",
        "whole",
        "overall",
        "end",
        "e2e",
        "to",
        "as",
        "about",
        "approx",
        "measured",
        "reported",
        "the",
        "of",
        "a",
        "rl",
        "full",
    ]
)
"""Words of a measured name that do not say what is measured."""
_STEP = frozenset(["step", "steps", "iteration", "iter", "iterations", "update"])
_PUBLICATION = frozenset(
    [
        "sync",
        "synchronization",
        "synchronisation",
        "refit",
        "broadcast",
        "publish",
        "publication",
        "transfer",
        "reload",
        "update",
        "updating",
        "push",
    ]
)
_WEIGHTS = frozenset(
    [
        "weight",
        "weights",
        "param",
        "params",
        "parameter",
        "parameters",
        "model",
        "policy",
        "engine",
        "engines",
        "rollout",
        "inference",
        "nccl",
        "ipc",
        "complete",
    ]
)
_TOKEN = frozenset(["tok", "toks", "token", "tokens", "tps", "tgs", "tpgs"])
_DEVICE_WORDS = frozenset(["gpu", "gpus", "device", "devices", "chip", "card", "tgs", "tpgs"])
_RATE = frozenset(["s", "sec", "second", "seconds", "tps", "tgs", "tpgs", "throughput", "rate", "speed"])
_OUTPUTS = frozenset(
    ["output", "generated", "generation", "generate", "decode", "decoding", "gen", "decoded", "completion"]
)


_SECONDS_OF_A_TOKEN = r"tpot_ms|ms_per_output_token|itl_ms|tpot_ms_by_isl_osl|conc1_fit|a_ms|.*_kv"
_SERVED = r"(?:speed|output|total)_tokens_per_s(?:_per_gpu)?|.*_kv|decode_tokens_per_s_per_(?:node|gpu)"
_PUBLISHED = (
    r"(?:weight_sync|weight_update|update_weights|update|sync|refit)_s|nccl_full_broadcast_s"
    r"|delta_sharded_s|update_(?:broadcast|p2p)_s|(?:async|sync)_(?:nixl|nccl)_s"
)
_SAME: dict[tuple[str, str], str] = {
    ("rl_step", "step_s"): r"(?:total_step|step|train_step|step_time|time_per_step)_s|trajectories_per_s",
    ("rl_step", "tokens_per_s_per_gpu"): "tokens_per_s_per_gpu",
    ("decode", "tpot_ms"): _SECONDS_OF_A_TOKEN,
    ("decode", "itl_ms"): "itl_ms",
    ("decode", ""): _SERVED,
    ("train_mfu", "tokens_per_s_total"): r"tokens_per_s(?:_total)?",
    ("train_mfu", "tflops_per_gpu"): r"(?:model_)?tflops_per_gpu",
    ("train_mfu", "step_s"): r"step_(?:s|ms)|(?:actor_train|update_actor|train)_s",
    ("weight_sync", ""): _PUBLISHED,
}
"""By category and our name ("": any other): names that the adapters know and that say the same. Where one of them is
measured already, another is a part of it, or it in other units."""


_PARTS = ("transfer_s", "broadcast_s", "update_s", "time_s")
"""Names that the adapters know as the whole only where there is no other."""


def measured_as_known(measured: Part, category: str) -> Part:
    """Measured numbers under the adapters' names and in their units."""
    found = dict(measured)
    for key, value in measured.items():
        words = flat(key).split("_")
        unit = words[-1] if words[-1] in UNITS else ""
        if not unit and words[0] in ("s", "sec", "seconds", "ms", "minutes") and "per" in words:
            unit, words = words[0], [*words[1:], words[0]]
        name, scaled = _name_of(set(words) - {unit}, value, unit, category)
        same = _SAME.get((category, name)) or _SAME.get((category, ""), name)
        if name and key not in _PARTS and not any(re.fullmatch(same, known) for known in measured):
            found.setdefault(name, scaled)
    for key, value in found.items():
        if key.endswith("_s") and isinstance(value, str):
            found[key] = seconds_of(value)
    return found


def _name_of(words: set[str], value: Any, unit: str, category: str) -> tuple[str, Any]:
    """Our name of what these words measure, and its value in our unit; "" where it is not told."""
    rest = words - _LOOSE
    if category == "rl_step" and unit and rest and rest <= _STEP:
        return "step_s", seconds_of(value, unit)
    if category == "train_mfu" and unit and rest and rest <= (_STEP | {"train", "training"}) and rest & _STEP:
        return "step_s", seconds_of(value, unit)
    if category == "weight_sync" and unit and rest & _PUBLICATION and rest <= (_PUBLICATION | _WEIGHTS):
        return "sync_s", seconds_of(value, unit)
    if category == "decode" and unit and (rest <= {"tpot"} or rest == {"output", "token"}) and rest:
        return "tpot_ms", _times(seconds_of(value, unit), 1e3)
    if category == "decode" and unit and rest in ({"itl"}, {"inter", "token"}) and "median" not in words:
        return "itl_ms", _times(seconds_of(value, unit), 1e3)
    if (
        category == "train_mfu"
        and words & {"mfu"}
        and rest <= {"mfu", "pct", "percent", "frac", "hfu", "model"} - {"hfu"}
    ):
        share = value if isinstance(value, (int, float)) else figure(str(value))
        return ("", value) if share is None else ("mfu_pct", share * (100 if share <= 1 else 1))
    if (
        category == "train_mfu"
        and rest & {"tflops", "tflop"}
        and rest <= {"tflops", "tflop", "model", "gpu", "s", "device"}
    ):
        return "tflops_per_gpu", value
    return _rate_of(words, value, unit, category)


def _rate_of(words: set[str], value: Any, unit: str, category: str) -> tuple[str, Any]:
    """Tokens a second, of one GPU or of all."""
    if (
        not words & _TOKEN
        or not (words | {unit}) & _RATE
        or unit not in ("", "s", "sec", "second", "seconds")
    ):
        return "", value
    rest = words - _LOOSE - _TOKEN - _RATE - _DEVICE_WORDS
    scope = "_per_gpu" if words & _DEVICE_WORDS else ""
    if category == "decode" and rest <= _OUTPUTS:
        is_all = "total" in words or "overall" in words
        return ("total_tokens_per_s" if is_all else "output_tokens_per_s") + scope, value
    if category == "train_mfu" and rest <= {"train", "training", "trained"}:
        return "tokens_per_s_per_gpu" if scope else "tokens_per_s_total", value
    if category == "rl_step" and scope and not rest:
        return "tokens_per_s_per_gpu", value
    return "", value


def _times(value: Any, factor: float) -> Any:
    if isinstance(value, list):
        return [_times(one, factor) for one in value]
    if isinstance(value, dict):
        return {key: _times(one, factor) for key, one in value.items()}
    return value * factor if isinstance(value, (int, float)) else value
