"""Adapters of published RL steps."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ledger_words import (
    DRAFTED,
    Case,
    NotCovered,
    accelerator_of,
    as_published,
    count_of,
    degree_of,
    drafts_tokens,
    dtype_of,
    find_model,
    first_named,
    framework_of,
    middle,
    numbers,
    within,
)
from rollbook.ledger.account import Range, StepAccount
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.layout import ReplicaLayout, TrainLayout
from rollbook.ledger.lengths import LengthDistribution
from rollbook.ledger.step import (
    Layouts,
    join_sides,
    smallest_rollout_tp,
    step_account,
)
from rollbook.ledger.switch import SleepChoice
from rollbook.ledger.sync import SyncMethod
from rollbook.ledger.workload import Mode, Workload

MATH_PROMPT_TOKENS = 150
"""Prompt of a mathematics data set with its instruction, where only the sum of prompt and response is given."""
RUNAWAY_FRAC = 0.002
"""Responses that go on to the limit, where only their mean length is given: in a step of hundreds there always is one.
(287 s for a limit of 16,384 tokens and a mean of 749: NeMo RL 0.3, Llama 70B; 0.0002 of verl's 7B on GSM8K.)"""
USUAL_GROUP = 8
"""Responses of a prompt, where only the sequences of a step are given: it decides what little prompts share."""

_NAMES_OF_IMAGES = ("model", "model_as_named", "dataset")


def step_case(case: Case, assumptions: Assumptions) -> Iterator[tuple[str, float, Range]]:
    """Seconds of a whole RL step."""
    config, measured = case["config"], case["measured"]
    if config.get("max_agent_turns") or _is_agent(case):
        raise NotCovered("an agent's step without turns, tool seconds and full lengths")
    if drafts_tokens(config):
        raise NotCovered(DRAFTED)
    if re.search(r"\bVL\b|multimodal|image", " ".join(str(config.get(key)) for key in _NAMES_OF_IMAGES)):
        raise NotCovered("images, whose tower and preparation the ledger does not count")
    if "offload policy" in str(config.get("optimizer_offload", "")).lower():
        raise NotCovered("updates of parameters that stay in host memory")
    model = find_model(config.get("text_backbone", config["model"]))
    assumptions = as_published(case, assumptions)
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
        yield "trajectories_per_s", middle(measured["trajectories_per_s"]), within(rate, error)
    elif "tokens_per_s_per_gpu" in measured:
        rate = workload.trained_tokens / account.step_s.value / cluster.num_gpus
        error = account.step_s.high / account.step_s.value - 1
        yield "tokens_per_s_per_gpu", middle(measured["tokens_per_s_per_gpu"]), within(rate, error)


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


def _as_configured(config: dict[str, Any], workload: Workload, assumptions: Assumptions) -> Assumptions:
    """The assumptions with what a run set itself: the engine's slots and memory, the tokens of a micro batch."""
    slots = first_named(
        config,
        {},
        "max_num_seqs",
        "max_running_requests_per_engine",
        "max_running_requests",
        "max_batch_size",
        "rollout_micro_batch_size",
    )
    memory = first_named(config, {}, "mem_fraction", "gpu_memory_utilization", "mem_fraction_static")
    tokens = first_named(
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
    tp_size, cp_size, pp_size = int(columns[0]), int(columns[1]), degree_of(columns[-2])
    copies = max(num_gpus // (tp_size * cp_size * pp_size), 1)
    longest = workload.prompt_tokens + workload.max_response_tokens
    rows = workload.trained_tokens / workload.num_mini_batches / longest
    return TrainLayout(
        tp_size=tp_size,
        cp_size=cp_size,
        pp_size=pp_size,
        ep_size=degree_of(columns[2]),
        dtype=dtype,
        lora=workload.lora_rank > 0,
        micro_batches_per_step=max(round(rows / copies), 1),
        virtual_stages=degree_of(columns[-1]),
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
    prompts = first_named(config, {}, "prompts_per_step", "train_batch_size_prompts", "num_prompts")
    group = first_named(config, {}, "generations_per_prompt", "rollout_n", "group_size")
    samples = first_named(config, {}, "samples_per_step", "sequences_per_step", "rollout_batch_G_GBS")
    if samples is not None and (prompts is None or group is None):
        group = count_of(group or (count_of(samples) // count_of(prompts) if prompts else USUAL_GROUP))
        prompts = max(count_of(samples) // group, 1)
    if prompts is None or group is None:
        raise NotCovered("the batch size was not published")
    prompts, group = count_of(prompts), count_of(group)
    sequences = prompts * group
    prompt = first_named(config, measured, "mean_prompt_length", "prompt_length_mean") or MATH_PROMPT_TOKENS
    response = first_named(config, measured, "mean_response_length", "response_length_mean")
    response = None if response is None else middle(response)
    whole = first_named(measured, config, "avg_sequence_length", "mean_sequence_tokens", "mean_total_length")
    if whole is None and response is None and {"step_s", "tokens_per_s_per_gpu"} <= set(measured):
        # The rate that verl prints counts every token of the step.
        rate = middle(measured["tokens_per_s_per_gpu"]) * count_of(config["gpus"])
        whole = rate * middle(measured["step_s"]) / sequences
    if whole is not None:
        response = float(whole) - prompt
    if response is None or response <= 0:
        raise NotCovered("the mean response length was not published")
    limit = first_named(config, {}, "max_response_length")
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
        num_epochs=count_of(first_named(config, {}, "ppo_epochs", "num_epochs", "epochs_per_step") or 1),
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
