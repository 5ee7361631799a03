"""Adapters of published decoding: one stream or many, large expert-parallel groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ledger_words import (
    DRAFTED,
    Case,
    NotCovered,
    accelerator_of,
    count_of,
    drafts_tokens,
    dtype_of,
    find_model,
    first_of,
    middle,
    numbers,
    within,
)
from rollbook.ledger.account import Range
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.decode import decode_step, prefill_call_s, prefill_s
from rollbook.ledger.flops import attention_flops, prefill_flops
from rollbook.ledger.generation import decode_widening
from rollbook.ledger.hardware import Accelerator, Cluster
from rollbook.ledger.layout import ReplicaLayout
from rollbook.ledger.model import ModelSpec

TYPICAL_CONTEXT_TOKENS = 1000
"""Context of a single-stream decode measurement that does not give one."""


def decode_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Serving: speed of one stream or of many, steps per token, tokens per second and node."""
    config, measured = case["config"], case["measured"]
    model = find_model(config["model"])
    accelerator = accelerator_of(config["gpu"])
    if drafts_tokens(config):
        raise NotCovered(DRAFTED)
    if "kv_length" in config:
        yield from _expert_parallel_decode(config, measured, model, accelerator, assumptions)
        return
    weights = dtype_of(config.get("precision", config["model"]))
    engine = engine_of(str(config.get("engine", "")))
    cluster = Cluster(accelerator=accelerator, num_gpus=count_of(config.get("gpus", config.get("tp", 1))))
    num_gpus = count_of(config.get("tp", config.get("gpus", 1)))
    repeats = bool(
        config.get("attention_dp")
    )  # attention on every GPU for its own sequences, experts over all
    replica = ReplicaLayout(
        tp_size=1 if repeats else num_gpus,
        ep_size=num_gpus if repeats else 1,
        weight_dtype=weights,
        engine=engine,
    )
    error_frac = _decode_error_frac(model, cluster, assumptions, replica)
    for kv_dtype, part in _by_kv_dtype(measured, dtype_of(config.get("kv_cache", ""))):
        serving = _Serving(model, cluster, assumptions, replace(replica, kv_dtype=kv_dtype), config)
        prefix = "" if part is measured else f"{kv_dtype} KV "
        for metric, value, predicted in serving.compare(part):
            yield prefix + metric, value, within(predicted, error_frac)


def engine_of(text: str) -> str:
    """Our name of an engine: vLLM before 0.8 (January 2025) ran its scheduler between the device's steps, and before
    0.3 (January 2024) it had no CUDA graphs."""
    text = text.lower()
    if "eager" in text:
        return "vllm_eager"
    if "sglang" in text:
        return "sglang"
    if re.search(r"tensorrt|trt|lmdeploy|turbomind|triton", text):
        return "tensorrt_llm"
    version, year = re.search(r"vllm\D{0,3}0\.(\d+)", text), re.search(r"vllm.*202([34])", text)
    minor = int(version[1]) if version else {"3": 2, "4": 6}[year[1]] if year else 99
    return "vllm_eager" if minor < 3 else "vllm_v0" if minor < 8 else "vllm"


def _decode_error_frac(
    model: ModelSpec, cluster: Cluster, assumptions: Assumptions, replica: ReplicaLayout
) -> float:
    wider, _ = decode_widening(model, cluster, assumptions, replica)
    return assumptions.rollout_error_frac * wider


def _by_kv_dtype(measured: dict[str, Any], default: str) -> list[tuple[str, dict[str, Any]]]:
    parts = [(dtype_of(key), value) for key, value in measured.items() if key.endswith("_kv")]
    return parts or [(default, measured)]


def _expert_parallel_decode(
    config: dict[str, Any],
    measured: dict[str, Any],
    model: ModelSpec,
    accelerator: Accelerator,
    assumptions: Assumptions,
) -> Iterator[tuple[str, float, Range]]:
    """Large expert-parallel groups: attention repeated on every GPU, experts spread over all, float8 weights."""
    ep_size = count_of(config.get("ep_decode", 128))
    cluster = Cluster(accelerator=accelerator, num_gpus=ep_size)
    replica = ReplicaLayout(tp_size=1, ep_size=ep_size, weight_dtype=dtype_of(config.get("precision", "fp8")))
    error_frac = _decode_error_frac(model, cluster, assumptions, replica)
    step = decode_step(
        model,
        cluster,
        assumptions.decode,
        replica,
        num_rows=float(config["batch_per_gpu"] * ep_size),
        context_tokens=float(config["kv_length"]),
    )
    per_gpu = float(config["batch_per_gpu"]) / float(step.seconds)
    per_node = per_gpu * cluster.gpus_per_node
    for key, predicted in (
        ("decode_tokens_per_s_per_node", per_node),
        ("decode_tokens_per_s_per_gpu", per_gpu),
    ):
        if key in measured:
            yield key, middle(measured[key]), within(predicted, error_frac)


@dataclass(frozen=True, slots=True)
class _Serving:
    model: ModelSpec
    cluster: Cluster
    assumptions: Assumptions
    replica: ReplicaLayout
    config: dict[str, Any]

    @property
    def num_streams(self) -> int:
        return count_of(self.config.get("batch_size", self.config.get("concurrency", 1)))

    def step_s(self, context: float) -> float:
        step = decode_step(
            self.model,
            self.cluster,
            self.assumptions.decode,
            self.replica,
            num_rows=float(self.num_streams),
            context_tokens=context,
        )
        return float(step.seconds)

    def prefill_s(self, prompt_tokens: float) -> float:
        flops = prefill_flops(self.model, prompt_tokens)
        seconds = prefill_s(
            self.model,
            self.cluster,
            self.assumptions.decode,
            self.replica,
            flops=flops,
            attention_flops=attention_flops(self.model, prompt_tokens),
        )
        return float(seconds)

    @property
    def call_s(self) -> float:
        return prefill_call_s(self.model, self.cluster, self.assumptions.decode)

    @property
    def is_steady(self) -> bool:
        """A stream that ends is followed by another: prompts are prefilled while others decode."""
        streams = self.num_streams
        more = count_of(self.config.get("requests", streams)) > streams
        return streams > 1 and (more or ("concurrency" in self.config and "requests" not in self.config))

    def token_s(self, context: float, prompt: float, output: float) -> float:
        """Seconds between two tokens of a stream, with what other streams' prompts take in between.

        Each decode step ends n / output of n streams, whose followers are prefilled at once, in one call if any came.
        """
        step_s, streams = self.step_s(context), self.num_streams
        if not self.is_steady:
            return step_s
        arrivals = (streams - 1) / output
        return step_s + arrivals * self.prefill_s(prompt) + (1 - math.exp(-arrivals)) * self.call_s

    def compare(self, measured: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
        config, streams = self.config, self.num_streams
        prompt = float(config.get("input_length", 0))
        output = float(config.get("output_length", 0))
        if not {"batch_size", "concurrency"} & set(config) and {
            "output_tokens_per_s",
            "output_tokens_per_s_per_gpu",
        } & set(measured):
            raise NotCovered("a throughput without the number of streams")
        known = "input_length" in config and output > 0
        context = prompt + output / 2 if known else TYPICAL_CONTEXT_TOKENS
        token_s = self.token_s(context, prompt, output) if known else self.step_s(context)
        if known:
            waves = -(-count_of(config.get("requests", streams)) // streams)
            requests = waves * streams
            own_s = self.prefill_s(prompt) + self.call_s
            # Streams that run one after the other prefill alone, those that run together delay each other.
            seconds = waves * (
                output * token_s
                + (own_s if self.is_steady else own_s + (streams - 1) * self.prefill_s(prompt))
            )
            if "speed_tokens_per_s" in measured:
                counts_prompt = "prompt" in str(measured.get("speed_definition", ""))
                tokens = requests * (output + (prompt if counts_prompt else 0))
                yield "speed_tokens_per_s", middle(measured["speed_tokens_per_s"]), tokens / seconds
            if "output_tokens_per_s" in measured:
                yield (
                    "output_tokens_per_s",
                    middle(measured["output_tokens_per_s"]),
                    requests * output / seconds,
                )
            else:
                yield from first_of(
                    measured,
                    {
                        "output_tokens_per_s_per_gpu": requests * output / seconds / self.cluster.num_gpus,
                        "total_tokens_per_s": requests * (prompt + output) / seconds,
                        "total_tokens_per_s_per_gpu": requests
                        * (prompt + output)
                        / seconds
                        / self.cluster.num_gpus,
                        "latency_s": seconds,
                        "duration_s": seconds,
                        "requests_per_s": requests / seconds,
                    },
                )
        for key in ("tpot_ms", "ms_per_output_token"):
            if key in measured:
                yield key, middle(measured[key]), 1e3 * token_s
        if "itl_ms" in measured and (streams == 1 or (known and "tpot_ms" not in measured)):
            yield "itl_ms", middle(measured["itl_ms"]), 1e3 * token_s
        if "tpot_ms_by_isl_osl" in measured:
            for lengths, value in measured["tpot_ms_by_isl_osl"].items():
                isl, osl = numbers(lengths)
                yield f"tpot_ms at {lengths}", middle(value), 1e3 * self.step_s(isl + osl / 2)
        fit = measured.get("conc1_fit", measured if "a_ms" in measured else {})
        if fit:
            single = replace(self, config={**config, "concurrency": 1, "batch_size": 1})
            near, far = single.step_s(1000.0), single.step_s(33000.0)
            slope = (far - near) / 32000.0
            yield "itl at no context", middle(fit["a_ms"]), 1e3 * (near - 1000 * slope)
            yield "itl per context token", middle(fit["b_ms_per_token"]), 1e3 * slope
