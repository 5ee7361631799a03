"""The engine protocol: a running inference server, as the controller sees it.

Token ids go in, token ids with logprobs and weight versions come out; no text crosses the boundary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from rollbook.errors import EngineError
from rollbook.types import FinishReason, Floats, Ids, KVStart, SamplingParams, VersionRun

PauseMode = Literal["keep", "abort", "drain"]
"""keep: running sequences wait and continue after `resume`; abort: they return what they have, with
FinishReason.ABORTED; drain: they finish first, nothing new starts."""

KVPolicy = Literal["keep", "recompute"]
"""What happens to the keys and values of running sequences when the weights change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One turn to sample. (seed, group_id, member_idx, first_token_idx + i) decides token i, nothing else."""

    request_id: str
    """Unique while it runs, e.g. "17/3#0" for turn 0 of trajectory 17/3."""
    prompt_ids: Ids
    """[n] int32: everything before the response, earlier turns included, as sampled."""
    sampling: SamplingParams
    seed: int
    group_id: int
    member_idx: int
    first_token_idx: int = 0
    """Sampled tokens of the trajectory before this request (earlier turns, or a partial response)."""
    num_continued: int = 0
    """Last tokens of `prompt_ids` that belong to the response already: a stop string may have begun in them."""
    is_last_turn: bool = False
    """No request goes on from the end of this response, so its keys and values need not be kept."""


def require_runnable(
    request: GenerateRequest, *, is_running: bool, max_context_tokens: int, has_tokenizer: bool
) -> None:
    """What any engine asks of a request before it is queued.

    Args:
        is_running: the engine has a request of this id.
        max_context_tokens: the model's context.
        has_tokenizer: the engine can find stop strings.
    Raises:
        EngineError: it can never run; says why.
    """
    name, num_prompt = request.request_id, len(request.prompt_ids)
    if is_running:
        raise EngineError(f"request {name} is already running", "give every request an id of its own")
    if num_prompt == 0 or request.sampling.max_response_tokens < 1:
        raise EngineError(
            f"request {name} has {num_prompt} prompt tokens and max_response_tokens "
            f"{request.sampling.max_response_tokens}",
            "both must be at least 1",
        )
    if num_prompt >= max_context_tokens:
        raise EngineError(
            f"request {name}: the prompt has {num_prompt} tokens, the model's context is {max_context_tokens}",
            "filter prompts by length, or use a model with a longer context",
        )
    if request.sampling.stop_strings and not has_tokenizer:
        raise EngineError(
            f"request {name} has stop strings and the engine has no tokenizer",
            "start the engine with the model's tokenizer, or use stop token ids",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What the engine sampled for one request."""

    request_id: str
    response_ids: Ids
    logprobs: Floats
    """[n] float32. ln p under temperature-scaled logits, before top-k/top-p/min-p: what a trainer recomputes."""
    version_runs: tuple[VersionRun, ...]
    finish_reason: FinishReason
    num_cached_prompt_tokens: int = 0
    """Prompt tokens whose keys and values were reused (group members, earlier turns)."""
    num_preemptions: int = 0
    replica_id: int = 0
    kv_starts: tuple[KVStart, ...] = ()
    """As in `Turn`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the engine started, and gauges now. Rates are differences of two readings."""

    weight_version: int
    num_running: int
    num_waiting: int
    num_slots: int
    kv_pool_tokens: int
    kv_used_tokens: int
    prefill_tokens: int
    """Prompt tokens computed (cache hits excluded)."""
    cached_prompt_tokens: int
    decode_tokens: int
    decode_steps: int
    num_preemptions: int
    busy_s: float
    """Seconds inside prefill and decode; the rest of the wall clock the engine stood idle."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    active_slots_sum: int = 0
    """Sum over decode steps of the sequences in the step: mean batch = active_slots_sum / decode_steps."""
    kv_used_tokens_sum: int = 0
    """Sum over decode steps of `kv_used_tokens`, which is 0 again once a step's sequences have ended."""
    mismatch: str = "none"
    """What the engine's weights are rounded to on purpose (`rollout.mismatch`)."""
    mismatch_error_frac: float = 0.0
    """How far that moved them: norm of the difference over norm of the weights."""
    waiting_requests: tuple[str, ...] = field(default=())
    """Ids of requests not finished, for deadline messages (at most 32)."""

    def going_on(self, earlier: EngineStats | None) -> EngineStats:
        """The same with counters that go on where those of the engine in whose place this one was started ended."""
        if earlier is None:
            return self
        return replace(self, **{name: getattr(self, name) + getattr(earlier, name) for name in COUNTERS})


COUNTERS = (
    "prefill_tokens",
    "cached_prompt_tokens",
    "decode_tokens",
    "decode_steps",
    "num_preemptions",
    "busy_s",
    "prefill_s",
    "decode_s",
    "active_slots_sum",
    "kv_used_tokens_sum",
)
"""Fields of EngineStats that only grow."""


class Engine(Protocol):
    """One replica. All methods are called from the event loop; the engine computes on its own thread."""

    replica_id: int

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def generate(self, request: GenerateRequest) -> Response:
        """Sample one response. Raises EngineError; cancellation frees the slot."""

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Returns when no decode step runs. Requests that arrive while paused are queued."""

    async def resume(self) -> None: ...

    async def sleep(self, level: int = 1) -> None:
        """1: weights to host memory, KV pool dropped; 2: both dropped. Pauses first (running work is kept
        as tokens and recomputed after `wake`)."""

    async def wake(self) -> None:
        """Rebuild what `sleep` dropped. After level 2 the engine serves only once a publication committed."""

    async def reset_prefix_cache(self) -> None: ...

    async def stats(self) -> EngineStats: ...
