"""Ways to walk down the rows in the digest kernel, beside the one in use: GB/s over the weights of one model, each
checked against the kernel in use first.

    python bench/digest_kernels.py --model 8

The definition is one for all (`rollbook/sync/digest.py`): what differs is how many loads a thread has on their way.
The kernel in use loads STEP_ROWS rows, multiplies, and only then loads again; `ahead` loads eight rows of two columns
a thread before it multiplies the first, with sums of one row in registers; `staged` is the kernel in use with
Triton's own pipeline over shared memory.

Predictions for an H200 (4.8 TB/s on paper, 4.1 as a plain sum of the same bytes), 8B, 16.06 GB:
    in use      5.6 ms, 2,890 GB/s (as measured before)
    ahead       4.1 ms, 3,900 GB/s: 16 KB on their way for each of 8 programs a multiprocessor instead of 4 for 10;
                the arithmetic (about 10 integer slots for 8 bytes) would allow 12 TB/s
    staged      4.5 ms, 3,600 GB/s: as many bytes on their way, and a trip through shared memory
    floor       3.9 ms: `torch.sum` of the same memory as int64, one call a tensor
A publication over NVLink (47 ms) would then hide 9 % of its time in a digest instead of 12 %; less than 8 % no single
read of the parameters can take there, for the link carries 381 GB/s and memory 4,800.
"""

# The kernels' bodies are Triton's language, not Python.
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import triton  # type: ignore[import-not-found,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
from torch import Tensor

from rollbook.sync import digest_triton
from rollbook.sync.digest import digests
from rollbook.sync.digest_triton import _mix


@triton.jit
def ahead(
    plan,
    row_a,
    row_c,
    column_b,
    column_d,
    chunk_e,
    chunk_f,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    MIX_FACTOR: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """As `_chunk_sums`; STEP_ROWS is not read: eight rows are loaded at a time."""
    num_tiles: tl.constexpr = COLUMNS // TILE
    entry = plan + (tl.program_id(0) // num_tiles) * 4
    address = tl.load(entry)
    num_bytes = tl.load(entry + 1)
    tensor_idx = tl.load(entry + 2)
    chunk = tl.load(entry + 3)
    first = chunk * (ROWS * COLUMNS)
    num_whole = tl.minimum(num_bytes // 8 - first, ROWS * COLUMNS).to(tl.int32)
    words = address.to(tl.pointer_type(tl.int64)) + first
    if IS_ALIGNED:
        words = tl.multiple_of(words, 16)
    columns = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    s = tl.zeros([TILE], tl.int64)
    t = tl.zeros([TILE], tl.int64)
    if num_whole == ROWS * COLUMNS:
        for row in range(0, ROWS, 8):
            at = words + row * COLUMNS + columns
            w0 = tl.load(at)
            w1 = tl.load(at + COLUMNS)
            w2 = tl.load(at + 2 * COLUMNS)
            w3 = tl.load(at + 3 * COLUMNS)
            w4 = tl.load(at + 4 * COLUMNS)
            w5 = tl.load(at + 5 * COLUMNS)
            w6 = tl.load(at + 6 * COLUMNS)
            w7 = tl.load(at + 7 * COLUMNS)
            a = row_a + row
            c = row_c + row
            s += w0 * tl.load(a)
            t += (w0 >> 32) * tl.load(c)
            s += w1 * tl.load(a + 1)
            t += (w1 >> 32) * tl.load(c + 1)
            s += w2 * tl.load(a + 2)
            t += (w2 >> 32) * tl.load(c + 2)
            s += w3 * tl.load(a + 3)
            t += (w3 >> 32) * tl.load(c + 3)
            s += w4 * tl.load(a + 4)
            t += (w4 >> 32) * tl.load(c + 4)
            s += w5 * tl.load(a + 5)
            t += (w5 >> 32) * tl.load(c + 5)
            s += w6 * tl.load(a + 6)
            t += (w6 >> 32) * tl.load(c + 6)
            s += w7 * tl.load(a + 7)
            t += (w7 >> 32) * tl.load(c + 7)
    else:
        num_rows = (num_whole + COLUMNS - 1) // COLUMNS
        for row in range(num_rows):
            at = row * COLUMNS + columns
            w = tl.load(words + at, mask=at < num_whole, other=0)
            s += w * tl.load(row_a + row)
            t += (w >> 32) * tl.load(row_c + row)
    num_tail = num_bytes % 8
    if (num_tail > 0) & (num_whole < ROWS * COLUMNS):
        byte = tl.arange(0, 8)
        tail = tl.load(
            words.to(tl.pointer_type(tl.uint8)) + num_whole * 8 + byte, mask=byte < num_tail, other=0
        )
        word = tl.sum(tail.to(tl.int64) << (8 * byte).to(tl.int64), axis=0)
        is_here = columns == num_whole % COLUMNS
        s += tl.where(is_here, word * tl.load(row_a + num_whole // COLUMNS), 0)
        t += tl.where(is_here, (word >> 32) * tl.load(row_c + num_whole // COLUMNS), 0)
    m = _mix(s, MIX_FACTOR)
    n = _mix(t + m, MIX_FACTOR)
    high = tl.sum(m * tl.load(column_b + columns), axis=0) * tl.load(chunk_e + chunk)
    low = tl.sum(n * tl.load(column_d + columns), axis=0) * tl.load(chunk_f + chunk)
    tl.atomic_add(out + tensor_idx * 2, high)
    tl.atomic_add(out + tensor_idx * 2 + 1, low)


@triton.jit
def staged(
    plan,
    row_a,
    row_c,
    column_b,
    column_d,
    chunk_e,
    chunk_f,
    out,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    STEP_ROWS: tl.constexpr,
    MIX_FACTOR: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Whole chunks alone, with Triton's pipeline; what is left of a tensor counts as zero (not for use)."""
    num_tiles: tl.constexpr = COLUMNS // TILE
    entry = plan + (tl.program_id(0) // num_tiles) * 4
    address = tl.load(entry)
    num_bytes = tl.load(entry + 1)
    tensor_idx = tl.load(entry + 2)
    chunk = tl.load(entry + 3)
    first = chunk * (ROWS * COLUMNS)
    num_whole = tl.minimum(num_bytes // 8 - first, ROWS * COLUMNS).to(tl.int32)
    words = address.to(tl.pointer_type(tl.int64)) + first
    if IS_ALIGNED:
        words = tl.multiple_of(words, 16)
    columns = (tl.program_id(0) % num_tiles) * TILE + tl.arange(0, TILE)
    steps = tl.arange(0, STEP_ROWS)
    s = tl.zeros([STEP_ROWS, TILE], tl.int64)
    t = tl.zeros([STEP_ROWS, TILE], tl.int64)
    if num_whole == ROWS * COLUMNS:
        for row in tl.range(0, ROWS, STEP_ROWS, num_stages=4):
            w = tl.load(words + (row + steps)[:, None] * COLUMNS + columns[None, :])
            s += w * tl.load(row_a + row + steps)[:, None]
            t += (w >> 32) * tl.load(row_c + row + steps)[:, None]
    m = _mix(tl.sum(s, axis=0), MIX_FACTOR)
    n = _mix(tl.sum(t, axis=0) + m, MIX_FACTOR)
    high = tl.sum(m * tl.load(column_b + columns), axis=0) * tl.load(chunk_e + chunk)
    low = tl.sum(n * tl.load(column_d + columns), axis=0) * tl.load(chunk_f + chunk)
    tl.atomic_add(out + tensor_idx * 2, high)
    tl.atomic_add(out + tensor_idx * 2 + 1, low)


WAYS: dict[str, tuple[Any, tuple[tuple[int, int, int], ...]]] = {
    "in use": (
        digest_triton._chunk_sums,
        ((digest_triton.TILE, digest_triton.STEP_ROWS, digest_triton.NUM_WARPS),),
    ),
    "ahead": (ahead, ((128, 1, 2), (256, 1, 4), (512, 1, 8), (256, 1, 2), (512, 1, 4))),
    "staged": (staged, ((256, 4, 2), (256, 8, 4), (512, 4, 4))),
}
"""By name: the kernel, and (columns of a program, rows a step, warps) to try."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=("0.5", "8"), default="8")
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--check-only", action="store_true", help="on the host, with TRITON_INTERPRET=1")
    options = parser.parse_args()
    if options.check_only:
        check(torch.device("cpu"))
        return
    from sync import random_weights  # beside this file

    device = torch.device("cuda")
    check(device)
    weights = list(random_weights(options.model, device).values())
    num_bytes = sum(w.numel() * w.element_size() for w in weights)
    print(f"{num_bytes / 1e9:.2f} GB in {len(weights)} tensors, {torch.cuda.get_device_name()}")

    def report(what: str, run: Callable[[], object]) -> None:
        seconds = best_s(run, options.reps)
        print(f"{what:44s} {seconds * 1e3:7.2f} ms {num_bytes / seconds / 1e9:7.0f} GB/s", flush=True)

    words = [w.view(-1).view(torch.int64) for w in weights]
    report("floor: a sum of each tensor", lambda: [w.sum() for w in words])
    for name, (kernel, shapes) in WAYS.items():
        for shape in shapes:
            use(kernel, shape)
            report(f"{name}: {shape[0]} columns, {shape[2]} warps", lambda: digest_triton.sums(weights))
            if kernel is not staged:
                report("  with the copy to the host", lambda: digests(weights))


def use(kernel: Any, shape: tuple[int, int, int]) -> None:
    digest_triton._chunk_sums = kernel
    digest_triton.TILE, digest_triton.STEP_ROWS, digest_triton.NUM_WARPS = shape


def check(device: torch.device) -> None:
    """The same numbers from every kernel, for whole and for broken chunks."""
    sizes = (0, 1, 7, 8, 9, 8 * 1024, 8 * 1024 + 3, 1 << 21, 3 * (1 << 21) + 8 * 1024 + 11)
    tensors = [torch.randint(0, 256, (n,), dtype=torch.uint8).to(device) for n in sizes]
    wanted: Tensor | None = None
    for name, (kernel, shapes) in WAYS.items():
        for shape in shapes:
            use(kernel, shape)
            which = tensors if kernel is not staged else tensors[7:8]
            found = digest_triton.sums(which)
            if wanted is None:
                wanted = found
            expected = wanted if kernel is not staged else wanted[7:8]
            assert torch.equal(found, expected), f"{name} {shape} gives another digest"
    print("every kernel gives the same digests")


def best_s(run: Callable[[], object], reps: int) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(reps):
        began_s = time.perf_counter()
        run()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began_s)
    return best


if __name__ == "__main__":
    main()
