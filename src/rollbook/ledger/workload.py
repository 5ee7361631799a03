"""What one training step has to do, apart from model and machine."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Literal

from rollbook.errors import PlanError
from rollbook.ledger.lengths import DEFAULT_SIGMA, LengthDistribution
from rollbook.ledger.model import ModelSpec
from rollbook.ledger.quantity import require_number

Algorithm = Literal["grpo", "ppo"]
RewardKind = Literal["rule", "model", "generative", "sandbox"]
Mode = Literal["sync", "colocate_async", "separate_sync", "separate_async"]
MODES: tuple[Mode, ...] = ("sync", "colocate_async", "separate_sync", "separate_async")
"""`sync` is colocated and synchronous; the two `separate_` modes give each side its own devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentWork:
    """Turns and environment of an agent's trajectory."""

    num_turns: float = 1.0
    """Mean turns of a trajectory."""
    observation_tokens: float = 0.0
    """Mean tokens that the environment adds after a turn."""
    env_s: float = 0.0
    """Mean seconds of one environment call."""
    env_p50_s: float = 0.0
    env_p99_s: float = 0.0
    """0 for either: taken from the mean."""
    keeps_prefix: bool = True
    """The engine still holds the KV of the earlier turns when the next one starts."""
    cpu_cores_per_sandbox: float = 1.0
    bytes_per_sandbox: float = 4e9
    """Host memory of one."""
    sandbox_start_s: float = 0.0

    @property
    def num_calls(self) -> float:
        """Mean environment calls of a trajectory: one between two turns, since the last response ends it."""
        return self.num_turns - 1

    def __post_init__(self) -> None:
        remedy = "give at least 1: a trajectory has one response or more"
        require_number("num_turns", self.num_turns, least=1, remedy=remedy)
        for name in ("observation_tokens", "env_s", "env_p50_s", "env_p99_s", "sandbox_start_s"):
            require_number(name, getattr(self, name), least=0, remedy="give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: `num_prompts` groups of `group_size` trajectories. Lengths in tokens."""

    num_prompts: int
    group_size: int
    prompt_tokens: float
    """Mean."""
    response_tokens: float
    """Mean, all turns together."""
    max_response_tokens: int
    length_sigma: float = DEFAULT_SIGMA
    """Standard deviation of ln(response length) before clipping."""
    length_samples: tuple[float, ...] = ()
    """Observed response lengths; mean and sigma are then theirs, whatever was given for them."""
    algorithm: Algorithm = "grpo"
    reward: RewardKind = "rule"
    uses_reference: bool = True
    uses_proximal: bool = True
    """False where the engine's own logprobs anchor the step."""
    num_mini_batches: int = 1
    num_epochs: int = 1
    lora_rank: int = 0
    """Above 0: only adapters of this rank train, and the base is the reference too."""
    publishes_adapters: bool = False
    """Engines hold the base and take adapters alone; False: adapters arrive merged, as whole weights."""
    reward_response_tokens: float = 0.0
    """Tokens a generative reward model writes per trajectory."""
    reward_model: ModelSpec | None = None
    """That scores or judges; None: of the policy's shape."""
    shares_prompt: bool = True
    """Members of a group share one prefill of their prompt."""
    prefill_chunk_tokens: int = 0
    """Tokens of a decode step, running sequences and a chunk of prompts together; 0: prompts are prefilled whole."""
    agent: AgentWork = field(default_factory=AgentWork)

    def __post_init__(self) -> None:
        for name in ("num_prompts", "group_size", "max_response_tokens", "num_mini_batches", "num_epochs"):
            require_number(name, getattr(self, name), least=1, remedy=f"give {name} of at least 1")
        for name in ("prompt_tokens", "response_tokens"):
            require_number(name, getattr(self, name), least=0, remedy=f"give {name} above 0")
            if getattr(self, name) == 0:
                raise PlanError(f"{name} is 0", f"give {name} above 0")
        if self.length_samples:
            # One workload: what generation samples is what forwards and training then pass.
            lengths = self.lengths()
            object.__setattr__(self, "response_tokens", lengths.mean_tokens)
            object.__setattr__(self, "length_sigma", lengths.sigma)
        require_number(
            "prefill_chunk_tokens",
            self.prefill_chunk_tokens,
            least=0,
            remedy="give 0 (prompts whole) or more",
        )
        if self.reward_model is not None and self.reward not in ("model", "generative"):
            raise PlanError(
                f"a reward model {self.reward_model.name} beside a reward by {self.reward}",
                "use a reward by model or generative, or leave out reward_model",
            )
        require_number("lora_rank", self.lora_rank, least=0, remedy="give 0 (all weights train) or a rank")
        if self.lora_rank and self.algorithm == "ppo":
            raise PlanError(
                f"lora_rank is {self.lora_rank} with algorithm ppo, whose critic is a whole second model",
                "use algorithm grpo, or leave out lora_rank: all weights train",
            )
        if self.publishes_adapters and not self.lora_rank:
            raise PlanError("adapters are published and none train", "give a lora_rank of 1 or more")
        if self.response_tokens > self.max_response_tokens:
            raise PlanError(
                f"response_tokens is {self.response_tokens:g}, the mean, above the limit max_response_tokens of "
                f"{self.max_response_tokens}",
                "raise max_response_tokens or lower response_tokens",
            )
        if self.algorithm not in ("grpo", "ppo"):
            raise PlanError(f"algorithm is {self.algorithm!r}", "choose grpo or ppo")
        if self.reward not in ("rule", "model", "generative", "sandbox"):
            raise PlanError(f"reward is {self.reward!r}", "choose rule, model, generative or sandbox")

    @property
    def num_trained_models(self) -> int:
        """The policy, and under PPO a critic of its size."""
        return 2 if self.algorithm == "ppo" else 1

    @property
    def has_reward_model(self) -> bool:
        """A reward model that scores on the training side."""
        return self.reward == "model"

    @property
    def num_prefills(self) -> int:
        """Prompts that are prefilled: one a group where its members share it."""
        return self.num_prompts * (1 if self.shares_prompt else self.group_size)

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.group_size

    @property
    def sequence_tokens(self) -> float:
        """Mean tokens of prompt, responses and observations."""
        return self.prompt_tokens + self.response_tokens + self.observation_tokens

    @property
    def observation_tokens(self) -> float:
        """Mean tokens of a trajectory that the environment added; the last turn has no observation."""
        return self.agent.num_calls * self.agent.observation_tokens

    @property
    def trained_tokens(self) -> float:
        """Tokens that each forward or training pass of the step sees."""
        return self.num_sequences * self.sequence_tokens

    @property
    def response_tokens_total(self) -> float:
        return self.num_sequences * self.response_tokens

    def lengths(self) -> LengthDistribution:
        """Response lengths."""
        if self.length_samples:
            return _measured_lengths(tuple(self.length_samples), self.max_response_tokens)
        return _lognormal_lengths(self.max_response_tokens, self.response_tokens, self.length_sigma)

    def warnings(self, max_context_tokens: int = 0) -> list[str]:
        """What a person should know before running this."""
        notes = []
        if self.group_size == 1 and self.algorithm == "grpo":
            notes.append("group_size is 1: a group's advantage is always zero, nothing would be learned")
        longest = self.prompt_tokens + self.max_response_tokens + self.observation_tokens
        if max_context_tokens and longest > max_context_tokens:
            room = max_context_tokens - round(self.prompt_tokens + self.observation_tokens)
            notes.append(
                f"prompt and longest response come to {longest:.0f} tokens, beyond the model's context of "
                f"{max_context_tokens}: lower max_response_tokens to {room}"
            )
        return notes

    def as_json(self) -> dict[str, object]:
        """For `plan --json`."""
        agent = self.agent
        return {
            "num_prompts": self.num_prompts,
            "group_size": self.group_size,
            "num_sequences": self.num_sequences,
            "prompt_tokens": self.prompt_tokens,
            "response_tokens": self.response_tokens,
            "max_response_tokens": self.max_response_tokens,
            "length_sigma": self.length_sigma,
            "num_length_samples": len(self.length_samples),
            "algorithm": self.algorithm,
            "reward": self.reward,
            "num_mini_batches": self.num_mini_batches,
            "num_epochs": self.num_epochs,
            "lora_rank": self.lora_rank,
            "publishes_adapters": self.publishes_adapters,
            "reward_model": self.reward_model.name if self.reward_model else None,
            "reward_response_tokens": self.reward_response_tokens,
            "shares_prompt": self.shares_prompt,
            "prefill_chunk_tokens": self.prefill_chunk_tokens,
            "agent": {name: getattr(agent, name) for name in agent.__slots__},
        }


@functools.lru_cache(maxsize=64)
def _lognormal_lengths(max_tokens: int, mean_tokens: float, sigma: float) -> LengthDistribution:
    """Checked and solved once: an account asks for them at every stage."""
    return LengthDistribution(max_tokens, mean_tokens, sigma)


@functools.lru_cache(maxsize=64)
def _measured_lengths(samples: tuple[float, ...], limit: int) -> LengthDistribution:
    """Sorted and summed once."""
    return LengthDistribution.from_samples(samples, limit)
