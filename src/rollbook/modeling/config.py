"""The `[model]` section: which model, made or loaded, and in which precision it computes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from rollbook.section import Section


class NewModelConfig(Section):
    """A tiny model made on the spot, with random weights and a character tokenizer: no download."""

    architecture: Literal["llama", "qwen2", "qwen3"] = "llama"
    """Family, as in Hugging Face's `model_type`."""
    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(default=2, ge=1)
    """Decoder layers."""
    num_heads: int = Field(default=4, ge=1)
    """Query heads."""
    num_kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; empty: as many as query heads."""
    head_dim: int | None = Field(default=None, ge=2)
    """Width of a head; empty: hidden_size / num_heads."""
    intermediate_size: int = Field(default=512, ge=8)
    """Width of the feed-forward layer."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights."""
    tie_embeddings: bool = True
    """One matrix serves as input embedding and output head."""
    max_position: int = Field(default=512, ge=1)
    """Most tokens of a sequence."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary frequencies."""
    tokenizer: Literal["characters"] = "characters"
    """One token for each character of `alphabet`, beside the special tokens."""
    alphabet: str = (
        "0123456789+-*/=().,:; \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ?!'\"<>[]{}_#$%&|^~@\\"
    )
    """Characters the tokenizer knows; any other is an error, never a silent unknown."""
    vocab_size: int | None = Field(default=None, ge=1)
    """Rows of the embedding; empty: as many as the tokenizer has tokens. More leaves unused rows."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        kv = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if self.num_heads % kv:
            raise ValueError(
                f"num_heads is {self.num_heads} and num_kv_heads {kv}: use a divisor of num_heads"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}: "
                "change one of them or set head_dim"
            )
        head_dim = self.head_dim or self.hidden_size // self.num_heads
        if head_dim % 2:
            raise ValueError(f"a head of {head_dim} cannot be rotated in pairs: make it even")
        repeated = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if repeated:
            raise ValueError(f"alphabet holds {''.join(repeated)!r} more than once: list each character once")
        return self


class LoraConfig(Section):
    """The `[model.lora]` table: train low-rank adapters of some layers, and leave the rest of the model as it is."""

    rank: int = Field(default=16, ge=1)
    """Rows of A and columns of B in W + (alpha / rank) B A."""
    alpha: float = Field(default=32.0, gt=0)
    """Scale of the adapters, divided by the rank."""
    targets: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
    """Linear layers that get an adapter, by the last part of their names."""
    publish: Literal["merged", "adapter"] = "merged"
    """"merged": engines get whole weights, as of any other model; in bfloat16 the sum is rounded once more than the
    trainer's. "adapter": A and B alone, for native engines, which hold the same base and compute the same sum."""


def is_local_path(name: str) -> bool:
    """Whether a model's name can only be a folder: hub names are `name` or `owner/name`."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


class ModelConfig(Section):
    """Exactly one of `path` and `new`."""

    path: str | None = None
    """Folder of a Hugging Face model, or its name on the hub."""
    new: NewModelConfig | None = None
    """Make a tiny model instead of loading one."""
    tokenizer_path: str | None = None
    """Folder or hub name of the tokenizer; empty: the model's own."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Off: such a model is refused."""
    implementation: Literal["auto", "rollbook", "transformers"] = "auto"
    """`rollbook` is the built-in decoder (Llama, Mistral, Qwen2, Qwen3; starts without importing transformers),
    `transformers` takes any causal LM. `auto` takes the built-in one for the models it covers."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the forward and backward pass and of the engine's weights. Master weights are float32."""
    device: str = "cpu"
    """torch's name of the device, e.g. "cpu" or "cuda"."""
    seed: int = 0
    """Decides the initial weights of a `new` model, and of adapters."""
    lora: LoraConfig | None = None
    """Train adapters only; the base is frozen in `dtype`, and the reference is the base without them."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.new is None):
            given = (
                "both model.path and model.new"
                if self.path is not None
                else "neither model.path nor model.new"
            )
            raise ValueError(f"{given} given: set path to load a model, or a [model.new] table to make one")
        return self
