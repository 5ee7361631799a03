"""The lines of a log that hold one of many words are the same however they are found."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.diagnose.readers.ending_words import ENDING_BYTES
from rollbook.diagnose.readers.text import BLOCK_BYTES, TROUBLE_BYTES, _Sieve, lines
from rollbook.diagnose.readers.trouble import TroubleWatcher

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


@pytest.mark.parametrize(
    "line",
    [
        "(WorkerDict pid=81) INFO Engine 000: Avg prompt throughput: 1203.1 tokens/s, Running: 64 reqs",
        "[2026-03-01 10:00:00 DP0 TP0] Decode batch. #running-req: 12, #token: 4096, token usage: 0.11, gen throughput",
        "(EngineCore_0 pid=812) INFO 03-01 10:00:00 [block_pool.py:280] Successfully reset prefix cache",
        *(
            f"\x1b[36m({worker} pid=81, ip=10.0.0.4)\x1b[0m {says}"
            for worker in (
                "AgentLoopWorker",
                "vLLMHttpServer",
                "RayWorkerWrapper",
                "EngineCore_DP0",
                "TaskRunner",
            )
            for says in (
                "INFO 11-30 03:11:02 [loggers.py:116] GPU KV cache usage: 34.1%, Prefix cache hit rate: 21.0%",
                "<answer> we factor it, go back to the full sum and recall step 5: 47 </answer>",
            )
        ),
        "INFO:     10.0.0.3:41822 - POST /generate HTTP/1.1 200 OK, by replica 3 of the inference server",
    ],
)
def test_lines_that_serving_writes_all_the_time_are_left_out(line: str) -> None:
    assert not list(_Sieve((*TROUBLE_BYTES, *ENDING_BYTES)).lines(line.encode() + b"\n"))


@pytest.mark.parametrize(
    "name", ["Engine", "engine", "Replica", "replica", "Inference server", "inference server"]
)
@pytest.mark.parametrize(
    "says",
    [
        *(
            f"{{}} vllm-3 {verb}{end}"
            for verb in ("is ", "was ", "has ")
            for end in ("dead", "died", "crashed")
        ),
        *(
            "{} 3 unhealthy",
            "{} rank-3 is gone",
            "Health check failed for {} 3",
            "health check timed out on {} 3",
        ),
        *(
            "Restarted {} 3",
            "restarted the {}",
            "Recovered dead {} 3",
            "Relaunched {} 3",
            "Re-registered {} 3",
        ),
        *("re-registered with {}", "{} 3 is back", "{} 3 back after 12 s", "{} 3 has been restarted"),
        *("{} 3 rejoined", "{} 3 recovered", "{} 3 relaunched", "{} 3 is healthy again"),
        "vllm.v1.engine.exceptions.EngineDeadError: {} core",
        "EngineCore_0 hit: worker died",
        "EngineCore_0 loop encountered a fatal error",
        "EngineCore_0 loop encountered an issue",
        "Scheduler hit an exception: {}",
        "Received sigquit from a child process",
        "class_name: vLLMHttpServer",
    ],
)
def test_every_word_of_an_engine_that_dies_or_comes_back_is_let_through(says: str, name: str) -> None:
    line = says.format(name)
    event = TroubleWatcher().watch(line, 3)
    assert event is None or event.kind in ("engine_died", "engine_back")
    if event is not None:
        assert list(_Sieve(TROUBLE_BYTES).lines(line.encode())) == [line.encode()]


def test_the_line_that_says_in_which_stage_memory_ran_out_is_let_through() -> None:
    line = b"    self.llm.wake_up(tags=['kv_cache'])"
    assert list(_Sieve(TROUBLE_BYTES).lines(line)) == [line]
