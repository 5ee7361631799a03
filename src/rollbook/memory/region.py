"""An allocator pool for one owner, so that what it frees can be given back to the device whole.

In one shared pool the blocks of trainer and engine lie side by side, and after a few switches much of what is
reserved is in pieces that fit nobody. A region keeps an owner's blocks in segments of their own: when all of them
are free, all of their segments can be returned. PyTorch's expandable segments achieve the same inside one process;
they cannot be shared by CUDA IPC, so this is what works with every transport.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import torch


class Region:
    """A pool on one CUDA device; on any other device it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: torch.cuda.MemPool | None = None

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Allocations of the block come from this region."""
        if self.device.type != "cuda":
            yield
            return
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device=self.device):
            yield

    def give_back(self) -> int:
        """Return the region's segments to the device, once its tensors are gone. Returns the bytes given back."""
        self._pool = None  # a pool that nobody holds is free to be emptied
        return release(self.device)


def release(device: torch.device) -> int:
    """Return every free segment to the device, for whoever allocates next. Returns the bytes given back."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_reserved(device)
    gc.collect()
    with torch.cuda.device(device):
        torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved(device)
