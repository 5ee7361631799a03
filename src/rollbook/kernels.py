"""Whether this machine can run the package's Triton kernels."""

from __future__ import annotations

import importlib.util
from functools import lru_cache

import torch


@lru_cache(maxsize=1)
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def runs_triton(device: torch.device) -> bool:
    """Tensors on `device` can be given to a Triton kernel."""
    return device.type == "cuda" and has_triton()
