"""Rollout engines that died under other systems: their consoles' words, with steps after them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollbook.diagnose.finding import Diagnosis
from rollbook.diagnose.readers.table import load
from rollbook.diagnose.tree import diagnose

N = 60
DEAD = (
    "(vLLMHttpServer pid=7133) ERROR 11-02 03:11:09 [core.py:842] EngineCore encountered a fatal error.",
    "\x1b[36m(EngineCore_DP0 pid=41)\x1b[0m vllm.v1.engine.exceptions.EngineDeadError: EngineCore met an issue.",
    "[2026-03-01 02:10:11 TP0] Scheduler hit an exception: Traceback (most recent call last):",
    "Received sigquit from a child process. It usually means the child failed.",
    "Rollout engine 3 is dead, restarting it",
    "Health check failed for rollout engine 3: timed out after 30 s. Killing actor",
    "ray.exceptions.ActorDiedError: The actor died unexpectedly.\n\tclass_name: SGLangEngine\n\tactor_id: 0c1d",
)


def judge(tmp_path: Path, lines: dict[int, str], slow: dict[int, float]) -> Diagnosis:
    """verl's console: steps of 100 s, but for `slow`; a line of another process after the step of its key."""
    text = []
    for step in range(1, N + 1):
        seconds = slow.get(step, 100.0 + step % 3)
        text.append(
            f"step:{step} - critic/score/mean:{0.4 + 0.001 * (step % 7):.4f} - timing_s/step:{seconds:.3f}"
            f" - timing_s/gen:{seconds - 60:.3f} - timing_s/update_actor:50.0"
            f" - training/rollout_probs_diff_mean:{0.005 + 1e-4 * (step % 5):.5f}"
            f" - response_length/mean:{800 + step % 9}"
        )
        text += [lines[step]] if step in lines else []
    (tmp_path / "run.log").write_text("\n".join(text) + "\n")
    return diagnose(load(str(tmp_path / "run.log")))


@pytest.mark.parametrize("line", DEAD)
def test_an_engine_that_stays_away_is_a_finding(line: str, tmp_path: Path) -> None:
    found = judge(tmp_path, {30: line}, dict.fromkeys(range(31, N + 1), 150.0)).findings
    assert [f.rule for f in found] == ["replica_died"]
    assert (found[0].step, found[0].until_step) == (31, None)
    assert "did not come back" in found[0].title


def test_one_that_is_back_after_a_step_is_a_line(tmp_path: Path) -> None:
    diagnosis = judge(tmp_path, {30: DEAD[4]}, {31: 160.0})
    assert diagnosis.verdict == "well"
    [note] = [note for note in diagnosis.notes if "died" in note]
    assert note.startswith("replica 3 died and came back (step 31); it cost 60 s")


def test_three_deaths_are_a_finding_and_lines_of_one_step_are_one(tmp_path: Path) -> None:
    lines = {at: "\n".join(DEAD[:2]) for at in (20, 30, 40)}
    [found] = judge(tmp_path, lines, {21: 160.0, 31: 150.0, 41: 140.0}).findings
    assert found.title == "a rollout engine died 3 times and came back"


@pytest.mark.parametrize(
    "line",
    [
        "ray.exceptions.ActorDiedError: The actor died unexpectedly.\n\tclass_name: RewardLoopWorker\n\tactor_id: 0c1d",
        "Engine 000: Avg prompt throughput: 18250.1 tokens/s, Running: 128 reqs, GPU KV cache usage: 61.2%",
        "Initializing a V1 LLM engine (v0.11.0) with config: model='Qwen/Qwen3-8B'",
        "the engineer said that the engine room is dead quiet",
    ],
)
def test_what_is_no_engine_or_no_death_is_none(line: str, tmp_path: Path) -> None:
    diagnosis = judge(tmp_path, dict.fromkeys((20, 30, 40), line), {})
    assert diagnosis.verdict == "well"
    assert not [note for note in diagnosis.notes if "died" in note]


def test_an_engine_whose_death_ends_the_run_stopped_it(tmp_path: Path) -> None:
    """Its words are the last of the log."""
    end = "Traceback (most recent call last):\nray.exceptions.ActorDiedError: The actor died."
    end += "\n\tclass_name: vLLMHttpServer"
    assert judge(tmp_path, {N: end}, {}).verdict == "run_stopped"
