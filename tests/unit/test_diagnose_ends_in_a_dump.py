"""A log that ends in somebody's look at the stacks: ranks that stand in a collective, with no error, wait for one that
does not come; stacks that a run got over, or that stand elsewhere, tell nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

DUMPS = {
    "faulthandler": (
        "Timeout (0:20:00)!",
        "Thread 0x00007fb1 (most recent call first):",
        '  File "/venv/torch/distributed/distributed_c10d.py", line 4310 in reduce_scatter_tensor',
        '  File "/venv/torch/distributed/fsdp/_runtime_utils.py", line 856 in _reduce_grad',
    ),
    "py-spy": (
        "Process 771: ray::ActorWorker.update_policy",
        'Thread 771 (active): "MainThread"',
        "    all_to_all_single (torch/distributed/distributed_c10d.py:4512)",
        "    dispatch (megatron/core/transformer/moe/token_dispatcher.py:410)",
    ),
    "a watch's, one line a rank": (
        "[watch] stack of rank 2: forward (qwen2/modeling_qwen2.py:98) > _pre_forward_unshard "
        "(torch/distributed/fsdp/_runtime_utils.py:410)",
        "[watch] stack of rank 5: step (trainer/actor.py:77) > all_reduce (torch/distributed/distributed_c10d.py:2810)",
    ),
    "recorder's files": (
        "collective 5121 (ALLGATHER, tp_group) on ranks 0-2: state=started, 912 s",
        "rank 3: last enqueued collective 5120",
    ),
    "torch's analyzer": (
        "Not all ranks joining collective, sequence number: 88",
        "collective: nccl:all_reduce, missing ranks: {5}, input sizes: [[4096]], state: scheduled",
    ),
}
NO_ALARM = ("well", "not_judged")
ELSEWHERE = (
    'Thread 0x7f12 (idle): "MainThread"',
    "    wait (threading.py:359)",
    "    get (queue.py:180)",
    "    generate_sequences (verl/workers/rollout/vllm_rollout.py:301)",
)


def _verdict(tmp_path: Path, *dumps: tuple[int, tuple[str, ...]], num_steps: int = 40) -> str:
    """Args:
    dumps: after which step, and their lines.
    """
    lines = []
    for step in range(1, num_steps + 1):
        lines.append(
            f"(TaskRunner pid=9) step:{step} - critic/rewards/mean:{0.3 + step / 200} - actor/entropy:0.4 - "
            "response_length/mean:700.0 - timing_s/gen:30.0 - timing_s/update_actor:20.0 - timing_s/step:55.0"
        )
        lines += [f"(ActorWorker pid=71) {line}" for after, dump in dumps if after == step for line in dump]
    log = tmp_path / "run.log"
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return diagnose(load(str(log))).verdict


@pytest.mark.parametrize("dump", DUMPS.values(), ids=DUMPS)
def test_a_log_that_ends_with_ranks_in_a_collective_hangs(tmp_path: Path, dump: tuple[str, ...]) -> None:
    assert _verdict(tmp_path, (40, dump)) == "collective_hang"
    assert _verdict(tmp_path, (20, dump)) in NO_ALARM  # it went on


@pytest.mark.parametrize("dump", [DUMPS["faulthandler"], DUMPS["py-spy"]], ids=["faulthandler", "py-spy"])
def test_who_looks_at_the_stacks_again_and_again_also_does_at_the_end(
    tmp_path: Path, dump: tuple[str, ...]
) -> None:
    assert _verdict(tmp_path, (10, dump), (25, dump), (40, dump)) in NO_ALARM


def test_stacks_that_stand_in_no_collective_tell_no_hang_of_one(tmp_path: Path) -> None:
    assert _verdict(tmp_path, (40, ELSEWHERE)) in NO_ALARM


@pytest.mark.parametrize(
    ("place", "verdict"),
    [
        ("torch/distributed/fsdp/_runtime_utils.py:410", "collective_hang"),
        ("ours/unshard.py:3", "run_stopped"),
    ],
)
def test_ranks_that_gather_a_shard_when_the_job_is_killed_hang(
    place: str, verdict: str, tmp_path: Path
) -> None:
    stacks = tuple(
        f"[watch] stack of rank {rank}: forward > _pre_forward_unshard ({place})" for rank in (2, 5)
    )
    killed = "slurmstepd: error: *** JOB 7 ON node-3 CANCELLED AT 2026-05-06T22:00:00 DUE TO TIME LIMIT ***"
    assert _verdict(tmp_path, (40, (*stacks, killed))) == verdict
