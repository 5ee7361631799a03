"""What is asked of the planner, and the mistakes that can be told from the question alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeVar

from rollbook.errors import PlanError, nearest_name
from rollbook.ledger.assumptions import Assumptions
from rollbook.ledger.hardware import Cluster
from rollbook.ledger.model import ModelSpec, hub_name
from rollbook.ledger.sync import CHANGED_FRAC
from rollbook.ledger.workload import Mode, Workload
from rollbook.observe.numbers import counted

Choice = TypeVar("Choice", bound=str)
Engine = Literal["vllm", "sglang", "tensorrt_llm"]
RolloutDtype = Literal["bfloat16", "float8", "auto"]
OffloadChoice = Literal["none", "optimizer", "weights", "auto"]
RecomputeChoice = Literal["selective", "full", "auto"]
IdleChoice = Literal["auto", "device", "host"]
SleepLevel = Literal[0, 1, 2]


HOST_BYTES_PER_GPU = 200e9
"""Where nobody says it: 8-GPU hosts of H100 and later have 1.9 to 2 TB (AWS p5, Azure ND H100 v5, DGX H100), of which a
fifth is left to processes and caches; one of A100 may have 1.1 TB (AWS p4d)."""


PAPER_HAS_NO_RANGE = "the paper account is arithmetic with fixed efficiencies: its seconds have no range"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A model, a step's work, a cluster, and what the caller has already decided."""

    model: ModelSpec
    workload: Workload
    cluster: Cluster
    assumptions: Assumptions
    model_path: str = ""
    """Folder or hub name that a written config should load; empty: the model's name."""
    hardware_path: str = ""
    """The hardware.toml that the accelerator was read from; empty: a published one."""
    engine: Engine = "vllm"
    """Family that decoding is priced as."""
    rollout_tp: int = 0
    """GPUs of one replica; 0 leaves it to the planner."""
    split: tuple[int, int] | None = None
    """Rollout and train GPUs to evaluate beside what the search finds."""
    rollout_dtype: RolloutDtype = "bfloat16"
    """Weights of the engines. `auto` also tries float8, which widens the logprob gap."""
    offload: OffloadChoice = "auto"
    """Training state in host memory (`planner/offload.py`). `auto` asks for each, and keeps it on the device unless it
    does not fit or the step is much shorter without it."""
    host_bytes_per_gpu: float = HOST_BYTES_PER_GPU
    """Host memory for it, and for what of it waits there while engines have a shared device."""
    recompute: RecomputeChoice = "auto"
    """Of activations. `auto` recomputes whole layers only where memory demands it."""
    max_staleness_steps: int = 1
    """Bound that an asynchronous recommendation writes into the config."""
    min_async_gain_frac: float = 0.10
    """Share of the step that asynchrony must save before it is recommended over on-policy training."""
    checkpoint_every_steps: int = 0
    """Steps between checkpoints; 0: about once an hour, at the latest with the run's last step."""
    checkpoint_is_async: bool = False
    """Copy the state to pinned host memory and write it from there while training goes on."""
    storage_bytes_per_s: float = 0.0
    """Of the whole job; 0: the assumptions' `sync.disk_bytes_per_s`."""
    idle_state: IdleChoice = "auto"
    """Where the training state is while engines generate on the trainer's GPUs (`planner/idling.py`)."""
    sleep_level: SleepLevel | None = None
    """Of such engines while the trainer works; None: 0 where that is faster, else 2."""
    rebuilds_engine: bool = False
    """They make KV pool and graphs again at each wake."""
    lend_switch_s: float = 0.0
    """Seconds to turn waiting training GPUs into replicas, and again back; 0 lends none."""
    length_growth_frac: float = 0.0
    """Growth of the mean response from one step to the next; 0: the plan does not look ahead."""
    horizon_steps: int = 200
    """Steps of the run: over which responses grow, and within which a checkpoint is due."""
    changed_frac: float = CHANGED_FRAC
    """Share of the weights whose bits a step changes: what a delta sends."""
    max_context_tokens: int = 0
    """Longest sequence allowed; 0 takes the model's own limit."""

    @property
    def loadable(self) -> str:
        """Of the model: its folder, or its full name on the hub where the registry knows it."""
        named = self.model_path or self.model.name
        return hub_name(named) or named

    def lends(self, mode: Mode) -> bool:
        """Whether waiting training GPUs generate under a staleness bound: those that are shared are lent to nobody."""
        return self.lend_switch_s > 0 and mode == "separate_async"

    def check(self) -> None:
        """Raises PlanError for what cannot be meant."""
        work, cluster = self.workload, self.cluster
        if self.model.is_encoder:
            raise PlanError(
                f"{self.model.name} is an encoder, which generates nothing",
                "give a decoder's name or config.json; an encoder may be the --reward-model",
            )
        limit = self.max_context_tokens or self.model.max_context_tokens
        longest = work.prompt_tokens + work.max_response_tokens + work.observation_tokens
        if limit and longest > limit:
            fitting = limit - round(work.prompt_tokens + work.observation_tokens)
            seen, shorter = "", "--prompt-tokens"
            if work.observation_tokens:
                seen, shorter = (
                    f", observations of {work.observation_tokens:.0f}",
                    "--prompt-tokens or --observation-tokens",
                )
            cut = ", where longer ones are then cut" if work.length_samples else ""
            mean = " and --response-tokens below it" if fitting < work.response_tokens else ""
            asked = self.max_context_tokens
            longer = "raise --max-context" if asked else "give --max-context if the model's rope is scaled"
            other = "raise --max-context" if asked else "choose a model with a longer context"
            raise PlanError(
                f"a prompt of {work.prompt_tokens:.0f}{seen} and a response of up to {work.max_response_tokens} tokens "
                f"make {longest:.0f}, beyond the {limit} of {'--max-context' if asked else self.model.name}",
                f"lower --max-response-tokens to {fitting}{mean}{cut}, or {longer}"
                if fitting > 0
                else f"lower {shorter}, or {other}",
            )
        if work.agent.num_turns > work.response_tokens:
            raise PlanError(
                f"--turns is {work.agent.num_turns:g} where all responses of a trajectory together have "
                f"{work.response_tokens:.0f} tokens: less than one a turn",
                f"raise --response-tokens, or give --turns of at most {work.response_tokens:.0f}",
            )
        if work.num_mini_batches > work.num_sequences:
            raise PlanError(
                f"{counted(work.num_mini_batches, 'mini batch')} of {counted(work.num_sequences, 'sequence')} a step",
                f"use --mini-batches of at most {work.num_sequences}, or more --prompts",
            )
        if work.group_size == 1 and work.algorithm == "grpo":
            raise PlanError(
                "--group-size is 1 with --algorithm grpo: the baseline is the group's mean, so every advantage is 0",
                "use --group-size of at least 2 (8 or 16 are usual), or --algorithm ppo, whose critic is the baseline",
            )
        if work.lora_rank and self.assumptions.method == "paper":
            raise PlanError(
                f"--lora-rank is {work.lora_rank} under the paper account, which trains all weights",
                "use --assume default",
            )
        if work.lora_rank > self.model.hidden_size:
            raise PlanError(
                f"--lora-rank is {work.lora_rank} for matrices of {counted(self.model.hidden_size, 'column')}",
                "give a rank far below that: 8 to 128 are usual",
            )
        if self.engine != "vllm" and (cluster.accelerator.is_cpu or self.assumptions.method == "paper"):
            where = "on a processor" if cluster.accelerator.is_cpu else "under the paper account"
            raise PlanError(
                f"--engine is {self.engine} {where}, which knows no engine families",
                "leave out --engine, or plan for a GPU with --assume default",
            )
        self._check_offload()
        self._check_degrees(cluster)
        if self.max_staleness_steps < 0:
            raise PlanError(
                f"--max-staleness is {counted(self.max_staleness_steps, 'step')}", "use 0 or more"
            )

    def _check_offload(self) -> None:
        if self.host_bytes_per_gpu < 0:
            raise PlanError(f"--host-gb-per-gpu is {self.host_bytes_per_gpu / 1e9:g}", "give 0 or more")
        if self.offload != "weights":
            return
        stack = self.assumptions.stacks.get(self.assumptions.stack)
        if self.assumptions.method == "paper":
            raise PlanError("--offload weights under the paper account", "use --assume default")
        if self.workload.lora_rank:
            raise PlanError(
                "--offload weights with adapters, whose frozen base it would leave on the device",
                "use --offload optimizer, or none: adapters have little state",
            )
        if stack is not None and stack.gather_passes == 0:
            raise PlanError(
                f"--offload weights with the stack {self.assumptions.stack}, which keeps its weights in place",
                "use --offload optimizer, or --stack fsdp, which fetches them layer by layer",
            )

    def _check_degrees(self, cluster: Cluster) -> None:
        tp, gpus = self.rollout_tp, cluster.num_gpus
        if tp < 0:
            raise PlanError(f"--rollout-tp is {tp}", "give at least 1, or leave it out")
        if tp and gpus % tp:
            heads, per_node = self.model.num_heads, cluster.gpus_per_node
            fitting = [d for d in range(1, gpus + 1) if gpus % d == 0 and heads % d == 0]
            nearest = sorted(fitting, key=lambda d: abs(d - tp))[:2]
            remedy = f"use --rollout-tp {' or '.join(str(d) for d in sorted(nearest))}"
            if heads % tp == 0:
                unit = (
                    math.lcm(tp, per_node) if max(gpus, tp) > per_node else tp
                )  # whole nodes, whole replicas
                remedy += f", or --num-gpus {unit * max(gpus // unit, 1)}"
            raise PlanError(
                f"rollout TP {tp} does not divide {counted(gpus, 'GPU')}: {gpus % tp} would stay idle", remedy
            )
        if tp > 1 and self.model.num_heads % tp:
            raise PlanError(
                f"rollout TP {tp} does not divide the {self.model.num_heads} attention heads of {self.model.name}",
                "use --rollout-tp of one of: "
                + ", ".join(str(d) for d in (1, 2, 4, 8, 16, 32) if self.model.num_heads % d == 0),
            )
        if cluster.num_nodes > 1 and gpus % cluster.gpus_per_node:
            whole = gpus // cluster.gpus_per_node * cluster.gpus_per_node
            raise PlanError(
                f"{gpus} GPUs are not whole nodes of {cluster.gpus_per_node}",
                f"use --num-gpus {whole} or {whole + cluster.gpus_per_node}, or say how "
                "the nodes are built with --gpus-per-node",
            )
        if self.split is not None:
            rollout, train = self.split
            if rollout < 1 or train < 1 or rollout + train > gpus:
                raise PlanError(
                    f"--split is {rollout}:{train} on {counted(gpus, 'GPU')}",
                    f"give both sides at least one GPU and at most {gpus} together",
                )


def choice_of(name: str, value: str, *allowed: Choice) -> Choice:
    """`value` as one of the allowed words; an error names the nearest one."""
    for word in allowed:
        if word == value:
            return word
    raise PlanError(f"{name} is {value!r}", nearest_name(value, allowed))


def split_of(text: str) -> tuple[int, int]:
    """
    >>> split_of("40:24")
    (40, 24)
    """
    rollout, _, train = text.partition(":")
    if not (rollout.strip().isdigit() and train.strip().isdigit()):
        raise PlanError(f"--split is {text!r}", "write rollout and train GPUs with a colon, such as 40:24")
    return int(rollout), int(train)
