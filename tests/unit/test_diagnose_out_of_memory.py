"""Memory that runs out is told by the words of whoever asked for it, and its stage by the lines around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

NCCL_WARNS = (
    "[rank1]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error",
    "ncclUnhandledCudaError: Call to CUDA function failed.",
    "Last error:",
)


def _log(tmp_path: Path, *ending: str) -> Path:
    log = tmp_path / "run.log"
    steps = [
        f"(TaskRunner pid=8) step:{i} - critic/rewards/mean:{0.4 + 0.001 * i} - actor/entropy:0.3 - "
        f"response_length/mean:800.0 - timing_s/gen:60.0 - timing_s/update_weights:2.0 - timing_s/step:120.0"
        for i in range(1, 31)
    ]
    log.write_text("\n".join([*steps, *(f"(WorkerDict pid=9) {line}" for line in ending)]) + "\n")
    return log


@pytest.mark.parametrize(
    "words",
    [
        "Failed to CUDA calloc async 2147483648 bytes",
        "Failed to CUDA malloc 536870912 bytes",
        "Cuda failure 2 'out of memory'",
        "resume of weights failed: cuMemCreate out of memory",
        "CUDA driver error: out of memory",
        "cudaError error: 2 (out of memory) in resume",
        "CUresult error 2 (out of memory) file=core.cpp",
    ],
)
def test_memory_that_runs_out_in_other_words_is_of_the_stage_that_is_told_after_it(
    words: str, tmp_path: Path
) -> None:
    """NCCL's and the driver's; nothing before them says where they were."""
    of_sync = diagnose(
        load(str(_log(tmp_path, *NCCL_WARNS, words, "update_weights: bucket 4 is lost, abort")))
    )
    alone = diagnose(load(str(_log(tmp_path, *NCCL_WARNS, words))))
    assert (of_sync.verdict, alone.verdict) == ("oom_in_sync", "late_oom_with_length")


def test_a_stage_that_was_told_before_stands(tmp_path: Path) -> None:
    ending = (
        'File "engine.py", line 4, in update_actor',
        "Failed to CUDA calloc 99 bytes",
        "update_weights: abort",
    )
    assert diagnose(load(str(_log(tmp_path, *ending)))).verdict == "late_oom_with_length"


@pytest.mark.parametrize(
    ("before", "verdict"),
    [
        ("update_weights started", "oom_in_sync"),
        ("update_weights done, 3.1 s", "late_oom_with_length"),
        ("[worker 2] sync_weights of version 30 took 2.2 s", "late_oom_with_length"),
    ],
)
def test_a_hand_over_that_was_done_ran_out_of_nothing(before: str, verdict: str, tmp_path: Path) -> None:
    """Said twice, as every step says it."""
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    log = _log(tmp_path, before, before, "Traceback (most recent call last):", error)
    assert diagnose(load(str(log))).verdict == verdict


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("_move_model_to_vllm", "oom_in_sync"),
        ("push_params_to_engine", "oom_in_sync"),
        ("broadcast_rollout_weights", "oom_in_sync"),
        ("move_batch_to_device", "late_oom_with_length"),
        ("load_model", "late_oom_with_length"),
    ],
)
def test_a_function_that_hands_weights_to_an_engine_is_known_by_the_words_of_its_name(
    name: str, verdict: str, tmp_path: Path
) -> None:
    frames = f'File "vllm_trainer.py", line 4, in {name}', 'File "zero.py", line 9, in gather'
    error = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    log = _log(tmp_path, "Traceback (most recent call last):", *frames, error)
    assert diagnose(load(str(log))).verdict == verdict


@pytest.mark.parametrize(
    "words",
    [
        "[torch_memory_saver.cpp] cuMemCreate CUDA_ERROR_OUT_OF_MEMORY (may not be an issue e.g. torch will retry)",
        "[allocator] CUDA out of memory on the first attempt, will free its cache and retry",
        "graph capture: CUDA out of memory, falling back to eager mode",
    ],
)
def test_an_allocation_that_is_asked_for_again_is_no_out_of_memory(words: str, tmp_path: Path) -> None:
    run = load(str(_log(tmp_path, words, "wake_up took 1.9 s")))
    assert run.events == []
    assert diagnose(run).findings == ()
