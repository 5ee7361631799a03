"""How a role is spread over GPUs, and in which numbers it computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5625}
"""Bytes of a weight; float4 with a scale for every block of 16 or 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """How one engine replica is spread over GPUs, and in which numbers it computes."""

    tp_size: int = 1
    """GPUs that share each attention layer."""
    ep_size: int = 1
    """GPUs that share the experts; above `tp_size` the attention is repeated (data parallel)."""
    weight_dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    engine: str = "vllm"

    @property
    def num_gpus(self) -> int:
        return max(self.tp_size, self.ep_size)

    @property
    def attention_copies(self) -> int:
        return max(self.num_gpus // self.tp_size, 1)


Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """How the trainer is spread over GPUs, and in which numbers it computes."""

    tp_size: int = 1
    pp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1
    dtype: str = "bfloat16"
    recompute: Recompute = "full"
    lora: bool = False
    """Only adapters train: no weight gradients of the frozen matrices."""
    micro_batches_per_step: int = 0
    """Micro batches that pass through a pipeline between two optimizer updates; 0: as many as a step's tokens give, or,
    where no step is described, enough to hide the bubble."""
    virtual_stages: int = 1

    @property
    def model_parallel_size(self) -> int:
        return self.tp_size * self.pp_size * self.cp_size
