"""A question as a person types it: texts such as `32k`, names, and files, made into a `PlanRequest`.

The options of `rollbook plan` and `rollbook simulate`, and the keys of a workload file, are these fields.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

from rollbook.errors import ConfigError, nearest_name
from rollbook.ledger.assumptions import load_assumptions
from rollbook.ledger.hardware import Cluster, load_accelerator
from rollbook.ledger.model import load_model
from rollbook.ledger.quantity import parse_count
from rollbook.ledger.workload import AgentWork, Workload
from rollbook.planner.request import PlanRequest, choice_of, split_of

Count = str | int
"""A whole number, or its text with a unit: "32k"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The question, not yet checked. The only home of the defaults."""

    model: str
    gpu: str = "H100"
    num_gpus: Count = "8"
    gpus_per_node: int = 0
    prompts: Count = "512"
    group_size: Count = "16"
    prompt_tokens: Count = "1024"
    response_tokens: Count = "4096"
    max_response_tokens: Count = ""
    """Empty: four times the mean, as far as the context allows."""
    length_sigma: float = 0.6
    lengths: Path | None = None
    algorithm: str = "grpo"
    reward: str = "rule"
    reference: bool = True
    proximal: bool = True
    mini_batches: int = 1
    turns: float = 1.0
    observation_tokens: Count = "0"
    env_seconds: float = 0.0
    env_p99_seconds: float = 0.0
    rollout_tp: int = 0
    rollout_dtype: str = "bfloat16"
    offload: str = "auto"
    max_staleness: int = 1
    max_context: Count = "0"
    assume: str = "default"
    split: str = ""

    def request(self) -> PlanRequest:
        """The question itself.

        Raises:
            ConfigError, PlanError: a value that is no number, an unknown name, or what cannot be meant.
        """
        model = load_model(self.model)
        mean_response = parse_count(self.response_tokens, what="--response-tokens")
        prompt_tokens = parse_count(self.prompt_tokens, what="--prompt-tokens")
        max_context = _count_or_zero(self.max_context, "--max-context")
        if self.max_response_tokens:
            longest = parse_count(self.max_response_tokens, what="--max-response-tokens")
        else:
            room = (max_context or model.max_context_tokens or 5 * mean_response) - prompt_tokens
            longest = max(min(4 * mean_response, room), mean_response)
        workload = Workload(
            num_prompts=parse_count(self.prompts, what="--prompts"),
            group_size=parse_count(self.group_size, what="--group-size"),
            prompt_tokens=prompt_tokens,
            response_tokens=mean_response,
            max_response_tokens=longest,
            length_sigma=self.length_sigma,
            length_samples=_read_lengths(self.lengths) if self.lengths else (),
            algorithm=choice_of("--algorithm", self.algorithm, "grpo", "ppo"),
            reward=choice_of("--reward", self.reward, "rule", "model", "generative", "sandbox"),
            uses_reference=self.reference,
            uses_proximal=self.proximal,
            num_mini_batches=self.mini_batches,
            agent=AgentWork(
                num_turns=self.turns,
                observation_tokens=_count_or_zero(self.observation_tokens, "--observation-tokens"),
                env_s=self.env_seconds,
                env_p99_s=self.env_p99_seconds,
            ),
        )
        return PlanRequest(
            model=model,
            model_path=str(Path(self.model).parent) if self.model.endswith("config.json") else self.model,
            workload=workload,
            cluster=Cluster(
                accelerator=load_accelerator(self.gpu),
                num_gpus=parse_count(self.num_gpus, what="--num-gpus"),
                gpus_per_node=self.gpus_per_node,
            ),
            assumptions=load_assumptions(self.assume),
            rollout_tp=self.rollout_tp,
            split=split_of(self.split) if self.split else None,
            rollout_dtype=choice_of("--rollout-dtype", self.rollout_dtype, "bfloat16", "float8", "auto"),
            offload=choice_of("--offload", self.offload, "none", "optimizer", "auto"),
            max_staleness_steps=self.max_staleness,
            max_context_tokens=max_context,
        )


def read_options(path: Path) -> dict[str, str | int | float | bool]:
    """A workload's description in TOML: fields of `PlanOptions` as keys, and `mode`.

    Raises:
        ConfigError: unreadable, an unknown key, or no model.
    """
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", "give a TOML file") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}", 'write lines such as model = "Qwen3-8B"') from None
    known = {f.name for f in fields(PlanOptions)} | {"mode"}
    for key in values:
        if key not in known:
            raise ConfigError(f"{path}: unknown key {key}", nearest_name(key, known))
    if "model" not in values:
        raise ConfigError(f"{path} names no model", 'add model = "..."')
    return values


def _count_or_zero(value: Count, what: str) -> int:
    return 0 if str(value).strip() == "0" else parse_count(value, what=what)


def _read_lengths(path: Path) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in path.read_text().split())
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", "give a file with one length a line"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}", "write one response length in tokens on each line") from None
