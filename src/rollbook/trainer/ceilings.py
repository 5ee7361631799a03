"""What the device of this process can do at best: the rates that every plan for it stands on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from rollbook.ledger.hardware import MachineSpec

GEMM_SIZE = {"cpu": 1024, "cuda": 8192}
SLOW_GEMM_S = 0.5
"""A product that would take longer is measured at a quarter of its size: a processor without bfloat16 instructions
takes seconds for one of 1,024."""
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
DTYPES = ("float32", "bfloat16")
REPEATS = 5


def measure_machine(device: torch.device) -> MachineSpec:
    """GEMM and copy rates of `device`, and the time of one small operation; medians of a few repeats after one
    warm-up."""
    size = GEMM_SIZE[device.type]
    gemm: dict[str, float] = {}
    for name in DTYPES:
        gemm[name] = _gemm_flops_per_s(device, size, getattr(torch, name))
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = _median_s(device, lambda: target.copy_(source))
    one = torch.ones(1, device=device)
    launch_s = _median_s(device, lambda: [one.add_(1) for _ in range(100)]) / 100
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        name = "cpu"
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return MachineSpec(
        name=platform.node() or "this machine",
        device=name,
        num_threads=torch.get_num_threads(),
        gemm_flops_per_s=gemm,
        copy_bytes_per_s=2 * source.numel() / copy_s,
        memory_bytes=memory,
        launch_s=launch_s,
    )


def _gemm_flops_per_s(device: torch.device, size: int, dtype: torch.dtype) -> float:
    """Of square matrices; of smaller ones where these would take long."""
    a = torch.randn(size, size, device=device).to(dtype)
    small = a[: size // 4, : size // 4].contiguous()
    small_s = _median_s(device, partial(torch.matmul, small, small))
    if 4**3 * small_s > SLOW_GEMM_S:
        return float(2 * (size // 4) ** 3 / small_s)
    return float(2 * size**3 / _median_s(device, partial(torch.matmul, a, a)))


def wait_for(device: torch.device) -> None:
    """Until everything launched on `device` was computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _median_s(device: torch.device, work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        wait_for(device)
        began_s = time.perf_counter()
        work()
        wait_for(device)
        seconds.append(time.perf_counter() - began_s)
    return statistics.median(seconds[1:])
