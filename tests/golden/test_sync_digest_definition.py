"""The digest against its definition, written out with Python's unbounded integers."""

from __future__ import annotations

import hashlib

import pytest
import torch

from rollbook.sync import digest as digest_module
from rollbook.sync.digest import COLUMNS, ROWS, digest, digests, fold

MASK = (1 << 64) - 1


def splitmix_odd(idx: int, stream: int) -> int:
    z = ((idx + 1 + (stream << 40)) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return (z ^ (z >> 31)) | 1


def mix(x: int) -> int:
    x = ((x ^ (x >> 32)) * 0x9E3779B97F4A7C15) & MASK
    return x ^ (x >> 32)


def reference_digest(data: bytes, kind: str) -> str:
    words = [int.from_bytes(data[i : i + 8].ljust(8, b"\0"), "little") for i in range(0, len(data), 8)]
    sums: dict[tuple[int, int], list[int]] = {}
    for i, word in enumerate(words):
        chunk, in_chunk = divmod(i, ROWS * COLUMNS)
        row, column = divmod(in_chunk, COLUMNS)
        upper = (word >> 32) - ((word >> 63) << 32)  # arithmetic shift: the sign stays
        pair = sums.setdefault((chunk, column), [0, 0])
        pair[0] += splitmix_odd(row, 0) * word
        pair[1] += splitmix_odd(row, 1) * upper
    high = low = 0
    for (chunk, column), (s, t) in sums.items():
        m = mix(s & MASK)
        n = mix((t + m) & MASK)
        high += splitmix_odd(chunk, 4) * splitmix_odd(column, 2) * m
        low += splitmix_odd(chunk, 5) * splitmix_odd(column, 3) * n
    salt = int.from_bytes(hashlib.blake2b(kind.encode(), digest_size=16).digest(), "big")
    return f"{((high & MASK) << 64 | (low & MASK)) ^ salt:032x}"


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 100, 8192, 8195, 65536 + 8, 3 * 65536 + 3])
def test_digest_follows_its_definition_for_every_tail(num_bytes: int) -> None:
    data = torch.randint(
        0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(num_bytes)
    )
    assert digest(data) == reference_digest(bytes(data.tolist()), f"uint8[{num_bytes}]")


def test_digest_of_several_chunks_follows_its_definition() -> None:
    """2 MiB a chunk: this tensor has two whole chunks, 3 rows, 5 words and 3 bytes."""
    num_bytes = 8 * (2 * ROWS * COLUMNS + 3 * COLUMNS + 5) + 3
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    places = torch.randint(0, num_bytes, (500,), generator=torch.Generator().manual_seed(1))
    data[places] = torch.arange(500).to(torch.uint8)
    assert digest(data) == reference_digest(data.numpy().tobytes(), f"uint8[{num_bytes}]")


def test_digest_values_never_change_between_releases() -> None:
    """Trainer and engine may run different releases: these values are part of the protocol."""
    assert digest(torch.arange(6, dtype=torch.float32).reshape(2, 3)) == "943ec62ad2be0cacd729092b85e89e34"
    assert digest(torch.arange(5000, dtype=torch.bfloat16)) == "d790b6e518a8353d12864ca3a4dcb329"
    assert fold({"b": "02", "a": "01"}) == hashlib.blake2b(b"a 01\nb 02", digest_size=16).hexdigest()


def test_threads_do_not_change_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(300_000), torch.randn(7), torch.randn(1_100_000)]
    alone = digests(tensors)
    monkeypatch.setattr(digest_module, "THREADED_BYTES", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert digests(tensors) == alone
