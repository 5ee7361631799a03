"""Nouns that cross folders: prompts, turns, trajectories, groups, and the batch the trainer consumes.

Nothing here imports torch: token ids are int32 and logprobs float32 numpy arrays, so that the buffer, the
ledger and the diagnosis work without it. STYLE's glossary defines each term.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollbook.errors import DataError

Ids = NDArray[np.int32]
"""[n] int32 token ids."""
Floats = NDArray[np.float32]
"""[n] float32."""
Bools = NDArray[np.bool_]
"""[n] bool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Task and tokens before the first action. Its identity is the data row, never its text."""

    prompt_id: str
    """Identity of the data row; two rows with equal text are two prompts."""
    prompt_ids: Ids
    """[n] int32. At least one token."""
    source: str
    """Name of the data source; rewards and failures are reported by it."""
    task: Mapping[str, Any] = field(default_factory=dict)
    """What the reward needs (answer, tests, ...), JSON values only. The policy never sees it."""
    messages: tuple[Mapping[str, str], ...] = ()
    """The row as a conversation of {"role", "content"}, for other models to read: a judge, a baseline."""

    def text(self) -> str:
        """The row as one text: a lone message as it stands, several each under its role."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. Every field is explicit: nothing is ever filled in from a model folder."""

    max_response_tokens: int
    temperature: float = 1.0
    """0 is greedy: for evaluation only, refused for training."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Besides the end-of-sequence ids. The stop token is kept in the response."""
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False


class FinishReason(enum.StrEnum):
    """Why a response ended."""

    STOP = "stop"
    """End of sequence, a stop token or a stop string. The token is part of the response."""
    LENGTH = "length"
    """The token limit or the model's context."""
    ABORTED = "aborted"
    """Paused with mode "abort", or cancelled: the tokens so far are valid and can be continued."""


class FailureKind(enum.StrEnum):
    """Why a trajectory has no reward. None of these is a reward of zero."""

    ENGINE = "engine"
    ENVIRONMENT = "environment"
    REWARD = "reward"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    SANDBOX_LOST = "sandbox_lost"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A trajectory that could not be produced or scored."""

    kind: FailureKind
    message: str
    turn_idx: int = 0


@dataclass(frozen=True, slots=True)
class VersionRun:
    """`num_tokens` consecutive tokens sampled under `weight_version`, as told by the engine."""

    weight_version: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class KVStart:
    """Before response token `token_idx`, the keys and values of everything before it were computed anew, under
    `weight_version`: at the start, after a preemption, on another replica, or at a swap that recomputes."""

    token_idx: int
    weight_version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One response and the observation that follows."""

    response_ids: Ids
    """[n] int32, exactly as sampled, end-of-sequence token included."""
    behavior_logprobs: Floats
    """[n] float32. ln p of each sampled token under temperature-scaled logits before top-k/top-p/min-p."""
    version_runs: tuple[VersionRun, ...]
    """Run-length weight versions of `response_ids`; the counts add up to n."""
    finish_reason: FinishReason
    observation_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int32))
    """[m] int32. Tokens the environment added; never trained."""
    kv_starts: tuple[KVStart, ...] = ()
    """In order, the first one at token 0. Empty where the engine does not tell."""

    def __post_init__(self) -> None:
        num_tokens = len(self.response_ids)
        if len(self.behavior_logprobs) != num_tokens:
            raise DataError(
                f"a turn has {num_tokens} response tokens and {len(self.behavior_logprobs)} logprobs",
                "an engine must return one logprob for each sampled token",
            )
        covered = sum(run.num_tokens for run in self.version_runs)
        if covered != num_tokens:
            raise DataError(
                f"a turn has {num_tokens} response tokens and weight versions for {covered}",
                "an engine must label each sampled token with the version that sampled it",
            )
        versions = [run.weight_version for run in self.version_runs]
        if versions != sorted(versions):
            raise DataError(
                f"weight versions of a turn run backwards: {versions}",
                "an engine's version only ever grows; quarantine the replica that reported this",
            )


@dataclass(slots=True, kw_only=True)
class Trajectory:
    """Turns of one episode with its reward. `reward` is None until scored, and stays None on failure."""

    group_id: int
    member_idx: int
    """Position in the group; (seed, group_id, member_idx, token index) decides what is sampled."""
    prompt: Prompt
    turns: tuple[Turn, ...] = ()
    reward: float | None = None
    reward_terms: dict[str, float] = field(default_factory=dict)
    """Named parts of the reward before weights; "raw" parts decide what dynamic sampling filters."""
    failure: Failure | None = None
    replica_id: int = 0
    env_turns_s: tuple[float, ...] = ()
    """Seconds that the environment took for each turn it answered with an observation; the last one is scoring."""
    was_cut_off: bool = False
    """The episode was ended by its turns or the model's context, not by its environment."""
    started_at_s: float = 0.0
    finished_at_s: float = 0.0

    @property
    def trajectory_id(self) -> str:
        return f"{self.group_id}/{self.member_idx}"

    @property
    def num_response_tokens(self) -> int:
        return sum(len(turn.response_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> int:
        """First weight version that sampled one of its tokens."""
        return min(run.weight_version for turn in self.turns for run in turn.version_runs)

    @property
    def newest_version(self) -> int:
        return max(run.weight_version for turn in self.turns for run in turn.version_runs)

    @property
    def is_truncated(self) -> bool:
        """A limit ended it: of the last response's tokens, of the turns, or of the model's context."""
        return self.was_cut_off or (bool(self.turns) and self.turns[-1].finish_reason is FinishReason.LENGTH)

    def token_ids(self) -> Ids:
        """[n] int32: prompt, then each turn's response and observation, exactly as sampled."""
        parts = [self.prompt.prompt_ids]
        for turn in self.turns:
            parts += [turn.response_ids, turn.observation_ids]
        return np.concatenate(parts).astype(np.int32, copy=False)

    def action_mask(self) -> Bools:
        """[n] bool: True on tokens the policy sampled."""
        parts = [np.zeros(len(self.prompt.prompt_ids), np.bool_)]
        for turn in self.turns:
            parts += [
                np.ones(len(turn.response_ids), np.bool_),
                np.zeros(len(turn.observation_ids), np.bool_),
            ]
        return np.concatenate(parts)

    def behavior_logprobs(self) -> Floats:
        """[n] float32: the engine's logprobs on action tokens, 0 elsewhere."""
        parts = [np.zeros(len(self.prompt.prompt_ids), np.float32)]
        for turn in self.turns:
            parts += [turn.behavior_logprobs, np.zeros(len(turn.observation_ids), np.float32)]
        return np.concatenate(parts).astype(np.float32, copy=False)


@dataclass(slots=True, kw_only=True)
class Group:
    """Trajectories of one prompt, compared with each other. Identity is the admission, not the text."""

    group_id: int
    """Counts admissions over the whole run; unique across resume."""
    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def scored(self) -> tuple[Trajectory, ...]:
        """Members with a reward; the others failed and take part in no baseline."""
        return tuple(t for t in self.trajectories if t.failure is None and t.reward is not None)

    @property
    def oldest_version(self) -> int:
        return min(t.oldest_version for t in self.scored)


@dataclass(slots=True, kw_only=True)
class TrainSequence:
    """One trajectory as the trainer sees it. Arrays are [n], one entry per token of prompt and turns.

    Position i describes token i: `logprobs[i]` is ln p(token i | tokens before i).
    """

    group_id: int
    member_idx: int
    source: str
    token_ids: Ids
    action_mask: Bools
    loss_mask: Bools
    """Action tokens left to train after filters and corrections."""
    behavior_logprobs: Floats
    reward: float
    oldest_version: int
    is_truncated: bool = False
    replica_id: int = 0
    importance_weights: Floats | None = None
    """[n] float32, capped exp(proximal - behavior) on action tokens; None weighs every token 1."""
    proximal_logprobs: Floats | None = None
    reference_logprobs: Floats | None = None
    teacher_logprobs: Floats | None = None
    values: Floats | None = None
    """[n] float32, the critic's value before each action token; read where `action_mask`."""
    advantages: Floats | None = None
    returns: Floats | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(slots=True, kw_only=True)
class TrainBatch:
    """The groups of one step, as sequences split into mini batches (one optimizer update each)."""

    step: int
    weight_version: int
    """The trainer's version at the moment of use."""
    sequences: list[TrainSequence]
    mini_batches: list[list[int]]
    """Indices into `sequences`; every sequence appears once per epoch over the batch."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.sequences)

    @property
    def num_loss_tokens(self) -> int:
        return int(sum(int(s.loss_mask.sum()) for s in self.sequences))


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of one role."""

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    cp_size: int = 1
    dp_size: int = 1

    @property
    def num_gpus(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size * self.dp_size
