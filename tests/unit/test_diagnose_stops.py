"""A run that stopped on an error leads with it, in our run directories and in verl's console logs; rewards that never
differ are a finding of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose
from rollbook.errors import DataError

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import synthetic_runs


def run_dir(
    tmp_path: Path, events: list[dict[str, Any]], rows: list[dict[str, float]] | None = None
) -> Diagnosis:
    folder = tmp_path / "run"
    folder.mkdir()
    lines = [{"at_s": 1.0 + i, "mono_s": 1.0 + i, **event} for i, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rows is not None:
        data = [{"step": step, "data": row} for step, row in enumerate(rows)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in data))
    return diagnose(load(str(folder)))


def failed(step: int, what: str, remedy: str = "do this") -> list[dict[str, Any]]:
    return [
        {"kind": "run_started"},
        {"kind": "step_failed", "step": step, "error": f"RunError: {what}", "metrics": {}},
        {"kind": "run_failed", "error": what, "remedy": remedy},
    ]


@pytest.mark.parametrize("rows", [None, []], ids=["no file of metrics", "no step"])
def test_a_run_that_died_before_its_first_step_leads_with_its_error(
    rows: list[dict[str, float]] | None, tmp_path: Path
) -> None:
    diagnosis = run_dir(tmp_path, failed(0, "the disk of runs/ is full", "free 3 GiB"), rows)
    assert diagnosis.verdict == "run_stopped"
    assert "the disk of runs/ is full" in diagnosis.findings[0].title
    assert diagnosis.findings[0].action == "free 3 GiB"


@pytest.mark.parametrize(
    ("what", "rule"),
    [
        ("step 0 replaced 64 groups and has 0 of 4", "run_stopped"),  # of what, the log does not say
        ("CUDA out of memory. Tried to allocate 2 GiB", "late_oom_with_length"),
        (
            "version 1 was not published: prove failed on replica 0: 3 tensors did not arrive",
            "refused_publication",
        ),
        ("version 1 was not published: receive failed on replica 0: CUDA out of memory", "oom_in_sync"),
        ("replica 0 did not answer to receive of version 1 within 120 s", "collective_hang"),
        ("no replica gives the trainer's logprobs: replica 0: 0.4 nats apart", "engine_mismatch"),
        ("40 of the last 64 trajectories failed, 39 of them as reward; for example: x", "dead_scorer"),
        (
            "40 of the last 64 trajectories failed, 39 of them as environment; for example: x",
            "dead_sandbox_pool",
        ),
        (
            "step 9 has 2 of 4 groups and lost 70 (buffer.max_refills_per_step is 64): 70 flat (score in all their "
            "members 0: 70); 76 groups were admitted in all",
            "filter_starvation",
        ),
        ("step 0 waited 3600 s for its groups; under way: trajectory 0/0", "buffer_never_fills"),
        ("Timed out waiting for 64 rollouts, only received 59.", "buffer_never_fills"),
        ("only 62 of 64 agent trajectories came; waited until the deadline", "buffer_never_fills"),
        ("timed out waiting for 8 ranks of group 1", "run_stopped"),
        ("the tokenizer timed out on 3 samples", "run_stopped"),
    ],
)
def test_the_words_of_an_error_say_which_rule_it_belongs_to(what: str, rule: str, tmp_path: Path) -> None:
    events = failed(0, what)
    if rule == "oom_in_sync":
        events.insert(1, {"kind": "publication_failed", "weight_version": 1, "error": what})
    diagnosis = run_dir(tmp_path, events)
    assert diagnosis.verdict == rule
    assert any(what[:40] in evidence.says for evidence in diagnosis.findings[0].evidence)


def test_an_error_that_the_run_got_over_is_none(tmp_path: Path) -> None:
    """It was resumed, or more steps came after the failed one."""
    rows = [{"critic/score/mean": 0.3 + 0.01 * i, "timing_s/gen": 10.0} for i in range(6)]
    events = [*failed(2, "the host went away"), {"kind": "run_resumed"}]
    assert run_dir(tmp_path, events, rows).is_well


def console(tmp_path: Path, *lines: str, steps: int = 12) -> Path:
    path = tmp_path / "train.log"
    pre = "\x1b[36m(TaskRunner pid=81)\x1b[0m "
    rows = [f"{pre}step:{i} - critic/score/mean:0.{30 + i} - timing_s/gen:41.2" for i in range(1, steps + 1)]
    path.write_text("\n".join([*rows, *(pre + line for line in lines)]) + "\n")
    return path


TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "/x/main_ppo.py", line 31, in main',
    "ray.exceptions.RayTaskError(AssertionError): ray::TaskRunner.run() (pid=81, ip=10.0.0.3)",
    "AssertionError: only support equal chunk. Got size of DataProto 1023 and chunk 8.",
)


@pytest.mark.parametrize("steps", [0, 12])
def test_a_console_log_that_ends_on_a_traceback_leads_with_its_last_error(steps: int, tmp_path: Path) -> None:
    diagnosis = diagnose(load(str(console(tmp_path, *TRACEBACK, steps=steps))))
    assert (diagnosis.verdict, diagnosis.format) == ("run_stopped", "verl-console")
    assert "only support equal chunk" in diagnosis.findings[0].title


def test_a_traceback_in_the_middle_or_after_the_end_of_the_training_is_none(tmp_path: Path) -> None:
    path = console(tmp_path, *TRACEBACK)
    path.write_text(path.read_text() + "step:13 - critic/score/mean:0.5 - timing_s/gen:41.0\n")
    assert diagnose(load(str(path))).findings == ()
    assert diagnose(load(str(console(tmp_path, "Final validation metrics: {}", *TRACEBACK)))).findings == ()


def test_a_hang_and_an_oom_come_before_the_errors_that_follow_from_them(tmp_path: Path) -> None:
    watchdog = (
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE) ran for 600021 ms"
    )
    died = "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task."
    diagnosis = diagnose(load(str(console(tmp_path, watchdog, TRACEBACK[0], died))))
    assert diagnosis.verdict == "collective_hang"
    assert [finding.rule for finding in diagnosis.findings] == ["collective_hang"]


DYING = {
    "host memory": (
        "(raylet, ip=10.0.0.3) [2026-11-29 03:11:02,114 E 811 811] (raylet) node_manager.cc:3041: 1 Workers (tasks / "
        "actors) killed due to memory pressure (OOM), 0 Workers crashed due to other reasons at node",
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
    ),
    "worker process": (
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.",
        "\tThe actor is dead because its worker process has died. Ray killed this worker",
    ),
    "a worker": ("ray.exceptions.ActorUnavailableError: The actor 88 is unavailable: RPC error",),
    "native code": ("(WorkerDict pid=88) Segmentation fault (core dumped)",),
    "bus error": ("*** SIGBUS received at time=1700000000 on cpu 3 ***", "Bus error (core dumped)"),
    "crashed": ("terminate called after throwing an instance of 'c10::DistBackendError'",),
    "GPU refused": ("RuntimeError: CUDA error: device-side assert triggered",),
    "collective was aborted": (
        "[rank3]:[E ProcessGroupNCCL.cpp:681] To avoid data inconsistency, we are taking the entire process down.",
    ),
    "killed from outside": (
        "run.sh: line 12:  4711 Killed                  python3 -m verl.trainer.main_ppo",
    ),
    "from outside": ("torch.distributed.elastic: failed (exitcode: -9) local_rank: 0 (pid: 88)",),
    "was killed": ("Worker exit type: NODE_OUT_OF_MEMORY. Process exited with exit code 137",),
    "scheduler": (
        "slurmstepd: error: *** JOB 42 ON gpu3 CANCELLED AT 2026-11-29T03:00:00 DUE TO TIME LIMIT ***",
    ),
}


@pytest.mark.parametrize("names", DYING)
@pytest.mark.parametrize("steps", [1, 12])
def test_words_of_a_dying_process_at_the_end_of_a_log_are_a_stop(
    names: str, steps: int, tmp_path: Path
) -> None:
    finding = diagnose(load(str(console(tmp_path, *DYING[names], steps=steps)))).findings[0]
    assert (finding.rule, finding.step) == ("run_stopped", steps)
    assert names in finding.title
    assert finding.action


@pytest.mark.parametrize("names", DYING)
def test_the_same_words_in_the_middle_of_a_log_are_none(names: str, tmp_path: Path) -> None:
    path = console(tmp_path, *DYING[names])
    more = [f"step:{i} - critic/score/mean:0.{30 + i} - timing_s/gen:41.2" for i in range(13, 25)]
    path.write_text(path.read_text() + "\n".join(more) + "\n")
    assert diagnose(load(str(path))).findings == ()


def test_what_a_sandbox_prints_all_the_time_is_no_end_and_what_follows_the_training_neither(
    tmp_path: Path,
) -> None:
    row = "step:{0} - critic/score/mean:0.4{0} - timing_s/gen:41.2\nSegmentation fault (core dumped)\n"
    path = tmp_path / "train.log"
    path.write_text("".join(row.format(i) for i in range(12)))
    assert diagnose(load(str(path))).findings == ()
    done = ("Training Progress: 100%|##########| 12/12", *DYING["killed from outside"])
    assert diagnose(load(str(console(tmp_path, *done)))).findings == ()


def test_a_crash_after_a_crash_that_was_resumed_is_a_stop(tmp_path: Path) -> None:
    path = console(tmp_path, *DYING["native code"], "Setting global step to 12")
    more = [f"step:{i} - critic/score/mean:0.{30 + i} - timing_s/gen:41.2" for i in range(13, 25)]
    path.write_text(path.read_text() + "\n".join([*more, *DYING["native code"]]) + "\n")
    assert diagnose(load(str(path))).verdict == "run_stopped"


@pytest.mark.parametrize(
    "rows",
    [
        "rollout {i}: {{'rollout/raw_reward': 0.5, 'rollout/response_lengths': 90.0}}",
        "{{'loss': 0.1, 'grad_norm': 0.2, 'reward': 0.5, 'completions/mean_length': 80.0}}",
    ],
    ids=["slime", "trl"],
)
def test_every_console_log_can_end_on_a_killed_process(rows: str, tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("".join(rows.format(i=i) + "\n" for i in range(12)) + "Killed\n")
    assert diagnose(load(str(path))).verdict == "run_stopped"


def test_a_cut_last_line_is_said_and_its_last_value_not_believed(tmp_path: Path) -> None:
    path = console(tmp_path, steps=12)
    path.write_text(path.read_text().removesuffix("41.2\n").removesuffix(" - timing_s/gen:")[:-1])
    run = load(str(path))
    assert any("cut short" in note for note in run.notes)
    assert np.isnan(run.values["critic/score/mean"][-1]) or run.num_steps == 11


def test_an_earlier_run_in_the_same_log_keeps_its_end(tmp_path: Path) -> None:
    path = console(tmp_path, *DYING["native code"])
    again = [f"step:{i} - critic/score/mean:0.{40 + i} - timing_s/gen:31.2" for i in range(1, 13)]
    path.write_text(path.read_text() + "\n".join(again) + "\n")
    assert diagnose(load(str(path))).findings == ()
    assert diagnose(load(str(path), run_idx=0)).verdict == "run_stopped"


def test_a_file_that_is_no_log_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing of a run\n")
    with pytest.raises(DataError):
        load(str(tmp_path / "notes.txt"))


def flat_rows(n: int, level: float, **more: float) -> list[tuple[int, dict[str, float]]]:
    names = ("critic/score/mean", "critic/rewards/mean", "critic/score/max", "critic/score/min")
    return [
        (i, {**dict.fromkeys(names, level), "actor/grad_norm": 0.0, "timing_s/gen": 9.0, **more})
        for i in range(n)
    ]


@pytest.mark.parametrize(("level", "rule"), [(0.0, "all_wrong"), (-1.0, "all_wrong"), (1.0, "all_right")])
def test_rewards_that_never_differ_are_all_wrong_or_all_right(
    level: float, rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "exp.jsonl"
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in flat_rows(5, level)))
    assert diagnose(load(str(path))).verdict == rule


def test_a_hard_task_with_a_right_answer_now_and_then_is_not_all_wrong(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "exp.jsonl"
    rows = flat_rows(60, 0.0)
    for _, data in rows:
        if rng.random() < 0.3:
            data |= {"critic/score/mean": 1 / 512, "critic/rewards/mean": 1 / 512, "critic/score/max": 1.0}
            data["actor/grad_norm"] = 0.02
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in rows))
    assert diagnose(load(str(path))).is_well


def test_a_run_that_learned_and_then_stands_at_its_top_is_limited_not_broken(tmp_path: Path) -> None:
    world = synthetic_runs.make("reward_saturates", 3)
    path = synthetic_runs.write_jsonl(world, tmp_path / "exp.jsonl")
    diagnosis = diagnose(load(str(path)))
    assert diagnosis.is_well
    assert "reward_saturates" in [state.name for state in diagnosis.states]
