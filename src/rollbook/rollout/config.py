"""How trajectories are produced: the engine, its limits, and how tokens are drawn."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rollbook.rollout.engine import KVPolicy, PauseMode
from rollbook.rollout.vllm.config import VllmConfig
from rollbook.section import Section
from rollbook.types import SamplingParams

Mismatch = Literal["none", "int8", "int4", "bf16", "fp8"]


class RolloutConfig(Section):
    """The `[rollout]` table."""

    engine: Literal["native", "vllm", "openai"] = "native"
    """"native": our own engine on Hugging Face models; "vllm": the production engine (extra `vllm`); "openai": any
    OpenAI-compatible server, for generation without weight updates."""
    num_replicas: int = Field(1, ge=1)
    """Full copies of the weights, each driven by one engine."""
    group_size: int = Field(8, ge=1)
    """Trajectories sampled for each prompt and compared with each other."""

    temperature: float = Field(1.0, ge=0.0)
    """Divides the logits before sampling; logprobs are reported under the same division. 0 is greedy and refused for
    training."""
    top_p: float = Field(1.0, gt=0.0, le=1.0)
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Keep the k most likely tokens; 0 keeps all."""
    min_p: float = Field(0.0, ge=0.0, le=1.0)
    """Keep tokens at least this fraction as likely as the likeliest; 0 keeps all."""
    max_response_tokens: int = Field(1024, ge=1)
    """Most tokens sampled in one response; the model's context may end it earlier."""
    stop_strings: tuple[str, ...] = ()
    """A response ends when its text contains one of these; the token that completed it is kept."""

    num_slots: int = Field(256, ge=1)
    """Sequences one replica runs at once."""
    kv_pool_tokens: int = Field(65_536, ge=1)
    """Tokens whose keys and values fit one replica's pool. When it is full the youngest sequence is put off."""
    page_tokens: int = Field(32, ge=1)
    """Tokens in one page of the KV pool, the unit of allocation."""
    max_prefill_tokens: int = Field(4096, ge=1)
    """Most prompt tokens computed in one step, beside the sequences that decode in it."""
    prefix_cache: bool = True
    """Keep the pages of finished sequences until they are needed, for an agent's next turn; where no turn follows,
    those of the prompt, for the rest of its group. They are never used after the weights changed."""
    kv_policy: KVPolicy = "keep"
    """Keys and values of running sequences when the weights change: "keep" goes on with the old ones, "recompute"
    computes them again under the new weights. A sequence without a token yet is computed anew either way."""
    batch_invariant: bool = False
    """Make a sequence's numbers independent of the sequences beside it (float32 on a CPU, dense models), so that a run
    repeats bit for bit on machines of one kind. Steps are filled up to a number of rows at which the machine's matrix
    products are proven to give each row the same bits, so it is slower while few sequences run."""

    pause_mode: PauseMode = "keep"
    """What happens to running responses where the schedule pauses generation for the training. "keep": they stand still
    and go on under the next version; "abort": they return what they have and are continued as new requests, from their
    own tokens; "drain": they finish first, so the pause waits for the longest."""
    mismatch: Mismatch = "none"
    """Deliberate mismatch (native engine): sample with weights rounded to this after each proven publication, to see
    what the gap shows and what corrections do. int8, int4, fp8: the layers' matrices, one scale a row; bf16: the same
    matrices. Costs a second copy of the weights."""

    cuda_graphs: bool = True
    """Record decode steps as CUDA graphs (native engine, built-in decoder, on CUDA): a step of a small model then costs
    its kernels instead of their launches. Memory for recorded steps is taken while the engine runs."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of the engine's weights, keys and values; "auto" takes the model's."""
    device: str = "cpu"
    """Device of the engine: "cpu", "cuda", "cuda:1"."""
    num_threads: int = Field(0, ge=0)
    """CPU threads the engine computes with; 0 leaves torch's setting."""
    response_deadline_s: float = Field(3600.0, gt=0.0)
    """Longest a response may take, waiting for a slot and pauses included; then it fails and its slot is freed."""
    vllm: VllmConfig = VllmConfig()
    """What only `engine = "vllm"` needs to know."""

    @model_validator(mode="after")
    def _check(self) -> RolloutConfig:
        if self.kv_pool_tokens < self.page_tokens:
            raise ValueError(
                f"rollout.kv_pool_tokens is {self.kv_pool_tokens}, less than one page of {self.page_tokens} tokens: "
                f"raise it, or lower rollout.page_tokens"
            )
        if any(not text for text in self.stop_strings):
            raise ValueError(
                "rollout.stop_strings holds an empty string, which would end every response: remove it"
            )
        return self

    def sampling(self) -> SamplingParams:
        """The parameters of a training response: complete and explicit, so nothing comes from a model folder."""
        return SamplingParams(
            max_response_tokens=self.max_response_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_strings=self.stop_strings,
        )
