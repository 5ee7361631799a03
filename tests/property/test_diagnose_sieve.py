"""The lines of a log that hold one of many words are the same however they are found."""

from __future__ import annotations

import os

from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.diagnose.readers.endings import ENDING_BYTES
from rollbook.diagnose.readers.text import BLOCK_BYTES, TROUBLE_BYTES, _Sieve, lines

BYTES = st.binary(max_size=4).map(lambda b: bytes(b"abc|\n\r"[i % 6] for i in b))
WORDS = st.lists(
    st.text("abc|", min_size=1, max_size=4).map(str.encode), min_size=1, max_size=5, unique=True
).filter(lambda words: sum(len(word) == 1 for word in words) <= 1)  # each costs the table 65,536 entries


@settings(max_examples=60, deadline=None)
@given(WORDS, st.lists(BYTES, max_size=20).map(b"".join))
def test_it_finds_the_lines_that_a_plain_search_finds(words: list[bytes], block: bytes) -> None:
    plain = [line for line in block.splitlines() if any(word in line for word in words)]
    assert list(_Sieve(tuple(words)).lines(block)) == plain


def test_lines_of_many_blocks_come_once_and_in_order(tmp_path: os.PathLike[str]) -> None:
    path = tmp_path / "run.log"  # type: ignore[operator]
    noise = b"(WorkerDict pid=81) INFO Engine 000: Avg prompt throughput: 1203.1 tokens/s\n"
    wanted = [f"step:{i} - a/b:1.0" for i in range(8)] + ["(raylet) 1 Workers killed due to memory pressure"]
    path.write_bytes(b"".join(noise * (BLOCK_BYTES // 3 // len(noise)) + w.encode() + b"\n" for w in wanted))
    assert list(lines(path, (b"step:", *TROUBLE_BYTES, *ENDING_BYTES))) == wanted
