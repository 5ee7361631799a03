"""A collective that one rank never entered, in the words of watchdogs, stores and recorders; and errors that others
wait for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

WATCHDOG = (
    "[rank1]:[E] [PG ID 2 PG GUID 3 Rank 1] failure detected by watchdog at work sequence id: 91 PG status: "
    "last enqueued work: 94, last completed work: 90"
)
KEY_ERROR = (
    "Traceback (most recent call last):",
    '  File "/opt/job/reward.py", line 4, in score',
    "KeyError: 'answer'",
)


def _verdict(tmp_path: Path, *said: str, then_steps: int = 0) -> str:
    log = tmp_path / "run.log"
    steps = [
        f"(TaskRunner pid=8) step:{i} - critic/rewards/mean:{0.4 + 0.001 * i} - actor/entropy:0.3 - "
        f"response_length/mean:800.0 - timing_s/gen:60.0 - timing_s/update_actor:40.0 - timing_s/step:120.0"
        for i in range(1, 31 + then_steps)
    ]
    words = (f"(WorkerDict pid=9) {line}" for line in said)
    log.write_text("\n".join([*steps[:30], *words, *steps[30:]]) + "\n", encoding="utf-8")
    return diagnose(load(str(log))).verdict


@pytest.mark.parametrize(
    "words",
    [
        WATCHDOG,
        "[rank0]:[F] Terminating the process after attempting to dump debug info, due to collective timeout",
        "[rank5]:[W] Heartbeat monitor timed out! Process will be terminated after dumping debug info",
        "[rank2]: torch.distributed.DistStoreError: Timed out after 601 seconds waiting for clients. 7/8 joined",
        "[3] is setting up a communicator, but store->get('0') got error: wait timeout after 600000ms",
        "RuntimeError: Rank 5 failed to pass monitoredBarrier in 1800000 ms",
        "[E] EI0002: The wait execution of the Notify register times out",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is at ALLREDUCE, rank 0 at BROADCAST",
        "RuntimeError: update_weights_from_distributed timed out after 600 s",
        "flight recorder: rank 5 has not joined collective 1234 (ALLREDUCE)",
        "[flight recorder] rank 3: last enqueued work: 94, last completed work: 94 (others: 97, 94)",
        "collective ALLGATHER of 63 of 64 ranks: never entered by [5]",
    ],
)
def test_a_rank_that_others_wait_for_is_told_in_any_words(words: str, tmp_path: Path) -> None:
    assert _verdict(tmp_path, words) == "collective_hang"


def test_a_rank_that_came_late_and_was_waited_for_is_no_fault(tmp_path: Path) -> None:
    words = "flight recorder: rank 5 has not joined collective 1234 (ALLREDUCE)"
    assert _verdict(tmp_path, words, then_steps=20) == "not_judged"


def test_ranks_that_join_while_a_job_starts_are_no_fault(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    _verdict(tmp_path, "rank 5 has not joined the process group")
    lines = log.read_text().splitlines()
    words = next(line for line in lines if "joined" in line)
    log.write_text("\n".join([words, *(line for line in lines if line != words)]) + "\n")
    assert diagnose(load(str(log))).findings == ()


def test_a_time_out_that_is_tried_again_ends_nothing(tmp_path: Path) -> None:
    assert _verdict(tmp_path, "update_weights timed out after 60 s, retrying") == "not_judged"


@pytest.mark.parametrize("order", [1, -1])
def test_an_error_of_one_rank_is_told_rather_than_the_wait_of_the_others(order: int, tmp_path: Path) -> None:
    parts = [(WATCHDOG,), KEY_ERROR][::order]
    assert _verdict(tmp_path, *parts[0], *parts[1]) == "run_stopped"


def test_an_error_that_ends_a_wait_is_the_waits(tmp_path: Path) -> None:
    aborted = (*KEY_ERROR[:2], "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1.")
    assert _verdict(tmp_path, WATCHDOG, *aborted) == "collective_hang"
