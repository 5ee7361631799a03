"""Turn a published measurement into ledger calls: which model, device and workload a case describes.

Nothing here is tuned to a case. An adapter reads the configuration as it was published, asks the ledger, and
gives back pairs of measured and predicted numbers; where an input that matters was not published, it says so.
What a whole class of cases leaves out is assumed once, in the constants below.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ledger_reading import as_read
from rollbook.errors import ConfigError, RunError
from rollbook.ledger.account import Range, StepAccount
from rollbook.ledger.assumptions import Assumptions, StackAssumptions
from rollbook.ledger.decode import decode_step, prefill_call_s, prefill_s, replica_weight_bytes
from rollbook.ledger.flops import attention_flops, forward_flops, prefill_flops
from rollbook.ledger.generation import decode_widening
from rollbook.ledger.hardware import Accelerator, Cluster, load_accelerator
from rollbook.ledger.layout import Recompute, ReplicaLayout, TrainLayout
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.model import ModelSpec, load_model
from rollbook.ledger.step import (
    Layouts,
    join_sides,
    publication_work,
    smallest_rollout_tp,
    step_account,
)
from rollbook.ledger.switch import SleepChoice, hand_over
from rollbook.ledger.sync import SyncMethod, SyncWork, sync_account
from rollbook.ledger.train import (
    optimizer_s,
    train_tokens_per_s_per_gpu,
    train_widening,
    update_exchange_s,
)
from rollbook.ledger.workload import Mode, Workload

Case = dict[str, Any]

MATH_PROMPT_TOKENS = 150
"""Prompt of a mathematics data set with its instruction, where only the sum of prompt and response is given."""
RUNAWAY_FRAC = 0.002
"""Responses that go on to the limit, where only their mean length is given: in a step of hundreds there always is one.
(287 s for a limit of 16,384 tokens and a mean of 749: NeMo RL 0.3, Llama 70B; 0.0002 of verl's 7B on GSM8K.)"""
TCP_BYTES_PER_S = 6e9
"""Of a stream over sockets whose rate is not printed: 3 to 10 GB/s between nodes of clouds."""
USUAL_GROUP = 8
"""Responses of a prompt, where only the sequences of a step are given: it decides what little prompts share."""
TYPICAL_CONTEXT_TOKENS = 1000
"""Context of a single-stream decode measurement that does not give one."""


class NotCovered(Exception):
    """The ledger has no business predicting this case; the message says why."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measured number beside its prediction."""

    case_id: str
    family: str
    category: str
    metric: str
    measured: float
    predicted: Range

    @property
    def error_frac(self) -> float:
        """Relative error, signed."""
        return self.predicted.value / self.measured - 1

    @property
    def is_in_range(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high


def compare(case: Case, assumptions: Assumptions) -> list[Comparison]:
    """Every number of the case that the ledger predicts.

    Raises:
        NotCovered: with the reason.
    """
    adapter = ADAPTERS.get(case["category"])
    if adapter is None:
        raise NotCovered(f"no model for category {case['category']}")
    try:
        case = as_read(case)
        found = [
            Comparison(case["id"], case["family"], case["category"], metric, measured, predicted)
            for metric, measured, predicted in adapter(case, assumptions)
            if measured
        ]
    except RunError as error:
        raise NotCovered(error.what) from error
    except (KeyError, ValueError, TypeError, IndexError) as error:
        raise NotCovered(f"the case is not described in a form the adapter reads ({error!r})") from error
    if not found:
        raise NotCovered("it measures nothing that the ledger predicts")
    return found


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


def _as_published(case: Case, assumptions: Assumptions) -> Assumptions:
    """The assumptions with the numbers of the case's framework, where it has its own."""
    name = framework_of(case)
    return assumptions.for_framework(name) if name else assumptions


def _first_of(measured: dict[str, Any], predicted: dict[str, float]) -> Iterator[tuple[str, float, float]]:
    """The first of these numbers that was measured: the others say the same in other units."""
    for key, value in predicted.items():
        if key in measured:
            yield key, middle(measured[key]), value
            return


def _within(value: float, error_frac: float) -> Range:
    return Range.within(value, error_frac)


# Decode ------------------------------------------------------------------------------------------------------


def decode_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Serving: speed of one stream or of many, steps per token, tokens per second and node."""
    config, measured = case["config"], case["measured"]
    model = find_model(config["model"])
    accelerator = accelerator_of(config["gpu"])
    if _drafts(config):
        raise NotCovered(_DRAFTED)
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
            yield prefix + metric, value, _within(predicted, error_frac)


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
            yield key, middle(measured[key]), _within(predicted, error_frac)


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
                yield from _first_of(
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


# Training throughput -----------------------------------------------------------------------------------------


def train_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Tokens per second of a trainer at a fixed sequence length."""
    config, measured = case["config"], case["measured"]
    model = find_model(config["model"])
    accelerator = accelerator_of(config.get("gpu", config.get("system", "")))
    sequence = float(_first(config, {}, "sequence_length", "mean_sequence_tokens", "seq_length"))
    cluster = Cluster(accelerator=accelerator, num_gpus=count_of(config["gpus"]))
    stack = train_stack_of(case, model)
    if re.search(
        r"\b(?:not|un)-?\s?tuned\b|smoke", " ".join(str(case.get(k, "")) for k in ("config", "notes")), re.I
    ):
        raise NotCovered("a run that shows that it works: its source says that nothing was tuned")
    if (
        model.num_experts
        and stack.startswith("fsdp")
        and not re.search(_SHOWN_EXPERTS, str(config.get("framework")), re.I)
    ):
        raise NotCovered("experts under torch FSDP in an implementation that no published run shows")
    if stack.startswith("fsdp") and stack != "fsdp_experts":
        rate, error_frac = _fsdp_rate(config, model, cluster, assumptions, sequence, stack)
    elif stack:
        rate, error_frac = _pretraining_rate(config, model, cluster, assumptions, sequence, stack)
    else:
        raise NotCovered("neither a torch FSDP trainer nor a Megatron recipe")
    tflops = rate * 3 * forward_flops(model, sequence) / sequence / 1e12
    sequences = float(_first(config, {}, "sequences_per_step", "gbs") or 0)
    step_s = sequences * sequence / rate / cluster.num_gpus
    predicted = {
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s_per_device": rate,
        "tokens_per_s_total": rate * cluster.num_gpus,
        "tokens_per_s": rate * cluster.num_gpus,
        "model_tflops_per_gpu": tflops,
        "tflops_per_gpu": tflops,
        "mfu_pct": 1e14 * tflops / accelerator.peak(dtype_of(config.get("precision", "bf16"))),
        "actor_train_s": step_s,
        "update_actor_s": step_s,
        "train_s": step_s,
        "step_s": step_s,
        "step_ms": 1e3 * step_s,
    }
    for key, value in predicted.items():
        if key in measured:
            yield key, middle(measured[key]), _within(value, error_frac)
            return
    raise NotCovered("no throughput was published")


_SHOWN_EXPERTS = r"automodel|torchtitan|prime-?rl|halo|\btrl\b"
"""Implementations of experts under torch FSDP whose pace a published run shows: on the same GPUs they differ threefold,
and of two that no run had shown half were off by more than twice at first sight."""


def train_stack_of(case: Case, model: ModelSpec) -> str:
    """Our name of the software that trains, by the source's words; "" where it is neither torch FSDP nor Megatron.

    Experts have two generations of kernels: exchanged and permuted operator by operator, or by DeepEP or HybridEP under
    the computation (NeMo AutoModel, Megatron's recipes of 2026).
    """
    config = case["config"]
    framework, kind = (str(config.get(key, "")).lower() for key in ("framework", "kind"))
    if "megatron" not in framework and (
        config.get("gpus") == 1 or re.search(r"ms-swift|\broll\b", framework)
    ):
        framework += " fsdp"
    if "automodel" in framework:
        return "fsdp_experts" if model.num_experts else "fsdp_plain"
    if model.num_experts and (
        "torchtitan" in framework or (_degree(config.get("ep", 1)) > 1 and "fsdp" in framework)
    ):
        return "fsdp_experts"
    said = str(config.get("torch_compile", "")).lower()
    # Liger's kernels fuse what torch.compile fuses, as do llm-foundry's norm and loss.
    if said == "true" or (
        said == "" and re.search(r"torchtitan|fms|torch\.compile|liger|foundry", framework)
    ):
        return "fsdp_compiled"
    if "fsdp2 trainer" in framework:
        return "fsdp_primerl" if "rl" in kind else "fsdp_plain"
    if re.search(
        r"fsdp|torchtitan|torchtune|unsloth|deepspeed|zero-?[123]|hugging ?face|transformers|axolotl"
        r"|llama-?factory|prime-?rl",
        framework,
    ):
        return "fsdp_plain"
    if "gbs" not in config and "megatron" not in framework:
        return ""
    if "rl" in kind.split() or re.search(r"skyrl|verl|slime|nemo[ -]?rl", framework):
        return "megatron"
    if not model.num_experts:
        return "megatron_tuned"
    release = re.search(r"\b(2\d)\.(\d\d)\b", f"{config.get('release', '')} {framework}")
    words = f"{framework} {config.get('dispatcher', '')} {config.get('note', '')}"
    is_new = re.search(r"recipe|verification|primus|hybridep|deepep", words, re.IGNORECASE) is not None
    if release is not None:
        is_new = is_new or (int(release[1]), int(release[2])) >= (26, 8)
    elif "bridge" in framework:
        is_new = True  # nobody names the release of today
    return "megatron_overlap" if is_new or _spans_a_rack(config, framework) else "megatron_tuned"


def _spans_a_rack(config: dict[str, Any], framework: str) -> bool:
    """Recipes of racks spread their experts over NVLink between nodes by HybridEP, from the first release on."""
    device = f"{config.get('gpu', '')} {config.get('system', '')}".upper()
    float8 = dtype_of(config.get("precision", "bf16")) != "bfloat16"
    return re.search(r"GB[23]00", device) is not None and float8 and _degree(config.get("ep", 1)) > 8


def _published_ep(config: dict[str, Any], model: ModelSpec, cluster: Cluster) -> int:
    """Where a recipe's degrees are not printed at all, experts lie over the scale-up domain."""
    if "ep" in config or "tp" in config or not model.num_experts:
        return _degree(config.get("ep", 1))
    return math.gcd(
        math.gcd(model.num_experts, 2 ** int(math.log2(cluster.accelerator.scale_up_gpus))), cluster.num_gpus
    )


def _sharded_ep(config: dict[str, Any], cluster: Cluster) -> int:
    """torch FSDP2 with DeepEP shards experts over the whole group where no degree is printed."""
    return _degree(config["ep"]) if str(config.get("ep")).isdigit() else cluster.num_gpus


def _recompute_words(config: dict[str, Any]) -> str:
    return str(config.get("activation", config.get("recompute", ""))).lower()


def _degree(value: Any) -> int:
    return int(value) if str(value).isdigit() else 1


def _pretraining_rate(
    config: dict[str, Any],
    model: ModelSpec,
    cluster: Cluster,
    assumptions: Assumptions,
    sequence: float,
    name: str,
) -> tuple[float, float]:
    """Tokens a second and GPU, and its relative error."""
    degrees = [_degree(config.get(key, 1)) for key in ("tp", "pp", "cp")]
    model_parallel = degrees[0] * degrees[1] * degrees[2]
    published = _first(config, {}, "gbs", "mini_batch", "sequences_per_step")
    if published is None:
        raise NotCovered("the batch of an update was not published, and small ones wait for their exchange")
    sequences = int(published)
    micro_batches = sequences // _degree(config.get("mbs", 1)) // max(cluster.num_gpus // model_parallel, 1)
    layout = TrainLayout(
        tp_size=degrees[0],
        pp_size=degrees[1],
        cp_size=degrees[2],
        ep_size=_sharded_ep(config, cluster)
        if name == "fsdp_experts"
        else _published_ep(config, model, cluster),
        dtype=dtype_of(config.get("precision", "bf16")),
        recompute="full" if "full" in _recompute_words(config) else "selective",
        lora="lora" in str(config.get("kind", "")).lower(),
        micro_batches_per_step=micro_batches,
        virtual_stages=_degree(config.get("vp", 1)),
    )
    stack = assumptions.stacks[name]
    rate = train_tokens_per_s_per_gpu(model, cluster, stack, layout, sequence_tokens=sequence)
    micro_batch_tokens = _degree(config.get("mbs", 1)) * sequence / (degrees[0] * degrees[2])
    rate = min(rate, micro_batch_tokens / _launches_s(model, assumptions, stack, degrees[1]))
    tokens = sequences * sequence / cluster.num_gpus
    update_s = update_exchange_s(model, cluster, stack, layout, num_gpus=cluster.num_gpus)
    rate = tokens / (tokens / rate + update_s + optimizer_s(model.computed_params, cluster, cluster.num_gpus))
    wider, _ = train_widening(model, cluster, assumptions, layout, stack=name)
    return rate, assumptions.train_error_frac * wider


def _launches_s(model: ModelSpec, assumptions: Assumptions, stack: StackAssumptions, pp_size: int) -> float:
    """Least seconds of a micro batch, however few its tokens; as `TrainPrices` has them for steps.

    Experts are launched alike wherever torch FSDP shards them.
    """
    if model.num_experts and stack.gather_passes:
        stack = assumptions.stacks["fsdp_experts"]
    return max(model.num_layers / pp_size * stack.micro_batch_layer_s, 1e-9)


def _fsdp_rate(
    config: dict[str, Any],
    model: ModelSpec,
    cluster: Cluster,
    assumptions: Assumptions,
    sequence: float,
    name: str,
) -> tuple[float, float]:
    """One micro batch of one sequence a GPU, and in RL with full weights the publication to a shared disk."""
    kind = str(config.get("kind", ""))
    if (
        model.num_experts
        and cluster.accelerator.chip in ("B200", "B300")
        and "prime-rl" in str(config.get("framework", ""))
    ):
        raise NotCovered("prime-rl's unspread experts on Blackwell: no grouped kernel in the published runs")
    stack = assumptions.stacks[name]
    # torchtitan calls torch's own attention, which is FlashAttention 2, as is what llm-foundry was measured with.
    attention = str(
        config.get(
            "attention",
            "FA2" if re.search(r"torchtitan|llm-foundry", str(config.get("framework", ""))) else "",
        )
    )
    if "FA2" in attention and cluster.accelerator.chip == "H100":
        stack = replace(stack, attention_frac={"default": assumptions.flash2_attention_frac})
    pp_size = _degree(config.get("pp", 1))
    replicas = max(
        cluster.num_gpus // (_degree(config.get("tp", 1)) * count_of(config.get("cp", 1)) * pp_size), 1
    )
    words = _recompute_words(config)
    recompute: Recompute = (
        "none" if words == "none" else "selective" if words.startswith("select") else "full"
    )
    layout = TrainLayout(
        tp_size=_degree(config.get("tp", 1)),
        dtype=dtype_of(config.get("precision", "bf16")),
        recompute=recompute,
        lora="LoRA" in kind,
        cp_size=count_of(config.get("cp", 1)),
        pp_size=pp_size,
        # One sequence a micro batch, as where nothing is said.
        micro_batches_per_step=count_of(config["gbs"]) // replicas if pp_size > 1 else 0,
        virtual_stages=2 if "interleav" in str(config.get("schedule", "")).lower() else 1,
    )
    rate = train_tokens_per_s_per_gpu(model, cluster, stack, layout, sequence_tokens=sequence)
    micro_batch_tokens = _degree(config.get("mbs", 1)) * sequence / (layout.tp_size * layout.cp_size)
    rate = min(rate, micro_batch_tokens / _launches_s(model, assumptions, stack, pp_size))
    seconds = sequence / layout.cp_size / rate
    if kind == "RL Full":
        seconds += 2 * model.params / assumptions.sync.disk_bytes_per_s
    wider, _ = train_widening(model, cluster, assumptions, layout, stack=name)
    return sequence / layout.cp_size / seconds, assumptions.train_error_frac * wider


# Weight publication ------------------------------------------------------------------------------------------

_SYNC_METRICS: tuple[tuple[str, SyncMethod], ...] = (
    ("nccl_full_broadcast_s", "broadcast"),
    ("delta_sharded_s", "delta"),
    ("update_broadcast_s", "sharded"),
    ("update_p2p_s", "sharded"),
    ("async_nixl_s", "sharded"),
    ("async_nccl_s", "sharded"),
    ("sync_nixl_s", "sharded"),
    ("sync_nccl_s", "sharded"),
)


_SYNC_SECONDS = (
    "weight_sync_s", "weight_update_s", "update_weights_s", "update_s", "sync_s", "refit_s", "broadcast_s",
    "transfer_s",
)  # fmt: skip
"""Names of a publication's seconds that do not say by which method."""


def _sync_method(config: dict[str, Any]) -> SyncMethod:
    """By the words of a case whose sides are apart: slices or files where it says so, else a stream."""
    text = " ".join(
        str(config.get(key, "")) for key in ("framework", "backend", "placement", "note", "method")
    )
    text = re.sub(r"gpudirect rdma", "", text, flags=re.IGNORECASE)  # how a stream leaves the device
    if re.search(r"rdma|p2p|nixl|mooncake|reshard", text, re.IGNORECASE):
        return "sharded"
    if re.search(r"\bipc\b", text, re.IGNORECASE):
        return "ipc"
    if re.search(r"delta|sparse|lora|adapter", text, re.IGNORECASE):
        raise NotCovered("parts of the weights, and how large they are was not published")
    return (
        "disk" if re.search(r"disk|file ?system|nfs|lustre|\bfiles?\b", text, re.IGNORECASE) else "broadcast"
    )


def sync_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Seconds of one publication, by method."""
    config, measured = case["config"], case["measured"]
    assumptions = _as_published(case, assumptions)
    model = find_model(config["model"])
    device = " ".join(str(config.get(key, "")) for key in ("gpu", "hardware", "device", "nodes"))
    if "910" in device or "ascend" in device.lower():
        raise NotCovered("Ascend links and rates are not in the table")
    try:
        accelerator = accelerator_of(device)
    except NotCovered:
        accelerator = load_accelerator("H100")  # the rates below depend little on the device
    if "fsdp1" in str(config.get("placement", "")).lower():
        raise NotCovered("FSDP1's flat parameters: the ledger maps shards of tensors, FSDP2 or Megatron")
    work = published_work(config, model, accelerator, assumptions, device, framework_of(case))
    cluster = Cluster(
        accelerator=accelerator,
        num_gpus=work.num_train_gpus + work.num_rollout_gpus,
        nic_bytes_per_s=_network_bytes_per_s(config),
    )
    nic_unknown = any("differs between rows" in str(text) for text in case.get("missing") or ())
    for key, method in _SYNC_METRICS:
        if key not in measured:
            continue
        if (
            method == "delta"
            and "sparse delta over" in str(config.get("framework", ""))
            and "changed_fraction" not in config
        ):
            continue  # it gathers whole tensors first, and what changed was not published
        if method == "broadcast" and nic_unknown and cluster.num_nodes > 1:
            continue
        # miles writes slices first and lets the engine quantise them all at once.
        slow = work.quantizes_tensors and not (method == "sharded" and framework_of(case) == "slime")
        way = replace(work, method=method, quantizes_tensors=slow)
        account = sync_account(model, cluster, assumptions.sync, way)
        yield key, middle(measured[key]), _within(account.seconds, account.error_frac)
    if not any(key in measured for key, _ in _SYNC_METRICS) and (
        _is_counted(config) or not work.shares_devices
    ):
        method = _colocated_method(config) if work.shares_devices else _sync_method(config)
        account = sync_account(model, cluster, assumptions.sync, replace(work, method=method))
        for key in _SYNC_SECONDS:
            if key in measured:
                alone = re.search(
                    r"only the (broadcast|loop)", str(case.get("notes", "")), re.IGNORECASE
                ) or re.search(r"pause and resume .{0,20}not inside", str(case.get("missing", "")))
                seconds = account.seconds - account.fixed_s * (alone is not None)
                yield key, middle(measured[key]), _within(seconds, account.error_frac)
                return
    if "time_s" in measured and "receive only" in str(config.get("note", "")):
        account = sync_account(model, cluster, assumptions.sync, replace(work, method="broadcast"))
        seconds = account.total_bytes / assumptions.sync.far_gather_bytes_per_s
        yield "time_s", middle(measured["time_s"]), _within(seconds, account.error_frac)


def published_work(
    config: dict[str, Any],
    model: ModelSpec,
    accelerator: Accelerator,
    assumptions: Assumptions,
    device: str,
    framework_name: str,
) -> SyncWork:
    """A case's publication, as a plan would describe one, with what only measurements have."""
    per_node = 8
    placement = " ".join(str(config.get(key, "")) for key in ("placement", "nodes", "device", "hardware"))
    placement += "".join(
        f" {role} {config[key]}"
        for role, key in (("trainer", "train_layout"), ("engine, rollout", "rollout_layout"))
        if key in config
    )
    sides = re.search(r"(\d+)\s*\+\s*(\d+)\s*node", placement)
    counted = _is_counted(config)
    named = re.search(r"(\d+)\s*policy.*?\+\s*(\d+)\s*rollout", placement)
    devices = re.search(r"(\d+)\s*x\s*(?:H|A|B|G|M)", device)
    if counted:
        train, rollout = count_of(config["train_gpus"]), count_of(config["rollout_gpus"])
    elif sides or named:
        train, rollout = (per_node * int(n) for n in (sides or named).groups())  # type: ignore[union-attr]
    elif devices:
        train = rollout = int(devices[1])
    else:
        train = rollout = per_node // 2
    trainer = f"{config.get('framework', '')} " + re.split(r"generation|vLLM|SGLang|engine", placement)[0]
    cluster = Cluster(accelerator=accelerator, num_gpus=train + rollout)
    usual_tp = min(smallest_rollout_tp(model, cluster, assumptions), rollout)
    framework = str(config.get("framework", ""))
    offloads = "verl separate_async" in framework and "offload off" not in placement
    replica = _published_replica(config, placement, device, usual_tp)
    work = publication_work(
        Layouts(
            replica=replica,
            train=_publishing_layout(trainer, placement, model, train),
            sync_method="broadcast",
            changed_frac=float(config.get("changed_fraction", _changed_frac(model))),
            state_is_offloaded=(offloads and "veomni" not in placement) or bool(config.get("param_offload")),
        ),
        replace(assumptions, stack="megatron" if _is_megatron(trainer) else "fsdp"),
        mode="sync" if _is_colocated(config) or not (sides or named or counted) else "separate_sync",
        num_train_gpus=train,
        num_rollout_gpus=rollout,
        lora_rank=int(config.get("lora_rank", 0)) if "only the adapter" in placement else 0,
    )
    return replace(
        work,
        is_apart=(
            _network_bytes_per_s(config) > 0 and train + rollout > count_of(config.get("gpus_per_node", 8))
        )
        or sides is not None
        or re.search(r"(another|other|different) node|\btwo .{0,6}nodes", placement) is not None,
        quantizes_tensors=work.quantizes_tensors and not re.search(r"batched|prequant", framework),
        # verl merges adapters into the base in host memory.
        passes_host=(framework_name == "verl" and _trains_adapters(config, placement))
        or re.search(
            r"through (the )?(host memory|cpu)|via (the )?(host|cpu)|object store", framework, re.IGNORECASE
        )
        is not None,
    )


def _published_replica(config: dict[str, Any], placement: str, device: str, usual_tp: int) -> ReplicaLayout:
    """ "generation TP16", "vLLM TP32" or a lone "TP8" of the engine; a trainer's TP stands before its PP or EP."""
    tp_size = re.search(r"(?:generation|vLLM|SGLang|rollout)[^+]*?(TP|EP)\s*(\d+)", placement) or re.search(
        r"(?:H\d+|A\d+)\s+(TP)(\d+)", device
    )
    ep_size = re.search(r"(?:generation|vLLM|SGLang|rollout|engine).*EP\s*(\d+)", placement)
    engines = placement[ep_size.start() :] if ep_size else ""
    # "DP16 TP1 EP16", or an EP without any TP: every GPU computes attention for its own sequences.
    repeats_dense = ep_size is not None and not re.search(r"TP(?!\s*1\b)", engines)
    return ReplicaLayout(
        tp_size=1 if repeats_dense else int(tp_size[2]) if tp_size else usual_tp,
        ep_size=int(ep_size[1]) if ep_size else 1,
        weight_dtype=dtype_of(str(config.get("rollout_precision", config["model"]))),
    )


def _publishing_layout(trainer: str, placement: str, model: ModelSpec, num_gpus: int) -> TrainLayout:
    """Megatron of one tensor group cuts over a node, and spreads experts over its usual eight, where no degree is
    printed."""
    tp_size, ep_size = (re.search(rf"\b{name}\s*(\d+)", trainer) for name in ("TP", "EP"))
    pp_size = re.search(r"\bPP\s*(\d+)", placement)
    is_spread = model.num_experts and _is_megatron(trainer)
    return TrainLayout(
        tp_size=int(tp_size[1]) if tp_size else 8 if _is_megatron(trainer) else 1,
        pp_size=int(pp_size[1]) if pp_size else 1,
        ep_size=int(ep_size[1]) if ep_size else math.gcd(num_gpus, 8) if is_spread else 1,
    )


def _is_megatron(trainer: str) -> bool:
    """Where neither is named, a tensor group is Megatron's."""
    if re.search(r"fsdp|hsdp|dtensor|zero", trainer, re.IGNORECASE):
        return False
    return re.search(r"megatron|slime|miles|nemo|\bTP\s*\d", trainer, re.IGNORECASE) is not None


def _trains_adapters(config: dict[str, Any], placement: str) -> bool:
    """LoRA whose adapters are merged: where they alone are sent, the case says so."""
    text = f"{config.get('framework', '')} {placement}"
    return ("lora_rank" in config or "lora" in text.lower()) and "only the adapter" not in text


def _is_counted(config: dict[str, Any]) -> bool:
    return "train_gpus" in config and "rollout_gpus" in config


def _is_colocated(config: dict[str, Any]) -> bool:
    text = " ".join(str(config.get(key, "")) for key in ("framework", "placement", "mode", "backend")).lower()
    return re.search(r"(?<!non-)(?<!not )coloc", text) is not None


def _colocated_method(config: dict[str, Any]) -> SyncMethod:
    """Engines in the trainer's own processes, or processes of their own that are given handles."""
    text = " ".join(str(config.get(key, "")) for key in ("framework", "placement", "note")).lower()
    return (
        "in_process"
        if re.search(r"same process|in[- ]process|hybrid engine|sharding manager", text)
        else "ipc"
    )


def _network_bytes_per_s(config: dict[str, Any]) -> float:
    """Of one GPU over TCP, at the rate that the case prints, else at a usual one; 0: over the node's ports."""
    text = " ".join(str(config.get(key, "")) for key in ("network", "framework", "backend"))
    if not re.search(r"TCP|ethernet|socket", text, re.IGNORECASE):
        return 0.0
    found = re.search(r"(\d+(?:\.\d+)?)\s*G(?:bps|b/s|bit/s|bit)", text)
    return float(found[1]) * 1e9 / 8 if found else TCP_BYTES_PER_S


def _changed_frac(model: ModelSpec) -> float:
    """As the sources of the deltas say: 1 to 3 % of dense models, 0.8 to 1.1 % of the 30B experts (verl pull
    request 6974), 0.02 to 0.05 % of the 235B ones in their first steps."""
    if not model.num_experts:
        return 0.02
    return 0.0005 if model.params > 100e9 else 0.01


# Whole RL steps ----------------------------------------------------------------------------------------------


_NAMES_OF_IMAGES = ("model", "model_as_named", "dataset")


def step_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Seconds of a whole RL step."""
    config, measured = case["config"], case["measured"]
    if config.get("max_agent_turns") or _is_agent(case):
        raise NotCovered("an agent's step without turns, tool seconds and full lengths")
    if _drafts(config):
        raise NotCovered(_DRAFTED)
    if re.search(r"\bVL\b|multimodal|image", " ".join(str(config.get(key)) for key in _NAMES_OF_IMAGES)):
        raise NotCovered("images, whose tower and preparation the ledger does not count")
    if "offload policy" in str(config.get("optimizer_offload", "")).lower():
        raise NotCovered("updates of parameters that stay in host memory")
    model = find_model(config.get("text_backbone", config["model"]))
    assumptions = _as_published(case, assumptions)
    # A critic of its own works beside the actor's GPUs, which generate and train.
    actors = re.search(r"(\d+) actor", str(config.get("gpu_split", "")))
    num_gpus = int(actors[1]) if actors else count_of(config["gpus"])
    cluster = Cluster(accelerator=accelerator_of(config["gpu"]), num_gpus=num_gpus)
    said = " ".join(str(case.get(key, "")) for key in ("notes", "config"))
    workload = _workload(config, measured, said)
    mode, num_rollout, num_train = _split(config)
    uses_megatron = _trains_with_megatron(config, assumptions)
    generation_tp = numbers(config.get("generation_TP_PP", config.get("rollout_tp", "0")))[0]
    replica = ReplicaLayout(
        tp_size=generation_tp or smallest_rollout_tp(model, cluster, assumptions),
        weight_dtype=dtype_of(config.get("precision_gen", "bf16")),
        engine=_rollout_engine(case),
    )
    layouts = Layouts(
        replica=replica,
        train=_train_layout(config, workload, num_train or cluster.num_gpus, uses_megatron=uses_megatron),
        sync_method="sharded" if mode != "sync" else _step_method(case),
        max_staleness_steps=_staleness(config),
        sleep=SleepChoice(
            sleep_level=0 if framework_of(case) == "trl" else 2, moves_state=_moves_state(case)
        ),
    )
    assumptions = replace(
        _as_configured(config, workload, assumptions), stack="megatron" if uses_megatron else "fsdp"
    )
    mode = "separate_sync" if _waits_a_step_ahead(config) else mode

    def account_of(work: Workload) -> StepAccount:
        return step_account(
            model,
            work,
            cluster,
            assumptions,
            mode=mode,
            num_rollout_gpus=num_rollout,
            num_train_gpus=num_train,
            layouts=layouts,
        )

    account = account_of(workload)
    if pads_sequences(case):
        # Engines know no padding; forwards and updates compute every row to its end.
        rows = account_of(_padded(config, workload)).train
        account = join_sides(
            model,
            workload,
            cluster,
            assumptions,
            mode=mode,
            layouts=layouts,
            rollout=account.rollout,
            train=rows,
        )
    step_s = account.step_s
    if _waits_a_step_ahead(config):
        sides = account.seconds
        rollout_s = sides.prefill + sides.generate_throughput + sides.generate_tail
        hidden_s = min(rollout_s, sides.forward + sides.train)
        shorter = 1 - hidden_s / step_s.value
        step_s = Range(value=step_s.value * shorter, low=step_s.low * shorter, high=step_s.high * shorter)
    for key in ("total_step_s", "step_s", "train_step_s", "step_time_s", "time_per_step_s"):
        if key in measured:
            yield key, middle(measured[key]), step_s
            return
    if "trajectories_per_s" in measured:
        rate, error = workload.num_sequences / step_s.value, step_s.high / step_s.value - 1
        yield "trajectories_per_s", middle(measured["trajectories_per_s"]), _within(rate, error)
    elif "tokens_per_s_per_gpu" in measured:
        rate = workload.trained_tokens / account.step_s.value / cluster.num_gpus
        error = account.step_s.high / account.step_s.value - 1
        yield "tokens_per_s_per_gpu", middle(measured["tokens_per_s_per_gpu"]), _within(rate, error)


def _trains_with_megatron(config: dict[str, Any], assumptions: Assumptions) -> bool:
    """As the case says; where it names no backend, as its framework does."""
    said = " ".join(str(config.get(key, "")) for key in ("train_backend", "engine", "framework")).lower()
    if re.search(r"fsdp|dtensor|deepspeed|zero-?\d|torchtitan", said) and "megatron" not in said:
        return False
    if re.search(r"fsdp|dtensor", str(config.get("train_backend", "")).lower()):
        return False
    return "megatron" in said or assumptions.stack == "megatron"


_AGENTS = r"\bagent(?:s|ic)?\b|multi-?turn|sandbox|\bswe\b|swe-|tool (?:calls?|time|output)|alfworld|webshop|codescout"


def _is_agent(case: Case) -> bool:
    """Whether turns and tools take part of the step, by the case's words.

    A stage that only trains knows none, and where engines work ahead other trajectories decode while one waits.
    """
    if re.search(r"training stage only|async", str(case["config"].get("mode", "")).lower()):
        return False
    said = " ".join(str(case.get(key, "")) for key in ("config", "notes", "missing", "family"))
    return (
        re.search(_AGENTS, f"{said} {(case.get('source') or {}).get('title', '')}", re.IGNORECASE) is not None
    )


_DRAFTED = "drafted tokens, of which nobody knows beforehand how many are kept"


def _drafts(config: dict[str, Any]) -> bool:
    said = " ".join(
        str(value) for key, value in config.items() if re.search(r"specul|draft|mtp", str(key).lower())
    )
    return (
        re.search(r"\w", said) is not None and re.match(r"\s*(off|no|none|false|0)\b", said.lower()) is None
    )


def _as_configured(config: dict[str, Any], workload: Workload, assumptions: Assumptions) -> Assumptions:
    """The assumptions with what a run set itself: the engine's slots and memory, the tokens of a micro batch."""
    slots = _first(
        config,
        {},
        "max_num_seqs",
        "max_running_requests_per_engine",
        "max_running_requests",
        "max_batch_size",
        "rollout_micro_batch_size",
    )
    memory = _first(config, {}, "mem_fraction", "gpu_memory_utilization", "mem_fraction_static")
    tokens = _first(
        config, {}, "max_tokens_per_gpu", "ppo_max_token_len", "max_tokens_per_micro_batch", "max_token_len"
    )
    # SkyRL's default is a micro batch of one sequence.
    sequences = config.get(
        "micro_batch_per_gpu", 1 if "skyrl" in str(config.get("framework")).lower() else None
    )
    if tokens is None and sequences is None and _is_small(config, workload):
        sequences = 1
    if tokens is None and sequences is not None:
        tokens = float(sequences) * float(config.get("padded_total_length", workload.sequence_tokens))
    return replace(
        assumptions,
        max_slots=int(slots or assumptions.max_slots),
        engine_memory_frac=min(float(memory or assumptions.engine_memory_frac), 1.0),
        micro_batch_tokens=round(float(tokens or assumptions.micro_batch_tokens)),
    )


_SMALL_STEP = 32
"""Sequences a GPU below which a trainer of unknown micro batches is taken to compute one at a time: 64 sequences of 3B
on four A100 take 5.5 s (16 x 36 layers x 10 ms = 5.8), 64 of 0.6B on two L20 12 s (32 x 28 x 10 ms = 9.0)."""


def _is_small(config: dict[str, Any], workload: Workload) -> bool:
    """NeMo RL packs sequences, and TRL's batch on a device is its micro batch."""
    is_known = re.search(r"nemo|\btrl\b", str(config.get("framework")), re.IGNORECASE) is not None
    return not is_known and workload.num_sequences <= _SMALL_STEP * count_of(config["gpus"])


def pads_sequences(case: Case) -> bool:
    """Whether forwards and updates run on rows as long as the longest sequence, by the case's own words."""
    config = case["config"]
    said = str(
        config.get("use_remove_padding", config.get("packing", config.get("sample_packing", "")))
    ).lower()
    rows = f"{config.get('layout', '')} {config.get('padding', '')}".lower()
    is_padded = re.match(r"(false|no|off)\b", said) or re.search(
        r"padded|pad_to|remove_padding:? false", rows
    )
    return (
        bool(is_padded) and config.get("micro_batch_per_gpu") != 1
    )  # one sequence alone is as long as it is


def _padded(config: dict[str, Any], workload: Workload) -> Workload:
    """The same step with every sequence as long as the rows are, or at its limits."""
    prompt_tokens = float(config.get("max_prompt_length", workload.prompt_tokens))
    response_tokens = float(workload.max_response_tokens)
    if "padded_total_length" in config:
        prompt_tokens = workload.prompt_tokens
        response_tokens = middle(config["padded_total_length"]) - prompt_tokens
    return replace(
        workload,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        max_response_tokens=max(workload.max_response_tokens, math.ceil(response_tokens)),
        length_samples=(),
    )


def _step_method(case: Case) -> SyncMethod:
    """Of a colocated step: TRL's engine and that of verl before 0.6 live in the trainer's processes, others have their
    own."""
    framework = framework_of(case)
    is_inside = framework == "trl" or (framework == "verl" and _is_old_verl(case["config"]))
    return "in_process" if is_inside else "ipc"


def _waits_a_step_ahead(config: dict[str, Any]) -> bool:
    """slime's asynchronous loop and verl's of one step off generate the next step whole beside this one's training:
    nothing fills its tail."""
    return (
        re.search(r"\b(one|1)[ _-]step(\(s\))?[ _-](ahead|off)", str(config.get("mode", "")).lower())
        is not None
    )


def _rollout_engine(case: Case) -> str:
    """SGLang where it is named, else vLLM, in verl before 0.6 without CUDA graphs unless it is told otherwise
    (`enforce_eager: True`)."""
    config = case["config"]
    said = str(config.get("enforce_eager", config.get("eager", ""))).lower()
    engine = str(config.get("engine", "")).lower()
    if said == "true" or "eager" in engine:
        return "vllm_eager"
    if "sglang" in engine:
        return "sglang"
    has_graphs = bool(said) or "graph" in engine or str(config.get("cuda_graph", "")).lower() == "true"
    return (
        "vllm_eager" if not has_graphs and framework_of(case) == "verl" and _is_old_verl(config) else "vllm"
    )


def _is_old_verl(config: dict[str, Any]) -> bool:
    """verl before 0.6, or vLLM before 0.10 where that is said; of an unknown year, before Blackwell."""
    framework = str(config.get("framework", "")).lower()
    if re.search(r"\bverl v1\b", framework) or re.search(
        r"qwen-?3(\.\d|-next)", str(config.get("model")).lower()
    ):
        return False  # its second trainer, and models, of 2026
    version, vllm = (re.search(name + r"\D{0,3}0\.(\d+)", framework) for name in (r"\bverl", "vllm"))
    if version is not None:
        return int(version[1]) < 6
    if vllm is not None:
        return int(vllm[1]) < 10
    return re.search(r"\bG?B[23]00", str(config.get("gpu", "")).upper()) is None


def _moves_state(case: Case) -> bool:
    """Whether the training state waits in host memory while engines generate: TRL keeps it on the device, and verl
    unless it is told otherwise."""
    config = case["config"]
    said = str(config.get("offload", config.get("param_offload", "")))
    if said:
        return said.lower() not in ("false", "no", "off", "none")
    return framework_of(case) not in ("trl", "verl")


def _train_layout(
    config: dict[str, Any], workload: Workload, num_gpus: int, *, uses_megatron: bool
) -> TrainLayout:
    """Columns "[TP,CP,EP,PP,VPP]" as printed; a micro batch is one packed row of the longest sequence."""
    columns = re.findall(r"\d+|n/a", str(config.get("training_parallel", "")))
    dtype = dtype_of(config.get("precision_train", "bf16"))
    if not uses_megatron or len(columns) < 5:
        return TrainLayout(dtype=dtype, lora=workload.lora_rank > 0)
    tp_size, cp_size, pp_size = int(columns[0]), int(columns[1]), _degree(columns[-2])
    copies = max(num_gpus // (tp_size * cp_size * pp_size), 1)
    longest = workload.prompt_tokens + workload.max_response_tokens
    rows = workload.trained_tokens / workload.num_mini_batches / longest
    return TrainLayout(
        tp_size=tp_size,
        cp_size=cp_size,
        pp_size=pp_size,
        ep_size=_degree(columns[2]),
        dtype=dtype,
        lora=workload.lora_rank > 0,
        micro_batches_per_step=max(round(rows / copies), 1),
        virtual_stages=_degree(columns[-1]),
    )


def _lora_rank(config: dict[str, Any]) -> int:
    rank = re.search(
        r"lora\D{0,8}(\d+)", f"lora {config.get('lora_rank', '')} {config.get('finetune', '')}".lower()
    )
    return int(rank[1]) if rank else 0


_NO_REFERENCE = (
    r"no ref(erence)?\b|\bno KL\b|without (a )?(reference|KL)|\bKL off\b"
    r"|reference_logprobs': '(skipped|none|off)"
)
_NO_PROXIMAL = (
    r"taken from the rollout|from the engine|rollout log-?prob|not (run|computed)|skipped|bypass|none\b"
)


def _workload(config: dict[str, Any], measured: dict[str, Any], said: str) -> Workload:
    prompts = _first(config, {}, "prompts_per_step", "train_batch_size_prompts", "num_prompts")
    group = _first(config, {}, "generations_per_prompt", "rollout_n", "group_size")
    samples = _first(config, {}, "samples_per_step", "sequences_per_step", "rollout_batch_G_GBS")
    if samples is not None and (prompts is None or group is None):
        group = count_of(group or (count_of(samples) // count_of(prompts) if prompts else USUAL_GROUP))
        prompts = max(count_of(samples) // group, 1)
    if prompts is None or group is None:
        raise NotCovered("the batch size was not published")
    prompts, group = count_of(prompts), count_of(group)
    sequences = prompts * group
    prompt = _first(config, measured, "mean_prompt_length", "prompt_length_mean") or MATH_PROMPT_TOKENS
    response = _first(config, measured, "mean_response_length", "response_length_mean")
    response = None if response is None else middle(response)
    whole = _first(measured, config, "avg_sequence_length", "mean_sequence_tokens", "mean_total_length")
    if whole is None and response is None and {"step_s", "tokens_per_s_per_gpu"} <= set(measured):
        # The rate that verl prints counts every token of the step.
        rate = middle(measured["tokens_per_s_per_gpu"]) * count_of(config["gpus"])
        whole = rate * middle(measured["step_s"]) / sequences
    if whole is not None:
        response = float(whole) - prompt
    if response is None or response <= 0:
        raise NotCovered("the mean response length was not published")
    limit = _first(config, {}, "max_response_length")
    if limit is None and "max_sequence_length" in config:
        limit = count_of(config["max_sequence_length"]) - prompt
    # Where no limit is printed: the usual power of two beyond the mean.
    limit = round(limit) if limit is not None else 2 ** math.ceil(math.log2(1.5 * response))
    response = min(response, limit)
    return Workload(
        num_prompts=prompts,
        group_size=group,
        prompt_tokens=prompt,
        response_tokens=response,
        max_response_tokens=limit,
        length_samples=_with_runaways(response, limit),
        num_mini_batches=max(1, sequences // count_of(config.get("train_batch_T_GBS", sequences))),
        uses_reference=not re.search(_NO_REFERENCE, said, re.IGNORECASE),
        uses_proximal=not re.search(_NO_PROXIMAL, str(config.get("old_log_prob", "")), re.IGNORECASE),
        lora_rank=_lora_rank(config),
        num_epochs=count_of(_first(config, {}, "ppo_epochs", "num_epochs", "epochs_per_step") or 1),
    )


def _first(config: dict[str, Any], measured: dict[str, Any], *names: str) -> Any:
    """The first of these names that a case has, as it was set or as it was measured."""
    return next(
        (part[name] for part in (config, measured) for name in names if part.get(name) is not None), None
    )


@functools.cache
def _with_runaways(mean_tokens: float, limit: int) -> tuple[float, ...]:
    """Lengths of that mean, of which `RUNAWAY_FRAC` are the limit; none where the limit is so far that it cannot be."""
    num_runaways = max(round(RUNAWAY_FRAC * _NUM_LENGTHS), 1)
    num_others = _NUM_LENGTHS - num_runaways
    others = (mean_tokens * _NUM_LENGTHS - num_runaways * limit) / num_others
    if others < mean_tokens / 2:
        return ()
    return (*LengthDistribution(limit, others).spread(num_others).tolist(), *[float(limit)] * num_runaways)


_NUM_LENGTHS = 1000


_APART = r"async|disaggregat|separate|decoupled|(?:non-?|not )coloc|standalone|one[ _-]step[ _-]off"
"""Words of a mode whose trainer and engines have devices of their own, or take turns out of step."""


def _split(config: dict[str, Any]) -> tuple[Mode, int, int]:
    mode = str(config.get("mode", "colocated sync")).lower()
    if not re.search(_APART, mode) or "disaggregated critic" in mode:
        return "sync", 0, 0
    if re.search(r"(?<!non-)(?<!not )coloc", mode) and "async" in mode:
        return "colocate_async", 0, 0
    policy = str(config.get("on_off_policy", "")).lower()
    split = str(config.get("gpu_split", config.get("resource_split", mode)))
    train = re.search(r"(\d+)\s*(?:train|policy)", split)
    rollout = re.search(r"(\d+)\s*(?:gen|rollout)", split)
    nodes = re.search(r"(\d+) hybrid \+ (\d+) standalone nodes of (\d+)", split)
    ratio = re.fullmatch(r"\s*(\d+)\s*[:/+]\s*(\d+)\s*", split)
    lockstep = str(config.get("staleness_threshold")) == "0"
    apart: Mode = (
        "separate_async" if ("async" in mode or "off" in policy) and not lockstep else "separate_sync"
    )
    if train and rollout:
        return apart, int(rollout[1]), int(train[1])
    if all(isinstance(config.get(key), int) for key in ("train_gpus", "rollout_gpus")):
        return apart, config["rollout_gpus"], config["train_gpus"]
    if ratio:
        return apart, int(ratio[2]), int(ratio[1])  # "trainer : rollouter", as verl writes it
    if nodes:
        return apart, int(nodes[2]) * int(nodes[3]), int(nodes[1]) * int(nodes[3])
    half = count_of(config["gpus"]) // 2
    return apart, half, half


def _staleness(config: dict[str, Any]) -> int:
    steps = re.search(r"(\d+)-step off", str(config.get("on_off_policy", "")).lower())
    return int(steps[1]) if steps else 1


def switch_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Sleep and wake of an engine at level 1."""
    config, measured = case["config"], case["measured"]
    model = find_model(config["model"])
    cluster = Cluster(accelerator=accelerator_of(config["gpu"]), num_gpus=count_of(config.get("tp", 1)))
    layout = ReplicaLayout(tp_size=cluster.num_gpus, weight_dtype=dtype_of(config["model"]))
    moves = hand_over(
        model,
        cluster,
        assumptions.switch,
        num_gpus=cluster.num_gpus,
        rollout_weights_bytes_per_gpu=replica_weight_bytes(model, layout),
        state_bytes_per_param=0.0,
        choice=SleepChoice(sleep_level=1),
    )
    seconds = {move.name: move.seconds for move in moves}
    for key, name in (
        ("sleep_s", "engine sleeps"),
        ("wake_s", "engine wakes"),
        ("level1_wake_s", "engine wakes"),
    ):
        if key in measured:
            yield key, middle(measured[key]), _within(seconds[name], 1.0)


ADAPTERS: dict[str, Callable[[Case, Assumptions], Iterator[tuple[str, float, Range]]]] = {
    "decode": decode_case,
    "train_mfu": train_case,
    "weight_sync": sync_case,
    "rl_step": step_case,
    "memory_switch": switch_case,
}
