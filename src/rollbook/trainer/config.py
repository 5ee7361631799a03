"""The `[trainer]` and `[critic]` sections: how the policy and the critic are optimised."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollbook.section import Section

ScheduleName = Literal["constant", "linear", "cosine"]


class OptimizerFields(Section):
    """AdamW with a schedule counted in optimizer updates; base of `[trainer]` and `[critic]`."""

    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    schedule: ScheduleName = "constant"
    """What the learning rate does after the warm-up: stay, or fall towards `min_lr_frac` of the peak, which the update
    behind the last one would have."""
    warmup_updates: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises linearly from 0 to the peak."""
    min_lr_frac: float = Field(default=0.0, ge=0, le=1)
    """What the learning rate falls towards, as a share of the peak."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the mean of gradients."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the mean of squared gradients."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the mean square."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay, applied to matrices only: never to norms and biases."""
    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients of a larger global norm are scaled down to it; 0: never."""


class TrainerConfig(OptimizerFields):
    """Optimizer, batches and arithmetic of the policy."""

    num_mini_batches: int = Field(default=1, ge=1)
    """Optimizer updates in one pass over a step's sequences; they are split evenly, groups kept together."""
    num_epochs: int = Field(default=1, ge=1)
    """Passes over a step's sequences."""
    shuffle: bool = True
    """Draw which groups share a mini batch anew in each pass, by `seed` and step."""
    seed: int = 0
    """Decides the shuffle."""
    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens of one forward and backward. A longer sequence is a micro batch of its own."""
    share_prompts: bool = True
    """Compute the prompt of a group once for all its members that share a micro batch. The gradient is the same."""
    logprob_chunk_tokens: int = Field(default=256, ge=1)
    """Rows whose logits exist at a time."""
    keep_logits_mib: int = Field(default=64, ge=0)
    """Logits of a micro batch are kept for the backward pass up to this size; larger ones are computed again."""
    measure_entropy: bool = True
    """Report the policy's entropy: one more pass over the logits."""
    gradient_checkpointing: bool = False
    """Keep only the layers' inputs for the backward pass and compute the rest again: less memory, a third more time."""
    gather_bytes: int = Field(default=256 << 20, ge=4096)
    """Weights of several ranks are gathered for a publication so many bytes at a time; larger tensors alone."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch in this process; empty: torch's default."""


class CriticConfig(OptimizerFields):
    """The value model of estimators that need one (PPO)."""

    lr: float = Field(default=1e-5, gt=0)
    """Peak learning rate."""
    backbone: Literal["own", "shared"] = "own"
    """`own`: a second copy of the initial model, trained for values. `shared`: only a value head, on the policy's
    hidden states, which it does not move."""
