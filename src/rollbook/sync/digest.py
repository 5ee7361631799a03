"""Digest of a tensor's bytes, computed where the tensor lies: the proof behind every weight version.

A tensor is read as little-endian 64-bit words, laid out in chunks of ROWS x COLUMNS words (the last one cut
short, the last word padded with zeros). All arithmetic is exact, modulo 2^64:

    s_k = Σ_j a_j · w_jk            t_k = Σ_j c_j · (w_jk >> 32)         per column k of a chunk
    m_k = mix(s_k)                  n_k = mix(t_k + m_k)                 mix is a bijection with mix(0) = 0
    high = Σ_chunk e Σ_k b_k · m_k  low = Σ_chunk f Σ_k d_k · n_k        128 bits, then shape and dtype

The weights a, b, c, d, e, f are fixed pseudo-random odd numbers, so the sum depends on where each word lies. An
odd number is a unit modulo 2^64: a change inside one word always changes `high`. Changes in several words go
unseen with a probability of about 2^-64 or less; the worst case, two changed sign bits of the same column, is
2^-32 (that is what `t`, which sees the upper half of each word, is for). This guards against faults, not
against somebody who chooses the weights.

The same number comes out on a CPU (integer matrix-vector products over blocks that stay in the cache), in a
Triton kernel that reads each parameter once (`digest_triton.py`), and in plain torch operations on any device.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from rollbook.kernels import runs_triton

COLUMNS = 1024
ROWS = 256
CHUNK_WORDS = ROWS * COLUMNS
MIX_FACTOR = -0x61C8864680B583EB  # 2^64 / golden ratio, odd, as a signed number

ROW_BYTES = 8 * COLUMNS
SMALL_BYTES = 8 * ROW_BYTES
"""Tensors up to here are gathered into one grid."""
BLOCK_ROWS = 32
"""Rows read at a time on a CPU: 256 KiB stay in the second-level cache for the second product."""
THREADED_BYTES = 1 << 23
"""Less than this is not worth handing to threads."""


@dataclass(frozen=True, slots=True)
class PendingDigests:
    """Digests being computed: [n, 2] int64 on the device of the tensors, and what is bound in afterwards."""

    sums: Tensor
    kinds: tuple[str, ...]
    ready: torch.cuda.Event | None = None
    """On CUDA: follows the launch, on the stream it went to."""

    def results(self) -> list[str]:
        """The hex digests; one copy from the device, on the current stream whatever stream they were started on."""
        if self.ready is not None:
            self.ready.wait(torch.cuda.current_stream(self.sums.device))
        rows = self.sums.tolist()
        return [_bind(kind, high, low) for kind, (high, low) in zip(self.kinds, rows, strict=True)]


def digest(tensor: Tensor) -> str:
    """32 hex digits of the bytes, shape and dtype of `tensor`, on any device and in any memory layout.

    >>> digest(torch.tensor([1.0, 2.0])) == digest(torch.tensor([2.0, 1.0]))
    False
    >>> digest(torch.eye(3).t()) == digest(torch.eye(3))
    True
    """
    return digests([tensor])[0]


def digests(tensors: Sequence[Tensor]) -> list[str]:
    """One digest per tensor; tensors of one CUDA device are read in one launch and answered by one copy."""
    return launch(tensors).results()


def launch(tensors: Sequence[Tensor]) -> PendingDigests:
    """Start the digests without waiting for the device. All tensors must lie on one device."""
    kinds = tuple(kind_of(tensor.dtype, tensor.shape) for tensor in tensors)
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"one launch reads one device, not {sorted(map(str, devices))}")
    if not tensors:
        return PendingDigests(torch.zeros(0, 2, dtype=torch.int64), kinds)
    device = tensors[0].device
    if runs_triton(device):
        from rollbook.sync import digest_triton

        sums = digest_triton.sums([t if _lies_in_order(t) else flat_bytes(t) for t in tensors])
    else:
        sums = _sums([flat_bytes(tensor) for tensor in tensors])
    ready = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
    return PendingDigests(sums, kinds, ready)


def joined(pending: Sequence[PendingDigests]) -> PendingDigests:
    """Several launches on one device as one, to be read by one copy."""
    for each in pending:
        if each.ready is not None:
            each.ready.wait(torch.cuda.current_stream(each.sums.device))
    return PendingDigests(
        torch.cat([each.sums for each in pending]), tuple(kind for each in pending for kind in each.kinds)
    )


def fold(digests_by_name: Mapping[str, str]) -> str:
    """One digest of a whole version: names and digests, in the order of the names."""
    text = "\n".join(f"{name} {digests_by_name[name]}" for name in sorted(digests_by_name))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def kind_of(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """What is bound into a digest beside the bytes: "bfloat16[2,3]"."""
    return f"{str(dtype).removeprefix('torch.')}[{','.join(str(n) for n in shape)}]"


def flat_bytes(tensor: Tensor) -> Tensor:
    """[bytes] uint8: the tensor's bytes in row-major order, 8-byte aligned; a view where the layout allows."""
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.clone() if flat.data_ptr() % 8 else flat


def _lies_in_order(tensor: Tensor) -> bool:
    """`flat_bytes` would be a view; a launch over many tensors is faster without making it."""
    return (
        tensor.is_contiguous() and tensor.data_ptr() % 8 == 0 and not tensor.is_conj() and not tensor.is_neg()
    )


def _bind(kind: str, high: int, low: int) -> str:
    salt = hashlib.blake2b(kind.encode(), digest_size=16).digest()
    number = (high % (1 << 64)) << 64 | (low % (1 << 64))
    return f"{number ^ int.from_bytes(salt, 'big'):032x}"


def odd_numbers(count: int, stream: int, device: torch.device) -> Tensor:
    """[count] int64: the pseudo-random odd weights of one stream (splitmix64 of the index)."""
    size = max(1024, 1 << (count - 1).bit_length())
    return _odd_table(size, stream, device)[:count]


@lru_cache(maxsize=64)
def _odd_table(size: int, stream: int, device: torch.device) -> Tensor:
    z = (torch.arange(size, dtype=torch.int64) + 1 + (stream << 40)) * MIX_FACTOR
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        z = (z ^ _shift_right(z, shift)) * factor
    return ((z ^ _shift_right(z, 31)) | 1).to(device)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own repeats the sign bit."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 32)) * MIX_FACTOR
    return x ^ _shift_right(x, 32)


@lru_cache(maxsize=1)
def _pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="digest")


def _sums(flat: Sequence[Tensor]) -> Tensor:
    """[n, 2] int64, by plain torch operations."""
    device = flat[0].device
    num_chunks = [math.ceil(len(data) / (8 * CHUNK_WORDS)) for data in flat]
    s = torch.zeros(sum(num_chunks), COLUMNS, dtype=torch.int64, device=device)
    t = torch.zeros_like(s)
    small: list[tuple[int, Tensor]] = []
    work: list[tuple[_Words, int]] = []
    first_chunk = 0
    for data, count in zip(flat, num_chunks, strict=True):
        if len(data) <= SMALL_BYTES:
            small.append((first_chunk, data))
        else:
            words = _Words(data, first_chunk)
            work += [(words, chunk) for chunk in range(count)]
        first_chunk += count
    _add_small(small, s, t)
    num_threads = torch.get_num_threads()
    if device.type == "cpu" and num_threads > 1 and sum(map(len, flat)) >= THREADED_BYTES:
        list(_pool(num_threads).map(lambda item: item[0].add_chunk(item[1], s, t), work))
    else:
        for words, chunk in work:
            words.add_chunk(chunk, s, t)
    counts = torch.tensor(num_chunks, device=device)
    tensor_of = torch.repeat_interleave(counts)
    chunk_of = torch.arange(len(s), device=device) - (counts.cumsum(0) - counts)[tensor_of]
    m = _mix(s)
    n = _mix(t.add_(m))
    out = torch.zeros(len(flat), 2, dtype=torch.int64, device=device)
    for lane, mixed in enumerate((m, n)):
        columns = odd_numbers(COLUMNS, 2 + lane, device)
        chunks = odd_numbers(max(1, *num_chunks), 4 + lane, device)[chunk_of]
        out[:, lane].index_add_(0, tensor_of, (mixed * columns).sum(1) * chunks)
    return out


def _add_small(small: Sequence[tuple[int, Tensor]], s: Tensor, t: Tensor) -> None:
    """Tensors of one short chunk each, copied into one padded grid of rows: few operations for many tensors."""
    if not small:
        return
    num_rows = [math.ceil(len(data) / ROW_BYTES) for _, data in small]
    starts = list(itertools.accumulate(num_rows, initial=0))
    grid = torch.zeros(starts[-1] * ROW_BYTES, dtype=torch.uint8, device=s.device)
    for start, (_, data) in zip(starts, small, strict=False):
        grid[start * ROW_BYTES : start * ROW_BYTES + len(data)] = data
    words = grid.view(torch.int64).view(-1, COLUMNS)
    counts = torch.tensor(num_rows, device=s.device)
    row_in_chunk = torch.arange(starts[-1], device=s.device) - torch.tensor(
        starts[:-1], device=s.device
    ).repeat_interleave(counts)
    chunk_of = torch.tensor([chunk for chunk, _ in small], device=s.device).repeat_interleave(counts)
    a, c = (odd_numbers(ROWS, stream, s.device)[row_in_chunk, None] for stream in (0, 1))
    s.index_add_(0, chunk_of, words * a)
    t.index_add_(0, chunk_of, (words >> 32) * c)


class _Words:
    """One tensor as words; `add_chunk` of different chunks may run in different threads."""

    def __init__(self, data: Tensor, first_chunk: int) -> None:
        num_whole = data.numel() // 8
        self.first_chunk = first_chunk
        self.words = data[: num_whole * 8].view(torch.int64)
        self.tail = None
        if data.numel() % 8:
            padded = torch.zeros(8, dtype=torch.uint8, device=data.device)
            padded[: data.numel() % 8] = data[num_whole * 8 :]
            self.tail = padded.view(torch.int64)
        self.num_words = num_whole + (self.tail is not None)
        self.num_chunks = math.ceil(self.num_words / CHUNK_WORDS)
        self.a, self.c = (odd_numbers(ROWS, stream, data.device) for stream in (0, 1))

    def add_chunk(self, chunk: int, s: Tensor, t: Tensor) -> None:
        """Add the rows of one chunk to its column sums in `s` and `t`, both [chunks, COLUMNS]."""
        words = self.words[chunk * CHUNK_WORDS : (chunk + 1) * CHUNK_WORDS]
        sums_s, sums_t = s[self.first_chunk + chunk], t[self.first_chunk + chunk]
        num_rows = words.numel() // COLUMNS
        if num_rows:
            grid = words[: num_rows * COLUMNS].view(num_rows, COLUMNS)
            upper = torch.empty_like(grid[:BLOCK_ROWS])
            for row in range(0, num_rows, BLOCK_ROWS):
                block = grid[row : row + BLOCK_ROWS]
                n = len(block)
                _add_rows(sums_s, block, self.a[row : row + n])
                torch.bitwise_right_shift(block, 32, out=upper[:n])
                _add_rows(sums_t, upper[:n], self.c[row : row + n])
        self._add_words(sums_s, sums_t, num_rows, 0, words[num_rows * COLUMNS :])
        if self.tail is not None and chunk == self.num_chunks - 1:
            row, column = divmod((self.num_words - 1) % CHUNK_WORDS, COLUMNS)
            self._add_words(sums_s, sums_t, row, column, self.tail)

    def _add_words(self, s: Tensor, t: Tensor, row: int, column: int, words: Tensor) -> None:
        if words.numel():
            columns = slice(column, column + words.numel())
            s[columns] += words * self.a[row]
            t[columns] += (words >> 32) * self.c[row]


def _add_rows(sums: Tensor, block: Tensor, weights: Tensor) -> None:
    """sums[k] += Σ_j weights[j] · block[j, k]."""
    if block.device.type == "cpu":
        sums.addmv_(block.t(), weights)
    else:  # no integer matrix products on accelerators
        sums += (block * weights[:, None]).sum(0)
