"""The plan as a `run.toml` that `rollbook train` runs: every value with the reason that put it there.

On a CPU the native engine works in the trainer's process, on GPUs vLLM as `execution.py` says. What `train` needs to be
installed, and what of the plan it cannot carry out, by key, stands at the head of the file.
"""

from __future__ import annotations

import json
import math
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from rollbook.ledger.hardware import MachineSpec
from rollbook.ledger.step import is_colocated
from rollbook.ledger.sync import BUCKET_BYTES
from rollbook.planner.candidate import Candidate
from rollbook.planner.execution import Execution, execution
from rollbook.planner.plan import Plan, staleness_bound
from rollbook.planner.publication import MAX_BUCKETS, Publication
from rollbook.planner.staleness import batch_latency_s
from rollbook.planner.words import (
    MODE_TITLES,
    capitalized,
    count,
    counted,
    device_words,
    format_bytes,
    percent,
    seconds,
    split_gpus,
)

_WIDTH = 100
_LEAST_POOL_TOKENS = 64
"""Two pages."""


@dataclass(slots=True)
class _Table:
    """One table of the file: keys in order, each with its reason above it. "[name]" is an array's element."""

    name: str
    lines: list[str] = field(default_factory=list)

    def put(self, key: str, value: object, because: str = "") -> None:
        self.lines += _comment(because) if because else []
        self.lines.append(f"{key} = {json.dumps(value)}")

    def text(self) -> str:
        return "\n".join([f"[{self.name}]", *self.lines])


def run_toml(plan: Plan) -> str:
    """TOML text of the recommended topology.

    Raises:
        PlanError: nothing fits.
    """
    chosen = plan.require_chosen()
    publication = plan.publication
    assert publication is not None
    done = execution(plan.request, chosen)
    tables = [
        _run(plan, chosen),
        *_cluster(plan, chosen, done),
        _model(plan),
        *_lora(plan),
        *_data(),
        *_rollout(plan, chosen, done),
        *_algorithm(plan, chosen),
        _trainer(plan, chosen),
        _buffer(plan, chosen),
        _sync(plan, chosen, publication, done),
        *_memory(plan, chosen, done),
        _checkpoint(plan),
        _plan(plan),
    ]
    text = "\n\n".join([_header(plan, chosen, done), *(table.text() for table in tables)]) + "\n"
    return device_words(text, is_cpu=_is_cpu(plan))


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, _WIDTH)]


def _header(plan: Plan, chosen: Candidate, done: Execution) -> str:
    r = plan.request
    lines = [
        f"# {r.model.name} on {r.cluster.num_gpus} {r.cluster.accelerator.name}: "
        f"{MODE_TITLES[chosen.mode]}, {split_gpus(*chosen.split, chosen.mode)}.",
        *_comment(
            f"Expected: {chosen.expected} a step, whole-step MFU "
            f"{percent(chosen.account.mfu_frac)}, under the assumptions `{r.assumptions.name}`."
        ),
    ]
    lines += ["#", "# Needs:", *(line for need in _needs(plan, done) for line in _comment(f"- {need}"))]
    if done.differences:
        lines += ["#", "# Not carried out as planned, by the key of this file:"]
        lines += [line for text in done.differences for line in _comment(f"- {text}.")]
    for reasoned in plan.derivation:
        lines += ["#", f"# {reasoned.step}. {reasoned.title}", *_comment(reasoned.because)]
    return "\n".join(lines)


def _is_cpu(plan: Plan) -> bool:
    return plan.request.cluster.accelerator.is_cpu


def _needs(plan: Plan, done: Execution) -> list[str]:
    """Packages and hardware that the file asks for."""
    cluster = plan.request.cluster
    if _is_cpu(plan):
        return ["this machine's processor: the native engine needs no extra package"]
    needs = [f"{cluster.num_gpus} x {cluster.accelerator.name} with CUDA"]
    if done.kind == "inproc":
        return [*needs, "the engine's package: pip install 'rollbook[vllm]'"]
    needs.append("processes on all GPUs, and the engine's package in each: pip install 'rollbook[ray,vllm]'")
    if cluster.num_nodes > 1:
        needs.append(
            f"a Ray cluster of the {cluster.num_nodes} hosts, started before (`ray start`), and sync.disk_dir on a "
            "disk that all of them see"
        )
    return needs


def _transport(plan: Plan, chosen: Candidate, done: Execution) -> str:
    if _is_cpu(plan):
        return "inproc"
    if done.kind == "ray":
        return "disk" if plan.request.cluster.num_nodes > 1 else "shm"
    return "ipc" if is_colocated(chosen.mode) else "shm"


def _run(plan: Plan, chosen: Candidate) -> _Table:
    work = plan.request.workload
    table = _Table("run")
    table.put("name", _run_name(plan))
    table.put("num_steps", plan.request.horizon_steps)
    table.put("groups_per_step", work.num_prompts)
    if chosen.mode == "separate_sync":
        table.put(
            "schedule", "separate_async", "Separated devices; a staleness bound of 0 keeps it on-policy."
        )
    else:
        table.put("schedule", chosen.mode, f"{capitalized(plan.choice_because)}.")
    if work.agent.num_turns > 1:
        table.put("max_turns", math.ceil(work.agent.num_turns * 2), "Twice the mean number of turns.")
    return table


def _run_name(plan: Plan) -> str:
    size = "cpu" if _is_cpu(plan) else f"{plan.request.cluster.num_gpus}gpu"
    return f"{plan.request.model.name.lower()}-{size}"


def _cluster(plan: Plan, chosen: Candidate, done: Execution) -> list[_Table]:
    if done.kind == "inproc":
        return []
    table = _Table("cluster")
    table.put("kind", "ray", "Trainer ranks and replicas are processes of one GPU each.")
    table.put(
        "num_trainer_ranks", done.num_trainer_ranks, f"FSDP2 over {counted(done.num_trainer_ranks, 'GPU')}."
    )
    if plan.request.cluster.num_nodes > 1:
        table.put("address", "auto", "The Ray cluster that this host belongs to.")
    table.put("step_deadline_s", _deadline(chosen.account.train.total_s), "Four times the plan's training.")
    return [table]


def _model(plan: Plan) -> _Table:
    table = _Table("model")
    table.put(
        "path",
        plan.request.loadable,
        "Folder with config.json, weights and tokenizer, or their name on the hub.",
    )
    table.put("dtype", "float32" if _is_cpu(plan) else "bfloat16")
    table.put("device", "cpu" if _is_cpu(plan) else "cuda")
    return table


def _lora(plan: Plan) -> list[_Table]:
    work = plan.request.workload
    if not work.lora_rank:
        return []
    table = _Table("model.lora")
    table.put("rank", work.lora_rank, "Adapters of all matrices; the base is frozen, and the reference.")
    table.put("alpha", 2.0 * work.lora_rank)
    table.put("publish", "adapter" if work.publishes_adapters and _is_cpu(plan) else "merged")
    return [table]


def _data() -> list[_Table]:
    source = _Table("[data.sources]")
    source.put("path", "train.jsonl", "Your prompts: JSONL or Parquet with the columns below.")
    source.put("prompt_column", "prompt")
    source.put("answer_column", "answer")
    term = _Table("[reward.terms]")
    term.put("function", "exact", "Or numeric, math_verify, reasoning_gym, or your own `module:function`.")
    return [source, term]


def _rollout(plan: Plan, chosen: Candidate, done: Execution) -> list[_Table]:
    r, rollout, layout = plan.request, chosen.account.rollout, chosen.rollout_layout
    table = _Table("rollout")
    if _is_cpu(plan):
        table.put("engine", "native", "Our own engine: in the trainer's process, and fast on a CPU.")
    else:
        table.put("engine", "vllm", "The production engine, from the extra `vllm`.")
    gpus = f"TP {layout.tp_size}" + (f", EP {layout.ep_size}" if layout.ep_size > 1 else "")
    table.put(
        "num_replicas",
        done.num_replicas,
        f"{counted(rollout.num_gpus, 'GPU')} in replicas of "
        + (f"{layout.num_gpus} ({gpus})." if done.kind == "inproc" else "one."),
    )
    table.put("group_size", r.workload.group_size)
    table.put("max_response_tokens", r.workload.max_response_tokens)
    table.put(
        "num_slots",
        done.num_slots,
        (
            f"A decode step of {seconds(rollout.decode_step_s)} with all slots full; more"
            if done.kind == "inproc"
            else "More"
        )
        + " would not fit in the KV pool, or no more sequences come.",
    )
    per_token = r.model.kv_bytes_per_token(r.assumptions.kv_bytes_per_number)
    longest = r.workload.prompt_tokens + r.workload.max_response_tokens + r.workload.observation_tokens
    in_use = done.num_slots * math.ceil(longest)
    pool_tokens = max(int(done.kv_pool_bytes // per_token), _LEAST_POOL_TOKENS)
    stays = is_colocated(chosen.mode) and not done.sleep.moves_state
    if _is_cpu(plan) or done.kind == "ray" or stays:  # beside a trainer: what all slots can fill
        pool_tokens = min(pool_tokens, in_use)
    table.put(
        "kv_pool_tokens",
        pool_tokens,
        f"{format_bytes(done.kv_pool_bytes)} beside the weights, {format_bytes(per_token)} a token.",
    )
    work = r.workload
    if not work.agent.keeps_prefix:
        table.put("prefix_cache", False, "Planned without: every turn prefills what was before it.")
    if work.prefill_chunk_tokens:
        table.put(
            "max_prefill_tokens",
            max(work.prefill_chunk_tokens - done.num_slots, 1)
            if _is_cpu(plan)
            else work.prefill_chunk_tokens,
            f"Of a step's {work.prefill_chunk_tokens} tokens; vLLM counts its running sequences among them.",
        )
    table.put("dtype", "auto")
    table.put("device", "cpu" if _is_cpu(plan) else "cuda")
    if not chosen.is_on_policy:
        table.put(
            "kv_policy", "keep", "Recomputing the KV of running responses stalls decoding at each sync."
        )
    latency_s = batch_latency_s(r, chosen.account, layout)
    table.put(
        "response_deadline_s",
        _deadline(latency_s),
        f"A step's responses take about {seconds(latency_s)}; "
        + (
            "four times that is a fault."
            if 4 * latency_s > _LEAST_DEADLINE_S
            else "no shorter wait is a fault."
        ),
    )
    if _is_cpu(plan):
        return [table]
    vllm = _Table("rollout.vllm")
    if done.kind == "ray":
        vllm.put("in_process", True, "A replica on Ray is a process of its own, and vLLM runs inside it.")
    else:
        vllm.put("in_process", False, "Each replica in processes of its own, beside the trainer's.")
        vllm.put("tp_size", layout.tp_size if layout.ep_size <= 1 else layout.num_gpus)
    return [table, vllm]


_LEAST_DEADLINE_S = 600
"""A first step compiles and loads, whatever the plan says of a later one."""


def _deadline(expected_s: float) -> float:
    return float(max(_LEAST_DEADLINE_S, math.ceil(4 * expected_s / 60) * 60))


def _algorithm(plan: Plan, chosen: Candidate) -> list[_Table]:
    work = plan.request.workload
    table = _Table("algorithm")
    table.put("name", work.algorithm)
    if not work.uses_proximal:
        table.put("proximal", "behavior", "The engine's own logprobs anchor the step: one forward less.")
    tables = [table]
    if work.uses_reference:
        kl = _Table("algorithm.kl")
        kl.put(
            "placement", "loss", "A reference policy was planned for; without this table it is not loaded."
        )
        kl.put("estimator", "k3")
        kl.put("coef", 0.001)
        tables.append(kl)
    if not chosen.is_on_policy and work.uses_proximal:
        correction = _Table("algorithm.correction")
        correction.put("level", "token", "Importance weights for tokens of older versions, capped.")
        correction.put("upper", 2.0)
        tables.append(correction)
    return tables


def _trainer(plan: Plan, chosen: Candidate) -> _Table:
    r, layout = plan.request, chosen.train.layout
    table = _Table("trainer")
    degrees = {"TP": layout.tp_size, "PP": layout.pp_size, "CP": layout.cp_size, "EP": layout.ep_size}
    used = [f"{name} {size}" for name, size in degrees.items() if size > 1]
    spread = f"state sharded over {counted(chosen.split[1], 'GPU')}" + (
        f", {', '.join(used)}" if used else ""
    )
    longest = r.workload.prompt_tokens + r.workload.max_response_tokens + r.workload.observation_tokens
    table.put(
        "micro_batch_tokens",
        max(r.assumptions.micro_batch_tokens, math.ceil(longest)),
        f"Planned: {spread}. The longest sequence of {count(longest)} tokens must fit one micro batch.",
    )
    table.put("num_mini_batches", r.workload.num_mini_batches)
    table.put("num_epochs", r.workload.num_epochs)
    if execution(r, chosen).recompute == "full":
        table.put("gradient_checkpointing", True, "Activations of whole layers would not fit.")
    return table


def _buffer(plan: Plan, chosen: Candidate) -> _Table:
    table = _Table("buffer")
    bound = staleness_bound(chosen, plan.request)
    ages = (
        "Every token is trained by the version that sampled it."
        if bound == 0
        else f"Asynchrony pays for itself at {bound}; the derivation above has the step time of wider bounds."
    )
    table.put("max_staleness_steps", bound, ages)
    table.put(
        "order", "admission", "No bias against long responses, and members that do not depend on timing."
    )
    latency_s = batch_latency_s(plan.request, chosen.account, chosen.rollout_layout)
    table.put("group_deadline_s", _deadline(latency_s))
    table.put("step_deadline_s", _deadline(latency_s + chosen.step_s))
    return table


def _sync(plan: Plan, chosen: Candidate, publication: Publication, done: Execution) -> _Table:
    table = _Table("sync")
    table.put("every_steps", 1)
    transport = _transport(plan, chosen, done)
    table.put(
        "transport",
        transport,
        f"{capitalized(publication.because)}. {_WHY_TRANSPORT[transport]}",
    )
    if transport == "disk":
        table.put("disk_dir", "weights", "A folder that all hosts see.")
    # A delta is of whole tensors: an engine that holds slices of them takes full publications.
    if publication.method == "delta" and not _is_cpu(plan) and done.replica_gpus == 1:
        table.put("delta", True)
    table.put("bucket_bytes", BUCKET_BYTES)
    table.put("max_buckets", MAX_BUCKETS)
    return table


_WHY_TRANSPORT = {
    "inproc": "Engine and trainer share this process: tensors go by reference.",
    "ipc": "Engine and trainer share their GPUs: buckets are opened where they lie.",
    "shm": "The engines' own processes read the buckets from shared memory of the host.",
    "disk": "Ranks and replicas live on several hosts: buckets go through files that all of them see.",
}


def _memory(plan: Plan, chosen: Candidate, done: Execution) -> list[_Table]:
    """The hand-over of colocated GPUs; on a CPU nothing has to make room."""
    if _is_cpu(plan) or done.kind == "ray" or not is_colocated(chosen.mode):
        return []
    table, sleep = _Table("memory"), done.sleep
    table.put("sleep_level", sleep.sleep_level, _WHY_LEVEL[sleep.sleep_level])
    switch_s = chosen.account.seconds.switch
    where = "waits in host memory" if sleep.moves_state else "stays beside the engine's KV pool"
    planned = f": both hand-overs of a step take {seconds(switch_s)} by the plan" if switch_s else ""
    table.put(
        "offload", sleep.moves_state, f"While the engine generates the training state {where}{planned}."
    )
    return [table]


_WHY_LEVEL = {
    0: "The engine stays awake: it fits beside a trainer at work.",
    1: "Host memory keeps the engine's weights while the trainer works.",
    2: "The step's publication brings the engine's weights back.",
}


def _checkpoint(plan: Plan) -> _Table:
    table = _Table("checkpoint")
    table.put("every_steps", plan.beside.checkpoint.every_steps, plan.beside.checkpoint.because)
    return table


def _measured_model(path: str) -> str:
    """The model whose seconds a hardware.toml holds; empty: of the machine alone."""
    return Path(MachineSpec.read(Path(path)).model).name


def _plan(plan: Plan) -> _Table:
    table = _Table("plan")
    table.put("response_tokens", float(plan.request.workload.response_tokens), "What the plan assumed.")
    path = plan.request.hardware_path
    if path and plan.request.cluster.accelerator.fitted is not None:
        table.put("hardware", path, "Measured already: `train` need not measure it again.")
    elif path and not _measured_model(path):
        table.put("hardware", path, "The machine, measured already; `train` measures the model on it.")
    return table
