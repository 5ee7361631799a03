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
COPY_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}
DTYPES = ("float32", "bfloat16")
REPEATS = 5


def measure_machine(device: torch.device) -> MachineSpec:
    """GEMM and copy rates of `device`, and the time of one small operation; medians of a few repeats after one
    warm-up."""
    size = GEMM_SIZE[device.type]
    gemm: dict[str, float] = {}
    for name in DTYPES:
        a = torch.randn(size, size, device=device).to(getattr(torch, name))
        gemm[name] = 2 * size**3 / _median_s(device, partial(torch.matmul, a, a))
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
