"""Speed of a hand-over of one device between engine and trainer, against pinned copies measured in the same run.

    python bench/switch.py                     # CPU: the moves and their bytes; CUDA: the real thing
    python bench/switch.py --params 1.7 --kv-gib 60 --switches 6

One colocated device: bfloat16 weights and gradients of the trainer stay small (sharded), the optimizer's float32
master weights and moments (12 bytes a parameter) travel to pinned host memory and back, the engine's weights
follow at sleep level 1 or are dropped at level 2, the KV pool is dropped and allocated again.

Predictions, written before the first run on the machine (H200, 1.7B = 20.6 GB of state, KV pool 60 GiB; pinned copies
55 GB/s each way, measured; pinning 8 GB in 4.9 s, measured):

    pinning, once            20.6 GB at 1.6 GB/s: 12.6 s, paid before the first switch
    training state to host   20.6 GB at 52 GB/s: 0.40 s (small tensors cost a little)
    training state to device the same
    engine sleeps, level 1   3.4 GB of weights to pinned host: 65 ms; pool dropped in 1 ms
    engine sleeps, level 2   2 ms
    release                  cudaFree of about 60 GB in large segments: 20 to 60 ms
    engine wakes             60 GiB of cudaMalloc: 10 to 40 ms, and 65 ms of weights at level 1
    a switch there and back  0.95 s at level 2, of which copies 0.80 s; 1.1 s at level 1
    fragmentation            below 1 GB after every move, not growing, with regions; without, it depends on sizes
  Second round, after 426 to 548 ms for the way to the device (0.67 to 0.87 of the link), all of it allocated before the
  first copy began. Now each allocation follows the copy before it, and costs nothing where it is the faster one:
    training state to device 0.38 to 0.42 s with and without a region: at least 0.88 of the link
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch import Tensor

from rollbook.memory.handover import (
    MoveReport,
    after_publication,
    before_publication,
    hand_over,
    release,
    to_trainer,
    wake_engine,
)
from rollbook.memory.parking import Parking
from rollbook.memory.register import Register

GIB = 1 << 30


class Region:
    """An allocator pool for one owner, so that what it frees can be given back to the device whole.

    In one shared pool the blocks of trainer and engine lie side by side, and after a few switches much of what is
    reserved is in pieces that fit nobody. A region keeps an owner's blocks in segments of their own. On a CPU it does
    nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pool: torch.cuda.MemPool | None = None

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        if self._pool is None:
            self._pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(self._pool, device=self.device):
            yield

    def give_back(self) -> int:
        self._pool = None  # a pool that nobody holds is free to be emptied
        return release(self.device)


class PoolEngine:
    """An engine's memory without its model: weights and a KV pool, the pool in a region of its own if asked."""

    def __init__(self, weight_bytes: int, pool_bytes: int, device: torch.device, *, use_region: bool) -> None:
        self.device, self.pool_bytes = device, pool_bytes
        self.region = Region(device) if use_region else None
        self.weights = chunks(weight_bytes, device, 1 << 26)
        self.parking = Parking("rollout weights", self.weights)
        self.pool: list[Tensor] = []
        self.level = 0
        self._make_pool()

    def _make_pool(self) -> None:
        if self.region is None:
            self.pool = chunks(self.pool_bytes, self.device, 1 << 30)
        else:
            with self.region.allocating():
                self.pool = chunks(self.pool_bytes, self.device, 1 << 30)

    async def pause(self, mode: Literal["keep"] = "keep") -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self, level: int = 1) -> None:
        self.level = level
        self.pool.clear()
        if self.region is not None:
            self.region.give_back()
        if level == 1:
            await asyncio.to_thread(self.parking.to_host)
        else:
            for tensor in self.weights:
                tensor.untyped_storage().resize_(0)

    async def wake(self) -> None:
        if self.level == 1:
            await asyncio.to_thread(self.parking.to_device)
        else:
            for tensor in self.weights:
                tensor.untyped_storage().resize_(tensor.numel())
        self._make_pool()


def chunks(num_bytes: int, device: torch.device, chunk_bytes: int) -> list[Tensor]:
    sizes = [chunk_bytes] * (num_bytes // chunk_bytes) + (
        [num_bytes % chunk_bytes] if num_bytes % chunk_bytes else []
    )
    return [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]


def pinned_link(device: torch.device) -> tuple[float, float]:
    """GB/s to the host and to the device, 1 GiB eight times, page-locked."""
    num_bytes = GIB if device.type == "cuda" else 1 << 26
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    rates = []
    for target, source in ((host, on_device), (on_device, host)):
        best = 0.0
        for _ in range(3):
            synchronize(device)
            began = time.perf_counter()
            for _ in range(8):
                target.copy_(source, non_blocking=True)
            synchronize(device)
            best = max(best, 8 * num_bytes / (time.perf_counter() - began) / 1e9)
        rates.append(best)
    return rates[0], rates[1]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def alternate(
    device: torch.device, params: float, kv_bytes: int, level: int, switches: int, *, use_region: bool
) -> list[list[MoveReport]]:
    state_tensors = training_state(int(params * 1e9), device)
    state = Parking("training state", state_tensors)
    gradients: list[Tensor] = []
    state.pin()
    state.to_host()
    engine = PoolEngine(int(2e9 * params), kv_bytes, device, use_region=use_region)
    engine.parking.pin()
    register = Register()
    register.add("optimizer moments", lambda: state_tensors)
    register.add("gradients", lambda: gradients)
    register.add("rollout weights", lambda: engine.weights)
    register.add("KV pool", lambda: engine.pool)
    rounds = []
    for _ in range(switches):
        reports = await hand_over(
            to_trainer(engine, [state], device, sleep_level=level), device, deadline_s=120
        )
        train = register.read("train")
        gradients.extend(chunks(int(2e9 * params), device, 1 << 26))
        activations = chunks(int(4e9 * params), device, 1 << 25)
        del activations
        reports += await hand_over(
            before_publication(gradients.clear, [state], device), device, deadline_s=120
        )
        reports += await hand_over(wake_engine(engine), device, deadline_s=120)
        reports += await hand_over(after_publication(engine), device, deadline_s=120)
        rounds.append(reports)
    rollout = register.read("rollout")
    name = str(device) if device.index is not None or device.type == "cpu" else f"{device.type}:0"
    print(
        f"  pinned once: {state.num_bytes / 1e9:.2f} GB in {state.pin_s:.2f} s; trainer's turn: state "
        f"{train.bytes_of('optimizer moments', name) / 1e9:.2f} GB, pool {train.bytes_of('KV pool', name) / 1e9:.2f}; "
        f"engine's turn: state {rollout.bytes_of('optimizer moments', name) / 1e9:.2f} GB, pool "
        f"{rollout.bytes_of('KV pool', name) / 1e9:.2f} GB"
    )
    return rounds


def training_state(num_params: int, device: torch.device) -> list[Tensor]:
    """Float32 master weights and two moments, in tensors like a model's: large matrices and small norms."""
    tensors = []
    for _ in range(3):
        left = num_params
        while left > 0:
            for size in (12_582_912, 4_194_304, 4_194_304, 2048, 2048):
                size = min(size, left)
                if size:
                    tensors.append(torch.zeros(size, dtype=torch.float32, device=device))
                left -= size
    return tensors


async def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, help="billions of parameters whose state is on this device")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--switches", type=int, default=5)
    args = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda:0" if is_cuda else "cpu")
    params = args.params or (1.7 if is_cuda else 0.01)
    kv_bytes = int((args.kv_gib or (60 if is_cuda else 0.1)) * GIB)
    to_host, to_device = pinned_link(device)
    print(
        f"torch {torch.__version__} on {torch.cuda.get_device_name(0) if is_cuda else 'cpu'}; pinned copies "
        f"{to_host:.1f} GB/s to the host, {to_device:.1f} to the device; {params}B parameters, pool "
        f"{kv_bytes / 1e9:.1f} GB, {args.switches} switches each"
    )
    lines = []
    for level in (1, 2):
        for use_region in (False, True):
            label = f"sleep level {level}, {'KV pool in a region' if use_region else 'one pool'}"
            print(label, flush=True)
            rounds = await alternate(device, params, kv_bytes, level, args.switches, use_region=use_region)
            lines.append(
                f"{label}: first, median of the rest [ms]; GB/s of the link; fragmentation after the move [MB]"
            )
            for idx, name in enumerate(report.name for report in rounds[0]):
                moves = [reports[idx] for reports in rounds]
                later = sorted(m.seconds for m in moves[1:]) or [moves[0].seconds]
                median = later[len(later) // 2]
                link = to_host if name.endswith("host") else to_device
                rate = moves[-1].num_bytes / median / 1e9
                share = f"{rate:6.1f} GB/s = {rate / link:4.2f} of the link" if moves[-1].num_bytes else ""
                fragments = ", ".join(f"{m.fragmented_bytes / 1e6:.0f}" for m in (moves[0], moves[-1]))
                lines.append(
                    f"  {name:28s} {moves[0].seconds * 1e3:9.1f} {median * 1e3:9.1f}  {share:34s} {fragments}"
                )
            whole = sorted(sum(report.seconds for report in reports) for reports in rounds[1:] or rounds)
            lines.append(f"  {'there and back':28s} {'':9s} {whole[len(whole) // 2] * 1e3:9.1f}")
            if is_cuda:
                torch.cuda.empty_cache()
    print("\n==== summary\n" + "\n".join(lines))


if __name__ == "__main__":
    asyncio.run(main())
